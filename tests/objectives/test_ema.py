"""The moving average: its warm-up rules and its recurrence."""
from __future__ import annotations

import fakes
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.config import schema
from vit_jax.objectives import ema
from vit_jax.objectives.networks import STATE
from vit_jax.objectives.supervised import Supervised

Warmup = schema.EmaWarmup


@pytest.mark.parametrize(('warmup', 'want'), [
    (Warmup.RATIO, [.1, 2 / 11, 11 / 20, .9]),
    (Warmup.POWER, [0., 1 - 2 ** (-2 / 3), 1 - 11 ** (-2 / 3), .9]),
    (Warmup.NONE, [.9] * 4)])
def test_the_decay_begins_by_its_rule(warmup: schema.EmaWarmup, want: list[float]) -> None:
  got = [float(ema.Growing(.9, warmup).decay({}, jnp.asarray(s))[0]) for s in (0, 1, 10, 10_000)]
  assert got == pytest.approx(want, rel=1e-5)


class Task:
  def after_update(self, params: object, extra: object, stats: object, step: object) -> object:
    return {}


@pytest.mark.parametrize('warmup', Warmup)
def test_the_average_follows_its_recurrence(warmup: schema.EmaWarmup) -> None:
  task = ema.Ema(Task(), ema.Growing(.7, warmup))
  extra, want = {'ema': {'w': jnp.ones(3)}}, np.ones(3)
  for step in range(6):
    w = np.arange(3.) * step
    decay = float(ema.Growing(.7, warmup).decay({}, jnp.asarray(step))[0])
    want = decay * want + (1 - decay) * w
    extra = task.after_update({'w': jnp.asarray(w, jnp.float32)}, extra, {}, jnp.asarray(step))
  np.testing.assert_allclose(extra['ema']['w'], want, rtol=1e-5)


class Counting:
  """A task whose `extra` changes after each update, as a teacher, a center or running statistics do."""

  def after_update(self, params: object, extra: dict[str, float], stats: float, step: int) -> dict[str, float]:
    return {'total': 2. * extra['total'] + stats + step}


def test_what_the_task_keeps_follows_its_own_rule() -> None:
  task, extra = ema.Ema(Counting(), ema.Growing(.7)), {'ema': {'w': jnp.ones(3)}, 'inner': {'total': 1.}}
  for step in range(3):
    extra = task.after_update({'w': jnp.zeros(3)}, extra, 10., jnp.asarray(step))
  assert extra['inner']['total'] == 2. * (2. * (2. + 10.) + 11.) + 12.


def test_a_network_and_its_average_are_evaluated_by_the_same_program() -> None:
  one = Supervised(fakes.PlainNet(), fakes.LinearHead(), num_classes=3, loss=schema.Loss.SOFTMAX, label_smoothing=0.)
  views = ema.Ema(one, ema.Growing(.9)).views()
  assert views['student'].predict == views['ema'].predict
  own, average = ({'backbone': name, 'head': name} for name in ('own', 'average'))
  assert [view.select(own, {'ema': average})['head'] for view in views.values()] == ['own', 'average']
  assert [view.select(own, {'ema': average, 'inner': {STATE: 'statistics'}})['state'] for view in views.values()] == [
      'statistics'] * 2
