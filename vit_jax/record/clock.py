"""How a run uses its time: images per second, model FLOPs utilization (MFU), time left, goodput.

The train job makes a `Clock` for each start of a run, and enters a `phase` around everything that is not a step; the
training loop enters the phases of data and compilation. A hook calls `tick` after each step, and `take_rates` and
`goodput` when it logs. The clock measures times of the host. Steps are dispatched ahead of the device, so the time of
a single `tick` can differ from that of the device; over a window of steps the times of host and device agree.

MFU is defined as in PaLM (arXiv 2204.02311, Appendix B): the model's FLOPs without recomputation, divided by the FLOPs
that the devices can compute in the same time.

With every row of training metrics and every checkpoint, a start writes its seconds by phase (`Goodput`) as an event
`goodput`. Summaries and reports read these events: `sum_starts` returns how a run used its time over all its starts.
`find_lost` returns the lost work: all work after the step from which the next start resumed. The record has neither
the time between the last event and a kill nor the time between starts, so the sums lack these times.
"""
from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from vit_jax.record import machine
from vit_jax.record.reader import Event

STEP, LOST = 'step', 'lost'
"""Phases without a `with` statement: time outside of all other phases, and steps that a later start repeats."""
TRAINING = (STEP, 'data_wait')  # phases of the speed: waiting for data slows training down, evaluating interrupts it
ONCE = ('startup', 'compile', 'restore', 'local_restore')  # phases that occur only at the start of a process

# Dense bf16 FLOP/s of one jax device, for the first pattern that matches a part of the lower-case `device_kind`.
_PEAK_FLOPS = (
  (r'tpu ?v2', 22.5e12),            # Cloud TPU docs, v2: 45e12 a chip of two cores; a device is a core
  (r'tpu ?v3', 61.5e12),            # Cloud TPU docs, v3: 123e12 a chip of two cores; a device is a core
  (r'tpu ?v4 ?(lite|i)', 138e12),   # Jouppi et al. 2021, "Ten lessons", Table 1
  (r'tpu ?v4', 275e12),             # Cloud TPU docs, v4
  (r'tpu ?v5 ?(lite|e)', 197e12),   # Cloud TPU docs, v5e
  (r'tpu ?v5', 459e12),             # Cloud TPU docs, v5p
  (r'tpu ?v6', 918e12),             # Cloud TPU docs, v6e
  (r'a100', 312e12),                # NVIDIA A100 datasheet, without sparsity
  (r'h100 pcie', 756e12),           # NVIDIA H100 datasheet, PCIe, half of the figure with sparsity
  (r'h100 nvl', 835e12),            # NVIDIA H100 NVL datasheet, half of the figure with sparsity
  (r'h[12]00', 989e12),             # NVIDIA H100 SXM and H200 datasheets, half of the figure with sparsity
)


def find_peak_flops(device_kind: str, num_devices: int) -> float | None:
  """Returns the peak bf16 FLOP/s of all devices together, or None for a kind that is not in the table.

  `device_kind` is `jax.Device.device_kind`, such as 'TPU v3' or 'NVIDIA H200'.
  """
  return next((flops * num_devices for pattern, flops in _PEAK_FLOPS if re.search(pattern, device_kind.lower())), None)


class Rates(NamedTuple):
  """Speed over a window: images/s, seconds per step, and MFU (None if the peak is unknown)."""
  images_per_s: float
  step_s: float
  mfu: float | None


class Goodput(NamedTuple):
  """Seconds by phase, which add up to `total_s`. `fraction` is the share of the phase `step`.

  processor_s: processor seconds of the process and of its child processes that have ended; None = not known.
  training_processor_s: of the process alone, in `TRAINING` phases after the first step; None = not known.
  """
  seconds: dict[str, float]
  total_s: float
  fraction: float
  processor_s: float | None = None
  training_processor_s: float | None = None


class _Repeats(NamedTuple):
  """How often a phase was entered, and the seconds inside: the first time and in total. Those before step 1 count 0."""
  first_s: float
  num_times: int
  total_s: float


class Clock:
  """Sums the seconds of named phases; time outside of all phases is step time. Only the main thread uses it.

  Args:
    images_per_step: the global batch size.
    flops_per_step: of the model on one global batch, forward and backward; 0 = unknown.
    peak_flops: FLOP/s of all devices together, from `find_peak_flops`; None = unknown.
    now: a monotonic clock, in seconds.
    processor: returns the processor seconds of this process so far, of all its threads.
  """

  def __init__(self, images_per_step: int, flops_per_step: float, peak_flops: float | None, *,
               now: Callable[[], float] = time.monotonic, processor: Callable[[], float] = time.process_time) -> None:
    self._images_per_step, self._flops_per_step, self._peak_flops = images_per_step, flops_per_step, peak_flops
    self._now, self._processor = now, processor
    self._seconds: dict[str, float] = {STEP: 0.}  # by phase
    self._open: list[str] = []  # phases that were entered and not left, the innermost last
    self._counted_until_s, self._processor_until_s = now(), processor()
    self._training_processor_s = 0.
    self._num_steps = 0
    self._repeats: dict[str, _Repeats] = {}  # by phase
    self._first_tick = (0, 0.)  # number of steps and `_repeating_s` at the first tick; the time before is warm-up
    self._last_rates = (0, 0.)  # number of steps and training seconds at the last call of `take_rates`

  @contextlib.contextmanager
  def phase(self, name: str) -> Iterator[None]:
    """Adds the time inside to the phase `name`; the time of a nested phase does not count for the outer one.

    Usual names: startup, compile, restore, data_wait, evaluate, checkpoint.
    """
    if name in (STEP, LOST):
      raise ValueError(f'phase {name!r} is what the clock derives itself; choose another name')
    self._advance()
    before_s = self._seconds.get(name, 0.)
    self._open.append(name)
    try:
      yield
    finally:
      self._advance()
      self._open.pop()
      spent_s = (self._seconds.get(name, 0.) - before_s) if self._num_steps else 0.
      earlier = self._repeats.get(name, _Repeats(spent_s, 0, 0.))
      self._repeats[name] = _Repeats(earlier.first_s, earlier.num_times + 1, earlier.total_s + spent_s)

  def charge(self, name: str, seconds: float) -> None:
    """Adds seconds of a phase that ended before this clock was made, such as `startup`."""
    self._seconds[name] = self._seconds.get(name, 0.) + seconds

  def tick(self) -> None:
    """Counts a finished (or dispatched) step. The first call is a warm-up and does not count for the speed."""
    if not self._num_steps:
      self._first_tick = (1, self._repeating_s())
      self._last_rates = (1, self._training_s())
    self._num_steps += 1

  def take_rates(self) -> Rates | None:
    """Returns the speed in `TRAINING` phases since the last call, or the first tick; None if there was no step."""
    steps_before, training_before_s = self._last_rates
    training_s = self._training_s()
    num_steps = self._num_steps - steps_before
    if num_steps <= 0 or training_s <= training_before_s:
      return None
    self._last_rates = (self._num_steps, training_s)
    step_s = (training_s - training_before_s) / num_steps
    mfu = self._flops_per_step / step_s / self._peak_flops if self._flops_per_step and self._peak_flops else None
    return Rates(self._images_per_step / step_s, step_s, mfu)

  def time_left_s(self, steps_left: int) -> float | None:
    """Returns the seconds for `steps_left` more steps with their evaluations and checkpoints; None = not known yet.

    The first evaluation compiles, and the first checkpoint imports a library. Once a phase has occurred again, the
    first time counts as no more than the mean of the later times.
    """
    repeats = [times for name, times in self._repeats.items() if times.num_times > 1 and name not in ONCE]
    excess_s = sum(max(0., first_s - (total_s - first_s) / (num_times - 1)) for first_s, num_times, total_s in repeats)
    first_step, first_s = self._first_tick
    num_steps, seconds = self._num_steps - first_step, self._repeating_s() - first_s - excess_s
    return steps_left * seconds / num_steps if num_steps > 0 else None

  def goodput(self) -> Goodput:
    """Returns the seconds of this process by phase so far, without `LOST`, which `sum_starts` computes later."""
    self._advance()
    total_s = sum(self._seconds.values())
    fraction = self._seconds[STEP] / total_s if total_s > 0 else 0.
    return Goodput(dict(self._seconds), total_s, fraction, machine.processor_s(), round(self._training_processor_s, 2))

  def training(self) -> tuple[float, float]:
    """Returns the seconds in `TRAINING` phases so far, and the seconds of waiting for data alone."""
    return self._training_s(), self._seconds.get('data_wait', 0.)

  def _advance(self) -> None:
    """Adds the time since the last call to the innermost open phase."""
    now_s, processor_s = self._now(), self._processor()
    name = self._open[-1] if self._open else STEP
    self._seconds[name] = self._seconds.get(name, 0.) + now_s - self._counted_until_s
    if name in TRAINING and self._num_steps:
      self._training_processor_s += processor_s - self._processor_until_s
    self._counted_until_s, self._processor_until_s = now_s, processor_s

  def _repeating_s(self) -> float:
    """Returns the seconds of all phases except `ONCE`."""
    self._advance()
    return sum(seconds for name, seconds in self._seconds.items() if name not in ONCE)

  def _training_s(self) -> float:
    self._advance()
    return sum(self._seconds.get(name, 0.) for name in TRAINING)


class Lost(NamedTuple):
  """Number of steps that have to be repeated, and the seconds spent on these steps."""
  steps: int
  seconds: float


class _Start(NamedTuple):
  """The events of one start of a run: the event `start`, and the events `goodput` that follow it."""
  begin: Event
  goodput: list[Event]

  def last(self, name: str) -> float | None:
    """Returns the number with this name in the last event `goodput`; None if the event has no such number."""
    value = self.goodput[-1].get(name) if self.goodput else None
    return None if value is None else _number(value)

  def seconds(self, until: float) -> dict[str, float]:
    """Returns the seconds by phase; the seconds of work after step `until` are in the phase `LOST`."""
    total = _seconds(self.goodput[-1]) if self.goodput else {}
    up_to_step = [event for event in self.goodput if _number(event.get('step')) <= until]
    at_step = _seconds(up_to_step[-1]) if up_to_step else {}
    valid = {name: seconds if name in ONCE else at_step.get(name, 0.) for name, seconds in total.items()}
    lost_s = sum(total.values()) - sum(valid.values())
    return {**valid, LOST: lost_s} if lost_s > 0 else valid


def _starts(events: Sequence[Event]) -> list[_Start]:
  """Returns the events of each start, in order."""
  starts: list[_Start] = []
  for event in events:
    if event['event'] == 'start':
      starts.append(_Start(event, []))
    elif event['event'] == 'goodput' and starts:
      starts[-1].goodput.append(event)
  return starts


def sum_starts(events: Sequence[Event]) -> Goodput:
  """Returns the seconds by phase and the processor seconds over all starts of a run.

  The phases `ONCE` never count as lost work. Processor seconds are None if one of the starts did not record them. Of
  the events of a record, `start` (with `resumed_from`) and `goodput` (with `step` and `seconds`) are used.
  """
  def processor_s(name: str) -> float | None:
    values = [start.last(name) for start in starts]
    return round(sum(filter(None, values)), 2) if values and None not in values else None

  starts, seconds_by_phase = _starts(events), dict[str, float]()
  until = math.inf  # the last step that no later start repeated
  for start in reversed(starts):
    for name, seconds in start.seconds(until).items():
      seconds_by_phase[name] = seconds_by_phase.get(name, 0.) + seconds
    until = min(until, _number(start.begin.get('resumed_from')))
  total_s = sum(seconds_by_phase.values())
  return Goodput(seconds_by_phase, total_s, seconds_by_phase.get(STEP, 0.) / total_s if total_s > 0 else 0.,
                 processor_s('processor_s'), processor_s('training_processor_s'))


def count_starts(events: Sequence[Event]) -> int:
  """Returns how often a run was started or resumed."""
  return len(_starts(events))


def device_s(events: Sequence[Event]) -> float:
  """Returns the device-seconds of a run: the seconds of each start times its number of devices, summed."""
  return sum((start.last('total_s') or 0.) * _number(start.begin.get('devices')) for start in _starts(events))


def find_lost(events: Sequence[Event], *, resumed_from: int) -> Lost:
  """Returns the work of the last start in `events` that is lost if the next start resumes from step `resumed_from`.

  Work after the last event `goodput` does not count, as the record has no time of it.
  """
  starts = _starts(events)
  if not starts:
    return Lost(0, 0.)
  last_step = max((int(_number(event.get('step'))) for event in starts[-1].goodput), default=0)
  return Lost(max(last_step - resumed_from, 0), starts[-1].seconds(resumed_from).get(LOST, 0.))


def _seconds(event: Event) -> dict[str, float]:
  """Returns the seconds by phase of an event `goodput`; {} if the event has none."""
  by_phase = event.get('seconds')
  return {str(name): _number(value) for name, value in by_phase.items()} if isinstance(by_phase, Mapping) else {}


def _number(value: object) -> float:
  """Returns a finite number unchanged, and 0 for anything else."""
  is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
  return float(value) if is_number else 0.  # type: ignore[arg-type]
