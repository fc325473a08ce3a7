"""Hooks of the training loop: logging, evaluation, checkpoints, early stopping, alarms, non-finite values.

The train job makes them, and passes them to `loop.run` in the order in which they are called: metrics and alarms first,
then the evaluations, which leave their results in `Latest`, then early stopping and the checkpoint, which read them.
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
"""The newest value of each evaluation metric, and its step."""
NOT_FINITE = 'is not finite: loss'
"""Part of the message of a run that stops because of its loss or gradient."""
MOST_NORMS = 1000
"""Rows of the norms of all parameters in the record of a run."""
BLOCK = 1024
"""Steps whose learning rates are computed together."""


def value(mean: Mean) -> float:
  """Returns the value of a mean that is on the host."""
  return float(mean.sum) / max(float(mean.weight), 1e-12)


class LearningRates:
  """The values of a schedule by step, on the host.

  They are computed in blocks, as each call would wait for the device, which runs the next step. The blocks are the same
  in every process and after a resume.
  """

  def __init__(self, schedule: Schedule) -> None:
    self._run = jax.jit(jax.vmap(schedule))
    self._number, self._values = -1, np.zeros(BLOCK, np.float32)

  def at(self, step: int) -> float:
    """Returns the value at a step, from 0."""
    number, offset = divmod(step, BLOCK)
    if number != self._number:
      steps = np.arange(number * BLOCK, (number + 1) * BLOCK, dtype=np.int32)
      self._number, self._values = number, np.asarray(self._run(steps))
    return float(self._values[offset])


class Metrics(Hook):
  """Logs every `log_every` steps: the values of that step, not means over several, so a resumed run logs the same.

  The norms of all parameters are events of at most about `MOST_NORMS` of these steps.
  """

  def __init__(self, writer: Writer, clock: Clock, *, log_every: int, total: int, steps_an_epoch: float,
               schedule: Schedule) -> None:
    self._writer, self._clock, self.learning_rates = writer, clock, LearningRates(schedule)
    self._log_every, self._total, self._epoch = log_every, total, steps_an_epoch
    self._norms_every = log_every * -(-total // (log_every * MOST_NORMS))

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
  """Returns six digits of a norm, or of one for each layer."""
  number = np.asarray(norm, np.float64).tolist()
  return [float(f'{each:.6g}') for each in number] if isinstance(number, list) else float(f'{number:.6g}')


class Finite(Hook):
  """Stops the run, or logs that a step was skipped, if loss or gradient were not finite.

  Args:
    policy: whether to stop.
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
    metrics = done.metrics
    weights = nonfinite_paths(metrics.norms.param)
    examples = self._diagnose(done)
    return '\n'.join([
        f'Step {done.step} {NOT_FINITE} {value(metrics.means["loss"]):.6g}, '
        f'gradient norm {float(metrics.grad_norm):.6g}.',
        f'  gradient of: {documents.joined(nonfinite_paths(metrics.norms.grad), 5) or "none"}',
        f'  parameters: {documents.joined(weights, 5) or "all finite before the step"}',
        f'  examples: {documents.joined(examples, 5) or "each finite on its own"}'])


class Evaluate(Hook):
  """Runs one evaluation at intervals, records its metrics, and stores them in `latest`.

  Args:
    every: steps between evaluations.
    run: evaluates the state of a step.
    writer, clock: of the run.
    latest: the newest values of all metrics.
    metric: a step for which this metric already exists is skipped; '' = none is.
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

  It must follow the evaluations in the list of hooks; the job asks for its `reason` after each step. Its state is not
  in the checkpoint: a resumed run reconstructs it from the record (`recall`), and then decides like an uninterrupted
  run.
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
    """Reconstructs the state from the evaluations of a record up to a step."""
    seen = {int(row['step']): row[self._metric] for row in rows
            if self._metric in row and row['step'] <= up_to and row['step'] % self.every == 0}
    for step in sorted(seen):
      self._see(step, float(seen[step]))

  def on_state(self, step: int, state: TrainState) -> None:
    del state
    at, number = self._latest.get(self._metric, (-1, 0.))
    if at != step:
      raise UserError(f'train.early_stop.metric={self._metric!r} was not measured; the evaluations gave: '
                      f'{", ".join(sorted(self._latest)) or "nothing"}')
    self._see(step, number)

  def _see(self, step: int, number: float) -> None:
    if self.reason:
      return
    if self._sign * number > self._best + self._min_delta:
      self._best, self._best_step, self._since = self._sign * number, step, 0
    else:
      self._since += 1


class Checkpoint(Hook):
  """Saves the state when it is due; the metrics of the same step determine the best checkpoint.

  A run of one process repeats a save that fails for a temporary reason: `save` for `failures.patience()`, and a save in
  the background at the next step, which is noticed with the metrics of a step.

  digest: of the parameters of the last save; '' = none.
  has_failed: whether the last save has failed, so that the state is not on disk.
  """

  def __init__(self, times: SaveTimes, checkpointer: Checkpointer, writer: Writer, clock: Clock, *,
               about: Mapping[str, Any], latest: Latest) -> None:
    self.every, self._times = times.next, times
    self._checkpointer, self._writer, self._clock = checkpointer, writer, clock
    self._about, self._latest = about, latest
    self.digest, self.has_failed = '', False
    self._saved = self._announced = -1  # steps
    self._is_overdue = False  # the last save in the background failed

  def on_metrics(self, done: Done) -> None:
    try:
      with self._in_place():
        self._checkpointer.check()
    except TemporaryError as error:
      if not self._may_retry(error):
        raise
      log.warning('%s\nThe state of the next step is saved in its place.', error)
      self._is_overdue, self.every = True, 1

  def on_state(self, step: int, state: TrainState) -> None:
    is_due = self._times.is_due(step) or self._is_overdue
    self.every = self._times.next
    if is_due:
      self.save(step, state)

  def save(self, step: int, state: TrainState, *, wait: bool = False) -> None:
    """Saves the state, unless that of this step is saved; `wait` until it is complete."""
    def once() -> None:
      if step != self._saved:
        self._save(step, state)
      if wait:
        with self._in_place():
          self._checkpointer.wait()

    failures.retried(once, f'saving the checkpoint of step {step:,}', choose=self._may_retry)
    self._is_overdue = self.has_failed = False

  def _may_retry(self, error: BaseException) -> bool:
    """Returns whether this process may save again, and discards the save that failed; several would all have to."""
    if not isinstance(error, TemporaryError) or jax.process_count() > 1 or failures.patience() <= 0:
      return False
    self._checkpointer.reopen()
    self._saved = -1
    return True

  def _save(self, step: int, state: TrainState) -> None:
    def announce(digest: str) -> None:
      if step != self._announced:
        self._writer.event('checkpoint', step=step, params_digest=digest)
        self._announced = step

    self._writer.check_place()
    with self._clock.phase('checkpoint'), self._in_place():
      metrics = {name: number for name, (at, number) in self._latest.items() if at == step}
      self.digest = self._checkpointer.save(state, self._about, metrics, announce=announce)
    self._saved = step
    self._times.saved()
    self._writer.event('goodput', step=step, **self._clock.goodput()._asdict())

  @contextlib.contextmanager
  def _in_place(self) -> Iterator[None]:
    """Replaces the error of a save that failed because the run directory was moved."""
    try:
      yield
    except (UserError, TemporaryError):
      self.has_failed = True
      self._writer.check_place()
      raise


class Alarm(Hook):
  """Logs an alarm, also as an `alarm` event, whenever a metric stays low; ends the run if `stops`.

  When a run resumes, the count of low steps starts at 0.
  """

  def __init__(self, watch: Watch, writer: Writer) -> None:
    self._watch, self._writer, self._low = watch, writer, 0

  def on_metrics(self, done: Done) -> None:
    watch = self._watch
    if done.step <= watch.after:
      return
    now = value(done.metrics.means[watch.metric])
    self._low = 0 if now >= watch.below else self._low + 1
    if self._low != watch.lasting:
      return
    others = {name: value(mean) for name, mean in done.metrics.means.items()}
    text = '\n'.join([
        f'ALARM at step {done.step:,}: train/{watch.metric}={now:.4g} has been below {watch.setting}={watch.below:g} '
        f'for {watch.lasting:,} steps.', '  ' + ', '.join(f'{name} {number:.4g}' for name, number in others.items()),
        f'  {watch.advice}.'])
    self._writer.event('alarm', step=done.step, metric=watch.metric, value=now, below=watch.below)
    if watch.stops:
      raise UserError(text)
    log.warning('%s', text)
