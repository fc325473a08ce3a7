"""EfficientNet (arXiv 1905.11946), a `core.api.Backbone` with running statistics, as its authors' weights have it.

Parameters, all f32 (a public format; stages and blocks count from 1, I are the channels a block reads, E those
inside, S those inside its gate, O those it gives, K the side of its depthwise kernel):

  stem/{conv/kernel [3, 3, 3, C], norm/{scale,bias} [C]}
  stage{s}/block{b}/expand/{conv/kernel [1, 1, I, E], norm/{scale,bias} [E]}       (not in stage 1)
  stage{s}/block{b}/depthwise/{conv/kernel [K, K, 1, E], norm/{scale,bias} [E]}    (has the stride)
  stage{s}/block{b}/gate/{down/{kernel [E, S], bias [S]}, up/{kernel [S, E], bias [E]}}
  stage{s}/block{b}/project/{conv/kernel [1, 1, E, O], norm/{scale,bias} [O]}
  top/{conv/kernel [1, 1, O, D], norm/{scale,bias} [D]}

The state has `{mean,var} [C]` f32 under the path of each norm. In training BatchNorm takes mean and variance
over the whole batch of the step, over all devices. Knows no mesh, no task and no weight format.
"""
from __future__ import annotations

import dataclasses
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import initializers
from jax.typing import DTypeLike

from vit_jax.config import model_options, schema
from vit_jax.config.schema import Remat
from vit_jax.core.numerics import constrain_batch
from vit_jax.core.types import Array, Features, Key, Params, PyTree, UserError
from vit_jax.models import efficientnet_blocks
from vit_jax.models.batchnorm import STATE, BatchNorm, Running
from vit_jax.models.convolution import Conv
from vit_jax.models.efficientnet_blocks import STEM, TOP, Block, scaled
from vit_jax.models.layers import Dense, drop_path, dropout

fan_out_normal = initializers.variance_scaling(2., 'fan_out', 'normal')  # the authors' convolutions


def depthwise_normal(key: Key, shape: tuple[int, ...]) -> Array:
  """Normal with variance `2 / (height * width)`: the authors count one output."""
  return initializers.normal(math.sqrt(2. / (shape[0] * shape[1])))(key, shape)


class ConvNorm(nn.Module):
  """A convolution and BatchNorm; f32 out."""
  features: int
  side: int
  stride: int
  is_depthwise: bool
  running: Running
  dtype: DTypeLike

  @nn.compact
  def __call__(self, x: Array) -> Array:
    kernel_init = depthwise_normal if self.is_depthwise else fan_out_normal
    x = Conv(self.features, self.side, self.dtype, self.stride, self.is_depthwise, kernel_init=kernel_init,
             name='conv')(x)
    return BatchNorm(self.running, name='norm')(x)


class Gate(nn.Module):
  """`x * sigmoid(W2 silu(W1 mean(x) + b1) + b2)`, a factor a channel (arXiv 1709.01507); the factor is f32."""
  squeezed: int

  @nn.compact
  def __call__(self, x: Array) -> Array:
    mean_BC = x.astype(jnp.float32).mean((1, 2))
    hidden_BS = nn.silu(Dense((self.squeezed,), jnp.float32, fan_out_normal, name='down')(mean_BC))
    gate_BC = nn.sigmoid(Dense((x.shape[-1],), jnp.float32, fan_out_normal, name='up')(hidden_BS))
    return x * gate_BC[:, None, None].astype(x.dtype)


class InvertedBottleneck(nn.Module):
  """Expand, depthwise convolution, gate, project; added to its input where that has the same shape."""
  block: Block
  running: Running
  dtype: DTypeLike

  @nn.compact
  def __call__(self, x: Array, rate: Array | None, key: Key | None) -> Array:
    """`[B, H, W, I]` to `[B, H / stride, W / stride, O]`, in the compute dtype."""
    b, like, y = self.block, (self.running, self.dtype), x
    if b.hidden != b.inputs:
      y = nn.silu(ConvNorm(b.hidden, 1, 1, False, *like, name='expand')(y)).astype(self.dtype)
    y = nn.silu(ConvNorm(b.hidden, b.kernel, b.stride, True, *like, name='depthwise')(y)).astype(self.dtype)
    y = Gate(b.squeezed, name='gate')(y)
    y = ConvNorm(b.outputs, 1, 1, False, *like, name='project')(y).astype(self.dtype)
    return x + drop_path(y, rate, key, num_images=x.shape[0]) if b.is_residual else y


Draw = tuple[Array | None, Key | None]
"""Rate and key of stochastic depth of a block."""


def _draws(num_blocks: int, drop_path: float, key: Key | None) -> list[Draw]:
  if key is None or not drop_path:
    return [(None, None)] * num_blocks
  rates, keys = np.linspace(0., drop_path, num_blocks), jax.random.split(key, num_blocks)
  return [(jnp.asarray(rate, jnp.float32), one) for rate, one in zip(rates, keys, strict=True)]


class Stage(nn.Module):
  """Equal blocks, each with its stochastic depth."""
  blocks: tuple[Block, ...]
  running: Running
  dtype: DTypeLike
  remat: Remat

  @nn.compact
  def __call__(self, x: Array, draws: list[Draw]) -> Array:
    kind: Any = InvertedBottleneck if self.remat.saves_everything else nn.remat(InvertedBottleneck)
    for block, draw in zip(self.blocks, draws, strict=True):
      x = constrain_batch(kind(block, self.running, self.dtype, name=block.name)(x, *draw))
    return x


class Network(nn.Module):
  """All of it, up to the last map."""
  settings: schema.EfficientNet
  train: bool

  @nn.compact
  def __call__(self, image: Array, key: Key | None) -> Array:
    """`[B, H, W, 3]` to `[B, h, w, D]` f32; without a key nothing is random."""
    s, stages = self.settings, efficientnet_blocks.stages(self.settings)
    like = (Running(s.norm_momentum, s.norm_eps, self.train), jnp.dtype(s.dtype.value))
    draws = _draws(sum(map(len, stages)), s.drop_path, key)
    x = nn.silu(ConvNorm(scaled(STEM, s.width_factor), 3, 2, False, *like, name='stem')(image)).astype(like[1])
    for i, blocks in enumerate(stages):
      x = Stage(blocks, *like, s.remat, name=f'stage{i + 1}')(x, draws[:len(blocks)])
      draws = draws[len(blocks):]
    return nn.silu(ConvNorm(scaled(TOP, s.width_factor), 1, 1, False, *like, name='top')(x))


@dataclasses.dataclass(frozen=True)
class EfficientNet:
  """An EfficientNet for images of any size; made by `build`."""
  settings: schema.EfficientNet

  def init(self, key: Key, image: Array) -> tuple[Params, PyTree]:
    """Parameters and running statistics; of `image [B, H, W, 3]` only the shape is read."""
    variables = Network(self.settings, train=False).init(key, jnp.zeros((1, *image.shape[1:])), None)
    return variables['params'], variables[STATE]

  def apply(self, params: Params, state: PyTree, image: Array, *, train: bool,
            key: Key | None) -> tuple[Features, PyTree]:
    """Features (f32) of `image [B, H, W, 3]` f32: the last map and its mean; and the new running statistics.

    With `train` the mean has dropout.
    """
    s = self.settings
    assert key is not None or not (train and (s.dropout or s.drop_path)), 'train=True with dropout needs a key'
    keys = jax.random.split(key) if train and key is not None else (None, None)
    x_BhwD, changed = Network(s, train).apply({'params': params, STATE: state}, image, keys[0], mutable=[STATE])
    num_images, h, w, width = x_BhwD.shape
    pooled_BD = dropout(constrain_batch(x_BhwD.mean((1, 2))), s.dropout, keys[1])
    return Features(x_BhwD.reshape(num_images, h * w, width), pooled_BD, (h, w)), changed[STATE]


def build(model: schema.EfficientNet, image_px: tuple[int, int]) -> EfficientNet:
  """The backbone of these settings.

  Raises:
    UserError: lists all settings that do not fit together.
  """
  if wrong := [*model_options.faults(model, image_px)]:
    raise UserError('\n'.join(wrong))
  return EfficientNet(model)
