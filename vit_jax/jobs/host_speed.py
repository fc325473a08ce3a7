"""Warns if the host prepares fewer images per second than the training step could process.

`train` wraps its step with `HostSpeed.timed`, which times the step alone, without waiting for data. The training loop
calls `on_metrics` after each step, which compares this time with the speed of training in a window of steps. At its
end, `workers.advice` returns the text of a warning, or ''.
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
"""Numbers of the calls of the step in this process that are timed. Such a call starts on an idle device and waits for
its result, so that its time is that of the step."""
FIRST, STEPS, MOST_STEPS, SECONDS = 40, 40, 400, 20.
"""The window begins after `FIRST` steps, whose batches were prepared during the compilation. After every `STEPS`
steps, it ends if it has lasted `SECONDS` of training, or has `MOST_STEPS` steps."""
WAITING = 0.05
"""Training is limited by the host if at least this part of its time is spent waiting for data."""
_IDLE = (3, 4)  # positions of `idle` and `iowait` in a line of /proc/stat: `cpu0 user nice system idle iowait …`
log = logging.getLogger('vit_jax.data')


class HostSpeed:
  """A hook that warns at most once, and says what helps.

  Args:
    clock: the clock of the run.
    images: how many images this host loads for a step.
    loader: the loader of the batches. There is no warning for one that has all images in memory.
  """
  every = 0

  def __init__(self, clock: Clock, images: float, loader: Loader) -> None:
    self._clock, self._images = clock, images
    self._workers = loader.workers if isinstance(loader, TrainLoader) else None
    self._num_called = self._num_done = 0
    self._step_s, self._window_start, self._is_over = float('inf'), self._now(), False

  def timed(self, step_fn: StepFn) -> StepFn:
    """Returns `step_fn` with the calls `TIMED` timed; the shortest time counts."""
    def call(state: TrainState, batch: Batch) -> tuple[TrainState, Packed]:
      self._num_called += 1
      if self._num_called not in TIMED:
        return step_fn(state, batch)
      jax.block_until_ready((state, batch))
      began = time.monotonic()
      result = jax.block_until_ready(step_fn(state, batch))
      self._step_s = min(self._step_s, time.monotonic() - began)
      return result
    return call

  def on_metrics(self, done: Done) -> None:
    """Counts a step. At the end of the window, compares the host with the step and may warn."""
    del done
    self._num_done += 1
    num = self._num_done - FIRST
    if num == 0:
      self._window_start = self._now()
    elif num > 0 and num % STEPS == 0 and not self._is_over:
      training_s, waiting_s, busy_core_s, wall_s = (self._now() - self._window_start).tolist()
      self._is_over = training_s >= SECONDS or num >= MOST_STEPS
      if self._is_over and self._workers:
        host = step = self._images / self._step_s  # images per second
        if waiting_s >= WAITING * training_s:
          host = min(step, self._images * num / training_s)
        if text := workers.advice(host, step, busy_core_s / wall_s, self._workers, here=workers.machine()):
          log.warning('%s', text)

  def on_state(self, step: int, state: TrainState) -> None:
    raise AssertionError('never due')

  def _now(self) -> np.ndarray:
    """Returns `[4]` seconds so far: of training, of its waiting for data, of busy cores, and of the wall clock."""
    return np.array([*self._clock.training(), busy_s(), time.monotonic()])


def busy_s(stat: pathlib.Path = pathlib.Path('/proc/stat')) -> float:
  """Returns the seconds of work so far of the cores of this process; without `stat`, of this process alone."""
  try:
    cores = {f'cpu{core}' for core in os.sched_getaffinity(0)}
    lines = [line.split() for line in stat.read_text().splitlines()]
    ticks = sum(int(value) for name, *values in lines if name in cores
                for column, value in enumerate(values[:8]) if column not in _IDLE)
    return ticks / os.sysconf('SC_CLK_TCK')
  except (OSError, AttributeError, ValueError):
    return time.process_time()
