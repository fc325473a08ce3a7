"""Heads on a backbone: the classification head, and DINO's projection head.

Parameters of the classification head, all f32: `kernel [D, C]` and `bias [C]` (with `bias`; without, the head is a
projection to an embedding, as that of CLIP), and with `pre_logits` `pre_logits/{kernel, bias}` of the tanh layer before
it (ViT paper, section 3.1).

Parameters of the projection head (arXiv 2104.14294, Appendix C), an MLP, a unit vector, and prototypes of unit length,
all f32, for K prototypes, hidden width F and bottleneck E:

  mlp1/{kernel [D, F], bias [F]}, mlp2/{kernel [F, F], bias [F]}, mlp3/{kernel [F, E], bias [E]}
  prototypes/kernel [E, K]      (its columns count by direction alone)
  prototypes/norm [K]           (their lengths, if these are learned; else 1)
"""
from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from vit_jax.config import schema
from vit_jax.config.schema import Gelu, Kernels
from vit_jax.core.axes import labelled
from vit_jax.core.numerics import split_key
from vit_jax.core.types import Array, Key, Params
from vit_jax.models import initialization
from vit_jax.models.initialization import VISION_TRANSFORMER, Laws, Linear
from vit_jax.models.kernels.forms import Forms, select
from vit_jax.models.layers import Dense, applied, initial, param

EPS = 1e-12     # the least length that a vector is divided by (torch's normalize)
HIDDEN, OUTPUT = ('embed', 'mlp'), ('embed', 'classes')  # logical axes of the kernels
LAYERS = ('mlp1', 'mlp2', 'mlp3')


class _Classifier(nn.Module, kw_only=True):
  """`W tanh(V x + v) + b`, or `W x + b` without `pre_logits`."""
  settings: schema.Head
  num_classes: int
  laws: Laws
  forms: Forms

  @nn.compact
  def __call__(self, x: Array) -> Array:
    s = self.settings
    law = self.laws.probe if s.probe else self.laws.head
    if s.pre_logits:
      hidden = Dense(features=(s.pre_logits,), axes=HIDDEN, dtype=jnp.float32, law=self.laws.pre_logits,
                     forms=self.forms, name='pre_logits')
      x = jnp.tanh(hidden(x))

    def init_bias(key: Key, shape: tuple[int, ...]) -> Array:
      return s.bias_init + law.bias(x.shape[-1])(key, shape)

    kernel = param(self, 'kernel', law.kernel, (x.shape[-1], self.num_classes), OUTPUT, matrix=(1, 1))
    bias = (param(self, 'bias', init_bias, (self.num_classes,), OUTPUT[1:]) if s.bias
            else jnp.zeros(self.num_classes))
    return self.forms.dense(x, kernel, bias)


@dataclasses.dataclass(frozen=True)
class Head:
  """A classification head: pooled features to logits, always in f32; made by `build`.

  `kernels` and `laws` are those of the network under it.
  """
  settings: schema.Head
  kernels: Kernels = Kernels.FAST
  laws: Laws = VISION_TRANSFORMER

  def init(self, key: Key, width: int, num_classes: int) -> Params:
    """Returns parameters for features `[B, width]` and `num_classes` classes."""
    return initial(self._network(num_classes), key, jnp.zeros((1, width)))

  def apply(self, params: Params, pooled: Array) -> Array:
    """Returns logits `[B, C]` f32 of features `[B, D]`, any float dtype."""
    network = self._network(params['kernel'].shape[-1])
    return applied(network, params, pooled.astype(jnp.float32))

  def _network(self, num_classes: int) -> _Classifier:
    return _Classifier(settings=self.settings, num_classes=num_classes, laws=self.laws, forms=select(self.kernels))


def build(settings: schema.Head, model: schema.Model) -> Head:
  """Returns the head of these settings on a network."""
  return Head(settings, model.kernels, initialization.laws(model))


def hidden(params: Params, pooled: Array) -> Array:
  """Returns the input of the last layer of a classification head, f32: `tanh(V x + v)`, or `x` for a linear head."""
  x = pooled.astype(jnp.float32)
  if 'pre_logits' not in params:
    return x
  layer = Dense(features=(params['pre_logits']['bias'].shape[-1],), axes=HIDDEN, dtype=jnp.float32,
                law=initialization.LECUN)
  return jnp.tanh(applied(layer, params['pre_logits'], x))


def normalize(x: Array, *, axis: int) -> Array:
  """Returns `x / max(|x|, 1e-12)` along an axis, in f32, with a finite gradient at 0."""
  x = x.astype(jnp.float32)
  square = jnp.square(x).sum(axis, keepdims=True)
  return x * jax.lax.rsqrt(jnp.maximum(square, EPS ** 2))


@dataclasses.dataclass(frozen=True)
class Projector:
  """DINO's projection head with `prototypes` outputs; `learned_norm` makes their lengths parameters.

  Dense layers are in the compute dtype; both normalizations are in f32, and so are the outputs.
  """
  prototypes: int
  hidden: int
  bottleneck: int
  learned_norm: bool
  dtype: DTypeLike
  kernels: Kernels = Kernels.FAST
  law: Linear = VISION_TRANSFORMER.projector

  def init(self, key: Key, width: int) -> Params:
    """Returns new parameters for features `[R, width]`."""
    keys = split_key(key, *LAYERS, 'prototypes')
    inputs = (width, self.hidden, self.hidden)
    params: Params = {name: initial(layer, keys[name], jnp.zeros((1, size)))
                      for (name, layer), size in zip(self._layers.items(), inputs, strict=True)}
    shape = self.bottleneck, self.prototypes
    params['prototypes'] = {
        'kernel': labelled(initialization.torch_kernel(keys['prototypes'], shape), OUTPUT, matrix=(1, 1))}
    if self.learned_norm:
      params['prototypes']['norm'] = labelled(jnp.ones(self.prototypes), OUTPUT[1:])
    return params

  def apply(self, params: Params, features: Array) -> Array:
    """Returns outputs `[R, K]` f32 of features `[R, D]`: cosines with the prototypes, times their lengths."""
    x, gelu = features, select(self.kernels).gelu
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
    return {name: Dense(features=(width,), axes=('embed', None), dtype=self.dtype, law=self.law,
                        forms=select(self.kernels))
            for name, width in zip(LAYERS, widths, strict=True)}
