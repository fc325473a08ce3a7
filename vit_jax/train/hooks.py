"""Hooks of the training loop: logging, evaluation, checkpoints, early stopping, alarms, non-finite values.

The train job makes them, and passes them to `loop.run` in this order: metrics and alarms, then the evaluations, then
early stopping and the checkpoint. They share a dict `Latest`: evaluations write their results, later hooks read them.
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
"""By name of an evaluation metric: the step of the newest value, and the value."""
NOT_FINITE = 'is not finite: loss'
"""Part of the message of a run that stops because of its loss or gradient; a study recognizes such runs by it."""
MOST_NORMS = 1000  # events with the norms of all parameters in the record of a run, about
BLOCK = 1024  # steps whose learning rates are computed together


def value(mean: Mean) -> float:
  """Returns the value of a mean whose arrays are on the host."""
  return float(mean.sum) / max(float(mean.weight), 1e-12)


class LearningRates:
  """The values of a schedule by step, on the host.

  They are computed in blocks of `BLOCK` steps, because each computation waits for the device, which runs the next step.
  The blocks are the same in every process and after a resume.
  """

  def __init__(self, schedule: Schedule) -> None:
    self._schedule = jax.jit(jax.vmap(schedule))
    self._block, self._values = -1, np.zeros(BLOCK, np.float32)

  def at(self, step: int) -> float:
    """Returns the learning rate of a step, which counts from 0."""
    block, offset = divmod(step, BLOCK)
    if block != self._block:
      steps = np.arange(block * BLOCK, (block + 1) * BLOCK, dtype=np.int32)
      self._block, self._values = block, np.asarray(self._schedule(steps))
    return float(self._values[offset])


class Metrics(Hook):
  """Records metrics every `log_every` steps: of that step alone, not means, so that a resumed run records the same.

  For about `MOST_NORMS` of these steps, or fewer, an event `norms` has the norms of all parameters.
  """

  def __init__(self, writer: Writer, clock: Clock, *, log_every: int, total: int, steps_an_epoch: float,
               schedule: Schedule) -> None:
    self._writer, self._clock, self.learning_rates = writer, clock, LearningRates(schedule)
    self._log_every, self._total, self._epoch = log_every, total, steps_an_epoch
    self._norms_every = log_every * math.ceil(total / (log_every * MOST_NORMS))

  def on_metrics(self, done: Done) -> None:
    step, metrics = done.step, done.metrics
    self._clock.tick()
    if step % self._log_every and step not in (1, self._total):
      self._writer.advance(step)
      return
    values = {name: value(mean) for name, mean in metrics.means.items()}
    values |= {'grad_norm': float(metrics.grad_norm), 'lr': self.learning_rates.at(step - 1),
               'epoch': step / self._epoch}
    rates, left_s = self._clock.rates(), self._clock.time_left_s(self._total - step)
    speed = {**(rates._asdict() if rates else {}), 'time_left_s': left_s}
    values |= {name: number for name, number in speed.items() if number is not None}
    self._writer.write(step, {f'train/{name}': number for name, number in values.items()})
    if step % self._norms_every == 0 or step in (1, self._total):
      self._writer.event('norms', step=step, **{kind: {name: _rounded(norm) for name, norm in norms.items()}
                                                for kind, norms in metrics.norms._asdict().items()})
    self._writer.event('goodput', step=step, **self._clock.goodput()._asdict())


def _rounded(norm: ArrayLike) -> float | list[float]:
  """Returns a norm rounded to six digits; a list for an array with a norm for each layer."""
  number = np.asarray(norm, np.float64).tolist()
  return [float(f'{each:.6g}') for each in number] if isinstance(number, list) else float(f'{number:.6g}')


class Finite(Hook):
  """Stops the run, or logs that a step was skipped, if loss or gradient were not finite.

  Args:
    policy: whether to stop or to skip.
    diagnose: returns the names of the examples whose own loss is not finite (`diagnose.build`).
  """

  def __init__(self, policy: schema.OnNonfinite, diagnose: Callable[[Done], Sequence[str]]) -> None:
    self._policy, self._diagnose = policy, diagnose
    self.skipped = 0

  def on_metrics(self, done: Done) -> None:
    if bool(done.metrics.ok):
      return
    text = self._describe(done)
    match self._policy:
      case schema.OnNonfinite.STOP:
        raise UserError(f'{text}\nNothing was updated by that step. To skip such steps, set '
                        '--config.train.on_nonfinite=skip')
      case schema.OnNonfinite.SKIP:
        self.skipped += 1
        log.warning('%s\nSkipped; %d so far since the start of this process.', text, self.skipped)

  def _describe(self, done: Done) -> str:
    """Returns the message: where the gradient, the parameters and the losses of single examples are not finite."""
    metrics, examples = done.metrics, self._diagnose(done)
    params = nonfinite_paths(metrics.norms.param)
    return '\n'.join([
        f'Step {done.step} {NOT_FINITE} {value(metrics.means["loss"]):.6g}, '
        f'gradient norm {float(metrics.grad_norm):.6g}.',
        f'  gradient of: {documents.joined(nonfinite_paths(metrics.norms.grad), 5) or "none"}',
        f'  parameters: {documents.joined(params, 5) or "all finite before the step"}',
        f'  examples: {documents.joined(examples, 5) or "each finite on its own"}'])


class Evaluate(Hook):
  """Runs one evaluation at intervals, records its metrics, and stores them in `latest`.

  Args:
    every: steps between evaluations.
    run: returns the metrics of the state of a step, by name.
    writer, clock: of the run.
    latest: the newest values of all metrics.
    metric: skip steps for which `latest` already has this metric; '' = skip none.
  """

  def __init__(self, every: int, run: Callable[[TrainState, int], Mapping[str, float]], writer: Writer,
               clock: Clock, latest: Latest, *, metric: str = '') -> None:
    self.every, self._run, self._writer, self._clock = every, run, writer, clock
    self._latest, self._metric = latest, metric

  def on_state(self, step: int, state: TrainState) -> None:
    if self._latest.get(self._metric, (-1, 0.))[0] == step:
      return
    with self._clock.phase('evaluate'):
      values = self._run(state, step)
    self._writer.write(step, dict(values))
    self._latest.update({name: (step, number) for name, number in values.items()})


class EarlyStop(Hook):
  """Ends the run after `patience` consecutive evaluations without a new best value of a metric.

  A value is a new best one if it exceeds the best by more than `min_delta`. The hook must follow the evaluations; the
  train job reads its `reason` after each step. Its state is not in the checkpoint: a resumed run calls `recall` with
  its record, and then decides like an uninterrupted run.
  """

  def __init__(self, metric: str, *, patience: int, min_delta: float, every: int, latest: Latest) -> None:
    self.every, self._metric, self._patience, self._min_delta = every, metric, patience, min_delta
    self._latest = latest
    self._sign = -1. if reader.is_lower_better(metric) else 1.
    self._best, self._best_step, self._since = -math.inf, 0, 0

  @property
  def reason(self) -> str:
    """Returns why the run should end, or ''."""
    if self._since < self._patience:
      return ''
    return (f'early stopping: {self._metric} has had no new best value for {self._since} evaluations, since step '
            f'{self._best_step:,}')

  def recall(self, rows: Sequence[Mapping[str, float]], *, up_to: int) -> None:
    """Reconstructs the state from the rows of a record up to a step."""
    by_step = {int(row['step']): row[self._metric] for row in rows
               if self._metric in row and row['step'] <= up_to and row['step'] % self.every == 0}
    for step in sorted(by_step):
      self._update(step, float(by_step[step]))

  def on_state(self, step: int, state: TrainState) -> None:
    del state
    measured_step, number = self._latest.get(self._metric, (-1, 0.))
    if measured_step != step:
      raise UserError(f'train.early_stop.metric={self._metric!r} was not measured; the evaluations gave: '
                      f'{", ".join(sorted(self._latest)) or "nothing"}')
    self._update(step, number)

  def _update(self, step: int, number: float) -> None:
    """Counts an evaluation; after the decision to end nothing changes any more."""
    if self.reason:
      return
    if self._sign * number > self._best + self._min_delta:
      self._best, self._best_step, self._since = self._sign * number, step, 0
    else:
      self._since += 1


class Checkpoint(Hook):
  """Saves the state when it is due; the metrics of the same step determine the best checkpoint.

  A run of one process repeats a save that fails for a temporary reason, for `failures.patience()`. Orbax completes a
  save in the background: `on_metrics` notices that this failed, and the state of the next step is then saved.

  digest: of the parameters of the last save; '' = none.
  has_failed: whether the last save has failed, so that the state is not on disk.
  """

  def __init__(self, times: SaveTimes, checkpointer: Checkpointer, writer: Writer, clock: Clock, *,
               about: Mapping[str, Any], latest: Latest) -> None:
    self.every, self._times = times.next, times
    self._checkpointer, self._writer, self._clock = checkpointer, writer, clock
    self._about, self._latest = about, latest
    self.digest, self.has_failed = '', False
    self._saved_step = self._recorded_step = -1  # of the last save, and of the last event `checkpoint`
    self._is_overdue = False  # the last save in the background failed

  def on_metrics(self, done: Done) -> None:
    try:
      with self._noting_failure():
        self._checkpointer.check()
    except TemporaryError as error:
      if not self._discard_for_retry(error):
        raise
      log.warning('%s\nThe state of the next step is saved in its place.', error)
      self._is_overdue, self.every = True, 1

  def on_state(self, step: int, state: TrainState) -> None:
    is_due = self._times.is_due(step) or self._is_overdue
    self.every = self._times.next
    if is_due:
      self.save(step, state)

  def save(self, step: int, state: TrainState, *, wait: bool = False) -> None:
    """Saves the state, unless that of this step is saved; with `wait`, returns when it is complete on disk."""
    def save_once() -> None:
      if step != self._saved_step:
        self._save(step, state)
      if wait:
        with self._noting_failure():
          self._checkpointer.wait()

    failures.retried(save_once, f'saving the checkpoint of step {step:,}', choose=self._discard_for_retry)
    self._is_overdue = self.has_failed = False

  def _discard_for_retry(self, error: BaseException) -> bool:
    """Returns whether the save that failed may be repeated, and discards it then; only a run of one process repeats."""
    if not isinstance(error, TemporaryError) or jax.process_count() > 1 or failures.patience() <= 0:
      return False
    self._checkpointer.reopen()
    self._saved_step = -1
    return True

  def _save(self, step: int, state: TrainState) -> None:
    """Starts one save, and records it."""
    def announce(digest: str) -> None:
      if step != self._recorded_step:
        self._writer.event('checkpoint', step=step, params_digest=digest)
        self._recorded_step = step

    self._writer.check_place()
    with self._clock.phase('checkpoint'), self._noting_failure():
      metrics = {name: number for name, (measured_step, number) in self._latest.items() if measured_step == step}
      self.digest = self._checkpointer.save(state, self._about, metrics, announce=announce)
    self._saved_step = step
    self._times.saved()
    self._writer.event('goodput', step=step, **self._clock.goodput()._asdict())

  @contextlib.contextmanager
  def _noting_failure(self) -> Iterator[None]:
    """Notes that a save has failed; if the run directory was moved, raises an error that names this cause."""
    try:
      yield
    except (UserError, TemporaryError):
      self.has_failed = True
      self._writer.check_place()
      raise


class Alarm(Hook):
  """Logs and records an alarm when a metric has been below a limit for many steps; ends the run if `watch.stops`.

  The settings are in `Watch` (`core/contracts.py`). When a run resumes, the count of low steps begins at 0.
  """

  def __init__(self, watch: Watch, writer: Writer) -> None:
    self._watch, self._writer, self._num_low = watch, writer, 0

  def on_metrics(self, done: Done) -> None:
    watch = self._watch
    if done.step <= watch.after:
      return
    watched = value(done.metrics.means[watch.metric])
    self._num_low = 0 if watched >= watch.below else self._num_low + 1
    if self._num_low != watch.lasting:
      return
    values = {name: value(mean) for name, mean in done.metrics.means.items()}
    text = '\n'.join([
        f'ALARM at step {done.step:,}: train/{watch.metric}={watched:.4g} has been below '
        f'{watch.setting}={watch.below:g} for {watch.lasting:,} steps.',
        '  ' + ', '.join(f'{name} {number:.4g}' for name, number in values.items()), f'  {watch.advice}.'])
    self._writer.event('alarm', step=done.step, metric=watch.metric, value=watched, below=watch.below)
    if watch.stops:
      raise UserError(text)
    log.warning('%s', text)
