"""A network run layer by layer gives the same output as at once, and correct gradients of its attention."""
from __future__ import annotations

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.weights import drawn, test_golden
from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.inspect import layerwise
from vit_jax.inspect.model import Model
from vit_jax.models.vit import vit

PX = (16, 24)
TINY = schema.ViT(patch=8, width=16, depth=2, heads=4, mlp=schema.Mlp(24))
GOLDEN = np.load(pathlib.Path(__file__).with_name('attention.npz'))  # by `make_attention.py`
IMAGE = np.random.default_rng(1).normal(size=(2, *PX, 3)).astype(np.float32)


def driver(settings: schema.ViT) -> layerwise.Driver:
  backbone, rng = vit.build(settings, PX), np.random.default_rng(0)
  shapes, _ = jax.eval_shape(backbone.init, jax.random.key(0), IMAGE)
  params = jax.tree.map(lambda x: rng.normal(size=x.shape, scale=.3).astype(np.float32), shapes)
  return layerwise.Driver(backbone, params)


@pytest.mark.slow(reason='1 to 2 s each: networks')
@pytest.mark.parametrize('changes', [{}, {'pool': schema.Map(), 'registers': 2},
                                     {'positions': schema.Learned(schema.PositionsAt.SHARED)}])
def test_the_last_layer_finishes_as_apply_does(changes: dict[str, object]) -> None:
  own = driver(dataclasses.replace(TINY, **changes))
  layers = list(own.layers(IMAGE, capture=True))
  want, _ = jax.jit(lambda: own.backbone.apply(own.params, {}, IMAGE, train=False, key=None)[0].pooled)(), None
  np.testing.assert_allclose(own.finish(layers[-1].tokens, grid=(2, 3)).pooled, want, rtol=1e-3, atol=1e-4)
  assert [layer.depth for layer in layers] == [0, 1, 2] and layers[0].attention is None
  assert all(np.allclose(layer.attention.sum(-1), 1, atol=1e-5) for layer in layers[1:])


@pytest.mark.parametrize('name', GOLDEN.files)
def test_attention_is_that_of_transformers(name: str, tmp_path: pathlib.Path) -> None:
  own = Model(test_golden.load(name, tmp_path)).driver
  _, *layers = own.layers(jnp.asarray(drawn.image(32)), capture=True)
  assert GOLDEN[name].shape == (len(layers), 2, 4, *[layers[0].tokens.shape[1]] * 2)
  np.testing.assert_allclose(np.stack([layer.attention for layer in layers]), GOLDEN[name], rtol=0, atol=1e-5)


@pytest.mark.slow(reason='2 s: a gradient in float64')
def test_gradients_of_attention_equal_finite_differences() -> None:
  own, rng = driver(TINY), np.random.default_rng(4)
  head = rng.normal(size=(16, 5)).astype(np.float32)
  pairs = list(own.relevance_gradients(IMAGE, lambda f: f.pooled @ head, 3, grid=(2, 3)))
  assert len(pairs) == 2
  inputs = [layer.tokens for layer in own.layers(IMAGE, capture=False)]
  block = jax.jit(lambda x, layer, delta: own.backbone.block(own.params, x, layer=layer, capture=False,
                                                             attn_delta=delta)[0])
  for i, (attention, gradient) in enumerate(reversed(pairs)):
    assert attention.shape == (2, 4, 7, 7)
    change = rng.normal(size=attention.shape).astype(np.float32)

    def score(scale: float, i: int = i, change: np.ndarray = change) -> float:
      x = block(inputs[i], i, np.float32(scale) * change)
      for later in range(i + 1, 2):
        x = block(x, later, 0 * change)
      return float((np.asarray(own.finish(x, grid=(2, 3)).pooled, np.float64) @ head[:, 3]).sum())

    want = (score(1e-3) - score(-1e-3)) / 2e-3
    np.testing.assert_allclose(float((gradient * change).sum()), want, rtol=2e-2, atol=1e-2)


def test_axial_attention_is_rows_first_then_columns() -> None:
  rng = np.random.default_rng(0)
  rows, columns = rng.random((1, 2, 1, 3, 3)), rng.random((1, 3, 1, 2, 2))
  x = rng.random((2, 3))
  mixed = np.stack([rows[0, i, 0] @ x[i] for i in range(2)])
  want = np.stack([columns[0, j, 0] @ mixed[:, j] for j in range(3)], axis=1)
  whole = layerwise.full_attention({'row_attention': jnp.asarray(rows), 'column_attention': jnp.asarray(columns)})
  np.testing.assert_allclose(np.asarray(whole)[0, 0] @ x.reshape(6), want.reshape(6), rtol=1e-5)


def test_a_network_without_blocks_is_an_error() -> None:
  with pytest.raises(UserError, match='expected a Vision Transformer, got a object without transformer blocks'):
    layerwise.Driver(object(), {})  # type: ignore[arg-type]
