"""Measures in the first steps of a process whether its host makes as many images as the step takes."""
from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Callable
from typing import NamedTuple

import jax

from vit_jax.core.types import Batch
from vit_jax.record.clock import STEP, Goodput
from vit_jax.train.loop import Done
from vit_jax.train.metrics import Packed
from vit_jax.train.state import TrainState

TIMED = range(2, 6)
"""Calls of the step in this process that are waited for: on an idle device, the time of a call is that of the step."""
FIRST, STEPS, MOST_STEPS, SECONDS = 40, 40, 400, 20.
"""The window begins after `FIRST` steps, when the batches made during the compilation are used up. It ends after a
multiple of `STEPS` when it has `SECONDS` of training, or at `MOST_STEPS`."""
_IDLE = (3, 4)  # idle and iowait, among the numbers of a line of /proc/stat

StepFn = Callable[[TrainState, Batch], tuple[TrainState, Packed]]


class Found(NamedTuple):
  """Seconds of a step on an idle device; and of a window of steps: training seconds a step, the share of them that
  waited for data, and the number of cores that were busy."""
  alone_s: float
  step_s: float
  waiting: float
  busy_cores: float


class _Times(NamedTuple):
  training: float
  waiting: float
  wall: float
  busy: float


class HostSpeed:
  """A hook that measures once, and calls `tell` with the result."""
  every = 0

  def __init__(self, goodput: Callable[[], Goodput], tell: Callable[[Found], None], *,
               now: Callable[[], float] = time.monotonic, busy: Callable[[], float] | None = None) -> None:
    """Takes what returns the seconds by phase, and, for tests, the clock and the seconds that cores were busy."""
    self._goodput, self._tell, self._now, self._busy = goodput, tell, now, busy or busy_s
    self._num_called = self._num_done = 0
    self._alone_s, self._began, self._is_over = float('inf'), _Times(0., 0., 0., 0.), False

  def timed(self, step_fn: StepFn) -> StepFn:
    """Returns `step_fn`, of which the calls `TIMED` wait for their result and are timed."""
    def call(state: TrainState, batch: Batch) -> tuple[TrainState, Packed]:
      self._num_called += 1
      if self._num_called not in TIMED:
        return step_fn(state, batch)
      jax.block_until_ready((state, batch))
      began = self._now()
      found = jax.block_until_ready(step_fn(state, batch))
      self._alone_s = min(self._alone_s, self._now() - began)
      return found
    return call

  def on_metrics(self, done: Done) -> None:
    """Counts a step; measures at the end of the window."""
    del done
    self._num_done += 1
    num = self._num_done - FIRST
    if num == 0:
      self._began = self._times()
    elif num > 0 and num % STEPS == 0 and not self._is_over:
      spent = _Times(*(now - then for now, then in zip(self._times(), self._began, strict=True)))
      if spent.training >= SECONDS or num >= MOST_STEPS:
        self._is_over = True
        self._tell(Found(self._alone_s, spent.training / num, spent.waiting / max(1e-9, spent.training),
                         spent.busy / max(1e-9, spent.wall)))

  def on_state(self, step: int, state: TrainState) -> None:
    raise AssertionError('never due')

  def _times(self) -> _Times:
    seconds = self._goodput().seconds
    waiting = seconds.get('data_wait', 0.)
    return _Times(seconds[STEP] + waiting, waiting, self._now(), self._busy())


def busy_s(stat: pathlib.Path = pathlib.Path('/proc/stat')) -> float:
  """Returns the seconds that the cores of this process were busy since the start of the system, with any process.

  Where the system does not say, those of this process.
  """
  try:
    mine = {f'cpu{core}' for core in os.sched_getaffinity(0)}
    lines = [line.split() for line in stat.read_text().splitlines()]
    ticks = sum(int(value) for name, *values in lines if name in mine
                for place, value in enumerate(values[:8]) if place not in _IDLE)
    return ticks / os.sysconf('SC_CLK_TCK')
  except (OSError, AttributeError, ValueError):
    return time.process_time()
