"""Records of ArrayRecord and TFRecord files in any order, and the `tf.Example` messages that they hold.

`array_record` reads ArrayRecord files and protobuf parses the messages; their schema is declared here, as TensorFlow,
which has it, is not needed to read data. TFRecord files have no library for random access without TensorFlow (readers
such as Grain's are sequential), so they are read here, by an index of their frames (`tfrecord_index.py`).
"""
from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vit_jax.core import lazy
from vit_jax.core.errors import UserError
from vit_jax.data.files import access, json_fields, open_files, ranges, remote, remote_records, tfrecord_index
from vit_jax.data.files.ranges import Range
from vit_jax.data.files.remote_records import RemoteRecords
from vit_jax.data.image.headers import BadImage

if TYPE_CHECKING:
  from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory
else:
  descriptor_pb2, descriptor_pool, message, message_factory = (
      lazy.Module(f'google.protobuf.{name}') for name in ('descriptor_pb2', 'descriptor_pool', 'message',
                                                          'message_factory'))

Values = list[bytes] | list[int] | list[float]
_SHOWN = 160  # characters of a reason
_LISTED = 20  # features in a message


class BadRecord(BadImage):
  """A record is damaged or incomplete: it counts as an image that cannot be decoded."""


class BadLabel(BadRecord):
  """A class of a record is out of range; `label` is how a message shows it."""

  def __init__(self, name: str, value: bytes | int | float, num_classes: int) -> None:
    self.label = f'the label {value}' if isinstance(value, int) else 'a label that is not a whole number'
    super().__init__(f'the record: expected classes from 0 to {num_classes - 1:,} in the feature {name!r}, got '
                     f'{self.label}')


class ArrayRecords:
  """The records of several ArrayRecord files. Pickles to few bytes; safe for threads.

  The format has a checksum of every record, which the reader compares.
  """

  def __init__(self, paths: Sequence[str], counts: Sequence[int], sizes: Sequence[int] = ()) -> None:
    """Takes absolute paths or addresses, the number of records of each file, and for addresses the size of each.

    Opens no file.
    """
    self._paths, self._counts, self._sizes = tuple(paths), tuple(counts), tuple(sizes)
    self._ends = list(itertools.accumulate(counts))
    self._num = self._ends[-1] if self._ends else 0

  def __len__(self) -> int:
    return self._num

  def find_file(self, number: int) -> int:
    """Returns the number of the file of a record."""
    if not 0 <= number < self._num:
      raise IndexError(f'expected a number below {self._num:,}, the number of records, got {number}')
    return bisect.bisect_right(self._ends, number)

  def __getitem__(self, number: int) -> bytes:
    """Returns a record.

    Raises:
      BadRecord: it is damaged.
      OSError: its file cannot be read.
      UserError: the file has another number of records.
    """
    file = self.find_file(number)
    path, count = self._paths[file], self._counts[file]
    place = number - (self._ends[file] - count)
    try:
      if remote.is_address(path):
        with self._use(file) as opened:
          return opened.read(place)
      with open_files.pool().use(('array_record', path), lambda: _open_array_record(path, count),
                                 lambda opened: opened.close()) as reader:
        found: bytes = reader.read(place, place + 1)[0]  # a list of places would take longer the more records there are
        return found
    except (RuntimeError, IndexError) as error:
      if system_error := access.find_system_error(str(error)):
        system_error.filename = path
        raise system_error from error
      raise BadRecord(f'record {place} of {path} is damaged: {str(error)[:_SHOWN]}') from error

  def opening(self, number: int) -> Range | None:
    """Returns the range to read before `part` of a record is known; None if it is known, or the file is local."""
    file = self.find_file(number)
    path = self._paths[file]
    if not remote.is_address(path) or ('array_record', path) in open_files.pool():
      return None
    return remote_records.find_end(path, self._counts[file], self._sizes[file])

  def part(self, number: int) -> Range | None:
    """Returns the range that is read for a record; None if the file is local. Raises as `RemoteRecords`."""
    file = self.find_file(number)
    if not remote.is_address(self._paths[file]):
      return None
    with self._use(file) as opened:
      return opened.part(number - (self._ends[file] - self._counts[file]))

  def _use(self, file: int) -> contextlib.AbstractContextManager[RemoteRecords]:
    path, count, size = self._paths[file], self._counts[file], self._sizes[file]
    return open_files.pool().use(('array_record', path), lambda: RemoteRecords(path, count, size), RemoteRecords.close,
                                 num_files=RemoteRecords.NUM_FILES)


def _open_array_record(path: str, count: int) -> Any:
  from array_record.python import array_record_module
  with open(path, 'rb'):  # raises OSError with a number, unlike the reader
    pass
  reader = array_record_module.ArrayRecordReader(path, options=remote_records.OPTIONS,
                                                 file_reader_buffer_size=remote_records.BUFFER_BYTES)
  if (found := reader.num_records()) not in (0, count):  # 0 in a truncated file
    reader.close()
    raise UserError(f'{path}: expected {count:,} records, got {found:,}. Copy or prepare the dataset again.')
  return reader


class TfRecords:
  """The records of several TFRecord files. Pickles to few bytes; safe for threads."""

  def __init__(self, paths: Sequence[str], counts: Sequence[int], *, cache: pathlib.Path | None = None) -> None:
    """Indexes `paths`.

    Args:
      paths: of the files.
      counts: the number of records of each.
      cache: the folder for indexes where the folder of the files cannot be written, None for the user's.

    Raises:
      UserError: a file is missing, cannot be read, or has more records.
    """
    self._paths, self._counts = [os.path.abspath(p) for p in paths], tuple(counts)
    self._cache = cache or access.cache_folder('tfrecord')
    self._start()

  def __len__(self) -> int:
    return len(self._index)

  def __getitem__(self, number: int) -> bytes:
    """Returns a record.

    Raises:
      BadRecord: it is damaged or lost.
      OSError: its file cannot be read.
    """
    file, offset, size = self._index[number].tolist()
    path = self._paths[file]
    if offset == tfrecord_index.LOST:
      raise BadRecord(f'the record is lost: {path} is damaged before it, or truncated')
    frame = ranges.read(path, offset, size + tfrecord_index.FOOTER_BYTES)
    record = frame[:size]
    if len(frame) < size + tfrecord_index.FOOTER_BYTES or tfrecord_index.mask(record) != frame[size:]:
      raise BadRecord(f'the record at byte {offset:,} of {path} does not match its checksum')
    return record

  def __getstate__(self) -> dict[str, Any]:
    return {'_paths': self._paths, '_counts': self._counts, '_cache': self._cache}

  def __setstate__(self, state: dict[str, Any]) -> None:
    self.__dict__.update(state)
    self._start()

  def _start(self) -> None:
    index = tfrecord_index.load(self._paths, self._counts, self._cache)
    self._index = index.view(np.ndarray)  # reading a row of a memory map takes longer


def parse(record: bytes) -> dict[str, Values]:
  """Returns the features of a `tf.Example` record by name.

  Raises:
    BadRecord: not in this format, or truncated.
  """
  lists = {entry.key: getattr(entry.value, entry.value.WhichOneof('kind') or 'int64_list') for entry in _read(record)}
  return {name: list(found.value) for name, found in lists.items()}


def pick(record: bytes, *names: str) -> Mapping[str, Sequence[Any]]:
  """Returns these features of a `tf.Example` record by name, in a fraction of the time; all if one of them is missing.

  Raises:
    BadRecord: not in this format, or truncated.
  """
  found: dict[str, Sequence[Any]] = {}
  for entry in _read(record):
    if (name := entry.key) in names:
      value = entry.value
      found[name] = getattr(value, value.WhichOneof('kind') or 'int64_list').value
  return found if len(found) == len(names) else parse(record)


def _read(record: bytes) -> Any:
  """Returns the entries of the message."""
  try:
    return _example().FromString(record).features.feature
  except message.DecodeError as error:
    raise BadRecord(f'not a tf.Example record: {len(record):,} bytes, starting with {record[:4]!r}') from error


def encode(features: Mapping[str, bytes | int | Sequence[int] | Sequence[bytes]]) -> bytes:
  """Returns a `tf.Example` record with one value or a list per feature, in this order."""
  found = _example()()
  for name, value in features.items():
    entry = found.features.feature.add(key=name)
    if isinstance(value, bytes):
      entry.value.bytes_list.value.append(value)
    elif not isinstance(value, int) and value and isinstance(value[0], bytes):
      entry.value.bytes_list.value.extend(value)
    else:
      entry.value.int64_list.value.extend([value] if isinstance(value, int) else value)
  encoded: bytes = found.SerializeToString()
  return encoded


def first(features: Mapping[str, Sequence[Any]], name: str) -> bytes | int | float:
  """Returns the first value of a feature. Raises BadRecord if there is none."""
  values = features.get(name)
  if not values:
    got = json_fields.listed(sorted(features), _LISTED) or 'no features'
    raise BadRecord(f'the record: expected the feature {name!r}, got {got}')
  found: bytes | int | float = values[0]
  return found


def encoded(features: Mapping[str, Sequence[Any]], name: str) -> bytes:
  """Returns the first value of a feature. Raises BadRecord if there is none, or it is a number."""
  found = first(features, name)
  if not isinstance(found, bytes):
    raise BadRecord(f'the record: expected bytes in the feature {name!r}, got a number')
  return found


def label(features: Mapping[str, Sequence[Any]], name: str, num_classes: int) -> int:
  """Returns the first value of a feature, a class.

  Raises:
    BadRecord: there is none.
    BadLabel: it is not one of so many classes.
  """
  first(features, name)
  return classes(features, name, num_classes)[0]


def classes(features: Mapping[str, Sequence[Any]], name: str, num_classes: int) -> list[int]:
  """Returns the values of a feature; none if the record does not have the feature.

  Raises:
    BadLabel: one is not one of so many classes.
  """
  found = list(features.get(name, ()))
  for value in found:
    if not isinstance(value, int) or not 0 <= value < num_classes:
      raise BadLabel(name, value, num_classes)
  return found


@functools.cache
def _example() -> Any:
  """Returns the message class of `tf.Example`. The map of features is declared as a list, which keeps their order."""
  field = descriptor_pb2.FieldDescriptorProto
  file = descriptor_pb2.FileDescriptorProto(name='vit_jax_example.proto', package='vit_jax', syntax='proto3')
  for name, fields in {
      'BytesList': [('value', field.TYPE_BYTES, True)], 'FloatList': [('value', field.TYPE_FLOAT, True)],
      'Int64List': [('value', field.TYPE_INT64, True)],
      'Feature': [('bytes_list', 'BytesList', False), ('float_list', 'FloatList', False),
                  ('int64_list', 'Int64List', False)],
      'Entry': [('key', field.TYPE_STRING, False), ('value', 'Feature', False)],
      'Features': [('feature', 'Entry', True)], 'Example': [('features', 'Features', False)]}.items():
    entry = file.message_type.add(name=name)
    for number, (own, kind, repeated) in enumerate(fields, 1):
      added = entry.field.add(name=own, number=number,
                              label=field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL)
      if isinstance(kind, str):
        added.type, added.type_name = field.TYPE_MESSAGE, f'.vit_jax.{kind}'
      else:
        added.type = kind
      if name == 'Feature':
        added.oneof_index = 0
    if name == 'Feature':
      entry.oneof_decl.add(name='kind')
  pool = descriptor_pool.DescriptorPool()
  pool.Add(file)
  return message_factory.GetMessageClass(pool.FindMessageTypeByName('vit_jax.Example'))
