"""Finds the host that a synchronous step waits for.

All devices end a step together, so its wall time is the same on every host. What differs is when a host is ready to
launch the next step: after the metrics of a step arrive, a fast host is ready at once and then waits for its devices; a
slow one, which waits for data or does other work, lets all devices wait. At the interval of the log the processes
gather the mean of this time, one number each, between two steps; nothing waits for the result, which is read when the
step after it has ended. If no host is late, the time of a step is that of the devices.
"""
from __future__ import annotations

import collections
import logging
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vit_jax.core.types import Batch
from vit_jax.record.clock import Clock
from vit_jax.record.reader import Event
from vit_jax.record.writer import Writer
from vit_jax.train.loop import Done, Hook
from vit_jax.train.state import Packed, TrainState

LATE = 0.05
"""A host is late if it is ready later than the median of the others by this share of the step, or more."""
LEAST_STEPS = 8
"""Steps whose means are compared; where the log has a shorter interval, several intervals are one."""
StepFn = Callable[[TrainState, Batch], tuple[TrainState, Packed]]
log = logging.getLogger('vit_jax.train')


class HostTimes(Hook):
  """A hook of every process: measures and gathers the times of the hosts. It must be the first hook.

  Process 0 writes an event `hosts` for each interval and names a late host. With one process it does nothing.

  Args:
    clock: of the run; its evaluations and checkpoints do not count.
    writer: of its record.
    log_every: steps of an interval.
    gather: from a number of this process to an array of those of all, `[hosts]`; None = there is one host.
  """

  def __init__(self, clock: Clock, writer: Writer, *, log_every: int, gather: Callable[[float], Any] | None) -> None:
    self._clock, self._writer, self._log_every, self._gather = clock, writer, log_every, gather
    self._free_s: float | None = None  # when the last metrics came, if they came after the last launch
    self._steps, self._step_s, self._ready_s = 0, 0., 0.
    self._launched_s, self._due = 0., 0
    self._gathered: tuple[int, int, float, Any] | None = None  # the last step, their number and mean time, numbers
    self._num, self._num_late = 0, collections.Counter[int]()

  def timed(self, step_fn: StepFn) -> StepFn:
    """Returns `step_fn`, before whose calls the times are measured and gathered; with one process `step_fn` itself.

    A process that cannot launch its next step must not gather: the others launch that step first.
    """
    def call(state: TrainState, batch: Batch) -> tuple[TrainState, Packed]:
      assert self._gather is not None
      now_s, _ = self._clock.training()
      if self._free_s is not None:
        self._steps += 1
        self._step_s += now_s - self._launched_s
        self._ready_s += now_s - self._free_s
      if self._due and self._steps >= LEAST_STEPS:
        self._gathered = (self._due, self._steps, self._step_s / self._steps, self._gather(self._ready_s / self._steps))
        self._steps, self._step_s, self._ready_s = 0, 0., 0.
      self._launched_s, self._free_s, self._due = now_s, None, 0
      return step_fn(state, batch)
    return call if self._gather else step_fn

  def on_metrics(self, done: Done) -> None:
    """Notes that the metrics of a step have arrived; reads what was gathered before it."""
    self._free_s, _ = self._clock.training()
    if self._gathered and done.step >= self._gathered[0] + 2:
      step, steps, step_s, ready_s = self._gathered
      self._gathered = None
      if jax.process_index() == 0:
        self._record(step, steps, step_s, np.asarray(ready_s).tolist())
    if done.step % self._log_every == 0:
      self._due = done.step

  def _record(self, step: int, steps: int, step_s: float, ready_s: Sequence[float]) -> None:
    """Records the times of all hosts, and names the one that is late: in its first, 2nd, 4th, 8th, … interval."""
    host, late_s = find_late(ready_s, step_s)
    self._writer.event('hosts', step=step, steps=steps, step_s=float(f'{step_s:.4g}'),
                       ready_s=[float(f'{seconds:.4g}') for seconds in ready_s],
                       slowest=host, late_s=float(f'{late_s:.4g}'))
    self._num += 1
    self._num_late[host] += late_s > 0
    num = self._num_late[host]
    if late_s and num & (num - 1) == 0:
      log.warning('Host %d is late at step %s, in %d of %d intervals: it launches a step %s after the others, of %s '
                  'that a step takes.\nIts own log says whether it waits for data. To see its steps in a profile, '
                  'start the run again with --config.train.profile_port=PORT.', host, f'{step:,}', num, self._num,
                  _seconds(late_s), _seconds(step_s))


def find_late(ready_s: Sequence[float], step_s: float) -> tuple[int, float]:
  """Returns the host that is ready last, and by how many seconds it is later than the median of the others.

  0. if this is less than `LATE` of a step of `step_s`.
  """
  host = max(range(len(ready_s)), key=ready_s.__getitem__)
  late_s = ready_s[host] - statistics.median(seconds for i, seconds in enumerate(ready_s) if i != host)
  return host, late_s if late_s >= LATE * step_s else 0.


def gather_by_devices() -> Callable[[float], jax.Array] | None:
  """Returns what starts to gather numbers by a program on all devices; None with one process."""
  if jax.process_count() == 1:
    return None
  mesh = Mesh(np.array(jax.devices()), ('device',))
  split, everywhere = NamedSharding(mesh, PartitionSpec('device')), NamedSharding(mesh, PartitionSpec())
  processes = [device.process_index for device in jax.devices()]
  firsts = np.array([processes.index(process) for process in range(jax.process_count())])
  one_a_process = jax.jit(lambda x: x[firsts], out_shardings=everywhere)

  def gather(number: float) -> jax.Array:
    local = [jax.device_put(np.full(1, number, np.float32), device) for device in jax.local_devices()]
    return one_a_process(jax.make_array_from_single_device_arrays((mesh.size,), split, local))
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
  return f'{value:.3g} s' if value >= 0.9995 else f'{1000 * value:.3g} ms'
