"""Adapters, configs, tokenizers and names of classes that are damaged are read, or refused with a message."""
from __future__ import annotations

import pathlib

import pytest

from tests import fuzz_files, fuzzing

FEW = 30


def run(kind: str, home: pathlib.Path, num: int) -> list[fuzzing.Result]:
  return fuzzing.run('tests.fuzz_files', kind, 0, num, home=home)


def check(kind: str, found: list[fuzzing.Result], num: int) -> None:
  if kind not in ('config_python', 'adapter'):
    fuzzing.check(found, num)
    return
  assert len(found) == num
  for one in found:
    assert 'error' not in one, one
    text = one.get('refused', '').replace('\n', '')
    if 'refused' not in one or 'cannot be used: ' in text and kind == 'adapter':  # which lists tensors
      assert text.isprintable() and not fuzzing.PYTHON_WORDS.search(text), one
    elif kind == 'adapter':
      fuzzing.check_message(one['refused'])
    else:  # of Python, for the author of the code
      assert 'expected' in text and 'Traceback' not in text and text.isprintable(), one


@pytest.mark.timeout(700)
@pytest.mark.slow(reason='up to 60 s of CPU for 2,000 files of each kind')
@pytest.mark.parametrize('kind', fuzz_files.KINDS)
def test_thousands_of_mutated_files_are_read_or_refused_with_a_reason(kind: str, tmp_path: pathlib.Path) -> None:
  found = run(kind, tmp_path, fuzzing.CASES)
  check(kind, found, fuzzing.CASES)
  assert sum('read' in one for one in found) > 20 and sum('refused' in one for one in found) > 100
  assert sum(one['cpu_s'] for one in found) < 60


@pytest.mark.parametrize('kind', ['config_json', 'classes'])
def test_some_mutated_files_are_read_or_refused(kind: str, tmp_path: pathlib.Path) -> None:
  """The kinds that need no jax; what is read and refused of the others has tests of its own."""
  check(kind, run(kind, tmp_path, FEW), FEW)
