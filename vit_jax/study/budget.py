"""The budget of a study in device-hours: what its runs have taken, and what a run is expected to take.

A device-hour is one device for one hour, so a run of two hours on eight GPUs takes 16. Time is that of the records of
the runs, over all of their starts: starting, compiling, training, evaluating and saving. Expected time is that of a
start, as the mean of the starts so far, and of the remaining FLOPs at the speed so far; before any run has results, at
the speed that `estimate` assumes for this machine.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from vit_jax.config import schema
from vit_jax.record import clock, reader
from vit_jax.study import estimate
from vit_jax.study.runs import Task

DECLINED = '.declined'
"""File of a run that was not started, with the budget that it would have exceeded."""


class Spent(NamedTuple):
  """Device-seconds of the starts of a run up to its first step, of all else, and the number of starts."""
  starting: float = 0.
  training: float = 0.
  starts: int = 0

  @property
  def total(self) -> float:
    return self.starting + self.training


def spent(task: Task) -> Spent:
  """Returns what a run has taken so far, by its record."""
  try:
    events = reader.read(task.folder, most_rows=1).events
  except FileNotFoundError:
    return Spent()
  starts = [event for event in events if event['event'] == 'start']
  devices = max((int(str(event.get('devices', 1))) for event in starts), default=1)
  seconds = clock.sum_starts(events).seconds
  once = sum(value for name, value in seconds.items() if name in clock.ONCE)
  return Spent(devices * once, devices * (sum(seconds.values()) - once), len(starts))


class Budget:
  """Decides whether a run is started.

  Args:
    hours: device-hours of all runs together.
  """

  def __init__(self, hours: float) -> None:
    self.hours = hours
    self._known = estimate.Known({}, {})
    self._assumed = 0.  # device-seconds a FLOP; 0 = not known yet

  def refusal(self, task: Task, others: Sequence[Task]) -> str:
    """Returns why a run is not started, or '' if it is.

    Args:
      task: the run.
      others: all other runs of the study. Those that a process works on count with what they are expected to take.
    """
    everything = [task, *others]
    taken = {one.name: spent(one) for one in everything}
    used = sum(one.total for one in taken.values())
    open_ = [one for one in others if one.is_claimed]
    promised, needed = (sum(self._expected(one, taken, everything) for one in group) for group in (open_, [task]))
    if used + promised + needed <= self.hours * 3600:
      return ''
    return (f'The budget of {self.hours:.3g} device-hours would be exceeded: {used / 3600:.3g} are used, '
            f'{promised / 3600:.3g} expected of runs that are under way, {needed / 3600:.3g} of {task.name}.')

  def used(self, tasks: Iterable[Task]) -> str:
    """Returns a sentence on what the runs have taken."""
    return f'{sum(spent(task).total for task in tasks) / 3600:.3g} of {self.hours:.3g} device-hours are used.'

  def is_declined(self, task: Task) -> bool:
    """Returns whether a run was not started with this budget, by any process."""
    path = task.folder / DECLINED
    return path.is_file() and path.read_text() == repr(self.hours)

  def decline(self, task: Task) -> None:
    """Notes for other processes that a run is not started."""
    task.folder.mkdir(parents=True, exist_ok=True)
    (task.folder / DECLINED).write_text(repr(self.hours))

  def _expected(self, task: Task, taken: dict[str, Spent], everything: list[Task]) -> float:
    """Returns the device-seconds that a run is expected to take from its last results on."""
    done = {one.name: _flops_done(one) for one in everything}
    starts, flops = sum(one.starts for one in taken.values()), sum(done.values())
    a_start = sum(one.starting for one in taken.values()) / starts if starts else 0.
    rate = sum(taken[name].training for name, number in done.items() if number) / flops if flops else self._assume()
    part = float(task.until.removesuffix(' %')) / 100 if task.until else 1.
    left = estimate.estimate(task.config, self._known).flops * part - done[task.name]
    return a_start + rate * max(0., left)

  def _assume(self) -> float:
    if not self._assumed:
      speed = estimate.find_speed({}, '')
      self._assumed = speed.num_devices / speed.flops_s
    return self._assumed


def _flops_done(task: Task) -> float:
  """Returns the training FLOPs up to the last results of a run."""
  results: list[schema.Result] = [one.result() for one in task.with_results()]
  return 1e18 * max((one.exaflops for one in results), default=0.)
