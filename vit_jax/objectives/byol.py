"""BYOL: bootstrap your own latent (Grill et al. 2020, arXiv 2006.07733).

From one crop of an image the online network predicts how the target network projects another crop; the target is an
EMA of the online network. No negative examples are used.

Differs from the BYOL paper: the hidden layer of projector and predictor has LayerNorm in place of BatchNorm.
BatchNorm would make the loss depend on the number of microbatches. Batch statistics are not needed: with group
normalization and weight standardization in place of BatchNorm, Richemond et al. 2020 (arXiv 2010.10241) reach 73.9 %
instead of 74.3 % on ImageNet. LayerNorm is group normalization with one group; weights are not standardized here.

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
from vit_jax.core.contracts import Backbone
from vit_jax.core.numerics import counted, split_key, weighted_mean
from vit_jax.core.types import Array, Batch, Extra, Key, LossOut, Params, Schedule
from vit_jax.models.heads import normalize
from vit_jax.models.initialization import LECUN
from vit_jax.models.kernels.forms import select
from vit_jax.models.layers import Dense, LayerNorm, applied, initial
from vit_jax.objectives import spec
from vit_jax.objectives.networks import TEACHER, WithTeacher, copied, encode_views, init_backbone
from vit_jax.optim import schedules

SPREAD = 'spread'
"""Name of the metric that falls to 0 when the target collapses."""
NORM_EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class Mlp:
  """`W2 relu(LayerNorm(W1 x + b1)) + b2`, from any width to `out`. Dense layers are in `dtype`, the result is f32.

  Parameters, f32: `mlp1/{kernel [D, F], bias [F]}`, `norm/{scale, bias} [F]`, `mlp2/{kernel [F, E], bias [E]}`.
  """
  hidden: int
  out: int
  dtype: DTypeLike
  kernels: Kernels = Kernels.FAST

  def init(self, key: Key, width: int) -> Params:
    keys = split_key(key, 'mlp1', 'norm', 'mlp2')
    first, norm, last = self._layers()
    hidden = jnp.zeros((1, self.hidden))
    return {'mlp1': initial(first, keys['mlp1'], jnp.zeros((1, width))), 'norm': initial(norm, keys['norm'], hidden),
            'mlp2': initial(last, keys['mlp2'], hidden)}

  def apply(self, params: Params, x: Array) -> Array:
    first, norm, last = self._layers()
    x = jax.nn.relu(applied(norm, params['norm'], applied(first, params['mlp1'], x)))
    return applied(last, params['mlp2'], x).astype(jnp.float32)

  def _layers(self) -> tuple[Dense, LayerNorm, Dense]:
    """Returns the first dense layer, the norm and the last dense layer."""
    forms = select(self.kernels)
    first = Dense(features=(self.hidden,), axes=('embed', 'mlp'), dtype=self.dtype, law=LECUN, forms=forms)
    last = Dense(features=(self.out,), axes=('mlp', 'embed'), dtype=self.dtype, law=LECUN, forms=forms)
    return first, LayerNorm(NORM_EPS, forms), last


class Byol(WithTeacher):
  """Objective: `L = |q_1 - z_2|^2 + |q_2 - z_1|^2` of unit vectors, so from 0 to 8 (eq. 2, symmetrized).

    q_i = unit(predictor(projector(backbone(x_i))))        online network, crop i
    z_i = unit(projector'(backbone'(x_i)))                 target network, without gradient
    after the update, with tau of the step:    target <- tau target + (1 - tau) online    (eq. 1)

  Metric beside the loss: `spread`, `1 - |mean of z|^2`: 0 if all projections of the target are the same, 1 if their
  directions cancel.

  extra: `teacher/{backbone, projector}`, the target.
  """

  def __init__(self, backbone: Backbone, projector: Mlp, predictor: Mlp, *, momentum: Schedule) -> None:
    self._backbone, self._projector, self._predictor, self._momentum = backbone, projector, predictor, momentum

  def init(self, key: Key, batch: Batch) -> tuple[Params, Extra]:
    keys = split_key(key, 'backbone', 'projector', 'predictor')
    backbone, _, features = init_backbone(self._backbone, keys['backbone'], batch['views_global'][:, 0])
    network = {'backbone': backbone, 'projector': self._projector.init(keys['projector'], features.pooled.shape[-1])}
    predictor = self._predictor.init(keys['predictor'], self._projector.out)
    return {**network, 'predictor': predictor}, {TEACHER: copied(network)}

  def loss(self, params: Params, extra: Extra, batch: Batch, key: Key, step: Array) -> LossOut:
    del step
    batch = counted(batch)
    views, mask_B = batch['views_global'], batch.get('mask')
    online_RE = self._predictor.apply(params['predictor'], self._project(params, views, train=True, key=key))
    target_RE = jax.lax.stop_gradient(self._project(extra[TEACHER], views, train=False, key=None))
    q_BVE, z_BVE = (normalize(x, axis=-1).reshape(*views.shape[:2], -1) for x in (online_RE, target_RE))
    loss_B = jnp.square(q_BVE - z_BVE[:, ::-1]).sum((1, 2))
    weight_B = jnp.ones(views.shape[0]) if mask_B is None else mask_B
    mean_E = jnp.where(weight_B[:, None] > 0, z_BVE.mean(1), 0.).sum(0) / jnp.maximum(weight_B.sum(), 1.)
    spread_B = jnp.broadcast_to(1. - jnp.square(mean_E).sum(), loss_B.shape)
    return LossOut(weighted_mean(loss_B, mask_B), {SPREAD: weighted_mean(spread_B, mask_B)}, {})

  def _project(self, params: Params, views: Array, *, train: bool, key: Key | None) -> Array:
    """Returns the projections `[B V, E]` of `views [B, V, H, W, 3]`."""
    features = encode_views(self._backbone, params, views, train=train, key=key)
    return self._projector.apply(params['projector'], features.pooled)


class Spec(spec.Spec[schema.Byol]):
  """Builds `Byol` from a config."""
  collapse_advice = 'All projections are the same. Try a lower optimizer.lr, or objective.momentum closer to 1'

  def build(self, backbone: Backbone, num_classes: int, *, lengths: Lengths) -> Byol:
    s, dtype = self.settings, jnp.dtype(self.config.model.dtype.value)
    mlp = Mlp(hidden=s.hidden_dim, out=s.out_dim, dtype=dtype, kernels=self.config.model.kernels)
    return Byol(backbone, projector=mlp, predictor=mlp, momentum=schedules.ramp(s.momentum, lengths=lengths))

  def collapse_metrics(self) -> tuple[str, ...]:
    return (SPREAD,)
