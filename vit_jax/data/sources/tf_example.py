"""Records of named features, in the wire format of TensorFlow's `tf.Example`, without TensorFlow or protobuf.

  Example = {1: Features}, Features = {1: entry, ...}, entry = {1: name, 2: Feature}, and a Feature holds one list:
  {1: bytes}, {2: f32} or {3: int64}. Numbers may be packed into one field, or come one a field.
"""
from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence

from vit_jax.data.image.headers import BadImage

Values = list[bytes] | list[int] | list[float]
_BYTES = 2  # wire type
_LIST_OF_BYTES, _LIST_OF_FLOATS = 1, 2


class BadRecord(BadImage):
  """These bytes are not a record, or not a whole one: it counts as an image that cannot be decoded."""


def parse(record: bytes) -> dict[str, Values]:
  """The features of a record by name.

  Raises:
    BadRecord: not in this format, or cut short.
  """
  found: dict[str, Values] = {}
  try:
    for _, features in _fields(memoryview(record)):
      for _, entry in _fields(features):
        parts = dict(_fields(entry))
        found[bytes(parts[1]).decode()] = _values(parts.get(2, memoryview(b'')))
  except (IndexError, KeyError, TypeError, UnicodeDecodeError, struct.error) as error:
    raise BadRecord(f'no record of named features in {len(record):,} bytes, beginning {record[:4]!r}') from error
  return found


def first(features: Mapping[str, Values], name: str) -> bytes | int | float:
  """The first value of a feature. Raises BadRecord where there is none."""
  if not features.get(name):
    raise BadRecord(f'the record has no {name!r}, but {", ".join(sorted(features)) or "nothing"}')
  return features[name][0]


def integers(features: Mapping[str, Values], name: str) -> list[int]:
  """The values of a feature, which may have none; a record without the feature is one with none."""
  return [int(value) for value in features.get(name, [])]


def encode(features: Mapping[str, bytes | int | Sequence[int]]) -> bytes:
  """A record with one value a feature, or a list of integers: `parse` gives both back as lists."""
  entries = []
  for name, value in features.items():
    if isinstance(value, bytes):
      feature = _delimited(1, _delimited(1, value))
    else:
      numbers = [value] if isinstance(value, int) else value
      feature = _delimited(3, _delimited(1, b''.join(_varint(number % 2**64) for number in numbers)))
    entries.append(_delimited(1, _delimited(1, name.encode()) + _delimited(2, feature)))
  return _delimited(1, b''.join(entries))


def _values(feature: memoryview) -> Values:
  for kind, held in _fields(feature):
    items = [value for _, value in _fields(held)]
    if kind == _LIST_OF_BYTES:
      return [bytes(item) for item in items]
    if kind == _LIST_OF_FLOATS:
      return [x for item in items for x in struct.unpack(f'<{len(item) // 4}f', item)]
    return [_signed(x) for item in items for x in ([item] if isinstance(item, int) else _numbers(item))]
  return []


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview]]:
  """Field numbers and contents of a message; a varint's content is an int, typed as what all others are."""
  place = 0
  while place < len(message):
    tag, place = _read_varint(message, place)
    match tag & 7:
      case 0:
        value, place = _read_varint(message, place)
        yield tag >> 3, value  # type: ignore[misc]
        continue
      case 1:
        size = 8
      case 5:
        size = 4
      case 2:
        size, place = _read_varint(message, place)
      case _:
        raise KeyError(tag)
    if place + size > len(message):
      raise IndexError(place + size)
    yield tag >> 3, message[place:place + size]
    place += size


def _numbers(packed: memoryview) -> Iterator[int]:
  place = 0
  while place < len(packed):
    value, place = _read_varint(packed, place)
    yield value


def _read_varint(message: memoryview, place: int) -> tuple[int, int]:
  value = shift = 0
  while True:
    byte = message[place]
    value |= (byte & 0x7F) << shift
    place, shift = place + 1, shift + 7
    if byte < 0x80:
      return value, place


def _signed(value: int) -> int:
  return value - 2**64 if value >= 2**63 else value


def _varint(value: int) -> bytes:
  out = bytearray()
  while value >= 0x80:
    out.append(value & 0x7F | 0x80)
    value >>= 7
  return bytes([*out, value])


def _delimited(number: int, content: bytes) -> bytes:
  return _varint(number << 3 | _BYTES) + _varint(len(content)) + content
