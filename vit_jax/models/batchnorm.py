"""BatchNorm, whose running statistics are a collection beside the parameters (arXiv 1502.03167).

A network that has it gives them back from `apply` with `mutable=[STATE]`. In training mean and variance are those
of all of `x`, so under a mesh of the whole batch, over all devices.
"""
from __future__ import annotations

from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jax import lax
from jax.nn import initializers

from vit_jax.core.types import Array
from vit_jax.models.layers import zeros

STATE = 'state'
"""Name of the collection: `mean` and `var`, `[C]` f32, under the path of each norm."""


class Running(NamedTuple):
  """momentum: what stays of the running statistics at each step.    eps: added to the variance.

  train: mean and variance are those of `x`, and the running ones follow them.
  """
  momentum: float
  eps: float
  train: bool


class BatchNorm(nn.Module):
  """`(x - mean) / sqrt(var + eps) * scale + bias` with mean and variance (of squares) over all but channels.

  With `train` the running ones become `momentum * old + (1 - momentum) * new`. All of it is computed in f32.
  """
  running: Running

  @nn.compact
  def __call__(self, x: Array) -> Array:
    """`[B, H, W, C]` to the same, f32."""
    momentum, eps, train = self.running
    shape, x = (x.shape[-1],), x.astype(jnp.float32)
    scale, bias = self.param('scale', initializers.ones, shape), self.param('bias', zeros, shape)
    mean = self.variable(STATE, 'mean', jnp.zeros, shape)
    var = self.variable(STATE, 'var', jnp.ones, shape)
    if not train:
      return _normed(x, mean.value, var.value, scale, bias, eps=eps)
    batch_mean = x.mean((0, 1, 2))
    batch_var = jnp.square(x - batch_mean[None, None, None]).mean((0, 1, 2))
    mean.value = momentum * mean.value + (1. - momentum) * batch_mean
    var.value = momentum * var.value + (1. - momentum) * batch_var
    return _normed(x, batch_mean, batch_var, scale, bias, eps=eps)


def _normed(x: Array, mean: Array, var: Array, scale: Array, bias: Array, *, eps: float) -> Array:
  factor = lax.rsqrt(var + eps) * scale
  return (x - mean[None, None, None]) * factor[None, None, None] + bias[None, None, None]
