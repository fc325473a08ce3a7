"""Reads footers and row groups of Parquet files, and yields their rows for the index.

`parquet.py` calls `read_metadata` for the first file, whose columns `parquet_columns.py` then chooses. `index.load`
calls `scan` for each file. `scan` reads only the footer and the columns with labels and names. Later, `ParquetSource`
calls `parse_footer` and decodes row groups with `read_column`. `data/storage.py` reads all bytes, and pyarrow decodes
them. This module knows no settings. A file has, in this order:

  the bytes `PAR1`
  row groups              a row group has one chunk of bytes for each leaf
  footer                  the metadata, their size as u32, and the bytes `PAR1`

A leaf is a column without parts, such as `image.bytes` of the struct `image`. In this module, `footer` is the bytes of
the footer, and `metadata` is the `pyarrow.parquet.FileMetaData` that the footer contains.

Format: github.com/apache/parquet-format.
"""
from __future__ import annotations

import contextlib
import io
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vit_jax.core import failures, lazy
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.data import index, storage
from vit_jax.data.formats import parquet_columns
from vit_jax.data.formats.parquet_columns import Columns
from vit_jax.data.index import Counts, Labels
from vit_jax.data.storage import Span

if TYPE_CHECKING:
  import pyarrow as pa
  from pyarrow import compute, parquet
else:
  pa, compute, parquet = map(lazy.Module, ('pyarrow', 'pyarrow.compute', 'pyarrow.parquet'))

INDEX_TYPES = {'offset': 'int64', 'size': 'int64', 'decoded': 'int64', 'group': 'int32', 'place': 'int64',
               'name': index.BYTES, 'footer': index.BYTES, index.LABEL: index.BYTES}
"""Types of the columns of the index, in the order in which `scan` yields their values. Kept indexes have these names.

offset, size: the span of the chunk with the images of the row group; 0 if images are files.
decoded: the number of bytes of this chunk without compression.
group: the number of the row group in the file.
place: the number of the row in the row group.
name: the name or path of the image; empty if the file stores none.
footer: the footer of the file in the first row of the file; empty in all other rows.
label: the labels, as `index.encode` returns them.
"""
_ADVICE = 'Copy it again, or leave it out of the pattern.'
_MAGIC, _ENCRYPTED_MAGIC = b'PAR1', b'PARE'
_TAIL_BYTES = 8  # u32 length of the metadata, magic
_FIRST_READ_BYTES = 2**16  # holds most footers
_MAX_FOOTER_BYTES = 2**30
_MAX_NAME_BYTES = 2**12  # PATH_MAX of Linux, which counts a final zero: no file has a path of this size
_CUT = '…'.encode()  # replaces the end of a name that is too long
_UNKNOWN_BYTES = 2**62  # in place of the size of an object in object storage, which is not known


class RowGroup(NamedTuple):
  """The number of rows of a row group, and `offset`, `size` and `decoded` of its images, as in `INDEX_TYPES`."""
  num_rows: int
  offset: int = 0
  size: int = 0
  decoded: int = 0


def parse_footer(footer: bytes) -> Any:
  """Returns the metadata in a footer. Raises errors of pyarrow if they are damaged."""
  return parquet.read_metadata(pa.BufferReader(_MAGIC + footer))  # these bytes are a file without columns


def read_metadata(path: str) -> Any:
  """Returns the metadata of a file. Raises TemporaryError or UserError if the file cannot be read, or is damaged."""
  try:
    return _parse_checked(path, _read_footer(path)[0])
  except OSError as error:
    raise failures.unreadable(error, path) from error


def _parse_checked(path: str, footer: bytes) -> Any:
  """Returns the metadata in the footer of a file. Raises UserError if they are damaged."""
  with _refuse_damage(path):
    metadata = parse_footer(footer)
    metadata.schema.to_arrow_schema()  # raises an error if the Arrow schema is damaged
    return metadata


@contextlib.contextmanager
def _refuse_damage(path: str) -> Iterator[None]:
  """Raises UserError in place of an error of pyarrow, which raises many types of errors for a damaged file."""
  try:
    yield
  except (UserError, TemporaryError, MemoryError):
    raise
  except Exception as error:
    raise UserError(f'{path}: expected a complete Parquet file, got a damaged one ("{failures.first_line(error)}"). '
                    f'{_ADVICE}') from error


def _read_footer(path: str) -> tuple[bytes, int]:
  """Returns the footer of a file and the number of bytes of the file, an upper limit if it is in object storage.

  Raises UserError if the file is not a Parquet file, or is truncated, and OSError if it cannot be read.
  """
  file_bytes = _UNKNOWN_BYTES if storage.is_address(path) else os.path.getsize(path)
  requested_bytes = min(file_bytes, _FIRST_READ_BYTES)
  end = storage.read(path, -requested_bytes, requested_bytes) if file_bytes else b''
  if len(end) < requested_bytes:  # a small object, which was read completely
    file_bytes = len(end)
  if len(end) < _TAIL_BYTES or not end.endswith(_MAGIC):
    problem = 'no footer at its end: it is truncated, or something else' if end else 'an empty file'
    if end.endswith(_ENCRYPTED_MAGIC):
      problem = 'an encrypted one'
    raise UserError(f'{path}: expected a complete Parquet file, got {problem}. {_ADVICE}')
  footer_bytes = int.from_bytes(end[-_TAIL_BYTES:-len(_MAGIC)], 'little') + _TAIL_BYTES
  if footer_bytes > min(file_bytes - len(_MAGIC), _MAX_FOOTER_BYTES):
    raise UserError(f'{path}: expected a complete Parquet file, got a footer of {footer_bytes:,} bytes. {_ADVICE}')
  if footer_bytes > len(end):
    end = storage.read(path, -footer_bytes, footer_bytes)
  return end[-footer_bytes:], file_bytes


class _OpenFile(io.RawIOBase):
  """A file that pyarrow can read and seek; `read_at(offset, size)` returns its bytes."""

  def __init__(self, num_bytes: int, read_at: Callable[[int, int], bytes]) -> None:
    super().__init__()
    self._num_bytes, self._read_at = num_bytes, read_at
    self._offset = 0  # of the next byte to read

  def readable(self) -> bool:
    return True

  def seekable(self) -> bool:
    return True

  def tell(self) -> int:
    return self._offset

  def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
    self._offset = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._offset, io.SEEK_END: self._num_bytes}[whence]
    return self._offset

  def read(self, size: int = -1) -> bytes:
    remaining = max(0, self._num_bytes - self._offset)
    content = self._read_at(self._offset, remaining if size < 0 else min(size, remaining))
    self._offset += len(content)
    return content


def _open_parquet(file: _OpenFile, metadata: Any, *, names: Sequence[str], group_numbers: Sequence[int]) -> Any:
  """Returns a `pyarrow.parquet.ParquetFile` to read the columns `names` of the row groups with these numbers.

  Leaves of bytes and texts that the file stores with a dictionary are read as dictionary arrays. In these arrays, equal
  values share memory, so that a small file cannot need much memory.
  """
  dictionary_leaves = []
  for leaf_number in range(metadata.num_columns):
    leaf = metadata.schema.column(leaf_number)
    is_read = any(f'{leaf.path}.'.startswith(f'{name}.') for name in names)  # `image.bytes` is in `image`
    if is_read and leaf.physical_type == 'BYTE_ARRAY':
      chunks = [metadata.row_group(group_number).column(leaf_number) for group_number in group_numbers]
      if any(chunk.has_dictionary_page for chunk in chunks):
        dictionary_leaves.append(leaf.path)
  return parquet.ParquetFile(pa.PythonFile(file, 'r'), metadata=metadata, pre_buffer=False,
                             page_checksum_verification=True, read_dictionary=dictionary_leaves)


def read_column(span: Span, content: bytes, *, metadata: Any, group_number: int, leaf: str) -> Any:
  """Returns the values of a leaf in one row group, a `pyarrow.ChunkedArray`. Raises errors of pyarrow if it is damaged.

  Args:
    span: the span of the file with the bytes of the leaf in this row group.
    content: the bytes of the span.
    metadata: the metadata of the file.
    group_number: the number of the row group in the file.
    leaf: the path of the leaf, such as `image.bytes`.
  """
  def read_at(offset: int, size: int) -> bytes:
    """Returns the requested bytes that are in the span: damaged files and old writers (PARQUET-816) request others."""
    start = offset - span.offset
    return content[max(0, start):max(0, start + size)]

  reader = _open_parquet(_OpenFile(_UNKNOWN_BYTES, read_at), metadata, names=[leaf], group_numbers=[group_number])
  return _take_leaf(reader.read_row_group(group_number, columns=[leaf], use_threads=False).column(0), leaf)


def _take_leaf(column: Any, leaf: str) -> Any:
  """Returns the values of the leaf, such as `image.bytes`, of a column `image`, both `pyarrow.ChunkedArray`."""
  if not pa.types.is_struct(column.type):
    return column
  name = leaf.rpartition('.')[2]
  return pa.chunked_array([chunk.field(name) for chunk in column.chunks], column.type.field(name).type)


def scan(path: str, ignored: Counts, *, columns: Columns) -> Iterator[tuple[Any, ...]]:
  """Yields the rows of a file for the index, with the columns of `INDEX_TYPES`.

  Raises UserError if the file is damaged, or its columns have other types than those of the first file; and OSError,
  UserError or TemporaryError if the file cannot be read.
  """
  del ignored  # this format ignores no rows
  footer, file_bytes = _read_footer(path)
  metadata = _parse_checked(path, footer)
  parquet_columns.check_columns(path, metadata, columns)
  groups = _find_groups(path, metadata, leaf=columns.leaf, file_bytes=file_bytes)

  def read_at(offset: int, size: int) -> bytes:
    """Returns bytes of the file. Raises UserError or TemporaryError for errors of storage: they are no damage."""
    try:
      return storage.read(path, offset, size)
    except OSError as error:
      raise failures.unreadable(error, path) from error

  with _refuse_damage(path):
    names, labels = _read_names_and_labels(
        _OpenFile(file_bytes, read_at), metadata, path=path, groups=groups, columns=columns)
  rows = ((group_number, group, row) for group_number, group in enumerate(groups) for row in range(group.num_rows))
  for (group_number, group, row_in_group), name, label in zip(rows, names, labels, strict=True):
    yield group.offset, group.size, group.decoded, group_number, row_in_group, name, footer, index.encode(label)
    footer = b''  # only the first row has the footer


def _find_groups(path: str, metadata: Any, *, leaf: str, file_bytes: int) -> list[RowGroup]:
  """Returns the row groups of a file, whose leaf `leaf` has the images. Raises UserError if a group is unreadable."""
  leaves = [metadata.schema.column(number).path for number in range(metadata.num_columns)]
  groups = []
  for group in map(metadata.row_group, range(metadata.num_row_groups)):
    if leaf not in leaves:  # images are files
      groups.append(RowGroup(group.num_rows))
      continue
    chunk = group.column(leaves.index(leaf))
    if 'DELTA_BYTE_ARRAY' in chunk.encodings:
      raise UserError(f'{path}: expected images that are stored as they are or in a dictionary, got the encoding '
                      'DELTA_BYTE_ARRAY, whose size in memory is not known before. Write the file again with '
                      'pyarrow.parquet.write_table.')
    offset, size = chunk_range(chunk)
    if group.num_rows < 0 or offset < len(_MAGIC) or size < 0 or offset + size > file_bytes - _TAIL_BYTES:
      raise UserError(f'{path}: expected row groups inside of the file, got one of {size:,} bytes at byte {offset:,}. '
                      f'{_ADVICE}')
    groups.append(RowGroup(group.num_rows, offset, size, max(0, chunk.total_uncompressed_size)))
  return groups


def chunk_range(chunk: Any) -> tuple[int, int]:
  """Returns offset and size of the bytes of a chunk, given its `pyarrow.parquet.ColumnChunkMetaData`."""
  offsets = [offset for offset in (chunk.dictionary_page_offset, chunk.data_page_offset) if offset]  # None or 0 = none
  return min(offsets, default=0), chunk.total_compressed_size


def _read_names_and_labels(file: _OpenFile, metadata: Any, *, path: str, groups: Sequence[RowGroup],
                           columns: Columns) -> tuple[Iterable[bytes], Iterable[Labels]]:
  """Returns the name and the labels of each row; b'' or None for each row if there is no such column."""
  names: list[bytes] = []
  labels: list[Labels] = []
  columns_read = [name for name in (columns.label, columns.path) if name]
  if columns_read:
    reader = _open_parquet(file, metadata, names=columns_read, group_numbers=range(len(groups)))
    for group_number, group in enumerate(groups):  # one by one, as dictionaries of row groups may differ
      table = reader.read_row_group(group_number, columns=columns_read, use_threads=False)
      if table.num_rows != group.num_rows:
        raise ValueError(f'{table.num_rows:,} rows in place of {group.num_rows:,}')
      if columns.path:
        texts = _to_list(_take_leaf(table.column(columns.image), columns.path))
        names += [_to_name(text, path=path, columns=columns) for text in texts]
      if columns.label:
        labels += _to_labels(table.column(columns.label), path=path, columns=columns)
  num_rows = sum(group.num_rows for group in groups)  # a damaged file may claim too many rows for a list
  return names or itertools.repeat(b'', num_rows), labels or itertools.repeat(None, num_rows)


def _to_list(column: Any) -> list[Any]:
  """Returns the values of a column as Python objects. Rows with the same entry of a dictionary share one object."""
  values = list[Any]()
  for chunk in column.chunks:
    if not pa.types.is_dictionary(chunk.type):
      values += chunk.to_pylist()
      continue
    distinct = chunk.dictionary.to_pylist()
    values += [None if code is None else distinct[code] for code in chunk.indices.to_pylist()]
  return values


def _to_name(text: str | None, *, path: str, columns: Columns) -> bytes:
  """Returns the name of an image in UTF-8, cut if it is too long. Raises UserError if it is a path that is too long."""
  name = (text or '').encode(errors='surrogatepass')
  if len(name) <= _MAX_NAME_BYTES:
    return name
  if columns.leaf:
    return name[:_MAX_NAME_BYTES - len(_CUT)] + _CUT
  raise UserError(f'{path}: expected paths of at most {_MAX_NAME_BYTES:,} bytes in the column {columns.path!r}, got '
                  f'one of {len(name):,}. Write the file again without it.')


def _to_labels(column: Any, *, path: str, columns: Columns) -> list[Any]:
  """Returns the labels of each row, as `index.encode` takes them. Raises UserError if a number is 2**63 or larger."""
  column_type = column.type
  if parquet_columns.is_list(column_type):  # `flatten` leaves out the values of a null, which has no labels
    flat = pa.chunked_array([chunk.flatten() for chunk in column.chunks], column_type.value_type)
    labels = _to_labels(flat, path=path, columns=columns)
    stops = np.cumsum(compute.fill_null(compute.list_value_length(column), 0).to_numpy()).tolist()
    return [tuple(labels[start:stop]) for start, stop in itertools.pairwise([0, *stops])]
  if pa.types.is_dictionary(column_type) and not parquet_columns.is_text(column_type.value_type):
    column = column.cast(column_type.value_type)
  if not pa.types.is_integer(column.type) and not pa.types.is_boolean(column.type):
    return _to_list(column)
  if pa.types.is_uint64(column.type):
    largest = compute.max(column).as_py() or 0  # None if all labels are missing
    if largest >= 2**63:
      raise UserError(f'{path}: expected labels below 2**63 in the column {columns.label!r}, got {largest:,}. Write '
                      'the file again with other labels.')
  labels = column.cast(pa.int64()).to_pylist()
  if columns.names:  # -1 is a missing label in the package `datasets`
    return [None if label is not None and label < 0 else label for label in labels]
  return labels
