"""How a run uses its time: images per second, model FLOPs utilization (MFU), time left, goodput.

The train job makes a `Clock` for each start, and enters a `phase` around everything that is not a step; the training
loop does so for data and compilation. A hook calls `tick` after each step, and reads `rates` and `goodput` when it
logs. The functions below the clock read the events of a record, for summaries and reports.

The clock uses only host time and counts. Steps are dispatched ahead of the device, so a single `tick` says little about
the device's time; over a window of steps the times of host and device agree.

MFU as in PaLM (arXiv 2204.02311, Appendix B): the model's FLOPs without recomputation, divided by the FLOPs that the
devices can compute in the same time.

Each start of a run writes its seconds by phase (`Goodput`) with every row of training metrics and with every
checkpoint, as events `goodput`. `sum_starts` computes from them how the run used its time over all its starts, and
`find_lost` the time lost by an interruption. Work after the step from which a later start resumed is lost. The sums do
not contain the time between the last event and a kill, nor the time between starts, because these are not in the
record.
"""
from __future__ import annotations

import collections
import contextlib
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from vit_jax.record import machine
from vit_jax.record.reader import Event

STEP = 'step'
LOST = 'lost'
_TRAINING = (STEP, 'data_wait')  # waiting for data slows training down; evaluating only interrupts it
ONCE = ('startup', 'compile', 'restore', 'local_restore')  # not repeated in the time that is left

# Dense bf16 FLOP/s of one jax device; the first pattern that is found in `device_kind` decides.
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

  Args:
    device_kind: `jax.Device.device_kind`, such as 'TPU v3' or 'NVIDIA H200'.
    num_devices: number of devices.
  """
  return next((flops * num_devices for pattern, flops in _PEAK_FLOPS if re.search(pattern, device_kind.lower())), None)


class Rates(NamedTuple):
  """Speed over a window: images/s, seconds per step, and MFU (None if the peak is unknown)."""
  images_per_s: float
  step_s: float
  mfu: float | None


class Goodput(NamedTuple):
  """Seconds by phase, which add up to `total_s`. `fraction` is the share of the phase `step`.

  processor_s: of the process and of those that it has started and that have ended; None = not known.
  training_processor_s: the part of steps and data waits after the first step, without loader processes; likewise.
  """
  seconds: dict[str, float]
  total_s: float
  fraction: float
  processor_s: float | None = None
  training_processor_s: float | None = None


class Clock:
  """Sums the seconds of named phases; time outside of all phases is step time.

  Args:
    images_per_step: the global batch size.
    flops_per_step: of the model on one global batch, forward and backward; 0 = unknown.
    peak_flops: FLOP/s of all devices together, from `find_peak_flops`; None = unknown.
    now: a monotonic clock, in seconds.
    processor: the processor seconds of this process so far, of all its threads.
  """

  def __init__(self, images_per_step: int, flops_per_step: float, peak_flops: float | None, *,
               now: Callable[[], float] = time.monotonic, processor: Callable[[], float] = time.process_time) -> None:
    self._images_per_step, self._flops_per_step, self._peak_flops = images_per_step, flops_per_step, peak_flops
    self._now, self._processor = now, processor
    self._seconds: dict[str, float] = {STEP: 0.}
    self._open: list[str] = []
    self._advanced_until, self._processor_until = now(), processor()
    self._training_processor_s = 0.
    self._steps = 0
    self._phases: dict[str, tuple[float, int, float]] = {}  # seconds of the first time, times, seconds of all
    self._warm = (0, 0.)  # steps and repeating seconds after the first tick; time before it is mostly not repeated
    self._window = (0, 0.)  # steps and training seconds at the last call of `rates`

  @contextlib.contextmanager
  def phase(self, name: str) -> Iterator[None]:
    """Adds the time inside to the phase `name`; the time of a nested phase does not count for the outer one.

    Usual names: startup, compile, restore, data_wait, evaluate, checkpoint.
    """
    if name in (STEP, LOST):
      raise ValueError(f'phase {name!r} is what the clock derives itself; choose another name')
    self._advance()
    before = self._seconds.get(name, 0.)
    self._open.append(name)
    try:
      yield
    finally:
      self._advance()
      self._open.pop()
      first_s, times, total_s = self._phases.get(name, (0., 0, 0.))
      spent_s = (self._seconds.get(name, 0.) - before) if self._steps else 0.
      self._phases[name] = (spent_s if not times else first_s, times + 1, total_s + spent_s)

  def charge(self, name: str, seconds: float) -> None:
    """Adds seconds of a phase that ended before this clock was made, such as `startup`."""
    self._seconds[name] = self._seconds.get(name, 0.) + seconds

  def tick(self) -> None:
    """Counts a finished (or dispatched) step. The first call is a warm-up and does not count for the speed."""
    if not self._steps:
      self._warm, self._window = (1, self._repeating_s()), (1, self._training_s())
    self._steps += 1

  def rates(self) -> Rates | None:
    """Returns the speed since the last call or the first tick; None without a step. Steps and data waits count."""
    training_s = self._training_s()
    steps, seconds = self._steps - self._window[0], training_s - self._window[1]
    if steps <= 0 or seconds <= 0:
      return None
    self._window = (self._steps, training_s)
    step_s, peak = seconds / steps, self._peak_flops if self._flops_per_step else None
    return Rates(self._images_per_step / step_s, step_s, self._flops_per_step / step_s / peak if peak else None)

  def time_left_s(self, steps_left: int) -> float | None:
    """Returns the seconds for `steps_left` more steps with their evaluations and checkpoints; None = not known yet.

    The first evaluation compiles and the first checkpoint imports a library: once there is a second one, the first
    counts like the mean of the others.
    """
    excess_s = sum(max(0., first_s - (total_s - first_s) / (times - 1))
                   for name, (first_s, times, total_s) in self._phases.items() if times > 1 and name not in ONCE)
    steps, seconds = self._steps - self._warm[0], self._repeating_s() - self._warm[1] - excess_s
    return steps_left * seconds / steps if steps > 0 else None

  def goodput(self) -> Goodput:
    """Returns the seconds of this process by phase so far; `sum_starts` computes which were lost later."""
    self._advance()
    seconds = dict(self._seconds)
    total_s = sum(seconds.values())
    return Goodput(seconds, total_s, seconds[STEP] / total_s if total_s > 0 else 0., machine.processor_s(),
                   round(self._training_processor_s, 2))

  def training(self) -> tuple[float, float]:
    """Returns the seconds of steps and data waits so far, and those of the waits alone."""
    return self._training_s(), self._seconds.get('data_wait', 0.)

  def _advance(self) -> None:
    """Adds the time since the last call to the open phase."""
    now, processor = self._now(), self._processor()
    name = self._open[-1] if self._open else STEP
    self._seconds[name] = self._seconds.get(name, 0.) + now - self._advanced_until
    if name in _TRAINING and self._steps:
      self._training_processor_s += processor - self._processor_until
    self._advanced_until, self._processor_until = now, processor

  def _repeating_s(self) -> float:
    """Returns the seconds of everything that the time left repeats."""
    self._advance()
    return sum(s for name, s in self._seconds.items() if name not in ONCE)

  def _training_s(self) -> float:
    self._advance()
    return sum(self._seconds.get(name, 0.) for name in _TRAINING)


class Lost(NamedTuple):
  """Number of updates that have to be repeated, and the seconds spent on them."""
  steps: int
  seconds: float


class _Start(NamedTuple):
  """The events of one start of a run: `start`, and the `goodput` that follow it."""
  begin: Event
  goodput: list[Event]

  def last(self, name: str) -> float | None:
    """Returns the last number with this name; None if there is none."""
    value = self.goodput[-1].get(name) if self.goodput else None
    return None if value is None else _number(value)

  def seconds(self, until: float) -> dict[str, float]:
    """Returns the seconds by phase; work after step `until` is in the phase of lost work."""
    whole = _seconds(self.goodput[-1]) if self.goodput else {}
    kept = next((_seconds(event) for event in reversed(self.goodput) if _number(event.get('step')) <= until), {})
    valid = {name: seconds if name in ONCE else kept.get(name, 0.) for name, seconds in whole.items()}
    lost = sum(whole.values()) - sum(valid.values())
    return {**valid, LOST: lost} if lost > 0 else valid


def _starts(events: Sequence[Event]) -> list[_Start]:
  starts: list[_Start] = []
  for event in events:
    if event['event'] == 'start':
      starts.append(_Start(event, []))
    elif event['event'] == 'goodput' and starts:
      starts[-1].goodput.append(event)
  return starts


def sum_starts(events: Sequence[Event]) -> Goodput:
  """Returns the seconds by phase and the processor seconds over all starts of a run.

  Startup phases are never counted as lost work. Processor seconds that one of the starts did not record are not known.

  Args:
    events: of a record, in order; `start` with `resumed_from`, `goodput` with `step` and `seconds`.
  """
  total, until, starts = collections.Counter[str](), math.inf, _starts(events)  # steps after `until` were lost
  for start in reversed(starts):
    for name, seconds in start.seconds(until).items():
      total[name] += seconds  # type: ignore[assignment]
    until = min(until, _number(start.begin.get('resumed_from')))
  processor = [[start.last(name) for start in starts] for name in ('processor_s', 'training_processor_s')]
  total_s = sum(total.values())
  return Goodput(dict(total), total_s, total[STEP] / total_s if total_s > 0 else 0., *(
      round(sum(filter(None, each)), 2) if each and None not in each else None for each in processor))


def count_starts(events: Sequence[Event]) -> int:
  """Returns the number of processes 0 that a run has had, one after the other."""
  return len(_starts(events))


def device_s(events: Sequence[Event]) -> float:
  """Returns the seconds of all starts, each times its devices."""
  return sum((start.last('total_s') or 0.) * _number(start.begin.get('devices')) for start in _starts(events))


def find_lost(events: Sequence[Event], *, resumed_from: int) -> Lost:
  """Returns the work of the previous start (the end of `events`) that a start from this step loses.

  Steps and seconds are those of its last event `goodput`, which follows the row of metrics of the same step.
  """
  if not (starts := _starts(events)):
    return Lost(0, 0.)
  steps = max((int(_number(event.get('step'))) for event in starts[-1].goodput), default=0) - resumed_from
  return Lost(max(steps, 0), starts[-1].seconds(resumed_from).get(LOST, 0.))


def _seconds(event: Event) -> dict[str, float]:
  by_phase = event.get('seconds')
  return {str(name): _number(value) for name, value in by_phase.items()} if isinstance(by_phase, Mapping) else {}


def _number(value: object) -> float:
  """Returns a finite number unchanged, and 0 for anything else."""
  is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
  return float(value) if is_number else 0.  # type: ignore[arg-type]
