"""Classification by NumPy: thresholds, smoothing and class weights, in the order they apply."""
from __future__ import annotations

from typing import Any

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.objectives.supervised import Supervised

LABELS = np.array([[.75, .25, 0, 0], [0, 0, 1, 0], [0, .9, .1, 0], [0, 0, 0, 1], [1, 0, 0, 0], [0, 1, 0, 0]])
MASK = np.array([1, 1, 1, 0, 1, 1.])
WEIGHTS = (1., 3., .5, 2.)


def task(**settings: object) -> Supervised:
  return Supervised(fakes.PlainNet(), fakes.LinearHead(), num_classes=4, **{'loss': schema.Loss.SOFTMAX,
                                                                            'label_smoothing': 0., **settings})


def measure(objective: Supervised) -> tuple[float, float, np.ndarray]:
  """Loss, its weight, and the logits it is of."""
  rng = np.random.default_rng(1)
  batch = {'image': jax.device_put(np.float32(rng.normal(size=(6, 4, 4, 3)))), 'labels': np.float32(LABELS),
           'mask': np.float32(MASK)}
  params, extra = objective.init(jax.random.key(0), batch)
  params = jax.tree.map(lambda x: 3. * x, params)
  view = objective.views()['student']

  @jax.jit
  def both(params: Any, extra: Any) -> tuple[Any, Any]:
    return (objective.loss(params, extra, batch, jax.random.key(1), jnp.asarray(0)),
            view.predict(view.select(params, extra), batch['image']).logits)

  out, logits = both(params, extra)
  return float(out.loss.value), float(out.loss.weight), np.asarray(logits, np.float64)


def test_class_weights_make_a_weighted_mean() -> None:
  got, weight, z = measure(task(class_weights=WEIGHTS))
  log_p = z - np.log(np.exp(z).sum(-1, keepdims=True))
  weights = LABELS @ np.array(WEIGHTS) * MASK
  want = (weights * -(LABELS * log_p).sum(-1)).sum() / weights.sum()
  assert got == pytest.approx(want, rel=1e-5) and weight == pytest.approx(weights.sum())


@pytest.mark.parametrize(('loss', 'scale'), [(schema.Loss.SIGMOID, 1.), (schema.Loss.BCE, .25)])
def test_targets_are_hardened_then_smoothed(loss: schema.Loss, scale: float) -> None:
  got, weight, z = measure(task(loss=loss, threshold=.2, label_smoothing=.1))
  targets = .9 * (LABELS > .2) + .1 / 4
  p = 1 / (1 + np.exp(-z))
  per_example = -(targets * np.log(p) + (1 - targets) * np.log(1 - p)).sum(-1) * scale
  assert got == pytest.approx((MASK * per_example).sum() / MASK.sum(), rel=1e-5) and weight == 5


@pytest.mark.slow(reason='2 s: a program for each; test_contracts.py has sums over microbatches')
@pytest.mark.parametrize('accumulate', [2, 4])
def test_class_weights_are_the_same_over_microbatches(accumulate: int) -> None:
  data = programs.batch(size=8, classes=4)
  objective = task(class_weights=WEIGHTS)
  states = [programs.run(programs.build(objective, fakes.normalize, programs.MESHES['one'], like=data,
                                        accumulate=n), programs.MESHES['one'], data, 2)[0] for n in (1, accumulate)]
  programs.assert_close(*states)


def test_class_weights_must_have_one_number_for_each_class() -> None:
  with pytest.raises(UserError, match='class_weights: expected a number for each of the 4 classes, got 2. Give '):
    task(class_weights=(1., 2.))
