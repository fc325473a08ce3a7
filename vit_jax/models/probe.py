"""A backbone for a linear probe: it is not trained, and the features that the head gets are selected and normalized.

It has the parameters of the backbone and no others, so that weights are loaded and saved as usual. Its state is
`{'backbone': …, 'features': …}`: that of the backbone, and running statistics of the features; without what is empty.
"""
from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from vit_jax.config import schema
from vit_jax.core.contracts import Backbone
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, Features, Key, Params, PyTree
from vit_jax.models import intermediates

EPS = 1e-6       # MAE, linear probe
MOMENTUM = .1    # weight of a batch in the running statistics; PyTorch's default, which MAE uses
INNER, STATISTICS = 'backbone', 'features'


class Statistics(NamedTuple):
  """Running statistics of features, each `[D]` f32; the variance is the unbiased one, as in PyTorch."""
  mean: Array
  variance: Array


def normalize(x_BD: Array, running: Statistics) -> tuple[Array, Statistics]:
  """Returns features normalized by mean and variance of the batch (BatchNorm), and the new running statistics."""
  mean, variance = x_BD.mean(0), x_BD.var(0)
  unbiased = variance * (x_BD.shape[0] / max(1, x_BD.shape[0] - 1))
  running = Statistics(mean=running.mean + MOMENTUM * (mean - running.mean),
                       variance=running.variance + MOMENTUM * (unbiased - running.variance))
  return (x_BD - mean[None]) / jnp.sqrt(variance + EPS)[None], running


@dataclasses.dataclass(frozen=True)
class Frozen:
  """A backbone that no gradient reaches, with the features that a probe reads.

  With `normalize` these are `(x - mean) / sqrt(variance + EPS)`, in training by the complete batch, in evaluation by
  the running statistics (whose variance is the unbiased one).
  """
  backbone: Backbone
  features: schema.FeatureLayers
  normalize: bool

  def init(self, key: Key, image: Array) -> tuple[Params, PyTree]:
    """Returns the parameters of the backbone, and the state."""
    params, inner = self.backbone.init(key, image)
    state = {INNER: inner} if inner else {}
    if self.normalize:
      width = jax.eval_shape(lambda: self._read(params, inner, image)[1]).shape[-1]
      state[STATISTICS] = {'mean': jnp.zeros(width), 'variance': jnp.ones(width)}
    return params, state

  def apply(self, params: Params, state: PyTree, image: Array, *, train: bool,
            key: Key | None) -> tuple[Features, PyTree]:
    """Returns features of `image [B, H, W, 3] f32`, whose `pooled` is the input of the probe, and the new state."""
    del key
    features, x_BD = jax.lax.stop_gradient(self._read(params, state.get(INNER, {}), image))
    if self.normalize:
      running = Statistics(**state[STATISTICS])
      if train:
        x_BD, running = normalize(x_BD, running)
      else:
        x_BD = (x_BD - running.mean[None]) / jnp.sqrt(running.variance + EPS)[None]
      state = {**state, STATISTICS: running._asdict()}
    return features._replace(pooled=x_BD), state

  def _read(self, params: Params, inner: PyTree, image: Array) -> tuple[Features, Array]:
    """Returns the features of the last block that is read, and those of all such blocks for the probe, `[B, D]` f32."""
    if not self.features.blocks:
      features, _ = self.backbone.apply(params, inner, image, train=False, key=None)
      return features, features.pooled.astype(jnp.float32)
    if not intermediates.is_layered(self.backbone):
      raise UserError(f'head.features.blocks: expected () for {type(self.backbone).__name__}, which has no blocks to '
                      f'read after, got {self.features.blocks}. Remove it.')
    of_blocks = intermediates.read(self.backbone, params, image, self.features.blocks, inner)
    return of_blocks[-1], intermediates.concatenate(of_blocks, patches=self.features.patches)


def around(backbone: Backbone, head: schema.Head) -> Backbone:
  """Returns the network under a head: the backbone itself, or for a linear probe `Frozen` around it."""
  return Frozen(backbone, head.features, head.batch_norm) if head.probe else backbone
