"""Tests of the mimetic initialization: products of kernels near multiples of the identity."""
from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.core.types import Params
from vit_jax.models.vit import vit
from vit_jax.models.vit.attention import mimetic, with_mimetic

WIDTH, HEADS = 64, 2
SETTINGS = schema.ViT(patch=8, width=WIDTH, depth=2, heads=HEADS, mlp=schema.Mlp(8), init=schema.Init.MIMETIC)


def attention(seed: int = 0, heads: int = HEADS) -> Params:
  """Kernels by name."""
  shape = (WIDTH, heads, WIDTH // heads)
  empty = {name: {'kernel': jnp.zeros(shape)} for name in ('query', 'key', 'value')}
  found = mimetic({**empty, 'out': {'kernel': jnp.zeros(shape), 'bias': jnp.ones(WIDTH)}}, jax.random.key(seed))
  return {name: np.asarray(leaves['kernel'], np.float64) for name, leaves in found.items()}


def test_values_and_outputs_are_near_a_negative_identity() -> None:
  found = attention()
  product = np.einsum('dak,ake->de', found['value'], found['out'])
  noise = product + .4 * np.eye(WIDTH)
  assert abs(noise.mean()) < .005 and np.isclose(noise.std(), .4 / 8, rtol=.1)  # 4,096 values: 9 deviations


def test_queries_and_keys_of_one_head_are_near_the_identity_and_of_two_its_best_approximation() -> None:
  whole = attention(heads=1)
  product = np.einsum('dak,eak->de', whole['query'], whole['key'])
  assert np.isclose((product - .7 * np.eye(WIDTH)).std(), .7 / 8, rtol=.1)
  halves = attention()
  products = np.einsum('dak,eak->ade', halves['query'], halves['key'])
  for one in products:
    sizes = np.linalg.svd(one, compute_uv=False)
    assert sizes[WIDTH // 2 - 1] > .3 and sizes[WIDTH // 2] < 1e-5 and np.trace(one) > .3 * WIDTH
  assert not np.allclose(products[0], products[1], atol=.1)


@pytest.mark.slow(reason='2 s each: initializes networks')
@pytest.mark.parametrize('block', [schema.Plain(), schema.Axial()])
def test_each_layer_and_part_of_a_block_has_its_own_noise(block: schema.Plain) -> None:
  settings = dataclasses.replace(SETTINGS, pool=schema.Mean(), block=block)
  params, _ = vit.build(settings, (16, 16)).init(jax.random.key(0), jnp.zeros((1, 16, 16, 3)))
  parts = [params['blocks'][part] if part else params['blocks'] for part in block.parts]
  kernels = np.concatenate([part['attn']['value']['kernel'] for part in parts])
  assert kernels.shape == (2 * len(parts), WIDTH, HEADS, WIDTH // HEADS)
  assert len({tuple(np.round(one.ravel()[:9], 4)) for one in kernels}) == len(kernels)


def test_a_block_without_attention_is_refused() -> None:
  with pytest.raises(UserError, match="model.init: expected another one than mimetic for a block without 'attn'"):
    with_mimetic({'mixing': {}}, {'': jax.random.key(0)})
