"""Settings that a run takes from the weights of `config.init_from` because the config does not set them.

A setting counts as set if it is on the command line, or if the recipe gives it another value than the default of the
schema. If a recipe changes one setting of a group, the whole group counts as set; on the command line only the named
setting does. The resolved config is written to `config.json`, from which a resumed run reads it.
"""
from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from vit_jax.config import engine, schema
from vit_jax.config.schema import Crop, InitSettings, Interpolation, checks
from vit_jax.config.schema.data import RGB
from vit_jax.core.errors import UserError, redacted
from vit_jax.objectives import kinds
from vit_jax.record import storage
from vit_jax.weights import loading, network, preprocess
from vit_jax.weights.network import Weights

log = logging.getLogger('vit_jax.weights')

# Groups of settings: a recipe that sets one of a group sets the complete group.
NETWORK_GROUPS = (('model.gelu',), ('model.norm.eps',), ('model.norm_eps',), ('model.positions.resize',))
NORMALIZATION_GROUP = ('data.recipe.mean', 'data.recipe.std')
RESIZING_GROUP = tuple(f'data.recipe.{name}' for name in (
    'eval_resize_px', 'eval_geometry', 'eval_area', 'interpolation', 'antialias', 'truncate'))

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
  config = _with_networks(config, overridden, workdir)
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


def _with_networks(config: schema.Config, overridden: Collection[str], workdir: storage.Path) -> schema.Config:
  """Returns the config with the settings of the objective that follow from weights, such as a teacher's network."""
  spec = kinds.of(config)
  for name, begin in kinds.begins_with(config).items():
    if not begin.weights or not spec.from_weights:
      continue
    before, objective = _started(config, workdir), config.objective
    if before and type(before.objective) is type(objective) and (
        network.setting(before.objective, f'{name}.weights') == redacted(begin.weights)):
      values = {setting: network.setting(before.objective, setting) for setting in spec.from_weights}
    elif begin.is_text:
      from vit_jax.weights import text as texts  # only here: few runs have a text tower
      tower = texts.settings(getattr(objective, name))
      values = {setting: getattr(tower, setting.partition('.')[2]) for setting in spec.from_weights}
    else:
      values = spec.settings_from(name, loading.load(begin.weights, view=begin.view, first=begin.first))
      if changed := [f'{setting}={value}' for setting, value in values.items()
                     if '.' not in setting and getattr(objective, setting) != value]:
        log.info('Taken from the heads of %s: %s', begin.weights, ', '.join(changed))
    made = checks.replaced(objective, values)
    if not begin.is_text:
      _check_not_set(objective, made, name, spec.from_weights, overridden)
    config = dataclasses.replace(config, objective=made)
  return config


def _check_not_set(given: schema.Objective, made: schema.Objective, name: str, from_weights: Collection[str],
                   overridden: Collection[str]) -> None:
  """Raises UserError with every setting of the command line that the weights of network `name` have otherwise."""
  problems = []
  for path in sorted(overridden):
    part, _, setting = path.partition('.')
    is_taken = any(setting == taken or setting.startswith(f'{taken}.') for taken in from_weights)
    if part != 'objective' or not is_taken or setting.endswith('.dtype'):
      continue
    own, new = (network.setting(objective, setting) for objective in (given, made))
    if own != new and not dataclasses.is_dataclass(own):
      problems.append(f'{path}: expected {checks.shown(new)}, as in objective.{name}.weights, got {checks.shown(own)}. '
                      f'Leave it out, since the network of the {name} and the sizes of its heads follow from its '
                      'weights.')
  if problems:
    raise UserError('\n'.join(problems))


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
  required = {field.name: getattr(model, field.name) for field in dataclasses.fields(model) if field.init
              and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING}
  return type(model)(**required)


def _started(config: schema.Config, workdir: storage.Path) -> schema.Config | None:
  """Returns the saved config of the run in `workdir`, if it was initialized with the same weights."""
  own, saved = workdir / 'config.json', workdir / 'checkpoints'
  if not own.is_file() or not saved.is_dir() or not any(path.name.isdigit() for path in saved.iterdir()):
    return None
  with storage.local(own) as path:
    before = engine.read_file(path)
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
