"""What sources of many files share: opening their splits, holding out a part, and classes from numbers or names."""
from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.data.files import access, json_fields, ranges, remote
from vit_jax.data.image.headers import BadImage
from vit_jax.data.labels import classes
from vit_jax.data.source import Source, Subset
from vit_jax.data.sources import splits

log = logging.getLogger('vit_jax.data')

CLASSES = 'classes.txt'
"""The file beside the files of a dataset with the names of its classes, a line each, in the order of their numbers."""
_SHOWN = 5


class BadLabel(BadImage):
  """A label is missing, damaged or out of range: the example counts as an image that cannot be decoded."""


class Found(NamedTuple):
  """The labels of the files that define the classes: their names, or for numbers the largest one, -1 if not known.

  smallest: of numbers, if it is known.
  """
  texts: tuple[str, ...] = ()
  largest: int = -1
  smallest: int = 0


class Classes(NamedTuple):
  """How the labels of files are numbered.

  names: of the classes.
  places: the class of each label that is a name; empty if labels are numbers.
  offset: the number of the first class in the files.
  """
  names: tuple[str, ...]
  places: Mapping[str, int]
  offset: int

  def of(self, label: int | str) -> int:
    """Returns the class of a label. Raises BadLabel if there is none."""
    if isinstance(label, str) or self.places:
      found = self.places.get(str(label), -1)
      if found < 0:
        raise BadLabel(f'the label: expected one of the {len(self.names):,} classes, got '
                       f'{json_fields.describe(str(label))}')
      return found
    if not 0 <= label - self.offset < len(self.names):
      raise BadLabel(f'the label: expected {self.offset} to {self.offset + len(self.names) - 1}, got {label}')
    return label - self.offset


def number(data: schema.Data, folder: str, own: Found, define: Callable[[], Found], *, where: str) -> Classes:
  """Returns how labels are numbered: by `data.classes`, a file `classes.txt` in the folder, or the training files.

  Args:
    data: the settings.
    folder: of the files.
    own: the labels of a split.
    define: returns the labels of the files that define the classes, if no list does.
    where: the split, for messages.

  Raises:
    UserError: the number of classes is not known, or too large, or a name is not one of the classes.
  """
  listed = data.classes or _find_list(folder)
  if listed:
    names = classes.read(listed, setting='data.classes' if data.classes else 'classes')
    if not own.texts:
      _check_first(define(), len(names), data.label_offset, where=where)
    places = classes.match(own.texts, names, where=listed) if own.texts else ()
    return Classes(names, dict(zip(own.texts, places, strict=True)), data.label_offset)
  found = define()
  if found.texts:
    if extra := sorted(set(own.texts) - set(found.texts)):
      raise UserError(f'{where}: expected the classes of the training files, got {len(extra)} others: '
                      f'{json_fields.listed(extra, _SHOWN)}. Set data.classes to a file with all classes.')
    return Classes(found.texts, {text: place for place, text in enumerate(found.texts)}, 0)
  num = data.num_classes or found.largest - data.label_offset + 1
  _check_first(found, data.num_classes, data.label_offset, where=where)
  if not 0 < num <= classes.MOST_CLASSES:
    raise UserError(f'data.num_classes: expected 1 to {classes.MOST_CLASSES:,} for {where}, got {max(0, num):,}. Set '
                    'it, or data.classes to a file with the names of the classes.')
  return Classes(tuple(map(str, range(num))), {}, data.label_offset)


def _find_list(folder: str) -> str:
  """Returns the path of the list of classes beside the files; '' if there is none."""
  path = os.path.join(folder, CLASSES)
  try:
    is_there = CLASSES in ranges.list_names(folder, CLASSES) if remote.is_address(folder) else os.path.isfile(path)
  except OSError as error:
    raise access.unreadable(error, path) from error
  return path if is_there else ''


def _check_first(found: Found, num_classes: int, offset: int, *, where: str) -> None:
  """Warns of labels that begin at 1; `num_classes` as given, 0 if it follows from the labels.

  Raises:
    UserError: they are 1 to the number of classes, so the last class would be out of range.
  """
  if offset or found.texts or found.smallest != 1:
    return
  if found.largest == num_classes:
    raise UserError(f'data.label_offset: expected 1, the number of the first class, for labels from 1 to '
                    f'{found.largest:,} and {num_classes:,} classes of {where}, got 0. Set '
                    '--config.data.label_offset=1.')
  log.warning('%s: labels begin at 1, so class 0 has no images. If 1 is the number of the first class, set '
              'data.label_offset=1.', where)


def opener(shards: Mapping[str, object], data: schema.Data, open_split: Callable[[str], Source], *, where: str,
           read_labels: Callable[[Source], HostArray | None]) -> Callable[[str], Source]:
  """Returns a function that opens splits by name.

  Args:
    shards: has the names of the splits; '' = the files do not belong to splits, and a part of them is held out.
    data: the settings.
    open_split: opens the files of a split.
    where: the name of the source.
    read_labels: returns the classes of all examples, `[S] i32`, if they are known; each class is then held out alike.
  """
  @functools.cache
  def open_named(name: str) -> Source:
    if '' not in shards:
      return open_split(splits.resolve(name, shards, source=where))
    if not 0 < data.holdout < 1:
      raise UserError(f'data.holdout: expected a fraction between 0 and 1, such as 0.1, got {data.holdout}. '
                      'Set such a fraction.')
    part = splits.resolve_part(name, source=where)
    whole = open_split('')
    mixed = np.random.Generator(np.random.Philox(key=data.holdout_seed)).permutation(len(whole))
    labels = read_labels(whole)
    kept, held = splits.hold_out((np.zeros(len(whole), np.int32) if labels is None else labels)[mixed], data.holdout)
    rows = np.sort(mixed[kept if part == 'train' else held])
    return Subset(whole, rows, name=f'{where}/{part}', title=splits.part_title(where, part, data.holdout))
  return open_named
