"""Raises an alarm when a metric of the train step has been low for too long. Knows no objective."""
from __future__ import annotations

import logging

import jax

from vit_jax.core.contracts import Watch
from vit_jax.core.errors import UserError
from vit_jax.record.writer import Writer
from vit_jax.train.hooks import value
from vit_jax.train.loop import Done
from vit_jax.train.state import TrainState

log = logging.getLogger('vit_jax.train')


class Alarm:
  """Hook: logs an alarm, also as an `alarm` event, each time that a metric stays low; ends the run if `stops`.

  The count of steps starts at 0 when a run resumes.
  """
  every = 0

  def __init__(self, watch: Watch, writer: Writer):
    self._watch, self._writer, self._low = watch, writer, 0

  def on_metrics(self, done: Done) -> None:
    watch = self._watch
    if done.step <= watch.after:
      return
    now = value(jax.device_get(done.metrics.means[watch.metric]))
    self._low = 0 if now >= watch.below else self._low + 1
    if self._low != watch.lasting:
      return
    others = {name: value(mean) for name, mean in jax.device_get(done.metrics.means).items()}
    text = '\n'.join([
        f'ALARM at step {done.step:,}: train/{watch.metric}={now:.4g} has been below {watch.setting}={watch.below:g} '
        f'for {watch.lasting:,} steps.', '  ' + ', '.join(f'{name} {number:.4g}' for name, number in others.items()),
        f'  {watch.advice}.'])
    self._writer.event('alarm', step=done.step, metric=watch.metric, value=now, below=watch.below)
    if watch.stops:
      raise UserError(text)
    log.warning('%s', text)

  def on_state(self, step: int, state: TrainState) -> None:
    raise AssertionError('never due')
