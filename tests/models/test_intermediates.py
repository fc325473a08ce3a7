"""Features inside a network: those after each block, against the network run block by block."""
from __future__ import annotations

import jax
import numpy as np
import pytest
import vits

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.models import backbones, intermediates
from vit_jax.models.vit import vit

SETTINGS = schema.ViT(patch=8, width=16, depth=3, heads=2, mlp=schema.Mlp(16), registers=1,
                      execution=schema.Execution.SCAN)
MODEL = vit.build(SETTINGS, (16, 24))
IMAGE = np.random.default_rng(0).random((3, 16, 24, 3), np.float32)


@pytest.fixture(scope='module')
def params() -> dict:
  return vits.drawn(jax.eval_shape(MODEL.init, jax.random.key(0), IMAGE)[0], deviation=.3)


@pytest.fixture(scope='module')
def layers(params: dict) -> list[np.ndarray]:
  """Normalized class and mean patch token after each block, one after the other."""
  @jax.jit
  def after_block(tokens: jax.Array, layer: int) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    tokens, _ = MODEL.block(params, tokens, layer=layer, capture=False)
    features = MODEL.finish(params, tokens, grid=(2, 3))
    return tokens, (features.pooled, features.tokens.mean(1))

  tokens, found = jax.jit(MODEL.begin)(params, IMAGE), []
  for layer in range(3):
    tokens, features = after_block(tokens, layer)
    found.append(tuple(map(np.asarray, features)))
  return found


@pytest.mark.slow(reason='2 s each: a program; the last block is below')
@pytest.mark.parametrize('blocks', [(1, 3), (-2, -1)])
def test_blocks_count_from_the_start_or_the_end(blocks: tuple[int, ...], params: dict, layers: list) -> None:
  found = jax.jit(
      lambda p, x: intermediates.concatenate(intermediates.read(MODEL, p, x, blocks), patches=False))(params, IMAGE)
  want = np.concatenate([layers[b - 1 if b > 0 else b][0] for b in blocks], -1)
  np.testing.assert_allclose(found, want, atol=1e-5)


@pytest.mark.slow(reason='1 s: another program')
def test_the_mean_patch_token_of_the_last_can_be_added(params: dict, layers: list) -> None:
  found = jax.jit(
      lambda p, x: intermediates.concatenate(intermediates.read(MODEL, p, x, (2,)), patches=True))(params, IMAGE)
  np.testing.assert_allclose(found, np.concatenate(layers[1], -1), atol=1e-5)


def test_after_the_last_block_they_are_what_the_head_sees(params: dict, layers: list) -> None:
  pooled = jax.jit(lambda p, x: MODEL.apply(p, {}, x, train=False, key=None)[0].pooled)(params, IMAGE)
  np.testing.assert_allclose(pooled, layers[-1][0], atol=1e-5)


@pytest.mark.parametrize('blocks', [(4,), (0,), (-4,), (2, 1), (1, 1), (1, -3)])
def test_blocks_that_there_are_not_are_refused(blocks: tuple[int, ...], params: dict) -> None:
  with pytest.raises(UserError, match='blocks: expected ascending numbers from 1 to 3, or from -3 to -1'):
    intermediates.read(MODEL, params, IMAGE, blocks)


def test_a_network_of_convolutions_has_no_blocks_to_read_after() -> None:
  assert intermediates.is_layered(MODEL)
  assert not intermediates.is_layered(backbones.build(schema.ResNet(layers=(1,), width=32), (32, 32)))
