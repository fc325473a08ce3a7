"""Reads files that this program, another program or a person wrote, within limits: bytes, texts, and above all JSON.

`read_bytes` returns the bytes of a file, `read_text` the text, `load` and `read` the value of a JSON file. `load` (and
`parse` for a text) returns plain values and raises exceptions of Python, for files that a caller can do without. `read`
(and `field` for a text) returns a `Field`, whose methods check the type of each value, as in
`read(path).field('splits').fields()`. `read_text`, `read` and these methods raise UserErrors of one form.

The size of a file is checked first: a sparse file of 20 GB takes no space on a disk, and would take 20 GB of memory. A
JSON text may have `MAX_BYTES`, be nested `MAX_DEPTH` deep, and have numbers that a float can hold. NaN and infinities,
which JSON does not have, are read if a caller allows them. No other module parses JSON (`tests/test_house.py`).
"""
from __future__ import annotations

import contextlib
import dataclasses
import enum
import errno
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, TypeVar

from vit_jax.core import failures
from vit_jax.core.errors import UserError

AnyPath = str | os.PathLike[str]
T = TypeVar('T')
MAX_BYTES = 2**26  # of a file, 64 MiB
MAX_DEPTH = 100    # of nested lists and objects
MAX_DIGITS = 300   # of a number
RESTORE = 'Restore the file, or run the command that wrote it again.'  # advice about a file that this program wrote
_BLOCK_BYTES = 2**22  # read at once, 4 MiB
_MAX_SHOWN = 60  # characters of a value in a message
_REQUIRED: Any = object()  # the default of a field that must be present
_LONG_NUMBER = re.compile(r'\d{200}|[eE]\+?\d{3}')  # fewer digits with a shorter exponent fit into a float
_UNCLEAN = re.compile('[\0-\x1f\x7f-\x9f\ud800-\udfff]')  # control characters and surrogates


class TooLarge(UserError):
  """A file is larger than `max_bytes`; `found` is its size as text, such as `1,000 bytes`."""

  def __init__(self, path: AnyPath, num_bytes: int, max_bytes: int) -> None:
    self.found = f'{num_bytes:,} bytes'
    super().__init__(f'{os.fspath(path)}: expected a file of at most {max_bytes:,} bytes, got one of {self.found}. '
                     'Restore the file, or use a smaller one.')


def read_bytes(path: AnyPath, max_bytes: int = MAX_BYTES) -> bytes:
  """Returns the content of a regular file, or of an object in object storage that a path of `etils.epath` names.

  Raises:
    TooLarge: the file has more than `max_bytes`.
    OSError: the file cannot be read.
  """
  file, declared_bytes = _open(path)
  with file:
    if declared_bytes > max_bytes:
      raise TooLarge(path, declared_bytes, max_bytes)
    blocks, num_bytes = [], 0
    while block := file.read(_BLOCK_BYTES):
      blocks.append(block)
      num_bytes += len(block)
      if num_bytes > max_bytes:
        raise TooLarge(path, num_bytes, max_bytes)
    return b''.join(blocks)


def _open(path: AnyPath) -> tuple[BinaryIO, int]:
  """Opens a file or object, and returns its size, too; the size is 0 for objects and for files below /proc."""
  if '://' in os.fspath(path) and hasattr(path, 'open'):  # a path of `etils.epath`
    return path.open('rb'), 0
  file = open_file(path)
  return file, os.fstat(file.fileno()).st_size


def open_file(path: AnyPath) -> BinaryIO:
  """Opens a regular file for reading. Unlike `open`, this does not wait if the path is a pipe without a writer.

  Raises:
    OSError: the file cannot be opened, or the path is a pipe, a socket, a device or a folder.
  """
  return open(path, 'rb', opener=open_regular)


def open_regular(path: AnyPath, flags: int = os.O_RDONLY) -> int:
  """Opens a regular file, and returns a file descriptor as `os.open` does; raises as `open_file`."""
  descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
  mode = os.fstat(descriptor).st_mode
  if stat.S_ISREG(mode):
    return descriptor
  os.close(descriptor)
  if stat.S_ISDIR(mode):
    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
  raise OSError(errno.EINVAL, f'{"a pipe" if stat.S_ISFIFO(mode) else "a device"} in place of a file', os.fspath(path))


@contextlib.contextmanager
def explained(path: AnyPath, subject: str, *, max_bytes: int, expected: str, advice: str) -> Iterator[None]:
  """Raises UserError or TemporaryError in place of the errors that reading a text raises in the `with` statement.

  Args:
    path, subject: the path, and the setting with the path, or the path again; messages begin with the subject.
    max_bytes: the limit of the size, which the message about a larger file names.
    expected, advice: parts of the message: `subject: expected …, got …. advice`.
  """
  def message(got: str) -> str:
    return f'{subject}: expected {expected}, got {got}. {advice}'
  if '\0' in os.fspath(path):
    raise UserError(message('a path with a zero byte'))
  try:
    yield
  except TooLarge as error:
    raise UserError(message(f'a file of {error.found}; at most {max_bytes:,} are read')) from None
  except UnicodeDecodeError as error:
    line = error.object.count(b'\n', 0, error.start) + 1
    raise UserError(message(f'byte 0x{error.object[error.start]:02x} in line {line:,}, which is not UTF-8')) from None
  except OSError as error:
    raise failures.error_class(error)(message(f'"{error.strerror or error}"')) from error


def read_text(path: AnyPath, subject: str = '', *, max_bytes: int = MAX_BYTES, expected: str = 'a text file',
              advice: str = 'Check the path.') -> str:
  """Returns the text of a file in UTF-8, with or without a byte order mark.

  Args:
    path: the path of the file, in which a leading `~` is the home directory.
    subject: the setting with the path; the message begins with it; '' = the path.
    max_bytes: the largest size of the file.
    expected, advice: parts of the message, as in `explained`.

  Raises:
    UserError, TemporaryError: the file cannot be read, is too large, or is not text in UTF-8.
  """
  name = os.fspath(path)
  full_path = path if '://' in name else os.path.expanduser(name)
  with explained(name, subject or name, max_bytes=max_bytes, expected=expected, advice=advice):
    return failures.retried(lambda: read_bytes(full_path, max_bytes), f'reading {name}').decode('utf-8-sig')


def parse(data: bytes | str, *, nan: bool = False) -> Any:
  """Returns the value of a JSON text. With `nan`, NaN and infinite numbers are read, as some programs write them.

  Raises:
    ValueError: the text is not JSON, exceeds a limit, or has a field twice; the message can follow the word "got".
  """
  try:
    text = data if isinstance(data, str) else str(data, 'utf-8-sig')
    hooks: dict[str, Any] = {} if nan else {'parse_constant': _refuse_constant}
    if _LONG_NUMBER.search(text):  # these hooks are slow, so that only a text that may need them gets them
      hooks |= {'parse_int': _parse_whole, 'parse_float': float if nan else _parse_finite}
    value = json.loads(text, object_pairs_hook=_object_of_unique_fields, **hooks)
    if text.count('[') + text.count('{') > MAX_DEPTH and _is_too_deep(value):
      raise RecursionError  # as the parser does if it cannot read the text
    return value
  except json.JSONDecodeError as error:
    if not data.strip():
      raise ValueError('an empty file') from None
    end = 'it ends' if error.pos >= len(error.doc.rstrip()) else f'{error.doc[error.pos:error.pos + 12]!r} is there'
    raise ValueError(f'no JSON at line {error.lineno}, column {error.colno}, where {end}') from None
  except UnicodeDecodeError as error:
    raise ValueError(f'text that is not UTF-8 at byte {error.start:,}') from None
  except RecursionError:
    raise ValueError('JSON that is nested too deep') from None


def _is_too_deep(value: Any) -> bool:
  """Returns whether a JSON value has lists and objects that are nested more than `MAX_DEPTH` deep."""
  level = [value]
  for _ in range(MAX_DEPTH):
    containers = [node.values() if isinstance(node, dict) else node for node in level if isinstance(node, dict | list)]
    level = [child for children in containers for child in children]
  return any(isinstance(node, dict | list) for node in level)


def _object_of_unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  """Returns the fields of a JSON object; raises ValueError if two fields have the same name."""
  names = [name for name, _ in pairs]
  if len(set(names)) < len(names):
    first = next(name for name in names if names.count(name) > 1)
    raise ValueError(f'the field {ascii(first)[:_MAX_SHOWN]} twice')
  return dict(pairs)


def _refuse_constant(name: str) -> float:
  raise ValueError(f'JSON with {name}, which is not a number')


def _parse_whole(text: str) -> int:
  if len(text.removeprefix('-')) > MAX_DIGITS:
    raise ValueError('JSON with a number of too many digits')
  return int(text)


def _parse_finite(text: str) -> float:
  if math.isinf(number := float(text)):
    raise ValueError(f'JSON with the number {text[:_MAX_SHOWN]}, which is too large')
  return number


def load(path: AnyPath, *, max_bytes: int = MAX_BYTES) -> Any:
  """Returns the value of a JSON file, also one in object storage.

  Raises:
    OSError: the file cannot be read.
    ValueError: the file is too large, or as in `parse`.
  """
  try:
    return parse(read_bytes(path, max_bytes))
  except TooLarge as error:
    raise ValueError(f'a file of {error.found}; at most {max_bytes:,} are read') from None


def field(text: str | bytes, subject: str, *, expected: str, advice: str, nan: bool = False) -> Field:
  """Returns the value of a JSON text; `nan` allows NaN and infinities. Other arguments are those of `read_text`.

  Raises:
    UserError: in place of the ValueError of `parse`.
  """
  try:
    return Field(parse(text, nan=nan), subject, advice)
  except ValueError as error:
    raise UserError(f'{subject}: expected {expected}, got {error}. {advice}') from None


def read(path: AnyPath, *, expected: str = 'a JSON object', advice: str = RESTORE, subject: str = '') -> Field:
  """Returns the value of a JSON file. The arguments are those of `read_text`.

  Raises:
    UserError, TemporaryError: the file cannot be read, is too large, or is not JSON.
  """
  subject = subject or os.fspath(path)
  return field(read_text(path, subject, expected=expected, advice=advice), subject, expected=expected, advice=advice)


@dataclasses.dataclass(frozen=True)
class Field:
  """A value of a JSON file. Each method that returns the value raises UserError if it is of another type.

  value: the value, as `parse` returns it.
  source: the file, or the setting with its path; messages begin with it.
  advice: the sentence with which messages end.
  json_path: the position of the value in the file, such as `splits.train[0].file`; '' = the value is the whole file.
  default: what the methods return if the value is absent or null; by default they raise UserError.
  """
  value: Any
  source: str
  advice: str = RESTORE
  json_path: str = ''
  default: Any = _REQUIRED

  @property
  def place(self) -> str:
    """The source and the position of the value in the file, with which messages begin."""
    return f'{self.source}, {self.json_path}' if self.json_path else self.source

  def error(self, expected: str) -> UserError:
    """Returns the error that the value is not `expected`."""
    return UserError(f'{self.place}: expected {expected}, got {describe(self.value)}. {self.advice}')

  def __contains__(self, name: Any) -> bool:
    """Returns whether the object has a field of this name that is not null."""
    return self.object().get(name) is not None

  def field(self, name: str, *, default: Any = _REQUIRED) -> Field:
    """Returns a field of the object. Raises UserError if there is no field of this name and no default."""
    content = self.object()
    if name not in content and default is _REQUIRED:
      raise UserError(f'{self.place}: expected the field {shown(name)}, got {listed(list(content), 5) or "none"}. '
                      f'{self.advice}')
    return dataclasses.replace(self._child(f'.{shown(name)}', content.get(name)), default=default)

  def object_or_empty(self, name: str) -> Field:
    """Returns a field of the object that is itself an object; an empty object if the field is absent or null."""
    field = self.field(name, default={})
    return dataclasses.replace(field, value=field.object())

  def optional(self, name: str) -> Field | None:
    """Returns a field of the object; None if the field is absent. A field that is null is returned."""
    return self.field(name) if name in self.object() else None

  def fields(self) -> Iterator[tuple[str, Field]]:
    """Yields the names and values of the object."""
    for name, value in self.object().items():
      yield name, self._child(f'.{shown(name)}', value)

  def elements(self) -> Iterator[Field]:
    """Yields the elements of the list."""
    for position, value in enumerate(self.list()):
      yield self._child(f'[{position}]', value)

  def object(self) -> dict[str, Any]:
    return self._checked('an object' if self.json_path else 'a JSON object', lambda x: isinstance(x, dict), dict)

  def list(self) -> list[Any]:
    return self._checked('a list', lambda x: isinstance(x, list | tuple), list)

  def text(self) -> str:
    """Returns the text, which has no control characters and is valid Unicode."""
    return self._checked('text without control characters', lambda x: isinstance(x, str) and is_clean(x), str)

  def texts(self, max_texts: int = 1_000_000) -> tuple[str, ...]:
    """Returns the list of texts as a tuple."""
    def is_valid(x: Any) -> bool:
      return isinstance(x, list | tuple) and len(x) <= max_texts and all(isinstance(text, str) for text in x)
    return self._checked(f'a list of up to {max_texts:,} texts', is_valid, tuple)

  def flag(self) -> bool:
    """Returns true or false."""
    return self._checked('true or false', lambda x: isinstance(x, bool), bool)

  def choice(self, choices: type[enum.Enum]) -> Any:
    """Returns the member of the enumeration `choices` that has this value."""
    known = [member.value for member in choices]
    return self._checked(f'one of {", ".join(map(str, known))}', lambda x: isinstance(x, str) and x in known, choices)

  def whole(self, low: int = 0, high: int = 2**63 - 1) -> int:
    """Returns the whole number, which is from `low` to `high`."""
    return self._checked(f'a whole number{_limits(low, high)}', lambda x: _is_whole(x) and low <= x <= high, int)

  def number(self, low: float = -math.inf, high: float = math.inf) -> float:
    """Returns the finite number, which is from `low` to `high`, as a float."""
    return self._checked(f'a finite number{_limits(low, high)}', lambda x: is_number(x) and low <= x <= high, float)

  def numbers(self, count: int, low: float, high: float, *, whole: bool = False) -> tuple[Any, ...]:
    """Returns the list of `count` numbers from `low` to `high` as a tuple: whole numbers, or by default floats."""
    is_valid = _is_whole if whole else is_number
    return self._checked(
        f'a list of {count} {"whole " * whole}numbers{_limits(low, high)}',
        lambda x: isinstance(x, list | tuple) and len(x) == count and all(is_valid(n) and low <= n <= high for n in x),
        lambda x: tuple(map(int if whole else float, x)))

  def _checked(self, expected: str, is_valid: Callable[[Any], bool], convert: Callable[[Any], T]) -> T:
    """Returns the converted value, or the default in place of null. Raises UserError if the value is not valid."""
    if self.value is None and self.default is not _REQUIRED:
      return self.default
    if not is_valid(self.value):
      raise self.error(expected)
    return convert(self.value)

  def _child(self, suffix: str, value: Any) -> Field:
    """Returns a value inside this value; `suffix` is the end of the child's `json_path`, such as `.train` or `[0]`."""
    return Field(value, self.source, self.advice, f'{self.json_path}{suffix}'.lstrip('.'))


def is_number(value: object) -> bool:
  """Returns whether a value is a finite number that a float can hold."""
  return type(value) is int and abs(value) < 2**1000 or type(value) is float and math.isfinite(value)


def _is_whole(value: Any) -> bool:
  return is_number(value) and value == int(value)


def _limits(low: float, high: float) -> str:
  """Returns the end of what a message expects, such as ` from 1 to 10`; '' without limits."""
  if math.isinf(low):
    return ''
  return f' of at least {low:,.12g}' if high >= 2**62 else f' from {low:,.12g} to {high:,.12g}'


def finite(value: Any) -> Any:
  """Returns a value of dicts, lists and numbers with None in place of infinities and NaN, which JSON does not have."""
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
  """Returns the first characters of a text as a message shows them; characters that cannot be printed are escaped."""
  def escaped(letter: str) -> str:
    is_byte = '\udc80' <= letter <= '\udcff'  # Python decodes a byte of a file name that is not UTF-8 to such a letter
    return f'\\x{ord(letter) - 0xDC00:02x}' if is_byte else ascii(letter)[1:-1]

  start = ''.join(letter if letter.isprintable() else escaped(letter) for letter in text[:_MAX_SHOWN])
  return f'{start}…' if len(text) > _MAX_SHOWN else start


def joined(names: Sequence[str], most: int) -> str:
  """Returns up to `most` names and the number of other names: `a, b and 3 more`; '' for no names."""
  return ', '.join(names[:most]) + (f' and {len(names) - most} more' if len(names) > most else '')


def listed(names: Sequence[str], most: int) -> str:
  """Returns names that come from a file or folder, each `shown` and all `joined`."""
  return joined([*map(shown, names[:most]), *names[most:]], most)  # the other names are only counted


def describe(value: Any) -> str:
  """Returns a value as a message shows it."""
  match value:
    case dict():
      return f'an object with {len(value):,} fields'
    case list() | tuple():
      is_short = 0 < len(value) <= 4 and all(is_number(item) and abs(item) < 1e9 for item in value)
      return json.dumps(value) if is_short else f'a list of {len(value):,}'
    case str():
      return f"'{shown(value)}'"
    case int() if abs(value) >= 10**_MAX_SHOWN:
      return 'a number with many digits'
  return json.dumps(value)
