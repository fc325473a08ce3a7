"""`tf.train.Example` messages, parsed by protobuf without TensorFlow: their schema is declared here.

`prepare.py` writes records with `encode`. `array_record.py`, `tfrecord.py` and `tfds.py` parse a record with `pick` or
`parse`, and then take values of its features with `first`, `encoded`, `label` or `classes`. A damaged record raises
`BadRecord`. This module reads no files, and knows no feature by name.
"""
from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vit_jax.core import documents, lazy
from vit_jax.data.image.headers import BadImage

if TYPE_CHECKING:
  from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory
else:
  descriptor_pb2, descriptor_pool, message, message_factory = (
      lazy.Module(f'google.protobuf.{name}') for name in ('descriptor_pb2', 'descriptor_pool', 'message',
                                                          'message_factory'))

Values = list[bytes] | list[int] | list[float]
_LISTED = 20  # features in an error message


class BadRecord(BadImage):
  """A record is damaged or incomplete: it counts as an image that cannot be decoded."""


class BadLabel(BadRecord):
  """A class of a record is out of range; `label` describes it in a message."""

  def __init__(self, name: str, value: bytes | int | float, num_classes: int) -> None:
    self.label = f'the label {value}' if isinstance(value, int) else 'a label that is not a whole number'
    super().__init__(f'the record: expected classes from 0 to {num_classes - 1:,} in the feature {name!r}, got '
                     f'{self.label}')


def parse(record: bytes) -> dict[str, Values]:
  """Returns the features of a `tf.Example` record by name.

  Raises:
    BadRecord: not in this format, or truncated.
  """
  return {entry.key: list(_values(entry)) for entry in _read(record, 'Example').features.feature}


def parse_entry(record: bytes) -> list[Any]:
  """Returns the values of a feature, given its entry, the message of name and values. Raises BadRecord as `parse`."""
  return list(_values(_read(record, 'Entry')))


def pick(record: bytes, *names: str) -> Mapping[str, Sequence[Any]]:
  """Returns these features of a `tf.Example` record by name, faster than `parse`; all features if one is missing.

  Raises:
    BadRecord: not in this format, or truncated.
  """
  found = {entry.key: _values(entry) for entry in _read(record, 'Example').features.feature if entry.key in names}
  return found if len(found) == len(names) else parse(record)


def _read(record: bytes, kind: str) -> Any:
  try:
    return _messages()[kind].FromString(record)
  except message.DecodeError as error:
    raise BadRecord(f'not a tf.Example record: {len(record):,} bytes, starting with {record[:4]!r}') from error


def _values(entry: Any) -> Sequence[Any]:
  values: Sequence[Any] = getattr(entry.value, entry.value.WhichOneof('kind') or 'int64_list').value
  return values


def encode(features: Mapping[str, bytes | int | Sequence[int] | Sequence[bytes]]) -> bytes:
  """Returns a `tf.Example` record with one value or a list per feature, in this order."""
  record = _messages()['Example']()
  for name, value in features.items():
    entry = record.features.feature.add(key=name)
    if isinstance(value, bytes):
      entry.value.bytes_list.value.append(value)
    elif not isinstance(value, int) and value and isinstance(value[0], bytes):
      entry.value.bytes_list.value.extend(value)
    else:
      entry.value.int64_list.value.extend([value] if isinstance(value, int) else value)
  content: bytes = record.SerializeToString()
  return content


def first(features: Mapping[str, Sequence[Any]], name: str) -> bytes | int | float:
  """Returns the first value of a feature. Raises BadRecord if there is none."""
  values = features.get(name)
  if not values:
    got = documents.listed(sorted(features), _LISTED) or 'no features'
    raise BadRecord(f'the record: expected the feature {name!r}, got {got}')
  value: bytes | int | float = values[0]
  return value


def encoded(features: Mapping[str, Sequence[Any]], name: str) -> bytes:
  """Returns the first value of a feature. Raises BadRecord if there is none, or it is a number."""
  value = first(features, name)
  if not isinstance(value, bytes):
    raise BadRecord(f'the record: expected bytes in the feature {name!r}, got a number')
  return value


def label(features: Mapping[str, Sequence[Any]], name: str, num_classes: int) -> int:
  """Returns the first value of a feature, a class.

  Raises:
    BadRecord: there is none.
    BadLabel: one of the values is not a class below `num_classes`.
  """
  first(features, name)
  return classes(features, name, num_classes)[0]


def classes(features: Mapping[str, Sequence[Any]], name: str, num_classes: int) -> list[int]:
  """Returns the values of a feature, which are classes; [] if the record does not have the feature.

  Raises:
    BadLabel: one of the values is not a class below `num_classes`.
  """
  values = list(features.get(name, ()))
  for value in values:
    if not isinstance(value, int) or not 0 <= value < num_classes:
      raise BadLabel(name, value, num_classes)
  return values


@functools.cache
def _messages() -> dict[str, Any]:
  """Returns the message classes `Example` and `Entry`.

  The map of features is declared as a list of entries (name and value), which keeps their order.
  """
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
  return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f'vit_jax.{name}'))
          for name in ('Example', 'Entry')}
