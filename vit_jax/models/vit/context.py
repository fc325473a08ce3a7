"""What the modules of one Vision Transformer share."""
from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike

from vit_jax.config import schema
from vit_jax.config.schema import Gelu
from vit_jax.models import initialization, layers
from vit_jax.models.initialization import VISION_TRANSFORMER, Laws
from vit_jax.models.kernels.forms import FAST, Forms, select


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
