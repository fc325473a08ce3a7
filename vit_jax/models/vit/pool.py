"""How tokens become one feature vector: the kinds of `model.pool`.

Contract of a kind of pool: `(…fields of its settings…, model=…, context=…)` with the methods of `ClassToken`.

Attention pooling is that of the Set Transformer (arXiv 1810.00825; "MAP head" of Scaling ViT, arXiv 2106.04560). Its
parameters are `probe [1, 1, D]`, `attn/{query,key,value,out}`, `norm/{scale,bias}`, `mlp/{up,down}`, with the shapes of
a block without its leading depth. All of it is computed in f32.
"""
from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax.numpy as jnp

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, Key, Params
from vit_jax.models.layers import applied, initial, param
from vit_jax.models.vit import context
from vit_jax.models.vit.attention import Attention
from vit_jax.models.vit.block import Mlp
from vit_jax.models.vit.context import BlockInfo, Context


class AttentionPool(nn.Module, kw_only=True):
  """`y = MHA(probe, x)`, `pooled = y + MLP(LN(y))`: a learned query attends to all tokens."""
  heads: int
  hidden: int
  context: Context

  @nn.compact
  def __call__(self, tokens: Array, *, capture: bool = False,
               mask: Array | None = None) -> tuple[Array, dict[str, Array]]:
    """`[B, N, D]` f32 to pooled `[B, D]` f32, and with `capture` `attention [B, A, 1, N]`.

    `mask [B, N]` bool says which tokens are attended to; None = all.
    """
    num_images, _, width = tokens.shape
    f32 = context.f32(self.context)
    probe = param(self, 'probe', f32.laws.map_probe, (1, 1, width), (None, 'tokens', None))
    probe_BD = jnp.broadcast_to(probe[0], (num_images, width))
    attn = Attention(heads=self.heads, laws=f32.laws.pool, context=f32, name='attn')
    y_BD, captured = attn(probe_BD, tokens.reshape(-1, width), num_sequences=num_images, dropout_key=None,
                          capture=capture, mask=None if mask is None else mask[:, None, None])
    mlp = Mlp(hidden=self.hidden, context=f32, name='mlp')
    return y_BD + mlp(f32.make_norm('norm')(y_BD), BlockInfo(num_images)), captured


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassToken:
  """The class token (ViT paper, eq. 4); and the base of all kinds of pools.

  model: settings of the network.
  context: settings that the whole network shares.
  """
  model: schema.ViT
  context: Context
  class_token: bool = True
  distillation: bool = False

  def init(self, key: Key) -> Params:
    """Returns new parameters; `{}` if there are none."""
    del key
    return {}

  def pooled(self, params: Params, x_BMD: Array, mask: Array | None = None) -> Array:
    """Returns `[B, D]` from the normed sequence of class and distillation token, registers and patches `[B, M, D]`.

    `mask [B, M]` bool says which tokens are no padding; None = all.
    """
    del params, mask
    return x_BMD[:, 0]

  def weights(self, params: Params, x_BMD: Array) -> Array:
    """Returns the weight of each token in the pooled features, `[B, M]` f32 with sum 1; of attention the mean."""
    del params
    return jnp.broadcast_to(self._weights(x_BMD.shape[1])[None], x_BMD.shape[:2])

  def _weights(self, num_tokens: int) -> Array:
    """Returns the weights `[M]` of the tokens of an image, if they are those of every image."""
    return jnp.zeros(num_tokens).at[0].set(1.)


def check_pooled(settings: schema.PoolSettings, pooled: Array, shape: tuple[int, ...]) -> None:
  """Raises UserError if a person's own pool returns another shape than `[B, D]`, for tokens with `shape`."""
  expected, found = (shape[0], shape[2]), getattr(pooled, 'shape', type(pooled).__name__)
  if found != expected:
    raise UserError(f'{type(settings).implementation}: expected an array {expected} from `pooled`, for tokens {shape}, '
                    f'got {found}. Return one vector of the width of the network for each image.')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mean(ClassToken):
  """The mean over patch tokens (Appendix D.3)."""

  def pooled(self, params: Params, x_BMD: Array, mask: Array | None = None) -> Array:
    extra = self.model.num_extra
    if mask is None:
      return x_BMD[:, extra:].mean(1)
    is_patch_BN = mask[:, extra:]
    sum_BD = jnp.where(is_patch_BN[..., None], x_BMD[:, extra:], 0.).sum(1)
    return sum_BD / is_patch_BN.sum(1, keepdims=True).astype(sum_BD.dtype)

  def _weights(self, num_tokens: int) -> Array:
    extra = self.model.num_extra
    return jnp.zeros(num_tokens).at[extra:].set(1. / (num_tokens - extra))


@dataclasses.dataclass(frozen=True, kw_only=True)
class First(ClassToken):
  """The first patch token."""

  def pooled(self, params: Params, x_BMD: Array, mask: Array | None = None) -> Array:
    return x_BMD[:, self.model.num_extra]

  def _weights(self, num_tokens: int) -> Array:
    return jnp.zeros(num_tokens).at[self.model.num_extra].set(1.)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Map(ClassToken):
  """A learned query attends to the patch tokens, or with a class token to all, registers too."""
  heads: int
  hidden: int

  def init(self, key: Key) -> Params:
    return initial(self._network, key, jnp.zeros((1, 1, self.model.width)))

  def pooled(self, params: Params, x_BMD: Array, mask: Array | None = None) -> Array:
    masked = {} if mask is None else {'mask': mask[:, self._num_unseen:]}
    pooled_BD: Array = applied(self._network, params, x_BMD[:, self._num_unseen:], **masked)[0]
    return pooled_BD

  def weights(self, params: Params, x_BMD: Array) -> Array:
    _, captured = applied(self._network, params, x_BMD[:, self._num_unseen:], capture=True)
    return jnp.pad(captured['attention'].mean(1)[:, 0], ((0, 0), (self._num_unseen, 0)))

  @property
  def _num_unseen(self) -> int:
    """Number of first tokens that the query does not attend to."""
    return 0 if self.class_token else self.model.num_extra

  @property
  def _network(self) -> AttentionPool:
    return AttentionPool(heads=self.heads or self.model.heads, hidden=self.hidden or self.model.mlp.hidden,
                         context=self.context)
