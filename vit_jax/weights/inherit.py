"""Settings that a run takes from the weights of `config.init_from` because the config does not set them.

A setting counts as set if it is on the command line, or if the recipe gives it another value than the default of the
schema. If a recipe changes one setting of a group, the whole group counts as set; on the command line only the named
setting does. The resolved config is written to `config.json`, from which a resumed run reads it.
"""
from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from vit_jax.config import json_files, schema
from vit_jax.config.schema import Crop, InitSettings, Interpolation, checks
from vit_jax.config.schema.data import RGB
from vit_jax.core import trees
from vit_jax.core.errors import UserError, redacted
from vit_jax.record import storage
from vit_jax.weights import loading, network, preprocess
from vit_jax.weights.network import Weights

log = logging.getLogger('vit_jax.weights')

# Groups of settings: a recipe that sets one of a group sets the complete group.
NETWORK_GROUPS = (('model.gelu',), ('model.norm.eps',), ('model.norm_eps',), ('model.positions.resize',))
NORMALIZATION_GROUP = ('data.recipe.mean', 'data.recipe.std')
RESIZING_GROUP = tuple(f'data.recipe.{name}' for name in (
    'eval_resize_px', 'eval_geometry', 'eval_area', 'interpolation', 'antialias', 'truncate'))

HEAD_SIZES = ('out_dim', 'hidden_dim', 'bottleneck_dim', 'norm_last_layer', 'patch_out_dim', 'patch_bottleneck_dim')
"""Settings of DINO's heads."""

Values = dict[str, Any]


class Resolved(NamedTuple):
  """A config in which all settings are set, and the weights, if they had to be read for it."""
  config: schema.Config
  found: Weights | None


def resolve(config: schema.Config, overridden: Collection[str], workdir: storage.Path,
            found: Weights | None = None) -> Resolved:
  """Returns the config with the unset settings taken from its weights, and logs which.

  Args:
    config: of the run.
    overridden: settings on the command line.
    workdir: of the run. A run with a checkpoint keeps its settings.
    found: the weights if they have been read; None = read them.

  Raises:
    UserError: `init_from` cannot be read, or the command line sets what follows from the weights of the teacher.
  """
  config = _with_feature_teacher(_with_text_tower(config, workdir), overridden, workdir)
  if not config.init_from or config.init_settings is InitSettings.CONFIG:
    return Resolved(config, None)
  if before := _started(config, workdir):
    found, values = None, _of_config(before)
  else:
    found = found or loading.load(config.init_from, view=config.init_view)
    values = _of_weights(found, config)
  chosen = {name: values[name] for name in unset(config, overridden) if name in values}
  if changed := [f'{name}={getattr(values[name], "value", values[name])}' for name in chosen
                 if chosen[name] != _of_config(config).get(name)]:
    log.info('Taken from %s, because the config does not set them: %s', config.init_from, ', '.join(changed))
  return Resolved(dataclasses.replace(_replaced(config, chosen), init_settings=InitSettings.CONFIG), found)


def _with_text_tower(config: schema.Config, workdir: storage.Path) -> schema.Config:
  """Returns the config with the text tower of the weights that its objective begins with, if it does."""
  objective = config.objective
  if not isinstance(objective, schema.Contrastive) or not objective.text.weights:
    return config
  before = _started(config, workdir)
  if before and isinstance(before.objective, schema.Contrastive) and (
      before.objective.text.weights == redacted(objective.text.weights)):
    found = dataclasses.replace(before.objective.text, weights=objective.text.weights)
  else:
    from vit_jax.weights import text as texts  # only here: few runs have a text tower
    found = texts.settings(objective.text)
  return dataclasses.replace(config, objective=dataclasses.replace(objective, text=found))


def _with_feature_teacher(config: schema.Config, overridden: Collection[str], workdir: storage.Path) -> schema.Config:
  """Returns the config with the network of its frozen teacher, if it has one, and with the sizes of its heads."""
  objective = config.objective
  if not isinstance(objective, schema.FeatureDistill | schema.Dinov2Distill) or (
      not objective.teacher.weights):
    return config
  own, before = objective.teacher, _started(config, workdir)
  if before and isinstance(before.objective, type(objective)) and (
      before.objective.teacher.weights == redacted(own.weights)):
    teacher = dataclasses.replace(before.objective.teacher, weights=own.weights, view=own.view, px=own.px)
    sizes = {name: getattr(before.objective, name) for name in HEAD_SIZES if hasattr(objective, name)}
  else:
    has_heads = isinstance(objective, schema.Dinov2Distill)
    found = loading.load(own.weights, view=own.view, first='teacher' if has_heads else '')
    teacher, sizes = feature_teacher(own, found, config.model), head_sizes(found) if has_heads else {}
    if changed := [f'{name}={value}' for name, value in sizes.items() if getattr(objective, name) != value]:
      log.info('Taken from the heads of %s: %s', own.weights, ', '.join(changed))
  made = dataclasses.replace(objective, teacher=teacher, **sizes)
  _check_not_set(objective, made, overridden)
  return dataclasses.replace(config, objective=made)


def _check_not_set(given: schema.Objective, made: schema.Objective, overridden: Collection[str]) -> None:
  """Raises UserError with every setting of the command line that the weights of a teacher have otherwise."""
  problems = []
  for name in sorted(overridden):
    part, _, rest = name.partition('.')
    is_taken = rest in HEAD_SIZES or (rest.startswith('teacher.') and not rest.endswith('.dtype'))
    if part != 'objective' or not is_taken:
      continue
    own, new = (functools.reduce(getattr, rest.split('.'), one) for one in (given, made))
    if own != new and not dataclasses.is_dataclass(own):
      problems.append(f'{name}: expected {checks.shown(new)}, as in objective.teacher.weights, got '
                      f'{checks.shown(own)}. Leave it out, since the network of the teacher and the sizes of its heads '
                      'follow from its weights.')
  if problems:
    raise UserError('\n'.join(problems))


def feature_teacher(settings: schema.FeatureTeacher, found: Weights, student: schema.Model) -> schema.FeatureTeacher:
  """Returns the settings of a teacher with network and normalization of its weights, in the dtype of the student."""
  model = dataclasses.replace(found.model, dtype=student.dtype)
  return dataclasses.replace(settings, model=model, mean=tuple(found.preprocess.mean), std=tuple(found.preprocess.std))


def head_sizes(found: Weights) -> Values:
  """Returns the settings of DINO's heads that weights have.

  Raises:
    UserError: they have none.
  """
  if 'projector' not in found.params:
    raise UserError(f'objective.teacher.weights: expected a run of DINOv2, whose heads teach, got {found.source} '
                    'without heads. Use objective FeatureDistill, which needs none.')
  shapes = {name: leaf.shape for name, leaf in trees.flatten(found.params).items()}
  bottleneck, num = shapes['projector/prototypes/kernel']
  patches, num_patches = shapes.get('patch_projector/prototypes/kernel', (256, 0))  # 256: not used, the default
  return {'out_dim': num, 'hidden_dim': shapes['projector/mlp1/kernel'][-1], 'bottleneck_dim': bottleneck,
          'norm_last_layer': 'projector/prototypes/norm' not in shapes, 'patch_out_dim': num_patches,
          'patch_bottleneck_dim': patches}


def unset(config: schema.Config, overridden: Collection[str]) -> list[str]:
  """Returns the names of the settings that weights can provide, and that neither recipe nor command line sets."""
  groups = (*NETWORK_GROUPS, *([NORMALIZATION_GROUP] if config.data.channels == RGB else []),
            *([RESIZING_GROUP] if config.init_settings is InitSettings.WEIGHTS else []))
  now = _of_config(config)
  usual = _of_config(dataclasses.replace(config, model=_with_defaults(config.model), data=schema.Data()))
  open_groups = [group for group in groups
                 if all(name in overridden or now.get(name) == usual.get(name) for name in group)]
  return [name for group in open_groups for name in group if name in now and name not in overridden]


def _with_defaults(model: schema.Model) -> schema.Model:
  """Returns a network with the defaults of its class; a setting without a default keeps its value."""
  defaults: dict[str, Any] = {
      field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
      for field in dataclasses.fields(model)
      if field.init and (field.default, field.default_factory) != (dataclasses.MISSING,) * 2}
  return dataclasses.replace(model, **defaults)


def _started(config: schema.Config, workdir: storage.Path) -> schema.Config | None:
  """Returns the saved config of the run in `workdir`, if it was initialized with the same weights."""
  own, saved = workdir / 'config.json', workdir / 'checkpoints'
  if not own.is_file() or not saved.is_dir() or not any(path.name.isdigit() for path in saved.iterdir()):
    return None
  with storage.local(own) as path:
    before = json_files.read(path)
  return before if before.init_from == redacted(config.init_from) and type(before.model) is type(config.model) else None


def _of_config(config: schema.Config) -> Values:
  """Returns every setting that weights can provide, by dotted name."""
  recipe = {name: getattr(config.data.recipe, name.removeprefix('data.recipe.')) for name in (
      *NORMALIZATION_GROUP, *RESIZING_GROUP)}
  return {**_of_model(config.model), **recipe}


def _of_model(model: schema.Model) -> Values:
  """Returns those settings of a network that weights can provide and that it has."""
  found = {name: network.setting(model, name.removeprefix('model.')) for name, *_ in NETWORK_GROUPS}
  return {name: value for name, value in found.items() if value is not None}


def _of_weights(found: Weights, config: schema.Config) -> Values:
  """Returns the values of these settings in the weights, for images of the run's size."""
  p = preprocess.scaled(found.preprocess, config.image_px)
  values: Values = {f'data.recipe.{name}': value for name, value in preprocess.recipe_values(p).items()}
  values['data.recipe.eval_area'] = False
  if p.interpolation is Interpolation.AREA and config.data.recipe.crop is not Crop.RESIZE:
    values |= {'data.recipe.eval_area': True, 'data.recipe.interpolation': Interpolation.BILINEAR}  # as in big_vision
  if type(found.model) is type(config.model):
    values |= _of_model(found.model)
  return values


def _replaced(config: schema.Config, values: Mapping[str, Any]) -> schema.Config:
  """Returns the config with some settings of model and recipe replaced."""
  model, recipe = ({name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
                   for prefix in ('model.', 'data.recipe.'))
  return dataclasses.replace(
      config, model=checks.replaced(config.model, model),
      data=dataclasses.replace(config.data, recipe=dataclasses.replace(config.data.recipe, **recipe)))
