"""All that differs by the objective of a config: the task itself, and what it does to rules, batches and alarms."""
from __future__ import annotations

import pathlib
from typing import assert_never

import jax.numpy as jnp
import numpy as np

from vit_jax.config import schema
from vit_jax.config.durations import Lengths
from vit_jax.core.contracts import Backbone, Loader, Objective, Prepare, TokenBackbone
from vit_jax.core.errors import UserError
from vit_jax.data.device import token_targets
from vit_jax.data.pipeline import transforms
from vit_jax.data.source import Source
from vit_jax.data.sources import label_maps, local_paths, pseudo
from vit_jax.models import backbones, heads
from vit_jax.models.mae_decoder import Decoder
from vit_jax.models.projector import Projector
from vit_jax.models.vit import vit
from vit_jax.objectives import dino, distill, mae, masked_patch, supervised, token_label
from vit_jax.optim import schedules
from vit_jax.parallel import rules as sharding
from vit_jax.train.alarm import Watch

ADVICE = ('The answers are all the same. Want a lower objective.teacher_temperature, objective.centering=mean, a '
          'lower optimizer.lr, or objective.momentum nearer to 1')


def build(config: schema.Config, backbone: Backbone, num_classes: int, *, lengths: Lengths) -> Objective:
  """The task of a config."""
  task, recipe, head = config.objective, config.data.recipe, heads.Head(config.head)
  match task:
    case schema.Supervised():
      return supervised.Supervised(
          backbone, head, num_classes=num_classes, loss=task.loss, label_smoothing=task.label_smoothing,
          threshold=task.threshold, class_weights=task.class_weights)
    case schema.Mae():
      return build_mae(task, backbone)
    case schema.MaskedPatch():
      tokens, model = _tokens(backbone)
      return masked_patch.MaskedPatch(
          tokens, patch=model.patch, target=task.target, corrupted=task.mask_ratio, masked=task.mask_token_prob,
          swapped=task.random_patch_prob, mean=recipe.mean, std=recipe.std)
    case schema.Dino():
      return _dino(task, config.model, backbone, lengths)
    case schema.TokenLabel():
      tokens, model = _tokens(backbone)
      return token_label.TokenLabel(
          tokens, head, heads.Head(schema.Head()), patch=model.patch, num_classes=num_classes,
          dense_weight=task.dense_weight, mix=task.mix_token, label_smoothing=task.label_smoothing,
          class_from_map=task.class_target is schema.ClassTarget.MAP)
    case schema.Distill():
      t = task.teacher
      teacher = distill.Trained(backbones.build(t.model, config.image_px), heads.Head(t.head), mean=t.mean, std=t.std,
                                seen_mean=recipe.mean, seen_std=recipe.std)
      return distill.Distill(
          backbone, head, teacher, num_classes=num_classes, teach=task.distill_type, weight=task.weight,
          temperature=task.temperature, label_smoothing=task.label_smoothing, soft_mean=task.soft_mean)
    case _:
      assert_never(task)


def models(config: schema.Config) -> dict[str, schema.Model]:
  """Settings of all networks that a run computes, by where they are in its config: its own, and a teacher's."""
  task, found = config.objective, {'model': config.model}
  return found | ({'objective.teacher.model': task.teacher.model} if isinstance(task, schema.Distill) else {})


def build_mae(task: schema.Mae, backbone: Backbone) -> mae.Mae:
  """Masked autoencoding, of which more can be seen than of other tasks."""
  tokens, model = _tokens(backbone)
  decoder = Decoder(task.decoder_width, task.decoder_depth, task.decoder_heads, model)
  return mae.Mae(tokens, decoder, patch=model.patch, hidden=task.mask_ratio, normalized=task.norm_pix_loss)


def rules(config: schema.Config) -> list[sharding.Rule]:
  """Sharding rules of what a task adds to the backbone."""
  of_head = [*sharding.HEAD, *(sharding.PRE_LOGITS if config.head.pre_logits else ())]
  match config.objective:
    case schema.Supervised():
      return of_head
    case schema.Mae():
      return [*sharding.MAE_DECODER]
    case schema.MaskedPatch():
      return [*sharding.MASKED_PATCH]
    case schema.Dino():
      return [*sharding.PROJECTOR, *([sharding.PROTOTYPE_NORM] if not config.objective.norm_last_layer else [])]
    case schema.TokenLabel():
      return [*of_head, *sharding.AUX]
    case schema.Distill():
      return [*of_head, *(sharding.HEAD_DIST if getattr(config.model, 'distilled', False) else ())]
    case _:
      assert_never(config.objective)


def prepare(config: schema.Config, inner: Prepare, *, num_classes: int) -> Prepare:
  """What a task does to batches after the recipe has, and a teacher's labels before it."""
  if config.data.pseudo.source:
    return pseudo.softening(inner, num_classes=num_classes)
  match config.objective:
    case schema.TokenLabel():
      assert isinstance(config.model, schema.ViT)
      grid = config.image_px[0] // config.model.patch, config.image_px[1] // config.model.patch
      return token_targets.targeting(inner, stored=config.objective.map_grid, grid=grid, num_classes=num_classes,
                              classes=config.objective.class_target is schema.ClassTarget.MAP)
    case _:
      return inner


def attach(config: schema.Config, loader: Loader, source: Source) -> Loader:
  """The loader with what a task wants of every example.

  Raises:
    UserError: it is not there, or belongs to other data.
  """
  match config.objective:
    case schema.TokenLabel() as task:
      if not task.maps:
        raise UserError("objective.maps='' names no label maps; want a directory written by --job=prepare "
                        '--config=CONFIG --weights=TEACHER --to=DIR')
      maps = label_maps.LabelMaps(pathlib.Path(local_paths.resolve(task.maps, 'objective.maps')))
      label_maps.check(maps.info, {
          'digest': source.digest, 'num_examples': len(source), 'num_classes': len(source.class_names),
          'grid': tuple(task.map_grid), 'top': task.top, 'scores': label_maps.LOGITS}, folder=maps.folder)
      return token_targets.LabelledLoader(loader, maps)
    case _:
      return pseudo.SoftLoader(loader, source) if isinstance(source, pseudo.Beside) else loader


def batch_shapes(config: schema.Config) -> transforms.Shapes:
  """What `attach` adds to an example."""
  if config.data.pseudo.source:
    top = config.data.pseudo.top
    return {'token_labels': ((1, top), np.int32), 'token_scores': ((1, top), np.float32)}
  match config.objective:
    case schema.TokenLabel() as task:
      shape = (task.map_grid[0] * task.map_grid[1], task.top)
      return {'token_labels': (shape, np.int32), 'token_scores': (shape, np.float32)}
    case _:
      return {}


def watches(config: schema.Config, lengths: Lengths) -> list[Watch]:
  """Metrics of the train step that are a reason for alarm when they are low."""
  match config.objective:
    case schema.Dino() as task if task.collapse.threshold:
      c = task.collapse
      return [Watch(dino.INFORMATION, c.threshold, setting='objective.collapse.threshold',
                    lasting=lengths.steps(c.patience),
                    after=lengths.steps(c.after), stops=c.action is schema.OnCollapse.STOP, advice=ADVICE)]
    case _:
      return []


def _dino(task: schema.Dino, model: schema.Model, backbone: Backbone, lengths: Lengths) -> dino.Dino:
  projector = Projector(task.out_dim, task.hidden_dim, task.bottleneck_dim, not task.norm_last_layer,
                        jnp.dtype(model.dtype.value))
  rates = dino.Rates(teacher_temperature=schedules.ramp(task.teacher_temperature, lengths=lengths),
                     momentum=schedules.ramp(task.momentum, lengths=lengths))
  return dino.Dino(backbone, projector, student_temperature=task.student_temperature, rates=rates,
                   centering=task.centering, center_momentum=task.center_momentum)


def _tokens(backbone: Backbone) -> tuple[TokenBackbone, schema.ViT]:
  """A backbone as one that works on tokens, and its settings."""
  if not isinstance(backbone, vit.ViT):
    raise UserError(f'this objective works on patch tokens, which {type(backbone).__name__} does not give; want a ViT')
  return backbone, backbone.settings
