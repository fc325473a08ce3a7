"""Token merging in a file of one's own (arXiv 2210.09461): after attention, the most similar tokens become one.

Attention is proportional to the number of tokens that each token stands for, which blocks hand on as `size` in the
carry. With `keeps_shape`, a token that was merged into another one stays in its place with size 0, so that blocks can
be scanned; without, it is removed.
"""
from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.config import schema
from vit_jax.core import implementation
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, PyTree
from vit_jax.models.vit.context import BlockInfo, Context


@dataclasses.dataclass
class Merging(schema.BlockSettings):
  """A block that removes `removed` tokens."""
  implementation: ClassVar[str] = 'tests.own_kinds.merging:Block'
  removed: int = schema.ranged(4, schema.Range(0, 10_000))
  keeps_shape: bool = True


class Block(nn.Module, kw_only=True):
  removed: int
  keeps_shape: bool
  heads: int
  attention: schema.Attention
  mlp: schema.MlpSettings
  positions: Any = None
  context: Context

  def init_carry(self, x: Array, info: BlockInfo) -> PyTree:
    if self.positions is not None or info.is_token is not None:
      raise UserError('model.block: expected positions outside of attention and images of one size for token merging, '
                      'got others. Choose learned positions.')
    size_BM = jnp.ones((info.num_images, x.size // x.shape[-1] // info.num_images))
    return {'size': size_BM, 'is_token': size_BM > 0}

  @nn.compact
  def __call__(self, x: Array, carry: PyTree, info: BlockInfo) -> tuple[Array, PyTree, dict[str, Array]]:
    context = self.context
    attend = implementation.make(self.attention, heads=self.heads, positions=None, laws=context.laws.attention,
                                 context=context, name='attn')
    mlp = implementation.make(self.mlp, context=context, name='mlp')
    x = x.reshape(info.num_images, -1, x.shape[-1])
    size_BM = carry['size']
    normed = context.make_norm('norm1')(x)
    y, captured = attend(normed, normed, num_sequences=info.num_images, capture=info.capture, dropout_key=None,
                         mask=(size_BM > 0)[:, None, None],
                         logits_bias=jnp.log(jnp.maximum(size_BM, 1.))[:, None, None])
    x = x + y
    if x.shape[1] - info.num_extra > 2 * self.removed:
      x, size_BM = merge(x, size_BM, self.removed, info.num_extra, keeps_shape=self.keeps_shape)
    x = x + mlp(context.make_norm('norm2')(x), info)
    return x, {'size': size_BM, 'is_token': size_BM > 0}, captured


def merge(x: Array, size_BM: Array, removed: int, num_extra: int, *, keeps_shape: bool) -> tuple[Array, Array]:
  """Merges tokens `x [B, M, D]` in pairs of the most similar; returns tokens and sizes."""
  is_candidate = (size_BM > 0) & (jnp.arange(x.shape[1]) >= num_extra)[None]
  unit = x.astype(jnp.float32) / (jnp.linalg.norm(x.astype(jnp.float32), axis=-1, keepdims=True) + 1e-6)
  order = jnp.cumsum(is_candidate, axis=1)
  is_first, is_second = is_candidate & (order % 2 == 1), is_candidate & (order % 2 == 0)
  score = jnp.where(is_first[:, :, None] & is_second[:, None], jnp.einsum('bnd,bmd->bnm', unit, unit), -jnp.inf)
  best, to = score.max(-1), score.argmax(-1)
  rank = jnp.argsort(jnp.argsort(-jnp.where(is_first, best, -jnp.inf), axis=1), axis=1)
  goes = (rank < removed) & is_first & (best > -jnp.inf)
  share = jax.nn.one_hot(to, x.shape[1]) * goes[..., None] + jnp.eye(x.shape[1])[None] * ~goes[..., None]
  new_size = jnp.einsum('bnm,bn->bm', share, size_BM)
  mean = jnp.einsum('bnm,bn,bnd->bmd', share, size_BM, x.astype(jnp.float32))
  new = (mean / jnp.maximum(new_size, 1.)[..., None]).astype(x.dtype)
  if keeps_shape:
    return new, new_size
  kept = jnp.argsort(goes, axis=1, stable=True)[:, :x.shape[1] - removed]
  pick = jax.vmap(lambda rows, at: rows[at])
  return pick(new, kept), pick(new_size, kept)
