"""The weighted sum of attention (ViT paper, Appendix A, eqs. 6 and 7), in a plain form and in a fast one.

Both compute the same; the second is the one in use where the weights themselves are not needed. It differs in that
weights are kept before they are divided by their sum, in the compute dtype, and that its gradient is written by hand:
it needs the weights, the result and the sums, and `sum_k p dp = sum_k o do`. What else differs is chosen when a
program is lowered for a platform:

  CPU: heads before tokens, so that each product is one of plain matrices.
  elsewhere, found by reading the compiled programs of a TPU: logits lie keys first, `[B, A, M, Q]`, so that products of
    64 wide heads need no transposed copy of the weights. Their sum comes out of the product with the values, to which
    a column of ones is appended: a head's width is padded to 128 there anyway.
  TPU v6e, if the mesh is of it: likewise, but logits and their maxima are kept in place of weights, as arrays of their
    own. Each product then computes the weights while it reads the logits, and no pass over memory writes them. On v4
    and v5e that gains nothing (BENCHMARKS.md).

Knows nothing of parameters, positions or dropout.
"""
from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from vit_jax.core import numerics
from vit_jax.core.types import Array

Saved = tuple[Array, ...]
"""Query, key, value, and what `_keys_first` gives; on a CPU what `_heads_first` gives, which has the same shapes. Or
what `_logits_first` gives, which is one array more."""
KEEPS_LOGITS = 'TPU v6'
"""Kind of the devices that keep logits and not weights."""


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
  `attention` for rematerialization.
  """
  return _forward(query, key, value)[0]


def _forward(query: Array, key: Array, value: Array) -> tuple[Array, Saved]:
  if KEEPS_LOGITS in numerics.mesh_device_kind():
    *kept, mixed = _logits_first(query, key, value)
  else:
    *kept, mixed = lax.platform_dependent(query, key, value, cpu=_heads_first, default=_keys_first)
  mixed = checkpoint_name(mixed, 'attention')
  mixed_BQAK = lax.platform_dependent(
      mixed, cpu=lambda x: _by_head(_swapped(x)), default=lambda x: x.transpose(0, 3, 1, 2))
  return mixed_BQAK, (query, key, value, *kept, mixed)


def _backward(saved: Saved, dmixed: Array) -> tuple[Array, Array, Array]:
  if len(saved) == 7:
    query, key, value, logits_BAMQ, largest_BA1Q, inverse, mixed = saved
    return _pull_keys_first(query, key, value, _weights(logits_BAMQ, largest_BA1Q), inverse, mixed, dmixed)
  return lax.platform_dependent(*saved, dmixed, cpu=_pull_heads_first, default=_pull_keys_first)


def _keys_first(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
  """Weights before division `[B, A, M, Q]`, one over their sums `[B, A, 1, Q]` f32, and the result `[B, A, K, Q]`."""
  weights_BAMQ = _weights(*_logits(query, key))
  return weights_BAMQ, *_mix(weights_BAMQ, value)


def _logits_first(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array, Array]:
  """Logits `[B, A, M, Q]`, their maxima `[B, A, 1, Q]`, and all but the weights of `_keys_first`.

  The barrier makes arrays of both: without one, the compiler computes the maxima again wherever they are used, for
  which it writes the weights in a pass of its own.
  """
  logits_BAMQ, largest_BA1Q = lax.optimization_barrier(_logits(query, key))
  return logits_BAMQ, largest_BA1Q, *_mix(_weights(logits_BAMQ, largest_BA1Q), value)


def _logits(query: Array, key: Array) -> tuple[Array, Array]:
  """Logits `[B, A, M, Q]` and their maxima `[B, A, 1, Q]`, in the compute dtype."""
  logits_BAMQ = jnp.einsum('bmak,bqak->bamq', key, scaled(query))
  return logits_BAMQ, jax.lax.stop_gradient(logits_BAMQ.max(2, keepdims=True))


def _weights(logits: Array, largest: Array) -> Array:
  """Weights before division, in the dtype of the logits."""
  return jnp.exp((logits - largest).astype(jnp.float32)).astype(logits.dtype)


def _mix(weights_BAMQ: Array, value: Array) -> tuple[Array, Array]:
  """One over the sums of the weights `[B, A, 1, Q]` f32, and the result `[B, A, K, Q]`."""
  dtype = value.dtype
  with_ones = jnp.concatenate([value, jnp.ones((*value.shape[:-1], 1), dtype)], axis=-1)
  sums_BAJQ = jnp.einsum('bmak,bamq->bakq', with_ones, weights_BAMQ)
  # Cut before they are widened: the product itself is then stored in the compute dtype.
  inverse_BA1Q = 1. / sums_BAJQ[:, :, -1:].astype(jnp.float32)
  return inverse_BA1Q, (sums_BAJQ[:, :, :-1].astype(jnp.float32) * inverse_BA1Q).astype(dtype)


def _pull_keys_first(query: Array, key: Array, value: Array, weights_BAMQ: Array, inverse_BA1Q: Array,
                     mixed_BAKQ: Array, dmixed: Array) -> tuple[Array, Array, Array]:
  dtype = query.dtype
  dmixed_BAKQ = dmixed.transpose(0, 2, 3, 1).astype(jnp.float32) * inverse_BA1Q
  shared_BA1Q = (dmixed_BAKQ * mixed_BAKQ.astype(jnp.float32)).sum(2, keepdims=True)
  dmixed_BAKQ = dmixed_BAKQ.astype(dtype)
  dweights_BAMQ = jnp.einsum('bmak,bakq->bamq', value, dmixed_BAKQ).astype(jnp.float32)
  dlogits_BAMQ = (weights_BAMQ.astype(jnp.float32) * (dweights_BAMQ - shared_BA1Q)).astype(dtype)
  dquery = scaled(jnp.einsum('bamq,bmak->bqak', dlogits_BAMQ, key))
  dkey = scaled(jnp.einsum('bamq,bqak->bmak', dlogits_BAMQ, query))
  return dquery, dkey, jnp.einsum('bamq,bakq->bmak', weights_BAMQ, dmixed_BAKQ)


def _heads_first(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
  """The same as `_keys_first`, each with its last two axes in the other order, `_swapped`."""
  query_BAQK, key_BAMK, value_BAMK = _by_head(scaled(query)), _by_head(key), _by_head(value)
  logits_BAQM = jnp.einsum('baqk,bamk->baqm', query_BAQK, key_BAMK)
  largest_BAQ1 = jax.lax.stop_gradient(logits_BAQM.max(3, keepdims=True))
  weights_BAQM = jnp.exp((logits_BAQM - largest_BAQ1).astype(jnp.float32)).astype(query.dtype)
  inverse_BAQ1 = 1. / weights_BAQM.sum(3, keepdims=True, dtype=jnp.float32)
  mixed_BAQK = jnp.einsum('baqm,bamk->baqk', weights_BAQM, value_BAMK).astype(jnp.float32) * inverse_BAQ1
  return _swapped(weights_BAQM), _swapped(inverse_BAQ1), _swapped(mixed_BAQK.astype(query.dtype))


def _pull_heads_first(query: Array, key: Array, value: Array, weights: Array, inverse: Array, mixed: Array,
                      dmixed: Array) -> tuple[Array, Array, Array]:
  dtype = query.dtype
  weights_BAQM, inverse_BAQ1, mixed_BAQK = _swapped(weights), _swapped(inverse), _swapped(mixed)
  dmixed_BAQK = _by_head(dmixed).astype(jnp.float32) * inverse_BAQ1
  shared_BAQ1 = (dmixed_BAQK * mixed_BAQK.astype(jnp.float32)).sum(3, keepdims=True)
  dmixed_BAQK = dmixed_BAQK.astype(dtype)
  dweights_BAQM = jnp.einsum('baqk,bamk->baqm', dmixed_BAQK, _by_head(value)).astype(jnp.float32)
  dlogits_BAQM = (weights_BAQM.astype(jnp.float32) * (dweights_BAQM - shared_BAQ1)).astype(dtype)
  dquery_BAQK = scaled(jnp.einsum('baqm,bamk->baqk', dlogits_BAQM, _by_head(key)))
  dkey_BAMK = jnp.einsum('baqm,baqk->bamk', dlogits_BAQM, _by_head(scaled(query)))
  dvalue_BAMK = jnp.einsum('baqm,baqk->bamk', weights_BAQM, dmixed_BAQK)
  return _by_head(dquery_BAQK), _by_head(dkey_BAMK), _by_head(dvalue_BAMK)


def _by_head(x: Array) -> Array:
  """`[B, M, A, K]` to `[B, A, M, K]`, and back."""
  return x.transpose(0, 2, 1, 3)


def _swapped(x: Array) -> Array:
  """`[B, A, I, J]` called `[B, A, J, I]`, without a number moving: branches for platforms must agree in shapes."""
  return x.reshape(*x.shape[:2], x.shape[3], x.shape[2])


def scaled(x: Array) -> Array:
  """`x / sqrt(K)`, computed in f32, in the dtype of `x`."""
  return (x.astype(jnp.float32) * x.shape[-1] ** -.5).astype(x.dtype)


attend.defvjp(_forward, _backward)
