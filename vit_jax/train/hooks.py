"""Hooks of the training loop: logging, evaluation, checkpoints, early stopping, alarms, non-finite values.

The train job passes the hooks to `loop.run` in this order: metrics and alarms, then the evaluations, then early
stopping and the checkpoint. Evaluations write their results into a shared dict `Latest`, which later hooks read.
"""
from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike

from vit_jax.config import schema
from vit_jax.core import documents, failures
from vit_jax.core.contracts import Watch
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.core.types import Mean, Schedule
from vit_jax.record import reader
from vit_jax.record.clock import Clock
from vit_jax.record.writer import Writer
from vit_jax.train.checkpoint import Checkpointer
from vit_jax.train.loop import Done, Hook
from vit_jax.train.save_times import SaveTimes
from vit_jax.train.state import TrainState
from vit_jax.train.step import nonfinite_paths

log = logging.getLogger('vit_jax.train')

Latest = dict[str, tuple[int, float]]
"""Maps the name of an evaluation metric to the step of its newest value, and to this value."""
NOT_FINITE = 'is not finite: loss'
"""Text in the error message of a run that stops at a non-finite step; a study recognizes such runs by this text."""
MAX_NORM_EVENTS = 1000  # events `norms` in the record of a run, besides the first and the last step
BLOCK_STEPS = 1024  # number of steps whose learning rates are computed together
_NOT_MEASURED = (-1, 0.)  # the entry of `Latest` for a metric without a value


def to_float(mean: Mean) -> float:
  """Returns the value of a mean whose arrays are on the host."""
  return float(mean.sum) / max(float(mean.weight), 1e-12)


class LearningRates:
  """Computes the values of a schedule on the host, for a block of `BLOCK_STEPS` steps at a time.

  Each computation waits for the device. The blocks are the same in every process and after a resume.
  """

  def __init__(self, schedule: Schedule) -> None:
    self._schedule = jax.jit(jax.vmap(schedule))
    self._block = -1  # number of the block whose learning rates are in `_values`; -1 = none
    self._values = np.zeros(BLOCK_STEPS, np.float32)

  def at(self, step: int) -> float:
    """Returns the learning rate of a step, which counts from 0."""
    block, offset = divmod(step, BLOCK_STEPS)
    if block != self._block:
      steps = np.arange(block * BLOCK_STEPS, (block + 1) * BLOCK_STEPS, dtype=np.int32)
      self._values = np.asarray(self._schedule(steps))
      self._block = block
    return float(self._values[offset])


class Metrics(Hook):
  """Records the metrics of every `log_every`-th step, of the first and of the last step.

  The metrics are those of the step alone, not means over several steps, so that a resumed run records the same values.
  For at most `MAX_NORM_EVENTS` of the steps in between, an event `norms` has the norms of all parameters.
  """

  def __init__(self, writer: Writer, clock: Clock, *, log_every: int, total: int, steps_an_epoch: float,
               schedule: Schedule) -> None:
    self._writer, self._clock = writer, clock
    self._log_every, self._total, self._steps_an_epoch = log_every, total, steps_an_epoch
    self.learning_rates = LearningRates(schedule)
    self._norms_every = log_every * math.ceil(total / (log_every * MAX_NORM_EVENTS))

  def on_metrics(self, done: Done) -> None:
    step, metrics = done.step, done.metrics
    self._clock.tick()
    if step % self._log_every and step not in (1, self._total):
      self._writer.advance(step)
      return
    values = {name: to_float(mean) for name, mean in metrics.means.items()}
    values |= {'grad_norm': float(metrics.grad_norm), 'lr': self.learning_rates.at(step - 1),
               'epoch': step / self._steps_an_epoch}
    rates = self._clock.take_rates()
    speed = {**(rates._asdict() if rates else {}), 'time_left_s': self._clock.time_left_s(self._total - step)}
    values |= {name: number for name, number in speed.items() if number is not None}
    self._writer.write(step, {f'train/{name}': number for name, number in values.items()})
    if step % self._norms_every == 0 or step in (1, self._total):
      norms = {group: {path: _rounded(norm) for path, norm in norm_by_path.items()}
               for group, norm_by_path in metrics.norms._asdict().items()}  # group: grad, param, update
      self._writer.event('norms', step=step, **norms)
    self._writer.event('goodput', step=step, **self._clock.goodput()._asdict())


def _rounded(norm: ArrayLike) -> float | list[float]:
  """Returns a norm rounded to six digits; a list of the norms of all layers for an array `[L]`."""
  rounded = [float(f'{number:.6g}') for number in np.ravel(norm).tolist()]
  return rounded if np.ndim(norm) else rounded[0]


class Finite(Hook):
  """Stops the run, or logs the skipped step, if loss or gradient are not finite; `diagnose.build` makes `diagnose`."""

  def __init__(self, policy: schema.OnNonfinite, diagnose: Callable[[Done], Sequence[str]]) -> None:
    self._policy, self._diagnose = policy, diagnose
    self.num_skipped = 0  # steps since the start of this process

  def on_metrics(self, done: Done) -> None:
    if bool(done.metrics.ok):
      return
    message = self._describe(done)
    match self._policy:
      case schema.OnNonfinite.STOP:
        raise UserError(f'{message}\nNothing was updated by that step. To skip such steps, set '
                        '--config.train.on_nonfinite=skip')
      case schema.OnNonfinite.SKIP:
        self.num_skipped += 1
        log.warning('%s\nSkipped; %d so far since the start of this process.', message, self.num_skipped)

  def _describe(self, done: Done) -> str:
    """Returns the message, which names the gradients, parameters and examples with values that are not finite."""
    metrics = done.metrics
    gradients = nonfinite_paths(metrics.norms.grad)
    params = nonfinite_paths(metrics.norms.param)
    return '\n'.join([
        f'Step {done.step} {NOT_FINITE} {to_float(metrics.means["loss"]):.6g}, '
        f'gradient norm {float(metrics.grad_norm):.6g}.',
        f'  gradient of: {documents.joined(gradients, 5) or "none"}',
        f'  parameters: {documents.joined(params, 5) or "all finite before the step"}',
        f'  examples: {documents.joined(self._diagnose(done), 5) or "each finite on its own"}'])


class Evaluate(Hook):
  """Runs one evaluation at intervals, and stores the metrics of the evaluation in the record and in `latest`.

  Args:
    every: steps between evaluations.
    run: maps a state and its step to the metrics, by name.
    metric: the evaluation is skipped at a step for which `latest` already has this metric; '' = never.
  """

  def __init__(self, every: int, run: Callable[[TrainState, int], Mapping[str, float]], writer: Writer,
               clock: Clock, latest: Latest, *, metric: str = '') -> None:
    self.every, self._run, self._writer, self._clock = every, run, writer, clock
    self._latest, self._metric = latest, metric

  def on_state(self, step: int, state: TrainState) -> None:
    measured_step, _ = self._latest.get(self._metric, _NOT_MEASURED)
    if measured_step == step:
      return
    with self._clock.phase('evaluate'):
      values = self._run(state, step)
    self._writer.write(step, dict(values))
    self._latest.update({name: (step, number) for name, number in values.items()})


class EarlyStop(Hook):
  """Ends the run after `patience` consecutive evaluations without a new best value of a metric.

  A value is a new best one if it exceeds the best by more than `min_delta`. The hook must follow the evaluations; the
  train job reads `reason` after each step. The state of the hook is not in the checkpoint: a resumed run first passes
  the rows of its record to `recall`, and then decides like an uninterrupted run.
  """

  def __init__(self, metric: str, *, patience: int, min_delta: float, every: int, latest: Latest) -> None:
    self.every, self._metric, self._patience, self._min_delta = every, metric, patience, min_delta
    self._latest = latest
    self._sign = -1. if reader.is_lower_better(metric) else 1.
    self._best = -math.inf  # the best value times `_sign`
    self._best_step, self._num_since = 0, 0  # the step of the best value, and the number of evaluations since then

  @property
  def reason(self) -> str:
    """Returns why the run should end, or ''."""
    if self._num_since < self._patience:
      return ''
    return (f'early stopping: {self._metric} has had no new best value for {self._num_since} evaluations, since step '
            f'{self._best_step:,}')

  def recall(self, rows: Sequence[Mapping[str, float]], *, up_to: int) -> None:
    """Reconstructs the state of the hook from the rows of a record up to a step."""
    evaluated = [row for row in rows if row['step'] <= up_to and row['step'] % self.every == 0]
    value_by_step = {int(row['step']): row[self._metric] for row in evaluated if self._metric in row}
    for step in sorted(value_by_step):
      self._update(step, float(value_by_step[step]))

  def on_state(self, step: int, state: TrainState) -> None:
    del state
    measured_step, value = self._latest.get(self._metric, _NOT_MEASURED)
    if measured_step != step:
      raise UserError(f'train.early_stop.metric={self._metric!r} was not measured; the evaluations gave: '
                      f'{", ".join(sorted(self._latest)) or "nothing"}')
    self._update(step, value)

  def _update(self, step: int, value: float) -> None:
    """Takes the value of one evaluation. Once there is a reason to end, later values change nothing."""
    if self.reason:
      return
    self._num_since += 1
    if self._sign * value > self._best + self._min_delta:
      self._best = self._sign * value
      self._best_step, self._num_since = step, 0


class Checkpoint(Hook):
  """Saves the state when it is due; the metrics of the same step determine the best checkpoint.

  A run of one process repeats a save that fails for a temporary reason, for `failures.patience()`. Orbax completes a
  save in the background. If it fails there, `on_metrics` notices this, and the state of the next step is saved instead.
  When the loop has ended, the train job calls `save` with `wait`.

  digest: of the parameters of the last save; '' = none.
  has_failed: whether the last save has failed, so that the state is not on disk.
  """

  def __init__(self, times: SaveTimes, checkpointer: Checkpointer, writer: Writer, clock: Clock, *,
               about: Mapping[str, Any], latest: Latest) -> None:
    self.every = times.every
    self._times, self._checkpointer, self._writer, self._clock = times, checkpointer, writer, clock
    self._about, self._latest = about, latest
    self.digest, self.has_failed = '', False
    self._saved_step = self._recorded_step = -1  # of the last save, and of the last event `checkpoint`
    self._is_overdue = False  # whether the last save failed in the background

  def on_metrics(self, done: Done) -> None:
    try:
      with self._noting_failure():
        self._checkpointer.check()
    except TemporaryError as error:
      if not _is_repeated(error):
        raise
      self._discard_save()
      log.warning('%s\nThe state of the next step is saved in its place.', error)
      self._is_overdue, self.every = True, 1

  def on_state(self, step: int, state: TrainState) -> None:
    is_due = self._times.decide(step) or self._is_overdue
    self.every = self._times.every
    if is_due:
      self.save(step, state)

  def save(self, step: int, state: TrainState, *, wait: bool = False) -> None:
    """Saves the state of a step, unless that is done; with `wait`, returns when the checkpoint is complete on disk."""
    def save_once() -> None:
      try:
        if step != self._saved_step:
          self._start_save(step, state)
        if wait:
          with self._noting_failure():
            self._checkpointer.wait()
      except TemporaryError as error:
        if _is_repeated(error):
          self._discard_save()
        raise

    failures.retried(save_once, f'saving the checkpoint of step {step:,}', choose=_is_repeated)
    self._is_overdue = self.has_failed = False

  def _discard_save(self) -> None:
    """Discards the save that failed, so that the same or another state can be saved."""
    self._checkpointer.reopen()
    self._saved_step = -1

  def _start_save(self, step: int, state: TrainState) -> None:
    """Starts to save a state, which Orbax completes in the background, and records the checkpoint."""
    def announce(digest: str) -> None:
      if step != self._recorded_step:
        self._writer.event('checkpoint', step=step, params_digest=digest)
        self._recorded_step = step

    self._writer.check_not_moved()
    with self._clock.phase('checkpoint'), self._noting_failure():
      metrics = {name: value for name, (measured_step, value) in self._latest.items() if measured_step == step}
      self.digest = self._checkpointer.save(state, self._about, metrics, announce=announce)
    self._saved_step = step
    self._times.note_save()
    self._writer.event('goodput', step=step, **self._clock.goodput()._asdict())

  @contextlib.contextmanager
  def _noting_failure(self) -> Iterator[None]:
    """Sets `has_failed` if a save fails inside; if the run directory was moved, raises an error that says so."""
    try:
      yield
    except (UserError, TemporaryError):
      self.has_failed = True
      self._writer.check_not_moved()
      raise


def _is_repeated(error: BaseException) -> bool:
  """Returns whether a save that failed with this error is repeated."""
  return isinstance(error, TemporaryError) and jax.process_count() == 1 and failures.patience() > 0


class Alarm(Hook):
  """Logs and records an alarm when a metric has been below a limit for many steps; ends the run if `watch.stops`.

  `Watch` (`core/contracts.py`) has the settings. The count of consecutive low steps begins at 0 when a run resumes.
  """

  def __init__(self, watch: Watch, writer: Writer) -> None:
    self._watch, self._writer, self._num_low = watch, writer, 0

  def on_metrics(self, done: Done) -> None:
    watch = self._watch
    if done.step <= watch.after:
      return
    value = to_float(done.metrics.means[watch.metric])
    self._num_low = 0 if value >= watch.below else self._num_low + 1
    if self._num_low != watch.lasting:
      return
    all_values = ', '.join(f'{name} {to_float(mean):.4g}' for name, mean in done.metrics.means.items())
    message = (f'ALARM at step {done.step:,}: train/{watch.metric}={value:.4g} has been below '
               f'{watch.setting}={watch.below:g} for {watch.lasting:,} steps.\n  {all_values}\n  {watch.advice}.')
    self._writer.event('alarm', step=done.step, metric=watch.metric, value=value, below=watch.below)
    if watch.stops:
      raise UserError(message)
    log.warning('%s', message)
