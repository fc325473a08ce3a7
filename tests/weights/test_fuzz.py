"""Damaged and malicious weight files: each is loaded whole, or is an error with a reason; nothing else happens."""
from __future__ import annotations

import pathlib

import pytest

from tests import fuzzing
from tests.weights import fuzz
from vit_jax.core.errors import UserError
from vit_jax.weights import files

REASON = ('got ', 'cannot be used: ')


def tree(folder: pathlib.Path) -> list[str]:
  return sorted(str(path.relative_to(folder)) for path in folder.rglob('*'))


def run(tmp_path: pathlib.Path, first: int, last: int) -> list[dict]:
  """The results of cases, read in a process that may write into `tmp_path` alone, and should into its cache alone."""
  return fuzzing.run('tests.weights.fuzz', first, last, home=tmp_path, timeout_s=800.)


def check(results: list[dict], tmp_path: pathlib.Path) -> None:
  assert not [one for one in results if 'error' in one]
  for one in results:
    assert ('shapes' in one) != ('refused' in one), one
    if 'refused' in one:
      assert any(part in one['refused'] for part in REASON) and len(one['refused']) < 10_000, one
      assert one['refused'].replace('\n', '').isprintable(), one
    else:
      assert one['kept'], one  # what can be loaded may also be fetched
  outside = [name for folder in ('work', 'home', 'tmp') for name in tree(tmp_path / folder)]
  assert outside == []
  kept = {one['number'] for one in results if one['kept']}
  found = [path for path in (tmp_path / 'cache').rglob('*') if path.is_file()]
  assert {int(path.name.partition('-')[0]) for path in found if path.name[0].isdigit()} == kept
  assert {path.parent.parent for path in found} == {tmp_path / 'cache' / 'vit_jax' / 'weights'}


@pytest.mark.slow  # 2,000 files in about 60 s of CPU
def test_thousands_of_mutated_files_are_loaded_or_refused_with_a_reason(tmp_path: pathlib.Path) -> None:
  results = run(tmp_path, 0, fuzzing.CASES)
  assert len(results) == fuzzing.CASES
  check(results, tmp_path)
  for mutation in fuzz.MUTATIONS:  # each reaches the readers with every kind
    own = [one for one in results if one['mutation'] == mutation.__name__]
    assert {one['kind'] for one in own} == set(fuzz.KINDS) and any('refused' in one for one in own)
  loaded = [one for one in results if 'shapes' in one]
  assert len(loaded) > fuzzing.CASES // 50
  for one in loaded:
    if one['mutation'] not in ('tensors', 'networks', 'spliced', 'edited'):  # those name other networks
      assert one['shapes']['backbone/norm/scale'] == [8]
      assert one['shapes']['backbone/blocks/mlp/up/kernel'] == [2, 8, 12], one


def test_a_mutated_file_depends_on_its_number_alone(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  """Not on the time either, which zip files have."""
  monkeypatch.chdir(tmp_path)
  for number in range(0, 90, 7):
    fuzz.whole.cache_clear()
    kind, mutation, content = fuzz.case(number)
    fuzz.whole.cache_clear()
    with monkeypatch.context() as patch:
      patch.setattr('time.localtime', lambda *args: (2001, 2, 3, 4, 5, 6, 5, 34, 0))
      assert (kind, mutation, content) == fuzz.case(number)
    assert content != fuzz.whole(kind)
  assert not list(tmp_path.iterdir())


def test_some_mutated_files_are_read_or_refused(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  """The readers alone, without building networks; also cases that the slow test does not have."""
  monkeypatch.chdir(tmp_path)
  read = 0
  for number in range(5000, 5072):
    _, mutation, content = fuzz.case(number)
    (tmp_path / 'a').write_bytes(content)
    try:
      read += bool(files.read(tmp_path / 'a'))
    except UserError as error:
      assert 'got ' in str(error), (number, mutation)
  assert 5 <= read <= 40
