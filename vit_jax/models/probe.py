"""A backbone for a linear probe: it only evaluates, and what the head sees of it is chosen and normalised.

It has the parameters of the backbone and no others, so that weights go in and out as ever. Its state is that of the
backbone, and running statistics of the features.
"""
from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from vit_jax.config import schema
from vit_jax.core import intermediates
from vit_jax.core.contracts import Backbone
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, Features, Key, Params, PyTree

EPS = 1e-6       # MAE, linear probe
MOMENTUM = .1    # what a batch counts in the running statistics; PyTorch's default, which MAE takes
INNER, STATISTICS = 'backbone', 'features'


@dataclasses.dataclass(frozen=True)
class Frozen:
  """A backbone that no gradient reaches, with the features that a probe reads.

  With `normalize` these are `(x - mean) / sqrt(variance + EPS)`, in training by the whole batch, in evaluation by the
  running statistics (whose variance is the unbiased one).
  """
  backbone: Backbone
  features: schema.FeatureLayers
  normalize: bool

  def init(self, key: Key, image: Array) -> tuple[Params, PyTree]:
    """Parameters of the backbone, and the state."""
    params, inner = self.backbone.init(key, image)
    state = {INNER: inner} if inner else {}
    if self.normalize:
      width = jax.eval_shape(lambda: self._read(params, inner, image)[1]).shape[-1]
      state[STATISTICS] = {'mean': jnp.zeros(width), 'variance': jnp.ones(width)}
    return params, state

  def apply(self, params: Params, state: PyTree, image: Array, *, train: bool,
            key: Key | None) -> tuple[Features, PyTree]:
    """Features of `image [B, H, W, 3] f32`, whose `pooled` is what the probe sees; and the new state."""
    del key
    features, x_BD = jax.lax.stop_gradient(self._read(params, state.get(INNER, {}), image))
    if self.normalize:
      x_BD, statistics = _normalize(x_BD, state[STATISTICS], train=train)
      state = {**state, STATISTICS: statistics}
    return features._replace(pooled=x_BD), state

  def _read(self, params: Params, inner: PyTree, image: Array) -> tuple[Features, Array]:
    if not self.features.blocks:
      features, _ = self.backbone.apply(params, inner, image, train=False, key=None)
      return features, features.pooled.astype(jnp.float32)
    if not intermediates.is_layered(self.backbone):
      raise UserError(f'head.features.blocks={self.features.blocks}: {type(self.backbone).__name__} has no blocks to '
                      'read after; want none')
    found = intermediates.read(self.backbone, params, image, self.features.blocks)
    return found[-1], intermediates.concatenate(found, patches=self.features.patches)


def around(backbone: Backbone, head: schema.Head) -> Backbone:
  """The network under a head: the backbone itself, or for a linear probe `Frozen` around it."""
  return Frozen(backbone, head.features, head.batch_norm) if head.probe else backbone


def _normalize(x_BD: Array, running: PyTree, *, train: bool) -> tuple[Array, PyTree]:
  if not train:
    return (x_BD - running['mean'][None]) / jnp.sqrt(running['variance'] + EPS)[None], running
  mean, variance = x_BD.mean(0), x_BD.var(0)
  unbiased = variance * (x_BD.shape[0] / max(1, x_BD.shape[0] - 1))
  new = {name: running[name] + MOMENTUM * (now - running[name])
         for name, now in (('mean', mean), ('variance', unbiased))}
  return (x_BD - mean[None]) / jnp.sqrt(variance + EPS)[None], new
