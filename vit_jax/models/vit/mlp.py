"""The MLPs of a block (ViT paper, eq. 3). The fields of their settings are attributes of the modules.

Contract of a kind of MLP: a module `(…fields of its settings…, context=…)` that is called with `x [B, M, D]` or
`[B * M, D]` and a `BlockInfo`, whose `key` is that of its dropout, and returns the shape of `x`. It names the values
that `stack.py` may save `mlp`. One that mixes tokens must keep to images (`num_images`) and to `is_token`.
"""
from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name

from vit_jax.config.schema import MlpKernel
from vit_jax.core.types import Array, Key
from vit_jax.models import adapters
from vit_jax.models.initialization import Linear
from vit_jax.models.kernels import fused_mlp
from vit_jax.models.layers import Dense, Weights, dropout
from vit_jax.models.vit.context import BlockInfo, Context

UP, DOWN = ('embed', 'mlp'), ('mlp', 'embed')  # logical axes of the matrices


class Mlp(nn.Module, kw_only=True):
  """`W2 gelu(W1 x + b1) + b2`; without a GELU the activation is `max(x, 0)`. Dropout comes after the activation.

  Without `bias` there is no b. With `inner_norm` what W2 is applied to is normalized (arXiv 2110.09456). `kernel`
  computes it, if it is for the devices.
  """
  hidden: int
  bias: bool = True
  inner_norm: bool = False
  kernel: MlpKernel = MlpKernel.XLA
  context: Context

  @nn.compact
  def __call__(self, x: Array, info: BlockInfo) -> Array:
    """`[..., D]` to `[..., D]`."""
    key = info.key
    if self.context.gelu is not None and self._is_fused(x, key):
      options = _options(self.context, x, self.bias, self.context.laws.mlp)
      up = Weights(features=(self.hidden,), axes=UP, name='up', **options)(x.shape[-1])
      down = Weights(features=(x.shape[-1],), axes=DOWN, name='down', **options)(self.hidden)
      return fused_mlp.mlp_on_mesh(x.astype(self.context.dtype), *up, *down, self.context.gelu)
    up_F = _projected(self, x, 'up', self.context.laws.mlp)
    hidden_F = jax.nn.relu(up_F) if self.context.gelu is None else self.context.forms.gelu(up_F, self.context.gelu)
    return _down(self, hidden_F, x, key)

  def _is_fused(self, x: Array, key: Key | None) -> bool:
    """Whether the fused kernel computes both products and all that is between them, which is nothing but the GELU."""
    is_plain = self.bias and not (self.inner_norm or (self.context.dropout and key is not None))
    layers: list[Any] = [self.get_variable('params', name, {}) for name in ('up', 'down')]
    is_adapted = any(name in layer for layer in layers for name in adapters.USED)
    return is_plain and fused_mlp.is_fused(self.kernel, x.shape, self.hidden, self.context.dtype,
                                           is_adapted=is_adapted)


class SwiGlu(nn.Module, kw_only=True):
  """`W2 (silu(V x + c) * (W1 x + b1)) + b2` (arXiv 2002.05202); V is `gate`, W1 is `up`. Otherwise as `Mlp`."""
  hidden: int
  bias: bool = True
  inner_norm: bool = False
  context: Context

  @nn.compact
  def __call__(self, x: Array, info: BlockInfo) -> Array:
    """`[..., D]` to `[..., D]`."""
    gate_F = jax.nn.silu(_projected(self, x, 'gate', self.context.laws.gate))
    return _down(self, gate_F * _projected(self, x, 'up', self.context.laws.mlp), x, info.key)


def _options(context: Context, x: Array, has_bias: bool, law: Linear) -> dict[str, Any]:
  return {'dtype': context.dtype, 'has_bias': has_bias, 'num_batch_dims': x.ndim - 1, 'forms': context.forms,
          'law': law}


def _projected(module: Mlp | SwiGlu, x: Array, name: str, law: Linear) -> Array:
  """The hidden layer of this name, before its activation."""
  options = _options(module.context, x, module.bias, law)
  return checkpoint_name(Dense(features=(module.hidden,), axes=UP, name=name, **options)(x), 'mlp')


def _down(module: Mlp | SwiGlu, hidden_F: Array, x: Array, key: Key | None) -> Array:
  """Dropout, the inner norm and the last matrix."""
  context = module.context
  hidden_F = dropout(hidden_F, context.dropout, key)
  if module.inner_norm:
    hidden_F = context.make_norm('norm', axis='mlp')(hidden_F).astype(context.dtype)
  options = _options(context, x, module.bias, context.laws.mlp)
  return Dense(features=(x.shape[-1],), axes=DOWN, name='down', **options)(hidden_F)
