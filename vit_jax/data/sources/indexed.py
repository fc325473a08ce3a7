"""What sources of indexed files share (tar, TFRecord): examples at known places, with labels that the index has."""
from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.data.files import label_lists, remote
from vit_jax.data.files.ranges import Range
from vit_jax.data.files.user_files import Rules
from vit_jax.data.image.headers import BadImage
from vit_jax.data.source import UNLABELED, Record, Source
from vit_jax.data.sources import shard_files, sharded
from vit_jax.data.sources.sharded import BadLabel, Classes, Found

log = logging.getLogger('vit_jax.data')


class Files(NamedTuple):
  """The files of a split, and the number of examples of each, if it is known."""
  paths: tuple[str, ...]
  counts: tuple[int, ...] = ()


class Listed(NamedTuple):
  """Files by split, in the folder `root`, which no link may lead out of; or an address."""
  root: str
  splits: Mapping[str, Files]


class Columns(Protocol):
  """Where image and label are; '' = there are no labels."""
  @property
  def label(self) -> str:
    ...


class Index(label_lists.Stored, Protocol):
  """The examples of files: the first one of each file (and their number) `[F + 1]`, and the place of each `[S]`."""
  @property
  def starts(self) -> HostArray:
    ...

  @property
  def offset(self) -> HostArray:
    ...

  @property
  def size(self) -> HostArray:
    ...


class IndexedSource:
  """The examples of files, in the order in which they are stored. Pickles to few bytes; safe for threads.

  A subclass has `load`, which returns the kept index, `identity`, `read`, and how messages name its columns.
  """
  behind_bytes: ClassVar[int] = 0
  """Bytes that are read behind each example, such as its checksum."""
  may_lack_labels: ClassVar[bool] = False
  """Whether a split may have no labels although others have some; its images then have the class `unlabeled`."""

  def __init__(self, files: Files, columns: Any, classes: Classes, *, name: str, root: str, rules: Rules) -> None:
    self.name, self.class_names, self.root = name, classes.names, root
    self._files, self._columns, self._classes, self._rules = files, columns, classes, rules
    self._index: Any = self.load(files, columns)
    ends = np.concatenate([[0], self._index.label_ends])
    self.most_labels = max(1, int(np.diff(ends).max())) if len(ends) > 1 else 0
    found = hashlib.sha256(f'{len(self)} {classes.names} {classes.offset}'.encode(errors='surrogateescape'))
    for array in self.identity():
      found.update(np.ascontiguousarray(array).data)
    self.digest = found.hexdigest()

  @staticmethod
  def load(files: Files, columns: Any) -> Index:
    """Returns the index of files. Raises UserError if they have no images, or are damaged."""
    raise NotImplementedError

  @staticmethod
  def choose(paths: Sequence[str], data: schema.Data) -> Columns:
    """Returns where image and label are, by the settings, or as the first examples have them."""
    raise NotImplementedError

  @staticmethod
  def label_place(label: str) -> str:
    """Returns how messages name where the label is."""
    raise NotImplementedError

  @staticmethod
  def has_names(columns: Any) -> bool:
    """Returns whether each file names all classes, so that no other split defines them."""
    del columns
    return False

  def identity(self) -> Iterator[HostArray]:
    """Yields what identifies the examples, wherever they are."""
    raise NotImplementedError

  def read(self, index: int, path: str, offset: int, size: int) -> bytes:
    """Returns the image of an example. Raises BadImage if it is damaged."""
    raise NotImplementedError

  def describe(self, index: int) -> str:
    """Returns a name by which a person finds the example."""
    raise NotImplementedError

  def __len__(self) -> int:
    return len(self._index.offset)

  def __getitem__(self, index: int) -> Record:
    path, offset, size = self._place(index)
    if size > self._rules.max_bytes:
      raise BadImage(f'the image has {size:,} bytes: expected at most {self._rules.max_bytes:,}. Shrink the image, or '
                     'in a config raise data.max_file_mib')
    labels = self.labels(index)
    image = self.read(index, path, offset, size)
    return Record.multilabel(image, labels) if self.most_labels else Record(image, labels[0])

  def label(self, index: int) -> int:
    return next(iter(self.labels(index)), -1)

  def labels(self, index: int) -> list[int]:
    """Returns the classes of an example. Raises BadLabel if they are missing, damaged or out of range."""
    stored = label_lists.of(self._index, index)
    if not stored and not len(self._index.label_ends):
      return [0]  # there are no labels
    if label_lists.MISSING in stored:
      place = self.label_place(self._columns.label)
      raise BadLabel(f'the example: expected a label in {place}, got none, or one that is damaged')
    if not self._classes.places:
      return [self._classes.of(label) for label in stored]
    texts = self._texts
    return [self._classes.of(texts[label] if 0 <= label < len(texts) else '') for label in stored]

  def opening(self, index: int) -> None:
    """Returns None: `part` of each example is known."""

  def part(self, index: int) -> Range | None:
    """Returns the range that is read for an example; None if the file is local."""
    path, offset, size = self._place(index)
    if not remote.is_address(path) or size > self._rules.max_bytes:
      return None
    return Range(path, offset, size + self.behind_bytes)

  def _place(self, index: int) -> tuple[str, int, int]:
    """Returns the file of an example, and the offset and size of its bytes."""
    found = self._index
    file = int(np.searchsorted(found.starts, index, side='right')) - 1
    return self._files.paths[file], int(found.offset[index]), int(found.size[index])

  @functools.cached_property
  def _texts(self) -> list[str]:
    return label_lists.class_texts(self._index)

  def __getstate__(self) -> dict[str, Any]:
    return {name: value for name, value in self.__dict__.items() if name not in ('_index', '_texts')}

  def __setstate__(self, state: dict[str, Any]) -> None:
    self.__dict__.update(state)
    self._index = self.load(self._files, self._columns)


def opener(kind: type[IndexedSource], listed: Listed, data: schema.Data, *, name: str) -> Callable[[str], Source]:
  """Opens the splits of files that are known; `name` is that of the source."""
  first = shard_files.defining(listed.splits)
  columns = functools.cache(lambda: kind.choose(listed.splits[first].paths, data))
  index = functools.cache(lambda split: kind.load(listed.splits[split], columns()))

  def labels_of(split: str) -> Found:
    found = index(split)
    numbers = found.labels[found.labels != label_lists.MISSING]
    low, high = (int(numbers.min()), int(numbers.max())) if len(numbers) else (0, -1)
    return Found(tuple(label_lists.class_texts(found)), high, low)

  def open_split(split: str) -> IndexedSource:
    where, column = f'{name}/{split}' if split else name, columns().label
    is_labeled = bool(column and len(index(split).labels))
    if column and not is_labeled and kind.may_lack_labels:
      log.warning('%s has no labels: its images get the class %r.', where, *UNLABELED)
    elif column and not is_labeled:
      raise UserError(f'{where}: expected labels in {kind.label_place(column)}, got none. Choose another split, or set '
                      'data.label_column.')
    defining = split if kind.has_names(columns()) else first
    classes = (Classes(UNLABELED, {}, 0) if not is_labeled else
               sharded.number(data, listed.root, labels_of(split), lambda: labels_of(defining), where=where))
    return kind(listed.splits[split], columns(), classes, name=where, root=listed.root, rules=Rules.of(data))
  return sharded.opener(listed.splits, data, open_split, where=name, read_labels=_first_labels)


def _first_labels(source: Source) -> HostArray:
  """Returns the first class of each example, -1 if it has none that is known, `[S] i32`."""
  found = np.full(len(source), -1, np.int32)
  for index in range(len(source)):
    with contextlib.suppress(BadImage):
      found[index] = source.label(index)
  return found
