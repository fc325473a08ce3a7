"""Small tasks and networks that try the contracts: a MAE, a DINO, a BatchNorm backbone, a plain network.

Each is as short as it can be and still uses what the real one needs: masks and a decoder, a teacher with
stats, running statistics, several heads.
"""
from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax.core.axes import labelled
from vit_jax.core.numerics import split_key, weighted_mean
from vit_jax.core.types import Array, Batch, Features, Key, LossOut, Params

WIDTH = 16


def normalize(batch: Batch, key: Key, step: Array) -> Batch:
  """Prepare: uint8 to f32."""
  del key, step
  return {**batch, 'image': batch['image'].astype(jnp.float32) / 127.5 - 1.}


def normalized(data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """`normalize` on the host."""
  return {**data, 'image': data['image'].astype(np.float32) / np.float32(127.5) - np.float32(1.)}


def kernel(value: Array) -> Array:
  """A new kernel that is split along both sides, over `fsdp` and `tensor`."""
  return labelled(value, ('embed', 'mlp'))


class FakeMae:
  """Hides three quarters of the patches of each image, reconstructs them with a linear encoder and decoder."""

  def __init__(self, patch: int = 4) -> None:
    self.patch = patch

  def _patches(self, image: Array) -> Array:
    b, h, w, c = image.shape
    p = self.patch
    return image.reshape(b, h // p, p, w // p, p, c).swapaxes(2, 3).reshape(b, -1, p * p * c)

  def init(self, key: Key, batch: Batch) -> tuple[Params, dict[str, Any]]:
    keys = split_key(key, 'up', 'down')
    size = self._patches(batch['image']).shape[-1]
    return {'backbone': {'kernel': kernel(.1 * jax.random.normal(keys['up'], (size, WIDTH)))},
            'decoder': {'kernel': kernel(.1 * jax.random.normal(keys['down'], (WIDTH, size)))},
            'mask_token': labelled(jnp.zeros((WIDTH,)), (None,))}, {}

  def loss(self, params: Params, extra: dict[str, Any], batch: Batch, key: Key, step: Array) -> LossOut:
    patches_BNP = self._patches(batch['image'])
    hidden_BN = jnp.argsort(jax.random.uniform(key, patches_BNP.shape[:2]), -1) >= patches_BNP.shape[1] // 4
    tokens = jnp.where(hidden_BN[..., None], params['mask_token'][None, None],
                       patches_BNP @ params['backbone']['kernel'])
    tokens += tokens.mean(1, keepdims=True)
    error_BN = jnp.square(tokens @ params['decoder']['kernel'] - patches_BNP).mean(-1)
    loss_B = (error_BN * hidden_BN).sum(-1) / hidden_BN.sum(-1)
    return LossOut(weighted_mean(loss_B, batch.get('mask')), {}, {})

  def after_update(self, params: Params, extra: dict[str, Any], stats: Any, step: Array) -> dict[str, Any]:
    return extra

  def views(self) -> dict[str, Any]:
    return {}


class FakeDino:
  """A student follows a teacher that follows the student; the teacher's outputs are centered by their mean."""
  temperature, teacher_temperature, momentum, center_momentum = .1, .04, .9, .8

  def init(self, key: Key, batch: Batch) -> tuple[Params, dict[str, Any]]:
    size = batch['image'][0].size
    params = {'backbone': {'kernel': kernel(.01 * jax.random.normal(key, (size, WIDTH)))}}
    return params, {'teacher': jax.tree.map(lambda x: x + 0., params), 'center': jnp.zeros((1, WIDTH))}

  def _out(self, params: Params, image: Array) -> Array:
    return image.reshape(image.shape[0], -1) @ params['backbone']['kernel']

  def loss(self, params: Params, extra: dict[str, Any], batch: Batch, key: Key, step: Array) -> LossOut:
    views = batch['image'], batch['image'][:, :, ::-1]
    student = [self._out(params, v) / self.temperature for v in views]
    teacher = [self._out(extra['teacher'], v) for v in views]
    targets = [jax.nn.softmax((t - extra['center']) / self.teacher_temperature) for t in teacher]
    loss_B = sum(optax.softmax_cross_entropy(student[1 - i], targets[i]) for i in (0, 1)) / 2.
    stats = {'sum': sum(t.sum(0, keepdims=True) for t in teacher), 'count': jnp.asarray(2. * len(loss_B))}
    return LossOut(weighted_mean(loss_B), {'entropy': weighted_mean(-(targets[0] * jnp.log(targets[0])).sum(-1))},
                   stats)

  def after_update(self, params: Params, extra: dict[str, Any], stats: Any, step: Array) -> dict[str, Any]:
    m, c = self.momentum, self.center_momentum
    return {'teacher': jax.tree.map(lambda t, p: m * t + (1. - m) * p, extra['teacher'], params),
            'center': c * extra['center'] + (1. - c) * stats['sum'] / stats['count']}

  def views(self) -> dict[str, Any]:
    return {}


class BatchNormNet:
  """A backbone with running statistics: pixels to WIDTH features, normalized over the batch."""

  def init(self, key: Key, image: Array) -> tuple[Params, Any]:
    size = image[0].size
    return ({'kernel': kernel(.05 * jax.random.normal(key, (size, WIDTH))),
             'bias': labelled(jnp.zeros(WIDTH), (None,))},
            {'mean': jnp.zeros(WIDTH), 'var': jnp.ones(WIDTH)})

  def apply(self, params: Params, state: Any, image: Array, *, train: bool, key: Key | None) -> tuple[Features, Any]:
    x = image.reshape(image.shape[0], -1) @ params['kernel']
    mean, var = (x.mean(0), x.var(0)) if train else (state['mean'], state['var'])
    new = {'mean': .9 * state['mean'] + .1 * mean, 'var': .9 * state['var'] + .1 * var} if train else state
    x = jnp.tanh((x - mean[None]) * jax.lax.rsqrt(var + 1e-3)[None] + params['bias'][None])
    return Features(x[:, None], x, (1, 1)), new


class PlainNet:
  """A backbone without anything special."""

  def init(self, key: Key, image: Array) -> tuple[Params, Any]:
    return {'kernel': kernel(.05 * jax.random.normal(key, (image[0].size, WIDTH)))}, {}

  def apply(self, params: Params, state: Any, image: Array, *, train: bool, key: Key | None) -> tuple[Features, Any]:
    x = jnp.tanh(image.reshape(image.shape[0], -1) @ params['kernel'])
    return Features(x[:, None], x, (1, 1)), state


class LinearHead:
  """Features to logits."""

  def init(self, key: Key, width: int, num_classes: int) -> Params:
    return {'kernel': kernel(.1 * jax.random.normal(key, (width, num_classes))),
            'bias': labelled(jnp.zeros(num_classes), (None,))}

  def apply(self, params: Params, pooled: Array) -> Array:
    return pooled @ params['kernel'] + params['bias'][None]
