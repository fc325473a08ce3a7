"""Configs from plain values, JSON and overrides, and back; parts of configs by name.

A part that may be of several types, such as `model` or `optimizer`, is a dict that names its type: `type: AdamW`, as
`config.json` has it, or `name: adamw`; a person's own type is `module:Class`, whose module is imported only if the
reader needs it and if it may be run (`core/implementation.py`): a file may be another person's. A text alone is a part
with the defaults of its type: `optimizer: adamw`. For a model it may also be the name of a size: `model: S/16`, or
`name: S/16` beside further settings.

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
import functools
import inspect
import json
import keyword
import logging
import pathlib
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from vit_jax.config import schema
from vit_jax.config.schema import checks, layers, ranges
from vit_jax.config.schema.checks import Settings, nearest
from vit_jax.core import documents, implementation, lazy
from vit_jax.core.errors import UserError, printable, redacted

if TYPE_CHECKING:
  from absl import flags
  from ml_collections import config_flags
else:
  flags, config_flags = lazy.Module('absl.flags'), lazy.Module('ml_collections.config_flags')

Models = Callable[[str], schema.Model]
"""The model of a size by name, such as `S/16`. Raises UserError for unknown names."""
RETIRED: Mapping[str, tuple[Any, ...] | None] = {
    'Data.placement': ('anywhere',), 'Data.verify_shards': ('lazy', 'first', 'no'), 'Data.cache_gib': None,
    'Data.cache_dir': None, 'ViT.patch_dropout_parts': ([],),
    'Checkpoints.local': None, 'Checkpoints.local_dir': None,
    'LeJepa.center': ('global',), 'LeJepa.sample': ('view',), 'LeJepa.weighting': ('convex',),
    'Adafactor.b2_power': (.8,), 'Adafactor.min_dim_size_to_factor': (32,), 'Muon.nesterov': (True,),
    'Optimizer.layer_groups': ('mae',), 'ConvStem.norm_momentum': (.9,), 'AxialResNet.norm_momentum': (.9,),
    'EfficientNet.norm_momentum': (.99,), 'Retrieval.ranks': ([1, 5, 10],), 'CaptionRetrieval.ranks': ([1, 5, 10],),
    'Logistic.tolerance': (1e-6,), 'Segmentation.tolerance': (1e-6,)}
"""Settings of earlier versions, with the values that change nothing; None = all. No trained network depends on them."""
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
_MOST_LISTED, _MOST_OF_PART = 40, 8
"""Settings that one message names: those with problems, and those of a part."""
_ADVICE = 'The command that trained the run writes it again; other jobs also take --config=NAME.'
log = logging.getLogger('vit_jax.config')


def to_json(config: schema.Config) -> str:
  """Returns the complete config as JSON; each part names its type.

  Passwords and tokens of addresses are left out.
  """
  return json.dumps(to_plain(config), indent=2) + '\n'


def to_plain(value: Any) -> Any:
  """Returns a config, or a part of it, as parsed JSON; passwords and tokens of addresses are left out."""
  if dataclasses.is_dataclass(value):
    return {'type': implementation.type_name(type(value)),
            **{f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}}
  if isinstance(value, dict):
    return {str(k): to_plain(v) for k, v in value.items()}
  if isinstance(value, (tuple, list)):
    return [to_plain(v) for v in value]
  if isinstance(value, str):
    return redacted(value)
  return value.value if isinstance(value, enum.Enum) else value


def flat(plain: Any, prefix: str = '') -> dict[str, Any]:
  """Returns the settings of a config as parsed JSON, or of a part of it, by dotted names such as `model.width`."""
  if not isinstance(plain, Mapping):
    return {prefix: plain}
  return {name: value for key, child in plain.items()
          for name, value in flat(child, f'{prefix}.{key}'.strip('.')).items()}


def read_file(path: pathlib.Path, *, code: str = '') -> schema.Config:
  """Reads the config of a file such as `config.json` of a run directory; `code` as `read` has it.

  Raises:
    UserError: it is not such a file; lists every setting that is unknown or has a value of another type.
  """
  text = documents.read_text(path, expected='a config as JSON', advice=_ADVICE)
  try:
    return from_json(text, code=code)
  except UserError as error:
    got = error if text.strip() else 'an empty file'
    separator = '\n' if '\n' in str(got) else '. '
    raise UserError(f'{path}: expected a config as JSON, got {got}{separator}{_ADVICE}') from None


def from_json(text: str, *, code: str = '') -> schema.Config:
  """Returns the config that `to_json` wrote. Absent settings have their defaults; `code` as `read` has it.

  Raises:
    UserError: lists every setting that is unknown or has a value of another type.
  """
  try:
    saved = documents.parse(text, nan=True)
  except ValueError as error:
    raise UserError(f'text that is not JSON: {error}') from None
  return read(saved, code=code)


def read(value: Any, *, models: Models | None = None, code: str = '') -> schema.Config:
  """Reads a config from nested dicts, in which absent settings have their defaults.

  Args:
    value: nested dicts and lists, with choices as their texts.
    models: sizes of models by name.
    code: the part of the config whose code is needed, such as `model`: types of a person's own in others are not
      imported, and get a stand-in. '' = all parts.

  Raises:
    UserError: lists every name that is unknown and every value that is not of the type of its setting.
  """
  reader = _Reader(models, code)
  config = reader.part(value, schema.Config, 'config')
  if found := reader.problems:
    raise UserError('\n'.join([f'{len(found)} setting{"s" * (len(found) > 1)} cannot be read:',
                               *(f'  {one}' for one in found[:_MOST_LISTED]),
                               *[f'  … and {len(found) - _MOST_LISTED} more'] * (len(found) > _MOST_LISTED)]))
  return config


def kinds(declared: Any) -> dict[str, type]:
  """Returns the types of a part by the names that a person uses: `{'adamw': AdamW, …}`; {} if there is one."""
  if not isinstance(declared, types.UnionType):
    return {}
  found = [kind for kind in typing.get_args(declared) if dataclasses.is_dataclass(kind) and kind is not base(declared)]
  return {kind.__name__.lower(): kind for kind in found if isinstance(kind, type)} if len(found) > 1 else {}


def base(declared: Any) -> type | None:
  """Returns the member of a union that a person's own types inherit from: the one that names no implementation."""
  found = [kind for kind in typing.get_args(declared) if isinstance(kind, type) and issubclass(kind, Settings)]
  named = [kind for kind in found if hasattr(kind, 'implementation')]
  return next((kind for kind in found if named and kind not in named), None)


def by_name(declared: Any, name: str, models: Models | None, *, from_command_line: bool = False) -> Any:
  """Returns the part with this name, with the defaults of its type or of its size.

  The name of a part of one type is `default`. The name comes from the command line if `from_command_line`.

  Raises:
    UserError: there is no such part; says what was expected, without the name of the setting.
  """
  known = kinds(declared) or {'default': declared}
  if kind := known.get(name.lower().replace('_', '').replace('-', '')):
    return kind()
  if own := _own_kind(declared, name, from_command_line=from_command_line):
    return own()
  is_model = schema.ViT in known.values() and models is not None
  if models is not None and is_model and set('/-') & set(name):
    try:
      return models(name)
    except UserError as error:
      raise UserError(str(error).removeprefix('model: ')) from None
  expected = (', '.join(known) + ' or a size such as S/16' * is_model
              + ', or MODULE:CLASS of your own' * (base(declared) is not None))
  near = nearest(name, known)
  raise UserError(f'expected {expected}, got {name[:60]!r}.' + ('' if near.startswith(' Known') else near))


def _own_kind(declared: Any, name: str, *, from_command_line: bool = False) -> type | None:
  """Imports a person's own type by its name `module:Class`; `from_command_line` if the name comes from there.

  Returns None if the name has another form, or the part takes none.

  Raises:
    UserError: there is no such class, or it is not a dataclass with the base of the part and an implementation.
  """
  parent = base(declared)
  if parent is None or ':' not in name:
    return None
  found = implementation.load(name, from_command_line=from_command_line)
  if not (isinstance(found, type) and issubclass(found, parent) and dataclasses.is_dataclass(found)
          and hasattr(found, 'implementation')):
    raise UserError(f'expected a dataclass that inherits from {parent.__name__} and names its implementation, got '
                    f'{name}. Name another class, or let it inherit.')
  return found


def _stand_in(declared: Any, name: str, settings: Mapping[str, Any]) -> type | None:
  """Returns a type with the name of a person's own and fields for some settings, without importing its module.

  For a config that is read for other parts than this one. Returns None where `_own_kind` does; the code that the type
  stands for is not found.
  """
  parent = base(declared)
  if parent is None or ':' not in name:
    return None
  own = [key for key in settings if key.isidentifier() and not keyword.iskeyword(key) and not hasattr(parent, key)
         and key not in ('type', *parent.__annotations__)]
  module, _, kind = name.partition(':')
  found = dataclasses.make_dataclass(kind if kind.isidentifier() else 'Own', [
      (key, Any, dataclasses.field(default=None)) for key in own], bases=(parent,), namespace={'implementation': ''})
  found.__module__, found.__qualname__ = module, kind
  return found


class _Reader:
  """Turns plain values into settings, and collects what is wrong with them."""

  def __init__(self, models: Models | None, code: str = '') -> None:
    self._models, self._code = models, code
    self.problems: list[str] = []

  def part(self, value: Any, declared: Any, name: str, base: Any = None) -> Any:
    """Reads a settings dataclass from a mapping; settings that it lacks are those of `base`, or the defaults."""
    kind = implementation.type_name(declared)
    if not isinstance(value, Mapping) or value.get('type', kind) != kind:
      return self._wrong(value, f'settings of type {kind}', name)
    known = {field.name: field.type for field in dataclasses.fields(declared)}
    found = {}
    for key, one in value.items():
      if key in known:
        found[key] = self._typed(one, known[key], f'{name}.{key}')
      elif key != 'type':
        self._unknown(one, declared, printable(str(key)), name)
    for field in dataclasses.fields(declared):
      if base is None and field.name not in found and (
          field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING):
        return self._wrong(None, 'a value', f'{name}.{field.name}')
    return dataclasses.replace(base, **found) if base is not None else declared(**found)

  def _unknown(self, value: Any, declared: type, key: str, name: str) -> None:
    """Notes a setting that the part at `name` does not have, unless it is of an earlier version and changes nothing."""
    retired = [RETIRED[of] for of in (f'{kind.__name__}.{key}' for kind in declared.__mro__) if of in RETIRED]
    if not retired:
      self.problems.append(f'{name}.{key[:60]}: expected the name of a setting, got {key[:60]!r}.'
                           + nearest(key, [field.name for field in dataclasses.fields(declared)], f'{name}.'))
    elif retired[0] is not None and value not in retired[0] and not self._code:  # else the network alone is read
      self._wrong(value, f'{" or ".join(map(_text, retired[0]))}, as this setting was removed', f'{name}.{key}')

  def _typed(self, value: Any, declared: Any, name: str) -> Any:
    """Returns `value` as the type that its field declares; None, and a problem, if it is of another."""
    arguments = typing.get_args(declared)
    if isinstance(declared, types.UnionType):
      return self._one_of(value, declared, name)
    if dataclasses.is_dataclass(declared):
      return self.part(value, declared, name)
    if typing.get_origin(declared) is tuple and isinstance(value, list | tuple):
      each = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
      if len(each) != len(value):
        return self._wrong(value, f'{len(each)} values', name)
      return tuple(self._typed(v, k, f'{name}[{i}]') for i, (v, k) in enumerate(zip(value, each, strict=True)))
    if typing.get_origin(declared) is dict and isinstance(value, Mapping):
      return {key: self._typed(one, arguments[1], f'{name}.{key}') for key, one in value.items()}
    if isinstance(declared, type) and issubclass(declared, enum.Enum):
      found = next((choice for choice in declared if value in (choice, choice.value)), None)
      expected = f'one of {", ".join(checks.shown(choice) for choice in declared)}'
      return self._wrong(value, expected, name) if found is None else found
    if declared is float and type(value) is int and abs(value) <= ranges.MOST:
      return float(value)
    return value if declared is Any or type(value) is declared else self._wrong(value, ranges.type_text(declared), name)

  def _one_of(self, value: Any, declared: Any, name: str) -> Any:
    """A value of a field that may be of several types."""
    parts = {kind.__name__: kind for kind in typing.get_args(declared)
             if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind is not base(declared)}
    plain = [kind for kind in typing.get_args(declared) if kind not in (*parts.values(), base(declared))]
    settings: dict[Any, Any] = {}
    try:
      if isinstance(value, Mapping):
        kind = said if isinstance(said := value.get('type'), str) else ''
        is_needed = not self._code or f'{name}.'.startswith(f'config.{self._code}.')
        own = _own_kind(declared, kind) if is_needed else _stand_in(declared, kind, value)
        if found := parts.get(kind) or own or (len(parts) == 1 and next(iter(parts.values()))):
          return self.part(value, found, name)
        value, settings = value.get('name', value.get('type')), {k: v for k, v in value.items() if k != 'name'}
      elif plain:
        return self._typed(value, plain[0], name)
      if not isinstance(value, str):
        raise UserError(f'expected settings with a type, one of {", ".join(parts)}, got {_text(value)}. '
                        'Set `type` to one of these.')
      usual = by_name(declared, value, self._models)
    except UserError as error:
      self.problems.append(f'{name}: {error}')
      return None
    return self.part({k: v for k, v in settings.items() if k != 'type'}, type(usual), name, usual)

  def _wrong(self, value: Any, expected: str, name: str) -> Any:
    self.problems.append(f'{name}: expected {expected}, got {_text(value)}.')


def _text(value: Any) -> str:
  """A plain value as a message shows it: as JSON."""
  try:
    return json.dumps(value)[:60]
  except (TypeError, ValueError, RecursionError):
    return repr(value)[:60]


def walk(config: Any, declared: Any = None, path: str = '') -> Iterator[tuple[str, Any]]:
  """Yields the dotted path and the declared type of each part in a config."""
  if dataclasses.is_dataclass(config):
    if path:
      yield path, declared
    for field in dataclasses.fields(config):
      yield from walk(getattr(config, field.name), field.type, f'{path}.{field.name}'.lstrip('.'))
  elif isinstance(config, dict):
    for name, one in config.items():
      yield from walk(one, typing.get_args(declared)[1], f'{path}.{name}')


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


def changed(configs: Mapping[str, schema.Config], overrides: list[str], *,
            models: Models | None = None) -> dict[str, schema.Config]:
  """Returns the configs by name, with the same overrides applied to each.

  Raises:
    UserError: lists every unknown name and every value that cannot be read, and which of several configs it is for.
  """
  for override in overrides:
    implementation.note_command_line(override)
  problems: dict[str, list[str]] = {}
  found, kept = copy.deepcopy(dict(configs)), dict[str, None]()
  for name in found:
    for override in sorted(overrides, key=lambda one: one.partition('=')[0].count('.')):
      path, equals, value = override.partition('=')
      try:
        if path == 'evals' and equals:
          found[name] = dataclasses.replace(found[name], evals=_evaluations(found[name], value))
        elif equals and (declared := dict(walk(found[name])).get(path)) is not None:
          found[name] = _with_part(found[name], path, declared, value, models, kept)
        else:
          found[name] = _with_setting(found[name], override)
      except UserError as error:
        problems.setdefault(str(error), []).append(name)
  if problems:
    raise UserError(f'{len(problems)} override{"s" * (len(problems) > 1)} cannot be applied:\n' + '\n'.join(
        f'  {text}' + (f' (of {", ".join(names)})' if len(names) < len(configs) else '')
        for text, names in problems.items()))
  for text in kept:
    log.warning('%s', text)
  return found


def _evaluations(config: schema.Config, text: str) -> dict[str, schema.Eval]:
  """The evaluations that `test,knn` lists: those of the config by their names, and others by theirs."""
  names = [name.strip() for name in text.split(',') if name.strip()]
  known = [*config.evals, *schema.EVALUATIONS]
  if unknown := [name for name in names if name not in known]:
    raise UserError(f'config.evals: expected names of evaluations ({", ".join(dict.fromkeys(known))}), got '
                    f'{", ".join(unknown)}. Name some of these, with commas.')
  return {name: config.evals.get(name) or schema.EVALUATIONS[name]() for name in names}


def _with_part(config: schema.Config, path: str, declared: Any, value: str, models: Models | None,
               kept: dict[str, None]) -> schema.Config:
  """Returns a config with the part at `path` replaced by the one with the name `value`.

  If the kind of a part of a ViT changes, it keeps the settings that mean the same: those that a class above both kinds
  declares, such as `hidden` of `MlpSettings`; a message in `kept` says so. Elsewhere, for example in optimizers, a
  value that is good for one kind is not good for another.
  """
  try:
    part = by_name(declared, value, models, from_command_line=True)
  except UserError as error:
    inside = [setting.name for setting in fields(config) if setting.name.rpartition('.')[0] == path]
    is_hint = 'Did you mean' not in str(error) and ':' not in value and 0 < len(inside) <= _MOST_OF_PART
    of_part = f' Its settings are config.{", config.".join(inside)}.' if is_hint else ''
    raise UserError(f'config.{path}: {error}{of_part}') from None
  before = functools.reduce(lambda one, name: one[name] if isinstance(one, dict) else getattr(one, name),
                            path.split('.'), config)
  if isinstance(part, layers.Part) and type(before) is not type(part):
    shared = {name for kind in type(before).__mro__ if kind in type(part).__mro__
              for name in inspect.get_annotations(kind)}
    usual = {name: value for name, value in vars(part).items() if name in shared & vars(before).keys()}
    values = {name: value for name in usual if (value := getattr(before, name)) != usual[name]}
    if values:
      shown = ', '.join(f'{name}={checks.shown(value)} (default: {checks.shown(usual[name])})'
                        for name, value in values.items())
      kept[f'config.{path}={checks.kind(part)} keeps {shown} of {checks.kind(before)}.'] = None
    part = checks.replaced(part, values)
  return checks.replaced(config, {path: part})


def _with_setting(config: schema.Config, override: str) -> schema.Config:
  """Returns a config with the value that an override of a single setting gives, as `ml_collections` reads it."""
  name, equals, text = override.partition('=')
  known = {setting.name: setting for setting in fields(config)}
  if name not in known:
    last = name.rpartition('.')[2].lower()  # such as `swiglu`, the name of a kind of a part
    hint = next((f' Did you mean config.{path}={last}?' for path, declared in walk(config) if last in kinds(declared)),
                '') or _nearest(name, known)
    hint = ' It was removed; leave it out.' if any(of.endswith(f'.{last}') for of in RETIRED) else hint
    raise UserError(f'config.{shorten(name)}: expected the name of a setting.{hint}')
  if not equals:
    raise UserError(f'config.{name}: expected a value, got none. Set --config.{name}=VALUE.')
  now = known[name].value
  if isinstance(now, enum.Enum):  # which `ml_collections` reads by its name
    text = next((choice.name for choice in type(now) if checks.shown(choice) == text.lower()), text)
  elif name == 'data.workers' and text.lower() == 'auto':
    text = str(schema.AUTO_WORKERS)
  try:
    values, argv = flags.FlagValues(), ['vit-jax', f'--config.{name}={text}']
    holder = config_flags.DEFINE_config_dataclass('config', copy.deepcopy(config), flag_values=values, sys_argv=argv)
    values(argv)
    found: schema.Config = holder.value
    length = len(next(one.value for one in fields(found) if one.name == name)) if isinstance(now, tuple) else 0
  except (flags.Error, *_UNREADABLE) as error:
    raise UserError(f'config.{name}: expected {_expected(now, error)}, got {shorten(text)!r}. Correct it.') from None
  if isinstance(now, tuple) and not known[name].is_open and length != len(now):
    raise UserError(f'config.{name}: expected {_expected(now, None)}, got {shorten(text)!r}. Correct it.')
  return found


def shorten(text: str, most: int = 80) -> str:
  """Returns a text as it is shown in a message."""
  return text if len(text) <= most else f'{text[:most - 20]}… ({len(text):,} characters)'


def _nearest(name: str, known: Collection[str]) -> str:
  """The end of a message about an unknown name.

  It suggests settings with the same last part, or what `ELSEWHERE` has for it, first those of the same part of the
  config; or else the nearest name of the same part, or of all.
  """
  part, dot, last = name.rpartition('.')
  inside = [one.rpartition('.')[2] for one in known if one.rpartition('.')[0] == part and dot]
  same = [one for one in known if one.rpartition('.')[2] == ELSEWHERE.get(last, last)]
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
