"""Finds the host that a synchronous step waits for.

All devices end a step together, so its wall time is the same on every host. What differs is when a host is ready to
launch the next step: after the metrics of a step arrive, a fast host is ready at once and then waits for its devices; a
slow one lets all devices wait. Each host measures this time, and how much of it was waiting for data. At the interval
of the log, hosts put their means on the board (`parallel/board.py`), where process 0 reads them two steps later, so
that no device waits. If no host is late, the time is that of the devices; a profile shows which of them is slow.
"""
from __future__ import annotations

import json
import logging
import math
import socket
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from vit_jax.core.types import Batch
from vit_jax.parallel.board import LAG, Board
from vit_jax.record import machine
from vit_jax.record.clock import Clock
from vit_jax.record.writer import Writer
from vit_jax.train.loop import Done
from vit_jax.train.metrics import Packed
from vit_jax.train.state import TrainState

LATE = 0.05
"""A host is late if it is ready later than the median of the others by this share of the step, or more."""
LEAST_STEPS = 8
"""Steps whose means are compared; where the log has a shorter interval, several intervals are one."""
SLOWER = 1.25
"""Steps are slower if they take so many times those of the fastest interval of this process, in two in a row."""
FOLDER = 'hosts'
CAUSES = {'data': 'waiting for data', 'host': 'by other work on the host'}
StepFn = Callable[[TrainState, Batch], tuple[TrainState, Packed]]
log = logging.getLogger('vit_jax.train')


class Times(NamedTuple):
  """Means of a host over the steps of an interval, in seconds, without evaluations and checkpoints.

  step_s, deviation_s: mean and standard deviation of the time from one launch to the next.
  data_s: waiting for data.   host_s: other work of the host from the metrics of a step to the next launch.
  memory_gib: used on its first device.   name: of the host.   steps: their number.
  """
  step_s: float
  deviation_s: float
  data_s: float
  host_s: float
  memory_gib: float
  name: str
  steps: int

  @property
  def ready_s(self) -> float:
    """Seconds until the host is ready to launch."""
    return self.data_s + self.host_s


class Late(NamedTuple):
  """A host that the others wait for: its index, by how many seconds a step, and the main cause, a key of `CAUSES`."""
  host: int
  late_s: float
  cause: str


def find_late(hosts: Sequence[Times]) -> Late | None:
  """Returns the host that is ready last, if the others wait for it for `LATE` of the step or more.

  It is compared with the median of the others, as is each part of its time for the cause.
  """
  if len(hosts) < 2:
    return None
  host = max(range(len(hosts)), key=lambda i: hosts[i].ready_s)
  last, others = hosts[host], [one for i, one in enumerate(hosts) if i != host]
  late_s = last.ready_s - statistics.median(one.ready_s for one in others)
  if late_s < LATE * last.step_s or late_s <= 0:
    return None
  data_s = last.data_s - statistics.median(one.data_s for one in others)
  return Late(host, late_s, 'data' if data_s >= late_s / 2 else 'host')


class Stopwatch:
  """Measures the times of this host; `clock` is the run's, of which only training counts."""

  def __init__(self, clock: Clock) -> None:
    self._clock = clock
    self._free_s: float | None = None  # when the last metrics came, if they came after the last launch
    self._waited_s = self._launched_s = 0.
    self._steps: list[float] = []
    self._data_s = self._ready_s = 0.

  def launch(self) -> None:
    """Notes that this host launches a step."""
    now_s, waited_s = self._clock.training()
    if self._free_s is not None:
      self._steps.append(now_s - self._launched_s)
      self._data_s += waited_s - self._waited_s
      self._ready_s += now_s - self._free_s
    self._launched_s, self._free_s = now_s, None

  def metrics(self) -> None:
    """Notes that the metrics of a step have arrived."""
    self._free_s, self._waited_s = self._clock.training()

  def take(self, name: str, memory_gib: float | None) -> Times | None:
    """Returns the means since the last call; None with fewer than `LEAST_STEPS`, which then count for the next one."""
    if (num := len(self._steps)) < LEAST_STEPS:
      return None
    found = Times(statistics.fmean(self._steps), statistics.pstdev(self._steps), self._data_s / num,
                  max(0., self._ready_s - self._data_s) / num, memory_gib or 0., name, num)
    self._steps, self._data_s, self._ready_s = [], 0., 0.
    return found


class _Repeated:
  """Decides when a state that lasts is logged again: when it changes, and after 1, 2, 4, 8, … intervals."""

  def __init__(self) -> None:
    self._state: object = None
    self._count = 0

  def is_due(self, state: object) -> bool:
    self._count = self._count + 1 if state == self._state else 1
    is_due = (state is not None and self._count & (self._count - 1) == 0) or (state is None and self._state is not None)
    self._state = state
    return is_due


class HostTimes:
  """A hook of every process: measures, exchanges and logs the times of the hosts. It must be the first hook.

  Process 0 writes an event `hosts` for each interval and names a late host. The others log when they wait for data.
  With one process it does nothing.

  Args:
    clock: of the run.
    writer: of its record.
    board: of its processes.
    log_every: steps of an interval.
    num_hosts, host: number of processes, and index of this one.
    profile: a command that takes a profile of a host, for the message; `{host}` stands for its index.
  """
  every = 0

  def __init__(self, clock: Clock, writer: Writer, board: Board, *, log_every: int, num_hosts: int, host: int,
               profile: str) -> None:
    self._watch, self._writer, self._board = Stopwatch(clock), writer, board
    self._log_every, self._num_hosts, self._host, self._profile = log_every, num_hosts, host, profile
    self._named, self._waiting = _Repeated(), _Repeated()
    self._found: list[Late | None] = []
    self._fastest_s, self._num_slower = math.inf, 0
    self._pending: list[int] = []

  def timed(self, step_fn: StepFn) -> StepFn:
    """Returns `step_fn`, of which each call is noted as a launch; with one process `step_fn` itself."""
    if self._num_hosts == 1:
      return step_fn

    def call(state: TrainState, batch: Batch) -> tuple[TrainState, Packed]:
      self._watch.launch()
      return step_fn(state, batch)
    return call

  def on_metrics(self, done: Done) -> None:
    """Notes the metrics of a step; at the interval shows the means, and two steps later reads those of all."""
    if self._num_hosts == 1:
      return
    self._watch.metrics()
    if done.step % self._log_every == 0 and (own := self._watch.take(socket.gethostname(), machine.used_memory_gib())):
      self._board.put(f'{FOLDER}/{done.step}/{self._host}', json.dumps(own))
      self._pending += [done.step] if self._host == 0 else []
      self._tell_own(done.step, own)
    if self._pending and done.step - self._pending[0] >= LAG:
      self._gather(self._pending.pop(0))

  def on_state(self, step: int, state: TrainState) -> None:
    raise AssertionError('never due')

  def finish(self) -> None:
    """Reads what is left after the last step, once the processes have met again, and logs which host was late."""
    while self._pending:
      self._gather(self._pending.pop(0))
    late = [one for one in self._found if one]
    host = statistics.mode(one.host for one in late) if late else 0
    own = [one for one in late if one.host == host]
    if len(own) > 1:
      log.warning('Host %d was late in %d of %d intervals, %s: by %s a step on average.', host, len(own),
                  len(self._found), CAUSES[statistics.mode(one.cause for one in own)],
                  _seconds(statistics.fmean(one.late_s for one in own)))

  def _gather(self, step: int) -> None:
    """Process 0: records the times of all hosts, and names the one that is late."""
    texts = self._board.all(f'{FOLDER}/{step}')
    self._board.remove(f'{FOLDER}/{step}')
    if len(texts) != self._num_hosts:
      return
    hosts = [Times(*json.loads(texts[str(host)])) for host in range(self._num_hosts)]
    late = find_late(hosts)
    self._found.append(late)
    numbers = {name: [_rounded(getattr(one, name)) for one in hosts] for name in Times._fields[:-2]}
    last = max(range(len(hosts)), key=lambda i: hosts[i].ready_s)
    self._writer.event('hosts', step=step, steps=hosts[0].steps, **numbers, slowest=last, slowest_name=hosts[last].name,
                       late_s=_rounded(late.late_s) if late else 0., cause=late.cause if late else '')
    step_s = statistics.median(one.step_s for one in hosts)
    self._fastest_s = min(self._fastest_s, step_s)
    self._num_slower = self._num_slower + 1 if step_s >= SLOWER * self._fastest_s else 0
    is_slower = self._num_slower > 1
    if self._named.is_due((late.host, late.cause) if late else 'devices' if is_slower else None):
      self._name(step, hosts, late, step_s if is_slower else 0.)

  def _name(self, step: int, hosts: Sequence[Times], late: Late | None, slower_s: float) -> None:
    """Logs the host that is late; or that steps are slower without such a host; or that this is over."""
    if late is not None:
      slow = hosts[late.host]
      log.warning('Host %d (%s) is late at step %s, %s: it launches a step %s after the others (%s for data, %s for '
                  'other work; a step takes %s ± %s).\nIts own log may say more, and a profile shows its steps: %s',
                  late.host, slow.name, f'{step:,}', CAUSES[late.cause], _seconds(late.late_s), _seconds(slow.data_s),
                  _seconds(slow.host_s), _seconds(slow.step_s), _seconds(slow.deviation_s),
                  self._profile.format(host=late.host))
    elif slower_s:
      log.warning('At step %s a step takes %s, %s at best before, and no host is late: the devices or the network '
                  'between them are slower. Profiles of several hosts show where: %s', f'{step:,}', _seconds(slower_s),
                  _seconds(self._fastest_s), self._profile.format(host='0,1'))
    else:
      log.info('At step %s no host is late.', f'{step:,}')

  def _tell_own(self, step: int, own: Times) -> None:
    """The other processes: log that this host waits for data, which process 0 logs for itself after its first steps."""
    is_waiting = own.data_s >= LATE * own.step_s
    if self._host and self._waiting.is_due(True if is_waiting else None):
      log.warning('This host %s at step %s: %s of %s a step.', 'waits for data' if is_waiting else
                  'no longer waits for data', f'{step:,}', _seconds(own.data_s), _seconds(own.step_s))


def _rounded(value: float) -> float:
  """Returns four significant digits."""
  return float(f'{value:.4g}') if math.isfinite(value) else 0.


def _seconds(value: float) -> str:
  return f'{value:.3g} s' if value >= 0.9995 else f'{1000 * value:.3g} ms'
