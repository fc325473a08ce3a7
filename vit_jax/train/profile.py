"""A trace of chosen steps by `jax.profiler`, for TensorBoard's profile page and for xprof."""
from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable
from types import TracebackType

import jax

from vit_jax.core.errors import UserError
from vit_jax.core.types import Batch
from vit_jax.record import storage
from vit_jax.train.loop import Done
from vit_jax.train.state import TrainState
from vit_jax.train.step import StepMetrics

log = logging.getLogger('vit_jax.train')
StepFn = Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]


class Profile:
  """A hook that traces the steps `first` to `last`, as far as this process does them. The last among the hooks.

  The device is idle when the trace begins and when it ends, so that it holds whole steps and no other; what is
  evaluated or saved after the steps between them is in it. If the first of them is the first step of the process,
  its compilation is in it too.

  Processes other than 0 only check: two on a machine would write the same file.

  Args:
    folder: where the trace goes, in `plugins/profile/<time>`; into object storage once it is whole.
    steps: first and last, from 1; None for no trace.
    start: steps done before this process.
    total: steps of the run.
    process_index: of this process.

  Raises:
    UserError: the run has no such steps.
  """

  def __init__(self, folder: storage.PathLike, steps: tuple[int, int] | None, *, start: int, total: int,
               process_index: int):
    self._folder, self._tracing, self._next, self._done = str(folder), False, start + 1, start
    self._near = self._folder  # where jax writes: this machine
    self.every = 0
    if steps is None:
      self._first = self._last = 0
      return
    self._first, self._last = steps
    if self._last > total:
      raise UserError(f'train.profile: expected steps from 1 to {total}, the end of the run, got '
                      f'{self._first}..{self._last}.')
    if process_index:
      return
    self._first = max(self._first, start + 1)
    if self._first <= self._last:
      self.every = self._first - 1 if start < self._first - 1 else self._last
    else:
      log.info('No profile: steps %s to %s were done before.', f'{steps[0]:,}', f'{self._last:,}')

  def mark(self, step_fn: StepFn) -> StepFn:
    """The step, with its number in the trace; as it is where nothing is traced."""
    if not self.every:
      return step_fn

    def marked(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
      with jax.profiler.StepTraceAnnotation('train', step_num=self._next):
        self._next += 1
        return step_fn(state, batch)

    return marked

  def on_state(self, step: int, state: TrainState) -> None:
    if not self._tracing and step == self._first - 1:
      jax.block_until_ready(state)
      self._begin()

  def on_metrics(self, done: Done) -> None:
    self._done = done.step
    if self._tracing and done.step >= self._last:
      jax.block_until_ready(done.state)
      self._end()

  def _begin(self) -> None:
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # a line for every Python call makes the traced steps slower than the others
    if not storage.is_local(self._folder):
      self._near = tempfile.mkdtemp(prefix='vit_jax_profile_')
    jax.profiler.start_trace(self._near, profiler_options=options)
    self._tracing = True
    self.every = self._last  # makes the loop hand over the last of them before the next begins

  def _end(self) -> None:
    self._tracing, self.every = False, 0
    jax.profiler.stop_trace()
    if self._near != self._folder:
      storage.copy(self._near, self._folder)
      shutil.rmtree(self._near)
    log.info('Profile of steps %s to %s: tensorboard --logdir=%s', f'{self._first:,}', f'{self._done:,}', self._folder)

  def __enter__(self) -> Profile:
    if self.every and self._next == self._first:
      self._begin()
    return self

  def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
               trace: TracebackType | None) -> None:
    if self._tracing:
      self._end()
