"""What tar, TFRecord and Parquet share: an index of examples in files, numbered labels, splits and hold-outs.

A format has a subclass of `IndexedSource`, a function that yields the rows of a file for the index (`index.Scan`), and
an opener. The opener of a format lists the files (`shards.find`) and calls `opener` here, which returns the function
that opens a split. For a split, that function calls in this order:

  1. `IndexedSource.choose` with the training files: it chooses the columns with image and label.
  2. `IndexedSource.load` with the files of the split: it returns their index, which has the labels.
  3. `number_labels`: it gives each label a class, by a list of classes or by the training files, whose index is then
     loaded, too.
  4. the subclass itself, whose `identity` yields what the digest of the split is made of.

Later, `read` reads the span of bytes of each example and passes them to `image`. This module knows no format.
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
"""The file beside the files of a dataset with the names of its classes, a line each, in the order of their numbers."""
_SHOWN = 5  # names in a message


class SplitLabels(NamedTuple):
  """The different labels of a split.

  texts: the names of the classes, if labels are names or the files list names; else ().
  largest, smallest: of the labels as the index has them, which are positions in `texts` or numbers; -1 and 0 if none.
  """
  texts: tuple[str, ...] = ()
  largest: int = -1
  smallest: int = 0

  def is_shifted(self, first: int, num: int) -> bool:
    """Returns whether labels are of all `num` classes, but begin at a number other than `first`."""
    return 0 <= self.smallest != first and self.largest - self.smallest + 1 == num


class Classes(NamedTuple):
  """The classes of a source, and how labels in files stand for them.

  names: the names of the classes.
  numbers: the class of each label that is a name; empty if labels are numbers.
  offset: the number that the first class has in the files.
  """
  names: tuple[str, ...]
  numbers: Mapping[str, int]
  offset: int

  def of(self, label: int | str) -> int:
    """Returns the class of a label. Raises BadImage if the label is not of a class."""
    if isinstance(label, str) or self.numbers:
      if (number := self.numbers.get(str(label), -1)) < 0:
        raise BadImage(f'the label: expected one of the {len(self.names):,} classes, got '
                       f'{documents.describe(str(label))}')
      return number
    if not 0 <= label - self.offset < len(self.names):
      raise BadImage(f'the label: expected {self.offset} to {self.offset + len(self.names) - 1}, got {label}')
    return label - self.offset


class IndexedSource(Rows):
  """The examples of files, in the order in which they are stored. Pickles to few bytes; safe for threads.

  A subclass defines `choose`, `load`, `identity`, `image` and `describe`; `label_place` and `contents` for messages;
  and possibly `names`.
  """
  footer_bytes: ClassVar[int] = 0
  """Bytes after each example that are read with it, such as its checksum."""
  may_lack_labels: ClassVar[bool] = False
  """Whether a split may have no labels although others have some; its images then have the class `unlabeled`."""

  def __init__(self, files: Files, columns: Any, classes: Classes, *, name: str, root: str, rules: Rules,
               loaded: Index) -> None:
    """Takes the columns that `choose` returned, and the index that `load` returned; `root` is the folder of files."""
    self.name, self.class_names, self.root = name, classes.names, root
    self._files, self._columns, self._classes, self._rules, self._index = files, columns, classes, rules, loaded
    ends = loaded.label_ends
    self.most_labels = max(1, int(np.diff(ends, prepend=0).max())) if len(ends) else 0
    digest = hashlib.sha256(f'{len(self)} {classes.names} {classes.offset}'.encode(errors='surrogateescape'))
    for array in self.identity():
      digest.update(np.ascontiguousarray(array).data)
    self.digest = digest.hexdigest()

  @staticmethod
  def load(files: Files, columns: Any) -> Index:
    """Returns the index of files. Raises UserError if they have no images, or are damaged."""
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
    """Returns the names of all classes if each file lists them, so that no other split defines them; else ()."""
    del columns
    return ()

  def identity(self) -> Iterator[HostArray]:
    """Yields arrays that identify the examples in any folder; their bytes are hashed for the digest."""
    raise NotImplementedError

  def image(self, row: int, stored: bytes) -> bytes:
    """Returns the encoded image of an example, given the bytes of its span. Raises BadImage if it is damaged."""
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
    limit = self._rules.max_bytes
    spans = map(self._span, rows)
    stored = storage.read_many(span if span.size <= limit else span._replace(size=0) for span in spans)
    for row, content in zip(rows, stored, strict=True):
      if (size := int(self._index['size'][row])) > limit:
        raise BadImage(f'the image has {size:,} bytes: expected at most {limit:,}. Shrink the image, or in a config '
                       'raise data.max_file_mib')
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
    if not self._classes.numbers:
      return tuple(self._classes.of(label) for label in stored)
    texts, offset = self.names(self._columns) or self._index.texts, self._classes.offset
    positions = [label - offset for label in stored]
    return tuple(self._classes.of(texts[i] if 0 <= i < len(texts) else '') for i in positions)

  def path(self, row: int) -> str:
    """Returns the path of the file with an example."""
    return self._files.paths[int(self._index['file'][row])]

  def first_row(self, row: int) -> int:
    """Returns the first row of the file with an example."""
    return int(np.searchsorted(self._index['file'], self._index['file'][row]))

  def _span(self, row: int) -> Span:
    """Returns the span of an example with its footer."""
    return Span(IndexedSource.path(self, row), int(self._index['offset'][row]),
                int(self._index['size'][row]) + self.footer_bytes)

  def __getstate__(self) -> dict[str, Any]:
    return {name: value for name, value in self.__dict__.items() if name != '_index'}

  def __setstate__(self, state: dict[str, Any]) -> None:
    self.__dict__.update(state)
    self._index = self.load(self._files, self._columns)


def opener(kind: type[IndexedSource], listed: Listed, data: schema.Data, *, name: str,
           order: Sequence[str] = ()) -> Callable[[str], Source]:
  """Returns the function that opens a split by name. Files that do not belong to splits are divided by a hold-out.

  `kind` is the subclass of the format, `listed` has the files of each split, `name` is that of the source, such as
  `wds:PATH`, and `order` has the classes of a run that resumes.
  """
  training = 'train' if 'train' in listed.splits else min(listed.splits)  # the split that defines columns and classes
  columns = functools.cache(lambda: kind.choose(listed.splits[training].paths, data))
  load = functools.cache(lambda split: kind.load(listed.splits[split], columns()))

  def labels_of(split: str) -> SplitLabels:
    loaded = load(split)
    numbers = loaded.labels[loaded.labels != index.MISSING]
    smallest, largest = (int(numbers.min()), int(numbers.max())) if len(numbers) else (0, -1)
    return SplitLabels(tuple(kind.names(columns()) or loaded.texts), largest, smallest)

  def open_split(split: str) -> IndexedSource:
    where, column, files = f'{name}/{split}' if split else name, columns().label, listed.splits[split]
    is_labeled = bool(column and len(load(split).labels))
    if column and not is_labeled and kind.may_lack_labels:
      warn_once(f'{where} has no labels: its images get the class {UNLABELED[0]!r}.')
    elif column and not is_labeled:
      raise UserError(f'{where}: expected labels in {kind.label_place(column)}, got none. Choose another split, or set '
                      f'data.label_column. {kind.contents(files.paths)}'.rstrip())
    if is_labeled:
      are_listed = bool(kind.names(columns()))
      defining = split if are_listed else training
      numbered = number_labels(data, listed.root, labels_of(split), lambda: labels_of(defining), are_listed=are_listed,
                               order=order, where=where)
    else:
      numbered = Classes(UNLABELED, {}, 0)
    return kind(files, columns(), numbered, name=where, root=listed.root, rules=Rules.of(data), loaded=load(split))

  @functools.cache
  def open_named(split: str) -> Source:
    if '' not in listed.splits:
      return open_split(splits.resolve(split, listed.splits, source=name))
    part = splits.resolve_part(split, source=name)
    if part == splits.ALL:
      return open_split('')
    splits.check_holdout(data.holdout)
    whole = open_split('')
    shuffled = np.random.Generator(np.random.Philox(key=data.holdout_seed)).permutation(len(whole))
    kept, held = splits.hold_out(_first_labels(whole)[shuffled], data.holdout)  # the same fraction of each class
    rows = np.sort(shuffled[kept if part == 'train' else held])
    return take(whole, rows, name=f'{name}/{part}', title=splits.part_title(name, part, data.holdout))
  return open_named


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

  `read_defining` returns the labels of the defining files: those of the training split, or with `are_listed` of the
  split `where` itself. It is called if no list has the classes. With `are_listed`, the files list their classes in an
  order, which is kept. Other names are sorted, or have the `order` of a run that resumes. Raises UserError if the
  number of classes is not known, or too large, or a name is not one of the classes.
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
    numbers = classes.match(labels.texts, names, where=path) if labels.texts else ()
    return Classes(names, dict(zip(labels.texts, numbers, strict=True)), offset)
  defining = read_defining()
  if defining.texts:
    if extra := sorted(set(labels.texts) - set(defining.texts)):
      raise UserError(f'{where}: expected the classes of the training files, got {len(extra)} others: '
                      f'{documents.listed(extra, _SHOWN)}. Set data.classes to a file with all classes.')
    names = defining.texts if are_listed else classes.ordered(defining.texts, order)
    return Classes(names, {text: number for number, text in enumerate(names)}, offset)
  if labels.texts:
    raise UserError(f'{where}: expected numbers of classes, as in the training files, got names: '
                    f'{documents.listed(labels.texts, _SHOWN)}. Set data.classes to a file with all classes, or '
                    'correct the labels.')
  num = data.num_classes or defining.largest - offset + 1
  _check_numbers(defining, labels, num, offset, is_declared=bool(data.num_classes), where=where)
  if not 0 < num <= classes.MAX_CLASSES:
    raise UserError(f'data.num_classes: expected 1 to {classes.MAX_CLASSES:,} for {where}, got {max(0, num):,}. Set '
                    'it, or data.classes to a file with the names of the classes.')
  return Classes(tuple(map(str, range(num))), {}, offset)


def _find_list(folder: str) -> str:
  """Returns the path of the list of classes beside the files; '' if there is none."""
  path = os.path.join(folder, CLASSES)
  try:
    exists = CLASSES in storage.list_names(folder, CLASSES) if storage.is_address(folder) else os.path.isfile(path)
  except OSError as error:
    raise failures.unreadable(error, path) from error
  return path if exists else ''


def _check_numbers(defining: SplitLabels, labels: SplitLabels, num_classes: int, offset: int, *, is_declared: bool,
                   where: str) -> None:
  """Warns if labels that are numbers begin at 1, although the first class is 0.

  `offset` is the number of the first class in the files; `is_declared` = `num_classes` is a setting or the length of a
  list. Nothing is checked if the labels of the `defining` files are names. Raises UserError if the labels of the split
  begin at a number other than `offset` or that of the defining files.
  """
  if defining.texts:
    return
  if is_declared and defining.is_shifted(offset, num_classes):
    raise _wrong_first(defining, num_classes, offset, where=where)
  is_inside = defining.smallest <= labels.smallest and labels.largest <= defining.largest
  if 0 <= labels.smallest <= labels.largest and (
      labels.is_shifted(offset, num_classes) or not (is_declared or is_inside)):
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
