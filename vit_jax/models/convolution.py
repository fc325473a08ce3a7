"""Convolution, BatchNorm and stages of units, for stems of Vision Transformers and for other networks (`rivals/`).

Activations are `[B, H, W, C]`, kernels `[height, width, inputs, outputs]`. A convolution computes in its `dtype`, norms
in f32. `SAME` padding gives half of a side rounded up at stride 2, and pads the end more than the start; the symmetric
padding of PyTorch gives the same side and other values.
"""
from __future__ import annotations

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jax import lax
from jax.nn import initializers
from jax.typing import DTypeLike

from vit_jax.config.schema import Remat
from vit_jax.core.numerics import constrain_batch
from vit_jax.core.types import Array, Features
from vit_jax.models.initialization import Initializer, lecun_normal, zeros
from vit_jax.models.kernels.forms import FAST, Forms
from vit_jax.models.layers import param

LAYOUT = ('NHWC', 'HWIO', 'NHWC')
Pads = tuple[tuple[int, int], tuple[int, int]]
AXES = ('patch', 'patch', 'in', 'out')
"""Logical axes of a kernel. `fsdp` alone splits networks of convolutions: along `tensor` each device computes all."""
MATRIX = (3, 1)
"""A kernel is a matrix from the values below it to the output channels."""
STATE = 'state'
"""Name of the collection of running statistics: `mean` and `var`, `[C]` f32, under the path of each BatchNorm."""


class Running(NamedTuple):
  """How BatchNorm uses running statistics."""
  momentum: float  # share of the running statistics that is kept at each step
  eps: float       # added to the variance
  train: bool      # if True, mean and variance are those of `x`, and the running ones follow them


def padding(size: tuple[int, int], side: int, stride: int, *, is_same: bool) -> Pads:
  """Returns the numbers of zeros before and after, of height and width, for a square kernel on a map of this size."""
  if not is_same:
    return ((side // 2, side // 2),) * 2

  def of_axis(length: int) -> tuple[int, int]:
    num_outputs = -(-length // stride)
    num_zeros = max((num_outputs - 1) * stride + side - length, 0)
    return num_zeros // 2, num_zeros - num_zeros // 2

  return of_axis(size[0]), of_axis(size[1])


def convolve(x: Array, kernel: Array, *, stride: int, is_same: bool, forms: Forms = FAST) -> Array:
  """Cross-correlation of `x [B, H, W, I]` with `kernel [side, side, I, O]` of the same dtype.

  A kernel of side 1 is a matrix product, whose gradient XLA's CPU compiler makes 2 to 4 times as fast.
  """
  side = kernel.shape[0]
  if side > 1:
    pads = padding((x.shape[1], x.shape[2]), side, stride, is_same=is_same)
    return lax.conv_general_dilated(x, kernel, (stride, stride), pads, dimension_numbers=LAYOUT)
  return forms.dense(x[:, ::stride, ::stride], kernel[0, 0], jnp.zeros(kernel.shape[-1], x.dtype))


class Conv(nn.Module, kw_only=True):
  """A convolution with `kernel`, without bias; padding SAME, or half of the kernel on both sides."""
  features: int
  side: int
  dtype: DTypeLike
  stride: int = 1
  is_same: bool = True
  kernel_init: Initializer = lecun_normal
  forms: Forms = FAST

  @nn.compact
  def __call__(self, x: Array) -> Array:
    shape = (self.side, self.side, x.shape[-1], self.features)
    kernel = param(self, 'kernel', self.kernel_init, shape, AXES, MATRIX).astype(self.dtype)
    return convolve(x.astype(self.dtype), kernel, stride=self.stride, is_same=self.is_same, forms=self.forms)


class BatchNorm(nn.Module):
  """`(x - mean) / sqrt(var + eps) * scale + bias`, mean and variance (of squares) over all axes but channels.

  From arXiv 1502.03167. In training mean and variance are those of all of `x`, that is of the complete batch over all
  devices of a mesh, and the running statistics, in the collection `STATE`, become `momentum * old + (1 - momentum) *
  new`: call `apply` with `mutable=[STATE]`. All of it is computed in f32.
  """
  running: Running
  scale_init: Initializer = initializers.ones

  @nn.compact
  def __call__(self, x: Array) -> Array:
    """`[B, H, W, C]` to the same, f32."""
    momentum, eps, train = self.running
    shape, x = (x.shape[-1],), x.astype(jnp.float32)
    scale = param(self, 'scale', self.scale_init, shape, ('out',))
    bias = param(self, 'bias', zeros, shape, ('out',))
    mean = self.variable(STATE, 'mean', jnp.zeros, shape)
    var = self.variable(STATE, 'var', jnp.ones, shape)

    def normed(x: Array, mean: Array, var: Array) -> Array:
      factor = lax.rsqrt(var + eps) * scale
      return (x - mean[None, None, None]) * factor[None, None, None] + bias[None, None, None]

    if not train:
      return normed(x, mean.value, var.value)
    batch_mean = x.mean((0, 1, 2))
    batch_var = jnp.square(x - batch_mean[None, None, None]).mean((0, 1, 2))
    mean.value = momentum * mean.value + (1. - momentum) * batch_mean
    var.value = momentum * var.value + (1. - momentum) * batch_var
    return normed(x, batch_mean, batch_var)


class Stage(nn.Module, kw_only=True):
  """Units of one width, one after the other, with the names `unit1`, `unit2`, …; the first may change the shape.

  Attributes:
    unit: makes a unit, called with its `stride`, its `name`, and `has_proj`: whether its shortcut has a projection.
    num_units: number of units.
    stride: stride of the first unit; the others have 1.
    remat: whether each unit is computed again in the backward pass.
  """
  unit: functools.partial[Any]
  num_units: int
  stride: int
  remat: Remat

  @nn.compact
  def __call__(self, x: Array) -> Array:
    """`[B, h, w, I]` to `[B, h / stride, w / stride, O]`."""
    kind: Any = self.unit.func if self.remat.saves_everything else nn.remat(self.unit.func)
    for i in range(self.num_units):
      unit = kind(**self.unit.keywords, stride=1 if i else self.stride, has_proj=i == 0, name=f'unit{i + 1}')
      x = constrain_batch(unit(x))
    return x


def map_features(x_BhwD: Array) -> Features:
  """Returns the features of a network whose last map is `[B, h, w, D]` f32: its places as tokens, and their mean."""
  num_images, h, w, width = x_BhwD.shape
  pooled_BD = constrain_batch(x_BhwD.mean((1, 2)))
  return Features(x_BhwD.reshape(num_images, h * w, width), pooled_BD, (h, w))
