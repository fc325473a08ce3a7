"""Traces selected steps with `jax.profiler`, for TensorBoard's profile page and for xprof.

The train job enters `served` and a `Profile`, passes its step function through `mark`, and passes the `Profile` on as
the last hook.
"""
from __future__ import annotations

import contextlib
import logging
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator

import jax

from vit_jax.core.errors import UserError
from vit_jax.core.types import Batch
from vit_jax.record import storage
from vit_jax.train.loop import Done, Hook
from vit_jax.train.state import Packed, TrainState

log = logging.getLogger('vit_jax.train')
HIGHEST = 65_535
StepFn = Callable[[TrainState, Batch], tuple[TrainState, Packed]]


@contextlib.contextmanager
def served(port: int, process_index: int) -> Iterator[None]:
  """Runs the profiler server of jax on `port` plus the index of the process, so that processes of one machine differ.

  Raises:
    UserError: the port cannot be used.
  """
  if not port:
    yield
    return
  number = port + process_index
  try:
    with socket.socket() as probe:  # the server of jax would share the port of another program
      probe.bind(('', number))
  except (OSError, OverflowError) as error:
    reason = f'it is above {HIGHEST:,}' if number > HIGHEST else getattr(error, 'strerror', None) or error
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

  The device is idle when the trace begins and ends, so the trace contains complete steps only, with the evaluations and
  saves between them. If the first of these steps is the first one of the process, the trace contains its compilation.

  Processes other than 0 only check the steps, because two processes on a machine would write the same file. `served`
  lets TensorBoard and xprof take a profile of any process.

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
    self._near = self._folder  # local folder that jax writes to
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
    """Returns the step function with its number annotated in traces."""
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
      self._near = tempfile.mkdtemp(prefix='vit_jax_profile_')
    jax.profiler.start_trace(self._near, profiler_options=options)
    self._tracing = True
    self.every = self._last  # makes the loop call `on_state` for the last of these steps before the next one begins

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

  def __exit__(self, *_: object) -> None:
    if self._tracing:
      self._end()
