"""What the modules of one Vision Transformer share."""
from __future__ import annotations

import dataclasses
from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike

from vit_jax.config import schema
from vit_jax.config.schema import Gelu
from vit_jax.core.types import Array, Key
from vit_jax.models import initialization, layers
from vit_jax.models.initialization import VISION_TRANSFORMER, Laws
from vit_jax.models.kernels.forms import FAST, Forms, select

LOSSES = 'losses'
"""Collection of Flax in which a module of a block may `sow` scalars f32, such as a loss that balances experts.

They are summed over the blocks by name, and `Features.losses` has the sums, which objectives add to their loss.
"""


class BlockInfo(NamedTuple):
  """Information for a block, and for the attention and the MLP in it, about the tokens `[B, M, D]` that they get.

  num_images: B. The first two axes of the tokens may be joined, `[B * M, D]`.
  rate: f32 scalar, probability that stochastic depth drops a branch, of a complete image; None = never.
  key: of all that is random; None switches dropout and stochastic depth off.
  capture: also return the attention weights.
  num_extra: the first so many of M are no patches, but class token, distillation token and registers.
  grid: of the patch tokens, `(h, w)`; None = tokens of no image.
  positions: `[1, m, D]` or `[S, m, D]`, for kinds of positions that act inside attention.
  attn_delta: `[S, A, m, m]` f32, added to the attention weights before they are used; None = nothing.
  mask: bool, broadcasts to `[S, A, m, m]`: which keys each query attends to; None = all.
  is_token: bool, `[B, M]`, False for padding, which must not change what is computed of other tokens; None = there is
    none.
  num_sequences: number of equal runs of rows that attention stays within, S; 0 = B.
  num_keys: the first so many tokens of a sequence are attended to, the others only fill it up; 0 = all.
  """
  num_images: int
  rate: Array | None = None
  key: Key | None = None
  capture: bool = False
  num_extra: int = 0
  grid: tuple[int, int] | None = None
  positions: Array | None = None
  attn_delta: Array | None = None
  mask: Array | None = None
  is_token: Array | None = None
  num_sequences: int = 0
  num_keys: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
  """What is the same in all modules of a network.

  norm: settings of the norms.    gelu: form of the GELU; None = `max(x, 0)` in its place.    dtype: of the products.
  dropout: probability that an activation is dropped.    laws: by which parameters start.    forms: of the operations.
  """
  norm: schema.NormSettings
  gelu: Gelu | None
  dtype: DTypeLike
  dropout: float = 0.
  laws: Laws = VISION_TRANSFORMER
  forms: Forms = FAST

  def make_norm(self, name: str | None = None, *, axis: str = 'embed') -> nn.Module:
    """Returns a norm of the network, over a logical axis."""
    return layers.norm(self.norm, self.forms, axis=axis, name=name)


def of(model: schema.ViT) -> Context:
  """Returns the context of what is not in the blocks of a network, such as stem, norms and pool."""
  return Context(norm=model.norm, gelu=model.gelu, dtype=jnp.dtype(model.dtype.value), dropout=model.dropout,
                 laws=initialization.laws(model), forms=select(model.kernels))


def of_blocks(model: schema.ViT) -> Context:
  """Returns the context of a network's blocks, whose products may be quantized."""
  return dataclasses.replace(of(model), forms=select(model.kernels, model.quantize))


def f32(context: Context) -> Context:
  """Returns the context of what computes in f32 and without dropout, such as attention pooling."""
  return dataclasses.replace(context, dtype=jnp.dtype(jnp.float32), dropout=0.)
