"""DINO's projection head (arXiv 2104.14294, Appendix C): an MLP, a unit vector, and prototypes of unit length.

Parameters, all f32, for K prototypes, hidden width F and bottleneck E:

  mlp1/{kernel [D, F], bias [F]}, mlp2/{kernel [F, F], bias [F]}, mlp3/{kernel [F, E], bias [E]}
  prototypes/kernel [E, K]      (its columns count by direction alone)
  prototypes/norm [K]           (their lengths, if these are learned; else 1)

Dense layers are in the compute dtype; both normalisations are in f32, and so are the outputs.
"""
from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.nn import initializers
from jax.typing import DTypeLike

from vit_jax.config.schema import Gelu
from vit_jax.core.numerics import split_key
from vit_jax.core.types import Array, Key, Params
from vit_jax.models.kernels.norm_act import gelu
from vit_jax.models.layers import Dense, applied, initial

STDDEV = .02    # DINO; its truncation at 2 cuts nothing
EPS = 1e-12     # the least length that a vector is divided by (torch's normalize)
LAYERS = ('mlp1', 'mlp2', 'mlp3')


def normalize(x: Array, *, axis: int) -> Array:
  """`x / max(|x|, 1e-12)` along an axis, in f32, with a finite gradient at 0."""
  x = x.astype(jnp.float32)
  square = jnp.square(x).sum(axis, keepdims=True)
  return x * jax.lax.rsqrt(jnp.maximum(square, EPS ** 2))


@dataclasses.dataclass(frozen=True)
class Projector:
  """A head with `prototypes` outputs; `learned_norm` makes their lengths parameters."""
  prototypes: int
  hidden: int
  bottleneck: int
  learned_norm: bool
  dtype: DTypeLike

  def init(self, key: Key, width: int) -> Params:
    """New parameters for features `[R, width]`."""
    keys = split_key(key, *LAYERS, 'prototypes')
    inputs = (width, self.hidden, self.hidden)
    params: Params = {name: initial(layer, keys[name], jnp.zeros((1, size)))
                      for (name, layer), size in zip(self._layers.items(), inputs, strict=True)}
    shape, limit = (self.bottleneck, self.prototypes), self.bottleneck ** -.5  # torch's Linear
    params['prototypes'] = {'kernel': jax.random.uniform(keys['prototypes'], shape, minval=-limit, maxval=limit)}
    if self.learned_norm:
      params['prototypes']['norm'] = jnp.ones(self.prototypes)
    return params

  def apply(self, params: Params, features: Array) -> Array:
    """Outputs `[R, K]` f32 of features `[R, D]`: cosines with the prototypes, times their lengths."""
    x = features
    for name, layer in self._layers.items():
      x = applied(layer, params[name], x)
      x = gelu(x, Gelu.EXACT) if name != LAYERS[-1] else x
    unit_RE = normalize(x, axis=-1).astype(self.dtype)
    directions_EK = normalize(params['prototypes']['kernel'], axis=0).astype(self.dtype)
    outputs_RK = jnp.dot(unit_RE, directions_EK, preferred_element_type=jnp.float32)
    return outputs_RK * params['prototypes']['norm'][None] if self.learned_norm else outputs_RK

  @property
  def _layers(self) -> dict[str, Dense]:
    widths = (self.hidden, self.hidden, self.bottleneck)
    return {name: Dense((width,), self.dtype, initializers.normal(STDDEV))
            for name, width in zip(LAYERS, widths, strict=True)}
