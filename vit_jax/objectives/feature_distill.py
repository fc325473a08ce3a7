"""Feature distillation: a small network learns to predict the features of a large frozen one, without labels.

From each crop, linear maps of the student's pooled features and of its patch tokens predict what the teacher computes
for the same crop, which it may see at another size. The distillation of DINOv2 and DINOv3 (arXiv 2508.10104, section
5.2) has the losses of DINO and iBOT in their place (`dinov2_distill.py`); those need the teacher's heads, which most
released weights do not have.
"""
from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.config import schema
from vit_jax.config.durations import Lengths
from vit_jax.config.schema import FeatureDistance, PositionResize
from vit_jax.core.contracts import Backbone
from vit_jax.core.numerics import counted, split_key, weighted_mean
from vit_jax.core.types import Array, Batch, Extra, Features, Key, LossOut, Params, PyTree
from vit_jax.models import backbones
from vit_jax.models.heads import normalize
from vit_jax.models.initialization import TORCH
from vit_jax.models.kernels.forms import select
from vit_jax.models.layers import Dense, applied, initial
from vit_jax.models.vit import interpolate
from vit_jax.objectives import networks, spec
from vit_jax.objectives.networks import STATE, OneNetwork, init_backbone, statistics, with_losses
from vit_jax.parallel import sharding

TRAINED = sharding.TRAINED
"""Key of `extra` for the teacher: `backbone`, `state`. It never changes."""
POOLED, PATCHES = 'teacher_pooled', 'teacher_patches'
"""Names of the features of a teacher."""
PREDICT = 'predict'
"""Key of the parameters for the linear maps to the teacher's features."""


class Trained:
  """The teacher of a run: a network, the images that it expects, and the grid of patches that the student has.

  Args:
    settings: of the teacher.
    recipe: of the student, with whose mean and deviation images are normalized.
    image_px: of the student.
    grid: patches of the student; None: only pooled features are computed.
  """

  def __init__(self, settings: schema.FeatureTeacher, recipe: schema.Recipe, image_px: tuple[int, int],
               grid: tuple[int, int] | None) -> None:
    self._px, self._grid = settings.image_px(image_px), grid
    self.backbone = backbones.build(settings.model, self._px)
    self._normalization = networks.Normalization(settings.mean, settings.std)
    self._student = networks.Normalization(recipe.mean, recipe.std)

  def init(self, key: Key, num: int) -> PyTree:
    """Returns an untrained network of the same shapes; training starts from weights."""
    params, state, _ = init_backbone(self.backbone, key, jnp.zeros((num, *self._px, 3)), adds_losses=True)
    return {'backbone': params, **({'state': state} if state else {})}

  def width(self) -> int:
    """Returns the number of channels of the features."""
    image = jnp.zeros((1, *self._px, 3))
    features = jax.eval_shape(lambda: init_backbone(self.backbone, jax.random.key(0), image, adds_losses=True)[2])
    return int(features.pooled.shape[-1])

  def features(self, teacher: PyTree, image: Array) -> dict[str, Array]:
    """Returns `teacher_pooled [B, D]` and `teacher_patches [B, N, D]` f32 for images normalized for the student.

    Images are resized to the size of the teacher, and its patch tokens to the grid of the student, both bicubic and
    antialiased. No gradient flows through.
    """
    image = networks.renormalized(image, self._student, self._normalization)
    image = resized(image, self._px)
    features, _ = self.backbone.apply(teacher['backbone'], teacher.get('state', {}), image, train=False, key=None)
    by_name = {POOLED: features.pooled.astype(jnp.float32)}
    if self._grid is not None:
      maps = features.maps().astype(jnp.float32)
      by_name[PATCHES] = resized(maps, self._grid).reshape(len(image), -1, maps.shape[-1])
    return jax.lax.stop_gradient(by_name)


def resized(image: Array, size: tuple[int, int]) -> Array:
  """Returns images or maps `[B, H, W, C]` of another height and width, bicubic and antialiased."""
  if image.shape[1:3] == tuple(size):
    return image
  rows, columns = interpolate.matrices((image.shape[1], image.shape[2]), size, PositionResize.BICUBIC_ANTIALIAS)
  return jnp.einsum('ih,jw,bhwc->bijc', rows, columns, image, precision=jax.lax.Precision.HIGHEST)


class FeatureDistill(OneNetwork):
  """Objective: `w_p d(M_p x, t) + w_n mean over patches n of d(M_n x_n, t_n)`, d the distance of the settings.

  x and x_n are the student's pooled features and patch tokens, t and t_n those of the teacher, M_p and M_n linear maps.
  The teacher is part of the state.

  Metrics beside the loss: `pooled_distance` and `patch_distance`, the terms without their weights, and
  `pooled_cosine`, the mean cosine of predicted and pooled features.
  """

  def __init__(self, backbone: Backbone, settings: schema.FeatureDistill, teacher: Trained,
               maps: dict[str, Dense]) -> None:
    """`maps` are by the name of their target."""
    self._backbone, self._settings, self._teacher, self._maps = backbone, settings, teacher, maps

  def init(self, key: Key, batch: Batch) -> tuple[Params, Extra]:
    keys, image = split_key(key, 'backbone', 'teacher', POOLED, PATCHES), batch['image']
    params, state, features = init_backbone(self._backbone, keys['backbone'], image, adds_losses=True)
    width = features.pooled.shape[-1]
    predict = {name: initial(layer, keys[name], jnp.zeros((1, width))) for name, layer in self._maps.items()}
    extra = {TRAINED: self._teacher.init(keys['teacher'], len(image))}
    return {'backbone': params, PREDICT: predict}, {**extra, **statistics(state)}

  def loss(self, params: Params, extra: Extra, batch: Batch, key: Key, step: Array) -> LossOut:
    del step
    batch = counted(batch)
    image, mask_B, s = batch['image'], batch.get('mask'), self._settings
    features, state = self._backbone.apply(params['backbone'], extra.get(STATE, {}), image, train=True, key=key)
    targets = self._teacher.features(extra[TRAINED], image)
    predictions = {name: self._predicted(params[PREDICT][name], name, features) for name in self._maps}
    terms = {name: distance(predictions[name], targets[name], s.distance) for name in self._maps}
    weights = {POOLED: s.pooled_weight, PATCHES: s.patch_weight}
    loss_B = sum((weights[name] * terms[name] for name in terms), jnp.zeros(len(image)))
    metric_names = {POOLED: 'pooled_distance', PATCHES: 'patch_distance'}
    metrics = {metric_names[name]: term for name, term in terms.items()}
    if POOLED in predictions:
      metrics['pooled_cosine'] = 1. - distance(predictions[POOLED], targets[POOLED], FeatureDistance.COSINE)
    means = {name: weighted_mean(jax.lax.stop_gradient(x), mask_B) for name, x in metrics.items()}
    return with_losses(LossOut(weighted_mean(loss_B, mask_B), means, statistics(state)), features)

  def _predicted(self, params: Params, name: str, features: Features) -> Array:
    """Returns the prediction of the teacher's features of this name, f32."""
    x = features.pooled if name == POOLED else features.tokens
    rows = applied(self._maps[name], params, x.reshape(-1, x.shape[-1]))
    return rows.reshape(*x.shape[:-1], -1).astype(jnp.float32)


def distance(predicted: Array, wanted: Array, kind: FeatureDistance) -> Array:
  """Returns the distance of feature vectors `[B, D]`, or its mean over those of an image `[B, N, D]`; `[B]` f32."""
  wanted = wanted.astype(jnp.float32)
  match kind:
    case FeatureDistance.COSINE:
      each = 1. - (normalize(predicted, axis=-1) * normalize(wanted, axis=-1)).sum(-1)
    case FeatureDistance.MSE:
      each = jnp.square(predicted - wanted).mean(-1)
  return each.reshape(len(each), -1).mean(1)


FROM_WEIGHTS = ('teacher.model', 'teacher.mean', 'teacher.std')
"""Settings of a feature teacher that follow from its weights."""


def settings_from(weights: spec.Loaded, student: schema.Model) -> dict[str, Any]:
  """Returns `FROM_WEIGHTS`: network and normalization of the weights, in the dtype of the student."""
  model = dataclasses.replace(weights.model, dtype=student.dtype)
  normalization = weights.preprocess
  return {'teacher.model': model, 'teacher.mean': tuple(normalization.mean), 'teacher.std': tuple(normalization.std)}


class Spec(spec.Spec[schema.FeatureDistill]):
  """Builds `FeatureDistill` from a config."""
  from_weights = FROM_WEIGHTS

  def build(self, backbone: Backbone, num_classes: int, *, lengths: Lengths) -> FeatureDistill:
    model, teacher = self.config.model, self.teacher()
    layer = Dense(features=(teacher.width(),), axes=('embed', 'mlp'), dtype=jnp.dtype(model.dtype.value), law=TORCH,
                  forms=select(model.kernels))
    return FeatureDistill(backbone, self.settings, teacher, maps={name: layer for name in self.names()})

  def names(self) -> list[str]:
    """Returns the names of the teacher's features that the loss uses."""
    s = self.settings
    weights = {POOLED: s.pooled_weight, PATCHES: s.patch_weight}
    return [name for name, weight in weights.items() if weight > 0]

  def teacher(self) -> Trained:
    """Returns the teacher, whose patch tokens are those of the student's grid."""
    s, px = self.settings, self.config.image_px
    patch = getattr(self.config.model, 'patch', 1)
    grid = (px[0] // patch, px[1] // patch) if s.patch_weight else None
    return Trained(s.teacher, self.config.data.recipe, px, grid)

  def models(self) -> dict[str, schema.Model]:
    return {**super().models(), 'objective.teacher.model': self.settings.teacher.model}

  def begins_with(self) -> dict[str, spec.Begin]:
    t = self.settings.teacher
    return {'teacher': spec.Begin(weights=t.weights, part=TRAINED, model=t.model, view=t.view,
                                  image_px=t.image_px(self.config.image_px), required='a weight file')}

  def settings_from(self, name: str, weights: spec.Loaded) -> dict[str, Any]:
    del name
    return settings_from(weights, self.config.model)
