"""Records of named features, against TFDS's own writer and by hand."""
from __future__ import annotations

import pytest

from vit_jax.data.formats import example


def test_what_is_encoded_comes_back() -> None:
  for label in (0, 1, 127, 128, 18_291, 2**40, -1, -300):
    found = example.parse(example.serialize({'image': bytes(range(256)) * 3, 'label': label, 'näme': b''}))
    assert found == {'image': [bytes(range(256)) * 3], 'label': [label], 'näme': [b'']}


def test_a_record_by_hand_is_read() -> None:
  # One feature `a` with the packed numbers 3, 270; one `b` with unpacked 3; one `c` with the float 1.
  ints = b'\x0a\x01a\x12\x07\x1a\x05\x0a\x03\x03\x8e\x02'
  loose = b'\x0a\x01b\x12\x04\x1a\x02\x08\x03'
  floats = b'\x0a\x01c\x12\x08\x12\x06\x0a\x04\x00\x00\x80\x3f'
  entries = b''.join(b'\x0a' + bytes([len(e)]) + e for e in (ints, loose, floats))
  assert example.parse(b'\x0a' + bytes([len(entries)]) + entries) == {'a': [3, 270], 'b': [3], 'c': [1.]}


def test_it_is_the_format_of_tensorflow_datasets() -> None:
  pb2 = pytest.importorskip('tensorflow_datasets.proto.tf_example_generated_pb2')
  message = pb2.Example()
  message.ParseFromString(example.serialize({'image': b'abc', 'label': 300}))
  assert list(message.features.feature['image'].bytes_list.value) == [b'abc']
  assert list(message.features.feature['label'].int64_list.value) == [300]
  assert example.parse(message.SerializeToString()) == {'image': [b'abc'], 'label': [300]}


@pytest.mark.parametrize('record', [b'\x0a\x05ab', b'\xff', b'\x0b\x00', b'no record at all'])
def test_bytes_of_another_format_are_a_bad_record(record: bytes) -> None:
  with pytest.raises(example.BadRecord, match='not a tf.Example record: '):
    example.parse(record)


def test_a_record_without_a_needed_feature_is_bad() -> None:
  for record, found in ((b'\x08\x01', 'no features'), (example.serialize({'label': 3, 'name': b'x'}), 'label, name')):
    with pytest.raises(example.BadRecord, match=f"expected the feature 'image', got {found}"):
      example.get_first(example.parse(record), 'image')


def test_a_feature_without_values_is_not_called_missing() -> None:
  record = example.serialize({'image': [], 'label': 3})
  with pytest.raises(example.BadRecord, match=r"expected a value in the feature 'image', got none$"):
    example.get_bytes(example.pick(record, 'image'), 'image')
  assert list(example.pick(record, 'label', 'label')) == ['label']
