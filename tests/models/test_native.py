"""Images at their own aspect as a ViT takes them: patches, a grid for each image, and padding that changes nothing."""
from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.config import schema
from vit_jax.config.schema import LastNorm, PositionResize, PositionsAt
from vit_jax.core.errors import UserError
from vit_jax.core.types import NativeImages
from vit_jax.models import backbones

GRIDS = ((4, 4), (2, 7), (7, 2), (1, 16), (3, 5))
NUM, PATCH = 16, 4


def network(**settings: Any) -> tuple[Any, Any]:
  model = schema.ViT(**{'width': 16, 'depth': 2, 'heads': 2, 'patch': PATCH, 'mlp': schema.Mlp(32), **settings})
  built = backbones.build(model, (16, 16))
  params, _ = built.init(jax.random.key(0), jnp.zeros((1, 16, 16, 3)))
  leaves, tree = jax.tree.flatten(params)
  rng = np.random.default_rng(0)
  return built, jax.tree.unflatten(tree, [jnp.asarray(rng.normal(0., .3, x.shape), jnp.float32) for x in leaves])


def images() -> list[Any]:
  rng = np.random.default_rng(1)
  return [jnp.asarray(rng.normal(size=(1, h * PATCH, w * PATCH, 3)), jnp.float32) for h, w in GRIDS]


def patches(image: Any, *, num: int, padding: float = 0.) -> Any:
  h, w = image.shape[1] // PATCH, image.shape[2] // PATCH
  rows = image.reshape(h, PATCH, w, PATCH, 3).swapaxes(1, 2).reshape(h * w, -1)
  return jnp.pad(rows, ((0, num - h * w), (0, 0)), constant_values=padding)


def native(*, num: int = NUM, padding: float = 0.) -> NativeImages:
  return NativeImages(jnp.stack([patches(image, num=num, padding=padding) for image in images()]),
                      jnp.asarray(GRIDS, jnp.int32))


def pooled(built: Any, params: Any, image: Any) -> Any:
  return np.asarray(built.apply(params, {}, image, train=False, key=None)[0].pooled)


KINDS: tuple[dict[str, Any], ...] = (
    *({'positions': schema.Learned(resize=how)} for how in PositionResize),
    {'pool': schema.Mean()}, {'pool': schema.Mean(), 'last_norm': LastNorm.POOLED, 'registers': 3},
    {'pool': schema.First()}, {'pool': schema.Map(), 'registers': 2}, {'positions': schema.NoPositions()},
    {'positions': schema.Learned(at=PositionsAt.SHARED)}, {'block': schema.Parallel()}, {'norm_before': True})


@pytest.mark.parametrize('settings', KINDS, ids=str)
def test_images_of_many_grids_in_one_batch_have_the_features_of_each_alone(settings: dict[str, Any]) -> None:
  built, params = network(**settings)
  alone = np.concatenate([pooled(built, params, image) for image in images()])
  np.testing.assert_allclose(pooled(built, params, native()), alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('pool', [schema.ClassToken(), schema.Mean(), schema.Map()], ids=lambda x: type(x).__name__)
def test_more_padding_of_any_values_changes_nothing(pool: Any) -> None:
  built, params = network(pool=pool)
  np.testing.assert_allclose(pooled(built, params, native(num=NUM + 9, padding=7.)), pooled(built, params, native()),
                             rtol=1e-6, atol=1e-6)


def test_gradients_are_finite_and_none_reaches_padding() -> None:
  built, params = network(pool=schema.Map())
  given = native(padding=2.)

  def loss(patches: Any) -> Any:
    features, _ = built.apply(params, {}, given._replace(patches=patches), train=True, key=None)
    return jnp.square(features.pooled).sum()

  gradient = np.asarray(jax.grad(loss)(given.patches))
  is_patch = np.asarray(given.mask)
  assert np.isfinite(gradient).all() and np.abs(gradient[is_patch]).max(-1).min() > 0
  assert not gradient[~is_patch].any()


@pytest.mark.parametrize('positions', [schema.SinCos(), schema.Learned(at=PositionsAt.LAYERS), schema.Learned2d()],
                         ids=str)
def test_positions_without_a_form_for_own_aspects_are_refused(positions: Any) -> None:
  built, params = network(positions=positions)
  with pytest.raises(UserError, match=r'model.positions.*: expected .* for images at their own aspect, got'):
    pooled(built, params, native())
