"""JSON that a person or another program wrote: it is parsed and read with errors that name the place and the value.

`Table` reads the values of an object one by one. Each reader states what it expects, so a file with a value of another
type ends with one message, and never with an exception of Python. Imports only the standard library.
"""
from __future__ import annotations

import enum
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from vit_jax.core.errors import UserError

E = TypeVar('E', bound=enum.Enum)
MOST_WHOLE = 2**31 - 1
_REQUIRED: Any = object()


def parse(data: bytes | str) -> Any:
  """Returns the value of a JSON text.

  Raises:
    ValueError: it is not JSON, or an object has two fields of one name; the text says where.
  """
  try:
    return json.loads(data, object_pairs_hook=_unique)
  except _Twice:
    raise
  except json.JSONDecodeError as error:
    end = 'it ends' if error.pos >= len(error.doc.rstrip()) else f'{error.doc[error.pos:error.pos + 12]!r} is there'
    raise ValueError(f'no JSON at line {error.lineno}, column {error.colno}, where {end}' if data.strip() else
                     'an empty file') from None
  except UnicodeDecodeError as error:
    raise ValueError(f'text that is not UTF-8 at byte {error.start:,}') from None
  except RecursionError:
    raise ValueError('JSON that is nested too deep') from None
  except ValueError:  # Python reads no integer of more than 4,300 digits
    raise ValueError('JSON with a number of too many digits') from None


class _Twice(ValueError):
  """An object has two fields of one name."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  found: dict[str, Any] = {}
  for name, value in pairs:
    if name in found:
      raise _Twice(f'the field {ascii(name)[:60]} twice')
    found[name] = value
  return found


def finite(value: Any) -> Any:
  """Returns a value with None for numbers that are infinite or NaN, which JSON does not have."""
  match value:
    case float():
      return value if math.isfinite(value) else None
    case dict() | Mapping():
      return {name: finite(one) for name, one in value.items()}
    case list() | tuple():
      return [finite(one) for one in value]
  return value


def shown(value: object) -> str:
  """Returns a value as JSON for a message, on one line and at most 60 characters; `none` if it is absent."""
  if value is _REQUIRED:
    return 'none'
  try:
    text = json.dumps(value)
  except (TypeError, ValueError, RecursionError):
    text = ascii(value)
  return text if len(text) <= 60 else f'{text[:57]}...'


class Table:
  """The object of a JSON file. A value that is null or absent is the default, or an error if there is none.

  Args:
    content: the parsed value.
    said: the name of the file, and of the place in it, for messages.
    fix: what to do about an error.

  Raises:
    UserError: the content is not an object. All methods raise it for a value that is not as expected.
  """

  def __init__(self, content: object, said: str, *, fix: str = 'Correct the file, or fetch it again.') -> None:
    self.said, self._fix = said, fix
    if not isinstance(content, Mapping):
      raise UserError(f'{said}: expected a JSON object, got {shown(content)}. {fix}')
    self.content: Mapping[str, Any] = content

  def __contains__(self, name: str) -> bool:
    """Whether the value is there and not null."""
    return self.content.get(name) is not None

  def wrong(self, name: str, expected: str) -> UserError:
    """Returns the error about a value."""
    got = shown(self.content.get(name, _REQUIRED))
    return UserError(f'{self.said}, {ascii(name)[1:-1][:60]}: expected {expected}, got {got}. {self._fix}')

  def _get(self, name: str, default: Any, expected: str) -> Any:
    if name in self:
      return self.content[name]
    if default is _REQUIRED:
      raise self.wrong(name, expected)
    return default

  def number(self, name: str, low: float = -math.inf, high: float = math.inf, *, default: Any = _REQUIRED) -> Any:
    """Returns a finite number of these limits as a float."""
    expected = f'a number{_limits(low, high)}'
    value = self._get(name, default, expected)
    if value is default:
      return value
    if not is_number(value) or not low <= value <= high:
      raise self.wrong(name, expected)
    return float(value)

  def whole(self, name: str, low: int = 0, high: int = MOST_WHOLE, *, default: Any = _REQUIRED) -> Any:
    """Returns a whole number of these limits."""
    expected = f'a whole number{_limits(low, high)}'
    value = self._get(name, default, expected)
    if value is default:
      return value
    if not is_number(value) or value != int(value) or not low <= value <= high:
      raise self.wrong(name, expected)
    return int(value)

  def text(self, name: str, *, default: Any = _REQUIRED) -> Any:
    """Returns a text."""
    value = self._get(name, default, 'a text')
    if value is not default and not isinstance(value, str):
      raise self.wrong(name, 'a text')
    return value

  def flag(self, name: str, *, default: Any = _REQUIRED) -> Any:
    """Returns true or false."""
    value = self._get(name, default, 'true or false')
    if value is not default and not isinstance(value, bool):
      raise self.wrong(name, 'true or false')
    return value

  def choice(self, name: str, kind: type[E], *, default: Any = _REQUIRED) -> Any:
    """Returns the member of an enumeration that has this value."""
    expected = f'one of {", ".join(str(one.value) for one in kind)}'
    value = self._get(name, default, expected)
    if value is default:
      return value
    if not isinstance(value, str) or value not in {one.value for one in kind}:
      raise self.wrong(name, expected)
    return kind(value)

  def numbers(self, name: str, count: int, low: float, high: float, *, whole: bool = False,
              default: Any = _REQUIRED) -> Any:
    """Returns a list of so many numbers of these limits, as a tuple."""
    expected = f'a list of {count} {"whole " * whole}numbers{_limits(low, high)}'
    value = self._get(name, default, expected)
    if value is default:
      return value
    if not isinstance(value, list | tuple) or len(value) != count or not all(
        is_number(one) and low <= one <= high and (not whole or one == int(one)) for one in value):
      raise self.wrong(name, expected)
    return tuple(int(one) if whole else float(one) for one in value)

  def texts(self, name: str, *, most: int = 1_000_000, default: Any = _REQUIRED) -> Any:
    """Returns a list of texts as a tuple."""
    expected = f'a list of up to {most:,} texts'
    value = self._get(name, default, expected)
    if value is default:
      return value
    if not isinstance(value, list | tuple) or len(value) > most or not all(isinstance(one, str) for one in value):
      raise self.wrong(name, expected)
    return tuple(value)

  def table(self, name: str) -> Table:
    """Returns an object; an empty one if it is absent."""
    value = self.content.get(name)
    return Table({} if value is None else value, f'{self.said}, {name}', fix=self._fix)


def is_number(value: object) -> bool:
  """Returns whether a value is a finite number that a float can hold."""
  if type(value) is int:
    return abs(value) < 2**1000
  return type(value) is float and math.isfinite(value)


def _limits(low: float, high: float) -> str:
  found: Iterable[str] = ([f'at least {low:,.12g}'] if math.isinf(high) and not math.isinf(low) else
                          [f'{low:,.12g} to {high:,.12g}'] if not math.isinf(low) else [])
  return ''.join(f', {one}' for one in found)
