"""`tf.train.Example` messages, parsed by protobuf without TensorFlow: their schema is declared here.

`data/prepare.py` writes records with `serialize`. Readers are `array_record.py`, `tfrecord.py` and `tfds.py`, with
subclasses in `masks.py` and `vtab.py`. They parse a record with `pick` or `parse`, or one entry with `parse_entry`, and
then take values of features with `get_first`, `get_bytes`, `get_class` or `get_classes`. A damaged record raises
`BadRecord`. This module reads no files, and does not depend on the names of features.

A record is a message `Example` (tensorflow/core/example/example.proto and feature.proto), a map of features by name:

  Example   features: Features, which have a map of names to `Feature`
  Feature   one of bytes_list, float_list and int64_list, each with repeated `value`

In place of the map, `_messages` declares a list of messages `Entry` with `key` and `value`. The bytes are the same, and
the list keeps the order of the features.
"""
from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from vit_jax.core import documents, lazy
from vit_jax.data.image.headers import BadImage

if TYPE_CHECKING:
  from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory
else:
  descriptor_pb2, descriptor_pool, message, message_factory = (
      lazy.Module(f'google.protobuf.{name}') for name in ('descriptor_pb2', 'descriptor_pool', 'message',
                                                          'message_factory'))

Values = list[bytes] | list[int] | list[float]
"""The values of a feature."""
_MAX_SHOWN = 20  # features in an error message


class BadRecord(BadImage):
  """A record is damaged or incomplete; the example counts as an image that cannot be decoded."""


class BadLabel(BadRecord):
  """A class of a record is out of range; `found` describes the class in an error message."""

  def __init__(self, name: str, value: bytes | int | float, num_classes: int) -> None:
    self.found = f'the label {value}' if isinstance(value, int) else 'a label that is not a whole number'
    super().__init__(f'the record: expected classes from 0 to {num_classes - 1:,} in the feature {name!r}, got '
                     f'{self.found}')


def parse(record: bytes) -> dict[str, Values]:
  """Returns the features of a record by name. Raises BadRecord if it is truncated, or has another format."""
  return {entry.key: list(_values(entry)) for entry in _parse_message(record, 'Example').features.feature}


def parse_entry(record: bytes) -> list[Any]:
  """Returns the values of one feature, given the bytes of its `Entry`. Raises BadRecord as `parse`."""
  return list(_values(_parse_message(record, 'Entry')))


def pick(record: bytes, *names: str) -> Mapping[str, Sequence[Any]]:
  """Returns the features `names` of a record by name, faster than `parse`.

  Returns all features if one of the names is missing, so that an error can list them. Raises BadRecord as `parse`.
  """
  entries = _parse_message(record, 'Example').features.feature
  picked = {entry.key: _values(entry) for entry in entries if entry.key in names}
  return picked if len(picked) == len(set(names)) else parse(record)


def _parse_message(record: bytes, name: str) -> Any:
  """Returns the message in a record; `name` is `Example` or `Entry`. Raises BadRecord if the format is another."""
  try:
    return _messages()[name].FromString(record)
  except message.DecodeError as error:
    raise BadRecord(f'not a tf.Example record: {len(record):,} bytes, starting with {record[:4]!r}') from error


def _values(entry: Any) -> Sequence[Any]:
  """Returns the values of an entry without a copy; the values are valid as long as the message of the entry."""
  kind = entry.value.WhichOneof('kind') or 'int64_list'  # without a kind the feature has no values: any list is empty
  return cast(Sequence[Any], getattr(entry.value, kind).value)


def serialize(features: Mapping[str, bytes | int | Sequence[int] | Sequence[bytes]]) -> bytes:
  """Returns a record with these features, in this order: one value or a list of values each."""
  record = _messages()['Example']()
  for name, value in features.items():
    feature = record.features.feature.add(key=name).value
    match value:
      case bytes():
        feature.bytes_list.value.append(value)
      case int():
        feature.int64_list.value.append(value)
      case [bytes(), *_]:
        feature.bytes_list.value.extend(value)
      case _:
        feature.int64_list.value.extend(value)
  return cast(bytes, record.SerializeToString())


def get_first(features: Mapping[str, Sequence[Any]], name: str) -> bytes | int | float:
  """Returns the first value of a feature. Raises BadRecord if there is no value."""
  if name not in features:
    names = documents.listed(sorted(features), _MAX_SHOWN) or 'no features'
    raise BadRecord(f'the record: expected the feature {name!r}, got {names}')
  if not features[name]:
    raise BadRecord(f'the record: expected a value in the feature {name!r}, got none')
  return cast(bytes | int | float, features[name][0])


def get_bytes(features: Mapping[str, Sequence[Any]], name: str) -> bytes:
  """Returns the first value of a feature. Raises BadRecord if there is no value, or the value is a number."""
  value = get_first(features, name)
  if not isinstance(value, bytes):
    raise BadRecord(f'the record: expected bytes in the feature {name!r}, got a number')
  return value


def get_class(features: Mapping[str, Sequence[Any]], name: str, *, num_classes: int) -> int:
  """Returns the first value of a feature, which is a class.

  Raises BadRecord if there is no value, and BadLabel if one of the values is not a class below `num_classes`.
  """
  get_first(features, name)  # raises BadRecord if there is no value
  return get_classes(features, name, num_classes=num_classes)[0]


def get_classes(features: Mapping[str, Sequence[Any]], name: str, *, num_classes: int) -> list[int]:
  """Returns the values of a feature, which are classes; [] if the record does not have the feature.

  Raises BadLabel if one of the values is not a class below `num_classes`.
  """
  values = list(features.get(name, ()))
  for value in values:
    if not isinstance(value, int) or not 0 <= value < num_classes:
      raise BadLabel(name, value, num_classes)
  return values


@functools.cache
def _messages() -> dict[str, Any]:
  """Returns the message classes `Example` and `Entry`."""
  file = descriptor_pb2.FileDescriptorProto(name='vit_jax_example.proto', package='vit_jax', syntax='proto3')
  field = descriptor_pb2.FieldDescriptorProto
  _declare(file, 'BytesList', value=[field.TYPE_BYTES])
  _declare(file, 'FloatList', value=[field.TYPE_FLOAT])
  _declare(file, 'Int64List', value=[field.TYPE_INT64])
  feature = _declare(file, 'Feature', bytes_list='BytesList', float_list='FloatList', int64_list='Int64List')
  feature.oneof_decl.add(name='kind')
  for field_of_feature in feature.field:  # all three fields belong to the oneof
    field_of_feature.oneof_index = 0
  _declare(file, 'Entry', key=field.TYPE_STRING, value='Feature')
  _declare(file, 'Features', feature=['Entry'])
  _declare(file, 'Example', features='Features')
  pool = descriptor_pool.DescriptorPool()
  pool.Add(file)
  return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f'vit_jax.{name}'))
          for name in ('Example', 'Entry')}


def _declare(file: Any, name: str, **fields: Any) -> Any:
  """Adds the declaration of a message to a file, and returns it. The fields get the numbers 1, 2 and so on.

  `fields` has the type of each field: a number of protobuf, or the name of another message; in a list if the field is
  repeated.
  """
  declared = file.message_type.add(name=name)
  for number, (key, field_type) in enumerate(fields.items(), 1):
    is_repeated = isinstance(field_type, list)
    field = declared.field.add(name=key, number=number)
    field.label = field.LABEL_REPEATED if is_repeated else field.LABEL_OPTIONAL
    if is_repeated:
      field_type = field_type[0]
    if isinstance(field_type, str):
      field.type = field.TYPE_MESSAGE
      field.type_name = f'.vit_jax.{field_type}'
    else:
      field.type = field_type
  return declared
