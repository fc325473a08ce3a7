"""Classification head: pooled features to logits, always in f32.

Parameters: `kernel [D, C]` (zeros: an untrained head says nothing), `bias [C]`, and with `pre_logits`
`pre_logits/{kernel, bias}` of the tanh layer before it (ViT paper, section 3.1, pre-training head).
"""
from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax.numpy as jnp
from jax.nn import initializers

from vit_jax.config import schema
from vit_jax.core.types import Array, Key, Params
from vit_jax.models.kernels.dense import dense
from vit_jax.models.layers import Dense, applied, initial


class _Classifier(nn.Module):
  """`W tanh(V x + v) + b`, or `W x + b` without `pre_logits`."""
  num_classes: int
  pre_logits: int
  bias_init: float

  @nn.compact
  def __call__(self, x: Array) -> Array:
    if self.pre_logits:
      hidden = Dense((self.pre_logits,), jnp.float32, initializers.lecun_normal(), name='pre_logits')
      x = jnp.tanh(hidden(x))
    kernel = self.param('kernel', initializers.zeros, (x.shape[-1], self.num_classes))
    bias = self.param('bias', initializers.constant(self.bias_init), (self.num_classes,))
    return dense(x, kernel, bias)


@dataclasses.dataclass(frozen=True)
class Head:
  """A head by its settings; the parameters say the rest."""
  settings: schema.Head

  def init(self, key: Key, width: int, num_classes: int) -> Params:
    """Parameters for features `[B, width]` and `num_classes` classes."""
    return initial(self._network(num_classes), key, jnp.zeros((1, width)))

  def apply(self, params: Params, pooled: Array) -> Array:
    """Logits `[B, C]` f32 of features `[B, D]`, any float dtype."""
    network = self._network(params['bias'].shape[0])
    return applied(network, params, pooled.astype(jnp.float32))

  def _network(self, num_classes: int) -> _Classifier:
    return _Classifier(num_classes, self.settings.pre_logits, self.settings.bias_init)
