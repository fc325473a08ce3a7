"""How tokens become one feature vector: `Pooling` for every kind of `model.pool`, and attention pooling.

Attention pooling is that of the Set Transformer (arXiv 1810.00825; "MAP head" of Scaling ViT, arXiv 2106.04560). Its
parameters are `probe [1, 1, D]`, `attn/{query,key,value,out}`, `norm/{scale,bias}`, `mlp/{up,down}`, with the shapes of
a block without its leading depth. All of it is computed in f32.
"""
from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.config.schema import Gelu, Norm, Pool
from vit_jax.core.types import Array, Key, Params
from vit_jax.models.initialization import VISION_TRANSFORMER, Laws
from vit_jax.models.kernels.forms import FAST, Forms
from vit_jax.models.layers import applied, initial, norm, param
from vit_jax.models.vit.attention import Attention
from vit_jax.models.vit.block import Mlp


class AttentionPool(nn.Module, kw_only=True):
  """`y = MHA(probe, x)`, `pooled = y + MLP(LN(y))`: a learned query attends to all tokens."""
  heads: int
  mlp: int
  gelu: Gelu
  norm_eps: float
  norm_kind: Norm = Norm.LAYER
  laws: Laws = VISION_TRANSFORMER
  forms: Forms = FAST

  @nn.compact
  def __call__(self, tokens: Array, *, capture: bool = False) -> tuple[Array, dict[str, Array]]:
    """`[B, N, D]` f32 to pooled `[B, D]` f32, and with `capture` `attention [B, A, 1, N]`."""
    num_images, _, width = tokens.shape
    probe = param(self, 'probe', self.laws.map_probe, (1, 1, width), (None, 'tokens', None))
    probe_BD = jnp.broadcast_to(probe[0], (num_images, width))
    attn = Attention(heads=self.heads, dtype=jnp.float32, norm_eps=self.norm_eps, laws=self.laws.pool,
                     forms=self.forms, name='attn')
    y_BD, captured = attn(probe_BD, tokens.reshape(-1, width), num_sequences=num_images, dropout_key=None,
                          capture=capture)
    mlp = Mlp(hidden=self.mlp, gelu=self.gelu, dtype=jnp.float32, law=self.laws.mlp, forms=self.forms, name='mlp')
    normed_BD = norm(self.norm_kind, self.norm_eps, self.forms, name='norm')(y_BD)
    return y_BD + mlp(normed_BD, None), captured


@dataclasses.dataclass(frozen=True)
class Pooling:
  """Pools the normed sequence of class and distillation token, registers and patch tokens (eq. 4).

  num_extra: tokens before the patch tokens.    network: of attention pooling.
  """
  kind: Pool
  num_extra: int
  network: AttentionPool

  def init(self, key: Key, width: int) -> Params:
    """Parameters of attention pooling."""
    return initial(self.network, key, jnp.zeros((1, 1, width)))

  def pooled(self, params: Params | None, x_BMD: Array) -> Array:
    """`[B, D]` from `[B, M, D]` f32. Registers are part of it with `map_cls` alone."""
    match self.kind:
      case Pool.CLS:
        return x_BMD[:, 0]
      case Pool.MEAN | Pool.PATCHES:
        return x_BMD[:, self.num_extra:].mean(1)
      case Pool.FIRST:
        return x_BMD[:, self.num_extra]
      case Pool.MAP | Pool.MAP_CLS:
        assert params is not None
        return applied(self.network, params, x_BMD[:, self._num_unseen:])[0]

  def weights(self, params: Params | None, x_BMD: Array) -> Array:
    """Weight of each token in the pooled features, `[B, M]` f32 with sum 1; of attention the mean over heads."""
    num_images, num_tokens, _ = x_BMD.shape
    match self.kind:
      case Pool.CLS:
        weights_M = jnp.zeros(num_tokens).at[0].set(1.)
      case Pool.MEAN | Pool.PATCHES:
        weights_M = jnp.zeros(num_tokens).at[self.num_extra:].set(1. / (num_tokens - self.num_extra))
      case Pool.FIRST:
        weights_M = jnp.zeros(num_tokens).at[self.num_extra].set(1.)
      case Pool.MAP | Pool.MAP_CLS:
        assert params is not None
        _, captured = applied(self.network, params, x_BMD[:, self._num_unseen:], capture=True)
        return jnp.pad(captured['attention'].mean(1)[:, 0], ((0, 0), (self._num_unseen, 0)))
    return jnp.broadcast_to(weights_M[None], (num_images, num_tokens))

  @property
  def _num_unseen(self) -> int:
    """First tokens that attention pooling does not see."""
    return 0 if self.kind is Pool.MAP_CLS else self.num_extra
