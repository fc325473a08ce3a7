"""Overrides: settings that the command line changes, `--config.PATH=VALUE`.

An override is `PATH=VALUE`. It sets a setting (`optimizer.lr=3e-4`), replaces a part by one of another name, with the
defaults of that (`optimizer=sgd`, `model=S/16`, `objective=mae`), resets a part to its defaults (`head=default`), or
chooses evaluations (`evals=test,knn`). Parts are replaced before settings inside of them, whatever the order. Another
kind of a part of a ViT keeps the settings that mean the same, such as the hidden width at `model.mlp=swiglu`. absl
stops at the first bad flag with a traceback; here all unknown names (with the nearest known one) and all values that
cannot be read are listed together. The values themselves are parsed by `ml_collections`.
"""
from __future__ import annotations

import copy
import dataclasses
import enum
import inspect
import logging
import typing
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from vit_jax.config import engine, schema
from vit_jax.config.schema import checks, layers
from vit_jax.config.schema.checks import nearest
from vit_jax.core import implementation, lazy
from vit_jax.core.errors import UserError

if TYPE_CHECKING:
  from absl import flags
  from ml_collections import config_flags
else:
  flags, config_flags = lazy.Module('absl.flags'), lazy.Module('ml_collections.config_flags')

ELSEWHERE = {
    'learning_rate': 'lr', 'base_lr': 'lr', 'epochs': 'length', 'num_epochs': 'length', 'steps': 'length',
    'total_steps': 'length', 'wd': 'weight_decay', 'warmup_steps': 'warmup', 'warmup_epochs': 'warmup',
    'batch': 'batch_size', 'bs': 'batch_size', 'image_size': 'image_px', 'img_size': 'image_px',
    'resolution': 'image_px',
    'patch_size': 'patch', 'num_heads': 'heads', 'num_layers': 'depth', 'layers': 'depth', 'hidden_size': 'width',
    'embed_dim': 'width', 'mlp_dim': 'mlp', 'drop_rate': 'dropout', 'drop_path_rate': 'drop_path',
    'num_workers': 'workers', 'dataset': 'source', 'grad_clip': 'clip_norm', 'clip_grad': 'clip_norm',
    'ema_decay': 'ema', 'pretrained': 'init_from', 'norm_eps': 'eps', 'layer_norm_eps': 'eps'}
"""What other programs call a setting, by the last part of its name."""
_UNREADABLE = (ValueError, TypeError, ArithmeticError, SyntaxError, RecursionError, MemoryError)
"""What `ml_collections` raises, beside `flags.Error`, for values that it cannot read; it evaluates tuples as Python."""
_MOST_OF_PART = 8
"""A message names the settings of a part if they are not more than this."""
log = logging.getLogger('vit_jax.config')


def changed(configs: Mapping[str, schema.Config], overrides: list[str], *,
            models: engine.Models | None = None) -> dict[str, schema.Config]:
  """Returns the configs by name, with the same overrides applied to each.

  Raises:
    UserError: lists every unknown name and every value that cannot be read, and which of several configs it is for.
  """
  for override in overrides:
    implementation.note_command_line(override)
  overrides = sorted(overrides, key=lambda override: override.partition('=')[0].count('.'))  # parts come first
  new_configs: dict[str, schema.Config] = {}
  names_by_problem: dict[str, list[str]] = {}
  warnings: dict[str, None] = {}  # an ordered set
  for name, config in configs.items():
    new_configs[name] = copy.deepcopy(config)
    for override in overrides:
      try:
        new_configs[name] = _with_override(new_configs[name], override, models, warnings)
      except UserError as error:
        names_by_problem.setdefault(str(error), []).append(name)
  if names_by_problem:
    lines = [f'{len(names_by_problem)} override{"s" * (len(names_by_problem) > 1)} cannot be applied:']
    for problem, names in names_by_problem.items():
      lines.append(f'  {problem}' + (f' (of {", ".join(names)})' if len(names) < len(configs) else ''))
    raise UserError('\n'.join(lines))
  for warning in warnings:
    log.warning('%s', warning)
  return new_configs


def _with_override(config: schema.Config, override: str, models: engine.Models | None,
                   warnings: dict[str, None]) -> schema.Config:
  """Returns a config with one override applied; adds to `warnings` what a replaced part keeps."""
  path, equals, text = override.partition('=')
  if path == 'evals' and equals:
    return dataclasses.replace(config, evals=_evaluations(config, text))
  parts = {node.name: node for node in engine.nodes(config) if node.is_part}
  if not equals or path not in parts:
    return _with_setting(config, path, text if equals else None)
  old_part, part = parts[path].value, _named_part(config, path, parts[path].declared, text, models)
  if isinstance(part, layers.Part) and type(old_part) is not type(part):
    kept = _shared_changes(old_part, part)
    if kept:
      shown = [f'{name}={checks.shown(value)} (default: {checks.shown(getattr(part, name))})'
               for name, value in kept.items()]
      warnings[f'config.{path}={checks.kind(part)} keeps {", ".join(shown)} of {checks.kind(old_part)}.'] = None
    part = checks.replaced(part, kept)
  return checks.replaced(config, {path: part})


def _evaluations(config: schema.Config, text: str) -> dict[str, schema.Eval]:
  """Returns the evaluations that `test,knn` lists: those of the config by their names, and others by theirs."""
  names = [name.strip() for name in text.split(',') if name.strip()]
  known = [*config.evals, *schema.EVALUATIONS]
  if unknown := [name for name in names if name not in known]:
    raise UserError(f'config.evals: expected names of evaluations ({", ".join(dict.fromkeys(known))}), got '
                    f'{", ".join(unknown)}. Name some of these, with commas.')
  return {name: config.evals.get(name) or schema.EVALUATIONS[name]() for name in names}


def _named_part(config: schema.Config, path: str, declared: Any, name: str, models: engine.Models | None) -> Any:
  """Returns the part that an override names; for an unknown name, the error lists the settings of the part."""
  try:
    return engine.by_name(declared, name, models, from_command_line=True)
  except UserError as error:
    message = f'config.{path}: {error}'
    settings = [setting.name for setting in engine.fields(config) if setting.name.rpartition('.')[0] == path]
    if 'Did you mean' not in message and ':' not in name and 0 < len(settings) <= _MOST_OF_PART:
      message += f' Its settings are config.{", config.".join(settings)}.'
    raise UserError(message) from None


def _shared_changes(old_part: Any, part: Any) -> dict[str, Any]:
  """Returns the settings that mean the same in two kinds of a part, where `old_part` differs from the defaults `part`.

  They are those that a common base class declares: `hidden` of `Mlp` and `SwiGlu`, which `MlpSettings` declares. A
  value of other parts, such as optimizers, may be good for one kind and not for another.
  """
  bases = [kind for kind in type(old_part).__mro__ if kind in type(part).__mro__]
  shared = {name for kind in bases for name in inspect.get_annotations(kind)} & vars(old_part).keys()
  return {name: getattr(old_part, name) for name, default in vars(part).items()
          if name in shared and getattr(old_part, name) != default}


def _with_setting(config: schema.Config, name: str, text: str | None) -> schema.Config:
  """Returns a config with the value that `ml_collections` reads from a text; None = there was no text."""
  settings = {setting.name: setting for setting in engine.fields(config)}
  if name not in settings:
    raise UserError(f'config.{shorten(name)}: expected the name of a setting.{_suggest(config, name, settings)}')
  if text is None:
    raise UserError(f'config.{name}: expected a value, got none. Set --config.{name}=VALUE.')
  value, has_any_length = settings[name].value, Ellipsis in typing.get_args(settings[name].declared)
  if isinstance(value, enum.Enum):  # which `ml_collections` reads by its name
    text = next((choice.name for choice in type(value) if checks.shown(choice) == text.lower()), text)
  elif name == 'data.workers' and text.lower() == 'auto':
    text = str(schema.AUTO_WORKERS)
  try:
    parser, words = flags.FlagValues(), ['vit-jax', f'--config.{name}={text}']
    flag = config_flags.DEFINE_config_dataclass('config', copy.deepcopy(config), flag_values=parser, sys_argv=words)
    parser(words)
    new_config: schema.Config = flag.value
    new_values = [setting.value for setting in engine.fields(new_config) if setting.name == name]
    has_wrong_length = isinstance(value, tuple) and not has_any_length and len(new_values[0]) != len(value)
  except (flags.Error, *_UNREADABLE) as error:
    raise UserError(f'config.{name}: expected {_expected(value, error)}, got {shorten(text)!r}. Correct it.') from None
  if has_wrong_length:
    raise UserError(f'config.{name}: expected {_expected(value, None)}, got {shorten(text)!r}. Correct it.')
  return new_config


def shorten(text: str, most: int = 80) -> str:
  """Returns a text as it is shown in a message."""
  return text if len(text) <= most else f'{text[:most - 20]}… ({len(text):,} characters)'


def _suggest(config: schema.Config, name: str, known: Collection[str]) -> str:
  """Returns the end of a message about an unknown name: that it was removed, or what may be meant."""
  last = name.rpartition('.')[2].lower()
  if any(retired.endswith(f'.{last}') for retired in engine.RETIRED):
    return ' It was removed; leave it out.'
  for path, declared in engine.walk(config):
    if last in engine.kinds(declared):  # such as `swiglu`, the name of a kind of a part
      return f' Did you mean config.{path}={last}?'
  return _nearest(name, known)


def _nearest(name: str, known: Collection[str]) -> str:
  """Returns a suggestion for an unknown name.

  It suggests settings with the same last part, or with what `ELSEWHERE` has for it, first those of the same part of the
  config; or else the nearest name of the same part, or of all.
  """
  part, dot, last = name.rpartition('.')
  in_part = [other.rpartition('.')[2] for other in known if dot and other.rpartition('.')[0] == part]
  same_last = [other for other in known if other.rpartition('.')[2] == ELSEWHERE.get(last, last)]
  matches = [other for other in same_last if other.startswith(f'{part}.')]
  is_deep = '.' in part and in_part  # in a part such as model.mlp only its own settings are meant
  if not matches and not is_deep:
    matches = same_last
  if matches:
    return f' Did you mean config.{" or config.".join(matches[:3])}?'
  if in_part:
    return nearest(last, in_part, f'config.{part}.')
  suggestion = nearest(name, known, 'config.')
  return '' if suggestion.startswith(' Known') else suggestion


def _expected(value: Any, error: BaseException | None) -> str:
  """Returns in words the values that a setting may have, derived from the value that it has."""
  if isinstance(value, enum.Enum):
    return f'one of {", ".join(map(checks.shown, type(value)))}'
  if isinstance(value, tuple):
    return f'{len(value)} values such as {",".join(map(str, value))}' if value else 'values such as 1,2,3'
  names: dict[type, str] = {bool: 'true or false', int: 'a whole number', float: 'a number'}
  return names.get(type(value), f'something else ({error})')
