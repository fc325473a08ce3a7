"""Names of the classes of ImageNet."""
from __future__ import annotations

import re

import pytest

from vit_jax.data.labels import imagenet


@pytest.mark.parametrize('count', [1_000, 21_843])
def test_classes_are_ordered_by_wordnet_id_and_no_two_names_are_alike(count: int) -> None:
  found = imagenet.by_count(count)
  assert found is not None and len(found.ids) == len(found.names) == count
  assert list(found.ids) == sorted({*found.ids}) and all(re.fullmatch(r'n\d{8}', one) for one in found.ids)
  assert len({name.casefold() for name in found.names}) == count and all(name.strip() == name for name in found.names)


def test_known_classes_have_their_numbers() -> None:
  small, large = imagenet.by_count(1_000), imagenet.by_count(21_843)
  assert small and large and (small.title, large.title) == ('ImageNet-1k', 'ImageNet-21k')
  named = {0: 'tench', 134: 'crane (bird)', 281: 'tabby', 517: 'crane (machine)', 999: 'toilet tissue'}
  assert {i: small.names[i] for i in named} == named
  assert {*small.ids} - {*large.ids} == {'n04399382'}  # teddy, which ImageNet-21k lacks
  assert [large.names[i] for i in (0, 21_842)] == ['organism', 'knothole']


def test_other_numbers_of_classes_have_no_names() -> None:
  assert imagenet.by_count(10) is None and imagenet.by_count(0) is None
