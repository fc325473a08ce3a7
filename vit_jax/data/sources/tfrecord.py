"""`tfrecord:PATH`: TFRecord files of `tf.train.Example` records, read at random without TensorFlow.

PATH is a pattern such as `DIR/{split}-*-of-*`, or a folder of such files (`shard_files.py`), also in object storage.
`data.image_column` and `data.label_column` name the features with the encoded image and with its class or classes:
whole numbers, the first of which is `data.label_offset`, or names; `data.caption_column` that with captions. By default
those of ImageNet as TPU programs store it, `image/encoded` and `image/class/label`, or of TFDS, `image` and `label`;
and `image/caption`, `caption` and other usual names.

The index (`files/example_index.py`) has the place, the checksum and the labels of each record. The checksum of a record
is compared whenever it is read; one that differs counts as an image that cannot be decoded.
"""
from __future__ import annotations

import itertools
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.data.files import access, example_index, json_fields, ranges, records, tfrecord_index
from vit_jax.data.files.example_index import Index
from vit_jax.data.files.records import BadRecord
from vit_jax.data.files.user_files import Rules
from vit_jax.data.source import UNLABELED, Source
from vit_jax.data.sources import indexed, shard_files
from vit_jax.data.sources.indexed import Files, IndexedSource, Listed
from vit_jax.data.text import stored

log = logging.getLogger('vit_jax.data')

IMAGES, LABELS, NAMES = ('image/encoded', 'image'), ('image/class/label', 'label'), ('image/filename', 'file_name')
CAPTIONS = (*(f'image/{name}' for name in stored.NAMES), *stored.NAMES)
"""Usual names of the features: those of ImageNet as TPU programs store it, and of TFDS."""
_FILE = re.compile(r'\.tfrecords?(-\d+-of-\d+)?$|-\d{4,}-of-\d{4,}$|\.tfrec$')
_COMPRESSED = ('.gz', '.zst', '.bz2', '.xz')
_FIRST = 100  # records that are looked at before images count as unlabeled
_KINDS = {bytes: 'bytes', int: 'int64', float: 'float'}


class Columns(NamedTuple):
  """The features with image, label and captions; '' = there are none."""
  image: str
  label: str
  caption: str = ''


class TfRecordSource(IndexedSource):
  """The records of TFRecord files."""
  behind_bytes = tfrecord_index.FOOTER_BYTES

  @staticmethod
  def load(files: Files, columns: Columns) -> Index:
    found = example_index.load(files.paths, columns.label)
    if not len(found):
      raise UserError(f'{files.paths[0]}: expected records, got none in {len(files.paths):,} files. Correct the '
                      'pattern.')
    return found

  @staticmethod
  def label_place(label: str) -> str:
    return f'the feature {label}'

  @staticmethod
  def choose(paths: Sequence[str], data: schema.Data) -> Columns:
    return choose(paths, data)

  def identity(self) -> Iterator[HostArray]:
    yield from self._index[2:]  # sizes, checksums and labels

  def read(self, index: int, path: str, offset: int, size: int) -> bytes:
    return records.encoded(records.pick(self._record(index), self._columns.image), self._columns.image)

  @property
  def caption_column(self) -> str:
    return str(self._columns.caption)

  def captions(self, index: int) -> tuple[str, ...]:
    """Returns the texts of an image that are not empty. Raises BadImage if one is not UTF-8, or the record is damaged.
    """
    name = self.caption_column
    return stored.texts(records.pick(self._record(index), name).get(name, ()), f'the feature {name}')

  def describe(self, index: int) -> str:
    path = self._place(index)[0]
    first = int(self._index.starts[self._files.paths.index(path)])
    place = f'{path}[{index - first}]'
    try:
      found = records.parse(self._record(index))
    except (BadRecord, OSError):  # the caller describes this record in its error message
      return place
    name = next((found[one][0] for one in NAMES if found.get(one)), b'')
    return f'{place} ({os.fsdecode(name)})' if isinstance(name, bytes) and name else place

  def _record(self, index: int) -> bytes:
    path, offset, size = self._place(index)
    frame = ranges.read(path, offset, size + self.behind_bytes)
    if len(frame) < size + self.behind_bytes or tfrecord_index.mask(frame[:size]) != frame[size:]:
      raise BadRecord(f'the record at byte {offset:,} of {path} does not match its checksum')
    return frame[:size]


def opener(where: str, data: schema.Data, image_px: tuple[int, int]) -> Callable[[str], Source]:
  """Opens the splits of TFRecord files.

  Raises:
    UserError: there are no such files, they are compressed, or (when opening) damaged, or of other features.
  """
  del image_px
  if access.locate(where, 'tfrecord:PATH').endswith(_COMPRESSED):
    raise UserError(f'tfrecord:{where}: expected TFRecord files that are not compressed, which can be read at random, '
                    f'got {os.path.basename(where)}. Decompress them: images are compressed already.')
  shards = shard_files.find(where, '.tfrecord, .tfrecords, .tfrec or -00000-of-00001', kind='tfrecord',
                            rules=Rules.of(data), fits=lambda name: bool(_FILE.search(name)))
  listed = Listed(shards.root, {split: Files(paths) for split, paths in shards.splits.items()})
  return indexed.opener(TfRecordSource, listed, data, name=f'tfrecord:{where}')


def choose(paths: Sequence[str], data: schema.Data) -> Columns:
  """Returns which features have image and label, by the settings or by their usual names.

  Raises:
    UserError: the first records do not have them, are no `tf.train.Example`, or the file is damaged.
  """
  kinds = _features(paths)
  image, label = data.image_column, data.label_column
  image = image or next((name for name in IMAGES if kinds.get(name) == 'bytes'), '')
  if kinds.get(image) != 'bytes':
    raise _missing(paths[0], 'data.image_column', f'a feature with encoded images, such as {IMAGES[0]}',
                   data.image_column, kinds)
  if label and kinds.get(label, 'float') == 'float':
    raise _missing(paths[0], 'data.label_column', f'a feature with numbers or names of classes, such as {LABELS[0]}',
                   label, kinds)
  label = label or next((name for name in LABELS if kinds.get(name, 'float') != 'float'), '')
  if not label:
    log.warning('%s has no feature %s: its images have no labels, and get the class %r. It has %s.', paths[0],
                ' or '.join(LABELS), *UNLABELED, _listed(kinds))
  caption = data.caption_column
  if caption and kinds.get(caption) != 'bytes':
    raise _missing(paths[0], 'data.caption_column', 'a feature with captions', caption, kinds)
  return Columns(image, label, caption or next((name for name in CAPTIONS if kinds.get(name) == 'bytes'), ''))


def _features(paths: Sequence[str]) -> dict[str, str]:
  """Returns the features of the first records with the kind of their values, '' if they have none."""
  found: dict[str, str] = {}
  try:
    for record in itertools.islice((one for path in paths for one in example_index.examples(path)), _FIRST):
      for name, values in records.parse(record).items():
        found[name] = found.get(name) or (_KINDS[type(values[0])] if values else '')
  except BadRecord as error:
    raise UserError(f'{paths[0]}: expected records that are a tf.train.Example, got {error}. Choose other '
                    'files.') from None
  except OSError as error:
    raise access.unreadable(error, f'the TFRecord file {error.filename or paths[0]}') from error
  if not found:
    raise UserError(f'{paths[0]}: expected records with features that match their checksums, got none in '
                    f'{len(paths):,} files. Correct the pattern.')
  return found


def _missing(path: str, setting: str, expected: str, got: str, kinds: dict[str, str]) -> UserError:
  return UserError(f'{setting}: expected {expected}, got {json_fields.describe(got) if got else "none"}. The first '
                   f'records of {path} have {_listed(kinds)}. Set --config.{setting} to one of them.')


def _listed(kinds: dict[str, str]) -> str:
  return ', '.join(f'{json_fields.shown(name)} ({kind or "empty"})' for name, kind in sorted(kinds.items())[:30]
                   ) or 'no features'
