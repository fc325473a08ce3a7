"""Decodes Parquet files: chooses columns, reads footers and row groups, and yields the rows for the index.

`parquet.py` calls `read_metadata` and `choose_columns` for the first file. Then `index.load` calls `scan` for each
file: it reads only the footer and the columns with labels and names. Later, `ParquetSource` decodes row groups with
`read_column`. All bytes are read by `data/storage.py`, and decoded by pyarrow. This module knows no settings.

The package `datasets` describes the types of columns in the metadata of a file, under the key `huggingface`, as JSON:
`{"info": {"features": {"label": {"_type": "ClassLabel", "names": ["cat", "dog"]}}}}`.

Format: github.com/apache/parquet-format.
"""
from __future__ import annotations

import functools
import io
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vit_jax.core import documents, extras, failures, lazy
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.data import index, storage
from vit_jax.data.index import Counts, Labels
from vit_jax.data.storage import Span
from vit_jax.data.text import stored

if TYPE_CHECKING:
  import pyarrow as pa
else:
  pa = lazy.Module('pyarrow')

TYPES = {'offset': 'int64', 'size': 'int64', 'decoded': 'int64', 'group': 'int32', 'place': 'int64',
          'name': index.BYTES, 'footer': index.BYTES, index.LABEL: index.BYTES}
"""Columns of the index. For the row group of a row: the span of its images, 0 if images are files (`offset`, `size`),
their bytes without compression (`decoded`), and its number in the file (`group`). For the row: its position in the row
group (`place`), the name of the image, and in the first row of a file the footer of the file.
"""
_IMAGE_NAMES = ('image', 'img', 'jpg', 'jpeg', 'png', 'webp')
_LABEL_NAMES = ('label', 'labels', 'cls')
_SHOWN = 20
_AGAIN = 'Copy it again, or leave it out of the pattern.'
_MAGIC, _ENCRYPTED, _END = b'PAR1', b'PARE', 8
_USUAL_FOOTER, _MOST_FOOTER, _MOST_NAME = 2**16, 2**30, 2**12  # bytes
_MOST = 2**62  # bytes of an object, whose size is not known


class Columns(NamedTuple):
  """The columns that are read.

  image: the column with the images.
  leaf: the column with their bytes, such as `image.bytes`; '' if `image` has paths of files.
  path: the column with their names or paths, such as `image.path`; '' = none.
  label: the column with the labels; '' = none.
  types: of the image and the label column; all files must have the same ones.
  names: of the classes, if the labels are numbers of classes with names (`ClassLabel` of Hugging Face).
  caption: the column with captions, texts or lists of texts; '' = none.
  """
  image: str
  leaf: str
  path: str
  label: str
  types: tuple[str, str]
  names: tuple[str, ...] = ()
  caption: str = ''


def pyarrow_parquet() -> Any:
  """Returns `pyarrow.parquet`. Raises UserError if it is not installed."""
  return extras.load('pyarrow.parquet', 'parquet', 'data.source: Parquet files')


def metadata(footer: bytes) -> Any:
  """Returns the `pyarrow.parquet.FileMetaData` of the end of a file; raises as pyarrow."""
  return pyarrow_parquet().read_metadata(pa.BufferReader(_MAGIC + footer))


def read_metadata(path: str) -> Any:
  """Returns the metadata of a file. Raises TemporaryError or UserError if it cannot be read, or is damaged."""
  try:
    return _parsed(path, _read_footer(path)[0])
  except OSError as error:
    raise failures.unreadable(error, path) from error


def _parsed(path: str, footer: bytes) -> Any:
  try:
    parsed = metadata(footer)
    parsed.schema.to_arrow_schema()  # which raises an error if the description is damaged
    return parsed
  except UserError:
    raise
  except Exception as error:  # pyarrow raises many kinds, such as OSError for damaged bytes
    raise _damaged(path, error) from error


def _damaged(path: str, error: Exception) -> UserError:
  return UserError(f'{path}: expected a complete Parquet file, got a damaged one ("{reason(error)}"). {_AGAIN}')


def reason(error: Exception) -> str:
  """Returns the first line of an error of pyarrow."""
  return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _read_footer(path: str) -> tuple[bytes, int]:
  """Returns the footer, the end of a file that describes it; and the size of the file, or for an object a larger one.

  Raises:
    UserError: it is something else, or truncated.
    OSError: it cannot be read.
  """
  size = _MOST if storage.is_address(path) else os.path.getsize(path)
  first = min(size, _USUAL_FOOTER)
  end = storage.read(path, -first, first) if size else b''
  if len(end) < first:  # the complete object
    size = len(end)
  if len(end) < _END or end[-4:] != _MAGIC:
    got = ('an encrypted one' if end[-4:] == _ENCRYPTED else 'an empty file' if not size else
           'no footer at its end: it is truncated, or something else')
    raise UserError(f'{path}: expected a complete Parquet file, got {got}. {_AGAIN}')
  length = int.from_bytes(end[-_END:-4], 'little') + _END
  if length > min(size - len(_MAGIC), _MOST_FOOTER):
    raise UserError(f'{path}: expected a complete Parquet file, got a footer of {length:,} bytes. {_AGAIN}')
  return (end if length <= len(end) else storage.read(path, -length, length))[-length:], size


class _OpenFile(io.RawIOBase):
  """A file for pyarrow, whose bytes are returned by a function of offset and size."""

  def __init__(self, num_bytes: int, read_at: Callable[[int, int], bytes]) -> None:
    super().__init__()
    self._num_bytes, self._read_at, self._offset = num_bytes, read_at, 0

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
    rest = max(0, self._num_bytes - self._offset)
    content = self._read_at(self._offset, rest if size < 0 else min(size, rest))
    self._offset += len(content)
    return content


def _reader(file: _OpenFile, footer: Any, names: Sequence[str], groups: Sequence[int]) -> Any:
  """Returns the `pyarrow.parquet.ParquetFile` of a file.

  Of the columns `names`, bytes and texts that are stored as places in a dictionary are read as such: rows that share a
  value share its memory, which is bounded by the bytes in the file.
  """
  paths = {footer.schema.column(i).path: i for i in range(footer.num_columns)
           if footer.schema.column(i).physical_type == 'BYTE_ARRAY'}
  coded = [path for path, i in paths.items() if any(f'{path}.'.startswith(f'{name}.') for name in names)
           and any(footer.row_group(group).column(i).has_dictionary_page for group in groups)]
  return pyarrow_parquet().ParquetFile(pa.PythonFile(file, 'r'), metadata=footer, pre_buffer=False,
                                page_checksum_verification=True, read_dictionary=coded)


def read_column(span: Span, content: bytes, footer: Any, group: int, leaf: str) -> Any:
  """Returns the values of a column in one row group, a `pyarrow.ChunkedArray`; raises as pyarrow if it is damaged.

  Args:
    span: where the bytes of the column in this row group are.
    content: these bytes.
    footer: the metadata of the file.
    group: the number of the row group in the file.
    leaf: the column, such as `image.bytes`.
  """
  def read_at(offset: int, size: int) -> bytes:
    start = offset - span.offset
    return content[max(0, start):max(0, start + size)]
  reader = _reader(_OpenFile(_MOST, read_at), footer, [leaf], [group])
  return _leaf(reader.read_row_group(group, columns=[leaf], use_threads=False).column(0), leaf)


def _leaf(column: Any, leaf: str) -> Any:
  """Returns the values of a leaf such as `image.bytes` of a column that was read, as a `pyarrow.ChunkedArray`."""
  if not pa.types.is_struct(column.type):
    return column
  name = leaf.rpartition('.')[2]
  return pa.chunked_array([chunk.field(name) for chunk in column.chunks], column.type.field(name).type)


def scan(path: str, ignored: Counts, *, columns: Columns) -> Iterator[tuple[Any, ...]]:
  """Yields the rows of a file, with the columns of `TYPES`.

  Raises:
    UserError: it is damaged, or its columns have other types.
    OSError: it cannot be read.
  """
  del ignored
  footer, num_bytes = _read_footer(path)
  described = _parsed(path, footer)
  _check_columns(path, described, columns)
  groups = _groups(path, described, columns.leaf, num_bytes)
  wanted, num_rows = [name for name in (columns.label, columns.path) if name], sum(rows for rows, *_ in groups)
  names: list[bytes] = []
  labels: list[Labels] = []
  try:
    file = _OpenFile(num_bytes, functools.partial(storage.read, path))
    reader = _reader(file, described, wanted, range(len(groups)))
    for group, (rows, *_) in enumerate(groups if wanted else ()):  # one by one: their dictionaries may differ
      table = reader.read_row_group(group, columns=wanted, use_threads=False)
      if table.num_rows != rows:
        raise ValueError(f'{table.num_rows:,} rows in place of {rows:,}')
      names += _names(_leaf(table.column(columns.image), columns.path)) if columns.path else ()
      labels += _labels(table.column(columns.label), is_named=bool(columns.names)) if columns.label else ()
  except (UserError, TemporaryError):
    raise
  except Exception as error:
    if isinstance(error, OSError) and error.errno:
      raise
    raise _damaged(path, error) from error
  positions = ((*span, group, row) for group, (rows, *span) in enumerate(groups) for row in range(rows))
  for position, name, label in zip(positions, names or itertools.repeat(b'', num_rows),
                                   labels or itertools.repeat(None, num_rows), strict=True):
    yield *position, name, footer, index.encode(label)
    footer = b''


def _groups(path: str, footer: Any, leaf: str, file_bytes: int) -> list[tuple[int, int, int, int]]:
  """Returns the number of rows of each row group, and offset, size and decoded size of its images."""
  column = next((i for i in range(footer.num_columns) if footer.schema.column(i).path == leaf), None)
  groups = []
  for group in map(footer.row_group, range(footer.num_row_groups)):
    if column is None:
      groups.append((group.num_rows, 0, 0, 0))
      continue
    chunk = group.column(column)
    if 'DELTA_BYTE_ARRAY' in chunk.encodings:
      raise UserError(f'{path}: expected images that are stored as they are or in a dictionary, got the encoding '
                      'DELTA_BYTE_ARRAY, whose size in memory is not known before. Write the file again with '
                      'pyarrow.parquet.write_table.')
    offset, num_bytes = chunk_range(chunk)
    if group.num_rows < 0 or offset < len(_MAGIC) or num_bytes < 0 or offset + num_bytes > file_bytes - _END:
      raise UserError(f'{path}: expected row groups inside of the file, got one of {num_bytes:,} bytes at byte '
                      f'{offset:,}. {_AGAIN}')
    groups.append((group.num_rows, offset, num_bytes, max(0, chunk.total_uncompressed_size)))
  return groups


def chunk_range(chunk: Any) -> tuple[int, int]:
  """Returns offset and size of a column in a row group, a `pyarrow.parquet.ColumnChunkMetaData`."""
  offsets = [offset for offset in (chunk.dictionary_page_offset, chunk.data_page_offset) if offset]
  return min(offsets, default=0), chunk.total_compressed_size


def _values(column: Any) -> list[Any]:
  """Returns the values as Python objects. Equal values of a dictionary are one object, which bounds the memory."""
  values = list[Any]()
  for chunk in column.chunks:
    if not pa.types.is_dictionary(chunk.type):
      values += chunk.to_pylist()
      continue
    distinct = chunk.dictionary.to_pylist()
    values += [None if code is None else distinct[code] for code in chunk.indices.to_pylist()]
  return values


def _names(column: Any) -> list[bytes]:
  """Returns texts as bytes; a missing text is empty. Raises ValueError if a text is too long for a path."""
  names = [(text or '').encode(errors='surrogatepass') for text in _values(column)]
  if (longest := max(map(len, names), default=0)) > _MOST_NAME:
    raise ValueError(f'a path of {longest:,} bytes')
  return names


def _labels(column: Any, *, is_named: bool) -> list[Any]:
  """Returns the labels in a column, as `index.encode` takes them."""
  kind = column.type
  if pa.types.is_list(kind) or pa.types.is_large_list(kind):
    from pyarrow import compute
    flat = _labels(pa.chunked_array([chunk.flatten() for chunk in column.chunks], kind.value_type), is_named=is_named)
    ends = np.cumsum(compute.fill_null(compute.list_value_length(column), 0).to_numpy()).tolist()
    return [tuple(flat[start:end]) for start, end in itertools.pairwise([0, *ends])]
  if pa.types.is_dictionary(kind) and not _is_text(kind.value_type):
    column = column.cast(kind.value_type)
  if pa.types.is_integer(column.type) or pa.types.is_boolean(column.type):
    values = column.cast(pa.int64()).to_pylist()
    return [None if value is not None and value < 0 else value for value in values] if is_named else values
  return _values(column)


def choose_columns(path: str, footer: Any, image: str, label: str, caption: str = '') -> Columns:
  """Returns the columns with image, label and caption, by these settings, or by names and types.

  Images are in the column of the type `Image` that the package `datasets` describes in the metadata, or in one named
  `image`, or in the only one with bytes; labels in `label`, or in the only one of type `ClassLabel`; captions in
  `caption`, `captions`, `text` or `texts`, if it has texts.

  Args:
    path: of the file.
    footer: its `pyarrow.parquet.FileMetaData`.
    image, label, caption: names of columns; '' = chosen here.

  Raises:
    UserError: there is no such column, or several could be meant.
  """
  schema, features = footer.schema.to_arrow_schema(), _features(footer)
  image = image or _only('data.image_column', path, _image_candidates(schema, features), 'images')
  if not image:
    raise UserError(f'{path}: expected a column of images, as bytes, as a struct with bytes, or as paths, got the '
                    f'columns {column_types(schema)}. Set data.image_column, if one of them has images.')
  image_field = _field(schema, image, 'data.image_column', path)
  leaf, names = _image_columns(image_field, path)
  if not label:
    label = next((name for name in _LABEL_NAMES if name in schema.names), '') or _only(
        'data.label_column', path, [name for name in schema.names if _class_names(features.get(name))], 'labels')
  kind = _field(schema, label, 'data.label_column', path).type if label else ''
  if kind and not _is_label(kind):
    raise UserError(f'data.label_column: expected a column of whole numbers, texts, or lists of them in {path}, got '
                    f'{label!r} of the type {kind}. Set another column.')
  if caption and not _are_texts(_field(schema, caption, 'data.caption_column', path).type):
    raise UserError(f'data.caption_column: expected a column of texts, or of lists of them, in {path}, got {caption!r} '
                    f'of the type {schema.field(caption).type}. Set another column.')
  caption = caption or next((name for name in stored.NAMES if name in schema.names and name != label
                             and _are_texts(schema.field(name).type)), '')
  return Columns(image, leaf, names, label, (str(image_field.type), str(kind)), _class_names(features.get(label)),
                 caption)


def _check_columns(path: str, footer: Any, columns: Columns) -> None:
  """Raises UserError if the columns of a file differ from those of the first file."""
  schema = footer.schema.to_arrow_schema()
  for name, expected in zip((columns.image, columns.label), columns.types, strict=True):
    number = schema.get_field_index(name) if name else -1
    got = str(schema.field(number).type) if number >= 0 else ''
    if name and got != expected:
      raise UserError(f'{path}: expected the column {name!r} of the type {expected}, as the first file has it, got '
                      f'{got or f"the columns {column_types(schema)}"}. Leave it out of the pattern, or write it '
                      'again.')
  if columns.caption and (columns.caption not in schema.names or not _are_texts(schema.field(columns.caption).type)):
    raise UserError(f'{path}: expected captions in the column {columns.caption!r}, as the first file has them, got the '
                    f'columns {column_types(schema)}. Leave it out of the pattern, or write it again.')
  if columns.label and (names := _class_names(_features(footer).get(columns.label))) != columns.names:
    raise UserError(f'{path}: expected the {len(columns.names):,} class names of the first file for the column '
                    f'{columns.label!r}, got {len(names):,} others. Leave the file out of the pattern.')


def _image_candidates(schema: Any, features: Mapping[str, Any]) -> list[str]:
  """Returns the columns that may have images: by type if any has that of images, else by name, else by bytes."""
  by_type = [name for name in schema.names if (features.get(name) or {}).get('_type') == 'Image']
  by_name = [name for name in _IMAGE_NAMES if name in schema.names][:1]
  by_bytes = [field.name for field in schema if _is_bytes(field.type) or (
      pa.types.is_struct(field.type) and field.type.get_field_index('bytes') >= 0)]
  return by_type or by_name or by_bytes


def _only(setting: str, path: str, names: Sequence[str], what: str) -> str:
  """Returns the only name, or '' if there is none. Raises UserError if there are several."""
  if len(names) > 1:
    raise UserError(f'{setting}: expected the name of the column with {what} of {path}, as several could be meant: '
                    f"{documents.listed(list(names), _SHOWN)}, got ''. Set it.")
  return next(iter(names), '')


def _field(schema: Any, name: str, setting: str, path: str) -> Any:
  number = schema.get_field_index(name)
  if number < 0:
    raise UserError(f'{setting}: expected one column of {path}, {column_types(schema)}, got {name!r}. Correct it.')
  return schema.field(number)


def _image_columns(field: Any, path: str) -> tuple[str, str]:
  """Returns the columns with the bytes and with the names of images. Raises UserError if the type has neither."""
  if _is_bytes(field.type):
    return field.name, ''
  if _is_text(field.type):
    return '', field.name
  if pa.types.is_struct(field.type) and (number := field.type.get_field_index('bytes')) >= 0 and _is_bytes(
      field.type.field(number).type):
    path_number = field.type.get_field_index('path')
    has_path = path_number >= 0 and _is_text(field.type.field(path_number).type)
    return f'{field.name}.bytes', f'{field.name}.path' if has_path else ''
  raise UserError(f'data.image_column: expected a column of bytes, of structs with bytes, or of paths in {path}, got '
                  f'{field.name!r} of the type {field.type}. Set another column.')


def _is_bytes(kind: Any) -> bool:
  return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _is_text(kind: Any) -> bool:
  return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _are_texts(kind: Any) -> bool:
  return _is_text(kind.value_type if pa.types.is_list(kind) or pa.types.is_large_list(kind) else kind)


def _is_label(kind: Any) -> bool:
  if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_dictionary(kind):
    kind = kind.value_type
  return bool(pa.types.is_integer(kind) or pa.types.is_boolean(kind) or _is_text(kind))


def column_types(schema: Any) -> str:
  """Returns the names and types of columns for a message."""
  return documents.listed([f'{field.name} ({field.type})' for field in schema], _SHOWN)


def _features(footer: Any) -> dict[str, Any]:
  """Returns the types of columns that the package `datasets` describes in the metadata of a file; {} if there are none.

  A list of a type has the type itself.
  """
  try:
    features = documents.parse((footer.metadata or {})[b'huggingface'])['info']['features']
    kinds = {name: kind[0] if isinstance(kind, list) and kind else kind for name, kind in features.items()}
    return {name: kind for name, kind in kinds.items() if isinstance(kind, dict)}
  except (KeyError, TypeError, ValueError, AttributeError):
    return {}


def _class_names(feature: Any) -> tuple[str, ...]:
  """Returns the names of classes that a `ClassLabel`, or a list of them, has; () if it is of another type."""
  while isinstance(feature, dict) and isinstance(feature.get('feature'), dict):
    feature = feature['feature']
  names = feature.get('names') if isinstance(feature, dict) and feature.get('_type') == 'ClassLabel' else None
  is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
  return tuple(names) if is_list and names and len(set(names)) == len(names) else ()
