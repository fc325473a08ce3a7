"""Multi-head attention (ViT paper, Appendix A, eqs. 5-8; arXiv 1706.03762).

`kernels/` computes the weighted sum, `positions.py` what positions do to queries, keys and logits.
"""
from __future__ import annotations

import functools

import flax.linen as nn
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from vit_jax.config.schema import AttentionKernel, Norm, Positions
from vit_jax.core.types import Array, Key
from vit_jax.models.initialization import VISION_TRANSFORMER, Initializer, OfAttention
from vit_jax.models.kernels import attend_kernels, fused
from vit_jax.models.kernels.attend import attention_weights, combine
from vit_jax.models.kernels.forms import FAST, Forms
from vit_jax.models.layers import Dense, Projection, dropout, norm, param
from vit_jax.models.vit.positions import in_attention

PROJECTION, OUT = ('embed', 'heads', 'head'), ('heads', 'head', 'embed')  # logical axes of the kernels
HIDDEN = -1e30  # logit of a key that a query does not attend to: finite, and its weight is 0


class Attention(nn.Module, kw_only=True):
  """Multi-head attention; biases of query, key and value with `qkv_bias`, of the key also needs `key_bias`.

  Attributes:
    heads: A.
    dtype: of the products.
    norm_eps: of the norms of query and key.
    norm_kind: of these and of `inner_norm`.
    qk_norm: a norm of each query and key over its K entries, before the product (ViT-22B, eq. 4).
    inner_norm: a norm of what is mixed, over all D entries, before the output matrix (arXiv 2210.06423).
    dropout: probability that a weight is dropped.
    positions: kind of positions that act inside attention.
    mixed_base: of rotary positions with learned frequencies, the ratio that these start with; 0 = fixed ones.
    num_patches: N that relative positions are made for.
    kernel: what computes the weighted sum where the weights themselves are not needed.
    laws: by which the four matrices start.
    positions_law: by which relative positions start.
    forms: of the operations.
  """
  heads: int
  dtype: DTypeLike
  norm_eps: float
  norm_kind: Norm = Norm.LAYER
  qk_norm: bool = False
  inner_norm: bool = False
  qkv_bias: bool = True
  key_bias: bool = True
  out_bias: bool = True
  dropout: float = 0.
  positions: Positions = Positions.NONE
  mixed_base: float = 0.
  num_patches: int = 0
  kernel: AttentionKernel = AttentionKernel.XLA
  laws: OfAttention = VISION_TRANSFORMER.attention
  positions_law: Initializer = VISION_TRANSFORMER.positions
  forms: Forms = FAST

  @nn.compact
  def __call__(self, x: Array, context: Array, *, num_sequences: int, dropout_key: Key | None, capture: bool,
               positions: Array | None = None, attn_delta: Array | None = None,
               mask: Array | None = None) -> tuple[Array, dict[str, Array]]:
    """Attends within each sequence.

    Args:
      x: `[B, Q, D]`, provides the queries; the first two axes may be joined, or divided otherwise.
      context: `[B, M, D]`, provides keys and values, likewise; `x` itself for self-attention.
      num_sequences: B.
      dropout_key: None switches dropout off.
      capture: computes the weights explicitly and returns them too, before dropout.
      positions: of the tokens, for kinds that need them here, `[1, M, D]` or `[B, M, D]`.
      attn_delta: `[B, A, Q, M]` f32, added to the weights, which are then explicit; None = nothing.
      mask: bool, broadcasts to `[B, A, Q, M]`: which keys each query attends to, and then the weights are explicit;
        None = all.

    Returns:
      The shape of `x`, and `{}` or `{'attention': [B, A, Q, M] f32}`.
    """
    is_dropping = self.dropout > 0. and dropout_key is not None
    is_explicit = capture or is_dropping or attn_delta is not None or mask is not None
    sources = self.forms.shared(x, self.dtype, 3) if context is x else (x, context, context)
    if not is_explicit and self._is_fused(x, context, num_sequences):
      return self._fused(sources, num_sequences), {}

    query, key, value = (self._projected(name, source, num_sequences)
                         for name, source in zip(('query', 'key', 'value'), sources, strict=True))
    query, key, relative = in_attention(self.positions, query, key, positions, num_patches=self.num_patches,
                                        param=functools.partial(param, self), law=self.positions_law,
                                        mixed_base=self.mixed_base)
    if is_explicit or relative is not None:
      relative = relative if mask is None else jnp.where(mask, 0. if relative is None else relative, HIDDEN)
      weights_BAQM = attention_weights(query, key, relative=relative)
      weights_BAQM = weights_BAQM if attn_delta is None else weights_BAQM + attn_delta
      mixed_BQAK = combine(dropout(weights_BAQM, self.dropout, dropout_key), value)
      mixed_BQAK = checkpoint_name(mixed_BQAK, 'attention')
    else:
      mixed_BQAK = self.forms.attend(query, key, value, kernel=self.kernel)
    y_BQD = self._dense((x.shape[-1],), 'out', has_bias=self.out_bias)(self._inner_normed(mixed_BQAK))
    return y_BQD.reshape(x.shape), {'attention': weights_BAQM} if capture else {}

  def _dense(self, features: tuple[int, ...], name: str, *, has_bias: bool) -> Dense:
    return Dense(features=features, axes=OUT if name == 'out' else PROJECTION, dtype=self.dtype,
                 law=getattr(self.laws, name), has_bias=has_bias, num_batch_dims=2, forms=self.forms, name=name)

  def _projected(self, name: str, source: Array, num_sequences: int) -> Array:
    """Query, key or value `[B, M, A, K]`, with its norm if it has one."""
    source_BMD = source.reshape(num_sequences, -1, source.shape[-1])
    split = (self.heads, source.shape[-1] // self.heads)
    projected_BMAK = checkpoint_name(self._dense(split, name, has_bias=self._has_bias(name))(source_BMD), name)
    if not self.qk_norm or name == 'value':
      return projected_BMAK
    normed_BMAK = norm(self.norm_kind, self.norm_eps, self.forms, name=f'{name}_norm', axis='head')(projected_BMAK)
    return normed_BMAK.astype(self.dtype)

  def _inner_normed(self, mixed_BQAK: Array) -> Array:
    if not self.inner_norm:
      return mixed_BQAK
    mixed_BQD = norm(self.norm_kind, self.norm_eps, self.forms, name='norm')(
        mixed_BQAK.reshape(*mixed_BQAK.shape[:2], -1))
    return mixed_BQD.astype(self.dtype).reshape(mixed_BQAK.shape)

  def _has_bias(self, name: str) -> bool:
    return self.qkv_bias and (self.key_bias or name != 'key')

  def _is_fused(self, x: Array, context: Array, num_sequences: int) -> bool:
    """Whether the fused kernel computes everything from the projections on, which nothing changes in between."""
    shape = fused.Shape(x.size // x.shape[-1] // num_sequences, self.heads, x.shape[-1] // self.heads)
    is_plain = not (self.positions is Positions.RELATIVE or self.positions.is_rotary or self.qk_norm or self.inner_norm)
    return is_plain and context.shape == x.shape and attend_kernels.is_fused(self.kernel, shape, self.dtype)

  def _fused(self, sources: tuple[Array, ...], num_sequences: int) -> Array:
    """Attention by the fused kernel, all of whose arrays are `[B, N, D]`; adds the biases and sums their gradients."""
    shape = sources[0].shape
    split = (self.heads, shape[-1] // self.heads)
    projections = [
        Projection(features=split, axes=PROJECTION, dtype=self.dtype, law=getattr(self.laws, name),
                   has_bias=self._has_bias(name), num_batch_dims=2, forms=self.forms,
                   name=name)(source.reshape(num_sequences, -1, shape[-1]))
        for name, source in zip(('query', 'key', 'value'), sources, strict=True)]
    products, biases = zip(*projections, strict=True)
    mixed_BND = attend_kernels.attend_projected(products, jnp.stack(biases), heads=self.heads)
    y_BND = Dense(features=shape[-1:], axes=OUT, dtype=self.dtype, law=self.laws.out, num_batch_dims=2, flat=True,
                  has_bias=self.out_bias, forms=self.forms, name='out')(mixed_BND.reshape(*mixed_BND.shape[:2], *split))
    return y_BND.reshape(shape)
