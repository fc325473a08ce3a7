"""Warns if the host prepares fewer images per second than the training step could process.

`train` wraps the train step with `HostSpeed.timed`, which measures how long the step takes without waiting for data.
The training loop calls `HostSpeed.on_metrics` after each step. At the end of a window of steps, `on_metrics` compares
the two speeds, and logs the text of `workers.advice` unless it is ''.
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

TIMED_CALLS = range(2, 6)
"""Numbers of the timed calls of the step; call 1 compiles. A timed call starts on an idle device and waits for the
result, so that the call takes as long as the step."""
WARMUP_STEPS = 40  # before the window begins; the batches of these steps were prepared during the compilation
WINDOW_STEPS, MAX_WINDOW_STEPS, MIN_WINDOW_S = 40, 400, 20.
"""After every `WINDOW_STEPS` steps, the window ends if it has `MIN_WINDOW_S` of training, or `MAX_WINDOW_STEPS`."""
MIN_WAITING_SHARE = 0.05  # of the training time; a host that keeps training waiting for so long limits the speed
_IDLE = (3, 4)  # positions of `idle` and `iowait` in a line of /proc/stat: `cpu0 user nice system idle iowait …`
log = logging.getLogger('vit_jax.data')


class HostSpeed:
  """A hook of the training loop that warns at most once, at the end of the window, and says what helps.

  Args:
    clock: the clock of the run.
    num_images: the number of images that this host loads for a step.
    loader: the loader of the batches. There is no warning for a loader that has all images in memory.
  """
  every = 0  # the loop never calls `on_state`

  def __init__(self, clock: Clock, num_images: float, loader: Loader) -> None:
    self._clock, self._num_images = clock, num_images
    self._workers = loader.workers if isinstance(loader, TrainLoader) else None
    self._num_calls = 0  # of the step function
    self._num_steps = 0  # whose metrics have arrived
    self._step_s = float('inf')  # the shortest timed call
    self._window_start = self._measure_s()
    self._is_over = False

  def timed(self, step_fn: StepFn) -> StepFn:
    """Returns a function that calls `step_fn`, and measures the duration of `TIMED_CALLS`."""
    def call(state: TrainState, batch: Batch) -> tuple[TrainState, Packed]:
      self._num_calls += 1
      if self._num_calls not in TIMED_CALLS:
        return step_fn(state, batch)
      jax.block_until_ready((state, batch))
      began_s = time.monotonic()
      result = jax.block_until_ready(step_fn(state, batch))
      self._step_s = min(self._step_s, time.monotonic() - began_s)
      return result
    return call

  def on_metrics(self, done: Done) -> None:
    """Counts a step. At the end of the window, compares the host with the step and may warn."""
    del done
    self._num_steps += 1
    num_in_window = self._num_steps - WARMUP_STEPS
    if num_in_window == 0:
      self._window_start = self._measure_s()
    if num_in_window <= 0 or num_in_window % WINDOW_STEPS or self._is_over:
      return
    training_s, waiting_s, busy_core_s, wall_s = (self._measure_s() - self._window_start).tolist()
    self._is_over = training_s >= MIN_WINDOW_S or num_in_window >= MAX_WINDOW_STEPS
    if self._is_over and self._workers:
      step_speed = self._num_images / self._step_s  # images per second
      is_limited = waiting_s >= MIN_WAITING_SHARE * training_s
      host_speed = min(step_speed, self._num_images * num_in_window / training_s) if is_limited else step_speed
      if text := workers.advice(host_speed, step_speed, busy_core_s / wall_s, self._workers, here=workers.machine()):
        log.warning('%s', text)

  def on_state(self, step: int, state: TrainState) -> None:
    raise AssertionError('never due')

  def _measure_s(self) -> np.ndarray:
    """Returns `[4]` seconds so far: of training, of waiting for data in training, of busy cores, and of the clock."""
    return np.array([*self._clock.training(), busy_s(), time.monotonic()])


def busy_s(stat: pathlib.Path = pathlib.Path('/proc/stat')) -> float:
  """Returns the seconds that the cores of this process have worked; if `stat` cannot be read, those of this process."""
  try:
    cores = {f'cpu{core}' for core in os.sched_getaffinity(0)}
    lines = [line.split() for line in stat.read_text().splitlines()]
    ticks = sum(int(value) for name, *values in lines if name in cores
                for column, value in enumerate(values[:8]) if column not in _IDLE)
    return ticks / os.sysconf('SC_CLK_TCK')
  except (OSError, AttributeError, ValueError):
    return time.process_time()
