"""Where the records of TFRecord files are, and their labels: an index that is made once, in parallel, and kept.

A record is a `tf.train.Example`: features by name, each a list of bytes or numbers. For the index, only the length of
each frame, the checksums, and the names of the features are read, and the label of each example; images are left out.
A file that is damaged or truncated is refused, since nothing says how many records it should have. Imports no jax, as
processes that read files start with this module.

`tfrecord_index.py` has the frames, and the index of TFDS datasets, whose files are described.
"""
from __future__ import annotations

import dataclasses
import functools
import logging
import pathlib
import struct
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vit_jax.core.errors import UserError
from vit_jax.data.files import access, compression, kept_index, label_lists, open_files, records, windows
from vit_jax.data.files.label_lists import Labels
from vit_jax.data.files.tfrecord_index import FOOTER_BYTES, HEADER_BYTES, PROCESSES_FROM, mask
from vit_jax.data.files.windows import Window

if TYPE_CHECKING:
  from vit_jax.core.types import HostArray

log = logging.getLogger('vit_jax.data')

AGAIN = 'Copy it again, or leave it out of the pattern.'
_LENGTH = struct.Struct('<Q')
_FIELD = 0x0a  # tag of the first field of a message, if it has a length
_HEAD, _MOST_LABELS, _MOST_RECORD = 64, 2**16, 2**29  # bytes


class Index(NamedTuple):
  """The records of TFRecord files, in the order in which they are stored.

  starts: `[F + 1] i64`, the first record of each file, and their number.
  offset, size: of each record, `[S] i64, [S] i64`.
  checksum: of each record, as the file has it, `[S] u4`.
  labels, label_ends, texts, text_ends: see `label_lists.Stored`.
  """
  starts: HostArray
  offset: HostArray
  size: HostArray
  checksum: HostArray
  labels: HostArray
  label_ends: HostArray
  texts: HostArray
  text_ends: HostArray

  def __len__(self) -> int:
    return len(self.offset)


class _Scanned(NamedTuple):
  """Offset, size and checksum of the records of one file, `[S, 3] i64`, and their labels."""
  rows: HostArray
  labels: list[Labels | None]


class Frame(NamedTuple):
  """Where a record is in a file."""
  offset: int
  size: int

  def checksum(self, window: Window) -> bytes:
    return window.read(self.offset + self.size, FOOTER_BYTES)


def load(paths: Sequence[str], label: str, cache: pathlib.Path | None = None) -> Index:
  """Returns the index of TFRecord files; a kept one if no file has changed.

  Args:
    paths: of the files, or addresses.
    label: the feature with the labels; '' = there are none.
    cache: the folder for indexes of objects, and of files whose folder cannot be written; None = the user's.

  Raises:
    UserError: a file is missing, cannot be read, is compressed, damaged or truncated.
    TemporaryError: its storage fails.
  """
  try:
    packed = kept_index.load(
        paths, [f'tf.train.Example 1 {label}'] * len(paths), cache or access.cache_folder('tfrecord'), what='TFRecord',
        make=lambda: _make(paths, label), is_valid=lambda kept: _read(kept, len(paths)) is not None)
  except OSError as error:
    raise access.unreadable(error, f'the TFRecord file {error.filename or paths[0]}') from error
  found = _read(packed, len(paths))
  assert found is not None
  return found


def examples(path: str) -> Iterator[bytes]:
  """Yields the records of a file that match their checksums, in order; raises as `load`."""
  window = windows.open_window(path)
  try:
    for frame in _frames(path, window):
      record = window.read(*frame)
      if mask(record) == frame.checksum(window):
        yield record
  finally:
    window.close()


def _read(packed: HostArray, num_files: int) -> Index | None:
  """Returns a kept index; None if the arrays cannot be one."""
  try:
    found = Index(**kept_index.unpack(packed))
  except (ValueError, TypeError):
    return None
  num = len(found.offset)
  is_valid = (
      all(one.dtype.kind in 'iu' and one.ndim == 1 for one in found)
      and len(found.starts) == num_files + 1 and not found.starts[0] and len(found.size) == len(found.checksum) == num
      and label_lists.are_ends(found.starts[1:], num) and label_lists.are_valid(found, num)
      and (not num or int(min(found.offset.min(), found.size.min())) >= 0))
  return found if is_valid else None


def _make(paths: Sequence[str], label: str) -> HostArray:
  began_s, work = time.monotonic(), Scan(label)
  first, rest = work([paths[0]]), paths[1:]
  cores, expected = min(open_files.num_threads(0), len(rest)), len(first[0].rows) * len(paths)
  if expected >= PROCESSES_FROM:
    log.info('Indexing %s TFRecord files with about %s records, once ...', f'{len(paths):,}', f'{expected:,}')
  shares = kept_index.in_processes(work, rest, cores) if expected >= PROCESSES_FROM and cores > 1 else None
  found = first + (work(rest) if shares is None else [shares[i % cores][i // cores] for i in range(len(rest))])
  if expected >= PROCESSES_FROM:
    log.info('Indexed in %.1f s.', time.monotonic() - began_s)
  rows = np.concatenate([one.rows for one in found])
  index = Index(starts=np.cumsum([0] + [len(one.rows) for one in found]), offset=rows[:, 0], size=rows[:, 1],
                checksum=rows[:, 2].astype(np.uint32),
                **label_lists.join(_as_several([label for one in found for label in one.labels])))
  return kept_index.pack(index._asdict())


def _as_several(found: list[Labels | None]) -> list[Labels | None]:
  """Returns labels as lists if an example has several of them; otherwise each example has one, or none."""
  if any(label is not None and len(label) > 1 for label in found):
    return [None if label is None else list(dict.fromkeys(label)) for label in found]
  return [label or None for label in found]


@dataclasses.dataclass(frozen=True)
class Scan:
  """Reads files for the index. A class, as it is sent to processes."""
  label: str

  def __call__(self, paths: Sequence[str]) -> list[_Scanned]:
    return kept_index.in_threads(self.one, paths)

  def one(self, path: str) -> _Scanned:
    """Returns what one file has."""
    rows: list[tuple[int, int, int]] = []
    labels: list[Labels | None] = []
    window = windows.open_window(path)
    try:
      for frame in _frames(path, window):
        labels.append(_labels(window, *frame, self.label) if self.label else None)
        rows.append((*frame, int.from_bytes(frame.checksum(window), 'little')))
    finally:
      window.close()
    return _Scanned(np.array(rows, np.int64).reshape(-1, 3), labels)


def _frames(path: str, window: Window) -> Iterator[Frame]:
  place = 0
  while header := window.read(place, HEADER_BYTES):
    if len(header) < HEADER_BYTES:
      raise _damaged(path, window, place, 'one that is truncated')
    if mask(header[:8]) != header[8:]:
      got = compression.describe(header) or 'no record' if not place else 'a length that does not match its checksum'
      raise _damaged(path, window, place, got)
    size: int = _LENGTH.unpack(header[:8])[0]
    offset = place + HEADER_BYTES
    if not window.holds(offset + size + FOOTER_BYTES):
      raise _damaged(path, window, place, 'one that is truncated')
    yield Frame(offset, size)
    place = offset + size + FOOTER_BYTES


def _damaged(path: str, window: Window, place: int, got: str) -> UserError:
  return UserError(f'{path}: expected a complete TFRecord file, got {got}, {window.place(place)}. {AGAIN}')


def _labels(window: Window, offset: int, size: int, name: str) -> Labels | None:
  """Returns the labels of a record, as a tuple; None if it is damaged, or has values that are no labels."""
  try:
    entry = _find_entry(window, offset, offset + size, _start(name))
    return _usable(() if entry is None else _values(entry, name))
  except _Unusual:
    try:
      return _usable(tuple(records.parse(window.read(offset, size)).get(name, ()))) if size <= _MOST_RECORD else None
    except records.BadRecord:
      return None


class _Unusual(Exception):
  """A message has another form than programs write: it is parsed completely."""


@functools.lru_cache(2**4)
def _start(name: str) -> bytes:
  """Returns how the entry of a feature begins: with its name."""
  key = name.encode(errors='surrogateescape')
  return bytes([_FIELD]) + _varint(len(key)) + key


def _varint(number: int) -> bytes:
  found = []
  while number > 127:
    found.append(number & 127 | 128)
    number >>= 7
  return bytes([*found, number])


def _find_entry(window: Window, place: int, end: int, start: bytes) -> bytes | None:
  """Returns the last entry of a record that begins with `start`; None if there is none.

  Raises:
    _Unusual: the record has another form.
  """
  found, block = None, place
  while place < end:
    head = window.read(place, min(_HEAD + len(start), end - place))
    size, skip = _length(head)
    if place + skip + size > end:
      raise _Unusual
    if block == place:  # `features`, which has all entries
      place, block = place + skip, place + skip + size
      continue
    if head[skip:skip + 1] != start[:1] and size or head.startswith(start, skip) and size > _MOST_LABELS:
      raise _Unusual
    if head.startswith(start, skip):
      found = window.read(place + skip, size)
    place += skip + size
    if place > block:
      raise _Unusual
  return found


def _length(head: bytes) -> tuple[int, int]:
  """Returns the length of a field with the tag 1, and how many bytes tag and length have."""
  size = 0
  for at, byte in enumerate(head[1:11]):
    size |= (byte & 127) << 7 * at
    if byte < 128:
      if head[0] != _FIELD:
        break
      return size, at + 2
  raise _Unusual


@functools.lru_cache(2**12)
def _values(entry: bytes, name: str) -> tuple[Any, ...]:
  """Returns the values of a feature, given its entry; the same tuple for equal entries, of which there are few.

  Raises:
    _Unusual: it has another form.
  """
  whole = bytes([_FIELD]) + _varint(len(entry)) + entry
  try:
    return tuple(records.parse(bytes([_FIELD]) + _varint(len(whole)) + whole).get(name, ()))
  except records.BadRecord:
    raise _Unusual from None


def _usable(found: tuple[Any, ...]) -> Labels | None:
  """Returns values as labels: whole numbers, or names; None if they are something else."""
  texts = tuple(value.decode(errors='surrogateescape') if isinstance(value, bytes) else value for value in found)
  is_usable = all(isinstance(value, str) or (isinstance(value, int) and abs(value) < 2**62) for value in texts)
  return texts if is_usable else None
