"""Traces selected steps of a run with `jax.profiler`, for TensorBoard's profile page and for xprof.

The train job enters `served` and a `Profile`, trains with the step function that `Profile.mark` returns, and passes
the `Profile` to the loop as the last hook. The settings are `train.profile` and `train.profile_port`.
"""
from __future__ import annotations

import contextlib
import logging
import shutil
import socket
import tempfile
from collections.abc import Iterator

import jax

from vit_jax.core.errors import UserError
from vit_jax.core.types import Batch
from vit_jax.record import storage
from vit_jax.train.loop import Done, Hook
from vit_jax.train.state import Packed, StepFn, TrainState

log = logging.getLogger('vit_jax.train')
_HIGHEST_PORT = 65_535


@contextlib.contextmanager
def served(port: int, process_index: int) -> Iterator[None]:
  """Runs the profiler server of jax on the port `port + process_index`; 0 = none. Processes may share a machine.

  Raises:
    UserError: the port cannot be used.
  """
  if not port:
    yield
    return
  number = port + process_index
  try:
    with socket.socket() as probe:  # jax would not report that another program uses the port
      probe.bind(('', number))
  except (OSError, OverflowError) as error:
    reason = getattr(error, 'strerror', None) or error
    if number > _HIGHEST_PORT:
      reason = f'it is above {_HIGHEST_PORT:,}'
    raise UserError(f'train.profile_port: expected a port that is free on this machine, got {number} for process '
                    f'{process_index}: {reason}. Set another one.') from error
  jax.profiler.start_server(number)
  log.info('Profiles of this process can be taken on port %d.', number)
  try:
    yield
  finally:
    jax.profiler.stop_server()


class Profile(Hook):
  """A hook that traces the steps `first` to `last`, if this process runs them. It must be the last hook.

  The trace begins and ends while the device is idle, so it has complete steps only, with the evaluations and saves
  between them. If its first step is the first one of the process, it also has the compilation.

  Only process 0 traces, because two processes on a machine would write the same file; the others check the arguments.
  With `served`, TensorBoard and xprof can take a profile of any process.

  Args:
    folder: for the trace, in `plugins/profile/<time>`; in object storage, the complete trace is uploaded at its end.
    steps: first and last, from 1; None = no trace.
    start: number of steps done before this process.
    total: number of steps of the run.
    process_index: of this process.

  Raises:
    UserError: the run has no such steps.
  """

  def __init__(self, folder: storage.PathLike, steps: tuple[int, int] | None, *, start: int, total: int,
               process_index: int) -> None:
    self._folder, self._tracing, self._next, self._done = str(folder), False, start + 1, start
    self._local_folder = self._folder  # jax writes to it
    # The loop calls `on_state` after step `every`: the one before the first of the trace, then the last of the trace.
    self.every = self._first = self._last = 0
    if steps is None:
      return
    self._first, self._last = steps
    if self._last > total:
      raise UserError(f'train.profile: expected steps from 1 to {total}, the end of the run, got '
                      f'{self._first}..{self._last}. Set earlier steps.')
    if process_index:
      return
    self._first = max(self._first, start + 1)
    if self._first <= self._last:
      self.every = self._first - 1 if start < self._first - 1 else self._last
    else:
      log.info('No profile: steps %s to %s were done before.', f'{steps[0]:,}', f'{self._last:,}')

  def mark(self, step_fn: StepFn) -> StepFn:
    """Returns a function that calls `step_fn` and writes the number of the step into a trace."""
    def marked(state: TrainState, batch: Batch) -> tuple[TrainState, Packed]:
      with jax.profiler.StepTraceAnnotation('train', step_num=self._next):
        self._next += 1
        return step_fn(state, batch)
    return marked

  def on_state(self, step: int, state: TrainState) -> None:
    if self.every and not self._tracing and step == self._first - 1:
      jax.block_until_ready(state)
      self._begin()

  def on_metrics(self, done: Done) -> None:
    self._done = done.step
    if self._tracing and done.step >= self._last:
      jax.block_until_ready(done.state)
      self._end()

  def _begin(self) -> None:
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # tracing every Python call would slow down the traced steps
    if not storage.is_local(self._folder):
      self._local_folder = tempfile.mkdtemp(prefix='vit_jax_profile_')
    jax.profiler.start_trace(self._local_folder, profiler_options=options)
    self._tracing = True
    self.every = self._last  # so that the loop passes the metrics of the last step before it begins the next one

  def _end(self) -> None:
    self._tracing, self.every = False, 0
    jax.profiler.stop_trace()
    if self._local_folder != self._folder:
      storage.copy(self._local_folder, self._folder)
      shutil.rmtree(self._local_folder)
    log.info('Profile of steps %s to %s: tensorboard --logdir=%s', f'{self._first:,}', f'{self._done:,}', self._folder)

  def __enter__(self) -> Profile:
    if self.every and self._next == self._first:
      self._begin()
    return self

  def __exit__(self, *_: object) -> None:
    if self._tracing:
      self._end()
