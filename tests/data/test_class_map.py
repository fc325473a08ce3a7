"""Which classes of a network those of a source are."""
from __future__ import annotations

import json
import pathlib

import pytest

from vit_jax.core.errors import UserError
from vit_jax.data.sources import class_map

NETWORK = ('n01 tench', 'n02 crane, bird', 'n03 crane', 'n04 analog clock', 'n05 digital clock')


def find(own: tuple[str, ...], path: str = '') -> class_map.Targets:
  return class_map.find(own, NETWORK, path=path, where='evals.a')


def write(tmp_path: pathlib.Path, text: str) -> str:
  path = tmp_path / 'map'
  path.write_text(text)
  return str(path)


def test_names_that_are_the_same_are_the_same_classes() -> None:
  assert find(NETWORK) == ((0,), (1,), (2,), (3,), (4,))


def test_some_of_the_classes_are_found_by_name_or_number() -> None:
  assert find(('n03', 'n01')) == ((2,), (0,))
  assert find(('0', '10', '2')[::2]) == ((0,), (2,))


@pytest.mark.parametrize('text', [
    'alarm_clock: n04; digital clock\n# a comment\n\nbench: \nfish: 0\n',
    json.dumps({'alarm_clock': 'analog clock; n05', 'fish': 'tench'})])
def test_a_file_may_name_several_classes_or_none(text: str, tmp_path: pathlib.Path) -> None:
  assert find(('alarm_clock', 'bench', 'fish'), write(tmp_path, text)) == ((3, 4), (), (0,))


@pytest.mark.parametrize(('own', 'text', 'message'), [
    (('n01', 'n09'), '', 'the classes of the data do not match those of the network, which evals.a is of: 1 of its 2'),
    (('n01', 'n02', 'n01'), '', 'evals.a: the source has the classes n01 twice; want each once'),
    (('fish',), 'fish: tench\nbird: crane\n', 'maps 1 classes that the source has not: bird; it has 1 such as .fish.'),
    (('fish',), 'fish: shark\n', 'do not match those of the network, in .*1 of its 1 classes are not there: shark'),
    (('fish',), 'fish: tench\nfish: n01\n', 'maps fish twice; want a line for each class of the source'),
    (('fish',), 'fish tench\n', "'fish tench' maps nothing; want lines such as `alarm_clock: n02708093; n03196217`"),
    (('fish',), '# nothing\n', 'maps nothing; want a line for each'), (('fish',), '{"fish": ', 'is no JSON')])
def test_what_does_not_fit_is_named(own: tuple[str, ...], text: str, message: str, tmp_path: pathlib.Path) -> None:
  with pytest.raises(UserError, match=message):
    find(own, write(tmp_path, text) if text else '')


def test_a_file_that_is_not_there_is_refused() -> None:
  with pytest.raises(UserError, match='/nowhere/map cannot be read'):
    find(('fish',), '/nowhere/map')
