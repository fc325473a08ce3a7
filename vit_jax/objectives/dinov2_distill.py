"""Distillation with the losses of DINOv2: a frozen network and its heads teach a smaller one (2304.07193, section 5).

The teacher is a network that was trained by DINOv2 or DINOv3, with its heads: it takes the place of the EMA of the
student. An EMA of the student is kept beside it, and is the network to use at the end. No patch is hidden from the
student, and recipes drop no paths. The other terms of the loss stay as they are.

Weights without heads cannot teach in this way; feature distillation is for them.

Differs from the DINOv2 paper, which does not say on which patches of the global crops the loss of iBOT is: here they
are drawn as those that DINOv2 masks, as in DINOv3's program, or are all with `mask_share` 1 and `mask_ratio` 1, 1.
"""
from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from vit_jax.config import schema
from vit_jax.config.durations import Lengths
from vit_jax.core import trees
from vit_jax.core.contracts import Backbone, TokenBackbone
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, Batch, Extra, Key, Params, PyTree
from vit_jax.models.heads import Projector
from vit_jax.objectives import dinov2
from vit_jax.objectives.dino import Rates
from vit_jax.objectives.dinov2 import NUM_GLOBAL, Dinov2, Masks
from vit_jax.objectives.feature_distill import FROM_WEIGHTS, PATCHES, POOLED, TRAINED, Trained, settings_from
from vit_jax.objectives.networks import TEACHER
from vit_jax.objectives.spec import Begin, Loaded


class Dinov2Distill(Dinov2):
  """Objective: that of `Dinov2`, with the outputs g_t of a frozen network, and nothing masked for the student.

  extra: as of `Dinov2`, where `teacher` is the EMA of the student, and `trained/{backbone, projector, …}`, the frozen
  network and its heads.
  """
  hides = False

  def __init__(self, backbone: TokenBackbone, projector: Projector, patch_projector: Projector | None,
               settings: schema.Dinov2, patch: int, *, rates: Rates, teacher: Trained, width: int) -> None:
    """`width` is that of the teacher's features."""
    super().__init__(backbone, projector, patch_projector, settings, patch, rates=rates)
    self._teacher, self._width = teacher, width

  def init(self, key: Key, batch: Batch) -> tuple[Params, Extra]:
    params, extra = super().init(key, batch)
    heads: dict[str, PyTree] = {'projector': self._projector.init(key, self._width)}
    if self._patch_projector is not None:
      heads['patch_projector'] = self._patch_projector.init(key, self._width)
    del params['mask_token'], extra[TEACHER]['mask_token']  # nothing is masked
    return params, {**extra, TRAINED: {**self._teacher.init(key, 1), **heads}}

  def after_update(self, params: Params, extra: Extra, stats: PyTree, step: Array) -> Extra:
    return {**super().after_update(params, extra, stats, step), TRAINED: extra[TRAINED]}

  def draw(self, key: Key, views: Array) -> Masks:
    """Draws the patches that the loss of iBOT is on; all of them with `mask_share` 1 and `mask_ratio` 1, 1."""
    s, patch = self._settings, self._patch
    if s.mask_share < 1. or s.mask_ratio[0] < 1.:
      return super().draw(key, views)
    num_patches = (views.shape[2] // patch) * (views.shape[3] // patch)
    number = jnp.arange(NUM_GLOBAL * s.group * num_patches)[None]
    number_Gs = jnp.broadcast_to(number, (len(views) // s.group, number.shape[1]))
    return Masks(is_masked=jnp.ones((*views.shape[:2], num_patches), bool), number=number_Gs,
                 weight=jnp.full(number_Gs.shape, 1. / num_patches))

  def _taught(self, extra: Extra, views: Array, masks: Masks) -> tuple[Array, Array]:
    """Returns the outputs of the frozen network, as `Dinov2._taught` those of the EMA."""
    features = self._teacher.features(extra[TRAINED], views.reshape(-1, *views.shape[2:]))
    pooled, tokens = (features[name].reshape(*views.shape[:2], *features[name].shape[1:])
                      for name in (POOLED, PATCHES))
    return self._project(extra[TRAINED], pooled), self._project_patches(extra[TRAINED], tokens, masks)


HEAD_SIZES = ('out_dim', 'hidden_dim', 'bottleneck_dim', 'norm_last_layer', 'patch_out_dim', 'patch_bottleneck_dim')
"""Settings of DINO's heads."""


class Spec(dinov2.Spec):
  """Builds `Dinov2Distill` from a config."""
  settings: schema.Dinov2Distill
  from_weights = (*FROM_WEIGHTS, *HEAD_SIZES)

  def build(self, backbone: Backbone, num_classes: int, *, lengths: Lengths) -> Dinov2Distill:
    px, patch = self.config.image_px, self.vit.patch
    teacher = Trained(self.settings.teacher, self.config.data.recipe, px, (px[0] // patch, px[1] // patch))
    return Dinov2Distill(**self.arguments(backbone, lengths), teacher=teacher, width=teacher.width())

  def models(self) -> dict[str, schema.Model]:
    return {**super().models(), 'objective.teacher.model': self.settings.teacher.model}

  def begins_with(self) -> dict[str, Begin]:
    teacher = self.settings.teacher
    return {'teacher': Begin(
        weights=teacher.weights, part=TRAINED, model=teacher.model, image_px=teacher.image_px(self.config.image_px),
        view=teacher.view, first=TEACHER, required='a run of DINOv2 or DINOv3')}

  def settings_from(self, name: str, weights: Loaded) -> dict[str, Any]:
    return {**settings_from(weights, self.config.model), **head_sizes(weights)}


def head_sizes(weights: Loaded) -> dict[str, Any]:
  """Returns the settings of DINO's heads that weights have. Raises UserError if the weights have no such heads."""
  if 'projector' not in weights.params:
    raise UserError(f'objective.teacher.weights: expected a run of DINOv2, whose heads teach, got {weights.source} '
                    'without heads. Use objective FeatureDistill, which needs none.')
  shapes = {name: leaf.shape for name, leaf in trees.flatten(weights.params).items()}
  bottleneck, num_prototypes = shapes['projector/prototypes/kernel']
  # Without heads for patches, the size of their bottleneck is not used, and is the default.
  patch_bottleneck, num_patch_prototypes = shapes.get('patch_projector/prototypes/kernel', (256, 0))
  return {
      'out_dim': num_prototypes, 'hidden_dim': shapes['projector/mlp1/kernel'][-1], 'bottleneck_dim': bottleneck,
      'norm_last_layer': 'projector/prototypes/norm' not in shapes, 'patch_out_dim': num_patch_prototypes,
      'patch_bottleneck_dim': patch_bottleneck}
