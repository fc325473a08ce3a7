"""One encoder block (ViT paper, eqs. 2 and 3): attention and MLP, each after a LayerNorm and added back.

Also its published variations: LayerScale, SwiGLU, parallel branches, and the axial pair of blocks. Names the
values that `stack.py` may save for the backward pass: `query`, `key`, `value`, `attention` (in
`attention.py`), `residual` (after the attention branch), `mlp` (before the activation).
"""
from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.nn import initializers
from jax.typing import DTypeLike

from vit_jax.config.schema import AttentionKernel, Gelu, MlpKernel, Norm, Positions
from vit_jax.core.types import Array, Key
from vit_jax.models import adapters
from vit_jax.models.initialization import VISION_TRANSFORMER, Laws, Linear
from vit_jax.models.kernels import mlp_kernels
from vit_jax.models.kernels.forms import FAST, Forms
from vit_jax.models.layers import Dense, LayerNorm, RMSNorm, Weights, drop_path, dropout, norm, param
from vit_jax.models.vit.attention import Attention

UP, DOWN = ('embed', 'mlp'), ('mlp', 'embed')  # logical axes of the matrices of an MLP


class Mlp(nn.Module, kw_only=True):
  """`W2 gelu(W1 x + b1) + b2`, or with `swiglu` `W2 (silu(V x + c) * (W1 x + b1)) + b2` (arXiv 2002.05202).

  Dropout comes after the activation. SwiGLU's V is `gate`, W1 is `up`. Without `has_bias` there is no b or c. With
  `inner_norm` what W2 is applied to is normed (arXiv 2110.09456); its epsilon is `norm_eps`. Without a GELU the
  activation is `max(x, 0)`. `kernel` computes the plain one, if it is for the devices. `gate_law` is that of V.
  """
  hidden: int
  gelu: Gelu | None
  dtype: DTypeLike
  swiglu: bool = False
  has_bias: bool = True
  inner_norm: bool = False
  norm_kind: Norm = Norm.LAYER
  norm_eps: float = 0.
  dropout: float = 0.
  kernel: MlpKernel = MlpKernel.XLA
  law: Linear = VISION_TRANSFORMER.mlp
  gate_law: Linear = VISION_TRANSFORMER.gate
  forms: Forms = FAST

  @nn.compact
  def __call__(self, x: Array, key: Key | None) -> Array:
    """`[..., D]` to `[..., D]`."""
    options: dict[str, Any] = {
        'dtype': self.dtype, 'has_bias': self.has_bias, 'num_batch_dims': x.ndim - 1, 'forms': self.forms}

    def dense(width: int, name: str) -> Dense:
      return Dense(features=(width,), axes=DOWN if name == 'down' else UP, name=name,
                   law=self.gate_law if name == 'gate' else self.law, **options)

    if self.gelu is not None and self._is_fused(x, key):
      up = Weights(features=(self.hidden,), axes=UP, name='up', law=self.law, **options)(x.shape[-1])
      down = Weights(features=(x.shape[-1],), axes=DOWN, name='down', law=self.law, **options)(self.hidden)
      return mlp_kernels.mlp(x.astype(self.dtype), *up, *down, self.gelu)

    def project(name: str) -> Array:
      return checkpoint_name(dense(self.hidden, name)(x), 'mlp')

    hidden_F = (jax.nn.silu(project('gate')) * project('up') if self.swiglu
                else jax.nn.relu(project('up')) if self.gelu is None else self.forms.gelu(project('up'), self.gelu))
    hidden_F = dropout(hidden_F, self.dropout, key)
    if self.inner_norm:
      hidden_F = norm(self.norm_kind, self.norm_eps, self.forms, name='norm', axis='mlp')(hidden_F).astype(self.dtype)
    return dense(x.shape[-1], 'down')(hidden_F)

  def _is_fused(self, x: Array, key: Key | None) -> bool:
    """Whether the fused kernel computes both products and all that is between them, which is nothing but the GELU."""
    is_plain = self.has_bias and not (self.swiglu or self.inner_norm or (self.dropout and key is not None))
    layers: list[Any] = [self.get_variable('params', name, {}) for name in ('up', 'down')]
    is_adapted = any(name in layer for layer in layers for name in adapters.USED)
    return is_plain and mlp_kernels.is_fused(self.kernel, x.shape, self.hidden, self.dtype, is_adapted=is_adapted)


class Block(nn.Module, kw_only=True):
  """Pre-norm encoder block: `z' = MSA(LN(z)) + z` (eq. 2), `z = MLP(LN(z')) + z'` (eq. 3).

  With `parallel` instead `z = MSA(LN(z)) + MLP(LN(z)) + z`, one norm for both (ViT-22B, arXiv 2302.05442,
  section 2); stochastic depth then drops both branches together. With `layer_scale` each branch is
  multiplied by a learned vector that starts at this value (arXiv 2103.17239, eq. 4), without `mlp_scale` the first
  alone, and with `branch_scale` by this number. `positions`, `num_patches`, `mixed_base` and the biases are those of
  `Attention`, `attention` its kernel, `mlp_kernel` that of the MLP; `attn_norm` and `mlp_norm` are the inner norms of
  both branches; parameters start by `laws`.
  """
  heads: int
  mlp: int
  gelu: Gelu | None
  norm_eps: float
  dtype: DTypeLike
  dropout: float = 0.
  attention_dropout: float = 0.
  qk_norm: bool = False
  qkv_bias: bool = True
  key_bias: bool = True
  out_bias: bool = True
  mlp_bias: bool = True
  norm_kind: Norm = Norm.LAYER
  attn_norm: bool = False
  mlp_norm: bool = False
  positions: Positions = Positions.NONE
  mixed_base: float = 0.
  num_patches: int = 0
  swiglu: bool = False
  layer_scale: float = 0.
  mlp_scale: bool = True
  branch_scale: float = 1.
  parallel: bool = False
  attention: AttentionKernel = AttentionKernel.XLA
  mlp_kernel: MlpKernel = MlpKernel.XLA
  laws: Laws = VISION_TRANSFORMER
  forms: Forms = FAST

  @nn.compact
  def __call__(self, x: Array, *, num_images: int, num_sequences: int, rate: Array | None,
               dropout_key: Key | None, capture: bool, positions: Array | None = None,
               attn_delta: Array | None = None, mask: Array | None = None) -> tuple[Array, dict[str, Array]]:
    """One block.

    Args:
      x: `[B, M, D]` in the compute dtype; the first two axes may be joined.
      num_images: B; stochastic depth drops branches of complete images.
      num_sequences: number of equal runs of rows that attention stays within; B, or more for axial attention.
      rate: f32 scalar, probability that a branch is dropped; None = never.
      dropout_key: None switches dropout and stochastic depth off.
      capture: also return the attention weights.
      positions: `[1, m, D]` or `[num_sequences, m, D]`, for kinds that act inside attention.
      attn_delta: `[num_sequences, A, m, m]` f32, added to these weights before they are used; None = nothing.
      mask: bool, broadcasts to `[num_sequences, A, m, m]`: which keys each query attends to; None = all.

    Returns:
      The shape of `x`, and `{}` or `{'attention': [num_sequences, A, m, m] f32}`.
    """
    num_keys = 5 + (self.attention_dropout > 0.)
    keys = (None,) * 6 if dropout_key is None else tuple(jax.random.split(dropout_key, num_keys))
    attn = Attention(
        heads=self.heads, dtype=self.dtype, norm_eps=self.norm_eps, norm_kind=self.norm_kind, qk_norm=self.qk_norm,
        inner_norm=self.attn_norm, qkv_bias=self.qkv_bias, key_bias=self.key_bias, out_bias=self.out_bias,
        dropout=self.attention_dropout, positions=self.positions, mixed_base=self.mixed_base,
        num_patches=self.num_patches, kernel=self.attention, laws=self.laws.attention,
        positions_law=self.laws.positions, forms=self.forms, name='attn')
    mlp = Mlp(hidden=self.mlp, gelu=self.gelu, swiglu=self.swiglu, has_bias=self.mlp_bias, inner_norm=self.mlp_norm,
              norm_kind=self.norm_kind, norm_eps=self.norm_eps, dropout=self.dropout, dtype=self.dtype,
              kernel=self.mlp_kernel, law=self.laws.mlp, gate_law=self.laws.gate, forms=self.forms, name='mlp')
    normed = self._norm('norm1')(x)
    y, captured = attn(normed, normed, num_sequences=num_sequences, capture=capture, positions=positions,
                       attn_delta=attn_delta, mask=mask, dropout_key=keys[5] if self.attention_dropout > 0. else None)
    y = self._scaled(dropout(y, self.dropout, keys[0]), 'scale1')
    if self.parallel:
      y = y + self._scaled(dropout(mlp(normed, keys[2]), self.dropout, keys[3]), 'scale2')
      return x + drop_path(y, rate, keys[1], num_images=num_images), captured
    x = checkpoint_name(x + drop_path(y, rate, keys[1], num_images=num_images), 'residual')
    y = mlp(self._norm('norm2')(x), keys[2])
    y = self._scaled(dropout(y, self.dropout, keys[3]), 'scale2')
    return x + drop_path(y, rate, keys[4], num_images=num_images), captured

  def _norm(self, name: str) -> LayerNorm | RMSNorm:
    return norm(self.norm_kind, self.norm_eps, self.forms, name=name)

  def _scaled(self, y: Array, name: str) -> Array:
    y = y if self.branch_scale == 1. else y * self.branch_scale
    if not self.layer_scale or (name == 'scale2' and not self.mlp_scale):
      return y
    scale = param(self, name, initializers.constant(self.layer_scale), (y.shape[-1],), ('embed',))
    return y * jnp.expand_dims(scale.astype(y.dtype), range(y.ndim - 1))


class AxialBlock(nn.Module):
  """A block within the rows of the token grid, then one within its columns (ViT paper, Appendix D.6)."""
  row: Block
  column: Block

  def __call__(self, x: Array, *, num_images: int, grid: tuple[int, int], rate: Array | None,
               dropout_key: Key | None, capture: bool) -> tuple[Array, dict[str, Array]]:
    """Both blocks; `grid` is `(h, w)`, the other arguments are those of `Block`.

    Returns:
      The shape of `x`, and `{}` or `row_attention [B, h, A, w, w]`, `column_attention [B, w, A, h, h]` f32.
    """
    h, w = grid
    keys = (None, None) if dropout_key is None else tuple(jax.random.split(dropout_key))

    def within(block: Block, x: Array, num_runs: int, key: Key | None) -> tuple[Array, Array | None]:
      y, captured = block(x, num_images=num_images, num_sequences=num_images * num_runs, rate=rate,
                          dropout_key=key, capture=capture)
      weights = captured.get('attention')
      return y, None if weights is None else weights.reshape(num_images, num_runs, *weights.shape[1:])

    x, rows = within(self.row, x, h, keys[0])
    x, columns = within(self.column, _swapped(x, num_images, h, w), w, keys[1])
    captured = {} if rows is None or columns is None else {'row_attention': rows, 'column_attention': columns}
    return _swapped(x, num_images, w, h), captured


def _swapped(x: Array, num_images: int, h: int, w: int) -> Array:
  """`[B * h * w, D]` to `[B * w * h, D]`."""
  return x.reshape(num_images, h, w, -1).swapaxes(1, 2).reshape(x.shape)
