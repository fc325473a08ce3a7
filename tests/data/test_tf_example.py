"""Records of named features, against TFDS's own writer and by hand."""
from __future__ import annotations

import pytest

from vit_jax.data.sources import tf_example


def test_what_is_encoded_comes_back() -> None:
  for label in (0, 1, 127, 128, 18_291, 2**40, -1, -300):
    found = tf_example.parse(tf_example.encode({'image': bytes(range(256)) * 3, 'label': label, 'näme': b''}))
    assert found == {'image': [bytes(range(256)) * 3], 'label': [label], 'näme': [b'']}


def test_a_record_by_hand_is_read() -> None:
  # One feature `a` with the packed numbers 3, 270; one `b` with unpacked 3; one `c` with the float 1.
  ints = b'\x0a\x01a\x12\x07\x1a\x05\x0a\x03\x03\x8e\x02'
  loose = b'\x0a\x01b\x12\x04\x1a\x02\x08\x03'
  floats = b'\x0a\x01c\x12\x08\x12\x06\x0a\x04\x00\x00\x80\x3f'
  entries = b''.join(b'\x0a' + bytes([len(e)]) + e for e in (ints, loose, floats))
  assert tf_example.parse(b'\x0a' + bytes([len(entries)]) + entries) == {'a': [3, 270], 'b': [3], 'c': [1.]}


def test_it_is_the_format_of_tensorflow_datasets() -> None:
  pb2 = pytest.importorskip('tensorflow_datasets.proto.tf_example_generated_pb2')
  message = pb2.Example()
  message.ParseFromString(tf_example.encode({'image': b'abc', 'label': 300}))
  assert list(message.features.feature['image'].bytes_list.value) == [b'abc']
  assert list(message.features.feature['label'].int64_list.value) == [300]
  assert tf_example.parse(message.SerializeToString()) == {'image': [b'abc'], 'label': [300]}


@pytest.mark.parametrize('record', [b'\x0a\x05ab', b'\xff', b'\x0b\x00', b'\x08\x01', b'no record at all'])
def test_what_is_no_record_is_refused(record: bytes) -> None:
  with pytest.raises(tf_example.BadRecord, match='no record of named features in'):
    tf_example.parse(record)
