"""A person's own kind of pool: the shape that it returns is checked."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import pytest

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, NativeImages, Params
from vit_jax.models import backbones
from vit_jax.models.vit import pool


@dataclasses.dataclass
class Largest(schema.PoolSettings):
  """The largest value of each channel over all tokens."""
  implementation: ClassVar[str] = f'{__name__}:LargestPool'


@dataclasses.dataclass(frozen=True, kw_only=True)
class LargestPool(pool.ClassToken):
  """Returns what `form` does of the tokens."""
  form: ClassVar[Callable[[Array], Any]] = staticmethod(lambda x_BMD: x_BMD.max(1))

  def pooled(self, params: Params, x_BMD: Array) -> Array:
    found: Array = type(self).form(x_BMD)
    return found


def features(form: Callable[[Array], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
  monkeypatch.setattr(LargestPool, 'form', staticmethod(form))
  model = schema.ViT(width=16, depth=1, heads=2, patch=8, mlp=schema.Mlp(16), pool=Largest())
  network = backbones.build(model, (16, 16))
  image = jnp.zeros((3, 16, 16, 3))
  return jax.eval_shape(lambda: network.apply(*network.init(jax.random.key(0), image), image, train=False, key=None))


def test_one_vector_of_the_width_for_each_image_is_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
  assert any(x.shape == (3, 16) for x in jax.tree.leaves(features(lambda x: x.max(1), monkeypatch)))


@pytest.mark.parametrize('form, got', [
    (lambda x: x, '(3, 4, 16)'), (lambda x: x.max(2), '(3, 4)'), (lambda x: x.max(1, keepdims=True), '(3, 1, 16)'),
    (lambda x: x.max(1)[:, :8], '(3, 8)'), (lambda x: None, 'NoneType')])
def test_another_shape_is_an_error_that_names_both(
    form: Callable[[Array], Any], got: str, monkeypatch: pytest.MonkeyPatch) -> None:
  with pytest.raises(UserError) as error:
    features(form, monkeypatch)
  assert str(error.value).endswith(f'LargestPool: expected an array (3, 16) from `pooled`, for tokens (3, 4, 16), got '
                                   f'{got}. Return one vector of the width of the network for each image.')


def test_a_pool_without_a_mask_is_refused_for_images_at_their_own_aspect() -> None:
  model = schema.ViT(width=16, depth=1, heads=2, patch=8, mlp=schema.Mlp(16), pool=Largest())
  network = backbones.build(model, (16, 16))
  params, state = network.init(jax.random.key(0), jnp.zeros((1, 16, 16, 3)))
  images = NativeImages(jnp.zeros((1, 4, 192)), jnp.ones((1, 2), jnp.int32))
  with pytest.raises(UserError, match=r'LargestPool: expected a method pooled\(params, x_BMD, mask\)'):
    network.apply(params, state, images, train=False, key=None)
