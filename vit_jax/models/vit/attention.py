"""Multi-head attention (ViT paper, Appendix A, eqs. 5-8; arXiv 1706.03762), and mimetic initial values for it.

`kernels/` computes the weighted sum, and `positions.py` applies positions to queries, keys and logits.
"""
from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from vit_jax.config.schema import AttentionKernel, QkvBias
from vit_jax.core.axes import labelled
from vit_jax.core.errors import UserError
from vit_jax.core.numerics import split_key
from vit_jax.core.types import Array, Key, Params
from vit_jax.models.initialization import OfAttention
from vit_jax.models.kernels import attend, fused_attention
from vit_jax.models.kernels.attend import attention_weights, combine
from vit_jax.models.layers import Dense, Projection, dropout
from vit_jax.models.vit.context import Context
from vit_jax.models.vit.positions import NoPositions

PROJECTION, OUT = ('embed', 'heads', 'head'), ('heads', 'head', 'embed')  # logical axes of the kernels
HIDDEN = -1e30  # logit of a key that a query does not attend to: finite, and its weight is 0
NEAR_QK, NEAR_VO = .7, -.4  # of `mimetic` (arXiv 2305.09828, section 3): factors of the identity and of the noise


class Attention(nn.Module, kw_only=True):
  """Multi-head attention.

  Attributes:
    qkv_bias: which of query, key and value have a bias.
    out_bias: whether the output matrix has one.
    qk_norm: a norm of each query and key over its K entries, before the product (ViT-22B, eq. 4).
    inner_norm: a norm of the weighted sums, over all D entries, before the output matrix (arXiv 2210.06423).
    dropout: probability that an attention weight is dropped.
    kernel: the implementation of the weighted sum where the weights themselves are not needed.
    heads: number of heads, A.
    positions: the kind of positions, if it acts inside attention; None = none does.
    laws: initial values of the four matrices.
    context: settings that the whole network shares.
  """
  qkv_bias: QkvBias = QkvBias.ALL
  out_bias: bool = True
  qk_norm: bool = False
  inner_norm: bool = False
  dropout: float = 0.
  kernel: AttentionKernel = AttentionKernel.XLA
  heads: int
  positions: NoPositions | None = None
  laws: OfAttention
  context: Context

  @nn.compact
  def __call__(self, x: Array, memory: Array, *, num_sequences: int, dropout_key: Key | None, capture: bool,
               positions: Array | None = None, attn_delta: Array | None = None, mask: Array | None = None,
               logits_bias: Array | None = None, num_keys: int = 0) -> tuple[Array, dict[str, Array]]:
    """Attends within each sequence.

    Args:
      x: `[B, Q, D]`, provides the queries; the first two axes may be joined, or divided otherwise.
      memory: `[B, M, D]`, provides keys and values, likewise; `x` itself for self-attention.
      num_sequences: B.
      dropout_key: None switches dropout off.
      capture: computes the weights explicitly and returns them too, before dropout.
      positions: of the tokens, for kinds that need them here, `[1, M, D]` or `[B, M, D]`.
      attn_delta: `[B, A, Q, M]` f32, added to the weights, which are then explicit; None = nothing.
      mask: bool, broadcasts to `[B, A, Q, M]`: which keys each query attends to, and then the weights are explicit;
        None = all.
      logits_bias: f32, broadcasts to `[B, A, Q, M]`, added to the logits of the weights, which are then explicit.
      num_keys: only the first `num_keys` of M are attended to, without explicit weights; 0 = all.

    Returns:
      The shape of `x`, and `{}` or `{'attention': [B, A, Q, M] f32}`.
    """
    is_dropping = self.dropout > 0. and dropout_key is not None
    is_changed = any(change is not None for change in (attn_delta, mask, logits_bias))
    is_explicit = capture or is_dropping or is_changed
    assert not (is_explicit and num_keys), 'explicit weights are of all keys'
    sources = self.context.forms.shared(x, self.context.dtype, 3) if memory is x else (x, memory, memory)
    if not is_explicit and self._is_fused(x, memory, num_sequences):
      return self._fused(sources, num_sequences), {}

    query, key, value = (self._projected(name, source, num_sequences)
                         for name, source in zip(('query', 'key', 'value'), sources, strict=True))
    relative = None
    if self.positions is not None:
      query, key, relative = self.positions.in_attention(self, query, key, positions)
    if logits_bias is not None:
      relative = logits_bias if relative is None else relative + logits_bias
    captured: dict[str, Array] = {}
    if is_explicit or relative is not None:
      if mask is not None:
        relative = jnp.where(mask, 0. if relative is None else relative, HIDDEN)
      weights_BAQM = attention_weights(query, key, relative=relative)
      if attn_delta is not None:
        weights_BAQM = weights_BAQM + attn_delta
      if capture:
        captured['attention'] = weights_BAQM
      mixed_BQAK = combine(dropout(weights_BAQM, self.dropout, dropout_key), value)
      mixed_BQAK = checkpoint_name(mixed_BQAK, 'attention')
    else:
      mixed_BQAK = self.context.forms.attend(query, key, value, kernel=self.kernel, num_keys=num_keys)
    y_BQD = self._dense((x.shape[-1],), 'out', has_bias=self.out_bias)(self._inner_normed(mixed_BQAK))
    return y_BQD.reshape(x.shape), captured

  def _dense(self, features: tuple[int, ...], name: str, *, has_bias: bool) -> Dense:
    """Returns the dense layer `query`, `key`, `value` or `out`."""
    return Dense(features=features, axes=OUT if name == 'out' else PROJECTION, dtype=self.context.dtype,
                 law=getattr(self.laws, name), has_bias=has_bias, num_batch_dims=2, forms=self.context.forms, name=name)

  def _projected(self, name: str, source: Array, num_sequences: int) -> Array:
    """Returns query, key or value `[B, M, A, K]`, with its norm if it has one."""
    source_BMD = source.reshape(num_sequences, -1, source.shape[-1])
    dense = self._dense((self.heads, source.shape[-1] // self.heads), name, has_bias=self._has_bias(name))
    projected_BMAK = checkpoint_name(dense(source_BMD), name)
    if not self.qk_norm or name == 'value':
      return projected_BMAK
    return self.context.make_norm(f'{name}_norm', axis='head')(projected_BMAK).astype(self.context.dtype)

  def _inner_normed(self, mixed_BQAK: Array) -> Array:
    """Returns the mixed values after the inner norm, if there is one."""
    if not self.inner_norm:
      return mixed_BQAK
    mixed_BQD = self.context.make_norm('norm')(mixed_BQAK.reshape(*mixed_BQAK.shape[:2], -1))
    return mixed_BQD.astype(self.context.dtype).reshape(mixed_BQAK.shape)

  def _has_bias(self, name: str) -> bool:
    return self.qkv_bias is QkvBias.ALL or (self.qkv_bias is QkvBias.QUERY_VALUE and name != 'key')

  def _is_fused(self, x: Array, memory: Array, num_sequences: int) -> bool:
    """Returns whether the fused kernel computes all of attention: nothing may change queries or keys before it."""
    shape = fused_attention.Shape(x.size // x.shape[-1] // num_sequences, self.heads, x.shape[-1] // self.heads)
    is_plain = not (self.positions is not None or self.qk_norm or self.inner_norm)
    return is_plain and memory.shape == x.shape and attend.is_fused(self.kernel, shape, self.context.dtype)

  def _fused(self, sources: tuple[Array, ...], num_sequences: int) -> Array:
    """Returns attention by the fused kernel, whose arrays are `[B, N, D]`. The kernel adds the biases, too."""
    shape = sources[0].shape
    split, dtype, forms = (self.heads, shape[-1] // self.heads), self.context.dtype, self.context.forms
    projections = [
        Projection(features=split, axes=PROJECTION, dtype=dtype, law=getattr(self.laws, name),
                   has_bias=self._has_bias(name), num_batch_dims=2, forms=forms,
                   name=name)(source.reshape(num_sequences, -1, shape[-1]))
        for name, source in zip(('query', 'key', 'value'), sources, strict=True)]
    products, biases = zip(*projections, strict=True)
    mixed_BND = attend.attend_projected(products, jnp.stack(biases), heads=self.heads)
    y_BND = Dense(features=shape[-1:], axes=OUT, dtype=dtype, law=self.laws.out, num_batch_dims=2, flat=True,
                  has_bias=self.out_bias, forms=forms, name='out')(mixed_BND.reshape(*mixed_BND.shape[:2], *split))
    return y_BND.reshape(shape)


def with_mimetic(block: Params, keys: dict[str, Key]) -> Params:
  """Returns the parameters of a block with `mimetic` attention.

  `keys` are by the parts of the block: '' is the block itself; an axial block has the parts 'row' and 'column'.

  Raises:
    UserError: the block has no attention.
  """
  for part, key in keys.items():
    own = block[part] if part else block
    if 'attn' not in own:
      raise UserError("model.init: expected another one than mimetic for a block without 'attn', got mimetic. Set "
                      'model.init=vision_transformer.')
    changed = {**own, 'attn': mimetic(own['attn'], key)}
    block = {**block, part: changed} if part else changed
  return block


def mimetic(params: Params, key: Key) -> Params:
  """Returns the parameters of one attention with kernels that resemble those of pretrained networks.

  In each head a token attends to those that resemble it: `W_Q W_K^T = 0.7 (Z + I)` but for its smallest singular
  values, and `W_V W_O = 0.4 (Z - I)`, where each Z is normal with variance 1 / D. A product `U S V^T` is divided into
  `U S^(1/2)` and `S^(1/2) V^T`. It helps on small datasets, above all with sine-cosine positions (arXiv 2305.09828).

  Args:
    params: kernels `query`, `key` and `value [D, A, K]`, and `out [A, K, D]`; biases and norms stay as they are.
    key: of the noise.
  """
  width, heads, head_width = params['query']['kernel'].shape
  keys = split_key(key, 'query_key', 'value_out')
  query_ADD, key_ADD = _factors(keys['query_key'], NEAR_QK, heads, width)
  value_DD, out_DD = (factors[0] for factors in _factors(keys['value_out'], NEAR_VO, 1, width))
  kernels = {
      'query': labelled(query_ADD[..., :head_width].swapaxes(0, 1), PROJECTION, (1, 2)),
      'key': labelled(key_ADD[:, :head_width].transpose(2, 0, 1), PROJECTION, (1, 2)),
      'value': labelled(value_DD.reshape(width, heads, head_width), PROJECTION, (1, 2)),
      'out': labelled(out_DD.reshape(heads, head_width, width), OUT, (2, 1))}
  return {name: {**leaves, 'kernel': kernels[name]} if name in kernels else leaves for name, leaves in params.items()}


def _factors(key: Key, near: float, count: int, width: int) -> tuple[Array, Array]:
  """Returns two factors `[count, D, D]` of `abs(near) Z + near I`; the largest singular values come first."""
  noise = jax.random.normal(key, (count, width, width)) * abs(near) * width ** -.5
  left, sizes, right = jnp.linalg.svd(noise + near * jnp.eye(width)[None])
  roots = jnp.sqrt(sizes)
  return left * roots[:, None], roots[..., None] * right
