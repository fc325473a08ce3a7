"""Each optimiser against its recurrence in NumPy float64, and stacked leaves against unstacked ones."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from vit_jax.config import schema
from vit_jax.core import trees
from vit_jax.core.errors import UserError
from vit_jax.optim import masks, optimizers

RATE = .01


def params() -> dict[str, dict[str, jax.Array]]:
  rng = np.random.default_rng(0)
  return {'blocks': {'kernel': jnp.asarray(rng.normal(size=(3, 4, 5)), jnp.float32)},
          'head': {'kernel': jnp.asarray(rng.normal(size=(4, 7)), jnp.float32), 'bias': jnp.ones(7)}}


def gradients(step: int) -> dict[str, dict[str, jax.Array]]:
  rng = np.random.default_rng(step + 1)
  return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), params())


def train(config: schema.AdamW | schema.Sgd, num_steps: int = 3) -> dict[str, np.ndarray]:
  optimizer = optimizers.build(config, lambda step: jnp.asarray(RATE * (1. + step)))
  now = params()
  state = optimizer.init(now)
  for step in range(num_steps):
    grads = gradients(step)
    updates, state = optimizer.update(grads, state, now, step=jnp.asarray(step), grad_norm=optax.tree.norm(grads))
    now = optax.apply_updates(now, updates)
  return {k: np.asarray(v) for k, v in trees.flatten(now).items()}


def clipped(step: int, limit: float) -> dict[str, np.ndarray]:
  grads = {k: np.asarray(v, np.float64) for k, v in trees.flatten(gradients(step)).items()}
  norm = np.sqrt(sum((g ** 2).sum() for g in grads.values()))
  return {k: g * min(1, limit / norm) for k, g in grads.items()}


@pytest.mark.parametrize('limit', [1., 1e6])
def test_adamw_follows_its_recurrence(limit: float) -> None:
  config = schema.AdamW(b1=.8, b2=.95, eps=1e-6, weight_decay=.3, clip_norm=limit)
  now = {k: np.asarray(v, np.float64) for k, v in trees.flatten(params()).items()}
  m, v = ({k: np.zeros_like(x) for k, x in now.items()} for _ in range(2))
  for step in range(3):
    for k, g in clipped(step, limit).items():
      m[k], v[k] = .8 * m[k] + .2 * g, .95 * v[k] + .05 * g ** 2
      update = (m[k] / (1 - .8 ** (step + 1))) / (np.sqrt(v[k] / (1 - .95 ** (step + 1))) + 1e-6)
      now[k] = now[k] - RATE * (1 + step) * (update + .3 * now[k] * k.endswith('kernel'))
  for k, got in train(config).items():
    np.testing.assert_allclose(got, now[k], rtol=2e-5, atol=2e-6, err_msg=k)


def test_sgd_adds_decay_to_the_gradient_and_keeps_momentum() -> None:
  config = schema.Sgd(momentum=.9, weight_decay=.1, clip_norm=0.)
  now = {k: np.asarray(v, np.float64) for k, v in trees.flatten(params()).items()}
  trace = {k: np.zeros_like(x) for k, x in now.items()}
  for step in range(3):
    for k, g in clipped(step, 1e9).items():
      trace[k] = .9 * trace[k] + g + .1 * now[k] * k.endswith('kernel')
      now[k] = now[k] - RATE * (1 + step) * trace[k]
  for k, got in train(config).items():
    np.testing.assert_allclose(got, now[k], rtol=2e-5, atol=2e-6, err_msg=k)


def test_the_mask_goes_by_whole_path_names() -> None:
  assert trees.flatten(masks.mask(params(), ['.*/kernel'], what='x')) == {
      'blocks/kernel': True, 'head/bias': False, 'head/kernel': True}
  assert not any(trees.flatten(masks.mask(params(), [], what='x')).values())


def test_a_pattern_that_matches_nothing_is_an_error_that_shows_names() -> None:
  with pytest.raises(UserError, match=r"optimizer.decayed: 'kernel' matches no parameter.*blocks/kernel"):
    optimizers.build(schema.AdamW(decayed=('kernel',)), lambda s: jnp.asarray(1.)).init(params())
