"""Overrides of the command line, applied to configs.

An override is `PATH=VALUE`. It sets a setting (`optimizer.lr=3e-4`), replaces a part by one of another name, with the
defaults of that (`optimizer=sgd`, `model=S/16`, `objective=mae`), resets a part to its defaults (`head=default`), or
chooses evaluations (`evals=test,knn`). Parts are replaced first, whatever the order. Another kind of a part of a ViT
keeps the settings that mean the same, such as the hidden width at `model.mlp=swiglu`.

absl stops at the first bad flag with a traceback; here all unknown names (with the nearest known one) and all values
that cannot be read are listed together. The values themselves are parsed by `ml_collections`.
"""
from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import inspect
import logging
import typing
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from vit_jax.config import evaluations, parts, schema
from vit_jax.config.schema import checks, layers
from vit_jax.config.schema.checks import nearest
from vit_jax.core import implementation, lazy
from vit_jax.core.errors import UserError

if TYPE_CHECKING:
  from absl import flags
  from ml_collections import config_flags
else:
  flags, config_flags = lazy.Module('absl.flags'), lazy.Module('ml_collections.config_flags')

log = logging.getLogger('vit_jax.config')

UNREADABLE = (ValueError, TypeError, ArithmeticError, SyntaxError, RecursionError, MemoryError)
"""What `ml_collections` raises, beside `flags.Error`, for values that it cannot read; it evaluates tuples as Python."""


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


MOST_SHOWN = 8
"""Settings of a part that a message lists."""


class Setting(NamedTuple):
  """A setting that can be overridden: dotted name, value, and whether it is a tuple of any length."""
  name: str
  value: Any
  is_open: bool


def fields(config: Any, prefix: str = '') -> Iterator[Setting]:
  """Yields every setting that can be overridden."""
  if isinstance(config, dict):
    items = [(name, value, False) for name, value in config.items()]
  else:
    items = [(name, getattr(config, name), is_open) for name, is_open in _declared(config.__class__)]
  for name, value, is_open in items:
    if dataclasses.is_dataclass(value) or isinstance(value, dict):
      yield from fields(value, f'{prefix}{name}.')
    else:
      yield Setting(f'{prefix}{name}', value, is_open)


@functools.cache
def _declared(kind: type) -> tuple[tuple[str, bool], ...]:
  """The names of the settings of a part, and which of them are tuples of any length."""
  return tuple((field.name, Ellipsis in typing.get_args(field.type)) for field in dataclasses.fields(kind))


def apply(configs: Mapping[str, schema.Config], overrides: list[str], *,
             models: parts.Models | None = None) -> dict[str, schema.Config]:
  """Returns the configs by name, with the same overrides applied to each.

  Raises:
    UserError: lists every unknown name and every value that cannot be read, and which of several configs it is for.
  """
  for one in overrides:
    implementation.note_command_line(one)
  problems: dict[str, list[str]] = {}
  found, kept = {}, dict[str, None]()
  for name, config in configs.items():
    config, rest, wrong = _with_parts(copy.deepcopy(config), overrides, models, kept)
    named = [_by_name(config, one) for one in rest]
    wrong += [text for one in named for text in _problems(config, one)]
    for text in wrong:
      problems.setdefault(text, []).append(name)
    if not wrong:
      found[name] = _parse(config, named) if named else config
  if problems:
    raise UserError(f'{len(problems)} override{"s" * (len(problems) > 1)} cannot be applied:\n' + '\n'.join(
        f'  {text}' + (f' (of {", ".join(names)})' if len(names) < len(configs) else '')
        for text, names in problems.items()))
  for text in kept:
    log.warning('%s', text)
  return found


def _with_parts(config: schema.Config, overrides: list[str], models: parts.Models | None,
                kept: dict[str, None]) -> tuple[schema.Config, list[str], list[str]]:
  """The config with other parts, the overrides of single settings, and the problems of those of parts.

  What parts keep is added to `kept`, as messages.
  """
  rest, wrong = [], []
  for one in sorted(overrides, key=lambda one: one.partition('=')[0].count('.')):
    path, equals, value = one.partition('=')
    declared = dict(parts.walk(config)).get(path)
    try:
      if path == 'evals' and equals:
        config = dataclasses.replace(config, evals=_evaluations(config, value))
      elif declared is not None and equals:
        made = parts.by_name(declared, value, models, from_command_line=True)
        _set(config, path, _kept(_get(config, path), made, path, kept))
      else:
        rest.append(one)
    except UserError as error:
      inside = [setting.name for setting in fields(config) if setting.name.rpartition('.')[0] == path]
      is_hint = 'Did you mean' not in str(error) and ':' not in value and 0 < len(inside) <= MOST_SHOWN
      of_part = f' Its settings are config.{", config.".join(inside)}.' if is_hint else ''
      wrong.append(f'config.{path}: {error}{of_part}')
  return config, rest, wrong


def _kept(before: Any, part: Any, path: str, kept: dict[str, None]) -> Any:
  """Returns a part of a ViT with the settings of the one before it that mean the same, if the kind changes.

  They are those that a class above both kinds declares, such as `hidden` of `MlpSettings`. Elsewhere, for example in
  optimizers, a value that is good for one kind is not good for another.
  """
  if not isinstance(part, layers.Part) or type(before) is type(part):
    return part
  shared = {name for kind in type(before).__mro__ if kind in type(part).__mro__
            for name in inspect.get_annotations(kind)}
  usual = {name: value for name, value in vars(part).items() if name in shared & vars(before).keys()}
  values = {name: value for name in usual if (value := getattr(before, name)) != usual[name]}
  if values:
    shown = ', '.join(f'{name}={checks.shown(value)} (default: {checks.shown(usual[name])})'
                      for name, value in values.items())
    kept[f'config.{path}={checks.kind(part)} keeps {shown} of {checks.kind(before)}.'] = None
  return checks.replaced(part, values)


def _get(config: Any, path: str) -> Any:
  """Returns the part at a dotted path."""
  for name in path.split('.'):
    config = config[name] if isinstance(config, dict) else getattr(config, name)
  return config


def _set(config: Any, path: str, part: Any) -> None:
  """Replaces the part at a dotted path."""
  first, dot, rest = path.partition('.')
  if dot:
    _set(config[first] if isinstance(config, dict) else getattr(config, first), rest, part)
  elif isinstance(config, dict):
    config[first] = part
  else:
    setattr(config, first, part)


def _evaluations(config: schema.Config, text: str) -> dict[str, schema.Eval]:
  """The evaluations that `test,knn` lists: those of the config by their names, and others by theirs."""
  names = [name.strip() for name in text.split(',') if name.strip()]
  known = [*config.evals, *evaluations.NAMES]
  if unknown := [name for name in names if name not in known]:
    raise UserError(f'expected names of evaluations ({", ".join(dict.fromkeys(known))}), got {", ".join(unknown)}. '
                    'Name some of these, with commas.')
  return {name: config.evals.get(name) or evaluations.named(name) for name in names}


def _parse(config: schema.Config, overrides: list[str]) -> schema.Config:
  values, argv = flags.FlagValues(), ['vit-jax', *(f'--config.{one}' for one in overrides)]
  holder = config_flags.DEFINE_config_dataclass('config', copy.deepcopy(config), flag_values=values, sys_argv=argv)
  values(argv)
  return holder.value


def shorten(text: str, most: int = 80) -> str:
  """Returns a text as it is shown in a message."""
  return text if len(text) <= most else f'{text[:most - 20]}… ({len(text):,} characters)'


def _by_name(config: schema.Config, override: str) -> str:
  """The override with a choice spelled as its name, which is what `config_flags` reads, where it gives its value."""
  name, equals, value = override.partition('=')
  now = next((setting.value for setting in fields(config) if setting.name == name), None)
  if isinstance(now, enum.Enum):
    value = next((choice.name for choice in type(now) if checks.shown(choice) == value.lower()), value)
  elif name == 'data.workers' and value.lower() == 'auto':
    value = str(schema.AUTO_WORKERS)
  return f'{name}{equals}{value}'


def _problems(config: schema.Config, override: str) -> Iterator[str]:
  name, equals, value = override.partition('=')
  known = {setting.name: setting for setting in fields(config)}
  if name not in known:
    yield f'config.{shorten(name)}: expected the name of a setting.{_of_kind(config, name) or _nearest(name, known)}'
  elif not equals:
    yield f'config.{name}: expected a value, got none. Set --config.{name}=VALUE.'
  else:
    now = known[name].value
    try:
      parsed = {setting.name: setting.value for setting in fields(_parse(config, [override]))}
    except (flags.Error, *UNREADABLE) as error:
      yield f'config.{name}: expected {_expected(now, error)}, got {shorten(value)!r}.'
      return
    if isinstance(now, tuple) and not known[name].is_open and len(parsed[name]) != len(now):
      yield f'config.{name}: expected {_expected(now, None)}, got {shorten(value)!r}.'


def _of_kind(config: schema.Config, name: str) -> str:
  """The end of a message about an unknown name that is that of a kind of a part, such as `swiglu`; '' if it is none."""
  last = name.rpartition('.')[2].lower()
  found = [path for path, declared in parts.walk(config) if last in parts.kinds(declared)]
  return f' Did you mean config.{found[0]}={last}?' if found else ''


def _nearest(name: str, known: Collection[str]) -> str:
  """The end of a message about an unknown name.

  It suggests settings with the same last part, or what `ELSEWHERE` has for it, first those of the same part of the
  config; or else the nearest name of the same part, or of all.
  """
  part, dot, last = name.rpartition('.')
  inside = [one.rpartition('.')[2] for one in known if one.rpartition('.')[0] == part and dot]
  wanted = ELSEWHERE.get(last, last)
  same = [one for one in known if one.rpartition('.')[2] == wanted]
  is_deep = '.' in part and inside  # of a part such as model.mlp only its own settings are meant
  if found := [one for one in same if one.startswith(f'{part}.')] or ([] if is_deep else same):
    return f' Did you mean config.{" or config.".join(found[:3])}?'
  if inside:
    return nearest(last, inside, f'config.{part}.')
  hint = nearest(name, known, 'config.')
  return '' if hint.startswith(' Known') else hint


def _expected(now: Any, error: BaseException | None) -> str:
  """The values that a setting may have, from the one it has."""
  match now:
    case enum.Enum():
      return f'one of {", ".join(map(checks.shown, type(now)))}'
    case bool():
      return 'true or false'
    case int():
      return 'a whole number'
    case float():
      return 'a number'
    case tuple():
      return f'{len(now)} values such as {",".join(map(str, now))}' if now else 'values such as 1,2,3'
    case _:
      return f'something else ({error})'
