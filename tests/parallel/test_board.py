"""Texts that processes show each other: of one process, and through a coordination service that may be away."""
from __future__ import annotations

import pytest

from vit_jax.parallel import board


class Service:
  """Stands in for the client of jax's coordination service, with its names and its error for a missing key."""

  def __init__(self) -> None:
    self.texts: dict[str, str] = {}
    self.is_away = False

  def key_value_set(self, name: str, text: str, allow_overwrite: bool = False) -> None:
    self._check()
    assert allow_overwrite or name not in self.texts
    self.texts[name] = text

  def key_value_try_get(self, name: str) -> str:
    self._check()
    if name not in self.texts:
      raise RuntimeError(f'NOT_FOUND: {name}')
    return self.texts[name]

  def key_value_dir_get(self, folder: str) -> list[tuple[str, str]]:
    self._check()
    return [(name, text) for name, text in self.texts.items() if name.startswith(folder)]

  def key_value_delete(self, folder: str) -> None:
    self._check()
    self.texts = {name: text for name, text in self.texts.items() if not name.startswith(folder)}

  def _check(self) -> None:
    if self.is_away:
      raise RuntimeError('UNAVAILABLE')


@pytest.mark.parametrize('one', [board.Board(), board.Shared(Service())])
def test_texts_are_found_by_name_and_by_folder_until_they_are_removed(one: board.Board) -> None:
  assert one.get('a/1') == '' and one.all('a') == {}
  one.put('a/1', 'x')
  one.put('a/1', 'y')
  one.put('a/2/z', 'w')
  one.put('ab/1', 'v')
  assert one.get('a/1') == 'y' and one.all('a') == {'1': 'y', '2/z': 'w'}
  one.remove('a')
  assert one.all('a') == {} and one.get('ab/1') == 'v'


def test_a_service_that_is_away_ends_nothing() -> None:
  service = Service()
  one = board.Shared(service)
  one.put('a/1', 'x')
  service.is_away = True
  one.put('a/1', 'y')
  one.remove('a')
  assert one.get('a/1') == '' and one.all('a') == {}
  service.is_away = False
  assert one.get('a/1') == 'x'
