"""Multi-head self-attention (ViT paper, Appendix A, eqs. 5-8; arXiv 1706.03762).

`attend` is the only place that knows how the weighted sum is computed; projections are `layers.Dense`.
"""
from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from vit_jax.core.types import Array
from vit_jax.models.layers import Dense, xavier_uniform


def attention_weights(query: Array, key: Array) -> Array:
  """`softmax(q k^T / sqrt(K))` over the keys (eq. 6).

  Args:
    query: `[B, M, A, K]`, any float dtype.
    key: `[B, M, A, K]`, same dtype.

  Returns:
    `[B, A, M, M]` f32, query before key; rows sum to 1. Products accumulate in f32, softmax is in f32.
  """
  scale = query.shape[-1] ** -.5
  logits_BAMM = jnp.einsum('bqak,bmak->baqm', query, key, preferred_element_type=jnp.float32)
  return jax.nn.softmax(logits_BAMM * scale, axis=-1)


def combine(weights: Array, value: Array) -> Array:
  """`A v` (eq. 7): weights `[B, A, M, M]` f32 and value `[B, M, A, K]` to `[B, M, A, K]`, value's dtype."""
  return jnp.einsum('baqm,bmak->bqak', weights.astype(value.dtype), value)


def attend(query: Array, key: Array, value: Array) -> Array:
  """Attention of `[B, M, A, K]` queries to keys and values of the same shape; `[B, M, A, K]`."""
  return combine(attention_weights(query, key), value)


class SelfAttention(nn.Module):
  """Multi-head self-attention with biases on query, key, value and output."""
  heads: int
  dtype: DTypeLike

  @nn.compact
  def __call__(self, x: Array, *, num_images: int, capture: bool) -> tuple[Array, dict[str, Array]]:
    """Attends within each image.

    Args:
      x: `[B * M, D]`.
      num_images: B.
      capture: takes the explicit path and returns its weights too.

    Returns:
      `[B * M, D]`, and `{}` or `{'attention': [B, A, M, M] f32}`.
    """
    split = (self.heads, x.shape[-1] // self.heads)

    def project(name: str) -> Array:
      projected_RAK = Dense(split, self.dtype, xavier_uniform, name=name)(x)
      projected_RAK = checkpoint_name(projected_RAK, name)
      return projected_RAK.reshape(num_images, -1, *split)

    query, key, value = project('query'), project('key'), project('value')
    captured = {'attention': attention_weights(query, key)} if capture else {}
    mixed_BMAK = combine(captured['attention'], value) if capture else attend(query, key, value)
    mixed_RAK = checkpoint_name(mixed_BMAK.reshape(-1, *split), 'attention')
    return Dense((x.shape[-1],), self.dtype, xavier_uniform, name='out')(mixed_RAK), captured
