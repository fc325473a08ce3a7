"""Parts of networks of convolutions: convolution, weight standardization, GroupNorm, BatchNorm, pooling.

Activations are `[B, H, W, C]`, kernels `[height, width, inputs, outputs]`, depthwise ones with 1 for inputs. A
convolution computes in its `dtype`, norms in f32. `SAME` padding gives half of a side rounded up at stride 2, and
pads the end more than the start; the symmetric padding of PyTorch gives the same side and other values.
"""
from __future__ import annotations

import dataclasses
from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jax import lax
from jax.nn import initializers
from jax.typing import DTypeLike

from vit_jax.core.types import Array
from vit_jax.models.initialization import Initializer, lecun_normal, zeros
from vit_jax.models.kernels.depthwise import LAYOUT, Pads
from vit_jax.models.kernels.forms import FAST, Forms
from vit_jax.models.layers import param

AXES = ('patch', 'patch', 'in', 'out')
"""Logical axes of a kernel. `fsdp` alone splits networks of convolutions: along `tensor` each device computes all."""
MATRIX = (3, 1)
"""A kernel is a matrix from the values below it to the output channels."""
STATE = 'state'
"""Name of the collection of running statistics: `mean` and `var`, `[C]` f32, under the path of each BatchNorm."""


@dataclasses.dataclass(frozen=True)
class Style:
  """Details in which publications differ.

  var_eps: under the root of the standard deviation of a kernel.    std_eps: added to it.
  norm_eps: of GroupNorm.
  is_same: padding is SAME; else half of the kernel on both sides.
  """
  var_eps: float
  std_eps: float
  norm_eps: float
  is_same: bool


class Running(NamedTuple):
  """momentum: the share of the running statistics that is kept at each step.    eps: added to the variance.

  train: mean and variance are those of `x`, and the running ones follow them.
  """
  momentum: float
  eps: float
  train: bool


def padding(size: tuple[int, int], side: int, stride: int, *, is_same: bool) -> Pads:
  """Zeros before and after, of height and width, for a square kernel on a map of this size."""
  if not is_same:
    return ((side // 2, side // 2),) * 2
  missing = [max((-(-n // stride) - 1) * stride + side - n, 0) for n in size]
  return (missing[0] // 2, missing[0] - missing[0] // 2), (missing[1] // 2, missing[1] - missing[1] // 2)


def convolve(x: Array, kernel: Array, *, stride: int, is_same: bool, forms: Forms = FAST) -> Array:
  """Cross-correlation of `x [B, H, W, I]` with `kernel [side, side, I, O]` of the same dtype.

  A kernel of side 1 is a matrix product, whose gradient XLA's CPU compiler makes 2 to 4 times as fast.
  """
  side = kernel.shape[0]
  if side > 1:
    pads = padding((x.shape[1], x.shape[2]), side, stride, is_same=is_same)
    return lax.conv_general_dilated(x, kernel, (stride, stride), pads, dimension_numbers=LAYOUT)
  return forms.dense(x[:, ::stride, ::stride], kernel[0, 0], jnp.zeros(kernel.shape[-1], x.dtype))


def standardized(kernel: Array, *, var_eps: float, std_eps: float) -> Array:
  """`(w - mean) / (sqrt(var + var_eps) + std_eps)` for each output channel (arXiv 1903.10520, eq. 3).

  Mean and variance (of squares, divided by their number) are over height, width and inputs.
  """
  kernel = kernel - kernel.mean((0, 1, 2), keepdims=True)
  return kernel / (jnp.sqrt(jnp.square(kernel).mean((0, 1, 2), keepdims=True) + var_eps) + std_eps)


def group_norm(x: Array, scale: Array, bias: Array, *, groups: int, eps: float) -> Array:
  """`(x - mean) / sqrt(var + eps) * scale + bias`, mean and variance over all of a group of channels of one image.

  Args:
    x: `[B, H, W, C]`, any float dtype.
    scale: `[C]` f32.
    bias: `[C]` f32.
    groups: runs of `C / groups` channels.
    eps: added to the variance, which is the mean of squares.

  Returns:
    The shape of `x`, f32; all of it is computed in f32.
  """
  x_BPGc = x.astype(jnp.float32).reshape(x.shape[0], -1, groups, x.shape[-1] // groups)
  x_BPGc = x_BPGc - x_BPGc.mean((1, 3), keepdims=True)
  inverse = lax.rsqrt(jnp.square(x_BPGc).mean((1, 3), keepdims=True) + eps)
  return (x_BPGc * inverse).reshape(x.shape) * scale[None, None, None] + bias[None, None, None]


def max_pool(x: Array, *, style: Style) -> Array:
  """Maxima of 3 x 3 windows at stride 2; symmetric padding is with zeros, as in BiT, SAME leaves the outside out."""
  if not style.is_same:
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
  return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1),
                           'SAME' if style.is_same else 'VALID')


class Conv(nn.Module, kw_only=True):
  """A convolution with `kernel`, without bias; padding SAME, or half of the kernel on both sides."""
  features: int
  side: int
  dtype: DTypeLike
  stride: int = 1
  is_depthwise: bool = False
  is_same: bool = True
  kernel_init: Initializer = lecun_normal
  forms: Forms = FAST

  @nn.compact
  def __call__(self, x: Array) -> Array:
    shape = (self.side, self.side, 1 if self.is_depthwise else x.shape[-1], self.features)
    kernel = param(self, 'kernel', self.kernel_init, shape, AXES, MATRIX).astype(self.dtype)
    if self.is_depthwise:
      pads = padding((x.shape[1], x.shape[2]), self.side, self.stride, is_same=self.is_same)
      return self.forms.depthwise(x.astype(self.dtype), kernel, self.stride, pads)
    return convolve(x.astype(self.dtype), kernel, stride=self.stride, is_same=self.is_same, forms=self.forms)


class StdConv(nn.Module, kw_only=True):
  """A convolution whose kernel is standardized, in f32, before it is used."""
  features: int
  side: int
  dtype: DTypeLike
  style: Style
  stride: int = 1
  forms: Forms = FAST

  @nn.compact
  def __call__(self, x: Array) -> Array:
    kernel = param(self, 'kernel', lecun_normal, (self.side, self.side, x.shape[-1], self.features), AXES,
                   MATRIX)
    kernel = standardized(kernel, var_eps=self.style.var_eps, std_eps=self.style.std_eps).astype(self.dtype)
    return convolve(x.astype(self.dtype), kernel, stride=self.stride, is_same=self.style.is_same, forms=self.forms)


class GroupNorm(nn.Module, kw_only=True):
  """`group_norm` with its parameters `scale` and `bias`, both `[C]`; f32 out."""
  groups: int
  eps: float
  scale_init: Initializer = initializers.ones

  @nn.compact
  def __call__(self, x: Array) -> Array:
    scale = param(self, 'scale', self.scale_init, (x.shape[-1],), ('out',))
    bias = param(self, 'bias', zeros, (x.shape[-1],), ('out',))
    return group_norm(x, scale, bias, groups=self.groups, eps=self.eps)


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
