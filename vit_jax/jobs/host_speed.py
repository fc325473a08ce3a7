"""Warns if the host makes fewer images than the step takes, as measured in the first steps of a process.

`train` wraps its step with `HostSpeed.timed`, which measures the step alone, and passes the hook to the loop, which
calls `on_metrics` after each step. What helps is chosen by `workers.advice`.
"""
from __future__ import annotations

import logging
import os
import pathlib
import time

import jax
import numpy as np

from vit_jax.core.contracts import Loader
from vit_jax.core.types import Batch
from vit_jax.data import workers
from vit_jax.data.loader import TrainLoader
from vit_jax.record.clock import Clock
from vit_jax.train.loop import Done
from vit_jax.train.state import Packed, StepFn, TrainState

TIMED = range(2, 6)
"""Calls of the step in this process that are waited for: on an idle device, the time of a call is that of the step."""
FIRST, STEPS, MOST_STEPS, SECONDS = 40, 40, 400, 20.
"""The window begins after `FIRST` steps, when the batches made during the compilation are used up. It ends after a
multiple of `STEPS` when it has `SECONDS` of training, or at `MOST_STEPS`."""
WAITING = 0.05
"""The step waits for the host if this share of the training time, or more, is spent waiting for data."""
_IDLE = (3, 4)  # idle and iowait, among the numbers of a line of /proc/stat
log = logging.getLogger('vit_jax.data')


class HostSpeed:
  """A hook that warns once, with what helps.

  Args:
    clock: the clock of the run.
    images: how many images this host loads for a step.
    loader: the loader of its batches. If it has the data in memory, there is no warning.
  """
  every = 0

  def __init__(self, clock: Clock, images: float, loader: Loader) -> None:
    self._clock, self._images = clock, images
    self._workers = loader.workers if isinstance(loader, TrainLoader) else None
    self._num_called = self._num_done = 0
    self._alone_s, self._began, self._is_over = float('inf'), self._now(), False

  def timed(self, step_fn: StepFn) -> StepFn:
    """Returns `step_fn`, of which the calls `TIMED` wait for their result and are timed."""
    def call(state: TrainState, batch: Batch) -> tuple[TrainState, Packed]:
      self._num_called += 1
      if self._num_called not in TIMED:
        return step_fn(state, batch)
      jax.block_until_ready((state, batch))
      began = time.monotonic()
      result = jax.block_until_ready(step_fn(state, batch))
      self._alone_s = min(self._alone_s, time.monotonic() - began)
      return result
    return call

  def on_metrics(self, done: Done) -> None:
    """Counts a step; compares the host with the step at the end of the window."""
    del done
    self._num_done += 1
    num = self._num_done - FIRST
    if num == 0:
      self._began = self._now()
    elif num > 0 and num % STEPS == 0 and not self._is_over:
      training_s, waiting_s, busy, wall_s = (self._now() - self._began).tolist()
      self._is_over = training_s >= SECONDS or num >= MOST_STEPS
      if self._is_over and self._workers:
        step = self._images / self._alone_s
        host = min(step, self._images * num / training_s) if waiting_s >= WAITING * training_s else step
        if text := workers.advice(host, step, busy / wall_s, self._workers, here=workers.machine()):
          log.warning('%s', text)

  def on_state(self, step: int, state: TrainState) -> None:
    raise AssertionError('never due')

  def _now(self) -> np.ndarray:
    """Returns the seconds so far of training, of its waiting for data, of busy cores, and of the wall."""
    return np.array([*self._clock.training(), busy_s(), time.monotonic()])


def busy_s(stat: pathlib.Path = pathlib.Path('/proc/stat')) -> float:
  """Returns the seconds that the cores of this process were busy since the start of the system, with any process.

  Where the system does not say, those of this process.
  """
  try:
    mine = {f'cpu{core}' for core in os.sched_getaffinity(0)}
    lines = [line.split() for line in stat.read_text().splitlines()]
    ticks = sum(int(value) for name, *values in lines if name in mine
                for column, value in enumerate(values[:8]) if column not in _IDLE)
    return ticks / os.sysconf('SC_CLK_TCK')
  except (OSError, AttributeError, ValueError):
    return time.process_time()
