"""Parts of sources: slices, subsets, other numbers of classes, and where an example comes from."""
from __future__ import annotations

import hashlib
import pickle

import numpy as np
import pytest

from vit_jax.config import schema
from vit_jax.data import opening
from vit_jax.data.image.headers import BadImage
from vit_jax.data.source import (
  Part,
  Parts,
  Record,
  Rows,
  find_origin,
  first_label,
  has_captions,
  origins,
  read_labels,
  read_one,
  take,
  take_first,
)

DIGITS = opening.open_split(schema.Data(source='digits'), 'test', image_px=(8, 8))


def test_a_subset_is_its_examples_in_its_order() -> None:
  some = take(DIGITS, [7, 3, 350], name='some')
  assert len(some) == 3 and some.class_names == DIGITS.class_names and some.name == 'some'
  for i, place in enumerate((7, 3, 350)):
    assert (read_one(some, i).image == read_one(DIGITS, place).image).all()
    assert some.labels(i) == read_one(some, i).labels == DIGITS.labels(place)
    assert some.describe(i) == DIGITS.describe(place)
  digests = {DIGITS.digest, some.digest, take(DIGITS, [3, 7, 350], name='some').digest}
  assert len(digests) == 3 and pickle.loads(pickle.dumps(some)).digest == some.digest


def test_the_first_examples_or_all() -> None:
  assert take_first(DIGITS, 0) is DIGITS and take_first(DIGITS, 360) is DIGITS
  assert len(take_first(DIGITS, 5)) == 5 and take_first(DIGITS, 5).name == 'digits/test[:5]'
  np.testing.assert_array_equal(read_labels(take_first(DIGITS, 5)), [first_label(DIGITS, i) for i in range(5)])


def test_the_origin_of_an_example_is_behind_parts_subsets_and_new_labels() -> None:
  parts = opening.open_split(schema.Data(source='digits'), 'test[10:20]+test[40:50]', image_px=(8, 8))
  relabeled = Parts([Part(parts, labels=tuple(range(10))[::-1])], class_names=DIGITS.class_names)
  some = take(relabeled, [12, 2], name='some')
  assert find_origin(some, 0) == (DIGITS, 42) and find_origin(some, 1) == (DIGITS, 12)
  assert first_label(some, 0) == 9 - first_label(DIGITS, 42)

class Numbered(Rows):
  """Examples that are their numbers, with two classes and a text; number 2 is damaged."""
  name, digest, class_names, most_labels = 'numbered', 'x', ('a', 'b', 'c'), 2

  def __len__(self) -> int:
    return 5

  def example(self, row: int) -> Record:
    if row == 2:
      raise BadImage('damaged')
    return Record(b'%d' % row, self.labels(row))

  def labels(self, row: int) -> tuple[int, ...]:
    return row % 3, (row + 1) % 3

  def captions(self, row: int) -> tuple[str, ...]:
    return (f'text {row}',)

  def describe(self, row: int) -> str:
    return f'number {row}'


def test_parts_of_several_sources_are_read_in_any_order_with_their_own_numbers_of_classes() -> None:
  one = Numbered()
  both = Parts([Part(one, range(3, 5)), Part(DIGITS, np.array([7, 1]), tuple(range(10))[::-1]),
                Part(one, labels=(2, 0, 1))])
  assert len(both) == 9 and both.most_labels == 2
  rows = [4, 2, 0, 5, 1, 3]
  found = list(both.read(rows))
  assert [record.labels for record in found] == [both.labels(row) for row in rows]
  assert [record.image for record in found[:3:2]] == [b'0', b'3'] and found[3].image == b'1'
  assert found[0].labels == (2, 0) and found[1].labels == (9 - first_label(DIGITS, 7),)
  assert both.captions(1) == ('text 4',) and both.captions(2) == () and both.describe(8) == 'number 4'
  assert origins(both) == [one, DIGITS] and has_captions(one) and not has_captions(DIGITS)
  stream = both.read([5, 6, 7])
  assert next(stream).image == b'1'
  with pytest.raises(BadImage, match='damaged'):
    next(stream)
  assert [record.image for record in both.read([7, 8])] == [b'3', b'4']
  with pytest.raises(IndexError, match='expected an index below 9, got 9'):
    both.labels(9)


def test_the_digests_of_parts_are_those_of_earlier_versions() -> None:
  def sha(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()
  rows, labels = np.array([3, 7]), tuple(range(10))[::-1]
  own = DIGITS.digest
  relabeled = sha(f'{own} {list(labels)}'.encode())
  assert take(DIGITS, rows, name='x').digest == sha(own.encode() + rows.tobytes())
  assert Parts([Part(DIGITS, labels=labels)]).digest == relabeled
  assert Parts([Part(DIGITS, range(2, 9))]).digest == sha(f'{own}[2:9]'.encode())
  assert Parts([Part(DIGITS, range(9)), Part(DIGITS, labels=labels)]).digest == sha(
      f'{own}[0:9] {relabeled}[0:360]'.encode())
