"""Reads JSON files that a person may have written or changed: each field is checked, and named if it is wrong."""
from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from vit_jax.core import json_text
from vit_jax.core.errors import UserError
from vit_jax.data.files import user_files

_SHOWN = 60  # characters of a value in a message


class Field(NamedTuple):
  """A value of a JSON file.

  file: begins messages.
  advice: ends them.
  place: the path of the field in the file, such as `splits.train[0].file`; '' = the complete value.
  """
  value: Any
  file: str
  advice: str
  place: str = ''

  @property
  def where(self) -> str:
    """What messages begin with."""
    return f'{self.file}, {self.place}' if self.place else self.file

  def error(self, expected: str) -> UserError:
    """Returns the error that a value is not what was expected."""
    return UserError(f'{self.where}: expected {expected}, got {describe(self.value)}. {self.advice}')

  def field(self, name: str) -> Field:
    """Returns the field of an object. Raises UserError if it is missing, or the value is not an object."""
    found = self.optional(name)
    if found is None:
      names = listed(list(self.value), 5) or 'none'
      raise UserError(f'{self.where}: expected the field {name}, got {names}. {self.advice}')
    return found

  def optional(self, name: str) -> Field | None:
    """Returns the field of an object, or None."""
    content = self.object()
    return self._inside(f'.{name}', content[name]) if name in content else None

  def fields(self) -> Iterator[tuple[str, Field]]:
    """Yields names and values of an object."""
    for name, value in self.object().items():
      yield name, self._inside(f'.{shown(name)}', value)

  def items(self) -> Iterator[Field]:
    """Yields the values of a list."""
    for place, value in enumerate(self.list()):
      yield self._inside(f'[{place}]', value)

  def object(self) -> dict[str, Any]:
    if not isinstance(self.value, dict):
      raise self.error('an object')
    return self.value

  def list(self) -> list[Any]:
    if not isinstance(self.value, list):
      raise self.error('a list')
    return self.value

  def text(self) -> str:
    """Returns a text without control characters, of valid Unicode."""
    if not isinstance(self.value, str) or not is_clean(self.value):
      raise self.error('text without control characters')
    return self.value

  def whole(self, low: int, high: int = 2**63 - 1) -> int:
    """Returns a whole number from `low` to `high`."""
    if type(self.value) is not int or not low <= self.value <= high:
      raise self.error(f'a whole number from {low:,}' + (f' to {high:,}' if high < 2**62 else ''))
    return self.value

  def number(self) -> float:
    """Returns a finite number."""
    if type(self.value) not in (int, float) or not abs(self.value) < 1e300:
      raise self.error('a finite number')
    return float(self.value)

  def _inside(self, name: str, value: Any) -> Field:
    return Field(value, self.file, self.advice, f'{self.place}{name}'.lstrip('.'))


_UNCLEAN = re.compile('[\0-\x1f\x7f-\x9f\ud800-\udfff]')


def is_clean(text: str) -> bool:
  """Returns whether a text has no control characters, and can be written as UTF-8."""
  return not _UNCLEAN.search(text)


def is_unicode(value: Any) -> bool:
  """Returns whether all texts of a value of a JSON file can be written as UTF-8."""
  try:
    json.dumps(value, ensure_ascii=False).encode()
  except UnicodeEncodeError:
    return False
  return True


def shown(text: str) -> str:
  """Returns the beginning of a text of a file as a message shows it, with what cannot be printed escaped."""
  found = ''.join(c if c.isprintable() else f'\\x{ord(c) - 0xDC00:02x}' if '\udc80' <= c <= '\udcff' else ascii(c)[1:-1]
                  for c in text[:_SHOWN])
  return f'{found}…' if len(text) > _SHOWN else found


def listed(names: Sequence[str], most: int) -> str:
  """Returns the first names as a message shows them, and the number of the others."""
  more = f' and {len(names) - most} more' if len(names) > most else ''
  return ', '.join(map(shown, names[:most])) + more


def describe(value: Any) -> str:
  """Returns a value as a message shows it."""
  match value:
    case dict():
      return f'an object with {len(value):,} fields'
    case list():
      return f'a list of {len(value):,}'
    case str():
      return f"'{shown(value)}'"
    case int() if abs(value) >= 10**_SHOWN:
      return 'a number with many digits'
  return json.dumps(value)


def parse(text: str | bytes, where: str, *, expected: str, advice: str) -> Field:
  """Returns the value of a JSON text.

  Raises:
    UserError: it is not JSON, or its lists are nested too deeply.
  """
  try:
    return Field(json_text.parse(text), where, advice)
  except ValueError as error:
    raise UserError(f'{where}: expected {expected}, got {error}. {advice}') from None


def read(path: str | os.PathLike[str], *, expected: str, advice: str, where: str = '',
         max_bytes: int = user_files.TEXT_BYTES) -> Field:
  """Returns the value of a JSON file.

  Raises:
    UserError: it cannot be read, is too large, or is not JSON.
  """
  where = where or os.fspath(path)
  text = user_files.read_text(path, where, expected=expected, advice=advice, max_bytes=max_bytes)
  return parse(text, where, expected=expected, advice=advice)
