"""Where the row groups of Parquet files are, and the labels of their rows: an index that is made once and kept.

A Parquet file can be read at random by row group: the values of a column in some hundred rows, which are compressed
together. For the index, only the ends of the files (footers) and the columns with labels and names are read, not the
images. Imports no jax, and pyarrow (extra `parquet`) when a file is read.

Format: github.com/apache/parquet-format.
"""
from __future__ import annotations

import functools
import io
import logging
import os
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vit_jax.core import extras
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.data.files import access, kept_index, label_lists, parquet_columns, ranges, remote
from vit_jax.data.files.label_lists import MISSING
from vit_jax.data.files.parquet_columns import Columns

if TYPE_CHECKING:
  from vit_jax.core.types import HostArray

log = logging.getLogger('vit_jax.data')

AGAIN = 'Copy it again, or leave it out of the pattern.'
_MAGIC, _ENCRYPTED, _END = b'PAR1', b'PARE', 8
_USUAL_FOOTER = 2**16  # bytes that are read first
_MOST_FOOTER = 2**30
_MOST = 2**62  # bytes of an object, whose size is not asked for


class Index(NamedTuple):
  """The rows of Parquet files, in the order in which they are stored.

  starts: `[F + 1] i64`, the first row of each file, and their number.
  ends: `[G] i64`, the last row of each row group + 1.
  file, group: `[G] i32`, the file of each row group, and its number there.
  offset, size: `[G] i64`, where the bytes of its images are; 0 if they are files of their own.
  decoded: `[G] i64`, their bytes without compression.
  footers, footer_ends: the ends of the files, one after the other, `[bytes] u8`, `[F] i64`.
  names, name_ends: names of the images, one after the other, `[bytes] u8`, and their ends `[S] i64`; or empty.
  labels: numbers, or places in `texts`, `[L] i64`; `MISSING` if there is none.
  label_ends: `[S] i64`; empty if each row has one label.
  texts, text_ends: names of classes; empty if labels are numbers without names.
  """
  starts: HostArray
  ends: HostArray
  file: HostArray
  group: HostArray
  offset: HostArray
  size: HostArray
  decoded: HostArray
  footers: HostArray
  footer_ends: HostArray
  names: HostArray
  name_ends: HostArray
  labels: HostArray
  label_ends: HostArray
  texts: HostArray
  text_ends: HostArray

  def __len__(self) -> int:
    return int(self.starts[-1])

  def find_group(self, row: int) -> int:
    return int(np.searchsorted(self.ends, row, side='right'))

  def first_row(self, group: int) -> int:
    return int(self.ends[group - 1]) if group else 0

  def name(self, row: int) -> str:
    """Returns the name of an image; '' if it has none."""
    return _piece(self.names, self.name_ends, row).decode(errors='surrogateescape') if len(self.name_ends) else ''

  def footer(self, file: int) -> bytes:
    return _piece(self.footers, self.footer_ends, file)


def _piece(content: HostArray, ends: HostArray, place: int) -> bytes:
  return content[int(ends[place - 1]) if place else 0:int(ends[place])].tobytes()


class _Scanned(NamedTuple):
  """What one file has: its footer, row groups `[G, 4] i64` (rows, offset, size, decoded), names and labels."""
  footer: bytes
  groups: HostArray
  names: tuple[HostArray, HostArray] | None
  labels: HostArray
  lengths: HostArray | None
  texts: tuple[str, ...]


def load(paths: Sequence[str], columns: Columns, cache: pathlib.Path | None = None) -> Index:
  """Returns the index of Parquet files; a kept one if no file has changed.

  Raises:
    UserError: pyarrow is not installed; or a file is missing, cannot be read, is damaged or truncated, or has other
      columns than the first one.
  """
  parquet()
  try:
    packed = kept_index.load(
        paths, [f'parquet 1 {columns}'] * len(paths), cache or access.cache_folder('parquet'), what='Parquet',
        make=lambda: _make(paths, columns), is_valid=lambda kept: _read(kept, len(paths)) is not None)
  except OSError as error:
    raise access.unreadable(error, f'the Parquet file {error.filename}') from error
  found = _read(packed, len(paths))
  assert found is not None
  return found


def parquet() -> Any:
  """Returns `pyarrow.parquet`. Raises UserError if it is not installed."""
  return extras.load('pyarrow.parquet', 'parquet', 'data.source: Parquet files')


def metadata(footer: bytes) -> Any:
  """Returns the `pyarrow.parquet.FileMetaData` of the end of a file; raises as pyarrow."""
  import pyarrow as pa
  return parquet().read_metadata(pa.BufferReader(_MAGIC + footer))


def choose(path: str, image: str, label: str, caption: str = '') -> Columns:
  """Returns which columns of a file have image, label and captions; see `parquet_columns.choose`.

  Raises:
    UserError: there are no such columns, or several; or the file is damaged.
  """
  try:
    return parquet_columns.choose(path, _parsed(path, _footer(path)[0]), image, label, caption)
  except OSError as error:
    raise access.unreadable(error, path) from error


class OpenFile(io.RawIOBase):
  """A file as pyarrow reads it, by `ranges.read`; or only `content`, the bytes from `first` on, of it."""

  def __init__(self, path: str, size: int, content: bytes | None = None, first: int = 0) -> None:
    super().__init__()
    self._path, self._size, self._content, self._first, self._place = path, size, content, first, 0

  def readable(self) -> bool:
    return True

  def seekable(self) -> bool:
    return True

  def tell(self) -> int:
    return self._place

  def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
    self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
    return self._place

  def read(self, size: int = -1) -> bytes:
    start, size = self._place, self._size - self._place if size < 0 else size
    if self._content is None:
      found = ranges.read(self._path, start, max(0, min(size, self._size - start)), keep=False)
    else:
      found = self._content[max(0, start - self._first):max(0, start - self._first + size)]
    self._place += len(found)
    return found


def read_column(path: str, content: bytes, footer: Any, group: int, leaf: str, offset: int) -> Any:
  """Returns the values of a column in one row group, a `pyarrow.ChunkedArray`; raises as pyarrow if it is damaged.

  Args:
    path: of the file.
    content: the bytes of the column in this row group.
    footer: the metadata of the file.
    group: the number of the row group in the file.
    leaf: the column, such as `image.bytes`.
    offset: of `content` in the file.
  """
  import pyarrow as pa
  source = pa.PythonFile(OpenFile(path, _MOST, content, offset), 'r')
  reader = parquet().ParquetFile(source, metadata=footer, pre_buffer=False, page_checksum_verification=True)
  found = reader.read_row_group(group, columns=[leaf], use_threads=False).column(0)
  return _values(found, leaf)


def _footer(path: str) -> tuple[bytes, int]:
  """Returns the end of a file with its description, and the size of the file, at most.

  Raises:
    UserError: it is something else, or truncated.
    OSError: it cannot be read.
  """
  size = _MOST if remote.is_address(path) else os.path.getsize(path)
  end = ranges.read_end(path, min(size, _USUAL_FOOTER)) if size else b''
  if len(end) < min(size, _USUAL_FOOTER):  # all of an object
    size = len(end)
  if len(end) < _END or end[-4:] != _MAGIC:
    got = ('an encrypted one' if end[-4:] == _ENCRYPTED else 'an empty file' if not size else
           'no footer at its end: it is truncated, or something else')
    raise UserError(f'{path}: expected a complete Parquet file, got {got}. {AGAIN}')
  length = int.from_bytes(end[-_END:-4], 'little') + _END
  if length > min(size - len(_MAGIC), _MOST_FOOTER):
    raise UserError(f'{path}: expected a complete Parquet file, got a footer of {length:,} bytes. {AGAIN}')
  return (end if length <= len(end) else ranges.read_end(path, length))[-length:], size


def _parsed(path: str, footer: bytes) -> Any:
  try:
    found = metadata(footer)
    found.schema.to_arrow_schema()  # which a damaged description may not have
    return found
  except Exception as error:  # pyarrow has many, such as OSError for what is damaged
    raise _damaged(path, error) from error


def reason(error: Exception) -> str:
  """Returns the first line of an error of pyarrow."""
  return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _damaged(path: str, error: Exception) -> UserError:
  return UserError(f'{path}: expected a complete Parquet file, got a damaged one ("{reason(error)}"). {AGAIN}')


def _read(packed: HostArray, num_files: int) -> Index | None:
  """Returns a kept index; None if the arrays cannot be one."""
  try:
    found = Index(**kept_index.unpack(packed))
  except (ValueError, TypeError):
    return None
  if len(found.starts) != num_files + 1 or len(found.footer_ends) != num_files or any(
      x.dtype.kind not in 'iu' or x.ndim != 1 for x in found):
    return None
  num, groups = int(found.starts[-1]), len(found.ends)
  ends = ((found.starts, num), (found.ends, num), (found.footer_ends, len(found.footers)),
          (found.name_ends, len(found.names)))
  is_valid = (
      all(label_lists.are_ends(one, last) for one, last in ends) and label_lists.are_valid(found, num)
      and all(len(x) == groups for x in (found.file, found.group, found.offset, found.size, found.decoded))
      and len(found.name_ends) in (0, num)
      and (not groups or (int(found.offset.min()) >= 0 and 0 <= int(found.file.min()) <= int(found.file.max())
                          < num_files)))
  return found if is_valid else None


def _make(paths: Sequence[str], columns: Columns) -> HostArray:
  found = kept_index.in_threads(functools.partial(_scan, columns=columns), paths)
  groups = np.concatenate([one.groups for one in found])
  footers = [one.footer for one in found]
  texts = list(columns.names) or sorted({text for one in found for text in one.texts})
  encoded = [text.encode(errors='surrogatepass') for text in texts]
  labels = np.concatenate([_renumbered(one, texts, is_named=bool(columns.names)) for one in found])
  is_labeled = bool((labels != MISSING).any())
  names = [one.names for one in found if one.names]
  is_list = any(one.lengths is not None for one in found)
  return kept_index.pack(Index(
      starts=np.cumsum([0] + [int(one.groups[:, 0].sum()) for one in found]),
      ends=np.cumsum(groups[:, 0]),
      file=np.repeat(np.arange(len(found), dtype=np.int32), [len(one.groups) for one in found]),
      group=np.concatenate([np.arange(len(one.groups), dtype=np.int32) for one in found]),
      offset=groups[:, 1], size=groups[:, 2], decoded=groups[:, 3],
      footers=np.frombuffer(b''.join(footers), np.uint8), footer_ends=np.cumsum([len(one) for one in footers]),
      names=np.concatenate([content for content, _ in names]) if names else np.zeros(0, np.uint8),
      name_ends=np.cumsum(np.concatenate([sizes for _, sizes in names]), dtype=np.int64) if names else
      np.zeros(0, np.int64),
      labels=labels if is_labeled else labels[:0],
      label_ends=np.cumsum(np.concatenate([one.lengths for one in found if one.lengths is not None]), dtype=np.int64)
      if is_list and is_labeled else np.zeros(0, np.int64),
      texts=np.frombuffer(b''.join(encoded), np.uint8),
      text_ends=np.cumsum([len(text) for text in encoded], dtype=np.int64))._asdict())


def _renumbered(found: _Scanned, texts: Sequence[str], *, is_named: bool) -> HostArray:
  """Returns the labels of a file as places among the texts of all files, or as they are if they are numbers."""
  if not found.texts or is_named:
    return found.labels
  places = {text: place for place, text in enumerate(texts)}
  own = np.array([places[text] for text in found.texts] + [MISSING], np.int64)
  return own[np.where(found.labels == MISSING, len(found.texts), found.labels)]


def _scan(path: str, columns: Columns) -> _Scanned:
  """Returns what a file has.

  Raises:
    UserError: it is damaged, or its columns have other types.
    OSError: it cannot be read.
  """
  footer, size = _footer(path)
  found = _parsed(path, footer)
  parquet_columns.check(path, found, columns)
  groups = _groups(path, found, columns.leaf, size)
  wanted = [one for one in (columns.label, columns.path) if one]
  labels, names = _Labels(np.zeros(0, np.int64)), None
  try:
    import pyarrow as pa
    reader = parquet().ParquetFile(pa.PythonFile(OpenFile(path, size), 'r'), metadata=found, pre_buffer=False,
                                   page_checksum_verification=True)
    table = reader.read(columns=wanted, use_threads=False) if wanted else None
    if table is not None and table.num_rows != int(groups[:, 0].sum()):
      raise ValueError(f'{table.num_rows:,} rows in place of {groups[:, 0].sum():,}')
    if table is not None and columns.path:
      names = _names(_values(table.column(columns.image), columns.path))
    if table is not None and columns.label:
      labels = _labels(table.column(columns.label), columns.names)
  except (UserError, TemporaryError):
    raise
  except Exception as error:
    if isinstance(error, OSError) and error.errno:
      raise
    raise _damaged(path, error) from error
  return _Scanned(footer, groups, names, *labels)


def _groups(path: str, found: Any, leaf: str, size: int) -> HostArray:
  """Returns the rows, the place and the decoded size of the images of each row group, `[G, 4] i64`."""
  column = next((i for i in range(found.num_columns) if found.schema.column(i).path == leaf), None)
  rows = []
  for number in range(found.num_row_groups):
    group = found.row_group(number)
    if column is None:
      rows.append((group.num_rows, 0, 0, 0))
      continue
    own = group.column(column)
    offset, num_bytes = place_of(own)
    if group.num_rows < 0 or offset < len(_MAGIC) or num_bytes < 0 or offset + num_bytes > size - _END:
      raise UserError(f'{path}: expected row groups inside of the file, got one of {num_bytes:,} bytes at byte '
                      f'{offset:,}. {AGAIN}')
    rows.append((group.num_rows, offset, num_bytes, max(0, own.total_uncompressed_size)))
  return np.array(rows, np.int64).reshape(-1, 4)


def place_of(chunk: Any) -> tuple[int, int]:
  """Returns where the bytes of a column in a row group are, and their number, by its metadata."""
  places = [place for place in (chunk.dictionary_page_offset, chunk.data_page_offset) if place]
  return min(places, default=0), chunk.total_compressed_size


def place_of_texts(footer: Any, group: int, name: str) -> tuple[int, int]:
  """Returns where the bytes of a column of texts, or of lists of texts, in a row group are, and their number."""
  column = next(i for i in range(footer.num_columns) if footer.schema.column(i).path.partition('.')[0] == name)
  return place_of(footer.row_group(group).column(column))


def _values(column: Any, leaf: str) -> Any:
  """Returns the values of a leaf such as `image.bytes` of a column that was read, as a `pyarrow.ChunkedArray`."""
  import pyarrow as pa
  if not pa.types.is_struct(column.type):
    return column
  name = leaf.rpartition('.')[2]
  return pa.chunked_array([chunk.field(name) for chunk in column.chunks], column.type.field(name).type)


def _names(column: Any) -> tuple[HostArray, HostArray]:
  """Returns texts one after the other, `[bytes] u8`, and their sizes `[rows] i64`; one that is missing is empty."""
  found = [(text or '').encode(errors='surrogatepass') for text in column.to_pylist()]
  return np.frombuffer(b''.join(found), np.uint8), np.array([len(one) for one in found], np.int64)


class _Labels(NamedTuple):
  """Labels of a file: numbers, or places in `texts`, `[L] i64`; and of lists their lengths `[rows] i64`."""
  values: HostArray
  lengths: HostArray | None = None
  texts: tuple[str, ...] = ()


def _labels(column: Any, names: Sequence[str]) -> _Labels:
  """Returns the labels in a column."""
  import pyarrow as pa
  from pyarrow import compute
  kind, lengths = column.type, None
  if pa.types.is_list(kind) or pa.types.is_large_list(kind):
    lengths = compute.fill_null(compute.list_value_length(column), 0).to_numpy().astype(np.int64)
    column = pa.chunked_array([chunk.flatten() for chunk in column.chunks], kind.value_type)
    kind = column.type
  if pa.types.is_dictionary(kind):
    column = column.cast(kind.value_type)
    kind = column.type
  if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
    values = compute.fill_null(column.cast(pa.int64()), MISSING).to_numpy()
    return _Labels(np.where(values < 0, MISSING, values) if names else values, lengths)
  codes = column.combine_chunks().dictionary_encode()
  codes = codes.combine_chunks() if isinstance(codes, pa.ChunkedArray) else codes
  values = compute.fill_null(codes.indices.cast(pa.int64()), MISSING).to_numpy(zero_copy_only=False)
  return _Labels(values, lengths, tuple(codes.dictionary.to_pylist()))
