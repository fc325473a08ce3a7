"""Reads files that this program, another program or a person wrote, within limits: bytes, texts, and above all JSON.

`read_bytes` reads a file, `read_text` decodes it, `parse` reads JSON, `load` and `read` do all of it. `load` returns
plain values and raises exceptions of Python, for files that a caller can do without. `read` returns a `Field`, whose
methods check the type of each value: `read(path).field('splits').fields()`. All of them raise the same message.

The size of a file is checked before it is read: a sparse file of 20 GB takes no space on a disk, and would take 20 GB
of memory. A JSON text may have `MAX_BYTES`, be nested `MAX_DEPTH` deep, and have numbers that a float can hold; NaN and
infinities, which JSON does not have, are read where a caller allows them. No other module parses JSON
(`tests/test_house.py`). Imports only `core`.
"""
from __future__ import annotations

import contextlib
import enum
import errno
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple, TypeVar

from vit_jax.core import failures
from vit_jax.core.errors import UserError

Path = str | os.PathLike[str]
T = TypeVar('T')
MAX_BYTES = 2**26  # of a file, 64 MiB
MAX_DEPTH = 100    # of nested lists and objects
MAX_DIGITS = 300   # of a number
RESTORE = 'Restore the file, or run the command that wrote it again.'
"""Advice about a file that this program wrote."""
_BLOCK_BYTES = 2**22  # read at once, 4 MiB
_SHOWN = 60  # characters of a value in a message
_REQUIRED: Any = object()  # as a default: the field must be there
_LONG_NUMBER = re.compile(rf'(?<!\d)\d{{{MAX_DIGITS}}}|[eE]\+?\d{{3}}')  # many digits, or 1e999: to be checked
_UNCLEAN = re.compile('[\0-\x1f\x7f-\x9f\ud800-\udfff]')  # control characters and surrogates


class TooLarge(UserError):
  """A file is larger than the limit; `found` is its size in words."""

  def __init__(self, path: Path, size: int, most: int) -> None:
    self.found = f'{size:,} bytes'
    super().__init__(f'{os.fspath(path)}: expected a file of at most {most:,} bytes, got one of {self.found}. Restore '
                     'the file, or use a smaller one.')


def read_bytes(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
  """Returns the content of a regular file, or of an object that a path of `etils.epath` names.

  Raises:
    TooLarge: it has more than `max_bytes`.
    OSError: it cannot be read.
  """
  stored: Any = path if '://' in os.fspath(path) and hasattr(path, 'open') else None
  with open_file(path) if stored is None else stored.open('rb') as file:
    if stored is None and (size := os.fstat(file.fileno()).st_size) > max_bytes:
      raise TooLarge(path, size, max_bytes)
    parts, size = [], 0
    while part := file.read(_BLOCK_BYTES):  # objects and files below /proc have no size
      parts.append(part)
      if (size := size + len(part)) > max_bytes:
        raise TooLarge(path, size, max_bytes)
    return b''.join(parts)


def open_file(path: Path) -> BinaryIO:
  """Opens a regular file for reading. Unlike `open`, it does not wait if the path is a pipe without a writer.

  Raises:
    OSError: it cannot be opened, or is a pipe, a socket, a device or a folder.
  """
  return open(path, 'rb', opener=open_regular)


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
  """Opens a regular file as `os.open` does; raises as `open_file`."""
  opened = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
  kind = stat.S_IFMT(os.fstat(opened).st_mode)
  if kind == stat.S_IFREG:
    return opened
  os.close(opened)
  if kind == stat.S_IFDIR:
    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
  raise OSError(errno.EINVAL, f'{"a pipe" if kind == stat.S_IFIFO else "a device"} in place of a file', os.fspath(path))


@contextlib.contextmanager
def explained(what: str, *, max_bytes: int, expected: str, advice: str) -> Iterator[None]:
  """Raises UserError or TemporaryError in place of the errors of reading a text inside of the `with` statement.

  Args:
    what: begins the message: the setting with the path, or the path.
    max_bytes: the limit of the size that was read with, for the message.
    expected, advice: parts of the message: `what: expected …, got …. advice`.
  """
  def error(got: str) -> UserError:
    return UserError(f'{what}: expected {expected}, got {got}. {advice}')
  try:
    yield
  except TooLarge as large:
    raise error(f'a file of {large.found}; at most {max_bytes:,} are read') from None
  except UnicodeDecodeError as wrong:
    line = wrong.object.count(b'\n', 0, wrong.start) + 1
    raise error(f'byte 0x{wrong.object[wrong.start]:02x} in line {line:,}, which is not UTF-8') from None
  except OSError as failed:
    raise failures.kind(failed)(str(error(f'"{failed.strerror or failed}"'))) from failed
  except UserError:
    raise
  except ValueError:  # of `open`, for a path with a zero byte
    raise error('a path with a zero byte') from None


def read_text(path: Path, where: str = '', *, max_bytes: int = MAX_BYTES, expected: str = 'a text file',
              advice: str = 'Check the path.') -> str:
  """Returns the text of a file in UTF-8, with or without a byte order mark.

  Args:
    path: of the file; `~` at its start is the home directory.
    where: begins the message: the setting with the path; '' = the path.
    max_bytes: the largest size.
    expected, advice: for the message.

  Raises:
    UserError, TemporaryError: it cannot be read, is too large, or is not text in UTF-8.
  """
  name = os.fspath(path)
  full_path = path if '://' in name else os.path.expanduser(name)
  with explained(where or name, max_bytes=max_bytes, expected=expected, advice=advice):
    return failures.retried(lambda: read_bytes(full_path, max_bytes), f'reading {name}').decode('utf-8-sig')


def parse(data: bytes | str, *, nan: bool = False) -> Any:
  """Returns the value of a JSON text. With `nan`, NaN and infinite numbers are read, as some programs write them.

  Raises:
    ValueError: it is not JSON, exceeds a limit, or an object has two fields of one name; the message says where.
  """
  try:
    text = data if isinstance(data, str) else str(data, 'utf-8-sig')
    hooks: dict[str, Any] = {} if nan else {'parse_constant': _refuse_constant}
    if _LONG_NUMBER.search(text):
      hooks |= {'parse_int': _whole, 'parse_float': float if nan else _finite}
    value = json.loads(text, object_pairs_hook=_unique, **hooks)
    is_maybe_deep = isinstance(value, dict | list) and text.count('[') + text.count('{') > MAX_DEPTH
    containers = [value] if is_maybe_deep else []
    for _ in range(MAX_DEPTH + 1):  # one level deeper each time
      children = [child for one in containers for child in (one.values() if isinstance(one, dict) else one)]
      containers = [child for child in children if isinstance(child, dict | list)]
    if containers:
      raise RecursionError  # which the parser raises for a text that is too deep for it
    return value
  except json.JSONDecodeError as error:
    end = 'it ends' if error.pos >= len(error.doc.rstrip()) else f'{error.doc[error.pos:error.pos + 12]!r} is there'
    raise ValueError(f'no JSON at line {error.lineno}, column {error.colno}, where {end}' if data.strip() else
                     'an empty file') from None
  except UnicodeDecodeError as error:
    raise ValueError(f'text that is not UTF-8 at byte {error.start:,}') from None
  except RecursionError:
    raise ValueError('JSON that is nested too deep') from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  """Returns the fields of a JSON object; raises ValueError if two have the same name."""
  names = [name for name, _ in pairs]
  if len(set(names)) < len(names):
    first = next(name for name in names if names.count(name) > 1)
    raise ValueError(f'the field {ascii(first)[:_SHOWN]} twice')
  return dict(pairs)


def _refuse_constant(name: str) -> float:
  raise ValueError(f'JSON with {name}, which is not a number')


def _whole(text: str) -> int:
  if len(text) > MAX_DIGITS:
    raise ValueError('JSON with a number of too many digits')
  return int(text)


def _finite(text: str) -> float:
  if math.isinf(number := float(text)):
    raise ValueError(f'JSON with the number {text[:_SHOWN]}, which is too large')
  return number


def load(path: Path, *, max_bytes: int = MAX_BYTES) -> Any:
  """Returns the value of a JSON file, also one in object storage.

  Raises:
    OSError: it cannot be read.
    ValueError: it is too large, or as `parse`.
  """
  try:
    return parse(read_bytes(path, max_bytes))
  except TooLarge as large:
    raise ValueError(f'a file of {large.found}; at most {max_bytes:,} are read') from None


def field(text: str | bytes, where: str, *, expected: str, advice: str, nan: bool = False) -> Field:
  """Returns the value of a JSON text; `expected` and `advice` are for the message that begins with `where`.

  Raises:
    UserError: as `parse`.
  """
  try:
    return Field(parse(text, nan=nan), where, advice)
  except ValueError as error:
    raise UserError(f'{where}: expected {expected}, got {error}. {advice}') from None


def read(path: Path, *, expected: str = 'a JSON object', advice: str = RESTORE, where: str = '') -> Field:
  """Returns the value of a JSON file.

  Raises:
    UserError, TemporaryError: it cannot be read, is too large, or is not JSON.
  """
  where = where or os.fspath(path)
  return field(read_text(path, where, expected=expected, advice=advice), where, expected=expected, advice=advice)


class Field(NamedTuple):
  """A value of a JSON file. Each method that returns the value raises UserError if it is of another type.

  value: as `parse` returns it.
  file: the path, with which messages begin.
  advice: the sentence with which messages end.
  place: the path of the field in the file, such as `splits.train[0].file`; '' = the complete value.
  default: returned by the methods if the value is absent or null.
  """
  value: Any
  file: str
  advice: str = RESTORE
  place: str = ''
  default: Any = _REQUIRED

  @property
  def where(self) -> str:
    """What messages begin with."""
    return f'{self.file}, {self.place}' if self.place else self.file

  def error(self, expected: str) -> UserError:
    """Returns the error that a value is not what was expected."""
    return UserError(f'{self.where}: expected {expected}, got {describe(self.value)}. {self.advice}')

  def __contains__(self, name: Any) -> bool:
    """Whether an object has a field of this name that is not null."""
    return self.object().get(name) is not None

  def field(self, name: str, *, default: Any = _REQUIRED) -> Field:
    """Returns the field of an object; raises UserError if it is missing and has no default."""
    content = self.object()
    if name not in content and default is _REQUIRED:
      raise UserError(f'{self.where}: expected the field {shown(name)}, got {listed(list(content), 5) or "none"}. '
                      f'{self.advice}')
    return self._inside(f'.{shown(name)}', content.get(name))._replace(default=default)

  def part(self, name: str) -> Field:
    """Returns the object of a field; an empty one if it is absent or null."""
    part = self.field(name, default={})
    return part._replace(value=part.object())

  def optional(self, name: str) -> Field | None:
    """Returns the field of an object, or None."""
    return self.field(name) if name in self.object() else None

  def fields(self) -> Iterator[tuple[str, Field]]:
    """Yields names and values of an object."""
    for name, value in self.object().items():
      yield name, self._inside(f'.{shown(name)}', value)

  def items(self) -> Iterator[Field]:
    """Yields the values of a list."""
    for position, value in enumerate(self.list()):
      yield self._inside(f'[{position}]', value)

  def object(self) -> dict[str, Any]:
    return self._checked('an object' if self.place else 'a JSON object', lambda x: isinstance(x, dict), dict)

  def list(self) -> list[Any]:
    return self._checked('a list', lambda x: isinstance(x, list | tuple), list)

  def text(self) -> str:
    """Returns a text without control characters, of valid Unicode."""
    return self._checked('text without control characters', lambda x: isinstance(x, str) and is_clean(x), str)

  def texts(self, most: int = 1_000_000) -> tuple[str, ...]:
    """Returns a list of texts as a tuple."""
    return self._checked(f'a list of up to {most:,} texts', lambda x: isinstance(x, list | tuple) and len(x) <= most
                         and all(isinstance(one, str) for one in x), tuple)

  def flag(self) -> bool:
    """Returns true or false."""
    return self._checked('true or false', lambda x: isinstance(x, bool), bool)

  def choice(self, kind: type[enum.Enum]) -> Any:
    """Returns the member of an enumeration that has this value."""
    known = [one.value for one in kind]
    return self._checked(f'one of {", ".join(map(str, known))}', lambda x: isinstance(x, str) and x in known, kind)

  def whole(self, low: int = 0, high: int = 2**63 - 1) -> int:
    """Returns a whole number from `low` to `high`."""
    return self._checked(f'a whole number{_limits(low, high)}', lambda x: _is_whole(x) and low <= x <= high, int)

  def number(self, low: float = -math.inf, high: float = math.inf) -> float:
    """Returns a finite number of these limits as a float."""
    return self._checked(f'a finite number{_limits(low, high)}', lambda x: is_number(x) and low <= x <= high, float)

  def numbers(self, count: int, low: float, high: float, *, whole: bool = False) -> tuple[Any, ...]:
    """Returns a list of so many numbers of these limits, as a tuple."""
    fits = _is_whole if whole else is_number
    return self._checked(
        f'a list of {count} {"whole " * whole}numbers{_limits(low, high)}',
        lambda x: isinstance(x, list | tuple) and len(x) == count and all(fits(n) and low <= n <= high for n in x),
        lambda x: tuple(map(int if whole else float, x)))

  def _checked(self, expected: str, is_right: Callable[[Any], bool], convert: Callable[[Any], T]) -> T:
    if self.value is None and self.default is not _REQUIRED:
      return self.default
    if not is_right(self.value):
      raise self.error(expected)
    return convert(self.value)

  def _inside(self, name: str, value: Any) -> Field:
    return Field(value, self.file, self.advice, f'{self.place}{name}'.lstrip('.'))


def is_number(value: object) -> bool:
  """Returns whether a value is a finite number that a float can hold."""
  return type(value) is int and abs(value) < 2**1000 or type(value) is float and math.isfinite(value)


def _is_whole(value: Any) -> bool:
  return is_number(value) and value == int(value)


def _limits(low: float, high: float) -> str:
  if math.isinf(low):
    return ''
  return f' of at least {low:,.12g}' if high >= 2**62 else f' from {low:,.12g} to {high:,.12g}'


def finite(value: Any) -> Any:
  """Returns a value of dicts, lists and numbers with None in place of infinite numbers and NaN, as JSON has none."""
  match value:
    case float():
      return value if math.isfinite(value) else None
    case Mapping():
      return {name: finite(inner) for name, inner in value.items()}
    case list() | tuple():
      return [finite(inner) for inner in value]
  return value


def is_clean(text: str) -> bool:
  """Returns whether a text has no control characters, and can be written as UTF-8."""
  return not _UNCLEAN.search(text)


def is_unicode(value: Any) -> bool:
  """Returns whether all texts of a value can be written as UTF-8."""
  return not re.search('[\ud800-\udfff]', json.dumps(value, ensure_ascii=False))


def shown(text: str) -> str:
  """Returns the beginning of a text of a file as a message shows it, with what cannot be printed escaped."""
  def escaped(letter: str) -> str:
    is_byte = '\udc80' <= letter <= '\udcff'  # how Python holds a byte of the name of a file that is not UTF-8
    return f'\\x{ord(letter) - 0xDC00:02x}' if is_byte else ascii(letter)[1:-1]

  start = ''.join(letter if letter.isprintable() else escaped(letter) for letter in text[:_SHOWN])
  return f'{start}…' if len(text) > _SHOWN else start


def joined(names: Sequence[str], most: int) -> str:
  """Returns up to `most` names and the number of the others: `a, b and 3 more`; '' for no names."""
  return ', '.join(names[:most]) + (f' and {len(names) - most} more' if len(names) > most else '')


def listed(names: Sequence[str], most: int) -> str:
  """Returns `joined` names of a file or folder, each as `shown`."""
  return joined([*map(shown, names[:most]), *names[most:]], most)


def describe(value: Any) -> str:
  """Returns a value as a message shows it."""
  match value:
    case dict():
      return f'an object with {len(value):,} fields'
    case list() | tuple():
      is_short = 0 < len(value) <= 4 and all(is_number(one) and abs(one) < 1e9 for one in value)
      return json.dumps(value) if is_short else f'a list of {len(value):,}'
    case str():
      return f"'{shown(value)}'"
    case int() if abs(value) >= 10**_SHOWN:
      return 'a number with many digits'
  return json.dumps(value)
