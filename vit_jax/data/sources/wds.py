"""`wds:PATH`: tar files as `webdataset` writes them, read by an index of their members (`files/tar_index.py`).

PATH is a pattern such as `DIR/imagenet1k-{split}-*.tar` or `gs://BUCKET/{000..999}.tar`, or a folder of tar files
(`shard_files.py`); a file `_info.json` in a folder lists the files of each split, as timm writes it. The order of the
examples is the stored one, file by file, so another distribution of the same examples over files has the same order.

A label is a whole number in the member `.cls`, or a number, a name, or a list of them in a field of `.json`. Captions
are the lines of `.txt`, or a text or a list of texts in a field of `.json`.
"""
from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from vit_jax.config import schema
from vit_jax.core import json_text
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.data.files import access, json_fields, ranges, remote, tar_index, user_files
from vit_jax.data.files.tar_index import Columns, Index
from vit_jax.data.files.user_files import Rules
from vit_jax.data.image.headers import BadImage
from vit_jax.data.source import UNLABELED, Source
from vit_jax.data.sources import indexed, shard_files
from vit_jax.data.sources.indexed import Files, IndexedSource, Listed
from vit_jax.data.text import stored

log = logging.getLogger('vit_jax.data')

EXTENSION, INFOS = '.tar', ('_info.json', 'info.json')
_AGAIN = 'Copy the dataset again, or give a pattern of tar files.'
_LAST = 100  # examples


class TarSource(IndexedSource):
  """The examples of tar files."""

  @staticmethod
  def load(files: Files, columns: Columns) -> Index:
    found = tar_index.load(files.paths, columns)
    for path, count, number in zip(files.paths, files.counts, np.diff(found.starts).tolist(), strict=False):
      if count != number:
        raise UserError(f'{path}: expected {count:,} images, as its description says, got {number:,}. {_AGAIN}')
    if not len(found):
      wanted = f'.{columns.image}' if columns.image else 'an extension of images, such as .jpg'
      raise UserError(f'{files.paths[0]}: expected members with {wanted}, got none in {len(files.paths):,} files. Set '
                      'data.image_column, or correct the pattern.')
    return found

  @staticmethod
  def label_place(label: str) -> str:
    member, _, field = label.partition('/')
    return f'the field {field} of .json' if field else f'.{member}'

  @staticmethod
  def choose(paths: Sequence[str], data: schema.Data) -> Columns:
    return choose(paths, data)

  def identity(self) -> Iterator[HostArray]:
    yield from self._index[2:-1]  # sizes, names and labels

  def read(self, index: int, path: str, offset: int, size: int) -> bytes:
    image = ranges.read(path, offset, size)
    if len(image) < size:
      raise BadImage(f'the image is truncated: {path} ends in it')
    return image

  def captions(self, index: int) -> tuple[str, ...]:
    """Returns the texts beside an image that are not empty: the lines of a member, or those in a field of `.json`.

    Raises:
      BadImage: they are missing, truncated, larger than 1 MiB, not UTF-8, or not JSON.
      OSError: its file cannot be read.
    """
    offset, size = self._index.captions[index].tolist() if len(self._index.captions) else (0, -1)
    if not 0 <= size <= stored.MOST_BYTES:
      raise BadImage('the example: expected a text of at most 1 MiB beside the image, got '
                     + (f'{size:,} bytes' if size > 0 else 'none'))
    content = ranges.read(self._place(index)[0], offset, size)
    _, *field = self._columns.caption.split('/')
    values = None
    if len(content) == size:
      with contextlib.suppress(ValueError, RecursionError):  # no UTF-8, or no JSON
        values = stored.field(json_text.parse(content), field) if field else content.decode().splitlines()
    if values is None:
      raise BadImage('the example: expected a complete text in UTF-8 beside the image, got a damaged one')
    return stored.texts(values, f'.{self._columns.caption}')

  def describe(self, index: int) -> str:
    return os.path.join(self._place(index)[0], os.fsdecode(self._index.name(index)))


def opener(where: str, data: schema.Data, image_px: tuple[int, int]) -> Callable[[str], Source]:
  """Opens the splits of tar files.

  `data.label_column` is `cls` or `json/FIELD`, `data.image_column` the extension of the images, `data.caption_column`
  that of captions or `json/FIELD`.

  Raises:
    UserError: there are no such files, they are compressed, or (when opening) damaged.
  """
  del image_px
  return open_found(find(where, Rules.of(data)), data, name=f'wds:{where}')


def find(where: str, rules: Rules, base: str = '') -> Listed:
  """Returns the tar files of a pattern or folder; see `shard_files.find`."""
  path = access.locate(where, 'wds:PATH')
  if path.endswith(tar_index.COMPRESSED):
    raise UserError(f'wds:{where}: expected tar files that are not compressed, which can be read at random, got '
                    f'{os.path.basename(path)}. Decompress them: images are compressed already.')
  there = None if not remote.is_address(path) else set() if shard_files.is_pattern(path) else _list(path, where)
  for info in INFOS:
    file = f'{path}/{info}'
    if (os.path.isfile(file) if there is None else info in there) and (
        listed := _read_info(file, path, base or path, rules, there)):
      return listed
  shards = shard_files.find(where, EXTENSION, kind='wds', rules=rules, base=base)
  return Listed(shards.root, {split: Files(paths) for split, paths in shards.splits.items()})


def _list(folder: str, where: str) -> set[str]:
  """Returns the names of the objects in a folder. Raises TemporaryError or UserError if they cannot be listed."""
  try:
    return set(ranges.list_names(folder))
  except OSError as error:
    raise access.unreadable(error, f'wds:{where}') from error


def _read_info(file: str, folder: str, base: str, rules: Rules, there: set[str] | None) -> Listed | None:
  """Returns the files that a description lists; None if it is one of something else.

  `there` has the names of the objects of a folder in object storage.

  Raises:
    UserError: it is damaged, or a file is missing or outside of the folder.
  """
  found: dict[str, Files] = {}
  expected = 'the files of each split'
  text = ranges.read_text(file, file, expected=expected, advice=_AGAIN)
  described = json_fields.parse(text, file, expected=expected, advice=_AGAIN).optional('splits')
  for split, entry in described.fields() if described else ():
    if (names := entry.optional('filenames')) is None:
      return None
    paths = [os.path.join(folder, name.text()) for name in names.items() if user_files.is_below(name.text())]
    lengths = entry.optional('shard_lengths')
    counts = tuple(number.whole(0, 2**40) for number in lengths.items()) if lengths else ()
    if not paths or len(paths) != len(names.list()) or len(counts) not in (0, len(paths)):
      raise entry.error('files in this folder, and the number of examples of each')
    for path in paths:
      if not (os.path.isfile(path) if there is None else path.removeprefix(f'{folder}/') in there):
        raise UserError(f'{file}: expected the file {path}, got none. {_AGAIN}')
      if there is None:
        user_files.check_inside(path, base, rules)
    found[split] = Files(tuple(paths), counts)
  return Listed(folder, found) if found else None


def open_found(listed: Listed, data: schema.Data, *, name: str) -> Callable[[str], Source]:
  """Opens the splits of tar files that are known; `name` is that of the source."""
  return indexed.opener(TarSource, listed, data, name=name)


def choose(paths: Sequence[str], data: schema.Data) -> Columns:
  """Returns which members have image and label, by the settings, or as the first example with a label has them.

  All examples of the first file, and `_LAST` of the last one, are looked at before images count as unlabeled.

  Raises:
    UserError: `data.label_column` or `data.caption_column` has another form, or the file is damaged.
  """
  caption = data.caption_column or 'txt'
  if (caption.partition('/')[0] == 'json') is not bool(caption.partition('/')[2]):
    raise UserError(f'data.caption_column: expected an extension such as txt, or json/FIELD, got {caption!r}. '
                    'Set one of these forms.')
  given, _, field = data.label_column.partition('/')
  if data.label_column and (not given or (given == 'json') is not bool(field)):
    raise UserError(f'data.label_column: expected an extension such as cls, or json/FIELD, got {data.label_column!r}. '
                    'Set one of these forms.')
  if given:
    return Columns(data.image_column, data.label_column, caption)
  wanted = Columns(data.image_column, 'json/label', caption)
  for path, most in ((paths[0], None), *((path, _LAST) for path in paths[-1:] if len(paths) > 1)):
    for example in itertools.islice(tar_index.examples(path, wanted), most):
      if b'cls' in example.seen:
        return Columns(data.image_column, 'cls', caption)
      if example.label is not None:
        return wanted
  log.warning('%s has no .cls and no field `label` in .json: its images have no labels, and get the class %r.',
              paths[0], *UNLABELED)
  return Columns(data.image_column, caption=caption)
