"""EfficientNet (arXiv 1905.11946), a `core.contracts.Backbone` with running statistics.

Parameters, all f32 (a public format; stages and blocks count from 1, I are the channels a block reads, E those
inside, S those inside its gate, O those it gives, K the side of its depthwise kernel):

  stem/{conv/kernel [3, 3, 3, C], norm/{scale,bias} [C]}
  stage{s}/block{b}/expand/{conv/kernel [1, 1, I, E], norm/{scale,bias} [E]}       (not in stage 1)
  stage{s}/block{b}/depthwise/{conv/kernel [K, K, 1, E], norm/{scale,bias} [E]}    (has the stride)
  stage{s}/block{b}/gate/{down/{kernel [E, S], bias [S]}, up/{kernel [S, E], bias [E]}}
  stage{s}/block{b}/project/{conv/kernel [1, 1, E, O], norm/{scale,bias} [O]}
  top/{conv/kernel [1, 1, O, D], norm/{scale,bias} [D]}

The state has `{mean,var} [C]` f32 under the path of each norm. In training BatchNorm takes mean and variance
over the complete batch of the step, over all devices. Numerics are those of the authors' weights. Blocks follow from
the compound scaling of the paper (section 3.3, Table 1). This module knows no mesh, no objective and no weight format.
"""
from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.nn import initializers
from jax.typing import DTypeLike

from vit_jax.config import schema
from vit_jax.config.schema import Remat
from vit_jax.core.axes import Names
from vit_jax.core.numerics import constrain_batch
from vit_jax.core.types import Array, Features, Key, Params, PyTree
from vit_jax.models.convolution import (
  AXES,
  LAYOUT,
  MATRIX,
  STATE,
  BatchNorm,
  Conv,
  Pads,
  Running,
  map_features,
  padding,
)
from vit_jax.models.initialization import Linear, fan_out_normal
from vit_jax.models.kernels.forms import PLAIN, Forms, select
from vit_jax.models.layers import Dense, drop_path, dropout, param

STEM, TOP = 32, 1280  # channels of the first and the last convolution of B0
SE_RATIO = .25        # hidden channels of the gate (squeeze and excitation) over the channels that the block reads
MULTIPLE = 8          # channels are rounded to a multiple of it
NORM_MOMENTUM = .99   # share of BatchNorm's running statistics that is kept at each step

B0 = ((1, 3, 1, 1, 16), (2, 3, 2, 6, 24), (2, 5, 2, 6, 40), (3, 3, 2, 6, 80), (3, 5, 1, 6, 112), (4, 5, 2, 6, 192),
      (1, 3, 1, 6, 320))
"""Table 1 of the paper, rows 2 to 8: repeats, kernel, stride of the first block, expansion, channels of a stage."""


class Block(NamedTuple):
  """Sizes of an inverted bottleneck, which expands its input, convolves it by depth, gates it and projects it."""
  name: str      # `block1`, `block2`, … of its stage
  kernel: int    # side of the depthwise kernel
  stride: int    # of the depthwise convolution
  inputs: int    # channels of the input
  hidden: int    # channels inside; nothing is expanded where it equals `inputs`
  squeezed: int  # channels inside the gate
  outputs: int   # channels of the output


def scaled(channels: int, factor: float) -> int:
  """Returns channels times a factor, to the nearest multiple of 8; to the next one if that loses over a tenth."""
  exact = channels * factor
  rounded = max(MULTIPLE, int(exact + MULTIPLE / 2) // MULTIPLE * MULTIPLE)
  return rounded + MULTIPLE if rounded < .9 * exact else rounded


def stages(model: schema.EfficientNet) -> list[tuple[Block, ...]]:
  """Returns the blocks of each stage."""
  blocks_of_stages = []
  inputs = scaled(STEM, model.width_factor)
  for repeats, kernel, stride, expansion, channels in B0:
    outputs, blocks = scaled(channels, model.width_factor), []
    for i in range(math.ceil(repeats * model.depth_factor)):
      blocks.append(Block(name=f'block{i + 1}', kernel=kernel, stride=stride if i == 0 else 1, inputs=inputs,
                          hidden=inputs * expansion, squeezed=max(1, int(inputs * SE_RATIO)), outputs=outputs))
      inputs = outputs
    blocks_of_stages.append(tuple(blocks))
  return blocks_of_stages


def depthwise_normal(key: Key, shape: tuple[int, ...]) -> Array:
  """Returns normal values with variance `2 / (height * width)`: the authors count one output."""
  return initializers.normal(math.sqrt(2. / (shape[0] * shape[1])))(key, shape)


def plain_depthwise(x: Array, kernel: Array, stride: int, pads: Pads) -> Array:
  """Returns the depthwise convolution by XLA's own operation.

  Args:
    x: `[B, H, W, C]`.
    kernel: `[side, side, 1, C]`, same dtype.
    stride: in both directions.
    pads: zeros before and after, of height and width.
  """
  return lax.conv_general_dilated(x, kernel, (stride, stride), pads, dimension_numbers=LAYOUT,
                                  feature_group_count=x.shape[-1])


def by_taps(x: Array, kernel: Array, *, stride: int, pads: Pads) -> Array:
  """Returns the depthwise convolution by a loop over the taps, the entries of the kernel."""
  side, x = kernel.shape[0], jnp.pad(x, ((0, 0), *pads, (0, 0)))
  size = (x.shape[1] - side) // stride + 1, (x.shape[2] - side) // stride + 1
  taps_TC = kernel.reshape(side * side, -1)

  def add(t: Array, y: Array) -> Array:
    return y + _shifted(x, t, side, size, stride) * lax.dynamic_index_in_dim(taps_TC, t)[:, None, None]

  return lax.fori_loop(0, side * side, add, jnp.zeros((x.shape[0], *size, x.shape[3]), x.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def depthwise(x: Array, kernel: Array, stride: int, pads: Pads) -> Array:
  """Equal to `plain_depthwise`, with a gradient written by hand; reverse-mode differentiation only.

  XLA's CPU compiler has no fast form of it: on a CPU a loop over the taps of the kernel, each a multiplication of
  complete maps, is 5 to 50 times as fast forwards and backwards. On other devices XLA's own convolution is used. The
  platform that a program is lowered for decides, so that a plan for a TPU made on a CPU is right.
  """
  cpu, other = (functools.partial(form, stride=stride, pads=pads) for form in (by_taps, plain_depthwise))
  return lax.platform_dependent(x, kernel, cpu=cpu, default=other)


def _depthwise_forward(x: Array, kernel: Array, stride: int, pads: Pads) -> tuple[Array, tuple[Array, Array]]:
  """Returns the convolution, and what its gradient needs."""
  return depthwise(x, kernel, stride, pads), (x, kernel)


def _depthwise_backward(stride: int, pads: Pads, saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
  """Returns the gradients of input and kernel.

  `dw[t, c] = sum_bp x[b, s p + t, c] dy[b, p, c]`, with x padded and s the stride; dx is dy, spread by the stride,
  convolved with the flipped kernel.
  """
  cpu, other = (functools.partial(form, stride=stride, pads=pads) for form in (_gradient_by_taps, _plain_gradient))
  dx, dkernel = lax.platform_dependent(*saved, dy, cpu=cpu, default=other)
  return dx, dkernel


def _plain_gradient(x: Array, kernel: Array, dy: Array, *, stride: int, pads: Pads) -> tuple[Array, Array]:
  """Returns the gradients of input and kernel by XLA's own operations."""
  _, pull = jax.vjp(functools.partial(plain_depthwise, stride=stride, pads=pads), x, kernel)
  dx, dkernel = pull(dy)
  return dx, dkernel


def _gradient_by_taps(x: Array, kernel: Array, dy: Array, *, stride: int, pads: Pads) -> tuple[Array, Array]:
  """Returns the gradients of input and kernel by loops over the taps."""
  side, padded = kernel.shape[0], jnp.pad(x, ((0, 0), *pads, (0, 0)))

  def of_tap(t: Array) -> Array:
    products = _shifted(padded, t, side, (dy.shape[1], dy.shape[2]), stride) * dy
    return products.sum((0, 1, 2), dtype=jnp.float32).astype(dy.dtype)

  dkernel = lax.map(of_tap, jnp.arange(side * side)).reshape(kernel.shape)
  zeros = []  # before, after and between the values of dy, such that the flipped kernel has a place for each value of x
  for axis, (pad_before, _) in enumerate(pads, 1):
    before, spread_length = side - 1 - pad_before, (dy.shape[axis] - 1) * stride + 1
    zeros.append((before, x.shape[axis] + side - 1 - before - spread_length, stride - 1))
  spread_dy = lax.pad(dy, jnp.zeros((), dy.dtype), [(0, 0, 0), *zeros, (0, 0, 0)])
  return by_taps(spread_dy, kernel[::-1, ::-1], stride=1, pads=((0, 0), (0, 0))), dkernel


depthwise.defvjp(_depthwise_forward, _depthwise_backward)


def _shifted(x: Array, t: Array, side: int, size: tuple[int, int], stride: int) -> Array:
  """Returns the values of padded maps that tap `t` reads for each place of a map of `size`, `[B, *size, C]`."""
  reach = [(n - 1) * stride + 1 for n in size]
  part = lax.dynamic_slice(x, (0, t // side, t % side, 0), (x.shape[0], *reach, x.shape[3]))
  return part[:, ::stride, ::stride] if stride > 1 else part


_TRACED_ONCE = jax.jit(depthwise, static_argnums=(2, 3), inline=True)


class Depthwise(nn.Module, kw_only=True):
  """A depthwise convolution with `kernel [side, side, 1, C]`, without bias; padding SAME."""
  side: int
  stride: int
  dtype: DTypeLike
  forms: Forms

  @nn.compact
  def __call__(self, x: Array) -> Array:
    shape = (self.side, self.side, 1, x.shape[-1])
    kernel = param(self, 'kernel', depthwise_normal, shape, AXES, MATRIX).astype(self.dtype)
    pads = padding((x.shape[1], x.shape[2]), self.side, self.stride, is_same=True)
    form = plain_depthwise if self.forms == PLAIN else _TRACED_ONCE
    return form(x.astype(self.dtype), kernel, self.stride, pads)


class ConvNorm(nn.Module, kw_only=True):
  """A convolution and BatchNorm; f32 out."""
  features: int
  side: int = 1
  stride: int = 1
  is_depthwise: bool = False
  running: Running
  dtype: DTypeLike
  forms: Forms

  @nn.compact
  def __call__(self, x: Array) -> Array:
    shared: dict[str, Any] = {'side': self.side, 'stride': self.stride, 'dtype': self.dtype, 'forms': self.forms}
    if self.is_depthwise:
      y = Depthwise(**shared, name='conv')(x)
    else:
      y = Conv(features=self.features, kernel_init=fan_out_normal, **shared, name='conv')(x)
    return BatchNorm(self.running, name='norm')(y)


class Gate(nn.Module, kw_only=True):
  """`x * sigmoid(W2 silu(W1 mean(x) + b1) + b2)`, with one factor for each channel (arXiv 1709.01507).

  The factors are computed in f32, and multiply in the dtype of `x`.
  """
  squeezed: int
  forms: Forms

  @nn.compact
  def __call__(self, x: Array) -> Array:
    def dense(width: int, name: str, axes: Names) -> Dense:
      return Dense(features=(width,), axes=axes, dtype=jnp.float32, law=Linear(fan_out_normal), forms=self.forms,
                   name=name)

    mean_BC = x.astype(jnp.float32).mean((1, 2))
    hidden_BS = nn.silu(dense(self.squeezed, 'down', ('embed', None))(mean_BC))
    gate_BC = nn.sigmoid(dense(x.shape[-1], 'up', (None, 'embed'))(hidden_BS))
    return x * gate_BC[:, None, None].astype(x.dtype)


class InvertedBottleneck(nn.Module, kw_only=True):
  """Expand, depthwise convolution, gate, project; added to its input where that has the same shape."""
  block: Block
  running: Running
  dtype: DTypeLike
  forms: Forms

  @nn.compact
  def __call__(self, x: Array, rate: Array | None, key: Key | None) -> Array:
    """Maps `[B, H, W, I]` to `[B, ceil(H / stride), ceil(W / stride), O]`, in the compute dtype."""
    block, dtype, y = self.block, self.dtype, x
    shared: dict[str, Any] = {'running': self.running, 'dtype': dtype, 'forms': self.forms}
    if block.hidden != block.inputs:
      y = nn.silu(ConvNorm(features=block.hidden, **shared, name='expand')(y)).astype(dtype)
    depthwise = ConvNorm(features=block.hidden, side=block.kernel, stride=block.stride, is_depthwise=True, **shared,
                         name='depthwise')
    y = Gate(squeezed=block.squeezed, forms=self.forms, name='gate')(nn.silu(depthwise(y)).astype(dtype))
    y = ConvNorm(features=block.outputs, **shared, name='project')(y).astype(dtype)
    if block.stride == 1 and block.inputs == block.outputs:
      return x + drop_path(y, rate, key, num_images=x.shape[0])
    return y


Draw = tuple[Array | None, Key | None]
"""Rate and key of stochastic depth of a block."""


def _draws(num_blocks: int, last_rate: float, key: Key | None) -> list[Draw]:
  """Returns rates that rise linearly from 0 in the first block to `last_rate` in the last, and their keys."""
  if key is None or not last_rate:
    return [(None, None)] * num_blocks
  rates, keys = np.linspace(0., last_rate, num_blocks), jax.random.split(key, num_blocks)
  return [(jnp.asarray(rate, jnp.float32), key) for rate, key in zip(rates, keys, strict=True)]


class Stage(nn.Module, kw_only=True):
  """Blocks in sequence, each with its stochastic depth; the first one may have a stride and other input channels."""
  blocks: tuple[Block, ...]
  running: Running
  dtype: DTypeLike
  remat: Remat
  forms: Forms

  @nn.compact
  def __call__(self, x: Array, draws: list[Draw]) -> Array:
    kind: Any = InvertedBottleneck if self.remat.saves_everything else nn.remat(InvertedBottleneck)
    for block, (rate, key) in zip(self.blocks, draws, strict=True):
      bottleneck = kind(block=block, running=self.running, dtype=self.dtype, forms=self.forms, name=block.name)
      x = constrain_batch(bottleneck(x, rate, key))
    return x


class Network(nn.Module, kw_only=True):
  """All layers up to the last map."""
  settings: schema.EfficientNet
  train: bool

  @nn.compact
  def __call__(self, image: Array, key: Key | None) -> Array:
    """`[B, H, W, 3]` to `[B, h, w, D]` f32; without a key nothing is random."""
    s, blocks_of_stages = self.settings, stages(self.settings)
    dtype = jnp.dtype(s.dtype.value)
    shared: dict[str, Any] = {'running': Running(NORM_MOMENTUM, s.norm_eps, self.train), 'dtype': dtype,
                              'forms': select(s.kernels)}
    draws = _draws(sum(map(len, blocks_of_stages)), s.drop_path, key)
    stem = ConvNorm(features=scaled(STEM, s.width_factor), side=3, stride=2, **shared, name='stem')
    x = nn.silu(stem(image)).astype(dtype)
    for i, blocks in enumerate(blocks_of_stages):
      x = Stage(blocks=blocks, remat=s.remat, **shared, name=f'stage{i + 1}')(x, draws[:len(blocks)])
      draws = draws[len(blocks):]
    return nn.silu(ConvNorm(features=scaled(TOP, s.width_factor), **shared, name='top')(x))


@dataclasses.dataclass(frozen=True)
class EfficientNet:
  """An EfficientNet; made for images of `image_px`, and works for any size."""
  settings: schema.EfficientNet
  image_px: tuple[int, int]

  def init(self, key: Key, image: Array) -> tuple[Params, PyTree]:
    """Returns parameters and running statistics; of `image [B, H, W, 3]` only the shape is read."""
    variables = Network(settings=self.settings, train=False).init(key, jnp.zeros((1, *image.shape[1:])), None)
    return variables['params'], variables[STATE]

  def apply(self, params: Params, state: PyTree, image: Array, *, train: bool,
            key: Key | None) -> tuple[Features, PyTree]:
    """Returns features (f32) of `image [B, H, W, 3]` f32: the last map and its mean; and the new running statistics.

    With `train` the mean has dropout.
    """
    s = self.settings
    assert key is not None or not (train and (s.dropout or s.drop_path)), 'train=True with dropout needs a key'
    keys = jax.random.split(key) if train and key is not None else (None, None)
    x_BhwD, changed = Network(settings=s, train=train).apply({'params': params, STATE: state}, image, keys[0],
                                                             mutable=[STATE])
    features = map_features(x_BhwD)
    return features._replace(pooled=dropout(features.pooled, s.dropout, keys[1])), changed[STATE]
