"""Tiny networks of convolutions, and a Mixer, with the arithmetic of each in numpy, float64."""
from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from vit_jax.config import schema
from vit_jax.core import trees
from vit_jax.core.types import Array, Params, PyTree
from vit_jax.models import backbones
from vit_jax.models.rivals.efficientnet import stages

PX = (36, 28)
RESNET = schema.ResNet(layers=(1, 2), width=32)
MIXER = schema.Mixer(patch=4, width=32, depth=2, tokens_mlp=10, channels_mlp=48)
EFFICIENTNET = schema.EfficientNet(width_factor=.25, depth_factor=.3, dropout=.2, drop_path=.2)
MODELS: dict[str, schema.Model] = {'resnet': RESNET, 'mixer': MIXER, 'efficientnet': EFFICIENTNET}


def some_image(px: tuple[int, int] = PX, num_images: int = 3) -> Array:
  return jax.device_put(np.random.default_rng(0).uniform(-1., 1., (num_images, *px, 3)).astype(np.float32))


def normal(*shape: int, seed: int = 0) -> Array:
  return jax.device_put(np.float32(np.random.default_rng(seed).normal(size=shape)))


def variables(model: schema.Model, px: tuple[int, int] = PX) -> tuple[Params, PyTree]:
  """Random parameters and state, in which nothing is zero or one: a mistake anywhere shows."""
  rng = np.random.default_rng(0)

  def draw(name: str, leaf: Any) -> Array:
    if name.endswith('var'):
      return jax.device_put(rng.uniform(.5, 2., leaf.shape).astype(np.float32))  # `jnp.asarray` would compile a program
    size = 1. / math.sqrt(math.prod(leaf.shape[:-1])) if name.endswith('kernel') else .2
    mean = 1. if name.endswith('scale') else 0.
    return jax.device_put((mean + size * rng.normal(size=leaf.shape)).astype(np.float32))

  shapes = jax.eval_shape(backbones.build(model, px).init, jax.random.key(0), some_image(px))
  params, state = (trees.map_named(draw, tree) for tree in shapes)
  return params, state


def wide(tree: PyTree) -> PyTree:
  """Arrays in float64."""
  return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def conv(x: np.ndarray, kernel: np.ndarray, stride: int, pads: list[tuple[int, int]]) -> np.ndarray:
  """Cross-correlation `[B, H, W, C]`; a kernel with one input is depthwise."""
  windows = sliding_window_view(np.pad(x, [(0, 0), *pads, (0, 0)]), kernel.shape[:2], (1, 2))[:, ::stride, ::stride]
  if kernel.shape[2] == 1 and x.shape[3] > 1:
    return np.einsum('bhwcij,ijc->bhwc', windows, kernel[:, :, 0])
  return np.einsum('bhwcij,ijco->bhwo', windows, kernel)


def same(x: np.ndarray, side: int, stride: int) -> list[tuple[int, int]]:
  """TensorFlow's SAME padding: just enough, the smaller half first."""
  missing = [max((math.ceil(n / stride) - 1) * stride + side - n, 0) for n in x.shape[1:3]]
  return [(m // 2, m - m // 2) for m in missing]


def symmetric(side: int) -> list[tuple[int, int]]:
  return [(side // 2, side // 2)] * 2


def standard(kernel: np.ndarray, *, var_eps: float, std_eps: float) -> np.ndarray:
  """Each filter by itself."""
  filters = [(f - f.mean()) / (np.sqrt(f.var() + var_eps) + std_eps) for f in np.moveaxis(kernel, 3, 0)]
  return np.stack(filters, 3)


def group_norm(x: np.ndarray, p: PyTree, *, eps: float, groups: int = 32) -> np.ndarray:
  """Image by image, group by group."""
  out, size = np.empty_like(x), x.shape[3] // groups
  for b in range(x.shape[0]):
    for g in range(groups):
      part = x[b, :, :, g * size:(g + 1) * size]
      out[b, :, :, g * size:(g + 1) * size] = (part - part.mean()) / np.sqrt(part.var() + eps)
  return out * p['scale'] + p['bias']


def relu(x: np.ndarray) -> np.ndarray:
  return np.maximum(x, 0.)


def sigmoid(x: np.ndarray) -> np.ndarray:
  return 1. / (1. + np.exp(-x))


def max_pool(x: np.ndarray, pads: list[tuple[int, int]], fill: float) -> np.ndarray:
  padded = np.pad(x, [(0, 0), *pads, (0, 0)], constant_values=fill)
  return sliding_window_view(padded, (3, 3), (1, 2))[:, ::2, ::2].max((-2, -1))


def numpy_resnet(s: schema.ResNet, p: PyTree, image: np.ndarray) -> np.ndarray:
  """The last map of BiT, normed and activated."""
  def std_conv(x: np.ndarray, name: PyTree, stride: int = 1) -> np.ndarray:
    kernel = standard(name['kernel'], var_eps=s.var_eps, std_eps=0.)
    return conv(x, kernel, stride, symmetric(kernel.shape[0]))

  def activated(x: np.ndarray, name: PyTree) -> np.ndarray:
    return relu(group_norm(x, name, eps=1e-5))

  x = max_pool(std_conv(image, p['root'], 2), symmetric(3), 0.)
  for i, units in enumerate(s.layers):
    for u in range(units):
      one, stride = p[f'stage{i + 1}'][f'unit{u + 1}'], 2 if i and not u else 1
      y = activated(x, one['norm1'])
      shortcut = std_conv(y, one['proj'], stride) if u == 0 else x
      y = std_conv(activated(std_conv(y, one['conv1']), one['norm2']), one['conv2'], stride)
      x = shortcut + std_conv(activated(y, one['norm3']), one['conv3'])
  return activated(x, p['norm'])


def numpy_resnet_stem(s: schema.ResNetStem, p: PyTree, image: np.ndarray) -> np.ndarray:
  """The last map of a hybrid's ResNet."""
  def normed(x: np.ndarray, name: PyTree, norm: PyTree, stride: int = 1) -> np.ndarray:
    kernel = standard(name['kernel'], var_eps=s.var_eps, std_eps=s.std_eps)
    return group_norm(conv(x, kernel, stride, same(x, kernel.shape[0], stride)), norm, eps=s.norm_eps)

  x = relu(normed(image, p['root'], p['root_norm'], 2))
  x = max_pool(x, same(x, 3, 2), -np.inf)
  for i, units in enumerate(s.layers):
    for u in range(units):
      one, stride = p[f'stage{i + 1}'][f'unit{u + 1}'], 2 if i and not u else 1
      shortcut = normed(x, one['proj'], one['proj_norm'], stride) if u == 0 else x
      y = relu(normed(x, one['conv1'], one['norm1']))
      y = relu(normed(y, one['conv2'], one['norm2'], stride))
      x = relu(shortcut + normed(y, one['conv3'], one['norm3']))
  return x


def layer_norm(x: np.ndarray, p: PyTree, eps: float = 1e-6) -> np.ndarray:
  return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps) * p['scale'] + p['bias']


def gelu(x: np.ndarray) -> np.ndarray:
  return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))


def cut(image: np.ndarray, side: int) -> np.ndarray:
  """Patches `[N, side * side * C]` of one image or map, row by row."""
  h, w = image.shape[0] // side, image.shape[1] // side
  return np.stack([image[i * side:(i + 1) * side, j * side:(j + 1) * side].ravel() for i in range(h) for j in range(w)])


def numpy_mixer(s: schema.Mixer, p: PyTree, image: np.ndarray) -> np.ndarray:
  """Normed tokens `[N, D]` of one image."""
  def mlp(x: np.ndarray, name: PyTree) -> np.ndarray:
    return gelu(x @ name['up']['kernel'] + name['up']['bias']) @ name['down']['kernel'] + name['down']['bias']

  x = cut(image, s.patch) @ p['stem']['kernel'].reshape(-1, s.width) + p['stem']['bias']
  for layer in range(s.depth):
    one = jax.tree.map(lambda leaf, layer=layer: leaf[layer], p['blocks'])
    x = x + mlp(layer_norm(x, one['norm1']).T, one['tokens']).T
    x = x + mlp(layer_norm(x, one['norm2']), one['channels'])
  return layer_norm(x, p['norm'])


def batch_norm(x: np.ndarray, p: PyTree, state: PyTree | None, *, eps: float) -> np.ndarray:
  """With the running statistics, or without them those of `x`."""
  mean, var = (x.mean((0, 1, 2)), x.var((0, 1, 2))) if state is None else (state['mean'], state['var'])
  return (x - mean) / np.sqrt(var + eps) * p['scale'] + p['bias']


def numpy_efficientnet(s: schema.EfficientNet, p: PyTree, state: PyTree | None, image: np.ndarray) -> np.ndarray:
  """The last map; without a state with statistics of the batch."""
  def step(x: np.ndarray, name: PyTree, stat: PyTree | None, stride: int = 1) -> np.ndarray:
    kernel = name['conv']['kernel']
    y = conv(x, kernel, stride, same(x, kernel.shape[0], stride))
    return batch_norm(y, name['norm'], stat and stat['norm'], eps=s.norm_eps)

  def swish(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)

  x = swish(step(image, p['stem'], state and state['stem'], 2))
  for number, blocks in enumerate(stages(s), 1):
    for b in blocks:
      one, stat = p[f'stage{number}'][b.name], state and state[f'stage{number}'][b.name]
      y = swish(step(x, one['expand'], stat and stat['expand'])) if 'expand' in one else x
      y = swish(step(y, one['depthwise'], stat and stat['depthwise'], b.stride))
      down, up = one['gate']['down'], one['gate']['up']
      hidden = swish(y.mean((1, 2)) @ down['kernel'] + down['bias'])
      y = step(y * sigmoid(hidden @ up['kernel'] + up['bias'])[:, None, None], one['project'], stat and stat['project'])
      x = x + y if y.shape == x.shape and b.stride == 1 else y
  return swish(step(x, p['top'], state and state['top']))
