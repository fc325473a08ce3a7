"""The alarm: when it rings, how often, and what it says."""
from __future__ import annotations

import logging
from typing import Any

import jax.numpy as jnp
import pytest

from vit_jax.core.contracts import Watch
from vit_jax.core.errors import UserError
from vit_jax.core.types import Mean
from vit_jax.train.hooks import Alarm
from vit_jax.train.loop import Done
from vit_jax.train.state import Norms, StepMetrics


class Record:
  """Takes events as a writer does."""

  def __init__(self) -> None:
    self.events: list[dict[str, Any]] = []

  def event(self, name: str, **fields: object) -> None:
    self.events.append({'event': name, **fields})


def watch(*, stops: bool = False) -> Watch:
  return Watch('information', .5, 'objective.collapse.threshold', lasting=3, after=2, stops=stops, advice='Want sense')


def done(step: int, value: float) -> Done:
  means = {'information': Mean(jnp.asarray(value * 4), jnp.asarray(4.)), 'loss': Mean(jnp.asarray(6.), jnp.asarray(2.))}
  return Done(step, StepMetrics(means, jnp.zeros(()), Norms({}, {}, {}), jnp.asarray(True)), {}, None)


def ring(values: list[float], *, stops: bool = False) -> list[dict[str, Any]]:
  record = Record()
  alarm = Alarm(watch(stops=stops), record)
  for step, value in enumerate(values, 1):
    alarm.on_metrics(done(step, value))
  return record.events


def test_it_rings_once_for_each_time_that_the_metric_stays_low(caplog: pytest.LogCaptureFixture) -> None:
  with caplog.at_level(logging.WARNING, 'vit_jax.train'):
    events = ring([.1, .1, .1, .1, .1, .1, .1, .9, .2, .2, .2, .2])
  assert [e['step'] for e in events] == [5, 11]  # from the third step on, three in a row
  assert events[0] == {'event': 'alarm', 'step': 5, 'metric': 'information', 'value': pytest.approx(.1), 'below': .5}
  assert caplog.messages[0] == (
      'ALARM at step 5: train/information=0.1 has been below objective.collapse.threshold=0.5 for 3 steps.\n'
      '  information 0.1, loss 3\n  Want sense.')


def test_a_short_time_is_no_alarm_and_no_number_counts_as_low() -> None:
  assert ring([1., 1., .1, .1, .6, .1, .1, .5]) == []
  assert [e['step'] for e in ring([float('nan')] * 5)] == [5]


def test_it_ends_the_run_if_it_is_to() -> None:
  with pytest.raises(UserError, match=r'ALARM at step 5: train/information=0\.1 .*\n.*\n  Want sense\.'):
    ring([.1] * 5, stops=True)
