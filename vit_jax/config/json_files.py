"""A config as JSON and back: what `config.json` of a run directory holds. Each part names its type."""
from __future__ import annotations

import dataclasses
import difflib
import enum
import json
import pathlib
import types
import typing
from collections.abc import Mapping
from typing import Any

from vit_jax.config import renamed, schema
from vit_jax.config.schema import ranges
from vit_jax.core.errors import UserError

_ADVICE = 'The command that trained the run writes it again; other jobs also take --config=NAME.'


def to_json(config: schema.Config) -> str:
  """The final config, whole, as JSON; each part names its type."""
  return json.dumps(_plain(config), indent=2) + '\n'


def read(path: pathlib.Path) -> schema.Config:
  """The config that a file such as `config.json` of a run directory holds.

  Raises:
    UserError: it is no such file; lists every setting that is not known or has no value of its kind.
  """
  try:
    text = path.read_text()
  except OSError as error:
    raise UserError(f'{path}: expected a file that can be read, got {error.strerror}. Check that it is there and that '
                    'this user may read it.') from error
  except ValueError:
    raise UserError(f'{path}: expected a config as JSON, got bytes that are not UTF-8. {_ADVICE}') from None
  try:
    return from_json(text)
  except UserError as error:
    got = error if text.strip() else 'an empty file'
    raise UserError(f'{path}: expected a config as JSON, got {got}. {_ADVICE}') from None


def from_json(text: str) -> schema.Config:
  """The config that `to_json` wrote. Settings that an older file lacks have their defaults.

  Raises:
    UserError: lists every setting that is not known or has no value of its kind.
  """
  try:
    saved = json.loads(text)
  except (ValueError, RecursionError) as error:
    raise UserError(f'text that is not JSON: {error}') from None
  faults: list[str] = []
  config = _typed(saved, schema.Config, 'config', faults)
  if faults:
    raise UserError('\n'.join([f'{len(faults)} settings cannot be read:', *(f'  {fault}' for fault in faults)]))
  return config


def _plain(value: Any) -> Any:
  if dataclasses.is_dataclass(value):
    parts = {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return {'type': type(value).__name__, **parts}
  if isinstance(value, dict):
    return {k: _plain(v) for k, v in value.items()}
  if isinstance(value, (tuple, list)):
    return [_plain(v) for v in value]
  return value.value if isinstance(value, enum.Enum) else value


def _typed(value: Any, declared: Any, name: str, faults: list[str]) -> Any:
  """`value` of JSON as the type that its field declares; what cannot be is told, and stays as it is."""
  arguments = typing.get_args(declared)
  if isinstance(declared, types.UnionType):
    parts = {kind.__name__: kind for kind in arguments if isinstance(kind, type) and dataclasses.is_dataclass(kind)}
    if not isinstance(value, Mapping):
      plain = [kind for kind in arguments if not dataclasses.is_dataclass(kind)]
      return _typed(value, plain[0], name, faults) if plain else _wrong(
          value, f'a part with type one of {", ".join(parts)}', name, faults)
    if renamed.type_name(value.get('type')) in parts:
      return _part(value, parts[renamed.type_name(value['type'])], name, faults)
    return _wrong(value, f'a part with type one of {", ".join(parts)}', name, faults)
  if dataclasses.is_dataclass(declared):
    return _part(value, declared, name, faults)
  match typing.get_origin(declared):
    case kind if kind is tuple and isinstance(value, list):
      kinds = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
      if len(kinds) != len(value):
        return _wrong(value, f'{len(kinds)} values', name, faults)
      return tuple(_typed(v, k, f'{name}.{i}', faults) for i, (v, k) in enumerate(zip(value, kinds, strict=True)))
    case kind if kind is dict and isinstance(value, Mapping):
      return {key: _typed(v, arguments[1], f'{name}.{key}', faults) for key, v in value.items()}
  return _plain_value(value, declared, name, faults)


def _plain_value(value: Any, declared: Any, name: str, faults: list[str]) -> Any:
  """A choice, number or text."""
  if isinstance(declared, type) and issubclass(declared, enum.Enum):
    found = next((choice for choice in declared if choice.value == renamed.choice(declared, value)), None)
    wanted = f'one of {", ".join(str(choice.value) for choice in declared)}'
    return _wrong(value, wanted, name, faults) if found is None else found
  if declared is float and type(value) is int and abs(value) <= ranges.MOST:
    return float(value)
  if isinstance(declared, type) and type(value) is declared:
    return value
  return _wrong(value, getattr(declared, '__name__', str(declared)), name, faults)


def _part(value: Any, declared: Any, name: str, faults: list[str]) -> Any:
  """A part of the config, by its own type."""
  if not isinstance(value, Mapping) or renamed.type_name(value.get('type', declared.__name__)) != declared.__name__:
    return _wrong(value, f'a part of type {declared.__name__}', name, faults)
  known = {f.name: f.type for f in dataclasses.fields(declared)}
  found = {}
  for key, one in value.items():
    if key in known:
      found[key] = _typed(one, known[key], f'{name}.{key}', faults)
    elif new := renamed.setting(declared, key):
      found[new] = _typed(renamed.value(declared, key, one), known[new], f'{name}.{key}', faults)
    elif key != 'type' and not renamed.is_removed(declared, key):
      near = difflib.get_close_matches(key, known, 1)
      faults.append(f'{name}.{key}: no such setting' + (f'; the nearest is {name}.{near[0]}' if near else ''))
  return declared(**found)


def _wrong(value: Any, wanted: str, name: str, faults: list[str]) -> Any:
  faults.append(f'{name}={json.dumps(value)[:60]}: want {wanted}')
  return value
