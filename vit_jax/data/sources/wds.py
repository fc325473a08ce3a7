"""`wds:PATH`: tar files as `webdataset` writes them, read by an index of their members (`files/tar_index.py`).

PATH is a pattern such as `DIR/imagenet1k-{split}-*.tar` or `DIR/{000..999}.tar`, or a folder of tar files
(`shard_files.py`); a file `_info.json` in a folder lists the files of each split, as timm writes it. The order of the
examples is the stored one, file by file, so another distribution of the same examples over files has the same order.

A label is a whole number in the member `.cls`, or a number, a name, or a list of them in a field of `.json`. Texts in
`.txt` are captions.
"""
from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.data.files import access, json_fields, ranges, tar_index, user_files
from vit_jax.data.files.tar_index import Columns, Index
from vit_jax.data.files.user_files import Rules
from vit_jax.data.image.headers import BadImage
from vit_jax.data.source import UNLABELED, Record, Source
from vit_jax.data.sources import shard_files, sharded
from vit_jax.data.sources.sharded import BadLabel, Classes, Found

log = logging.getLogger('vit_jax.data')

EXTENSION, INFOS = '.tar', ('_info.json', 'info.json')
_AGAIN = 'Copy the dataset again, or give a pattern of tar files.'
_TEXT_BYTES = 2**20
_LAST = 100  # examples


class Files(NamedTuple):
  """The tar files of a split, and the number of examples of each, if it is known."""
  paths: tuple[str, ...]
  counts: tuple[int, ...] = ()


class TarSource:
  """The examples of tar files, in the order in which they are stored. Pickles to few bytes; safe for threads."""

  def __init__(self, files: Files, columns: Columns, classes: Classes, *, name: str, root: str, rules: Rules) -> None:
    self.name, self.class_names, self.root = name, classes.names, root
    self._files, self._columns, self._classes, self._rules = files, columns, classes, rules
    self._index = _open(files, columns)
    ends = np.concatenate([[0], self._index.label_ends])
    self.most_labels = max(1, int(np.diff(ends).max())) if len(ends) > 1 else 0
    found = hashlib.sha256(f'{len(self)} {classes.names} {classes.offset}'.encode(errors='surrogateescape'))
    for array in self._index[2:-1]:  # sizes, names and labels, wherever they are
      found.update(np.ascontiguousarray(array).data)
    self.digest = found.hexdigest()

  def __len__(self) -> int:
    return len(self._index)

  def __getitem__(self, index: int) -> Record:
    path, found = self._path(index), self._index
    offset, size = int(found.offset[index]), int(found.size[index])
    if size > self._rules.max_bytes:
      raise BadImage(f'the image has {size:,} bytes: expected at most {self._rules.max_bytes:,}. Shrink the image, or '
                     'in a config raise data.max_file_mib')
    labels = self.labels(index)
    image = ranges.read(path, offset, size)
    if len(image) < size:
      raise BadImage(f'the image is truncated: {path} ends in it')
    return Record.multilabel(image, labels) if self.most_labels else Record(image, labels[0])

  def label(self, index: int) -> int:
    return next(iter(self.labels(index)), -1)

  def labels(self, index: int) -> list[int]:
    """Returns the classes of an example. Raises BadLabel if they are missing, damaged or out of range."""
    stored = self._index.label(index)
    if not stored and not len(self._index.label_ends):
      return [0]  # there are no labels
    if tar_index.MISSING in stored:
      raise BadLabel(f'the example: expected {self._columns.label} beside the image, got none, or one that is damaged')
    if not self._classes.places:
      return [self._classes.of(label) for label in stored]
    texts = self._texts
    return [self._classes.of(texts[label] if 0 <= label < len(texts) else '') for label in stored]

  def caption(self, index: int) -> str:
    """Returns the text beside an image, `.txt`.

    Raises:
      BadImage: it is missing, truncated, larger than 1 MiB, or not UTF-8.
      OSError: its file cannot be read.
    """
    offset, size = self._index.captions[index].tolist() if len(self._index.captions) else (0, -1)
    if not 0 <= size <= _TEXT_BYTES:
      raise BadImage('the example: expected a text of at most 1 MiB beside the image, got '
                     + (f'{size:,} bytes' if size > 0 else 'none'))
    content = ranges.read(self._path(index), offset, size)
    try:
      if len(content) == size:
        return content.decode()
    except UnicodeDecodeError:
      pass
    raise BadImage('the example: expected a complete text in UTF-8 beside the image, got a damaged one')

  def describe(self, index: int) -> str:
    return os.path.join(self._path(index), os.fsdecode(self._index.name(index)))

  def _path(self, index: int) -> str:
    return self._files.paths[self._index.file(index)]

  @functools.cached_property
  def _texts(self) -> list[str]:
    return self._index.class_texts()

  def __getstate__(self) -> dict[str, Any]:
    return {name: value for name, value in self.__dict__.items() if name not in ('_index', '_texts')}

  def __setstate__(self, state: dict[str, Any]) -> None:
    self.__dict__.update(state)
    self._index = tar_index.load(self._files.paths, self._columns)


def opener(where: str, data: schema.Data, image_px: tuple[int, int]) -> Callable[[str], Source]:
  """Opens the splits of tar files.

  `data.label_column` is `cls` or `json/FIELD`, `data.image_column` the extension of the images.

  Raises:
    UserError: there are no such files, they are compressed, or (when opening) damaged.
  """
  del image_px
  return open_found(find(where, Rules.of(data)), data, name=f'wds:{where}')


class Listed(NamedTuple):
  """Tar files by split, in the folder `root`, which no link may lead out of."""
  root: str
  splits: Mapping[str, Files]


def find(where: str, rules: Rules, base: str = '') -> Listed:
  """Returns the tar files of a pattern or folder; see `shard_files.find`."""
  path = access.resolve(where, 'wds:PATH')
  if path.endswith(tar_index.COMPRESSED):
    raise UserError(f'wds:{where}: expected tar files that are not compressed, which can be read at random, got '
                    f'{os.path.basename(path)}. Decompress them: images are compressed already.')
  for info in INFOS:
    if os.path.isfile(file := os.path.join(path, info)) and (listed := _read_info(file, path, base or path, rules)):
      return listed
  shards = shard_files.find(where, EXTENSION, kind='wds', rules=rules, base=base)
  return Listed(shards.root, {split: Files(paths) for split, paths in shards.splits.items()})


def _read_info(file: str, folder: str, base: str, rules: Rules) -> Listed | None:
  """Returns the files that a description lists; None if it is one of something else.

  Raises:
    UserError: it is damaged, or a file is missing or outside of the folder.
  """
  found: dict[str, Files] = {}
  described = json_fields.read(file, expected='the files of each split', advice=_AGAIN).optional('splits')
  for split, entry in described.fields() if described else ():
    if (names := entry.optional('filenames')) is None:
      return None
    paths = [os.path.join(folder, name.text()) for name in names.items() if user_files.is_below(name.text())]
    lengths = entry.optional('shard_lengths')
    counts = tuple(number.whole(0, 2**40) for number in lengths.items()) if lengths else ()
    if not paths or len(paths) != len(names.list()) or len(counts) not in (0, len(paths)):
      raise entry.error('files in this folder, and the number of examples of each')
    for path in paths:
      if not os.path.isfile(path):
        raise UserError(f'{file}: expected the file {path}, got none. {_AGAIN}')
      user_files.check_inside(path, base, rules)
    found[split] = Files(tuple(paths), counts)
  return Listed(folder, found) if found else None


def open_found(listed: Listed, data: schema.Data, *, name: str) -> Callable[[str], Source]:
  """Opens the splits of tar files that are known; `name` is that of the source."""
  first = shard_files.defining(listed.splits)
  columns = functools.cache(lambda: choose(listed.splits[first].paths, data))
  index = functools.cache(lambda split: _open(listed.splits[split], columns()))

  def labels_of(split: str) -> Found:
    texts, labels = tuple(index(split).class_texts()), index(split).labels
    return Found(texts, int(labels.max()) if len(labels) else -1)

  def open_split(split: str) -> TarSource:
    where = f'{name}/{split}' if split else name
    if columns().label and not len(index(split).labels):
      raise UserError(f'{where}: expected labels in {_member(columns().label)}, got none. Choose another split, or set '
                      'data.label_column.')
    classes = (Classes(UNLABELED, {}, 0) if not columns().label else
               sharded.number(data, listed.root, labels_of(split), lambda: labels_of(first), where=where))
    return TarSource(listed.splits[split], columns(), classes, name=where, root=listed.root, rules=Rules.of(data))
  return sharded.opener(listed.splits, data, open_split, where=name, read_labels=_first_labels)


def choose(paths: Sequence[str], data: schema.Data) -> Columns:
  """Returns which members have image and label, by the settings, or as the first example with a label has them.

  All examples of the first file, and `_LAST` of the last one, are looked at before images count as unlabeled.

  Raises:
    UserError: `data.label_column` has another form, or the file is damaged.
  """
  given, _, field = data.label_column.partition('/')
  if data.label_column and (not given or (given == 'json') is not bool(field)):
    raise UserError(f'data.label_column: expected an extension such as cls, or json/FIELD, got {data.label_column!r}.')
  if given:
    return Columns(data.image_column, data.label_column)
  wanted = Columns(data.image_column, 'json/label')
  for path, most in ((paths[0], None), *((path, _LAST) for path in paths[-1:] if len(paths) > 1)):
    for example in itertools.islice(tar_index.examples(path, wanted), most):
      if b'cls' in example.seen:
        return Columns(data.image_column, 'cls')
      if example.label is not None:
        return Columns(data.image_column, 'json/label')
  log.warning('%s has no .cls and no field `label` in .json: its images have no labels, and get the class %r.',
              paths[0], *UNLABELED)
  return Columns(data.image_column)


def _member(label_column: str) -> str:
  member, _, field = label_column.partition('/')
  return f'the field {field} of .json' if field else f'.{member}'


def _open(files: Files, columns: Columns) -> Index:
  """Returns the index of files. Raises UserError if they have no images, or other numbers of them than listed."""
  found = tar_index.load(files.paths, columns)
  for path, count, number in zip(files.paths, files.counts, np.diff(found.starts).tolist(), strict=False):
    if count != number:
      raise UserError(f'{path}: expected {count:,} images, as its description says, got {number:,}. {_AGAIN}')
  if not len(found):
    wanted = f'.{columns.image}' if columns.image else 'an extension of images, such as .jpg'
    raise UserError(f'{files.paths[0]}: expected members with {wanted}, got none in {len(files.paths):,} files. Set '
                    'data.image_column, or correct the pattern.')
  return found


def _first_labels(source: Source) -> HostArray:
  """Returns the first class of each example, -1 if it has none that is known, `[S] i32`."""
  found = np.full(len(source), -1, np.int32)
  for index in range(len(source)):
    with contextlib.suppress(BadImage):
      found[index] = source.label(index)
  return found
