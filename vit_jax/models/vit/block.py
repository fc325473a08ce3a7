"""Encoder blocks: how attention and MLP are joined (ViT paper, eqs. 2 and 3), and published variations.

Contract of a kind of block: a module `(…fields of its settings…, heads=…, attention=…, mlp=…, context=…, positions=…)`,
called as `block(x, carry, info)`, which returns `(x, carry, captured)`:

  x: tokens `[B, M, D]` in the compute dtype, or `[B * M, D]`; the patch tokens are the last of M.
  carry: a tree of arrays that each block gets from the one before, `{}` for all kinds here. The first block gets what
    the method `init_carry(x, info)` of the module returns, if it has one. Shapes stay the same where blocks are
    scanned. `carry['is_token'] [B, M]` bool, if there is such a leaf, says which tokens are pooled in the end.
  info: a `BlockInfo`.
  captured: with `info.capture` arrays by name, each `[B, …]`, else `{}`.

Its parameters have one path each, and are stacked over the layers. It names the value `residual` that `stack.py` may
save for the backward pass (after the attention branch); `attention.py` and `mlp.py` name the others. A module in it may
`sow` scalars in the collection `LOSSES` (`context.py`).
"""
from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.nn import initializers

from vit_jax.config import schema
from vit_jax.core import implementation
from vit_jax.core.types import Array, Key, PyTree
from vit_jax.models.layers import drop_path, dropout, param
from vit_jax.models.vit.attention import Attention
from vit_jax.models.vit.context import BlockInfo, Context
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
  def __call__(self, x: Array, carry: PyTree, info: BlockInfo) -> tuple[Array, PyTree, dict[str, Array]]:
    """One block, which captures `{'attention': [S, A, m, m] f32}`."""
    keys, context = _keys(info.key, self.attention), self.context
    attend, mlp = _branches(self)
    normed = context.make_norm('norm1')(x)
    y, captured = attend(
        normed, normed, num_sequences=info.num_sequences or info.num_images, capture=info.capture,
        positions=info.positions, attn_delta=info.attn_delta, mask=info.mask, dropout_key=keys[5],
        num_keys=info.num_keys)
    y = self._scaled(dropout(y, context.dropout, keys[0]), 'scale1')
    x = checkpoint_name(x + drop_path(y, info.rate, keys[1], num_images=info.num_images), 'residual')
    y = mlp(context.make_norm('norm2')(x), info._replace(key=keys[2]))
    y = self._scaled(dropout(y, context.dropout, keys[3]), 'scale2')
    return x + drop_path(y, info.rate, keys[4], num_images=info.num_images), carry, captured

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
  def __call__(self, x: Array, carry: PyTree, info: BlockInfo) -> tuple[Array, PyTree, dict[str, Array]]:
    """One block; as `Plain`, but for runs of rows."""
    keys, dropped = _keys(info.key, self.attention), self.context.dropout
    attend, mlp = _branches(self)
    normed = self.context.make_norm('norm1')(x)
    y, captured = attend(normed, normed, num_sequences=info.num_images, capture=info.capture, positions=info.positions,
                         attn_delta=info.attn_delta, mask=info.mask, dropout_key=keys[5])
    y = self._scaled(dropout(y, dropped, keys[0]))
    y = y + self._scaled(dropout(mlp(normed, info._replace(key=keys[2])), dropped, keys[3]))
    return x + drop_path(y, info.rate, keys[1], num_images=info.num_images), carry, captured

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
  def __call__(self, x: Array, carry: PyTree, info: BlockInfo) -> tuple[Array, PyTree, dict[str, Array]]:
    """Both blocks, on all patch tokens of the grid and no others; as `Plain`.

    It captures `row_attention [B, h, A, w, w]` and `column_attention [B, w, A, h, h]` f32.
    """
    assert info.attn_delta is None and info.mask is None, 'axial attention has no weights between all tokens'
    assert info.grid is not None, 'axial attention is of the tokens of an image'
    (h, w), num_images = info.grid, info.num_images
    keys = (None, None) if info.key is None else tuple(jax.random.split(info.key))

    def within(name: str, x: Array, num_runs: int, key: Key | None) -> tuple[Array, Array | None]:
      block = Plain(layer_scale=self.layer_scale, mlp_scale=self.mlp_scale, branch_scale=self.branch_scale,
                    heads=self.heads, attention=self.attention, mlp=self.mlp, context=self.context, name=name)
      y, _, captured = block(x, {}, BlockInfo(num_images, num_sequences=num_images * num_runs, rate=info.rate, key=key,
                                              capture=info.capture))
      weights = captured.get('attention')
      return y, None if weights is None else weights.reshape(num_images, num_runs, *weights.shape[1:])

    x, rows = within('row', x, h, keys[0])
    x, columns = within('column', _swapped(x, num_images, h, w), w, keys[1])
    captured = {} if rows is None or columns is None else {'row_attention': rows, 'column_attention': columns}
    return _swapped(x, num_images, w, h), carry, captured


class Cross(nn.Module, kw_only=True):
  """`z' = MHA(LN(z), m) + z`, `z = MLP(LN(z')) + z'`: tokens attend to others, such as those of text to an image.

  It is no kind of `model.block`, but a part for objectives and networks of one's own.
  """
  heads: int
  attention: schema.Attention = dataclasses.field(default_factory=schema.Attention)
  mlp: schema.Mlp | schema.SwiGlu
  positions: None = None
  context: Context

  @nn.compact
  def __call__(self, x: Array, memory: Array, info: BlockInfo) -> Array:
    """Returns `x [B, Q, D]` after the block; `memory [B, M, D]` gives keys and values, `info.mask` says which."""
    keys, context = _keys(info.key, self.attention), self.context
    attend, mlp = _branches(self)
    y, _ = attend(context.make_norm('norm1')(x), memory, num_sequences=info.num_images, capture=False, mask=info.mask,
                  dropout_key=keys[5])
    x = x + drop_path(dropout(y, context.dropout, keys[0]), info.rate, keys[1], num_images=info.num_images)
    y = mlp(context.make_norm('norm2')(x), info._replace(key=keys[2]))
    return x + drop_path(dropout(y, context.dropout, keys[3]), info.rate, keys[4], num_images=info.num_images)


def _branches(block: Plain | Parallel | Cross) -> tuple[Attention, Any]:
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
