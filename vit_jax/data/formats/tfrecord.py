"""`tfrecord:PATH`: TFRecord files of `tf.train.Example` records, read at random without TensorFlow.

PATH is a pattern such as `DIR/{split}-*-of-*`, or a folder of such files (`shards.py`), also in object storage. These
settings name the features of an example; by default, the features have the names that TPU programs or TFDS use:

  data.image_column    the encoded image: `image/encoded` or `image`
  data.label_column    classes as whole numbers from `data.label_offset` on, or names: `image/class/label` or `label`
  data.caption_column  the captions: `image/caption`, `caption` and other names

`opening.py` calls `opener`. `indexed.py` calls the methods of `TfRecordSource`, and documents their order. `tfds.py`
uses `TfRecords` for files whose numbers of records are known, and decodes the records itself.

A file is a sequence of frames, each with one record. Numbers are little endian:

  u64 length    number of bytes of the record
  u32 checksum  of the length
  bytes         the record
  u32 checksum  of the record

A checksum is a masked CRC-32C (`mask`). The scan for the index reads the length and the checksums of each frame, the
names of the features, and the label of each example; it skips images. Whenever a record is read, its checksum is
compared, and a damaged record counts as an image that cannot be decoded. After a frame whose length is damaged, or that
is truncated, no further record can be found. Such a file is refused, except in TFDS datasets: their descriptions have
the number of records, so the records from this frame on count as damaged.
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
"""Names that the features have by default: as TPU programs store ImageNet, and as TFDS does."""
_FILE_NAME = re.compile(r'\.tfrecords?(-\d+-of-\d+)?$|-\d{4,}-of-\d{4,}$|\.tfrec$')
"""Matches the end of `a.tfrecord`, `a.tfrecord-00000-of-00002`, `train-00000-of-01024` and `a.tfrec`."""
_SPAN_TYPES = {'offset': 'int64', 'size': 'int64'}  # columns of the index: the span of the record in the file
_INDEX_TYPES = {**_SPAN_TYPES, 'checksum': 'uint32', index.LABEL: index.BYTES}
_HEADER_BYTES, _FOOTER_BYTES = 12, 4  # of a frame: before the record (length, checksum), and after it (checksum)
_MASK_DELTA = 0xA282EAD8  # tensorflow/core/lib/hash/crc32c.h
_LOST = -1  # in place of the offset of a record after a damaged frame
_MAX_DESCRIBED_FEATURES = 30  # in a message
_MAX_LOST = 10_000_000  # number of lost records that small files may have
_NUM_FIRST_RECORDS = 100  # records in which features are searched
_FIELD_TAG = b'\x0a'  # the protobuf tag of a field with the number 1 that has a length
_MAX_HEAD_BYTES = 64  # of the tag and the length of a field
_MAX_LABEL_BYTES, _MAX_RECORD_BYTES = 2**16, 2**29  # of an entry with labels, and of a record that is parsed for labels
_MAX_NAME_BYTES = 127  # the largest length that is stored in one byte
_TYPE_NAMES = {bytes: 'bytes', int: 'int64', float: 'float'}


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
    return f'The first records of {paths[0]} have {_describe_features(_read_feature_types(paths))}.'

  @staticmethod
  def choose(paths: Sequence[str], data: schema.Data) -> Columns:
    """Returns the features with image, label and captions, by the settings or by usual names. Warns without labels.

    Raises UserError if the first records lack the features or are no `tf.train.Example`, or the file is damaged.
    """
    type_by_name = _read_feature_types(paths)

    def choose_feature(setting: str, expected: str, requested: str, usual: Sequence[str], *, types: Sequence[str],
                       is_required: bool = False) -> str:
      """Returns the feature that the setting requests, else the first usual one of a type in `types`, else ''."""
      name = requested or next((feature for feature in usual if type_by_name.get(feature) in types), '')
      if (is_required and not name) or (requested and type_by_name.get(requested) not in types):
        raise UserError(f'data.{setting}: expected {expected}, got {documents.describe(name) if name else "none"}. '
                        f'The first records of {paths[0]} have {_describe_features(type_by_name)}. Set --config.data.'
                        f'{setting} to one of them.')
      return name
    image = choose_feature('image_column', f'a feature with encoded images, such as {IMAGES[0]}', data.image_column,
                           IMAGES, types=('bytes',), is_required=True)
    label = choose_feature('label_column', f'a feature with numbers or names of classes, such as {LABELS[0]}',
                           data.label_column, LABELS, types=('bytes', 'int64', ''))
    if not label:
      warn_once(f'{paths[0]} has no feature {" or ".join(LABELS)}: its images have no labels, and get the class '
                f'{UNLABELED[0]!r}. {TfRecordSource.contents(paths)}')
    caption = choose_feature('caption_column', 'a feature with captions', data.caption_column, CAPTIONS,
                             types=('bytes',))
    return Columns(image, label, caption)

  def identity(self) -> Iterator[HostArray]:
    yield from (self._index['size'], self._index['checksum'], *self.label_arrays())

  def image(self, row: int, content: bytes) -> bytes:
    record = _check_record(self._span(row), content)
    return example.get_bytes(example.pick(record, self._columns.image), self._columns.image)

  @property
  def caption_column(self) -> str:
    return str(self._columns.caption)

  def captions(self, row: int) -> tuple[str, ...]:
    """Returns the texts of an image that are not empty. Raises BadImage if the record or a text is damaged."""
    name = self.caption_column
    texts = example.pick(_read_record(self._span(row)), name).get(name, ()) if name else ()
    return stored.texts(texts, f'the feature {name}')

  def describe(self, row: int) -> str:
    position = f'{self.path(row)}[{row - self.first_row(row)}]'
    try:
      features = example.parse(_read_record(self._span(row)))
    except (BadRecord, OSError):  # the caller describes this record in an error message
      return position
    image_name = next((features[name][0] for name in NAMES if features.get(name)), b'')
    return f'{position} ({os.fsdecode(image_name)})' if isinstance(image_name, bytes) and image_name else position


def opener(where: str, data: schema.Data, image_px: tuple[int, int], *,
           order: Sequence[str] = ()) -> Callable[[str], Source]:
  """Returns the function that opens a split of TFRecord files, given the name of the split.

  `order` lists the classes of a run that resumes. Raises UserError if there are no such files.
  """
  del image_px
  listed = shards.find(where, '.tfrecord, .tfrecords, .tfrec or -00000-of-00001', prefix='tfrecord',
                       rules=Rules.of(data), fits=lambda name: bool(_FILE_NAME.search(name)))
  return indexed.opener(TfRecordSource, listed, data, name=f'tfrecord:{where}', order=order)


class TfRecords:
  """The records of several TFRecord files whose numbers of records are known. Pickles to few bytes; safe for threads.

  The records of a file from its first damaged frame on are lost, and count as damaged. A copy loads the index again.
  """

  def __init__(self, paths: Sequence[str], counts: Sequence[int]) -> None:
    """Indexes files, given the number of records of each. Raises UserError if a file is missing or has more records."""
    self._paths, self._counts = [os.path.abspath(path) for path in paths], tuple(counts)
    self._index = self._load()

  def _load(self) -> Index:
    paths, counts = self._paths, self._counts
    try:
      max_records = max(sum(map(os.path.getsize, paths)) // (_HEADER_BYTES + _FOOTER_BYTES), _MAX_LOST)
    except OSError as error:
      raise failures.unreadable(error, f'the TFRecord file {error.filename}') from error
    if sum(counts) > max_records:
      raise UserError(f'{paths[0]}: expected at most {max_records:,} records in files of this size, got '
                      f'{sum(counts):,} in dataset_info.json. Copy or prepare the dataset again.')
    return index.load(paths, functools.partial(scan_counted, counts=dict(zip(paths, counts, strict=True))),
                      f'TFRecord 2 {counts}', _SPAN_TYPES, format_name='TFRecord')

  def __len__(self) -> int:
    return len(self._index)

  def path(self, record_number: int) -> str:
    """Returns the file of a record."""
    return self._paths[int(self._index['file'][record_number])]

  def __getitem__(self, record_number: int) -> bytes:
    """Returns a record. Raises BadRecord if it is damaged or lost, and OSError if its file cannot be read."""
    path, offset = self.path(record_number), int(self._index['offset'][record_number])
    if offset == _LOST:
      raise BadRecord(f'the record is lost: {path} is damaged before it, or truncated')
    return _read_record(Span(path, offset, int(self._index['size'][record_number]) + _FOOTER_BYTES))

  def __getstate__(self) -> dict[str, Any]:
    return {name: value for name, value in self.__dict__.items() if name != '_index'}

  def __setstate__(self, state: dict[str, Any]) -> None:
    self.__dict__.update(state)
    self._index = self._load()


def mask(data: bytes) -> bytes:
  """Returns the masked CRC-32C of `data`, 4 bytes, as frames store it."""
  crc = google_crc32c.value(data)
  return struct.pack('<I', ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF)


def _read_record(span: Span) -> bytes:
  return _check_record(span, storage.read(*span))


def _check_record(span: Span, content: bytes) -> bytes:
  """Returns the record in the bytes of a span. Raises BadRecord if the record and its checksum do not match."""
  record = content[:span.size - _FOOTER_BYTES]
  if len(content) < span.size or mask(record) != content[len(record):]:
    raise BadRecord(f'the record at byte {span.offset:,} of {span.path} does not match its checksum')
  return record


def _frames(path: str, window: Window) -> Iterator[tuple[int, int]]:
  """Yields offset and size of each record of a file. Raises UserError if a frame is damaged."""
  start = 0
  while header := window.read(start, _HEADER_BYTES):
    size, offset = int.from_bytes(header[:8], 'little'), start + _HEADER_BYTES
    problem = ''
    if len(header) < _HEADER_BYTES:
      problem = 'one that is truncated'
    elif mask(header[:8]) != header[8:]:
      problem = ('a length that does not match its checksum' if start else
                 storage.describe_compression(header) or 'no record')
    elif not window.holds(offset + size + _FOOTER_BYTES):
      problem = 'one that is truncated'
    if problem:
      raise UserError(f'{path}: expected a complete TFRecord file, got {problem}, {window.place(start)}. Copy it '
                      'again, or leave it out of the pattern.')
    yield offset, size
    start = offset + size + _FOOTER_BYTES


def scan(path: str, ignored: Counts, *, label: str) -> Iterator[tuple[Any, ...]]:
  """Yields the row of each record of a file; `label` is the feature with the labels, '' = there are none.

  Raises OSError or UserError if the file is missing, cannot be read, is compressed, damaged or truncated.
  """
  del ignored  # this format ignores no records
  with contextlib.closing(Window(path)) as window:
    for offset, size in _frames(path, window):
      labels = _read_labels(window, offset, size, label) if label else None
      yield offset, size, int.from_bytes(window.read(offset + size, _FOOTER_BYTES), 'little'), index.encode(labels)


def scan_counted(path: str, ignored: Counts, *, counts: Mapping[str, int]) -> Iterator[tuple[int, int]]:
  """Yields offset and size of each record of a file; `_LOST` and 0 for each record from a damaged frame on.

  `counts` has the number of records of each path. Warns if records are lost. Raises UserError if the file has more
  records, and OSError if the file cannot be read.
  """
  del ignored  # this format ignores no records
  count, num_read, end = counts[path], 0, 0  # `end` is the end of the last complete frame
  with contextlib.closing(Window(path)) as window:
    try:
      for num_read, (offset, size) in enumerate(_frames(path, window), 1):
        end = offset + size + _FOOTER_BYTES
        if num_read <= count:
          yield offset, size
    except UserError:
      log.warning('%s is damaged %s: %s of its %s records are lost and count as bad images. Copy it again, or prepare '
                  'the dataset again.', path, window.place(end), f'{max(0, count - num_read):,}', f'{count:,}')
  if num_read > count:
    raise UserError(f'{path}: expected {count:,} records, as in dataset_info.json, got {num_read:,}. Copy or prepare '
                    'the dataset again.')
  yield from itertools.repeat((_LOST, 0), count - num_read)


def _read_feature_types(paths: Sequence[str]) -> dict[str, str]:
  """Returns the type of each feature of the first records by name: `bytes`, `int64` or `float`; '' = has no values."""
  type_by_name: dict[str, str] = {}
  try:
    records = itertools.chain.from_iterable(map(_read_records, paths))
    for record in itertools.islice(records, _NUM_FIRST_RECORDS):
      for name, values in example.parse(record).items():
        type_by_name[name] = type_by_name.get(name) or (_TYPE_NAMES[type(values[0])] if values else '')
  except BadRecord as error:
    raise UserError(f'{paths[0]}: expected records that are a tf.train.Example, got {error}. Choose other '
                    'files.') from None
  except OSError as error:
    raise failures.unreadable(error, f'the TFRecord file {error.filename or paths[0]}') from error
  if not type_by_name:
    raise UserError(f'{paths[0]}: expected records with features that match their checksums, got none in '
                    f'{len(paths):,} files. Correct the pattern.')
  return type_by_name


def _read_records(path: str) -> Iterator[bytes]:
  """Yields the records of a file that match their checksums."""
  with contextlib.closing(Window(path)) as window:
    for offset, size in _frames(path, window):
      if mask(record := window.read(offset, size)) == window.read(offset + size, _FOOTER_BYTES):
        yield record


def _describe_features(type_by_name: Mapping[str, str]) -> str:
  """Returns the names and types of the first features for a message."""
  types = sorted(type_by_name.items())[:_MAX_DESCRIBED_FEATURES]
  return ', '.join(f'{documents.shown(name)} ({type_name or "empty"})' for name, type_name in types) or 'no features'


class _UnusualRecord(Exception):
  """A record does not have the layout that programs usually write, so it has to be parsed as a whole."""


def _read_labels(window: Window, offset: int, size: int, name: str) -> Labels:
  """Returns the labels in the feature `name` of a record; None if they are damaged, or are values of other types.

  If the record has the usual layout, only the entry of this feature is read, without the image.
  """
  try:
    try:
      values = _parse_values(_find_entry(window, offset, offset + size, name.encode(errors='surrogateescape')))
    except _UnusualRecord:
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

  In the usual layout, each part begins with a head: the byte `_FIELD_TAG`, and the length of the part as a varint.

    record: HEAD features, usually once
    features: HEAD entry, for each feature
    entry: HEAD name, then the values

  Raises _UnusualRecord if the record has another layout, or the entry or the name is longer than those of labels.
  """
  if len(name) > _MAX_NAME_BYTES:
    raise _UnusualRecord
  start_of_entry = _FIELD_TAG + bytes([len(name)]) + name
  entry, features_end = b'', offset
  while offset < end:
    head = window.read(offset, min(_MAX_HEAD_BYTES + len(start_of_entry), end - offset))
    size, head_bytes = _parse_head(head)
    content_start, part_end = offset + head_bytes, offset + head_bytes + size
    if part_end > end:
      raise _UnusualRecord
    if offset == features_end:  # this part is `features`, whose first entry is the next part
      offset, features_end = content_start, part_end
      continue
    if size and head[head_bytes:head_bytes + 1] != _FIELD_TAG:  # this part is an entry that does not begin with a name
      raise _UnusualRecord
    if head.startswith(start_of_entry, head_bytes):
      if size > _MAX_LABEL_BYTES:
        raise _UnusualRecord
      entry = window.read(content_start, size)
    offset = part_end
    if offset > features_end:
      raise _UnusualRecord
  return entry


def _parse_head(head: bytes) -> tuple[int, int]:
  """Returns the length of a field, and the number of bytes of its head. Raises _UnusualRecord if it has another tag."""
  size = 0
  varint = head[1:11] if head[:1] == _FIELD_TAG else b''  # at most 10 bytes
  for number, byte in enumerate(varint):
    size |= (byte & 127) << 7 * number
    if byte < 128:  # the last byte
      return size, number + 2
  raise _UnusualRecord


@functools.lru_cache(2**12)
def _parse_values(entry: bytes) -> tuple[Any, ...]:
  """Returns the values of a feature, given its entry. Equal entries share one tuple, as there are few classes."""
  try:
    return tuple(example.parse_entry(entry))
  except BadRecord:
    raise _UnusualRecord from None
