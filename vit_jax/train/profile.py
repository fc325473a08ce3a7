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
_MAX_PORT = 65_535


@contextlib.contextmanager
def served(port: int, process_index: int) -> Iterator[None]:
  """Runs jax's profiler server on the port `port + process_index`, as processes may share a machine; 0 = no server.

  Raises UserError if the port cannot be used.
  """
  if not port:
    yield
    return
  own_port = port + process_index
  try:
    with socket.socket() as probe:  # jax would not report that another program uses the port
      probe.bind(('', own_port))
  except (OSError, OverflowError) as error:
    reason = getattr(error, 'strerror', None) or error
    if own_port > _MAX_PORT:
      reason = f'it is above {_MAX_PORT:,}'
    raise UserError(f'train.profile_port: expected a port that is free on this machine, got {own_port} for process '
                    f'{process_index}: {reason}. Set another one.') from error
  jax.profiler.start_server(own_port)
  log.info('Profiles of this process can be taken on port %d.', own_port)
  try:
    yield
  finally:
    jax.profiler.stop_server()


class Profile(Hook):
  """A hook that traces the steps of `steps` that this process runs. It must be the last hook.

  The trace begins and ends while the device is idle, so it has complete steps only, with the evaluations and saves
  between them. If the first step of the process is traced, the trace also has the compilation. The trace begins in
  `__enter__` or in `on_state`, and ends in `on_metrics`, or in `__exit__` if the run stops before the last step.

  Only process 0 traces, because two processes on a machine would write the same file; the others check the arguments.
  With `served`, TensorBoard and xprof can take a profile of any process.

  Args:
    folder: for the trace, in `plugins/profile/<time>`; in object storage, the complete trace is uploaded at its end.
    steps: the first and the last step to trace, from 1; None = no trace.
    start: number of steps done before this process.
    total: number of steps of the run; later `steps` raise UserError.
    process_index: of this process.
  """

  def __init__(self, folder: storage.PathLike, steps: tuple[int, int] | None, *, start: int, total: int,
               process_index: int) -> None:
    self._folder = self._local_folder = str(folder)  # jax writes to the local one
    self._is_tracing = False
    self._next_step, self._done_step = start + 1, start
    # The loop calls `on_state` at step `every`: first at the step before the trace, then at the last step of the trace.
    self.every = self._first_step = self._last_step = 0
    if steps is None:
      return
    self._first_step, self._last_step = steps
    if self._last_step > total:
      raise UserError(f'train.profile: expected steps from 1 to {total}, the end of the run, got '
                      f'{self._first_step}..{self._last_step}. Set earlier steps.')
    if process_index:
      return
    self._first_step = max(self._first_step, start + 1)
    if self._first_step <= self._last_step:
      self.every = self._first_step - 1 if start < self._first_step - 1 else self._last_step
    else:
      log.info('No profile: steps %s to %s were done before.', f'{steps[0]:,}', f'{self._last_step:,}')

  def mark(self, step_fn: StepFn) -> StepFn:
    """Returns a function that calls `step_fn` and writes the number of the step into a trace."""
    def marked(state: TrainState, batch: Batch) -> tuple[TrainState, Packed]:
      with jax.profiler.StepTraceAnnotation('train', step_num=self._next_step):
        self._next_step += 1
        return step_fn(state, batch)
    return marked

  def on_state(self, step: int, state: TrainState) -> None:
    if self.every and not self._is_tracing and step == self._first_step - 1:
      jax.block_until_ready(state)
      self._begin()

  def on_metrics(self, done: Done) -> None:
    self._done_step = done.step
    if self._is_tracing and done.step >= self._last_step:
      jax.block_until_ready(done.state)
      self._end()

  def _begin(self) -> None:
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # tracing every Python call would slow down the traced steps
    if not storage.is_local(self._folder):
      self._local_folder = tempfile.mkdtemp(prefix='vit_jax_profile_')
    jax.profiler.start_trace(self._local_folder, profiler_options=options)
    self._is_tracing = True
    self.every = self._last_step  # so that the loop passes the metrics of the last step before it begins the next one

  def _end(self) -> None:
    self._is_tracing, self.every = False, 0
    jax.profiler.stop_trace()
    if self._local_folder != self._folder:
      storage.copy(self._local_folder, self._folder)
      shutil.rmtree(self._local_folder)
    log.info('Profile of steps %s to %s: tensorboard --logdir=%s', f'{self._first_step:,}', f'{self._done_step:,}',
             self._folder)

  def __enter__(self) -> Profile:
    if self.every and self._next_step == self._first_step:
      self._begin()
    return self

  def __exit__(self, *_: object) -> None:
    if self._is_tracing:
      self._end()
