"""Multi-head attention (ViT paper, Appendix A, eqs. 5-8; arXiv 1706.03762).

`attend` is the only place that knows how the plain weighted sum is computed; projections are
`layers.Dense`. What is known here of position is the relative term of the ViT paper's Appendix D.4.
"""
from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.nn import initializers
from jax.typing import DTypeLike

from vit_jax.core.types import Array, Key
from vit_jax.models.layers import Dense, LayerNorm, dropout, xavier_uniform

RELATIVE_STDDEV = .02  # as the absolute positions; the paper does not say


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


def attend(query: Array, key: Array, value: Array) -> Array:
  """Attention of `[B, Q, A, K]` queries to `[B, M, A, K]` keys and values; `[B, Q, A, K]`."""
  return combine(attention_weights(query, key), value)


def relative_logits(query: Array, table: Array) -> Array:
  """`R_ij = q_i . r(p_i - p_j)`: queries meet learned keys that know the offset alone (Appendix D.4).

  `p` is the place in raster order, so that offsets are one-dimensional. Class token and registers have
  no place: their rows and columns are zero.

  Args:
    query: `[B, M, A, K]`, any float dtype; the last N are patch tokens.
    table: `[2 N - 1, A, K]`, same dtype; row `t` is the key of the offset `N - 1 - t`.

  Returns:
    `[B, A, M, M]` f32, before the division by `sqrt(K)`.
  """
  num_patches = (table.shape[0] + 1) // 2
  extra = query.shape[1] - num_patches
  assert extra >= 0, (query.shape, table.shape)
  scores = jnp.einsum('bqak,tak->baqt', query[:, extra:], table, preferred_element_type=jnp.float32)
  # Entry j of row i is to be score t = N - 1 + j - i. With one more column, rows of 2 N - 1 entries of the
  # flat array begin one entry earlier each: nothing is gathered, and nothing scattered in the gradient.
  flat = jnp.pad(scores, ((0, 0), (0, 0), (0, 0), (0, 1))).reshape(*scores.shape[:2], -1)
  skewed = flat[..., :num_patches * (2 * num_patches - 1)].reshape(scores.shape)
  return jnp.pad(skewed[..., num_patches - 1:], ((0, 0), (0, 0), (extra, 0), (extra, 0)))


class Attention(nn.Module):
  """Multi-head attention with biases on query, key, value and output.

  Attributes:
    heads: A.
    dtype: of the products.
    qk_norm: LayerNorm of each query and key over its K entries, before the product (ViT-22B, eq. 4).
    norm_eps: of these.
    dropout: probability that a weight is dropped.
    relative: number N of patch tokens that have relative positions; 0 = none have.
  """
  heads: int
  dtype: DTypeLike
  qk_norm: bool
  norm_eps: float
  dropout: float
  relative: int

  @nn.compact
  def __call__(self, x: Array, context: Array, *, num_sequences: int, dropout_key: Key | None,
               capture: bool) -> tuple[Array, dict[str, Array]]:
    """Attends within each sequence.

    Args:
      x: `[B * Q, D]`, asks.
      context: `[B * M, D]`, answers; `x` itself for self-attention.
      num_sequences: B.
      dropout_key: None switches dropout off.
      capture: takes the explicit path and returns its weights too, as they are before dropout.

    Returns:
      `[B * Q, D]`, and `{}` or `{'attention': [B, A, Q, M] f32}`.
    """
    split = (self.heads, x.shape[-1] // self.heads)

    def project(name: str, source: Array) -> Array:
      projected_RAK = Dense(split, self.dtype, xavier_uniform, name=name)(source)
      projected_RAK = checkpoint_name(projected_RAK, name)
      if self.qk_norm and name != 'value':
        projected_RAK = LayerNorm(self.norm_eps, name=f'{name}_norm')(projected_RAK).astype(self.dtype)
      return projected_RAK.reshape(num_sequences, -1, *split)

    query, key, value = project('query', x), project('key', context), project('value', context)
    is_dropping = self.dropout > 0. and dropout_key is not None
    if capture or is_dropping or self.relative:
      weights_BAQM = attention_weights(query, key, relative=self._relative(query))
      mixed_BQAK = combine(dropout(weights_BAQM, self.dropout, dropout_key), value)
    else:
      mixed_BQAK = attend(query, key, value)
    mixed_RAK = checkpoint_name(mixed_BQAK.reshape(-1, *split), 'attention')
    y = Dense((x.shape[-1],), self.dtype, xavier_uniform, name='out')(mixed_RAK)
    return y, {'attention': weights_BAQM} if capture else {}

  def _relative(self, query: Array) -> Array | None:
    if not self.relative:
      return None
    shape = (2 * self.relative - 1, *query.shape[2:])
    table = self.param('relative', initializers.normal(RELATIVE_STDDEV), shape)
    return relative_logits(query, table.astype(self.dtype))
