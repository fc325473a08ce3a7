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
  """A setting.

  name: dotted path, as in `--config.NAME=VALUE`.    value: it has now.
  part: the type of the part that it belongs to, such as `AdamW`.
  type: such as `number`, `numbers with commas` or `choice`.    unit: '' = none.
  default: of the schema; `REQUIRED` if there is none.    allowed: values, in words; '' = any of the type.
  about: the comment of the schema.
  """
  name: str
  value: Any
  part: str
  type: str
  unit: str
  default: Any
  allowed: str
  about: str


def settings(config: Any) -> list[Described]:
  """Describes every setting of a config, or of a part of one, in the order of the schema."""
  return list(_of(config, '', None))


def _of(part: Any, prefix: str, usual: Any) -> Iterator[Described]:
  """Yields the settings of a part; `usual` is the part that the part around it has by default, or None."""
  kind: type = type(part)
  abouts = comments(kind)
  for field in dataclasses.fields(part):
    value, name = getattr(part, field.name), f'{prefix}{field.name}'
    default = getattr(usual, field.name) if type(usual) is type(part) else checks.default_of(
        field, missing=REQUIRED)
    if dataclasses.is_dataclass(value) or isinstance(value, dict):
      declared = typing.get_args(field.type)[1] if isinstance(value, dict) else field.type
      for key, one in (value if isinstance(value, dict) else {'': value}).items():
        own, was = f'{name}.{key}'.rstrip('.'), default.get(key) if isinstance(default, dict) else default
        if known := engine.kinds(declared):
          usual_kind = checks.kind(was) if dataclasses.is_dataclass(was) else REQUIRED
          yield Described(own, checks.kind(one), kind.__name__, 'choice', '', usual_kind, ', '.join(known),
                          abouts.get(field.name, ''))
        yield from _of(one, f'{own}.', was)
    else:
      allowed = field.metadata.get('allowed')
      unit = 'steps, epochs, examples or %' if isinstance(allowed, ranges.Span) else (
          (allowed and allowed.unit) or _UNITS.get(field.name.rpartition('_')[2], ''))
      yield Described(name, value, type(part).__name__, _type(field.type, value, allowed), unit,
                      default, _allowed(field.type, value, allowed), abouts.get(field.name, ''))


def _type(declared: Any, value: Any, allowed: Any) -> str:
  if isinstance(allowed, ranges.Span):
    return 'lengths with commas' if typing.get_origin(declared) is tuple else 'length'
  if typing.get_origin(declared) is tuple:
    arguments = typing.get_args(declared)
    one = _type(arguments[0], value[0] if value else None, allowed)
    return f'{one}s with commas' if Ellipsis in arguments else f'{len(arguments)} {one}s with commas'
  if isinstance(declared, types.UnionType):
    declared = type(value)
  if isinstance(declared, type) and issubclass(declared, enum.Enum):
    return 'choice'
  return {float: 'number', int: 'whole number', bool: 'true or false', str: 'text'}.get(declared, 'part')


def _allowed(declared: Any, value: Any, allowed: Any) -> str:
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
    return short if float(short := f'{value:.10g}') == value else repr(value)
  return redacted(value) or "''" if isinstance(value, str) else shown(value)


@functools.cache
def comments(kind: type) -> dict[str, str]:
  """Returns the comments of the fields of a settings dataclass, those that it inherits included."""
  found: dict[str, str] = {}
  for owner in reversed(kind.__mro__):
    if dataclasses.is_dataclass(owner):
      found |= _comments(inspect.getsource(typing.cast(type, owner)))
  return found


def _comments(source: str) -> dict[str, str]:
  lines = {token.start[0]: (token.string.lstrip('# ').strip(), token.line.lstrip().startswith('#'))
           for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type == tokenize.COMMENT}
  body = next(node.body for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef))
  found = {}
  for node in body:
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
      above: list[str] = []
      number = node.lineno - 1
      while number in lines and lines[number][1]:
        above.insert(0, lines[number][0])
        number -= 1
      beside = [lines[number][0] for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
                if number in lines]
      found[node.target.id] = re.sub(r'\s+', ' ', ' '.join([*above, *beside]))
  return found
