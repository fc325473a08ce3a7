"""Finds the host that the others wait for, in a run of several processes.

All devices end a step together, so a step takes the same time on every host. Hosts differ in the time from the arrival
of the metrics of a step to the launch of the next step, here called the ready time. It is short on a fast host. On a
slow host, which waits for data or does other work, it is long, and the devices of all hosts wait.

Once per interval of the log, between two steps, a program on all devices gathers the mean ready times
(`gather_by_devices`). Nothing waits for it: the result is read two steps later. Process 0 then writes an event `hosts`
with the times of all hosts, and warns of a late one. The train job makes a `HostTimes`; reports use `sentences`.
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
from vit_jax.record.clock import Clock
from vit_jax.record.reader import Event
from vit_jax.record.writer import Writer
from vit_jax.train.loop import Done, Hook
from vit_jax.train.state import Packed, StepFn, TrainState

LATE = 0.05
"""A host is late if its ready time exceeds the median of the others by this share of the step time, or more."""
LEAST_STEPS = 8  # in a mean; if the interval of the log is shorter, several intervals become one
log = logging.getLogger('vit_jax.train')


class _Gathered(NamedTuple):
  """Means over `num_steps` steps up to `step`: the step time of this process, and the ready times of all, `[hosts]`."""
  step: int
  num_steps: int
  step_s: float
  ready_s: Any


class HostTimes(Hook):
  """Measures and gathers the ready times of all hosts. It must be the first hook; with one process it does nothing.

  Args:
    clock: of the run. Only its training time counts, without evaluations and checkpoints.
    writer: of the record of the run.
    log_every: steps of an interval.
    gather: maps a number of this process to the array of the numbers of all, `[hosts]`; None = there is one host.
  """

  def __init__(self, clock: Clock, writer: Writer, *, log_every: int, gather: Callable[[float], Any] | None) -> None:
    self._clock, self._writer, self._log_every, self._gather = clock, writer, log_every, gather
    self._arrived_s: float | None = None  # when the last metrics arrived; None = not since the last launch
    self._launched_s = 0.  # when the last step was launched
    self._num_steps, self._step_s, self._ready_s = 0, 0., 0.  # sums since the last gathering
    self._due = 0  # the step after which times are to be gathered; 0 = none
    self._gathered: _Gathered | None = None  # not read yet
    self._num_intervals, self._num_late = 0, collections.Counter[int]()  # the second by host

  def timed(self, step_fn: StepFn) -> StepFn:
    """Returns `step_fn` with the measurements before each call; with one process `step_fn` itself."""
    def call(state: TrainState, batch: Batch) -> tuple[TrainState, Packed]:
      assert self._gather is not None
      now_s, _ = self._clock.training()
      if self._arrived_s is not None:
        self._num_steps += 1
        self._step_s += now_s - self._launched_s
        self._ready_s += now_s - self._arrived_s
      if self._due and self._num_steps >= LEAST_STEPS:  # right before a launch: all processes keep the same order
        self._gathered = _Gathered(self._due, self._num_steps, self._step_s / self._num_steps,
                                   self._gather(self._ready_s / self._num_steps))
        self._num_steps, self._step_s, self._ready_s = 0, 0., 0.
      self._launched_s, self._arrived_s, self._due = now_s, None, 0
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
      self._due = done.step

  def _record(self, times: _Gathered, ready_s: Sequence[float]) -> None:
    """Records the times of all hosts, and warns of a late host: in its first, 2nd, 4th, 8th, … late interval."""
    host, late_s = find_late(ready_s, times.step_s)
    self._writer.event('hosts', step=times.step, steps=times.num_steps, step_s=float(f'{times.step_s:.4g}'),
                       ready_s=[float(f'{seconds:.4g}') for seconds in ready_s],
                       slowest=host, late_s=float(f'{late_s:.4g}'))
    self._num_intervals += 1
    if not late_s:
      return
    self._num_late[host] += 1
    num = self._num_late[host]
    if num & (num - 1) == 0:  # a power of two
      log.warning('Host %d is late at step %s, in %d of %d intervals: it launches a step %s after the others, of %s '
                  'that a step takes.\nIts own log says whether it waits for data. To see its steps in a profile, '
                  'start the run again with --config.train.profile_port=PORT.', host, f'{times.step:,}', num,
                  self._num_intervals, _seconds(late_s), _seconds(times.step_s))


def find_late(ready_s: Sequence[float], step_s: float) -> tuple[int, float]:
  """Returns the host that is ready last, and the seconds by which it is later than the median of the others.

  The seconds are 0 if they are less than `LATE` of a step, which takes `step_s`.
  """
  host = max(range(len(ready_s)), key=ready_s.__getitem__)
  late_s = ready_s[host] - statistics.median(seconds for i, seconds in enumerate(ready_s) if i != host)
  return host, late_s if late_s >= LATE * step_s else 0.


def gather_by_devices() -> Callable[[float], jax.Array] | None:
  """Returns a function that gathers a number of each process as `[hosts]`, without waiting; None with one process."""
  if jax.process_count() == 1:
    return None
  mesh = Mesh(np.array(jax.devices()), ('device',))
  split, everywhere = NamedSharding(mesh, PartitionSpec('device')), NamedSharding(mesh, PartitionSpec())
  processes = [device.process_index for device in jax.devices()]
  firsts = np.array([processes.index(process) for process in range(jax.process_count())])
  select = jax.jit(lambda x: x[firsts], out_shardings=everywhere)  # the number of the first device of each process

  def gather(number: float) -> jax.Array:
    local = [jax.device_put(np.full(1, number, np.float32), device) for device in jax.local_devices()]
    return select(jax.make_array_from_single_device_arrays((mesh.size,), split, local))
  return gather


def sentences(events: Sequence[Event]) -> list[str]:
  """Returns a sentence for each host that was late, from the events of a record."""
  intervals = [event for event in events if event.get('event') == 'hosts']
  late: dict[int, list[float]] = {}
  for event in intervals:
    host, late_s = event.get('slowest'), event.get('late_s')
    if isinstance(host, int) and isinstance(late_s, int | float) and late_s > 0:
      late.setdefault(host, []).append(late_s)
  return [f'Host {host} was late in {len(late_s)} of {len(intervals)} intervals: it launched a step '
          f'{_seconds(statistics.fmean(late_s))} after the others on average.' for host, late_s in sorted(late.items())]


def _seconds(value: float) -> str:
  """Returns text such as '1.25 s' or '30 ms'."""
  return f'{value:.3g} s' if value >= 0.9995 else f'{1000 * value:.3g} ms'
