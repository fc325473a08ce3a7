"""The weighted sum of attention (ViT paper, Appendix A, eqs. 6 and 7), in a plain form and in a fast one.

Both compute the same; the second is the one in use where the weights are not wanted themselves. It differs in four
things, each found by reading the compiled programs of a TPU:

  Logits lie keys first, `[B, A, M, Q]`, so that products of 64 wide heads need no transposed copy of the weights.
  Weights are kept before they are divided by their sum, in the compute dtype.
  The sum comes out of the product with the values, to which a column of ones is appended: a head's width is padded to
  128 there anyway.
  The gradient is written by hand: it needs the weights, the result and the sums, and `sum_k p dp = sum_k o do`.

Knows nothing of parameters, positions or dropout.
"""
from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from vit_jax.core.types import Array

Saved = tuple[Array, Array, Array, Array, Array, Array]


def attention_weights(query: Array, key: Array, *, relative: Array | None = None) -> Array:
  """`softmax((q k^T + R) / sqrt(K))` over the keys (eq. 6, and Appendix D.4 for R).

  Args:
    query: `[B, Q, A, K]`, any float dtype.
    key: `[B, M, A, K]`, same dtype.
    relative: R, `[B, A, Q, M]` f32, or None for zeros.

  Returns:
    `[B, A, Q, M]` f32, query before key; rows sum to 1. Products accumulate in f32, softmax is in f32.
  """
  scale = query.shape[-1] ** -.5
  logits_BAQM = jnp.einsum('bqak,bmak->baqm', query, key, preferred_element_type=jnp.float32)
  logits_BAQM = logits_BAQM if relative is None else logits_BAQM + relative
  return jax.nn.softmax(logits_BAQM * scale, axis=-1)


def combine(weights: Array, value: Array) -> Array:
  """`A v` (eq. 7): weights `[B, A, Q, M]` f32 and value `[B, M, A, K]` to `[B, Q, A, K]`, value's dtype."""
  return jnp.einsum('baqm,bmak->bqak', weights.astype(value.dtype), value)


def plain_attend(query: Array, key: Array, value: Array) -> Array:
  """Attention of `[B, Q, A, K]` queries to `[B, M, A, K]` keys and values; `[B, Q, A, K]`."""
  return combine(attention_weights(query, key), value)


@jax.custom_vjp
def attend(query: Array, key: Array, value: Array) -> Array:
  """Equal to `plain_attend` up to rounding; reverse-mode differentiation only.

  Products accumulate in f32; logits, weights and their sum are rounded to the compute dtype. The result is named
  `attention` for rematerialisation.
  """
  return _forward(query, key, value)[0]


def _forward(query: Array, key: Array, value: Array) -> tuple[Array, Saved]:
  dtype = query.dtype
  logits_BAMQ = jnp.einsum('bmak,bqak->bamq', key, scaled(query))
  largest_BA1Q = jax.lax.stop_gradient(logits_BAMQ.max(2, keepdims=True))
  weights_BAMQ = jnp.exp((logits_BAMQ - largest_BA1Q).astype(jnp.float32)).astype(dtype)
  with_ones = jnp.concatenate([value, jnp.ones((*value.shape[:-1], 1), dtype)], axis=-1)
  sums_BAJQ = jnp.einsum('bmak,bamq->bakq', with_ones, weights_BAMQ)
  # Cut before they are widened: the product itself is then stored in the compute dtype.
  inverse_BA1Q = 1. / sums_BAJQ[:, :, -1:].astype(jnp.float32)
  mixed_BAKQ = (sums_BAJQ[:, :, :-1].astype(jnp.float32) * inverse_BA1Q).astype(dtype)
  mixed_BAKQ = checkpoint_name(mixed_BAKQ, 'attention')
  return mixed_BAKQ.transpose(0, 3, 1, 2), (query, key, value, weights_BAMQ, inverse_BA1Q, mixed_BAKQ)


def _backward(saved: Saved, dmixed: Array) -> tuple[Array, Array, Array]:
  query, key, value, weights_BAMQ, inverse_BA1Q, mixed_BAKQ = saved
  dtype = query.dtype
  dmixed_BAKQ = dmixed.transpose(0, 2, 3, 1).astype(jnp.float32) * inverse_BA1Q
  shared_BA1Q = (dmixed_BAKQ * mixed_BAKQ.astype(jnp.float32)).sum(2, keepdims=True)
  dmixed_BAKQ = dmixed_BAKQ.astype(dtype)
  dweights_BAMQ = jnp.einsum('bmak,bakq->bamq', value, dmixed_BAKQ).astype(jnp.float32)
  dlogits_BAMQ = (weights_BAMQ.astype(jnp.float32) * (dweights_BAMQ - shared_BA1Q)).astype(dtype)
  dquery = scaled(jnp.einsum('bamq,bmak->bqak', dlogits_BAMQ, key))
  dkey = scaled(jnp.einsum('bamq,bqak->bmak', dlogits_BAMQ, query))
  return dquery, dkey, jnp.einsum('bamq,bakq->bmak', weights_BAMQ, dmixed_BAKQ)


def scaled(x: Array) -> Array:
  """`x / sqrt(K)`, computed in f32, in the dtype of `x`."""
  return (x.astype(jnp.float32) * x.shape[-1] ** -.5).astype(x.dtype)


attend.defvjp(_forward, _backward)
