"""Encoder blocks: how attention and MLP are joined (ViT paper, eqs. 2 and 3), and published variations.

Contract of a kind of block: a module `(…fields of its settings…, heads=…, attention=…, mlp=…, context=…, positions=…)`,
called as `Plain` is. `grid` is that of the patch tokens, which are the last of M. Its parameters have one path each,
and are stacked over the layers. What it captures are arrays by name, each `[B, …]`. It names the value `residual` that
`stack.py` may save for the backward pass (after the attention branch); `attention.py` and `mlp.py` name the others.
"""
from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.nn import initializers

from vit_jax.config import schema
from vit_jax.core import implementation
from vit_jax.core.types import Array, Key
from vit_jax.models.layers import drop_path, dropout, param
from vit_jax.models.vit.attention import Attention
from vit_jax.models.vit.context import Context
from vit_jax.models.vit.positions import NoPositions

UP, DOWN = ('embed', 'mlp'), ('mlp', 'embed')  # logical axes of the matrices of an MLP


class Plain(nn.Module, kw_only=True):
  """Pre-norm encoder block: `z' = MSA(LN(z)) + z` (eq. 2), `z = MLP(LN(z')) + z'` (eq. 3).

  Attributes:
    layer_scale: each branch is multiplied by a learned vector that starts at this value (arXiv 2103.17239, eq. 4);
      0 = there is none.
    mlp_scale: without, the branch of the MLP has none.
    branch_scale: each branch is multiplied by this number.
    heads: A.
    attention: settings of attention.
    mlp: settings of the MLP.
    positions: what they do inside attention.
    context: of the network.
  """
  layer_scale: float = 0.
  mlp_scale: bool = True
  branch_scale: float = 1.
  heads: int
  attention: schema.Attention
  mlp: schema.Mlp | schema.SwiGlu
  positions: NoPositions | None = None
  context: Context

  @nn.compact
  def __call__(self, x: Array, *, num_images: int, rate: Array | None, dropout_key: Key | None, capture: bool,
               grid: tuple[int, int] | None = None, num_sequences: int = 0, positions: Array | None = None,
               attn_delta: Array | None = None, mask: Array | None = None,
               num_keys: int = 0) -> tuple[Array, dict[str, Array]]:
    """One block.

    Args:
      x: `[B, M, D]` in the compute dtype; the first two axes may be joined.
      num_images: B; stochastic depth drops branches of complete images.
      rate: f32 scalar, probability that a branch is dropped; None = never.
      dropout_key: None switches dropout and stochastic depth off.
      capture: also return the attention weights.
      grid: of the patch tokens, `(h, w)`; None = tokens of no image.
      num_sequences: number of equal runs of rows that attention stays within, S; 0 = B.
      positions: `[1, m, D]` or `[S, m, D]`, for kinds that act inside attention.
      attn_delta: `[S, A, m, m]` f32, added to these weights before they are used; None = nothing.
      mask: bool, broadcasts to `[S, A, m, m]`: which keys each query attends to; None = all.
      num_keys: the first so many tokens of a sequence are attended to, the others only fill it up; 0 = all.

    Returns:
      The shape of `x`, and `{}` or `{'attention': [S, A, m, m] f32}`.
    """
    keys, context = _keys(dropout_key, self.attention), self.context
    attend, mlp = _branches(self)
    normed = context.make_norm('norm1')(x)
    y, captured = attend(normed, normed, num_sequences=num_sequences or num_images, capture=capture,
                         positions=positions, attn_delta=attn_delta, mask=mask, dropout_key=keys[5], num_keys=num_keys)
    y = self._scaled(dropout(y, context.dropout, keys[0]), 'scale1')
    x = checkpoint_name(x + drop_path(y, rate, keys[1], num_images=num_images), 'residual')
    y = mlp(context.make_norm('norm2')(x), keys[2])
    y = self._scaled(dropout(y, context.dropout, keys[3]), 'scale2')
    return x + drop_path(y, rate, keys[4], num_images=num_images), captured

  def _scaled(self, y: Array, name: str) -> Array:
    y = y if self.branch_scale == 1. else y * self.branch_scale
    if not self.layer_scale or (name == 'scale2' and not self.mlp_scale):
      return y
    scale = param(self, name, initializers.constant(self.layer_scale), (y.shape[-1],), ('embed',))
    return y * jnp.expand_dims(scale.astype(y.dtype), range(y.ndim - 1))


class Parallel(nn.Module, kw_only=True):
  """`z = MSA(LN(z)) + MLP(LN(z)) + z`, one norm for both (ViT-22B, arXiv 2302.05442, section 2).

  Stochastic depth drops both branches together. `branch_scale` multiplies each. The rest is as in `Plain`.
  """
  branch_scale: float = 1.
  heads: int
  attention: schema.Attention
  mlp: schema.Mlp | schema.SwiGlu
  positions: NoPositions | None = None
  context: Context

  @nn.compact
  def __call__(self, x: Array, *, num_images: int, rate: Array | None, dropout_key: Key | None, capture: bool,
               grid: tuple[int, int] | None = None, positions: Array | None = None, attn_delta: Array | None = None,
               mask: Array | None = None) -> tuple[Array, dict[str, Array]]:
    """One block; as `Plain`, but for runs of rows."""
    keys, dropped = _keys(dropout_key, self.attention), self.context.dropout
    attend, mlp = _branches(self)
    normed = self.context.make_norm('norm1')(x)
    y, captured = attend(normed, normed, num_sequences=num_images, capture=capture, positions=positions,
                         attn_delta=attn_delta, mask=mask, dropout_key=keys[5])
    y = self._scaled(dropout(y, dropped, keys[0]))
    y = y + self._scaled(dropout(mlp(normed, keys[2]), dropped, keys[3]))
    return x + drop_path(y, rate, keys[1], num_images=num_images), captured

  def _scaled(self, y: Array) -> Array:
    return y if self.branch_scale == 1. else y * self.branch_scale


class Axial(nn.Module, kw_only=True):
  """A `Plain` block within the rows of the token grid, then one within its columns (ViT paper, Appendix D.6)."""
  layer_scale: float = 0.
  mlp_scale: bool = True
  branch_scale: float = 1.
  heads: int
  attention: schema.Attention
  mlp: schema.Mlp | schema.SwiGlu
  positions: NoPositions | None = None
  context: Context

  @nn.compact
  def __call__(self, x: Array, *, num_images: int, rate: Array | None, dropout_key: Key | None, capture: bool,
               grid: tuple[int, int], positions: Array | None = None, attn_delta: Array | None = None,
               mask: Array | None = None) -> tuple[Array, dict[str, Array]]:
    """Both blocks, on all patch tokens of the grid and no others; as `Plain`.

    Returns:
      The shape of `x`, and `{}` or `row_attention [B, h, A, w, w]`, `column_attention [B, w, A, h, h]` f32.
    """
    assert attn_delta is None and mask is None, 'axial attention has no weights between all tokens'
    h, w = grid
    keys = (None, None) if dropout_key is None else tuple(jax.random.split(dropout_key))

    def within(name: str, x: Array, num_runs: int, key: Key | None) -> tuple[Array, Array | None]:
      block = Plain(layer_scale=self.layer_scale, mlp_scale=self.mlp_scale, branch_scale=self.branch_scale,
                    heads=self.heads, attention=self.attention, mlp=self.mlp, context=self.context, name=name)
      y, captured = block(x, num_images=num_images, num_sequences=num_images * num_runs, rate=rate,
                          dropout_key=key, capture=capture)
      weights = captured.get('attention')
      return y, None if weights is None else weights.reshape(num_images, num_runs, *weights.shape[1:])

    x, rows = within('row', x, h, keys[0])
    x, columns = within('column', _swapped(x, num_images, h, w), w, keys[1])
    captured = {} if rows is None or columns is None else {'row_attention': rows, 'column_attention': columns}
    return _swapped(x, num_images, w, h), captured


def _branches(block: Plain | Parallel) -> tuple[Attention, Any]:
  """The modules of attention and MLP of a block."""
  context = block.context
  attention = implementation.make(
      block.attention, heads=block.heads, positions=block.positions, laws=context.laws.attention, context=context,
      name='attn')
  return attention, implementation.make(block.mlp, context=context, name='mlp')


def _keys(dropout_key: Key | None, attention: schema.Attention) -> tuple[Key | None, ...]:
  """Six keys: of dropout and stochastic depth of attention, of dropout in the MLP (2) and its depth, of its weights."""
  if dropout_key is None:
    return (None,) * 6
  keys = tuple(jax.random.split(dropout_key, 5 + (attention.dropout > 0.)))
  return keys if attention.dropout > 0. else (*keys, None)


def _swapped(x: Array, num_images: int, h: int, w: int) -> Array:
  """`[B * h * w, D]` to `[B * w * h, D]`."""
  return x.reshape(num_images, h, w, -1).swapaxes(1, 2).reshape(x.shape)
