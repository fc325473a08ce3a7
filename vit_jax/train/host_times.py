"""Finds the host that the other hosts wait for, in a run of several processes.

All devices end a step together, so a step takes the same time on every host. Hosts differ in the ready time: the time
from the arrival of the metrics of a step to the launch of the next step. The ready time is short on a fast host. It is
long on a slow host, which waits for data or does other work, and then the devices of all hosts wait.

Once per interval of the log, between two steps, a program on all devices gathers the mean ready times
(`gather_by_devices`). No process waits for this program: the result is read two steps later. Process 0 then writes an
event `hosts` with the times of all hosts, and warns of a late host. The train job passes a `HostTimes` to the loop, and
trains with the step function that `timed` returns. Reports use `sentences`.
"""
from __future__ import annotations

import collections
import logging
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vit_jax.core.types import Batch
from vit_jax.parallel.mesh import replicated
from vit_jax.record.clock import Clock
from vit_jax.record.reader import Event
from vit_jax.record.writer import Writer
from vit_jax.train.loop import Done, Hook
from vit_jax.train.state import Packed, StepFn, TrainState

LATE_SHARE = 0.05
"""A host is late if its ready time exceeds the median of the others by this share of the step time, or more."""
MIN_STEPS = 8  # in a mean; if the interval of the log is shorter, several intervals become one
log = logging.getLogger('vit_jax.train')


class _Gathered(NamedTuple):
  """Means over `num_steps` steps up to `step`: the step time of this process, and the ready times of all hosts."""
  step: int
  num_steps: int
  step_s: float
  ready_s: Any  # [hosts], of NumPy or jax


class HostTimes(Hook):
  """Measures and gathers the ready times of all hosts. It must be the first hook; with one process it does nothing.

  Args:
    clock: of the run. Only the training time counts, without evaluations and checkpoints.
    log_every: steps of an interval.
    gather: maps a number of this process to the array of the numbers of all processes, `[hosts]`; None = one host.
  """

  def __init__(self, clock: Clock, writer: Writer, *, log_every: int, gather: Callable[[float], Any] | None) -> None:
    self._clock, self._writer, self._log_every, self._gather = clock, writer, log_every, gather
    self._arrived_s: float | None = None  # when the last metrics arrived; None = not since the last launch
    self._launched_s = 0.  # when the last step was launched
    self._num_steps, self._step_s, self._ready_s = 0, 0., 0.  # sums since the last gathering
    self._due_step = 0  # the step after which times are to be gathered; 0 = none
    self._gathered: _Gathered | None = None  # times that were gathered and not recorded yet
    self._num_intervals, self._num_late_by_host = 0, collections.Counter[int]()

  def timed(self, step_fn: StepFn) -> StepFn:
    """Returns `step_fn` with the measurements before each call; with one process `step_fn` itself."""
    def call(state: TrainState, batch: Batch) -> tuple[TrainState, Packed]:
      assert self._gather is not None
      now_s, _ = self._clock.training()
      if self._arrived_s is not None:
        self._num_steps += 1
        self._step_s += now_s - self._launched_s
        self._ready_s += now_s - self._arrived_s
      if self._due_step and self._num_steps >= MIN_STEPS:  # before a launch, so that all processes keep the same order
        self._gathered = _Gathered(self._due_step, self._num_steps, self._step_s / self._num_steps,
                                   self._gather(self._ready_s / self._num_steps))
        self._num_steps, self._step_s, self._ready_s = 0, 0., 0.
      self._launched_s, self._arrived_s, self._due_step = now_s, None, 0
      return step_fn(state, batch)
    return call if self._gather else step_fn

  def on_metrics(self, done: Done) -> None:
    """Notes that the metrics of a step have arrived; records the times that were gathered two steps before."""
    self._arrived_s, _ = self._clock.training()
    if self._gathered and done.step >= self._gathered.step + 2:
      gathered, self._gathered = self._gathered, None
      if jax.process_index() == 0:
        self._record(gathered, np.asarray(gathered.ready_s).tolist())
    if done.step % self._log_every == 0:
      self._due_step = done.step

  def _record(self, times: _Gathered, ready_s: Sequence[float]) -> None:
    """Records the times of all hosts, and warns of a late host in the first, 2nd, 4th, 8th, … of its late intervals."""
    host, late_s = find_late(ready_s, times.step_s)
    self._writer.event('hosts', step=times.step, steps=times.num_steps, step_s=float(f'{times.step_s:.4g}'),
                       ready_s=[float(f'{seconds:.4g}') for seconds in ready_s],
                       slowest=host, late_s=float(f'{late_s:.4g}'))
    self._num_intervals += 1
    if not late_s:
      return
    self._num_late_by_host[host] += 1
    num_late = self._num_late_by_host[host]
    if num_late & (num_late - 1) == 0:  # a power of two
      log.warning('Host %d is late at step %s, in %d of %d intervals: it launches a step %s after the others, of %s '
                  'that a step takes.\nIts own log says whether it waits for data. To see its steps in a profile, '
                  'start the run again with --config.train.profile_port=PORT.', host, f'{times.step:,}', num_late,
                  self._num_intervals, _duration(late_s), _duration(times.step_s))


def find_late(ready_s: Sequence[float], step_s: float) -> tuple[int, float]:
  """Returns the host that is ready last, and by how many seconds it is later than the median of the other hosts.

  The seconds are 0 if they are less than the share `LATE_SHARE` of the step time `step_s`.
  """
  host = max(range(len(ready_s)), key=ready_s.__getitem__)
  late_s = ready_s[host] - statistics.median(seconds for i, seconds in enumerate(ready_s) if i != host)
  return host, late_s if late_s >= LATE_SHARE * step_s else 0.


def gather_by_devices() -> Callable[[float], jax.Array] | None:
  """Returns a function that gathers a number of each process as `[hosts]`, without waiting; None with one process."""
  if jax.process_count() == 1:
    return None
  mesh = Mesh(np.array(jax.devices()), ('device',))
  by_device = NamedSharding(mesh, PartitionSpec('device'))
  processes = [device.process_index for device in jax.devices()]
  first_devices = np.array([processes.index(process) for process in range(jax.process_count())])  # of each process
  select = jax.jit(lambda numbers: numbers[first_devices], out_shardings=replicated(mesh))

  def gather(number: float) -> jax.Array:
    local = [jax.device_put(np.full(1, number, np.float32), device) for device in jax.local_devices()]
    return select(jax.make_array_from_single_device_arrays((mesh.size,), by_device, local))
  return gather


def sentences(events: Sequence[Event]) -> list[str]:
  """Returns a sentence for each host that was late, from the events of a record."""
  intervals = [event for event in events if event.get('event') == 'hosts']
  late_s_by_host: dict[int, list[float]] = {}
  for event in intervals:
    host, late_s = event.get('slowest'), event.get('late_s')
    if isinstance(host, int) and isinstance(late_s, int | float) and late_s > 0:
      late_s_by_host.setdefault(host, []).append(late_s)
  return [f'Host {host} was late in {len(times_s)} of {len(intervals)} intervals: it launched a step '
          f'{_duration(statistics.fmean(times_s))} after the others on average.'
          for host, times_s in sorted(late_s_by_host.items())]


def _duration(seconds: float) -> str:
  """Returns text such as '1.25 s' or '30 ms'."""
  return f'{seconds:.3g} s' if seconds >= 0.9995 else f'{1000 * seconds:.3g} ms'
