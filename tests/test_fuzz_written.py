"""Files that the program wrote and that were damaged are read as they were, or refused with a message, in every job."""
from __future__ import annotations

import pathlib
import sys

import pytest

from tests import fuzz_written, fuzzing

linux = pytest.mark.skipif(sys.platform != 'linux', reason='limits memory as Linux does')
CASES, FEW = 1_000, 36
QUICK = ('record', 'store', 'study', 'plan', 'unfinished', 'sidecars', 'embedded_a.npz', 'kept_wds')


def run(kind: str, num: int, home: pathlib.Path) -> list[fuzzing.Result]:
  if 'parquet' in kind or kind == 'unfinished':
    pytest.importorskip('pyarrow')
  found = fuzzing.run('tests.fuzz_written', kind, 0, num, home=home)
  assert len(found) == num
  for one in found:
    assert 'error' not in one, f'case {one["number"]}, {one["file"]}: {one["error"]}'
    fuzzing.check_words(one.get('refused', ''))
  return found


@linux
@pytest.mark.timeout(700)
@pytest.mark.slow(reason='1,000 cases of each kind, up to 4 minutes for reports')
@pytest.mark.parametrize('kind', fuzz_written.KINDS)
def test_a_thousand_damaged_files_are_read_or_refused(kind: str, tmp_path: pathlib.Path) -> None:
  found = run(kind, CASES, tmp_path)
  assert max(one['cpu_s'] for one in found) < fuzzing.CPU_S


@linux
@pytest.mark.parametrize('kind', QUICK)
def test_some_damaged_files_are_read_or_refused(kind: str, tmp_path: pathlib.Path) -> None:
  """Without those of a run, which must be trained first."""
  run(kind, FEW, tmp_path)
