"""AxialResNet (Axial-DeepLab, Wang et al. 2020, arXiv 2003.07853): a ResNet whose 3 x 3 convolutions are attention.

The ViT paper compares it with Axial-ViT (arXiv 2010.11929, Appendix D.6, Figure 13). The network is that of the
authors' program (csrhddlam/axial-deeplab@79088ed). The one difference: running variances use the biased variance of
the batch, as all BatchNorm here does; PyTorch multiplies it by n / (n - 1).

Parameters, all f32 (a public format; stages and units count from 1; W is the channels of the root,
`H = 2 W * 2^(s - 1)` those of the attention of stage s, I what a unit reads, A its heads, `K = H / A`, N the side of
the map in tokens):

  root/kernel [7, 7, 3, W], root_norm/{scale,bias} [W]
  stage{s}/unit{u}/conv1/kernel [1, 1, I, H], norm1/{scale,bias} [H]
  stage{s}/unit{u}/{height,width}/qkv/kernel [H, A, 2 K]      (of each head: query [K / 2], key [K / 2], value [K])
  stage{s}/unit{u}/{height,width}/qkv_norm/{scale,bias} [2 H]
  stage{s}/unit{u}/{height,width}/relative [2 N - 1, 2 K]     (offset of query minus key, from 1 - N; parts as in qkv)
  stage{s}/unit{u}/{height,width}/logits_norm/{scale,bias} [3 A]
  stage{s}/unit{u}/{height,width}/out_norm/{scale,bias} [2 H]
  stage{s}/unit{u}/conv2/kernel [1, 1, H, 2 H], norm2/{scale,bias} [2 H]
  stage{s}/unit1/{proj/kernel [1, 1, I, 2 H], proj_norm/{scale,bias} [2 H]}

Each norm has running statistics {mean,var} under the same path. Knows no mesh, no task and no weight format.
"""
from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.nn import initializers, relu
from jax.typing import DTypeLike

from vit_jax.config import schema
from vit_jax.core.types import Array, Features, Key, Params, PyTree
from vit_jax.models.convolution import STATE, BatchNorm, Conv, Running, Stage, map_features
from vit_jax.models.initialization import Linear, fan_out_normal
from vit_jax.models.kernels.forms import Forms, select
from vit_jax.models.layers import Dense, param

EXPANSION = 2  # channels that a unit returns, over those of its attention
NORM_MOMENTUM = .9  # of BatchNorm's running statistics: what stays at each step


class AxialAttention(nn.Module, kw_only=True):
  """Attention of each position to its column or its row, with relative positions of query, key and value.

  `y_i = sum_j softmax_j(q_i k_j + q_i r^q_(i-j) + k_j r^k_(j-i)) (v_j + r^v_(i-j))` (arXiv 2003.07853, eq. 4), where
  each of the three terms of the logits and each of the two of the sum has a BatchNorm of its own. There is no factor
  `1 / sqrt(K)`.
  """
  heads: int
  running: Running
  dtype: DTypeLike
  forms: Forms

  @nn.compact
  def __call__(self, x: Array) -> Array:
    """`[B, R, N, H]`, R sequences of N positions for each image, to the same shape, f32."""
    num_images, num_sequences, length, width = x.shape
    heads, size = self.heads, width // self.heads
    of_outputs = (num_images, num_sequences, length, 2 * width)

    def split(x: Array) -> list[Array]:
      """Returns the parts of query, key and value of the last axis `[2 K]`, in the compute dtype."""
      return [part.astype(self.dtype) for part in jnp.split(x, (size // 2, size), axis=-1)]

    qkv = Dense(features=(heads, 2 * size), axes=('embed', 'heads', 'head'), dtype=self.dtype,
                law=Linear(initializers.normal(1. / math.sqrt(width))), has_bias=False, forms=self.forms,
                name='qkv')(x.reshape(-1, width))
    qkv = BatchNorm(running=self.running, name='qkv_norm')(qkv.reshape(of_outputs))
    query, key, value = split(qkv.reshape(-1, length, heads, 2 * size))
    table = param(self, 'relative', initializers.normal(1. / math.sqrt(size)), (2 * length - 1, 2 * size),
                  ('tokens', 'head'))
    offsets = jnp.arange(length)[:, None] - jnp.arange(length)[None] + length - 1  # [i, j] of i - j
    of_query, of_key, of_value = split(table.astype(self.dtype)[offsets])
    logits = jnp.stack([jnp.einsum('bihc,bjhc->bijh', query, key), jnp.einsum('bihc,ijc->bijh', query, of_query),
                        jnp.einsum('bjhc,jic->bijh', key, of_key)], axis=-2)
    normed = BatchNorm(running=self.running, name='logits_norm')(logits.reshape(*logits.shape[:3], 3 * heads))
    weights = jax.nn.softmax(normed.reshape(logits.shape).sum(-2), axis=2).astype(self.dtype)  # [b, i, j, h]
    out = jnp.stack([jnp.einsum('bijh,bjhc->bihc', weights, value), jnp.einsum('bijh,ijc->bihc', weights, of_value)],
                    axis=-1)
    out = BatchNorm(running=self.running, name='out_norm')(out.reshape(of_outputs))
    return out.reshape(*x.shape, 2).sum(-1)


class Unit(nn.Module, kw_only=True):
  """`relu(shortcut + norm2(conv2(relu(width(height(relu(norm1(conv1(x)))))))))`.

  With a stride, means of `stride x stride` windows follow the attention. The scale of `norm2` starts at zero.
  """
  hidden: int
  heads: int
  stride: int
  has_proj: bool
  running: Running
  dtype: DTypeLike
  forms: Forms

  @nn.compact
  def __call__(self, x: Array) -> Array:
    """`[B, h, w, I]` to `[B, h / stride, w / stride, 2 hidden]`, in the compute dtype."""
    def normed(x: Array, features: int, names: tuple[str, str], stride: int = 1, scale: float = 1.) -> Array:
      conv = Conv(features=features, side=1, dtype=self.dtype, stride=stride, is_same=False,
                  kernel_init=fan_out_normal, forms=self.forms, name=names[0])
      return BatchNorm(running=self.running, scale_init=initializers.constant(scale), name=names[1])(conv(x))

    wide = EXPANSION * self.hidden
    shortcut = normed(x, wide, ('proj', 'proj_norm'), self.stride) if self.has_proj else x.astype(jnp.float32)
    y = relu(normed(x, self.hidden, ('conv1', 'norm1'))).astype(self.dtype)
    like: dict[str, Any] = {'heads': self.heads, 'running': self.running, 'dtype': self.dtype, 'forms': self.forms}
    y = AxialAttention(**like, name='height')(y.swapaxes(1, 2)).swapaxes(1, 2)
    y = AxialAttention(**like, name='width')(y.astype(self.dtype))
    if self.stride > 1:  # means of windows; both sides are multiples of the stride
      num_images, h, w, channels = y.shape
      windows = y.reshape(num_images, h // self.stride, self.stride, w // self.stride, self.stride, channels)
      y = windows.mean((2, 4))
    y = relu(y).astype(self.dtype)
    return relu(shortcut + normed(y, wide, ('conv2', 'norm2'), scale=0.)).astype(self.dtype)


class Network(nn.Module, kw_only=True):
  """The root and the stages, up to the last map."""
  settings: schema.AxialResNet
  train: bool

  @nn.compact
  def __call__(self, image: Array) -> Array:
    """`[B, H, W, 3]` to `[B, H / 32, W / 32, D]` for four stages, in the compute dtype."""
    s, dtype, forms = self.settings, jnp.dtype(self.settings.dtype.value), select(self.settings.kernels)
    running = Running(NORM_MOMENTUM, s.norm_eps, self.train)
    x = Conv(features=s.width, side=7, dtype=dtype, stride=2, is_same=False, kernel_init=fan_out_normal, forms=forms,
             name='root')(image)
    x = relu(BatchNorm(running=running, name='root_norm')(x)).astype(dtype)
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (1, 1), (0, 0)))
    for i, num_units in enumerate(s.layers):
      unit = functools.partial(Unit, hidden=hidden(s, i), heads=s.heads, running=running, dtype=dtype, forms=forms)
      x = Stage(unit=unit, num_units=num_units, stride=2 if i else 1, remat=s.remat, name=f'stage{i + 1}')(x)
    return x


def hidden(settings: schema.AxialResNet, stage: int) -> int:
  """Returns the number of channels of the attention of a stage, counted from 0."""
  return 2 * settings.width * 2 ** stage


@dataclasses.dataclass(frozen=True)
class AxialResNet:
  """An AxialResNet for images of `image_px`, whose relative positions belong to their maps."""
  settings: schema.AxialResNet
  image_px: tuple[int, int]

  def init(self, key: Key, image: Array) -> tuple[Params, PyTree]:
    """Returns parameters and running statistics; `image [B, H, W, 3]` must be of `image_px`; only its shape is read."""
    assert tuple(image.shape[1:3]) == tuple(self.image_px), (image.shape, self.image_px)
    variables = Network(settings=self.settings, train=False).init(key, jnp.zeros((1, *image.shape[1:])))
    return variables['params'], variables[STATE]

  def apply(self, params: Params, state: PyTree, image: Array, *, train: bool,
            key: Key | None) -> tuple[Features, PyTree]:
    """Returns features (f32) of `image [B, H, W, 3]` f32: the last map and its mean; and the new running statistics."""
    del key
    network = Network(settings=self.settings, train=train)
    x_BhwD, changed = network.apply({'params': params, STATE: state}, image, mutable=[STATE])
    return map_features(x_BhwD.astype(jnp.float32)), changed[STATE]
