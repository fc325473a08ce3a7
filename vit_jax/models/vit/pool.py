"""Attention pooling (Set Transformer, arXiv 1810.00825; "MAP head" of Scaling ViT, arXiv 2106.04560).

Parameters: `probe [1, 1, D]`, `attn/{query,key,value,out}`, `norm/{scale,bias}`, `mlp/{up,down}`, shaped
as in a block without its leading depth. All of it is computed in f32.
"""
from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.config.schema import Gelu
from vit_jax.core.types import Array
from vit_jax.models.layers import LayerNorm, xavier_uniform
from vit_jax.models.vit.attention import Attention
from vit_jax.models.vit.block import Mlp


class AttentionPool(nn.Module):
  """`y = MHA(probe, x)`, `pooled = y + MLP(LN(y))`: a learned query asks all tokens."""
  heads: int
  mlp: int
  gelu: Gelu
  norm_eps: float

  def __call__(self, tokens: Array) -> Array:
    """`[B, N, D]` f32 to `[B, D]` f32."""
    return self.both(tokens, capture=False)[0]

  def weights(self, tokens: Array) -> Array:
    """How the probe attends to `[B, N, D]` f32 tokens: `[B, N]` f32, mean over heads."""
    return self.both(tokens, capture=True)[1]['attention'].mean(1)[:, 0]

  @nn.compact
  def both(self, tokens: Array, *, capture: bool) -> tuple[Array, dict[str, Array]]:
    """What is pooled, `[B, D]`, and with `capture` `attention [B, A, 1, N]`."""
    num_images, _, width = tokens.shape
    probe = self.param('probe', xavier_uniform, (1, 1, width))
    probe_BD = jnp.broadcast_to(probe[0], (num_images, width))
    attn = Attention(self.heads, jnp.float32, qk_norm=False, norm_eps=self.norm_eps, dropout=0., relative=0,
                     name='attn')
    y_BD, captured = attn(probe_BD, tokens.reshape(-1, width), num_sequences=num_images, dropout_key=None,
                          capture=capture)
    mlp = Mlp(self.mlp, self.gelu, swiglu=False, dropout=0., dtype=jnp.float32, name='mlp')
    return y_BD + mlp(LayerNorm(self.norm_eps, name='norm')(y_BD), None), captured
