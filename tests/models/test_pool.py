"""Tests of attention pooling."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.config import schema
from vit_jax.config.schema import Gelu
from vit_jax.core import trees
from vit_jax.core.types import Array, Params
from vit_jax.models.kernels import norm_act
from vit_jax.models.layers import applied, initial
from vit_jax.models.vit.context import Context
from vit_jax.models.vit.pool import AttentionPool

CONTEXT = Context(norm=schema.LayerNorm(), gelu=Gelu.TANH, dtype=jnp.float32)
POOL = AttentionPool(heads=4, hidden=48, context=CONTEXT)


@pytest.fixture(scope='module')
def inputs() -> tuple[Params, Array]:
  tokens = jax.random.normal(jax.random.key(0), (3, 5, 32))
  rng = np.random.default_rng(0)
  params = jax.tree.map(lambda x: jax.device_put(np.float32(.3 * rng.normal(size=x.shape))),
                        jax.eval_shape(lambda key: initial(POOL, key, tokens), jax.random.key(1)))
  return params, tokens


@jax.jit
def pooled(params: Params, tokens: Array) -> Array:
  return applied(POOL, params, tokens)[0]


def test_pooling_equals_a_computation_head_by_head(inputs: tuple[Params, Array]) -> None:
  params, tokens = inputs
  p, expected = jax.tree.map(lambda x: np.asarray(x, np.float64), params), []
  for x in np.asarray(tokens, np.float64):
    y = p['attn']['out']['bias'].copy()
    for a in range(4):
      query = p['probe'][0, 0] @ p['attn']['query']['kernel'][:, a] + p['attn']['query']['bias'][a]
      key, value = (x @ p['attn'][n]['kernel'][:, a] + p['attn'][n]['bias'][a] for n in ('key', 'value'))
      weights = np.exp(key @ query / np.sqrt(8))
      y += weights / weights.sum() @ value @ p['attn']['out']['kernel'][a]
    normed = (y - y.mean()) / np.sqrt(y.var() + 1e-6) * p['norm']['scale'] + p['norm']['bias']
    before = normed @ p['mlp']['up']['kernel'] + p['mlp']['up']['bias']
    hidden = np.asarray(norm_act.gelu(jnp.asarray(before, jnp.float32), Gelu.TANH))
    expected.append(y + hidden @ p['mlp']['down']['kernel'] + p['mlp']['down']['bias'])
  np.testing.assert_allclose(pooled(params, tokens), np.stack(expected), rtol=1e-4, atol=1e-5)


def test_the_order_of_tokens_does_not_matter_to_pooling(inputs: tuple[Params, Array]) -> None:
  params, tokens = inputs
  np.testing.assert_allclose(pooled(params, tokens[:, ::-1]), pooled(params, tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.slow(reason='3 s: draws a network')
def test_the_probe_starts_xavier_uniform() -> None:
  pool = AttentionPool(heads=4, hidden=8, context=CONTEXT)
  params = initial(pool, jax.random.key(0), jnp.zeros((1, 1, 256)))
  assert params['probe'].shape == (1, 1, 256)
  np.testing.assert_allclose(jnp.abs(params['probe']).max(), np.sqrt(6 / 257), rtol=.03)
  assert set(trees.flatten(params)) >= {'attn/query/kernel', 'attn/out/bias', 'norm/scale', 'mlp/down/kernel'}
