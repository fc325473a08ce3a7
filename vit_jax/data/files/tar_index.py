"""Where the images of tar files are: an index that is made once, in parallel, and kept beside the files.

An example is what stands together in a file under one key, as `webdataset` writes it: the key is the path up to the
first dot of the base name, and the rest is the extension, such as `n01/7.jpg` and `n01/7.cls`. POSIX (ustar and pax)
and GNU archives are read. Only headers, labels and JSON are read for the index. Imports no jax.
"""
from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import os
import pathlib
import re
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vit_jax.core import json_text
from vit_jax.core.errors import UserError
from vit_jax.data.files import access, compression, kept_index, label_lists, open_files, windows
from vit_jax.data.files.label_lists import Labels
from vit_jax.data.files.windows import Window

if TYPE_CHECKING:
  from vit_jax.core.types import HostArray

log = logging.getLogger('vit_jax.data')

EXTENSIONS = frozenset((b'jpg', b'jpeg', b'jpe', b'jfif', b'png', b'webp', b'bmp', b'gif', b'tif', b'tiff', b'avif',
                        b'jp2', b'ppm', b'pgm', b'pbm'))
"""Extensions of members that are images."""
COMPRESSED = ('.tar.gz', '.tgz', '.tar.zst', '.tar.bz2', '.tar.xz')
PROCESSES_FROM = 2**20
"""Examples from which processes are started; one core takes about 30 s for them."""
_BLOCK, _REST = 512, 2**20
_MOST_LABEL, _MOST_JSON = 64, 2**20  # bytes
_ZEROS, _WHOLE = bytes(_BLOCK), re.compile(rb'\s*-?\d{1,18}\s*')
_REGULAR, _LONG_NAME, _PAX = b'0\x007', b'L', b'x'
_SKIPPED = {b'K', b'g', b'5'}  # long names of links, defaults of pax, folders
_KINDS = {b'1': 'hard links', b'2': 'symbolic links', b'3': 'devices', b'4': 'devices', b'6': 'pipes'}
AGAIN = 'Copy it again, or leave it out of the pattern.'


class Columns(NamedTuple):
  """The extensions of the members with image and label.

  image: such as `jpg`; '' = the only image of each example.
  label: `cls`, a whole number; `json/FIELD`, whole numbers or names; or '', if there are no labels.
  caption: `txt` or another extension, or `json/FIELD`; captions may be missing.
  """
  image: str = ''
  label: str = ''
  caption: str = 'txt'


class Index(NamedTuple):
  """The examples of tar files, in the order in which they are stored.

  starts: `[F + 1] i64`, the first example of each file, and their number.
  offset, size: of each image, `[S] i64, [S] u4`.
  names, name_ends: names of the members with the images, one after the other, `[bytes] u8`, and their ends `[S] i64`.
  labels, label_ends, texts, text_ends: see `label_lists.Stored`.
  captions: offset and size of the text of each example, `[S, 2] i64`, size -1 if it has none; or `[0, 2]`.
  """
  starts: HostArray
  offset: HostArray
  size: HostArray
  names: HostArray
  name_ends: HostArray
  labels: HostArray
  label_ends: HostArray
  texts: HostArray
  text_ends: HostArray
  captions: HostArray

  def __len__(self) -> int:
    return len(self.offset)

  def file(self, example: int) -> int:
    """Returns the place of the file of an example."""
    return int(np.searchsorted(self.starts, example, side='right')) - 1

  def name(self, example: int) -> bytes:
    start = int(self.name_ends[example - 1]) if example else 0
    return self.names[start:int(self.name_ends[example])].tobytes()


class _Scanned(NamedTuple):
  """What one file has: the arrays of `Index` for it, labels as Python values, and counts of what is not used."""
  offset: HostArray
  size: HostArray
  names: bytes
  name_sizes: HostArray
  labels: list[Labels | None]
  captions: HostArray
  ignored: collections.Counter[str]


class Member(NamedTuple):
  """A file in an archive: its name, and where its bytes are."""
  name: bytes
  offset: int
  size: int


def load(paths: Sequence[str], columns: Columns, cache: pathlib.Path | None = None) -> Index:
  """Returns the index of tar files; a kept one if no file has changed.

  Raises:
    UserError: a file is missing, cannot be read, is compressed, damaged or truncated, or has sparse members; or an
      example has several images, and `columns` does not say which one.
  """
  try:
    packed = kept_index.load(
        paths, [f'tar 1 {columns}'] * len(paths), cache or access.cache_folder('tar'), what='tar',
        make=lambda: _make(paths, columns), is_valid=lambda kept: _read(kept, len(paths)) is not None)
  except OSError as error:
    raise access.unreadable(error, f'the tar file {error.filename or paths[0]}') from error
  found = _read(packed, len(paths))
  assert found is not None
  return found


def examples(path: str, columns: Columns) -> Iterator[Example]:
  """Yields the examples of a file, in order; the errors are those of `load`."""
  window = windows.open_window(path)
  try:
    yield from _examples(path, window, columns, collections.Counter())
  finally:
    window.close()


def _read(packed: HostArray, num_files: int) -> Index | None:
  """Returns a kept index; None if the arrays cannot be one."""
  try:
    found = Index(**kept_index.unpack(packed))
  except (ValueError, TypeError):
    return None
  num = len(found.offset)
  ends = ((found.starts[1:], num), (found.name_ends, len(found.names)))
  is_valid = (
      len(found.starts) == num_files + 1 and not found.starts[0] and len(found.size) == len(found.name_ends) == num
      and all(label_lists.are_ends(one, last) for one, last in ends) and label_lists.are_valid(found, num)
      and found.captions.shape in ((num, 2), (0, 2))
      and all(x.dtype.kind in 'iu' and x.ndim == (2 if x is found.captions else 1) for x in found)
      and (not num or int(found.offset.min()) >= 0))
  return found if is_valid else None


def _make(paths: Sequence[str], columns: Columns) -> HostArray:
  began_s, work = time.monotonic(), Scan(columns)
  first, rest = work([paths[0]]), paths[1:]
  cores, expected = min(open_files.num_threads(0), len(rest)), len(first[0].offset) * len(paths)
  if expected >= PROCESSES_FROM:
    log.info('Indexing %s tar files with about %s examples, once ...', f'{len(paths):,}', f'{expected:,}')
  shares = kept_index.in_processes(work, rest, cores) if expected >= PROCESSES_FROM and cores > 1 else None
  if shares is None:
    found = first + work(rest)
  else:
    found = first + [shares[i % cores][i // cores] for i in range(len(rest))]
  index = _join(found)
  if expected >= PROCESSES_FROM:
    log.info('Indexed in %.1f s.', time.monotonic() - began_s)
  ignored = sum((one.ignored for one in found), collections.Counter[str]())
  if ignored:
    log.warning('%s: ignored %s', os.path.dirname(paths[0]), ', '.join(
        f'{name} ({count:,})' for name, count in sorted(ignored.items(), key=lambda one: (-one[1], one[0]))))
  return kept_index.pack(index._asdict())


@dataclasses.dataclass(frozen=True)
class Scan:
  """Reads files for the index. A class, as it is sent to processes."""
  columns: Columns

  def __call__(self, paths: Sequence[str]) -> list[_Scanned]:
    return kept_index.in_threads(self.one, paths)

  def one(self, path: str) -> _Scanned:
    """Returns what one file has."""
    window, ignored = windows.open_window(path), collections.Counter[str]()
    try:
      rows = [(one.image, one.label, one.caption)
              for one in _examples(path, window, self.columns, ignored) if one.image]
    finally:
      window.close()
    images = [image for image, _, _ in rows]
    numbers = np.array([(image.offset, min(image.size, 2**32 - 1), len(image.name)) for image in images],
                       np.int64).reshape(-1, 3)
    captions = np.array([(c.offset, c.size) if c else (0, -1) for _, _, c in rows], np.int64).reshape(-1, 2)
    return _Scanned(numbers[:, 0], numbers[:, 1].astype(np.uint32), b''.join(image.name for image in images),
                    numbers[:, 2].astype(np.int32), [label for _, label, _ in rows], captions, ignored)


def _join(found: Sequence[_Scanned]) -> Index:
  captions = np.concatenate([one.captions for one in found])
  return Index(
      starts=np.cumsum([0] + [len(one.offset) for one in found]),
      offset=np.concatenate([one.offset for one in found]), size=np.concatenate([one.size for one in found]),
      names=np.frombuffer(b''.join(one.names for one in found), np.uint8),
      name_ends=np.cumsum(np.concatenate([one.name_sizes for one in found]), dtype=np.int64),
      **label_lists.join([label for one in found for label in one.labels]),
      captions=captions if len(captions) and (captions[:, 1] >= 0).any() else np.zeros((0, 2), np.int64))


def _members(path: str, window: Window, ignored: collections.Counter[str]) -> Iterator[Member]:
  """Yields the ordinary files of an archive; counts other members in `ignored`."""
  place, longer = 0, dict[str, bytes]()
  while (header := window.read(place, _BLOCK)) != _ZEROS:
    if len(header) < _BLOCK:
      raise _damaged(path, window, place, 'one without an end')
    kind, size = header[156:157], _number(header[124:136])
    if not _is_header(header) or size is None or size < 0:
      raise _damaged(path, window, place, _first(header) if not place else 'one that is damaged')
    data = place + _BLOCK
    if kind not in _KINDS and not window.holds(data + size):
      raise _damaged(path, window, place, 'one that is truncated')
    if kind in (_PAX, _LONG_NAME):
      longer |= _long(path, window, data, size, kind)
    elif kind == b'S' or any(name.startswith('GNU.sparse') for name in longer):
      raise UserError(f'{path}: expected members that are stored completely, got the sparse file '
                      f'{_name(header).decode(errors="replace")[:80]!r}. Write the archive without --sparse.')
    elif kind not in _SKIPPED:
      size = _number(longer['size'], 10) if 'size' in longer else size
      name = longer.get('path') or _name(header)
      if size is None or size < 0:
        raise _damaged(path, window, place, 'one that is damaged')
      if kind in _KINDS:
        ignored[_KINDS[kind]] += 1
        size = 0
      elif kind in _REGULAR and not name.endswith(b'/'):
        if not window.holds(data + size):
          raise _damaged(path, window, place, 'one that is truncated')
        yield Member(name, data, size)
    longer = longer if kind in (_PAX, _LONG_NAME, b'K', b'g') else {}
    place = data + -(-size // _BLOCK) * _BLOCK
  _check_end(path, window, place)


def _long(path: str, window: Window, data: int, size: int, kind: bytes) -> dict[str, bytes]:
  """Returns the fields of a header that extends the next one: `path`, `size`, and those of sparse files."""
  content = window.read(data, size) if size <= _REST else b''
  if len(content) < size or size > _REST:
    raise _damaged(path, window, data, 'one that is truncated, or has a name of more than 1 MiB')
  if kind == _LONG_NAME:
    return {'path': content.rstrip(b'\0')}
  found = {}
  while content:
    length, _, rest = content.partition(b' ')
    number = _number(length, 10) if len(length) < 8 else None
    if not number or number <= len(length) + 1 or number > len(content) or content[number - 1:number] != b'\n':
      raise _damaged(path, window, data, 'one with a damaged extended header')
    name, _, value = content[len(length) + 1:number - 1].partition(b'=')
    if name in (b'path', b'size') or name.startswith(b'GNU.sparse'):
      found[name.decode(errors='replace')] = value
    content = content[number:]
  return found


def _check_end(path: str, window: Window, place: int) -> None:
  """Refuses an archive with something behind its end, such as another archive, which no program reads."""
  rest = window.read(place, _REST + 1)
  if len(rest) > _REST or rest.strip(b'\0'):
    raise _damaged(path, window, place, 'more bytes behind the end of the archive, perhaps another one (join archives '
                   'with tar -A)')


def _damaged(path: str, window: Window, place: int, got: str) -> UserError:
  return UserError(f'{path}: expected a complete tar archive, got {got}, {window.place(place)}. {AGAIN}')


def _first(header: bytes) -> str:
  return compression.describe(header) or 'no header'


def _is_header(header: bytes) -> bool:
  """Returns whether the checksum of a header is right: the sum of its bytes, with blanks in its own place."""
  stored = _number(header[148:156])
  if stored == sum(header) - sum(header[148:156]) + 256:
    return True
  signed = np.frombuffer(header, np.int8)  # as some old programs compute it
  return stored == int(signed.sum(dtype=np.int64)) - int(signed[148:156].sum(dtype=np.int64)) + 256


def _number(field: bytes, base: int = 8) -> int | None:
  """Returns the value of a field: digits, or for large numbers bytes, of which the first is 128; None if damaged."""
  if field[:1] == b'\x80':
    return int.from_bytes(field[1:], 'big')
  try:
    return int(field.strip(b' \0') or b'0', base)
  except ValueError:
    return None


def _name(header: bytes) -> bytes:
  name = header[:100].partition(b'\0')[0]
  prefix = header[345:500].partition(b'\0')[0] if header[257:263] == b'ustar\0' else b''
  return prefix + b'/' + name if prefix else name


class Example:
  """What stands under one key: its members by their roles, and all extensions."""
  __slots__ = ('caption', 'image', 'key', 'label', 'seen')

  def __init__(self, key: bytes) -> None:
    self.key, self.seen = key, set[bytes]()
    self.image: Member | None = None
    self.caption: Member | None = None
    self.label: Labels | None = None


def _examples(path: str, window: Window, columns: Columns, ignored: collections.Counter[str]) -> Iterator[Example]:
  """Yields the examples of an archive, in order; also those without an image, which are counted."""
  wanted, (label, _, field) = columns.image.lower().encode(), columns.label.partition('/')
  extension, texts, current = label.encode(), columns.caption.partition('/')[0].encode(), Example(b'')
  for member in _members(path, window, ignored):
    base = member.name[member.name.rfind(b'/') + 1:]
    stem, dot, ending = base.partition(b'.')
    if not stem or not dot or (member.name.startswith(b'__') and member.name.endswith(b'__')):
      ignored['members without an extension'] += bool(stem)
      continue
    key, ending = member.name[:-len(ending) - 1] if ending else member.name[:-1], ending.lower()
    if key != current.key or ending in current.seen:
      ignored['members of the same name as the one before'] += key == current.key
      yield from _finished(current, ignored)
      current = Example(key)
    current.seen.add(ending)
    if ending == texts:
      current.caption = member
    if ending == extension:
      current.label = _label(window, member, field)
    elif ending == wanted if wanted else ending in EXTENSIONS:
      if current.image:
        raise UserError(f'{path}: expected one image for each key, got {current.image.name.decode(errors="replace")!r} '
                        f'and {member.name.decode(errors="replace")!r}. Set data.image_column to the extension of the '
                        'images, such as jpg.')
      current.image = member
  yield from _finished(current, ignored)


def _finished(example: Example, ignored: collections.Counter[str]) -> Iterator[Example]:
  if example.image:
    yield example
  elif example.seen:
    ignored['keys without an image'] += 1


def _label(window: Window, member: Member, field: str) -> Labels | None:
  """Returns the labels in a member, a list if they may be several; None if it is damaged."""
  content = window.read(member.offset, member.size) if member.size <= (_MOST_JSON if field else _MOST_LABEL) else b''
  if not field:
    return _whole(content)
  try:
    value: Any = json_text.parse(content)
  except (ValueError, RecursionError):
    return None
  for part in field.split('/'):
    value = value.get(part) if isinstance(value, dict) else None
  if isinstance(value, list):
    return list(dict.fromkeys(value)) if all(map(_is_label, value)) else None
  return (value,) if _is_label(value) else None


def _is_label(value: object) -> bool:
  return isinstance(value, str) or (type(value) is int and abs(value) < 2**62)


@functools.lru_cache(2**12)
def _whole(content: bytes) -> tuple[int] | None:
  """Returns the number that a text is; the same tuple for equal texts, of which there are few."""
  return (int(content),) if _WHOLE.fullmatch(content) else None
