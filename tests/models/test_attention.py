"""Tests of self-attention."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.core.types import Array
from vit_jax.models.attention import SelfAttention, attend, attention_weights, combine
from vit_jax.models.layers import applied, initial


def projections(dtype: jnp.dtype = jnp.float32) -> tuple[Array, Array, Array]:
  q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 5, 4, 8)).astype(dtype)
  return q, k, v


def test_attend_equals_numpy_in_float64() -> None:
  q, k, v = (np.asarray(a, np.float64) for a in projections())
  logits = np.einsum('bqak,bmak->baqm', q, k) / np.sqrt(8)
  weights = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  np.testing.assert_allclose(
      attend(*projections()), np.einsum('baqm,bmak->bqak', weights, v), rtol=1e-4, atol=1e-5)


def test_attention_rows_sum_to_one_in_f32_even_for_bf16() -> None:
  q, k, _ = projections(jnp.bfloat16)
  weights = attention_weights(q * 30, k)
  assert weights.dtype == jnp.float32 and weights.shape == (2, 4, 5, 5)
  np.testing.assert_allclose(weights.sum(-1), 1., rtol=1e-6)


def test_attention_stays_finite_for_large_logits() -> None:
  q, k, v = projections()
  assert jnp.isfinite(attend(q * 1e4, k * 1e4, v)).all()


def test_captured_weights_reproduce_the_output() -> None:
  module = SelfAttention(4, jnp.float32)
  x = jax.random.normal(jax.random.key(1), (2 * 5, 32))
  params = initial(module, jax.random.key(0), x, num_images=2, capture=False)
  y, nothing = applied(module, params, x, num_images=2, capture=False)
  y_captured, captured = applied(module, params, x, num_images=2, capture=True)
  assert not nothing and set(captured) == {'attention'}
  np.testing.assert_allclose(y_captured, y, rtol=1e-6, atol=1e-6)
  value = jnp.einsum('rd,dak->rak', x, params['value']['kernel']).reshape(2, 5, 4, 8)
  mixed = combine(captured['attention'], value)
  by_hand = jnp.einsum('bmak,akd->bmd', mixed, params['out']['kernel']).reshape(10, 32)
  np.testing.assert_allclose(y, by_hand, rtol=1e-5, atol=1e-5)


def test_images_do_not_attend_to_each_other() -> None:
  module = SelfAttention(4, jnp.float32)
  x = jax.random.normal(jax.random.key(1), (2 * 5, 32))
  params = initial(module, jax.random.key(0), x, num_images=2, capture=False)
  both, _ = applied(module, params, x, num_images=2, capture=False)
  second, _ = applied(module, params, x[5:], num_images=1, capture=False)
  np.testing.assert_allclose(both[5:], second, rtol=1e-5, atol=1e-6)
