"""Encoder blocks (ViT paper, eqs. 2 and 3) and their MLPs, and published variations of both.

Contract of a kind of block: a module `(…fields of its settings…, heads=…, attention=…, mlp=…, context=…, positions=…)`,
called as `block(x, carry, info)`, which returns `(x, carry, captured)`:

  x: tokens `[B, M, D]` in the compute dtype, or `[B * M, D]`; the patch tokens are the last of M.
  carry: a tree of arrays that each block gets from the one before, `{}` for all kinds here. The first block gets what
    the method `init_carry(x, info)` of the module returns, if it has one. Shapes stay the same where blocks are
    scanned. `carry['is_token'] [B, M]` bool, if there is such a leaf, says which tokens are pooled in the end.
  info: a `BlockInfo`.
  captured: with `info.capture` arrays by name, each `[B, …]`, else `{}`.

Contract of a kind of MLP: a module `(…fields of its settings…, context=…)` that is called with `x` and a `BlockInfo`,
whose `key` is that of its dropout, and returns the shape of `x`. One that mixes tokens must keep to images
(`num_images`) and to `is_token`.

The parameters of a block have one path each, and are stacked over the layers. Modules name the values that `stack.py`
may save for the backward pass: a block `residual` (after the attention branch), an MLP `mlp`, and `attention.py` the
others. They may `sow` scalars in the collection `LOSSES` (`context.py`).
"""
from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.nn import initializers

from vit_jax.config import schema
from vit_jax.config.schema import MlpKernel
from vit_jax.core import implementation
from vit_jax.core.types import Array, Key, PyTree
from vit_jax.models import adapters
from vit_jax.models.initialization import Linear
from vit_jax.models.kernels import fused_mlp
from vit_jax.models.layers import Dense, Weights, drop_path, dropout, param
from vit_jax.models.vit.attention import Attention
from vit_jax.models.vit.context import BlockInfo, Context
from vit_jax.models.vit.positions import NoPositions

UP, DOWN = ('embed', 'mlp'), ('mlp', 'embed')  # logical axes of the matrices of an MLP


class MlpBase(nn.Module, kw_only=True):
  """The attributes of both kinds of MLPs, and the layers that they consist of.

  Attributes:
    hidden: width of the hidden layer, F.
    bias: whether the matrices have biases.
    inner_norm: whether the hidden layer is normalized before the last matrix (arXiv 2110.09456).
    context: settings that the whole network shares.
  """
  hidden: int
  bias: bool = True
  inner_norm: bool = False
  context: Context

  def dense(self, kind: type[Dense], name: str, width: int, x: Array, law: Linear) -> Any:
    """Returns the layer `gate`, `up` or `down`, of this width, for activations like `x`; `kind` is its class."""
    return kind(features=(width,), axes=DOWN if name == 'down' else UP, name=name, dtype=self.context.dtype,
                has_bias=self.bias, num_batch_dims=x.ndim - 1, forms=self.context.forms, law=law)


# Functions, and not methods: Flax adds the names of methods to the names of the operations, which a plan shows.

def _before_activation(mlp: MlpBase, x: Array, name: str, law: Linear) -> Array:
  """Returns the hidden layer `gate` or `up` before its activation, `[..., F]`."""
  return checkpoint_name(mlp.dense(Dense, name, mlp.hidden, x, law)(x), 'mlp')


def _output(mlp: MlpBase, hidden_F: Array, x: Array, key: Key | None) -> Array:
  """Applies dropout, the inner norm and the last matrix. Returns the shape of `x`."""
  context = mlp.context
  hidden_F = dropout(hidden_F, context.dropout, key)
  if mlp.inner_norm:
    hidden_F = context.make_norm('norm', axis='mlp')(hidden_F).astype(context.dtype)
  return mlp.dense(Dense, 'down', x.shape[-1], x, context.laws.mlp)(hidden_F)


class Mlp(MlpBase, kw_only=True):
  """`W2 gelu(W1 x + b1) + b2` (ViT paper, eq. 3); without a GELU the activation is `max(x, 0)`.

  Dropout comes after the activation. `kernel` computes both products, if it is for the devices.
  """
  kernel: MlpKernel = MlpKernel.XLA

  @nn.compact
  def __call__(self, x: Array, info: BlockInfo) -> Array:
    """`[..., D]` to `[..., D]`."""
    gelu, law = self.context.gelu, self.context.laws.mlp
    if gelu is not None and self._is_fused(x, info.key):
      up, up_bias = self.dense(Weights, 'up', self.hidden, x, law)(x.shape[-1])
      down, down_bias = self.dense(Weights, 'down', x.shape[-1], x, law)(self.hidden)
      return fused_mlp.mlp_on_mesh(x.astype(self.context.dtype), up, up_bias, down, down_bias, gelu)
    up_F = _before_activation(self, x, 'up', law)
    hidden_F = jax.nn.relu(up_F) if gelu is None else self.context.forms.gelu(up_F, gelu)
    return _output(self, hidden_F, x, info.key)

  def _is_fused(self, x: Array, key: Key | None) -> bool:
    """Returns whether the fused kernel computes the MLP: there is nothing but the GELU between its two products."""
    is_plain = self.bias and not (self.inner_norm or (self.context.dropout and key is not None))
    layers: list[Any] = [self.get_variable('params', name, {}) for name in ('up', 'down')]
    is_adapted = any(name in layer for layer in layers for name in adapters.USED)
    return is_plain and fused_mlp.is_fused(self.kernel, x.shape, self.hidden, self.context.dtype,
                                           is_adapted=is_adapted)


class SwiGlu(MlpBase, kw_only=True):
  """`W2 (silu(V x + c) * (W1 x + b1)) + b2` (arXiv 2002.05202); V is `gate`, W1 is `up`. Otherwise as `Mlp`."""

  @nn.compact
  def __call__(self, x: Array, info: BlockInfo) -> Array:
    """`[..., D]` to `[..., D]`."""
    laws = self.context.laws
    gate_F = jax.nn.silu(_before_activation(self, x, 'gate', laws.gate))
    return _output(self, gate_F * _before_activation(self, x, 'up', laws.mlp), x, info.key)


class Block(nn.Module, kw_only=True):
  """The attributes of all kinds of blocks, and the modules that they consist of.

  Attributes:
    branch_scale: each branch is multiplied by this number.
    heads: number of attention heads, A.
    attention: settings of attention.
    mlp: settings of the MLP.
    positions: the kind of positions, if it acts inside attention; None = none does.
    context: settings that the whole network shares.
  """
  branch_scale: float = 1.
  heads: int
  attention: schema.Attention
  mlp: schema.Mlp | schema.SwiGlu
  positions: NoPositions | None = None
  context: Context

  def branches(self) -> tuple[Attention, Any]:
    """Returns the modules of attention and MLP."""
    context = self.context
    attention = implementation.make(
        self.attention, heads=self.heads, positions=self.positions, laws=context.laws.attention, context=context,
        name='attn')
    return attention, implementation.make(self.mlp, context=context, name='mlp')


class _Keys(NamedTuple):
  """Keys of a block: `…_dropout` and `…_path` (stochastic depth) are those of the two branches."""
  attention_dropout: Key | None = None
  attention_path: Key | None = None
  mlp: Key | None = None
  mlp_dropout: Key | None = None
  mlp_path: Key | None = None
  attention_weights: Key | None = None


def _keys(key: Key | None, attention: schema.Attention) -> _Keys:
  """Returns keys for all that is random in a block, of attention weights only with dropout; None without a key."""
  return _Keys() if key is None else _Keys(*jax.random.split(key, 6 if attention.dropout > 0. else 5))


class Plain(Block, kw_only=True):
  """Pre-norm encoder block: `z' = MSA(LN(z)) + z` (eq. 2), `z = MLP(LN(z')) + z'` (eq. 3).

  Attributes:
    layer_scale: each branch is multiplied by a learned vector that starts at this value (arXiv 2103.17239, eq. 4);
      0 = there is none.
    mlp_scale: if False, only the branch of attention has such a vector.
  """
  layer_scale: float = 0.
  mlp_scale: bool = True

  @nn.compact
  def __call__(self, x: Array, carry: PyTree, info: BlockInfo) -> tuple[Array, PyTree, dict[str, Array]]:
    """Applies one block, which captures `{'attention': [S, A, m, m] f32}`."""
    keys, context, num_images = _keys(info.key, self.attention), self.context, info.num_images
    attend, mlp = self.branches()
    normed = context.make_norm('norm1')(x)
    y, captured = attend(
        normed, normed, num_sequences=info.num_sequences or num_images, capture=info.capture,
        positions=info.positions, attn_delta=info.attn_delta, mask=info.mask, dropout_key=keys.attention_weights,
        num_keys=info.num_keys)
    y = self._scaled(dropout(y, context.dropout, keys.attention_dropout), 'scale1')
    x = checkpoint_name(x + drop_path(y, info.rate, keys.attention_path, num_images=num_images), 'residual')
    y = mlp(context.make_norm('norm2')(x), info._replace(key=keys.mlp))
    y = self._scaled(dropout(y, context.dropout, keys.mlp_dropout), 'scale2')
    return x + drop_path(y, info.rate, keys.mlp_path, num_images=num_images), carry, captured

  def _scaled(self, y: Array, name: str) -> Array:
    """Returns a branch times `branch_scale` and times the learned vector of this name, if it has one."""
    y = y if self.branch_scale == 1. else y * self.branch_scale
    if not self.layer_scale or (name == 'scale2' and not self.mlp_scale):
      return y
    scale = param(self, name, initializers.constant(self.layer_scale), (y.shape[-1],), ('embed',))
    return y * jnp.expand_dims(scale.astype(y.dtype), range(y.ndim - 1))


class Parallel(Block, kw_only=True):
  """`z = MSA(LN(z)) + MLP(LN(z)) + z`, one norm for both (ViT-22B, arXiv 2302.05442, section 2).

  Stochastic depth drops both branches together.
  """

  @nn.compact
  def __call__(self, x: Array, carry: PyTree, info: BlockInfo) -> tuple[Array, PyTree, dict[str, Array]]:
    """Applies one block, as `Plain` does, but for runs of rows (`num_sequences`, `num_keys`)."""
    keys, dropped = _keys(info.key, self.attention), self.context.dropout
    attend, mlp = self.branches()
    normed = self.context.make_norm('norm1')(x)
    y, captured = attend(normed, normed, num_sequences=info.num_images, capture=info.capture, positions=info.positions,
                         attn_delta=info.attn_delta, mask=info.mask, dropout_key=keys.attention_weights)
    y = self._scaled(dropout(y, dropped, keys.attention_dropout))
    y = y + self._scaled(dropout(mlp(normed, info._replace(key=keys.mlp)), dropped, keys.mlp_dropout))
    return x + drop_path(y, info.rate, keys.attention_path, num_images=info.num_images), carry, captured

  def _scaled(self, y: Array) -> Array:
    """Returns a branch times `branch_scale`."""
    return y if self.branch_scale == 1. else y * self.branch_scale


class Axial(Plain, kw_only=True):
  """A `Plain` block within the rows of the token grid, then one within its columns (ViT paper, Appendix D.6)."""

  @nn.compact
  def __call__(self, x: Array, carry: PyTree, info: BlockInfo) -> tuple[Array, PyTree, dict[str, Array]]:
    """Applies both blocks to all patch tokens of the grid and no others.

    It captures `row_attention [B, h, A, w, w]` and `column_attention [B, w, A, h, h]` f32.
    """
    assert info.attn_delta is None and info.mask is None, 'axial attention has no weights between all tokens'
    assert info.grid is not None, 'axial attention is of the tokens of an image'
    (h, w), num_images = info.grid, info.num_images
    keys = (None, None) if info.key is None else tuple(jax.random.split(info.key))
    captured: dict[str, Array] = {}

    def apply_within(name: str, x: Array, num_runs: int, key: Key | None) -> Array:
      """Applies the block of this name within `num_runs` runs of tokens, the rows or columns of each image."""
      block = Plain(layer_scale=self.layer_scale, mlp_scale=self.mlp_scale, branch_scale=self.branch_scale,
                    heads=self.heads, attention=self.attention, mlp=self.mlp, context=self.context, name=name)
      y, _, captured_within = block(x, {}, BlockInfo(
          num_images, num_sequences=num_images * num_runs, rate=info.rate, key=key, capture=info.capture))
      if 'attention' in captured_within:
        weights = captured_within['attention']
        captured[f'{name}_attention'] = weights.reshape(num_images, num_runs, *weights.shape[1:])
      return y

    x = apply_within('row', x, h, keys[0])
    x = apply_within('column', _swapped(x, num_images, h, w), w, keys[1])
    return _swapped(x, num_images, w, h), carry, captured


class Cross(Block, kw_only=True):
  """`z' = MHA(LN(z), m) + z`, `z = MLP(LN(z')) + z'`: tokens attend to others, such as those of text to an image.

  It is no kind of `model.block`, but a part for objectives and networks of one's own.
  """
  attention: schema.Attention = dataclasses.field(default_factory=schema.Attention)

  @nn.compact
  def __call__(self, x: Array, memory: Array, info: BlockInfo) -> Array:
    """Returns `x [B, Q, D]` after the block; `memory [B, M, D]` gives keys and values, `info.mask` says which."""
    keys, context, num_images = _keys(info.key, self.attention), self.context, info.num_images
    attend, mlp = self.branches()
    y, _ = attend(context.make_norm('norm1')(x), memory, num_sequences=num_images, capture=False, mask=info.mask,
                  dropout_key=keys.attention_weights)
    y = dropout(y, context.dropout, keys.attention_dropout)
    x = x + drop_path(y, info.rate, keys.attention_path, num_images=num_images)
    y = dropout(mlp(context.make_norm('norm2')(x), info._replace(key=keys.mlp)), context.dropout, keys.mlp_dropout)
    return x + drop_path(y, info.rate, keys.mlp_path, num_images=num_images)


def _swapped(x: Array, num_images: int, h: int, w: int) -> Array:
  """Returns tokens `[B * h * w, D]` as `[B * w * h, D]`: those of each column after each other."""
  return x.reshape(num_images, h, w, -1).swapaxes(1, 2).reshape(x.shape)
