"""`parquet:PATH`: Parquet files as the package `datasets` and others write them, read by row groups.

PATH is a pattern such as `DIR/train-*.parquet` or a folder (`shard_files.py`). A row is an example. Its image is bytes,
a struct with bytes, as Hugging Face writes it, or the path of a file in or below the folder of the Parquet files. Its
label is a whole number, with names if the file describes a `ClassLabel`, a text, or a list of them. Captions are a text
or a list of texts.

A row group, some hundred rows, is read and decoded as a whole and kept in a bounded cache of the process, so training
visits the rows in windows of row groups (`pipeline/group_order.py`).
"""
from __future__ import annotations

import bisect
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.data.files import parquet_index, ranges, remote, user_files
from vit_jax.data.files.parquet_columns import Columns
from vit_jax.data.files.parquet_index import Index
from vit_jax.data.files.ranges import Range
from vit_jax.data.files.user_files import Rules
from vit_jax.data.image.headers import BadImage
from vit_jax.data.source import UNLABELED, Record, RowGroups, Source
from vit_jax.data.sources import indexed, shard_files
from vit_jax.data.sources.indexed import Files, IndexedSource, Listed
from vit_jax.data.sources.shard_files import Shards
from vit_jax.data.sources.sharded import Classes
from vit_jax.data.text import stored

log = logging.getLogger('vit_jax.data')

EXTENSION = '.parquet'
_FEW = 4  # row groups in a window, below which a message advises to write smaller ones


class ParquetSource(IndexedSource):
  """The rows of Parquet files."""
  may_lack_labels = True

  def __init__(self, files: Files, columns: Columns, classes: Classes, *, name: str, root: str, rules: Rules) -> None:
    super().__init__(files, columns, classes, name=name, root=root, rules=rules)
    self._held_bytes = ranges.settings().group_bytes
    if (found := self.row_groups) is not None and int(found.num_bytes.sum()) > found.held_bytes:
      self._check_groups(found)

  @staticmethod
  def load(files: Files, columns: Columns) -> Index:
    found = parquet_index.load(files.paths, columns)
    if not len(found):
      raise UserError(f'{files.paths[0]}: expected rows with images, got none in {len(files.paths):,} files. Correct '
                      'the pattern.')
    return found

  @staticmethod
  def label_place(label: str) -> str:
    return f'the column {label}'

  @staticmethod
  def choose(paths: Sequence[str], data: schema.Data) -> Columns:
    found = parquet_index.choose(paths[0], data.image_column, data.label_column, data.caption_column)
    if not found.label and not found.caption:
      log.warning('%s has no column `label`, and none of the type ClassLabel: its images have no labels, and get the '
                  'class %r.', paths[0], *UNLABELED)
    return found

  @staticmethod
  def has_names(columns: Columns) -> bool:
    return bool(columns.names)

  def identity(self) -> Iterator[HostArray]:
    found = self._index
    yield from (found.ends, found.size, found.names, found.labels, found.label_ends)

  @property
  def row_groups(self) -> RowGroups | None:
    """The row groups with the images; None if images are files of their own."""
    if not self._columns.leaf:
      return None
    sizes = np.diff(self._index.ends, prepend=0)
    return RowGroups(sizes, np.asarray(self._index.decoded), self._held_bytes).take(sizes)

  def __len__(self) -> int:
    return int(self._index.starts[-1])

  def __getitem__(self, index: int) -> Record:
    labels = self.labels(index)
    image = self._image(index)
    return Record.multilabel(image, labels) if self.most_labels else Record(image, labels[0])

  @property
  def caption_column(self) -> str:
    return str(self._columns.caption)

  def captions(self, index: int) -> tuple[str, ...]:
    """Returns the texts of an image that are not empty. Raises BadImage if its row group is damaged."""
    group = self._index.find_group(index)
    footer = parquet_index.metadata(self._index.footer(int(self._index.file[group])))
    part = Range(self._files.paths[int(self._index.file[group])], *parquet_index.place_of_texts(
        footer, int(self._index.group[group]), self.caption_column))
    column: _Values = ranges.groups().get(part, lambda: self._decode(group, part, self.caption_column))
    found: Any = column[index - self._index.first_row(group)]
    return stored.texts(found if isinstance(found, list) else [found], f'the column {self.caption_column}')

  def describe(self, index: int) -> str:
    file = int(np.searchsorted(self._index.starts, index, side='right')) - 1
    path, name = self._files.paths[file], self._index.name(index)
    return f'{path}/{name}' if name else f'{path}[{index - int(self._index.starts[file])}]'

  def part(self, index: int) -> Range | None:
    """Returns the range that is read for an example; None if the file is local, or its row group is in memory."""
    part = self._range(self._index.find_group(index))
    return part if remote.is_address(part.path) and part not in ranges.groups() else None

  def _image(self, index: int) -> bytes:
    """Returns the image of an example. Raises BadImage if it is missing, too large, or its row group is damaged."""
    group = self._index.find_group(index)
    image: bytes | None = None
    if self._columns.leaf:
      image = self._values(group)[index - self._index.first_row(group)]
    if image is None:
      return self._read_file(self._index.name(index))
    if len(image) > self._rules.max_bytes:
      raise BadImage(f'the image has {len(image):,} bytes: expected at most {self._rules.max_bytes:,}. Shrink the '
                     'image, or in a config raise data.max_file_mib')
    return image

  def _range(self, group: int) -> Range:
    found = self._index
    return Range(self._files.paths[int(found.file[group])], int(found.offset[group]), int(found.size[group]))

  def _values(self, group: int) -> _Values:
    """Returns the images of a row group, from the cache or the file."""
    part = self._range(group)
    found: _Values = ranges.groups().get(part, lambda: self._decode(group, part, self._columns.leaf))
    return found

  def _decode(self, group: int, part: Range, leaf: str) -> tuple[_Values, int]:
    """Returns the values of a column in a row group, which are a part of its file, and their bytes."""
    found = self._index
    content = ranges.read(*part)
    if len(content) < part.size:
      raise BadImage(f'the row group is truncated: {part.path} ends in it')
    try:
      footer = parquet_index.metadata(found.footer(int(found.file[group])))
      column = parquet_index.read_column(part.path, content, footer, int(found.group[group]), leaf, part.offset)
      values = _Values(column)
      if len(values) != int(found.ends[group]) - found.first_row(group):
        raise ValueError(f'{len(values):,} rows')
      return values, column.nbytes
    except Exception as error:  # pyarrow has many, such as OSError for what is damaged; nothing is read here
      raise BadImage(f'the row group is damaged: {parquet_index.reason(error)}') from error

  def _read_file(self, path: str) -> bytes:
    """Returns an image that is a file in or below the folder of the Parquet files."""
    if not path:
      raise BadImage(f'the row: expected an image in the column {self._columns.image}, got none')
    place = os.path.join(self.root, path)
    if not user_files.is_below(path) or (
        not remote.is_address(place) and not self._rules.follow_links
        and user_files.leads_out(place, os.path.realpath(self.root))):
      raise BadImage(f'the image: expected a path below {self.root}, got {path[:200]!r}')
    try:
      return ranges.read_file(place, self._rules.max_bytes)
    except user_files.TooLarge as error:
      raise BadImage(f'the file {place} has {error}: expected at most {self._rules.max_bytes:,}. Shrink the image, or '
                     'in a config raise data.max_file_mib') from None
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
      raise BadImage(f'the image: expected the file {place}, got "{error.strerror}"') from error

  def _check_groups(self, found: RowGroups) -> None:
    """Warns if a process can hold few of the row groups, or if each has one class.

    Raises:
      UserError: it cannot hold one of them.
    """
    mib = found.held_bytes // 2**20
    largest, place = int(found.num_bytes.max()), int(np.argmax(found.num_bytes))
    first = int(found.sizes[:place].sum())
    rows = max(1, int(found.sizes[place] * found.held_bytes // (64 * max(1, largest))))
    advice = (f'Write the files again with smaller ones, such as row_group_size={rows} of pyarrow.parquet.write_table, '
              'or run vit-jax prepare')
    if largest > found.held_bytes:
      raise UserError(f'{self.describe(first)}: expected row groups of at most data.shuffle_mib={mib}, as '
                      f'each is read as a whole, got one of {largest / 2**20:,.0f} MiB with {found.sizes[place]:,} '
                      f'images. {advice}; or raise data.shuffle_mib.')
    if found.num_mixed < _FEW:
      log.warning('%s has row groups of up to %s MiB, of which %s are shuffled at a time: images are shuffled among '
                  'few others. %s; or raise data.shuffle_mib, which is %s.', self.name, f'{largest / 2**20:,.0f}',
                  found.num_mixed, advice, mib)
    elif self._is_sorted(found):
      log.warning('%s is sorted by class: the images of a row group have the same one, and are shuffled with those of '
                  '%s others. Run vit-jax prepare, whose datasets are shuffled as a whole.', self.name,
                  found.num_mixed - 1)

  def _is_sorted(self, found: RowGroups) -> bool:
    """Returns whether most row groups have images of a single class, of more classes."""
    labels = self._index.labels
    if len(labels) != len(self) or len(self.class_names) <= _FEW:
      return False
    changes = np.append(True, labels[1:] != labels[:-1])  # a run of equal labels begins
    return int(changes.sum()) < 2 * min(len(found.sizes), len(self) // 2)


class _Values:
  """The values of a column in a row group."""

  def __init__(self, column: Any) -> None:
    self._chunks = column.chunks
    self._ends = np.cumsum([len(chunk) for chunk in self._chunks]).tolist()

  def __len__(self) -> int:
    return self._ends[-1] if self._ends else 0

  def __getitem__(self, row: int) -> Any:
    number = bisect.bisect_right(self._ends, row)
    found: Any = self._chunks[number][row - (self._ends[number - 1] if number else 0)].as_py()
    return found


def opener(where: str, data: schema.Data, image_px: tuple[int, int]) -> Callable[[str], Source]:
  """Opens the splits of Parquet files.

  `data.image_column`, `data.label_column` and `data.caption_column` are columns.

  Raises:
    UserError: there are no such files, pyarrow is not installed, or (when opening) they are damaged.
    TemporaryError: object storage fails.
  """
  del image_px
  shards = shard_files.find(where, EXTENSION, kind='parquet', rules=Rules.of(data))
  return open_found(shards, data, name=f'parquet:{where}')


def open_found(shards: Shards, data: schema.Data, *, name: str) -> Callable[[str], Source]:
  """Opens the splits of Parquet files that are known; `name` is that of the source."""
  listed = Listed(shards.root, {split: Files(paths) for split, paths in shards.splits.items()})
  return indexed.opener(ParquetSource, listed, data, name=name)
