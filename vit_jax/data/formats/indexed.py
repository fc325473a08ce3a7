"""What tar, TFRecord and Parquet share: an index of examples in files, numbered labels, splits and hold-outs.

A format has a subclass of `IndexedSource`, a function that yields the rows of a file for the index (`index.Scan`), and
an opener. The opener of a format lists the files (`shards.find`) and calls `opener` here, which returns the function
that opens a split. For a split, that function calls in this order:

  1. `IndexedSource.choose` with the training files chooses the columns with image and label.
  2. `IndexedSource.load` with the files of the split returns the index of the files, which has the labels.
  3. `number_labels` gives each label a class, by a list of classes or by the training files. In the second case, the
     index of the training files is loaded, too.
  4. The constructor of the subclass calls `identity`, which yields the arrays that the digest of the split is made of.

Later, `read` reads the span of bytes of each example and passes the bytes to `image`. This module does not depend on
any format.
"""
from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from vit_jax.config import schema
from vit_jax.core import documents, failures
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.data import index, splits, storage
from vit_jax.data.formats.shards import Files, Listed
from vit_jax.data.image.headers import BadImage
from vit_jax.data.index import Index
from vit_jax.data.labels import classes
from vit_jax.data.source import UNLABELED, Record, Rows, Source, first_label, take, warn_once
from vit_jax.data.storage import Span
from vit_jax.data.user_files import Rules

log = logging.getLogger('vit_jax.data')

CLASSES = 'classes.txt'
"""The file, beside the files of a dataset, that has the names of the classes, one on each line, in their order."""
_MAX_SHOWN = 5  # names in a message


class SplitLabels(NamedTuple):
  """The different labels of a split.

  texts: the names of the classes, if labels are names or the files list names; else ().
  largest, smallest: the largest and smallest label in the index, where labels are positions in `texts` or numbers; -1
    and 0 if there are no labels.
  """
  texts: tuple[str, ...] = ()
  largest: int = -1
  smallest: int = 0

  def is_shifted(self, first: int, num_classes: int) -> bool:
    """Returns whether the labels span `num_classes` numbers, but begin at a number other than `first`."""
    return 0 <= self.smallest != first and self.largest - self.smallest + 1 == num_classes


class Classes(NamedTuple):
  """The classes of a source, and how labels in files stand for them.

  names: the names of the classes.
  class_by_label: the class of each label that is a name; empty if labels are numbers.
  offset: the number that the first class has in the files.
  """
  names: tuple[str, ...]
  class_by_label: Mapping[str, int]
  offset: int

  def of(self, label: int | str) -> int:
    """Returns the class of a label. Raises BadImage if no class has the label."""
    if isinstance(label, str) or self.class_by_label:
      if str(label) not in self.class_by_label:
        raise BadImage(f'the label: expected one of the {len(self.names):,} classes, got '
                       f'{documents.describe(str(label))}')
      return self.class_by_label[str(label)]
    if not 0 <= label - self.offset < len(self.names):
      raise BadImage(f'the label: expected {self.offset} to {self.offset + len(self.names) - 1}, got {label}')
    return label - self.offset


class IndexedSource(Rows):
  """The examples of files, in the order in which they are stored. Pickles to few bytes; safe for threads.

  A subclass defines `choose`, `load`, `identity`, `image` and `describe`; `label_place` and `contents` for messages;
  and possibly `names`.
  """
  footer_bytes: ClassVar[int] = 0
  """Bytes after each example that are read with the example, such as a checksum."""
  may_lack_labels: ClassVar[bool] = False
  """Whether a split may have no labels although other splits have some; the images then have the class `unlabeled`."""

  def __init__(self, files: Files, columns: Any, classes: Classes, *, name: str, root: str, rules: Rules,
               loaded: Index) -> None:
    """Takes the columns that `choose` returned, and the index that `load` returned; `root` is the folder of files."""
    self.name, self.root, self.class_names = name, root, classes.names
    self._files, self._columns, self._classes, self._rules = files, columns, classes, rules
    self._index = loaded  # is not pickled: `__setstate__` loads the index again
    ends = loaded.label_ends
    self.most_labels = max(1, int(np.diff(ends, prepend=0).max())) if len(ends) else 0
    digest = hashlib.sha256(f'{len(self)} {classes.names} {classes.offset}'.encode(errors='surrogateescape'))
    for array in self.identity():
      digest.update(np.ascontiguousarray(array).data)
    self.digest = digest.hexdigest()

  @staticmethod
  def load(files: Files, columns: Any) -> Index:
    """Returns the index of files. Raises UserError if the files have no images, or are damaged."""
    raise NotImplementedError

  @staticmethod
  def choose(paths: Sequence[str], data: schema.Data) -> Any:
    """Returns the columns with image and `label` ('' = no labels), by the settings, or by the first examples."""
    raise NotImplementedError

  @staticmethod
  def label_place(label: str) -> str:
    """Returns the name of the column of the labels for messages, such as `the column label`."""
    raise NotImplementedError

  @staticmethod
  def contents(paths: Sequence[str]) -> str:
    """Returns a sentence about what the files have, for messages about missing labels; or ''."""
    raise NotImplementedError

  @staticmethod
  def names(columns: Any) -> tuple[str, ...]:
    """Returns the names of all classes if each file lists the names, so that no other split defines them; else ()."""
    del columns
    return ()

  def identity(self) -> Iterator[HostArray]:
    """Yields arrays that identify the examples in any folder; the digest is a hash of the bytes of these arrays."""
    raise NotImplementedError

  def image(self, row: int, stored: bytes) -> bytes:
    """Returns the encoded image of an example, given the bytes of the span. Raises BadImage if they are damaged."""
    raise NotImplementedError

  def describe(self, row: int) -> str:
    """Returns a name by which a person finds the example."""
    raise NotImplementedError

  def describe_contents(self) -> str:
    """Returns a sentence about what the files have, for messages about missing labels; or ''."""
    return self.contents(self._files.paths)

  def label_arrays(self) -> Iterator[HostArray]:
    """Yields arrays that identify the labels, for `identity`."""
    texts = [text.encode(errors='surrogatepass') for text in self._index.texts]
    yield from (self._index.labels, self._index.label_ends, np.frombuffer(b''.join(texts), np.uint8),
                np.cumsum([len(text) for text in texts], dtype=np.int64))

  def __len__(self) -> int:
    return len(self._index)

  def read(self, rows: Sequence[int]) -> Iterator[Record]:
    max_bytes = self._rules.max_bytes
    spans = map(self._span, rows)
    contents = storage.read_many(span if span.size <= max_bytes else span._replace(size=0) for span in spans)
    for row, content in zip(rows, contents, strict=True):
      num_bytes = int(self._index['size'][row])
      if num_bytes > max_bytes:
        raise BadImage(f'the image has {num_bytes:,} bytes: expected at most {max_bytes:,}. Shrink the image, or in a '
                       'config raise data.max_file_mib')
      labels = self.labels(row)
      yield Record(self.image(row, content), labels)

  def labels(self, row: int) -> tuple[int, ...]:
    """Returns the classes of an example. Raises BadImage if they are missing, damaged or out of range."""
    stored = self._index.labels_of(row)
    if not stored and not len(self._index.label_ends):  # no example has labels
      return (0,)
    if index.MISSING in stored:
      place = self.label_place(self._columns.label)
      raise BadImage(f'the example: expected a label in {place}, got none, or one that is damaged')
    if not self._classes.class_by_label:
      return tuple(self._classes.of(label) for label in stored)
    texts = self.names(self._columns) or self._index.texts
    positions = [label - self._classes.offset for label in stored]
    return tuple(self._classes.of(texts[i] if 0 <= i < len(texts) else '') for i in positions)

  def path(self, row: int) -> str:
    """Returns the path of the file with an example."""
    return self._files.paths[int(self._index['file'][row])]

  def first_row(self, row: int) -> int:
    """Returns the first row of the file with an example."""
    return int(np.searchsorted(self._index['file'], self._index['file'][row]))

  def _span(self, row: int) -> Span:
    """Returns the span of an example with the footer."""
    return Span(IndexedSource.path(self, row), int(self._index['offset'][row]),
                int(self._index['size'][row]) + self.footer_bytes)

  def __getstate__(self) -> dict[str, Any]:
    return {name: value for name, value in self.__dict__.items() if name != '_index'}

  def __setstate__(self, state: dict[str, Any]) -> None:
    self.__dict__.update(state)
    self._index = self.load(self._files, self._columns)


def opener(format_source: type[IndexedSource], listed: Listed, data: schema.Data, *, name: str,
           order: Sequence[str] = ()) -> Callable[[str], Source]:
  """Returns the function that opens a split by name. Files that do not belong to splits are divided by a hold-out.

  `format_source` is the subclass of the format, `listed` has the files of each split, `name` is the name of the source,
  such as `wds:PATH`, and `order` has the classes of a run that resumes.
  """
  opened = _Opener(format_source, listed, data, name, order)
  return functools.cache(opened.open_part if '' in listed.splits else opened.open_split)


class _Opener:
  """Opens splits of a dataset: `open_split`, or `open_part` if the files do not belong to splits.

  The training split, or else the first split by name, defines the columns, and the classes if no list has them. Columns
  and the index of each split are read when they are first needed, and only once.
  """

  def __init__(self, format_source: type[IndexedSource], listed: Listed, data: schema.Data, name: str,
               order: Sequence[str]) -> None:
    self._format_source, self._listed, self._data, self._name, self._order = format_source, listed, data, name, order
    self._training_split = 'train' if 'train' in listed.splits else min(listed.splits)
    self._load = functools.cache(lambda split: format_source.load(listed.splits[split], self._columns))

  @functools.cached_property
  def _columns(self) -> Any:
    return self._format_source.choose(self._listed.splits[self._training_split].paths, self._data)

  def open_split(self, split: str) -> Source:
    """Opens a split that has files of its own."""
    split = splits.resolve(split, self._listed.splits, source=self._name)
    return self._open_files(split, where=f'{self._name}/{split}')

  def open_part(self, split: str) -> Source:
    """Opens `train`, `test` or `all` of files that do not belong to splits."""
    part = splits.resolve_part(split, source=self._name)
    if part == splits.ALL:
      return self._open_files('', where=self._name)
    splits.check_holdout(self._data.holdout)
    complete = self._open_files('', where=self._name)
    shuffled = np.random.Generator(np.random.Philox(key=self._data.holdout_seed)).permutation(len(complete))
    kept, held_out = splits.hold_out(_first_labels(complete)[shuffled], self._data.holdout)
    rows = np.sort(shuffled[kept if part == 'train' else held_out])
    return take(complete, rows, name=f'{self._name}/{part}',
                title=splits.part_title(self._name, part, self._data.holdout))

  def _open_files(self, split: str, *, where: str) -> IndexedSource:
    """Opens a split, '' = the files that do not belong to splits. Raises UserError if a column has no labels."""
    files = self._listed.splits[split]
    column = self._columns.label
    numbered = Classes(UNLABELED, {}, 0)  # unless the split has labels
    if column and len(self._load(split).labels):
      are_listed = bool(self._format_source.names(self._columns))
      defining_split = split if are_listed else self._training_split
      numbered = number_labels(self._data, self._listed.root, self._labels_of(split),
                               lambda: self._labels_of(defining_split), are_listed=are_listed, order=self._order,
                               where=where)
    elif column and self._format_source.may_lack_labels:
      warn_once(f'{where} has no labels: its images get the class {UNLABELED[0]!r}.')
    elif column:
      raise UserError(f'{where}: expected labels in {self._format_source.label_place(column)}, got none. Choose '
                      f'another split, or set data.label_column. {self._format_source.contents(files.paths)}'.rstrip())
    return self._format_source(files, self._columns, numbered, name=where, root=self._listed.root,
                               rules=Rules.of(self._data), loaded=self._load(split))

  def _labels_of(self, split: str) -> SplitLabels:
    loaded = self._load(split)
    texts = tuple(self._format_source.names(self._columns) or loaded.texts)
    numbers = loaded.labels[loaded.labels != index.MISSING]
    return SplitLabels(texts, int(numbers.max()), int(numbers.min())) if len(numbers) else SplitLabels(texts)


def _first_labels(source: Source) -> HostArray:
  """Returns the first class of each example, -1 if it is not known, `[S] i32`."""
  labels = np.full(len(source), -1, np.int32)
  for row in range(len(source)):
    with contextlib.suppress(BadImage):
      labels[row] = first_label(source, row)
  return labels


def number_labels(data: schema.Data, folder: str, labels: SplitLabels, read_defining: Callable[[], SplitLabels], *,
                  are_listed: bool, order: Sequence[str], where: str) -> Classes:
  """Returns the classes of `labels`: by `data.classes`, a file `classes.txt` in the folder, or the defining files.

  `read_defining` returns the labels of the defining files: the files of the training split, or with `are_listed` of the
  split `where` itself. It is called if labels are numbers, or no list has the classes. With `are_listed`, each file
  lists the classes, and this order is kept. Other names are sorted, or have the `order` of a run that resumes. Raises
  UserError if the number of classes is not known, or too large, or a name is not one of the classes.
  """
  path = data.classes or _find_list(folder)
  offset = data.label_offset if are_listed or not labels.texts else 0
  is_inside = offset <= labels.smallest <= labels.largest < offset + len(labels.texts)
  if are_listed and labels.texts and labels.smallest != offset and not is_inside:
    raise _wrong_first(labels, len(labels.texts), offset, where=where)  # else at most some labels are damaged
  if path:
    names = classes.read(path, setting='data.classes' if data.classes else 'classes')
    if not labels.texts:
      _check_numbers(read_defining(), labels, len(names), offset, is_declared=True, where=where)
    indexes = classes.match(labels.texts, names, where=path) if labels.texts else ()
    return Classes(names, dict(zip(labels.texts, indexes, strict=True)), offset)
  defining = read_defining()
  if defining.texts:
    if unknown := sorted(set(labels.texts) - set(defining.texts)):
      raise UserError(f'{where}: expected the classes of the training files, got {len(unknown)} others: '
                      f'{documents.listed(unknown, _MAX_SHOWN)}. Set data.classes to a file with all classes.')
    names = defining.texts if are_listed else classes.ordered(defining.texts, order)
    return Classes(names, {name: position for position, name in enumerate(names)}, offset)
  if labels.texts:
    raise UserError(f'{where}: expected numbers of classes, as in the training files, got names: '
                    f'{documents.listed(labels.texts, _MAX_SHOWN)}. Set data.classes to a file with all classes, or '
                    'correct the labels.')
  num_classes = data.num_classes or defining.largest - offset + 1
  _check_numbers(defining, labels, num_classes, offset, is_declared=bool(data.num_classes), where=where)
  if not 0 < num_classes <= classes.MAX_CLASSES:
    raise UserError(f'data.num_classes: expected 1 to {classes.MAX_CLASSES:,} for {where}, got '
                    f'{max(0, num_classes):,}. Set it, or data.classes to a file with the names of the classes.')
  return Classes(tuple(map(str, range(num_classes))), {}, offset)


def _find_list(folder: str) -> str:
  """Returns the path of the list of classes beside the files; '' if there is no list."""
  path = os.path.join(folder, CLASSES)
  try:
    exists = CLASSES in storage.list_names(folder, CLASSES) if storage.is_address(folder) else os.path.isfile(path)
  except OSError as error:
    raise failures.unreadable(error, path) from error
  return path if exists else ''


def _check_numbers(defining: SplitLabels, labels: SplitLabels, num_classes: int, offset: int, *, is_declared: bool,
                   where: str) -> None:
  """Checks labels that are numbers; warns if they begin at 1, although the first class is 0.

  `offset` is the number of the first class in the files. `is_declared` says that `num_classes` is a setting or the
  length of a list. Nothing is checked if the labels of the `defining` files are names. Raises UserError if the labels
  of the split begin at a number other than `offset`, or are outside of the range of the defining files.
  """
  if defining.texts:
    return
  if is_declared and defining.is_shifted(offset, num_classes):
    raise _wrong_first(defining, num_classes, offset, where=where)
  has_numbers = 0 <= labels.smallest <= labels.largest
  is_inside = defining.smallest <= labels.smallest and labels.largest <= defining.largest
  if has_numbers and (labels.is_shifted(offset, num_classes) or not (is_declared or is_inside)):
    raise UserError(f'{where}: expected labels from {defining.smallest:,} to {defining.largest:,}, as in the training '
                    f'files, got {labels.smallest:,} to {labels.largest:,}. If both number the classes alike, set '
                    'data.num_classes; else correct the labels of one of them.')
  if not offset and defining.smallest == labels.smallest == 1:
    log.warning('%s: labels begin at 1, so class 0 has no images. If 1 is the number of the first class, set '
                'data.label_offset=1.', where)


def _wrong_first(labels: SplitLabels, num_classes: int, offset: int, *, where: str) -> UserError:
  """Returns the error that the first class has another number than `offset`."""
  is_clear = labels.largest - labels.smallest + 1 == num_classes
  return UserError(f'data.label_offset: expected {labels.smallest if is_clear else "another one"}, the number of the '
                   f'first class, for labels from {labels.smallest:,} to {labels.largest:,} and {num_classes:,} '
                   f'classes of {where}, got {offset}. Set --config.data.label_offset'
                   + (f'={labels.smallest}.' if is_clear else ', or correct the labels.'))
