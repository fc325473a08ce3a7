"""What the modules of one Vision Transformer get beside their inputs.

`Context` has the settings that are the same in all modules of a network. `vit.py` makes one for the stem, the norms and
the pool (`of`), and one for the blocks, whose products may be quantized (`of_blocks`). `BlockInfo` describes the tokens
of one call; every block gets it, and gives it to its MLP.
"""
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
"""The Flax collection in which a module of a block may `sow` scalars f32, such as a loss that balances experts.

The network sums them over the blocks by name, and objectives add the sums, `Features.losses`, to their loss.
"""


class BlockInfo(NamedTuple):
  """Describes the tokens `[B, M, D]` of one call to a block, and how it is applied to them.

  Attention stays within S sequences of m tokens each. A sequence is one image, S = B and m = M, unless `num_sequences`
  divides images into more of them, such as the rows of the token grid.

  num_images: B. The first two axes of the tokens may be joined, `[B * M, D]`.
  rate: f32 scalar, probability that stochastic depth drops a branch of an image; None = never.
  key: random key for dropout and stochastic depth; None switches both off.
  capture: whether the block also returns its attention weights.
  num_extra: number of tokens before the patches: class token, distillation token and registers.
  grid: sides `(h, w)` of the grid of patch tokens; None = the tokens are of no image.
  positions: `[1, m, C]` or `[S, m, C]`, for kinds of positions that act inside attention.
  attn_delta: `[S, A, m, m]` f32, added to the attention weights before they are used; None = nothing.
  mask: bool, broadcasts to `[S, A, m, m]`: the keys that each query attends to; None = all.
  is_token: bool `[B, M]`, False for padding, which must not change the results for other tokens; None = no padding.
  num_sequences: S; 0 = B.
  num_keys: number of tokens of a sequence that are attended to; the others, at its end, are padding. 0 = all.
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
  """The settings that are the same in all modules of a network.

  norm: settings of the norms.
  gelu: form of the GELU; None = `max(x, 0)` in its place.
  dtype: the compute dtype, that of matrix products.
  dropout: probability that an activation is dropped.
  laws: initial values of parameters.
  forms: fast or plain forms of the operations.
  """
  norm: schema.NormSettings
  gelu: Gelu | None
  dtype: DTypeLike
  dropout: float = 0.
  laws: Laws = VISION_TRANSFORMER
  forms: Forms = FAST

  def make_norm(self, name: str | None = None, *, axis: str = 'embed') -> nn.Module:
    """Returns a norm over the last axis of its input, which has this logical axis."""
    return layers.norm(self.norm, self.forms, axis=axis, name=name)


def of(model: schema.ViT) -> Context:
  """Returns the context of the modules outside of the blocks, such as stem, norms and pool."""
  return Context(norm=model.norm, gelu=model.gelu, dtype=jnp.dtype(model.dtype.value), dropout=model.dropout,
                 laws=initialization.laws(model), forms=select(model.kernels))


def of_blocks(model: schema.ViT) -> Context:
  """Returns the context of the blocks, whose products may be quantized."""
  return dataclasses.replace(of(model), forms=select(model.kernels, model.quantize))


def f32(context: Context) -> Context:
  """Returns a context for modules that compute in f32 and without dropout, such as attention pooling."""
  return dataclasses.replace(context, dtype=jnp.dtype(jnp.float32), dropout=0.)
