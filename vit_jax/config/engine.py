"""Reads configs from plain values and JSON, and writes them as JSON; finds parts of configs by name.

A part that may be of several types, such as `model` or `optimizer`, is a dict that names its type: `type: AdamW`, as
`config.json` has it, or `name: adamw`; a person's own type is `module:Class`, whose module is imported only if the
reader needs it and if it may be run (`core/implementation.py`): a file may be another person's. A text alone is a part
with the defaults of its type: `optimizer: adamw`. For a model it may also be the name of a size: `model: S/16`, or
`name: S/16` beside further settings.
"""
from __future__ import annotations

import dataclasses
import enum
import json
import keyword
import pathlib
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from vit_jax.config import schema
from vit_jax.config.schema import checks, ranges
from vit_jax.config.schema.checks import Settings, nearest
from vit_jax.core import documents, implementation
from vit_jax.core.errors import UserError, printable, redacted

Models = Callable[[str], schema.Model]
"""Returns the model of a size by name, such as `S/16`. Raises UserError for unknown names."""
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
_MOST_LISTED = 40
"""The number of problems that one message lists."""
_ADVICE = 'The command that trained the run writes it again; other jobs also take --config=NAME.'


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
  config = reader.read_part(value, schema.Config, 'config')
  if problems := reader.problems:
    lines = [f'{len(problems)} setting{"s" * (len(problems) > 1)} cannot be read:']
    lines += [f'  {problem}' for problem in problems[:_MOST_LISTED]]
    if len(problems) > _MOST_LISTED:
      lines.append(f'  … and {len(problems) - _MOST_LISTED} more')
    raise UserError('\n'.join(lines))
  return config


def kinds(declared: Any) -> dict[str, type]:
  """Returns the types of a part by the names that a person uses: `{'adamw': AdamW, …}`; {} if there is one."""
  types_by_name = {kind.__name__.lower(): kind for kind in _members(declared)
                   if isinstance(kind, type) and dataclasses.is_dataclass(kind)}
  return types_by_name if len(types_by_name) > 1 else {}


def _members(declared: Any) -> list[Any]:
  """Returns the types in a union such as `AdamW | Sgd | Optimizer`, without the base of a person's own types."""
  own_base = base(declared)
  members = typing.get_args(declared) if isinstance(declared, types.UnionType) else ()
  return [member for member in members if member is not own_base]


def base(declared: Any) -> type | None:
  """Returns the member of a union that a person's own types inherit from: the one that names no implementation."""
  members = [kind for kind in typing.get_args(declared) if isinstance(kind, type) and issubclass(kind, Settings)]
  without_code = [kind for kind in members if not hasattr(kind, 'implementation')]
  return without_code[0] if without_code and len(without_code) < len(members) else None


def by_name(declared: Any, name: str, models: Models | None, *, from_command_line: bool = False) -> Any:
  """Returns the part with this name, with the defaults of its type or of its size.

  The name of a part of one type is `default`. The name comes from the command line if `from_command_line`.

  Raises:
    UserError: there is no such part; says what was expected, without the name of the setting.
  """
  known = kinds(declared) or {'default': declared}
  if kind := known.get(name.lower().replace('_', '').replace('-', '')):
    return kind()
  if own_kind := _own_kind(declared, name, from_command_line=from_command_line):
    return own_kind()
  has_sizes = models is not None and schema.ViT in known.values()
  if models is not None and has_sizes and set('/-') & set(name):
    try:
      return models(name)
    except UserError as error:
      raise UserError(str(error).removeprefix('model: ')) from None
  expected = ', '.join(known)
  if has_sizes:
    expected += ' or a size such as S/16'
  if base(declared) is not None:
    expected += ', or MODULE:CLASS of your own'
  suggestion = nearest(name, known)
  raise UserError(f'expected {expected}, got {name[:60]!r}.' + ('' if suggestion.startswith(' Known') else suggestion))


def _own_kind(declared: Any, name: str, *, from_command_line: bool = False) -> type | None:
  """Imports a person's own type by its name `module:Class`; `from_command_line` if the name comes from there.

  Returns None if the name has another form, or the part takes none.

  Raises:
    UserError: there is no such class, or it is not a dataclass with the base of the part and an implementation.
  """
  parent = base(declared)
  if parent is None or ':' not in name:
    return None
  kind = implementation.load(name, from_command_line=from_command_line)
  if not (isinstance(kind, type) and issubclass(kind, parent) and dataclasses.is_dataclass(kind)
          and hasattr(kind, 'implementation')):
    raise UserError(f'expected a dataclass that inherits from {parent.__name__} and names its implementation, got '
                    f'{name}. Name another class, or let it inherit.')
  return kind


def _stand_in(declared: Any, name: str, settings: Mapping[str, Any]) -> type | None:
  """Returns a type with the name of a person's own and fields for some settings, without importing its module.

  It is for a config that is read for other parts than this one. Returns None where `_own_kind` does; the code that the
  type stands for is not found.
  """
  parent = base(declared)
  if parent is None or ':' not in name:
    return None
  inherited = ('type', *parent.__annotations__)
  new_fields = [(key, Any, dataclasses.field(default=None)) for key in settings
                if key.isidentifier() and not keyword.iskeyword(key) and not hasattr(parent, key)
                and key not in inherited]
  module, _, class_name = name.partition(':')
  kind = dataclasses.make_dataclass(class_name if class_name.isidentifier() else 'Own', new_fields, bases=(parent,),
                                    namespace={'implementation': ''})
  kind.__module__, kind.__qualname__ = module, class_name
  return kind


class _Reader:
  """Turns plain values into settings, and collects what is wrong with them in `problems`.

  In its methods, `path` is the dotted name of a value, such as `config.model.width`, and `declared` the type that the
  schema declares for it.
  """

  def __init__(self, models: Models | None, code: str) -> None:
    self._models, self._code = models, code
    self.problems: list[str] = []

  def read_part(self, value: Any, kind: Any, path: str, defaults: Any = None) -> Any:
    """Reads a settings dataclass from a mapping. Settings that it lacks are those of `defaults`, or of the schema."""
    type_name = implementation.type_name(kind)
    if not isinstance(value, Mapping) or value.get('type', type_name) != type_name:
      return self._note_wrong(value, f'settings of type {type_name}', path)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    settings = {}
    for name, setting in value.items():
      if name in fields:
        settings[name] = self._read_value(setting, fields[name].type, f'{path}.{name}')
      elif name != 'type':
        self._note_unknown(setting, kind, printable(str(name)), path)
    if defaults is not None:
      return dataclasses.replace(defaults, **settings)
    for name, field in fields.items():
      if name not in settings and field.default is field.default_factory is dataclasses.MISSING:
        return self._note_wrong(None, 'a value', f'{path}.{name}')
    return kind(**settings)

  def _read_value(self, value: Any, declared: Any, path: str) -> Any:
    """Returns `value` as the type that its field declares; None, and a problem, if it is of another."""
    if isinstance(declared, types.UnionType):
      return self._read_union(value, declared, path)
    if dataclasses.is_dataclass(declared):
      return self.read_part(value, declared, path)
    origin, arguments = typing.get_origin(declared), typing.get_args(declared)
    if origin is tuple and isinstance(value, list | tuple):
      item_types = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
      if len(item_types) != len(value):
        return self._note_wrong(value, f'{len(item_types)} values', path)
      return tuple(self._read_value(item, item_type, f'{path}[{i}]')
                   for i, (item, item_type) in enumerate(zip(value, item_types, strict=True)))
    if origin is dict and isinstance(value, Mapping):
      return {key: self._read_value(item, arguments[1], f'{path}.{key}') for key, item in value.items()}
    if isinstance(declared, type) and issubclass(declared, enum.Enum):
      choices = [choice for choice in declared if value in (choice, choice.value)]
      expected = f'one of {", ".join(checks.shown(choice) for choice in declared)}'
      return choices[0] if choices else self._note_wrong(value, expected, path)
    if declared is float and type(value) is int and abs(value) <= ranges.MOST:
      return float(value)
    if declared is Any or type(value) is declared:
      return value
    return self._note_wrong(value, ranges.type_text(declared), path)

  def _read_union(self, value: Any, declared: Any, path: str) -> Any:
    """Reads a value of a field that may be of several types: parts of several kinds, or a number or a part."""
    parts = {kind.__name__: kind for kind in _members(declared)
             if isinstance(kind, type) and dataclasses.is_dataclass(kind)}
    plain_types = [kind for kind in _members(declared) if kind not in parts.values()]
    name, settings = value, {}
    try:
      if isinstance(value, Mapping):
        if kind := parts.get(str(value.get('type'))) or self._own_kind(value, declared, path):
          return self.read_part(value, kind, path)
        if len(parts) == 1:
          return self.read_part(value, next(iter(parts.values())), path)
        name = value.get('name', value.get('type'))
        settings = {key: setting for key, setting in value.items() if key not in ('name', 'type')}
      elif plain_types:
        return self._read_value(value, plain_types[0], path)
      if not isinstance(name, str):
        raise UserError(f'expected settings with a type, one of {", ".join(parts)}, got {_text(name)}. '
                        'Set `type` to one of these.')
      defaults = by_name(declared, name, self._models)
    except UserError as error:
      self.problems.append(f'{path}: {error}')
      return None
    return self.read_part(settings, type(defaults), path, defaults)

  def _own_kind(self, value: Mapping[str, Any], declared: Any, path: str) -> type | None:
    """Returns the person's own type that a mapping names, or a stand-in where its code is not needed; None if none."""
    name = value.get('type')
    if not isinstance(name, str):
      return None
    is_needed = not self._code or f'{path}.'.startswith(f'config.{self._code}.')
    return _own_kind(declared, name) if is_needed else _stand_in(declared, name, value)

  def _note_unknown(self, value: Any, kind: type, name: str, path: str) -> None:
    """Notes a setting that a part does not have, unless it is of an earlier version and changes nothing."""
    retired_names = [f'{owner.__name__}.{name}' for owner in kind.__mro__ if f'{owner.__name__}.{name}' in RETIRED]
    if not retired_names:
      self.problems.append(f'{path}.{name[:60]}: expected the name of a setting, got {name[:60]!r}.'
                           + nearest(name, checks.names(kind), f'{path}.'))
      return
    harmless_values = RETIRED[retired_names[0]]
    is_network_alone = bool(self._code)  # no retired setting changes what a network computes
    if harmless_values is not None and value not in harmless_values and not is_network_alone:
      expected = ' or '.join(map(_text, harmless_values))
      self._note_wrong(value, f'{expected}, as this setting was removed', f'{path}.{name}')

  def _note_wrong(self, value: Any, expected: str, path: str) -> None:
    self.problems.append(f'{path}: expected {expected}, got {_text(value)}.')


def _text(value: Any) -> str:
  """Returns a plain value as a message shows it: as JSON."""
  try:
    return json.dumps(value)[:60]
  except (TypeError, ValueError, RecursionError):
    return repr(value)[:60]


class Node(NamedTuple):
  """A part or a setting of a config."""
  name: str      # dotted, such as `model.mlp` of a part and `model.mlp.hidden` of a setting
  declared: Any  # its type in the schema
  value: Any

  @property
  def is_part(self) -> bool:
    """Whether it is a part, and not a single setting or the dict of evaluations."""
    return dataclasses.is_dataclass(self.value)


def nodes(value: Any, name: str = '', declared: Any = None) -> Iterator[Node]:
  """Yields each part and setting inside of a config, or of a part of one that has this name."""
  children = []
  if dataclasses.is_dataclass(value):
    children = [(field.name, field.type, getattr(value, field.name)) for field in dataclasses.fields(value)]
  elif isinstance(value, dict):
    children = [(key, (typing.get_args(declared) or (None, None))[1], item) for key, item in value.items()]
  for child_name, child_type, child in children:
    node = Node(f'{name}.{child_name}'.lstrip('.'), child_type, child)
    yield node
    yield from nodes(child, node.name, child_type)


def walk(config: Any) -> Iterator[tuple[str, Any]]:
  """Yields the dotted path and the declared type of each part in a config."""
  return ((node.name, node.declared) for node in nodes(config) if node.is_part)


def fields(config: Any) -> Iterator[Node]:
  """Yields every setting that can be overridden."""
  return (node for node in nodes(config) if not node.is_part and not isinstance(node.value, dict))
