"""Which classes of a network those of a source are."""
from __future__ import annotations

import json
import pathlib

import pytest

from vit_jax.core.errors import UserError
from vit_jax.data.labels import classes

NETWORK = ('n01 tench', 'n02 crane, bird', 'n03 crane', 'n04 analog clock', 'n05 digital clock')


def find(own: tuple[str, ...], path: str = '') -> classes.Targets:
  return classes.map_classes(own, NETWORK, path=path, where='evals.a')


def write(tmp_path: pathlib.Path, text: str) -> str:
  path = tmp_path / 'map'
  path.write_text(text)
  return str(path)


def test_names_that_are_the_same_are_the_same_classes() -> None:
  assert find(NETWORK) == ((0,), (1,), (2,), (3,), (4,))


def test_some_of_the_classes_are_found_by_name_or_number() -> None:
  assert find(('n03', 'n01')) == ((2,), (0,))
  assert find(('0', '10', '2')[::2]) == ((0,), (2,))


def test_numbers_are_the_names_of_a_network_whose_classes_are_other_numbers(tmp_path: pathlib.Path) -> None:
  def numbers(own: tuple[str, ...], network: tuple[str, ...], path: str = '') -> classes.Targets:
    return classes.map_classes(own, network, path=path, where='evals.a')
  assert numbers(('1', '2'), ('1', '2', '3')) == ((0,), (1,))
  assert numbers(('1', '0'), ('00', '01', '02')) == ((1,), (0,))
  assert numbers(('a', 'b'), ('1', '2', '3'), write(tmp_path, 'a: 1; 2\nb: 3\n')) == ((0, 1), (2,))
  with pytest.raises(UserError, match="got 1 of 2 that are not there: 0. It has 3 lines such as '1'"):
    numbers(('0', '1'), ('1', '2', '3'))


@pytest.mark.parametrize('text', [
    'alarm_clock: n04; digital clock\n# a comment\n\nbench: \nfish: 0\n',
    json.dumps({'alarm_clock': 'analog clock; n05', 'fish': 'tench'})])
def test_a_file_may_name_several_classes_or_none(text: str, tmp_path: pathlib.Path) -> None:
  assert find(('alarm_clock', 'bench', 'fish'), write(tmp_path, text)) == ((3, 4), (), (0,))


@pytest.mark.parametrize(('own', 'text', 'message'), [
    (('n01', 'n09'), '', 'expected classes of the network of evals.a, got 1 of 2 that are not there: n09'),
    (('n01', 'n02', 'n01'), '', 'evals.a: expected each class of the source once, got n01 twice'),
    (('fish',), 'fish: tench\nbird: crane\n', 'classes of the source, which has 1 such as .fish., got 1 others: bird'),
    (('fish',), 'fish: shark\n', 'expected classes of the network, in .*, got 1 of 1 that are not there: shark'),
    (('fish',), 'fish: tench\nfish: n01\n', 'expected one line for each class of the source, got fish twice'),
    (('fish',), 'fish tench\n', "expected lines such as `alarm_clock: n02708093; n03196217`, got 'fish tench'"),
    (('fish',), '# nothing\n', 'expected one line for each class of the source, got none'),
    (('fish',), '{"fish": ', 'expected JSON, got no JSON at line 1, column 9')])
def test_what_does_not_fit_is_named(own: tuple[str, ...], text: str, message: str, tmp_path: pathlib.Path) -> None:
  with pytest.raises(UserError, match=message):
    find(own, write(tmp_path, text) if text else '')


def test_a_file_that_is_not_there_is_refused() -> None:
  with pytest.raises(UserError, match='/nowhere/map: expected a text file, got "No such file'):
    find(('fish',), '/nowhere/map')
