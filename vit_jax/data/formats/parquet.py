"""`parquet:PATH`: Parquet files as the package `datasets` and others write them, read by row groups.

PATH is a pattern such as `DIR/train-*.parquet` or a folder (`shards.py`). A row is an example:

  image     bytes; a struct with bytes, as Hugging Face writes it; or the path of a file in or below the folder
  label     a whole number or a text, or a list of them; if the file describes a `ClassLabel`, each number has a name
  captions  a text or a list of texts

`opening.py` calls `opener`, and `hf.py` uses `ParquetSource` for the files that it downloads. `indexed.py` documents
the methods of `ParquetSource` and the order of their calls. `parquet_columns.py` chooses the columns, and
`parquet_files.py` decodes them.

A row group usually has some hundred rows. The images of a row group are read together, and a cache of the process with
limited memory (`Cache`) keeps them. Therefore training visits the rows in windows of row groups (`data/windows.py`).
"""
from __future__ import annotations

import collections
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from vit_jax.config import schema
from vit_jax.core import documents, failures
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.data import index, storage, user_files
from vit_jax.data.formats import indexed, parquet_columns, parquet_files, shards
from vit_jax.data.formats.indexed import Classes, IndexedSource
from vit_jax.data.formats.parquet_columns import Columns
from vit_jax.data.formats.shards import Files
from vit_jax.data.image.headers import BadImage
from vit_jax.data.index import Index
from vit_jax.data.source import UNLABELED, Record, RowGroups, Source, warn_once
from vit_jax.data.storage import Span
from vit_jax.data.text import stored
from vit_jax.data.user_files import Rules

log = logging.getLogger('vit_jax.data')

_SHRINK = 'Shrink the image, or in a config raise data.max_file_mib'
_ADVISED_GROUPS = 64  # number of row groups in a window, if the row groups have the size that messages advise
_MIN_MIXED_GROUPS = 4  # with fewer row groups in a window, a warning advises to write smaller row groups
_MIN_SORTED_CLASSES = 5  # with fewer classes, rows that are sorted by class cause no warning


class ParquetSource(IndexedSource):
  """The rows of Parquet files."""
  may_lack_labels = True

  def __init__(self, files: Files, columns: Columns, classes: Classes, *, name: str, root: str, rules: Rules,
               loaded: Index) -> None:
    """Takes the arguments of `IndexedSource`. Raises UserError if a process cannot hold one of the row groups."""
    super().__init__(files, columns, classes, name=name, root=root, rules=rules, loaded=loaded)
    self._held_bytes = storage.settings().group_bytes
    groups = self.row_groups
    if groups is not None and int(groups.num_bytes.sum()) > groups.held_bytes:  # memory cannot hold all row groups
      self._check_groups(groups)

  @staticmethod
  def load(files: Files, columns: Columns) -> Index:
    return index.load(files.paths, functools.partial(parquet_files.scan, columns=columns), f'parquet 2 {columns}',
                      parquet_files.INDEX_TYPES, format_name='Parquet', expected='rows with images')

  @staticmethod
  def label_place(label: str) -> str:
    return f'the column {label}'

  @staticmethod
  def choose(paths: Sequence[str], data: schema.Data) -> Columns:
    columns = parquet_columns.choose_columns(
        paths[0], parquet_files.read_metadata(paths[0]), image=data.image_column, label=data.label_column,
        caption=data.caption_column)
    if not columns.label and not columns.caption:
      warn_once(f'{paths[0]} has no column `label` of whole numbers or texts, and none of the type ClassLabel: its '
                f'images have no labels, and get the class {UNLABELED[0]!r}. {ParquetSource.contents(paths)}')
    return columns

  @staticmethod
  def contents(paths: Sequence[str]) -> str:
    partitions = sorted({part for path in paths for part in path.split('/')[:-1] if '=' in part})  # such as `label=cat`
    folders = f' Folders such as {documents.listed(partitions, 3)} are not read as columns.' if partitions else ''
    columns = parquet_columns.describe_columns(parquet_files.read_metadata(paths[0]).schema.to_arrow_schema())
    return f'{paths[0]} has the columns {columns}.{folders}'

  @staticmethod
  def names(columns: Columns) -> tuple[str, ...]:
    return columns.names

  def identity(self) -> Iterator[HostArray]:
    starts = self._group_starts()
    ends = np.append(starts[1:], len(self))
    yield from (ends, self._index['size'][starts], self._index['name'], self._index.labels, self._index.label_ends)

  @property
  def row_groups(self) -> RowGroups | None:
    """The row groups with the images; None if the images are files."""
    if not self._columns.leaf:
      return None
    starts = self._group_starts()
    return RowGroups(np.diff(starts, append=len(self)), self._index['decoded'][starts], self._held_bytes)

  def _group_starts(self) -> HostArray:
    """Returns the first row of each row group, `[N] i64`."""
    return np.flatnonzero(self._index['place'] == 0)

  def read(self, rows: Sequence[int]) -> Iterator[Record]:
    leaf = self._columns.leaf
    group_spans = dict.fromkeys(self._span(row) for row in rows) if leaf else {}  # a set that keeps the order
    spans_ahead = collections.deque(  # row groups in object storage, which are read ahead
        span for span in group_spans if storage.is_address(span.path) and (span, leaf) not in _cache())
    contents = storage.read_many(list(spans_ahead))
    for row in rows:
      content = None
      if spans_ahead and self._span(row) == spans_ahead[0]:
        spans_ahead.popleft()
        content = next(contents)
      labels = self.labels(row)
      yield Record(self._read_image(row, content), labels)

  @property
  def caption_column(self) -> str:
    return str(self._columns.caption)

  def captions(self, row: int) -> tuple[str, ...]:
    """Returns the texts of an image that are not empty. Raises BadImage if its row group is damaged."""
    if not (name := self.caption_column):
      return ()
    metadata = self._metadata(row)
    leaves = [metadata.schema.column(number).path for number in range(metadata.num_columns)]
    # A column of texts is a leaf. A column of lists of texts has a leaf such as `captions.list.element`.
    leaf = name if name in leaves else next(leaf for leaf in leaves if leaf.startswith(f'{name}.'))
    chunk = metadata.row_group(int(self._index['group'][row])).column(leaves.index(leaf))
    texts = self._read_value(row, Span(self._span(row).path, *parquet_files.chunk_range(chunk)), name)
    return stored.texts(texts if isinstance(texts, list) else [texts], f'the column {name}')

  def path(self, row: int) -> str:
    return super().path(row) if self._columns.leaf else os.path.join(self.root, self._name(row))

  def describe(self, row: int) -> str:
    name = self._name(row)
    return f'{super().path(row)}/{name}' if name else f'{super().path(row)}[{row - self.first_row(row)}]'

  def _name(self, row: int) -> str:
    name: bytes = self._index.get('name', row)
    return name.decode(errors='surrogateescape')

  def _metadata(self, row: int) -> Any:
    """Returns the `pyarrow.parquet.FileMetaData` of the file with a row."""
    return parquet_files.parse_footer(self._index.get('footer', self.first_row(row)))

  def _read_image(self, row: int, content: bytes | None) -> bytes:
    """Returns an encoded image; `content` as in `_read_value`. Raises BadImage if the image is missing or too large."""
    leaf = self._columns.leaf
    image: bytes | None = self._read_value(row, self._span(row), leaf, content) if leaf else None
    if image is None:
      return self._read_file(self._name(row))
    if len(image) > self._rules.max_bytes:
      raise BadImage(f'the image has {len(image):,} bytes: expected at most {self._rules.max_bytes:,}. {_SHRINK}')
    return image

  def _read_value(self, row: int, span: Span, leaf: str, content: bytes | None = None) -> Any:
    """Returns the value of a leaf, such as `image.bytes`, in one row. Raises BadImage if the row group is damaged.

    `span` is the span of the bytes of the leaf in the row group. `content` has these bytes, None = not read yet.
    """
    column = _cache().get((span, leaf), functools.partial(self._decode_column, row, span, leaf, content))
    row_in_group = int(self._index['place'][row])
    if row_in_group >= len(column):
      raise BadImage(f'the row group is damaged: {len(column):,} rows')
    return column[row_in_group].as_py()

  def _decode_column(self, row: int, span: Span, leaf: str, content: bytes | None) -> tuple[Any, int]:
    """Returns the values of a leaf in the row group of a row, and their bytes in memory; arguments of `_read_value`."""
    if content is None:
      content = storage.read(*span)
    if len(content) < span.size:
      raise BadImage(f'the row group is truncated: {span.path} ends in it')
    try:
      metadata, group_number = self._metadata(row), int(self._index['group'][row])
      column = parquet_files.read_column(span, content, metadata=metadata, group_number=group_number, leaf=leaf)
      if len(column) != metadata.row_group(group_number).num_rows:
        raise ValueError(f'{len(column):,} rows')
      return column, column.nbytes
    except MemoryError:
      raise
    except Exception as error:  # pyarrow raises errors of many types for damaged bytes, also OSError
      raise BadImage(f'the row group is damaged: {failures.first_line(error)}') from error

  def _read_file(self, name: str) -> bytes:
    """Returns an image that is a file in or below the folder of the Parquet files. Raises BadImage as `_read_image`."""
    if not name:
      raise BadImage(f'the row: expected an image in the column {self._columns.image}, got none')
    path = os.path.join(self.root, name)
    if not user_files.is_below(name) or (
        not storage.is_address(path) and not self._rules.follow_links
        and user_files.leads_out(path, os.path.realpath(self.root))):
      raise BadImage(f'the image: expected a path below {self.root}, got {name[:200]!r}')
    try:
      return storage.read_file(path, self._rules.max_bytes)
    except documents.TooLarge as error:
      raise BadImage(f'the file {path} has {error.found}: expected at most {self._rules.max_bytes:,}. {_SHRINK}'
                     ) from None
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
      raise BadImage(f'the image: expected the file {path}, got "{error.strerror}"') from error

  def _check_groups(self, groups: RowGroups) -> None:
    """Raises UserError if a row group is too large. Warns if few are shuffled together, or rows are sorted."""
    held_mib = groups.held_bytes // 2**20
    largest = int(np.argmax(groups.num_bytes))  # number of the largest row group
    num_rows, largest_bytes = int(groups.sizes[largest]), int(groups.num_bytes[largest])
    advised_rows = max(1, num_rows * groups.held_bytes // (_ADVISED_GROUPS * max(1, largest_bytes)))
    advice = (f'Write the files again with smaller ones, such as row_group_size={advised_rows} of '
              'pyarrow.parquet.write_table, or run vit-jax prepare')
    if largest_bytes > groups.held_bytes:
      raise UserError(f'{self.describe(int(groups.sizes[:largest].sum()))}: expected row groups of at most '
                      f'data.shuffle_mib={held_mib}, as each is read as a whole, got one of '
                      f'{largest_bytes / 2**20:,.0f} MiB with {num_rows:,} images. {advice}; or raise '
                      'data.shuffle_mib.')
    if groups.num_mixed < _MIN_MIXED_GROUPS:
      log.warning('%s has row groups of up to %s MiB, of which %s are shuffled at a time: images are shuffled among '
                  'few others. %s; or raise data.shuffle_mib, which is %s.', self.name,
                  f'{largest_bytes / 2**20:,.0f}', groups.num_mixed, advice, held_mib)
    elif len(self.class_names) >= _MIN_SORTED_CLASSES and self._is_sorted(len(groups.sizes)):
      log.warning('%s is sorted by class: the images of a row group have the same one, and are shuffled with those of '
                  '%s others. Run vit-jax prepare, whose datasets are shuffled as a whole.', self.name,
                  groups.num_mixed - 1)

  def _is_sorted(self, num_groups: int) -> bool:
    """Returns whether most row groups have images of one class; False if images may have several labels or none."""
    labels = self._index.labels
    num_runs = 1 + int((labels[1:] != labels[:-1]).sum())  # a run is consecutive images with the same label
    return len(labels) == len(self) and num_runs < 2 * min(num_groups, len(self) // 2)


class Cache:
  """Values that are expensive to make; above `max_bytes`, the least recently used are removed. Safe for threads.

  A thread waits for a value that another thread is making. A value that is larger than the limit is kept until the next
  value is made, so the cache takes at most `max_bytes` or one value. `num_bytes` is the size of all kept values, and
  `num_made` counts how many values were made.
  """

  def __init__(self, max_bytes: int) -> None:
    self.max_bytes, self.num_bytes, self.num_made = max_bytes, 0, 0
    self._lock = threading.Lock()  # held for each change of an attribute
    self._entries = collections.OrderedDict[Any, tuple[Any, int]]()  # value and bytes, the least recently used first
    self._key_locks = dict[Any, threading.Lock]()  # one for each value that is being made

  def __contains__(self, key: Any) -> bool:
    return key in self._entries

  def get(self, key: Any, make: Callable[[], tuple[Any, int]]) -> Any:
    """Returns the value of a key. If the cache does not have it, `make` returns the value and its size in bytes."""
    with self._lock:
      key_lock = self._key_locks.setdefault(key, threading.Lock())
    with key_lock:  # only the thread that holds this lock makes the value
      try:
        entry = self._entries.get(key)
        value, num_bytes = entry or make()
        with self._lock:
          if entry is None:
            self.num_made += 1
          _, previous_bytes = self._entries.pop(key, (None, 0))  # another thread may have removed the entry meanwhile
          self.num_bytes += num_bytes - previous_bytes
          while self._entries and self.num_bytes > self.max_bytes:
            _, (_, removed_bytes) = self._entries.popitem(last=False)
            self.num_bytes -= removed_bytes
          self._entries[key] = value, num_bytes
      finally:
        with self._lock:
          self._key_locks.pop(key, None)
    return value


@functools.lru_cache(1)
def cache_of(max_bytes: int) -> Cache:
  """Returns the cache of this process for decoded row groups, which holds at most `max_bytes`."""
  return Cache(max_bytes)


def _cache() -> Cache:
  return cache_of(storage.settings().group_bytes)


def opener(where: str, data: schema.Data, image_px: tuple[int, int], *,
           order: Sequence[str] = ()) -> Callable[[str], Source]:
  """Returns the function that opens a split of Parquet files, given the name of the split.

  `data` names the columns with images, labels and captions, and `order` lists the classes of a run that resumes. Raises
  UserError if there are no such files, and TemporaryError if object storage fails.
  """
  del image_px
  listed = shards.find(where, '.parquet', prefix='parquet', rules=Rules.of(data))
  return indexed.opener(ParquetSource, listed, data, name=f'parquet:{where}', order=order)
