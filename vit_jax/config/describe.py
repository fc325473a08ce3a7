"""Every setting of a config with its type, unit, default, range and meaning, as the schema declares them.

The meaning is the comment beside or directly above the declaration.
"""
from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import inspect
import io
import re
import tokenize
import types
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple

from vit_jax.config import durations, engine
from vit_jax.config.schema import checks, ranges
from vit_jax.config.schema.checks import shown
from vit_jax.core.errors import redacted

_UNITS = {'px': 'px', 'steps': 'steps', 's': 's', 'gib': 'GiB', 'epochs': 'epochs'}
"""Units by the last word of a name."""
REQUIRED = object()
"""In place of a default: the setting has none."""


class Described(NamedTuple):
  """A setting."""
  name: str     # dotted path, as in `--config.NAME=VALUE`
  value: Any    # that it has now
  part: str     # the type of the part that it belongs to, such as `AdamW`
  type: str     # such as `number`, `numbers with commas` or `choice`
  unit: str     # such as `px`; '' = none
  default: Any  # of the schema; `REQUIRED` if there is none
  allowed: str  # values, in words; '' = any of the type
  about: str    # the comment of the schema


def settings(config: Any) -> list[Described]:
  """Describes every setting of a config, or of a part of one, in the order of the schema."""
  return list(_describe(config, '', None))


def _describe(part: Any, prefix: str, default_part: Any) -> Iterator[Described]:
  """Yields the settings of a part; `default_part` is the part that a config has there by default, or None."""
  kind: type = type(part)
  abouts = comments(kind)
  for field in dataclasses.fields(part):
    value, name = getattr(part, field.name), f'{prefix}{field.name}'
    default = checks.default_of(field, missing=REQUIRED)
    if type(default_part) is kind:
      default = getattr(default_part, field.name)
    allowed = field.metadata.get('allowed')
    unit = _UNITS.get(field.name.rpartition('_')[2], '')
    if allowed:
      unit = 'steps, epochs, examples or %' if isinstance(allowed, ranges.Span) else allowed.unit or unit
    described = Described(
        name=name, value=value, part=kind.__name__, type=_type(field.type, value, allowed),
        unit=unit, default=default, allowed=_allowed(field.type, value, allowed),
        about=abouts.get(field.name, ''))
    if isinstance(value, dict):
      for key, inner in value.items():
        inner_default = default.get(key) if isinstance(default, dict) else default
        yield from _describe_part(inner, typing.get_args(field.type)[1], described._replace(
            name=f'{name}.{key}', default=inner_default))
    elif dataclasses.is_dataclass(value):
      yield from _describe_part(value, field.type, described)
    else:
      yield described


def _describe_part(part: Any, declared: Any, described: Described) -> Iterator[Described]:
  """Yields the kind of a part as a setting, if it may be of several kinds, and then the settings of the part.

  `described` has the name and the default of the part.
  """
  default = described.default
  if kinds := engine.kinds(declared):
    default_kind = checks.kind(default) if dataclasses.is_dataclass(default) else REQUIRED
    yield described._replace(value=checks.kind(part), type='choice', unit='', default=default_kind,
                             allowed=', '.join(kinds))
  yield from _describe(part, f'{described.name}.', default)


def _type(declared: Any, value: Any, allowed: Any) -> str:
  """Returns the type of a setting in words, such as `numbers with commas`."""
  if isinstance(allowed, ranges.Span):
    return 'lengths with commas' if typing.get_origin(declared) is tuple else 'length'
  if typing.get_origin(declared) is tuple:
    arguments = typing.get_args(declared)
    item = _type(arguments[0], value[0] if value else None, allowed)
    return f'{item}s with commas' if Ellipsis in arguments else f'{len(arguments)} {item}s with commas'
  if isinstance(declared, types.UnionType):
    declared = type(value)
  if isinstance(declared, type) and issubclass(declared, enum.Enum):
    return 'choice'
  return {float: 'number', int: 'whole number', bool: 'true or false', str: 'text'}.get(declared, 'part')


def _allowed(declared: Any, value: Any, allowed: Any) -> str:
  """Returns the values that a setting may have, in words; '' = any of its type."""
  if isinstance(allowed, ranges.Span):
    return durations.EXPECTED + (", or '' for off" if allowed.off else '')
  if allowed is not None:
    return str(allowed)
  kind = type(value) if isinstance(declared, types.UnionType) else declared
  if typing.get_origin(kind) is tuple:
    kind = typing.get_args(kind)[0]
  if isinstance(kind, type) and issubclass(kind, enum.Enum):
    return ', '.join(shown(choice) for choice in kind)
  return ''


def text(value: Any) -> str:
  """Formats a value as it is typed after `--config.NAME=`."""
  if value is REQUIRED:
    return 'none'
  if isinstance(value, tuple):
    return ','.join(map(text, value)) or '()'
  if isinstance(value, bool):
    return str(value).lower()
  if isinstance(value, float):
    short = f'{value:.10g}'
    return short if float(short) == value else repr(value)
  if isinstance(value, str):
    return redacted(value) or "''"
  return shown(value)


@functools.cache
def comments(kind: type) -> dict[str, str]:
  """Returns the comments of the fields of a settings dataclass, those that it inherits included."""
  found: dict[str, str] = {}
  for owner in reversed(kind.__mro__):
    if dataclasses.is_dataclass(owner):
      found |= _comments(inspect.getsource(typing.cast(type, owner)))
  return found


def _comments(source: str) -> dict[str, str]:
  """Returns the comment of each field in the source of a class: the lines directly above the field, and beside it."""
  tokens = [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type == tokenize.COMMENT]
  texts = {token.start[0]: token.string.lstrip('# ').strip() for token in tokens}  # by line
  lines_without_code = {token.start[0] for token in tokens if token.line.lstrip().startswith('#')}
  body = next(node.body for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef))
  found = {}
  for node in body:
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
      first, last = node.lineno, node.end_lineno or node.lineno
      while first - 1 in lines_without_code:
        first -= 1
      words = ' '.join(texts[line] for line in range(first, last + 1) if line in texts)
      found[node.target.id] = re.sub(r'\s+', ' ', words)
  return found
