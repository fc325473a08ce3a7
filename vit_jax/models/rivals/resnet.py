"""ResNets of bottleneck units with GroupNorm and weight standardization: BiT, and the stem of the hybrids.

Parameters of BiT (arXiv 1912.11370), all f32 (a public format; stages and units count from 1, W is the
channels of the root, `H = W * 2^(s - 1)` those of a 3 x 3 convolution of stage s, I what a unit reads):

  root/kernel [7, 7, 3, W]
  stage{s}/unit{u}/norm1/{scale,bias} [I]
  stage{s}/unit{u}/{norm2,norm3}/{scale,bias} [H]
  stage{s}/unit{u}/conv1/kernel [1, 1, I, H]
  stage{s}/unit{u}/conv2/kernel [3, 3, H, H]           (has the stride)
  stage{s}/unit{u}/conv3/kernel [1, 1, H, 4 H]
  stage{s}/unit1/proj/kernel [1, 1, I, 4 H]            (the shortcut of a stage's first unit)
  norm/{scale,bias} [4 H of the last stage]

Parameters of the stem of a hybrid (under `stem/` of a ViT), where a norm comes after its convolution:

  root/kernel [7, 7, 3, W], root_norm/{scale,bias} [W]
  stage{s}/unit{u}/{conv1,conv2,conv3}/kernel          (as above)
  stage{s}/unit{u}/{norm1,norm2}/{scale,bias} [H], stage{s}/unit{u}/norm3/{scale,bias} [4 H]
  stage{s}/unit1/{proj/kernel [1, 1, I, 4 H], proj_norm/{scale,bias} [4 H]}

Kernels are stored as they are learned, not standardized. Knows no mesh, no objective and no
weight format.
"""
from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import lax
from jax.nn import initializers, relu
from jax.typing import DTypeLike

from vit_jax.config import schema
from vit_jax.config.schema import Remat
from vit_jax.config.schema.layers import NORM_GROUPS
from vit_jax.core.types import Array, Features, Key, Params, PyTree
from vit_jax.models.convolution import AXES, MATRIX, Stage, convolve, map_features
from vit_jax.models.initialization import Initializer, lecun_normal, zeros
from vit_jax.models.kernels.forms import Forms, select
from vit_jax.models.layers import applied, initial, param

BIT_NORM_EPS = 1e-5     # big_transfer
EXPANSION = 4  # channels of a unit's output over those of its 3 x 3 convolution: arXiv 1512.03385, section 4.1


@dataclasses.dataclass(frozen=True)
class Style:
  """Details in which publications differ."""
  var_eps: float   # added to the variance of a kernel
  std_eps: float   # added to the standard deviation of a kernel
  norm_eps: float  # added to the variance in GroupNorm
  is_same: bool    # whether padding is SAME; else it is half of the kernel on both sides


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


class StdConv(nn.Module, kw_only=True):
  """A convolution whose kernel is standardized, in f32, before it is used."""
  features: int
  side: int
  dtype: DTypeLike
  style: Style
  stride: int = 1
  forms: Forms

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


class Unit(nn.Module, kw_only=True):
  """The attributes of both kinds of units, and the layers that they consist of."""
  hidden: int       # channels of the 3 x 3 convolution, H; the unit returns 4 H
  stride: int       # of the 3 x 3 convolution
  has_proj: bool    # whether the shortcut is a projection of the input; else it is the input itself
  dtype: DTypeLike  # the compute dtype
  style: Style
  forms: Forms

  def conv(self, name: str, features: int, *, side: int = 1, stride: int = 1) -> StdConv:
    """Returns a convolution of this unit."""
    return StdConv(features=features, side=side, dtype=self.dtype, style=self.style, stride=stride, forms=self.forms,
                   name=name)

  def norm(self, name: str, *, scale: float = 1.) -> GroupNorm:
    """Returns a norm of this unit, whose scale starts at this value."""
    return GroupNorm(groups=NORM_GROUPS, eps=self.style.norm_eps, scale_init=initializers.constant(scale), name=name)


class PreActivationUnit(Unit, kw_only=True):
  """`proj(y) + conv3(relu(norm3(conv2(relu(norm2(conv1(y)))))))` with `y = relu(norm1(x))`.

  From ResNet-v2 (arXiv 1603.05027).
  """

  @nn.compact
  def __call__(self, x: Array) -> Array:
    """`[B, H, W, I]` to `[B, H / stride, W / stride, 4 hidden]`, in the compute dtype."""
    def activated(x: Array, name: str) -> Array:
      return relu(self.norm(name)(x)).astype(self.dtype)

    wide = EXPANSION * self.hidden
    y = activated(x, 'norm1')
    shortcut = self.conv('proj', wide, stride=self.stride)(y) if self.has_proj else x
    y = self.conv('conv1', self.hidden)(y)
    y = self.conv('conv2', self.hidden, side=3, stride=self.stride)(activated(y, 'norm2'))
    return shortcut + self.conv('conv3', wide)(activated(y, 'norm3'))


class PostActivationUnit(Unit, kw_only=True):
  """`relu(proj_norm(proj(x)) + norm3(conv3(relu(norm2(conv2(relu(norm1(conv1(x)))))))))` (ResNet-v1).

  The scale of `norm3` starts at zero.
  """

  @nn.compact
  def __call__(self, x: Array) -> Array:
    """`[B, H, W, I]` to `[B, H / stride, W / stride, 4 hidden]`, in the compute dtype."""
    wide = EXPANSION * self.hidden
    if self.has_proj:
      shortcut = self.norm('proj_norm')(self.conv('proj', wide, stride=self.stride)(x))
    else:
      shortcut = x.astype(jnp.float32)
    y = self.norm('norm1')(self.conv('conv1', self.hidden)(x))
    y = self.norm('norm2')(self.conv('conv2', self.hidden, side=3, stride=self.stride)(relu(y).astype(self.dtype)))
    y = self.norm('norm3', scale=0.)(self.conv('conv3', wide)(relu(y).astype(self.dtype)))
    return relu(shortcut + y).astype(self.dtype)


class Network(nn.Module, kw_only=True):
  """Root and stages; of BiT, or of the stem of a hybrid, which has other units and a norm after the root."""
  layers: tuple[int, ...]
  width: int
  dtype: DTypeLike
  style: Style
  remat: Remat
  is_hybrid: bool
  forms: Forms

  @nn.compact
  def __call__(self, image: Array) -> Array:
    """`[B, H, W, 3]` to the last map; BiT's is normed and activated, f32."""
    style = self.style
    kind = PostActivationUnit if self.is_hybrid else PreActivationUnit
    like: dict[str, Any] = {'dtype': self.dtype, 'style': style, 'forms': self.forms}
    x = StdConv(features=self.width, side=7, stride=2, **like, name='root')(image)
    if self.is_hybrid:
      x = relu(GroupNorm(groups=NORM_GROUPS, eps=style.norm_eps, name='root_norm')(x)).astype(self.dtype)
    x = max_pool(x, style=style)
    for i, num_units in enumerate(self.layers):
      unit = functools.partial(kind, hidden=self.width * 2 ** i, **like)
      x = Stage(unit=unit, num_units=num_units, stride=2 if i else 1, remat=self.remat, name=f'stage{i + 1}')(x)
    return x if self.is_hybrid else relu(GroupNorm(groups=NORM_GROUPS, eps=style.norm_eps, name='norm')(x))


@dataclasses.dataclass(frozen=True)
class ResNet:
  """BiT, a `core.contracts.Backbone`; made for images of `image_px`, and works for any size."""
  settings: schema.ResNet
  image_px: tuple[int, int]

  def init(self, key: Key, image: Array) -> tuple[Params, PyTree]:
    """Returns parameters, and `{}`; of `image [B, H, W, 3]` only the shape is read."""
    return initial(self._network, key, jnp.zeros((1, *image.shape[1:]))), {}

  def apply(self, params: Params, state: PyTree, image: Array, *, train: bool,
            key: Key | None) -> tuple[Features, PyTree]:
    """Returns features (f32) of `image [B, H, W, 3]` f32: the last map, and its mean; and `state` unchanged."""
    del train, key
    return map_features(applied(self._network, params, image)), state

  @property
  def _network(self) -> Network:
    s = self.settings
    style = Style(s.var_eps, std_eps=0., norm_eps=BIT_NORM_EPS, is_same=False)
    return Network(layers=s.layers, width=s.width, dtype=jnp.dtype(s.dtype.value), style=style, remat=s.remat,
                   is_hybrid=False, forms=select(s.kernels))


def stem(settings: schema.ResNetStem, *, dtype: DTypeLike, remat: Remat, forms: Forms) -> Network:
  """Returns the network of a hybrid's stem."""
  style = Style(settings.var_eps, std_eps=settings.std_eps, norm_eps=settings.norm_eps, is_same=True)
  return Network(layers=settings.layers, width=settings.width, dtype=dtype, style=style, remat=remat, is_hybrid=True,
                 forms=forms)


def num_channels(layers: tuple[int, ...], width: int) -> int:
  """Returns the number of channels of the last map."""
  return EXPANSION * width * 2 ** (len(layers) - 1) if layers else width
