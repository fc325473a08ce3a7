"""`tfrecord:PATH`: TFRecord files of `tf.train.Example` records, read at random without TensorFlow.

PATH is a pattern such as `DIR/{split}-*-of-*`, or a folder of such files (`shards.py`), also in object storage.
`data.image_column` and `data.label_column` name the features with the encoded image and with its class or classes:
whole numbers, the first of which is `data.label_offset`, or names. `data.caption_column` names the feature with
captions. By default these are the features of ImageNet as TPU programs store it, `image/encoded` and
`image/class/label`, or of TFDS, `image` and `label`; and `image/caption`, `caption` and other usual names.

`opening.py` calls `opener`; `indexed.py` calls the methods of `TfRecordSource` and says in which order.
`tfds.py` reads files whose numbers of records are known with `TfRecords`, and decodes the records itself.

A file is a sequence of frames, each with one record. Numbers are little endian:

  u64 length    number of bytes of the record
  u32 checksum  of the length
  bytes         the record
  u32 checksum  of the record

A checksum is a masked CRC-32C (`mask`). The scan for the index reads the length and the checksums of each frame, the
names of the features, and the label of each example; it skips images. Whenever a record is read, its checksum is
compared, and a damaged record counts as an image that cannot be decoded. A frame that is damaged or truncated hides how
many records follow. So such a file is refused, except in TFDS datasets, whose descriptions have the number of records:
then the records from this frame on are lost.
"""
from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vit_jax.config import schema
from vit_jax.core import documents, failures, lazy
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.data import index, storage
from vit_jax.data.formats import example, indexed, shards
from vit_jax.data.formats.example import BadRecord
from vit_jax.data.formats.indexed import IndexedSource
from vit_jax.data.formats.shards import Files
from vit_jax.data.index import Counts, Index, Labels
from vit_jax.data.source import UNLABELED, Source, warn_once
from vit_jax.data.storage import Span, Window
from vit_jax.data.text import stored
from vit_jax.data.user_files import Rules

if TYPE_CHECKING:
  import google_crc32c
else:
  google_crc32c = lazy.Module('google_crc32c')

log = logging.getLogger('vit_jax.data')

IMAGES, LABELS, NAMES = ('image/encoded', 'image'), ('image/class/label', 'label'), ('image/filename', 'file_name')
CAPTIONS = (*(f'image/{name}' for name in stored.NAMES), *stored.NAMES)
"""Usual names of the features: those of ImageNet as TPU programs store it, and of TFDS."""
_FILE_NAME = re.compile(r'\.tfrecords?(-\d+-of-\d+)?$|-\d{4,}-of-\d{4,}$|\.tfrec$')
"""Matches the end of `a.tfrecord`, `a.tfrecord-00000-of-00002`, `train-00000-of-01024` and `a.tfrec`."""
_SPAN_TYPES = {'offset': 'int64', 'size': 'int64'}  # columns of the index: where the record is in the file
_INDEX_TYPES = {**_SPAN_TYPES, 'checksum': 'uint32', index.LABEL: index.BYTES}
_HEADER_BYTES, _FOOTER_BYTES = 12, 4  # of a frame: length and its checksum, and the checksum of the record
_MASK_DELTA = 0xA282EAD8  # tensorflow/core/lib/hash/crc32c.h
_LOST = -1  # offset of a lost record
_MAX_LOST = 10_000_000  # lost records that small files may have
_FIRST_RECORDS = 100  # in which features are searched; if none is a label, images count as unlabeled
_FIELD_TAG = b'\x0a'  # the protobuf tag of a field with the number 1 that has a length
_MAX_HEAD_BYTES = 64  # of the tag and the length of a field
_MAX_LABEL_BYTES, _MAX_RECORD_BYTES = 2**16, 2**29  # of an entry with labels, and of a record that is parsed for them
_MAX_NAME_BYTES = 127  # this length is stored in one byte
_KINDS = {bytes: 'bytes', int: 'int64', float: 'float'}


class Columns(NamedTuple):
  """The features with image, label and captions; '' = there are none."""
  image: str
  label: str
  caption: str = ''


class TfRecordSource(IndexedSource):
  """The records of TFRecord files."""
  footer_bytes = _FOOTER_BYTES

  @staticmethod
  def load(files: Files, columns: Columns) -> Index:
    return index.load(files.paths, functools.partial(scan, label=columns.label), f'tf.train.Example 2 {columns.label}',
                      _INDEX_TYPES, format_name='TFRecord', expected='records')

  @staticmethod
  def label_place(label: str) -> str:
    return f'the feature {label}'

  @staticmethod
  def contents(paths: Sequence[str]) -> str:
    return f'The first records of {paths[0]} have {_describe_features(_find_kinds(paths))}.'

  @staticmethod
  def choose(paths: Sequence[str], data: schema.Data) -> Columns:
    """Returns which features have image and label, by the settings or by their usual names.

    Raises:
      UserError: the first records do not have them, are no `tf.train.Example`, or the file is damaged.
    """
    kinds = _find_kinds(paths)

    def choose_feature(setting: str, expected: str, given: str, usual: Sequence[str], *, kinds_used: Sequence[str],
                       is_required: bool = False) -> str:
      name = given or next((name for name in usual if kinds.get(name) in kinds_used), '')
      if (is_required and not name) or (given and kinds.get(given) not in kinds_used):
        raise UserError(f'data.{setting}: expected {expected}, got {documents.describe(name) if name else "none"}. '
                        f'The first records of {paths[0]} have {_describe_features(kinds)}. Set --config.data.'
                        f'{setting} to one of them.')
      return name
    image = choose_feature('image_column', f'a feature with encoded images, such as {IMAGES[0]}', data.image_column,
                           IMAGES, kinds_used=('bytes',), is_required=True)
    label = choose_feature('label_column', f'a feature with numbers or names of classes, such as {LABELS[0]}',
                           data.label_column, LABELS, kinds_used=('bytes', 'int64', ''))
    if not label:
      warn_once(f'{paths[0]} has no feature {" or ".join(LABELS)}: its images have no labels, and get the class '
                f'{UNLABELED[0]!r}. {TfRecordSource.contents(paths)}')
    caption = choose_feature('caption_column', 'a feature with captions', data.caption_column, CAPTIONS,
                             kinds_used=('bytes',))
    return Columns(image, label, caption)

  def identity(self) -> Iterator[HostArray]:
    yield from (self._index['size'], self._index['checksum'], *self.label_arrays())

  def image(self, row: int, stored: bytes) -> bytes:
    record = _check_record(self._span(row), stored)
    return example.get_bytes(example.pick(record, self._columns.image), self._columns.image)

  @property
  def caption_column(self) -> str:
    return str(self._columns.caption)

  def captions(self, row: int) -> tuple[str, ...]:
    """Returns the texts of an image that are not empty. Raises BadImage if the record or a text is damaged."""
    name = self.caption_column
    texts = example.pick(_read(self._span(row)), name).get(name, ()) if name else ()
    return stored.texts(texts, f'the feature {name}')

  def describe(self, row: int) -> str:
    position = f'{self.path(row)}[{row - self.first_row(row)}]'
    try:
      features = example.parse(_read(self._span(row)))
    except (BadRecord, OSError):  # the caller describes this record in its error message
      return position
    image_name = next((features[name][0] for name in NAMES if features.get(name)), b'')
    return f'{position} ({os.fsdecode(image_name)})' if isinstance(image_name, bytes) and image_name else position


def opener(where: str, data: schema.Data, image_px: tuple[int, int], *,
           order: Sequence[str] = ()) -> Callable[[str], Source]:
  """Opens the splits of TFRecord files. Raises UserError if there are none, or (when opening) they are damaged."""
  del image_px
  listed = shards.find(where, '.tfrecord, .tfrecords, .tfrec or -00000-of-00001', kind='tfrecord',
                       rules=Rules.of(data), fits=lambda name: bool(_FILE_NAME.search(name)))
  return indexed.opener(TfRecordSource, listed, data, name=f'tfrecord:{where}', order=order)


class TfRecords:
  """The records of several TFRecord files whose numbers of records are known. Pickles to few bytes; safe for threads.

  The records of a file from its first damaged frame on are lost, and count as damaged.
  """

  def __init__(self, paths: Sequence[str], counts: Sequence[int]) -> None:
    """Indexes files, given the number of records of each. Raises UserError if one is missing or has more records."""
    self._paths, self._counts = [os.path.abspath(path) for path in paths], tuple(counts)
    self._index = self._load()

  def _load(self) -> Index:
    paths, counts = self._paths, self._counts
    try:
      most = max(sum(map(os.path.getsize, paths)) // (_HEADER_BYTES + _FOOTER_BYTES), _MAX_LOST)
    except OSError as error:
      raise failures.unreadable(error, f'the TFRecord file {error.filename}') from error
    if sum(counts) > most:
      raise UserError(f'{paths[0]}: expected at most {most:,} records in files of this size, got {sum(counts):,} in '
                      'dataset_info.json. Copy or prepare the dataset again.')
    return index.load(paths, functools.partial(scan_counted, counts=dict(zip(paths, counts, strict=True))),
                      f'TFRecord 2 {counts}', _SPAN_TYPES, format_name='TFRecord')

  def __len__(self) -> int:
    return len(self._index)

  def path(self, number: int) -> str:
    """Returns the file of a record."""
    return self._paths[int(self._index['file'][number])]

  def __getitem__(self, number: int) -> bytes:
    """Returns a record. Raises BadRecord if it is damaged or lost, and OSError if its file cannot be read."""
    path, offset, size = self.path(number), int(self._index['offset'][number]), int(self._index['size'][number])
    if offset == _LOST:
      raise BadRecord(f'the record is lost: {path} is damaged before it, or truncated')
    return _read(Span(path, offset, size + _FOOTER_BYTES))

  def __getstate__(self) -> dict[str, Any]:
    return {name: value for name, value in self.__dict__.items() if name != '_index'}

  def __setstate__(self, state: dict[str, Any]) -> None:
    self.__dict__.update(state)
    self._index = self._load()


def mask(data: bytes) -> bytes:
  """Returns the masked CRC-32C of `data` that a frame has, 4 bytes."""
  crc = google_crc32c.value(data)
  return struct.pack('<I', ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF)


def _read(span: Span) -> bytes:
  return _check_record(span, storage.read(*span))


def _check_record(span: Span, frame: bytes) -> bytes:
  """Returns the record in a span with its checksum. Raises BadRecord if they do not match."""
  record = frame[:span.size - _FOOTER_BYTES]
  if len(frame) < span.size or mask(record) != frame[len(record):]:
    raise BadRecord(f'the record at byte {span.offset:,} of {span.path} does not match its checksum')
  return record


def _frames(path: str, window: Window) -> Iterator[tuple[int, int]]:
  """Yields offset and size of each record of a file. Raises UserError if a frame is damaged."""
  start = 0
  while header := window.read(start, _HEADER_BYTES):
    size, offset = int.from_bytes(header[:8], 'little'), start + _HEADER_BYTES
    got = ''
    if len(header) < _HEADER_BYTES:
      got = 'one that is truncated'
    elif mask(header[:8]) != header[8:]:
      got = ('a length that does not match its checksum' if start else
             storage.describe_compression(header) or 'no record')
    elif not window.holds(offset + size + _FOOTER_BYTES):
      got = 'one that is truncated'
    if got:
      raise UserError(f'{path}: expected a complete TFRecord file, got {got}, {window.place(start)}. Copy it again, or '
                      'leave it out of the pattern.')
    yield offset, size
    start = offset + size + _FOOTER_BYTES


def scan(path: str, ignored: Counts, *, label: str) -> Iterator[tuple[Any, ...]]:
  """Yields the row of each record of a file; `label` is the feature with the labels, '' = there are none.

  Raises:
    OSError, UserError: it is missing, cannot be read, is compressed, damaged or truncated.
  """
  del ignored
  with contextlib.closing(Window(path)) as window:
    for offset, size in _frames(path, window):
      labels = _read_labels(window, offset, size, label) if label else None
      yield offset, size, int.from_bytes(window.read(offset + size, _FOOTER_BYTES), 'little'), index.encode(labels)


def scan_counted(path: str, ignored: Counts, *, counts: Mapping[str, int]) -> Iterator[tuple[int, int]]:
  """Yields offset and size of each record of a file; `_LOST` and 0 for those from a damaged frame on.

  `counts` has the number of records of each path. Raises UserError if the file has more, OSError if it cannot be read.
  """
  del ignored
  count, number, end = counts[path], 0, 0
  with contextlib.closing(Window(path)) as window:
    try:
      for number, (offset, size) in enumerate(_frames(path, window), 1):
        end = offset + size + _FOOTER_BYTES
        if number <= count:
          yield offset, size
    except UserError:
      log.warning('%s is damaged %s: %s of its %s records are lost and count as bad images. Copy it again, or prepare '
                  'the dataset again.', path, window.place(end), f'{max(0, count - number):,}', f'{count:,}')
  if number > count:
    raise UserError(f'{path}: expected {count:,} records, as in dataset_info.json, got {number:,}. Copy or prepare the '
                    'dataset again.')
  yield from itertools.repeat((_LOST, 0), count - number)


def _find_kinds(paths: Sequence[str]) -> dict[str, str]:
  """Returns the kind of each feature of the first records: `bytes`, `int64` or `float`; '' if it has no values."""
  kinds: dict[str, str] = {}
  try:
    records = itertools.chain.from_iterable(map(_read_records, paths))
    for record in itertools.islice(records, _FIRST_RECORDS):
      for name, values in example.parse(record).items():
        kinds[name] = kinds.get(name) or (_KINDS[type(values[0])] if values else '')
  except BadRecord as error:
    raise UserError(f'{paths[0]}: expected records that are a tf.train.Example, got {error}. Choose other '
                    'files.') from None
  except OSError as error:
    raise failures.unreadable(error, f'the TFRecord file {error.filename or paths[0]}') from error
  if not kinds:
    raise UserError(f'{paths[0]}: expected records with features that match their checksums, got none in '
                    f'{len(paths):,} files. Correct the pattern.')
  return kinds


def _read_records(path: str) -> Iterator[bytes]:
  """Yields the records of a file that match their checksums."""
  with contextlib.closing(Window(path)) as window:
    for offset, size in _frames(path, window):
      if mask(record := window.read(offset, size)) == window.read(offset + size, _FOOTER_BYTES):
        yield record


def _describe_features(kinds: Mapping[str, str]) -> str:
  return ', '.join(f'{documents.shown(name)} ({kind or "empty"})' for name, kind in sorted(kinds.items())[:30]
                   ) or 'no features'


class _Unusual(Exception):
  """A record does not have the form that programs write, so it has to be parsed as a whole."""


def _read_labels(window: Window, offset: int, size: int, name: str) -> Labels:
  """Returns the labels of a record; None if it is damaged, or has values that are not labels.

  If the record has the usual form, only the entry of the feature is read, without the image.
  """
  try:
    try:
      values = _parse_values(_find_entry(window, offset, offset + size, name.encode(errors='surrogateescape')))
    except _Unusual:
      if size > _MAX_RECORD_BYTES:
        return None
      values = tuple(example.parse(window.read(offset, size)).get(name, ()))
  except BadRecord:
    return None
  labels = tuple(value.decode(errors='surrogateescape') if isinstance(value, bytes) else value for value in values)
  if not all(isinstance(label, str) or (isinstance(label, int) and abs(label) < 2**62) for label in labels):
    return None
  return labels[0] if len(labels) == 1 else tuple(dict.fromkeys(labels))


def _find_entry(window: Window, offset: int, end: int, name: bytes) -> bytes:
  """Returns the last entry of the feature `name` in a record from `offset` to `end`; b'' if there is none.

  Each part begins with a head, the byte `_FIELD_TAG` and its length as a varint:

    record: HEAD features, usually once
    features: HEAD entry, for each feature
    entry: HEAD name, then the values

  Raises:
    _Unusual: the record has another form, or the entry or the name is longer than those of labels.
  """
  if len(name) > _MAX_NAME_BYTES:
    raise _Unusual
  start_of_entry = _FIELD_TAG + bytes([len(name)]) + name
  entry, features_end = b'', offset
  while offset < end:
    head = window.read(offset, min(_MAX_HEAD_BYTES + len(start_of_entry), end - offset))
    size, head_bytes = _parse_head(head)
    if offset + head_bytes + size > end:
      raise _Unusual
    if offset == features_end:  # a field `features` begins
      offset, features_end = offset + head_bytes, offset + head_bytes + size
      continue
    if size and head[head_bytes:head_bytes + 1] != _FIELD_TAG:  # the name is not the first field
      raise _Unusual
    if head.startswith(start_of_entry, head_bytes):
      if size > _MAX_LABEL_BYTES:
        raise _Unusual
      entry = window.read(offset + head_bytes, size)
    offset += head_bytes + size
    if offset > features_end:
      raise _Unusual
  return entry


def _parse_head(head: bytes) -> tuple[int, int]:
  """Returns the length of a field, and the number of bytes of its head. Raises _Unusual if it has another tag."""
  size = 0
  for number, byte in enumerate(head[1:11] if head[:1] == _FIELD_TAG else b''):  # a varint of at most 10 bytes
    size |= (byte & 127) << 7 * number
    if byte < 128:
      return size, number + 2
  raise _Unusual


@functools.lru_cache(2**12)
def _parse_values(entry: bytes) -> tuple[Any, ...]:
  """Returns the values of a feature, given its entry; the same tuple for equal entries, of which there are few."""
  try:
    return tuple(example.parse_entry(entry))
  except BadRecord:
    raise _Unusual from None
