"""LeJEPA: views of an image are drawn together, and all embeddings to a normal distribution (arXiv 2511.08544).

There is no teacher, no stopped gradient and no negative example. What prevents the collapse is SIGReg (sketched
isotropic Gaussian regularization): on random directions, new at each step, the characteristic function of the
embeddings is compared with that of the standard normal distribution.

The definition is that of the code which the authors print in the paper (Algorithms 1 and 2): all views of an image are
drawn to the mean of its global ones, SIGReg takes the embeddings of each view as a sample, and the sum is convex.

Crops and colors are those of `data.recipe.views`.
"""
from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from vit_jax.config import schema
from vit_jax.config.durations import Lengths
from vit_jax.config.schema import Kernels
from vit_jax.core.axes import labelled
from vit_jax.core.contracts import Backbone, Coupling
from vit_jax.core.numerics import constrain_batch, counted, moments, split_key
from vit_jax.core.types import Array, Batch, Extra, Key, LossOut, Mean, Params, PyTree
from vit_jax.models.heads import normalize
from vit_jax.models.initialization import TORCH
from vit_jax.models.kernels.forms import select
from vit_jax.models.layers import Dense, applied, initial
from vit_jax.objectives import spec
from vit_jax.objectives.networks import OneNetwork, encode_views, init_backbone

NORM_EPS = 1e-5  # of BatchNorm in PyTorch
KEYS = ('global', 'local', 'directions')
NUM_GLOBAL = 2  # views in `views_global`
DEVIATION = 'deviation'
"""Name of the metric that falls to 0 when all embeddings are the same."""


@dataclasses.dataclass(frozen=True)
class Projector:
  """Two hidden layers with BatchNorm and ReLU, and a dense layer, from any width to `out`.

  BatchNorm has the statistics of the batch over all devices, never running ones: the projector is discarded after
  training. Dense layers are in `dtype`, the norms and the result in f32.

  Parameters, f32: `mlp1/{kernel [D, F], bias [F]}`, `mlp2/{kernel [F, F], bias [F]}`, `norm1` and `norm2`
  `/{scale, bias} [F]`, `mlp3/{kernel [F, E], bias [E]}`.
  """
  hidden: int
  out: int
  dtype: DTypeLike
  kernels: Kernels = Kernels.FAST

  def init(self, key: Key, width: int) -> Params:
    """Returns new parameters for features `[R, width]`."""
    keys, inputs = split_key(key, 'mlp1', 'mlp2', 'mlp3'), (width, self.hidden, self.hidden)
    params: Params = {name: initial(layer, keys[name], jnp.zeros((1, size)))
                      for (name, layer), size in zip(self._layers.items(), inputs, strict=True)}
    for name in ('norm1', 'norm2'):
      params[name] = {'scale': labelled(jnp.ones(self.hidden), ('mlp',)),
                      'bias': labelled(jnp.zeros(self.hidden), ('mlp',))}
    return params

  def apply(self, params: Params, features: Array, weight: Array) -> Array:
    """Returns `[R, E]` f32 for features `[R, D]`; rows with `weight [R]` 0 do not count in the statistics."""
    layers, x = self._layers, features
    for mlp, norm in (('mlp1', 'norm1'), ('mlp2', 'norm2')):
      x = applied(layers[mlp], params[mlp], x).astype(jnp.float32)
      mean, variance = moments(x, weight)
      scale, bias = params[norm]['scale'], params[norm]['bias']
      x = jax.nn.relu((x - mean) * jax.lax.rsqrt(variance + NORM_EPS) * scale[None] + bias[None])
    return applied(layers['mlp3'], params['mlp3'], x).astype(jnp.float32)

  @property
  def _layers(self) -> dict[str, Dense]:
    sizes = {'mlp1': (self.hidden, ('embed', 'mlp')), 'mlp2': (self.hidden, ('embed', 'mlp')),
             'mlp3': (self.out, ('mlp', 'embed'))}
    return {name: Dense(features=(size,), axes=axes, dtype=self.dtype, law=TORCH, forms=select(self.kernels))
            for name, (size, axes) in sizes.items()}


class LeJepa(OneNetwork):
  """Objective: `(1 - w) * mean over images i and views v of |z_iv - c_i|^2 / E + w * SIGReg(z)` (Algorithm 2).

  z_iv is the embedding of a view, E its width, c_i the mean over the global views of the image.

  Metrics beside the loss: `invariance` and `sigreg`, the two terms, and `deviation`, the mean over dimensions of the
  standard deviation of embeddings: 1 for the distribution that SIGReg wants, 0 if all embeddings are the same.
  """

  def __init__(self, backbone: Backbone, projector: Projector, settings: schema.LeJepa) -> None:
    self._backbone, self._projector, self._settings = backbone, projector, settings

  def init(self, key: Key, batch: Batch) -> tuple[Params, Extra]:
    keys = split_key(key, 'backbone', 'projector')
    backbone, _, features = init_backbone(self._backbone, keys['backbone'], batch['views_global'][:, 0])
    return {'backbone': backbone, 'projector': self._projector.init(keys['projector'], features.pooled.shape[-1])}, {}

  def loss(self, params: Params, extra: Extra, batch: Batch, key: Key, step: Array) -> LossOut:
    rows, stats = self._embed(params, extra, batch, key, step)
    return self._compare(params, extra, rows, batch, key, step)._replace(stats=stats)

  def coupling(self) -> Coupling:
    return Coupling(self._embed, self._compare)

  def _embed(self, params: Params, extra: Extra, batch: Batch, key: Key, step: Array) -> tuple[PyTree, PyTree]:
    """Returns the features of all views, `[B, V, D]`, and no statistics."""
    del extra, step
    batch, keys = counted(batch), split_key(key, *KEYS)
    views = [name for name in ('views_global', 'views_local') if name in batch]
    pooled = []
    for name in views:
      key = keys[name.removeprefix('views_')]
      features = encode_views(self._backbone, params, batch[name], train=True, key=key)
      pooled.append(features.pooled.reshape(*batch[name].shape[:2], -1))
    return jnp.concatenate(pooled, axis=1), {}

  def _compare(self, params: Params, extra: Extra, rows: PyTree, batch: Batch, key: Key, step: Array) -> LossOut:
    """Returns the loss of the features that `_embed` returns for the whole batch."""
    del extra, step
    pooled_BVD, keys = rows, split_key(key, *KEYS)
    num_images, num_views, width = pooled_BVD.shape
    weight_B = jnp.ones(num_images) if 'mask' not in batch else (batch['mask'] > 0).astype(jnp.float32)
    weight_BV = jnp.broadcast_to(weight_B[:, None], (num_images, num_views))
    z_BVE = self._projector.apply(params['projector'], pooled_BVD.reshape(-1, width), weight_BV.reshape(-1))
    z_BVE = constrain_batch(z_BVE.reshape(num_images, num_views, -1))
    z_BVE = jnp.where(weight_BV[..., None] > 0, z_BVE, 0.)
    draw = jax.random.normal(keys['directions'], (z_BVE.shape[-1], self._settings.directions))  # on all devices alike
    value, metrics = terms(z_BVE, weight_B, normalize(draw, axis=0), self._settings)
    spread = jnp.sqrt(moments(z_BVE.reshape(-1, z_BVE.shape[-1]), weight_BV.reshape(-1))[1]).mean()
    total = jnp.maximum(weight_B.sum(), 1.)
    means = {name: Mean(jax.lax.stop_gradient(metric) * total, total)
             for name, metric in {**metrics, DEVIATION: spread}.items()}
    return LossOut(Mean(value * total, total), means, {})


def terms(z: Array, weight: Array, directions: Array, settings: schema.LeJepa) -> tuple[Array, dict[str, Array]]:
  """Returns the loss of embeddings `z [B, V, E]`, the global views first, and its terms `invariance` and `sigreg`.

  `weight [B]` is 1 for the images that count, else 0. SIGReg is the mean Epps-Pulley statistic of the embeddings along
  the unit vectors `directions [E, M]` (Algorithm 1).
  """
  away_B = jnp.square(z - z[:, :NUM_GLOBAL].mean(1, keepdims=True)).mean((1, 2))
  invariance = (away_B * weight).sum() / jnp.maximum(weight.sum(), 1.)
  x_BVM = jnp.einsum('bve,em->bvm', z, directions, precision=jax.lax.Precision.HIGHEST)
  regular = epps_pulley(x_BVM, weight, settings.t_max, settings.t_points).mean()
  share = settings.weight
  return (1. - share) * invariance + share * regular, {'invariance': invariance, 'sigreg': regular}


def epps_pulley(x: Array, weight: Array, t_max: float, t_points: int) -> Array:
  """Returns the statistic of samples along the first axis, `[B, ...] -> [...]`: 0 if they are as standard normal ones.

    N * integral over [-t_max, t_max] of |mean of exp(i t x) - phi(t)|^2 phi(t) dt,    phi(t) = exp(-t^2 / 2)

  by the trapezoid rule. The integrand is even, so the points above 0 have twice their weight. N is the number of
  samples with `weight [B]` 1.
  """
  t, gap = jnp.linspace(0., t_max, t_points).reshape(*(1,) * x.ndim, -1), t_max / (t_points - 1)
  phi = jnp.exp(-jnp.square(t[0]) / 2.)
  weights = 2. * gap * phi.at[..., jnp.array([0, t_points - 1])].divide(2.)
  total = jnp.maximum(weight.sum(), 1.)

  @jax.checkpoint  # sines and cosines of all samples would be kept for the backward pass
  def characteristic(x: Array) -> tuple[Array, Array]:
    angle, share = x[..., None] * t, weight.reshape(-1, *(1,) * x.ndim) / total
    return (share * jnp.cos(angle)).sum(0), (share * jnp.sin(angle)).sum(0)

  real, imaginary = characteristic(x)
  return total * (weights * (jnp.square(real - phi) + jnp.square(imaginary))).sum(-1)


class Spec(spec.Spec[schema.LeJepa]):
  """Builds `LeJepa` from a config."""
  collapse_advice = 'All embeddings are nearly the same. Try a larger objective.weight, or a lower optimizer.lr'

  def build(self, backbone: Backbone, num_classes: int, *, lengths: Lengths) -> LeJepa:
    s, model = self.settings, self.config.model
    return LeJepa(backbone, Projector(s.hidden_dim, s.out_dim, jnp.dtype(model.dtype.value), model.kernels), s)

  def collapse_metrics(self) -> tuple[str, ...]:
    return (DEVIATION,)
