"""Some examples of a source, and where an example comes from."""
from __future__ import annotations

import pickle

import numpy as np

from vit_jax.config import schema
from vit_jax.data.source import Relabeled, Subset, find_origin, read_labels, take_first
from vit_jax.data.sources import opening

DIGITS = opening.open_split(schema.Data(source='digits'), 'test', image_px=(8, 8))


def test_a_subset_is_its_examples_in_its_order() -> None:
  some = Subset(DIGITS, [7, 3, 350], name='some')
  assert len(some) == 3 and some.class_names == DIGITS.class_names and some.name == 'some'
  for i, place in enumerate((7, 3, 350)):
    assert (some[i].image == DIGITS[place].image).all() and some.label(i) == some[i].label == DIGITS.label(place)
    assert some.describe(i) == DIGITS.describe(place)
  digests = {DIGITS.digest, some.digest, Subset(DIGITS, [3, 7, 350], name='some').digest}
  assert len(digests) == 3 and pickle.loads(pickle.dumps(some)).digest == some.digest


def test_the_first_examples_or_all() -> None:
  assert take_first(DIGITS, 0) is DIGITS and take_first(DIGITS, 360) is DIGITS
  assert len(take_first(DIGITS, 5)) == 5 and take_first(DIGITS, 5).name == 'digits/test[:5]'
  np.testing.assert_array_equal(read_labels(take_first(DIGITS, 5)), [DIGITS.label(i) for i in range(5)])


def test_the_origin_of_an_example_is_behind_parts_subsets_and_new_labels() -> None:
  parts = opening.open_split(schema.Data(source='digits'), 'test[10:20]+test[40:50]', image_px=(8, 8))
  relabeled = Relabeled(parts, np.arange(10, dtype=np.int32)[::-1].copy(), DIGITS.class_names)
  some = Subset(relabeled, [12, 2], name='some')
  assert find_origin(some, 0) == (DIGITS, 42) and find_origin(some, 1) == (DIGITS, 12)
  assert some.label(0) == 9 - DIGITS.label(42)
