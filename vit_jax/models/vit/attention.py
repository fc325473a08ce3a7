"""Multi-head attention (ViT paper, Appendix A, eqs. 5-8; arXiv 1706.03762).

How the weighted sum is computed is known to `attend.py` and `attend_kernels.py` alone; projections are `layers.Dense`.
What is known here of position is the relative term of the ViT paper's Appendix D.4.
"""
from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.nn import initializers
from jax.typing import DTypeLike

from vit_jax.config.schema import AttentionKernel
from vit_jax.core.types import Array, Key
from vit_jax.models.kernels import attend_kernels
from vit_jax.models.kernels.attend import attention_weights, combine
from vit_jax.models.layers import Dense, LayerNorm, dropout, xavier_uniform

RELATIVE_STDDEV = .02  # as the absolute positions; the paper does not say


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
  """Multi-head attention with biases on output and, if `qkv_bias`, query, key and value.

  Attributes:
    heads: A.
    dtype: of the products.
    qk_norm: LayerNorm of each query and key over its K entries, before the product (ViT-22B, eq. 4).
    norm_eps: of these.
    dropout: probability that a weight is dropped.
    relative: number N of patch tokens that have relative positions; 0 = none have.
    kernel: what computes the weighted sum where the weights themselves are not wanted.
  """
  heads: int
  dtype: DTypeLike
  qk_norm: bool
  norm_eps: float
  dropout: float
  relative: int
  qkv_bias: bool = True
  kernel: AttentionKernel = AttentionKernel.XLA

  @nn.compact
  def __call__(self, x: Array, context: Array, *, num_sequences: int, dropout_key: Key | None, capture: bool,
               nudge: Array | None = None) -> tuple[Array, dict[str, Array]]:
    """Attends within each sequence.

    Args:
      x: `[B, Q, D]`, asks; the first two axes may be joined, or cut otherwise.
      context: `[B, M, D]`, answers, likewise; `x` itself for self-attention.
      num_sequences: B.
      dropout_key: None switches dropout off.
      capture: takes the explicit path and returns its weights too, as they are before dropout.
      nudge: `[B, A, Q, M]` f32, added to the weights (explicit path); None = nothing.

    Returns:
      The shape of `x`, and `{}` or `{'attention': [B, A, Q, M] f32}`.
    """
    split = (self.heads, x.shape[-1] // self.heads)

    def project(name: str, source: Array) -> Array:
      source_BMD = source.reshape(num_sequences, -1, source.shape[-1])
      projected_BMAK = Dense(split, self.dtype, xavier_uniform, has_bias=self.qkv_bias, lead=2, name=name)(source_BMD)
      projected_BMAK = checkpoint_name(projected_BMAK, name)
      if self.qk_norm and name != 'value':
        projected_BMAK = LayerNorm(self.norm_eps, name=f'{name}_norm')(projected_BMAK).astype(self.dtype)
      return projected_BMAK

    query, key, value = project('query', x), project('key', context), project('value', context)
    is_dropping = self.dropout > 0. and dropout_key is not None
    if capture or is_dropping or self.relative or nudge is not None:
      weights_BAQM = attention_weights(query, key, relative=self._relative(query))
      weights_BAQM = weights_BAQM if nudge is None else weights_BAQM + nudge
      mixed_BQAK = combine(dropout(weights_BAQM, self.dropout, dropout_key), value)
      mixed_BQAK = checkpoint_name(mixed_BQAK, 'attention')
    else:
      mixed_BQAK = attend_kernels.attend(query, key, value, kernel=self.kernel)
    y_BQD = Dense((x.shape[-1],), self.dtype, xavier_uniform, lead=2, name='out')(mixed_BQAK)
    return y_BQD.reshape(x.shape), {'attention': weights_BAQM} if capture else {}

  def _relative(self, query: Array) -> Array | None:
    if not self.relative:
      return None
    shape = (2 * self.relative - 1, *query.shape[2:])
    table = self.param('relative', initializers.normal(RELATIVE_STDDEV), shape)
    return relative_logits(query, table.astype(self.dtype))
