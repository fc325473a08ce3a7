"""Configs from nested plain values, such as JSON or an `ml_collections.ConfigDict`, and parts of them by name.

A part that may be of several types, such as `model` or `optimizer`, is a dict that names its type: `type: AdamW`, as
`config.json` has it, or `name: adamw`; a person's own type is `module:Class`. A text alone is a part with the defaults
of its type: `optimizer: adamw`. For a model it may also be the name of a size: `model: S/16`, or `name: S/16` beside
further settings.
"""
from __future__ import annotations

import dataclasses
import enum
import json
import keyword
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vit_jax.config import schema
from vit_jax.config.schema import checks, ranges
from vit_jax.config.schema.checks import Settings, nearest
from vit_jax.core import implementation
from vit_jax.core.errors import UserError, printable

Models = Callable[[str], schema.Model]
"""The model of a size by name, such as `S/16`. Raises UserError for unknown names."""


MOST_LISTED = 40
"""Settings with problems that one message names."""
RETIRED: Mapping[str, tuple[Any, ...] | None] = {
    'Data.placement': ('anywhere',), 'Data.verify_shards': ('lazy', 'first', 'no'), 'Data.cache_gib': None,
    'Data.cache_dir': None, 'ViT.patch_dropout_parts': ([],),
    'Checkpoints.local': None, 'Checkpoints.local_dir': None,
    'LeJepa.center': ('global',), 'LeJepa.sample': ('view',), 'LeJepa.weighting': ('convex',),
    'Adafactor.b2_power': (.8,), 'Adafactor.min_dim_size_to_factor': (32,), 'Muon.nesterov': (True,),
    'Optimizer.layer_groups': ('mae',), 'ConvStem.norm_momentum': (.9,), 'AxialResNet.norm_momentum': (.9,),
    'EfficientNet.norm_momentum': (.99,), 'Retrieval.ranks': ([1, 5, 10],), 'CaptionRetrieval.ranks': ([1, 5, 10],),
    'Logistic.tolerance': (1e-6,), 'Segmentation.tolerance': (1e-6,)}
"""Settings that configs of earlier versions have, with the values that change nothing; None = all."""


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


def own_kind(declared: Any, name: str, *, from_command_line: bool = False) -> type | None:
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


def by_name(declared: Any, name: str, models: Models | None, *, from_command_line: bool = False) -> Any:
  """Returns the part with this name, with the defaults of its type or of its size.

  The name of a part of one type is `default`. The name comes from the command line if `from_command_line`.

  Raises:
    UserError: there is no such part; says what was expected, without the name of the setting.
  """
  known = kinds(declared) or {'default': declared}
  if kind := known.get(name.lower().replace('_', '').replace('-', '')):
    return kind()
  if own := own_kind(declared, name, from_command_line=from_command_line):
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


def stand_in(declared: Any, name: str, settings: Mapping[str, Any]) -> type | None:
  """Returns a type with the name of a person's own and fields for some settings, without importing its module.

  For a config that is read for other parts than this one. Returns None where `own_kind` does; the code that the type
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


def from_plain(value: Any, *, models: Models | None = None, code: str = '') -> schema.Config:
  """Reads a config from nested dicts, in which absent settings have their defaults.

  Args:
    value: nested dicts and lists, with choices as their texts.
    models: sizes of models by name.
    code: the part of the config whose code is needed, such as `model`: types of a person's own in others are not
      imported, and get a `stand_in`. '' = all parts.

  Raises:
    UserError: lists every name that is unknown and every value that is not of the type of its setting.
  """
  reader = _Reader(models, code)
  config = reader.part(value, schema.Config, 'config')
  if found := reader.problems:
    raise UserError('\n'.join([f'{len(found)} setting{"s" * (len(found) > 1)} cannot be read:',
                               *(f'  {one}' for one in found[:MOST_LISTED]),
                               *[f'  … and {len(found) - MOST_LISTED} more'] * (len(found) > MOST_LISTED)]))
  return config


class _Reader:
  """Turns plain values into settings, and collects what is wrong with them."""

  def __init__(self, models: Models | None, code: str = '') -> None:
    self._models, self._code = models, code
    self.problems: list[str] = []

  def typed(self, value: Any, declared: Any, name: str) -> Any:
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
      return tuple(self.typed(v, k, f'{name}[{i}]') for i, (v, k) in enumerate(zip(value, each, strict=True)))
    if typing.get_origin(declared) is dict and isinstance(value, Mapping):
      return {key: self.typed(one, arguments[1], f'{name}.{key}') for key, one in value.items()}
    return self._single(value, declared, name)

  def part(self, value: Any, declared: Any, name: str, base: Any = None) -> Any:
    """Reads a settings dataclass from a mapping; settings that it lacks are those of `base`, or the defaults."""
    kind = implementation.type_name(declared)
    if not isinstance(value, Mapping) or value.get('type', kind) != kind:
      return self._wrong(value, f'settings of type {kind}', name)
    known = {field.name: field.type for field in dataclasses.fields(declared)}
    found = {}
    for key, one in value.items():
      plain = printable(str(key))
      if key in known:
        found[key] = self.typed(one, known[key], f'{name}.{key}')
      elif key != 'type':
        retired = {of: RETIRED[of] for of in (f'{parent.__name__}.{key}' for parent in declared.__mro__)
                   if of in RETIRED}
        for harmless in retired.values():
          if harmless is not None and one not in harmless:
            self._wrong(one, f'{" or ".join(map(_text, harmless))}, as this setting was removed', f'{name}.{plain}')
        if not retired:
          self.problems.append(f'{name}.{plain[:60]}: expected the name of a setting, got {plain[:60]!r}.'
                               + nearest(key, known, f'{name}.'))
    for field in dataclasses.fields(declared):
      if base is None and field.name not in found and (
          field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING):
        return self._wrong(None, 'a value', f'{name}.{field.name}')
    return dataclasses.replace(base, **found) if base is not None else declared(**found)

  def _one_of(self, value: Any, declared: Any, name: str) -> Any:
    """A value of a field that may be of several types."""
    parts = {kind.__name__: kind for kind in typing.get_args(declared)
             if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind is not base(declared)}
    plain = [kind for kind in typing.get_args(declared) if kind not in (*parts.values(), base(declared))]
    settings: dict[Any, Any] = {}
    try:
      if isinstance(value, Mapping):
        kind = said if isinstance(said := value.get('type'), str) else ''
        if found := parts.get(kind) or self._own(declared, kind, name, value) or (
            len(parts) == 1 and next(iter(parts.values()))):
          return self.part(value, found, name)
        value, settings = value.get('name', value.get('type')), {k: v for k, v in value.items() if k != 'name'}
      elif plain:
        return self.typed(value, plain[0], name)
      if not isinstance(value, str):
        raise UserError(f'expected settings with a type, one of {", ".join(parts)}, got {_text(value)}. '
                        'Set `type` to one of these.')
      usual = by_name(declared, value, self._models)
    except UserError as error:
      self.problems.append(f'{name}: {error}')
      return None
    return self.part({k: v for k, v in settings.items() if k != 'type'}, type(usual), name, usual)

  def _own(self, declared: Any, kind: str, name: str, value: Mapping[str, Any]) -> type | None:
    """A person's own type, or a stand-in where its code is not needed."""
    is_needed = not self._code or f'{name}.'.startswith(f'config.{self._code}.')
    return own_kind(declared, kind) if is_needed else stand_in(declared, kind, value)

  def _single(self, value: Any, declared: Any, name: str) -> Any:
    """A choice, number or text."""
    if isinstance(declared, type) and issubclass(declared, enum.Enum):
      found = next((choice for choice in declared if value in (choice, choice.value)), None)
      expected = f'one of {", ".join(checks.shown(choice) for choice in declared)}'
      return self._wrong(value, expected, name) if found is None else found
    if declared is Any:
      return value
    if declared is float and type(value) is int and abs(value) <= ranges.MOST:
      return float(value)
    if isinstance(declared, type) and type(value) is declared:
      return value
    return self._wrong(value, ranges.type_text(declared), name)

  def _wrong(self, value: Any, expected: str, name: str) -> Any:
    self.problems.append(f'{name}: expected {expected}, got {_text(value)}.')


def _text(value: Any) -> str:
  """A plain value as a message shows it: as JSON."""
  try:
    return json.dumps(value)[:60]
  except (TypeError, ValueError, RecursionError):
    return repr(value)[:60]
