"""Mixup against NumPy."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.data import mix


def batch_of(size: int) -> dict[str, jax.Array]:
  rng = np.random.default_rng(0)
  return {'image': jnp.array(rng.normal(size=(size, 4, 4, 3)), jnp.float32),
          'label': jnp.array(rng.integers(0, 7, size), jnp.int32)}


@pytest.mark.parametrize('size', [6, 7, 1])
def test_neighbours_are_mixed_and_the_odd_one_out_stays(size: int) -> None:
  batch = batch_of(size)
  out = mix.mix_pairs(batch, .3, num_classes=7)
  image, labels = np.asarray(batch['image']), np.eye(7)[np.asarray(batch['label'])]
  for row in range(size):
    partner = row ^ 1 if row ^ 1 < size else row
    np.testing.assert_allclose(out['image'][row], .3 * image[row] + .7 * image[partner], atol=1e-6)
    np.testing.assert_allclose(out['labels'][row], .3 * labels[row] + .7 * labels[partner], atol=1e-6)
  np.testing.assert_array_equal(out['label'], batch['label'])


def test_labels_that_are_soft_already_are_mixed() -> None:
  batch = batch_of(6) | {'labels': jnp.array(np.random.default_rng(1).random((6, 7)), jnp.float32)}
  out = mix.mix_pairs(batch, .25, num_classes=7)
  np.testing.assert_allclose(out['labels'][3], .25 * batch['labels'][3] + .75 * batch['labels'][2], rtol=1e-6)


def test_padding_is_not_mixed_into_examples() -> None:
  batch = batch_of(6) | {'mask': jnp.array([1., 1., 1., 0., 0., 0.])}
  out = mix.mix_pairs(batch, .3, num_classes=7)
  np.testing.assert_array_equal(out['image'][2], batch['image'][2])
  np.testing.assert_array_equal(out['labels'][2], np.eye(7)[int(batch['label'][2])])
  assert not np.allclose(out['image'][0], batch['image'][0])


def test_lambda_follows_the_beta_distribution() -> None:
  one_hot = {'image': jnp.zeros((2, 1, 1, 3)), 'label': jnp.array([0, 1])}
  draw = jax.vmap(lambda key: mix.mixup(one_hot, key, alpha=.5, num_classes=2)['labels'][0, 0])
  drawn = np.asarray(draw(jax.random.split(jax.random.key(0), 4000)))
  assert drawn.mean() == pytest.approx(.5, abs=.02)
  assert drawn.var() == pytest.approx(1 / 8, abs=.01)  # 1 / (4 (2 alpha + 1))
