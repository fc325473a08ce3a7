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


NAMES = imagenet.by_count(1_000)


def test_outputs_are_those_of_the_set_if_the_data_have_wordnet_ids_and_names_agree() -> None:
  assert NAMES is not None and NAMES.lines()[0] == 'n01440764 tench'
  published = tuple(f'{name.partition(" (")[0]}, a synonym' for name in NAMES.names)
  own = ('n01440764', 'n02123045')
  assert imagenet.by_ids(own, 1_000, ()) == imagenet.by_ids(own, 1_000, published) == NAMES
  assert imagenet.by_ids((*own, 'cat'), 1_000, ()) == NAMES  # who matches the classes refuses cat by its name


@pytest.mark.parametrize(('own', 'count', 'names'), [
    (('cat', 'dog'), 1_000, ()), (('n01440764',), 10, ()), (('n01440764',), 1_000, [str(i) for i in range(1_000)]),
    (('n01440764',), 1_000, NAMES and NAMES.names[::-1]), (('n01440764',), 1_000, NAMES and NAMES.lines())],
    ids=['names', 'other outputs', 'other classes', 'other order', 'ids of its own'])
def test_other_outputs_are_not_taken_for_those_of_the_set(own: tuple[str, ...], count: int, names: list[str]) -> None:
  assert imagenet.by_ids(own, count, names) is None
