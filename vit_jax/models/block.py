"""One encoder block (ViT paper, eqs. 2 and 3): attention and MLP, each after a LayerNorm and added back.

Names the values that `stack.py` may save for the backward pass: `query`, `key`, `value`, `attention`
(in `attention.py`), `residual` (after the attention branch), `mlp` (before the activation).
"""
from __future__ import annotations

import flax.linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
from jax.nn import initializers
from jax.typing import DTypeLike

from vit_jax.config.schema import Gelu
from vit_jax.core.types import Array, Key
from vit_jax.models.attention import SelfAttention
from vit_jax.models.layers import Dense, LayerNorm, drop_path, dropout, gelu, xavier_uniform

MLP_BIAS_STDDEV = 1e-6  # vision_transformer, models_vit.py


class Mlp(nn.Module):
  """`W2 gelu(W1 x + b1) + b2`, with dropout after the activation."""
  hidden: int
  gelu: Gelu
  dropout: float
  dtype: DTypeLike

  @nn.compact
  def __call__(self, x: Array, key: Key | None) -> Array:
    """`[R, D]` to `[R, D]`."""
    bias_init = initializers.normal(MLP_BIAS_STDDEV)
    hidden_RF = Dense((self.hidden,), self.dtype, xavier_uniform, bias_init, name='up')(x)
    hidden_RF = gelu(checkpoint_name(hidden_RF, 'mlp'), self.gelu)
    hidden_RF = dropout(hidden_RF, self.dropout, key)
    return Dense((x.shape[-1],), self.dtype, xavier_uniform, bias_init, name='down')(hidden_RF)


class Block(nn.Module):
  """Pre-norm encoder block: `z' = MSA(LN(z)) + z` (eq. 2), `z = MLP(LN(z')) + z'` (eq. 3)."""
  heads: int
  mlp: int
  gelu: Gelu
  norm_eps: float
  dropout: float
  dtype: DTypeLike

  @nn.compact
  def __call__(self, x: Array, *, num_images: int, rate: Array | None,
               dropout_key: Key | None, capture: bool) -> tuple[Array, dict[str, Array]]:
    """One block.

    Args:
      x: `[B * M, D]` in the compute dtype.
      num_images: B.
      rate: f32 scalar, probability that a branch is dropped; None = never.
      dropout_key: None switches dropout and stochastic depth off.
      capture: also return the attention weights.

    Returns:
      `[B * M, D]`, and `{}` or `{'attention': [B, A, M, M] f32}`.
    """
    keys = (None,) * 5 if dropout_key is None else tuple(jax.random.split(dropout_key, 5))
    attn = SelfAttention(self.heads, self.dtype, name='attn')
    y, captured = attn(LayerNorm(self.norm_eps, name='norm1')(x), num_images=num_images, capture=capture)
    y = dropout(y, self.dropout, keys[0])
    x = checkpoint_name(x + drop_path(y, rate, keys[1], num_images=num_images), 'residual')
    mlp = Mlp(self.mlp, self.gelu, self.dropout, self.dtype, name='mlp')
    y = mlp(LayerNorm(self.norm_eps, name='norm2')(x), keys[2])
    y = dropout(y, self.dropout, keys[3])
    return x + drop_path(y, rate, keys[4], num_images=num_images), captured
