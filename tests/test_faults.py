"""Faults in phases of a run of two processes: it goes on by itself and ends with the bits of an undisturbed run."""
from __future__ import annotations

import pathlib
import subprocess
import sys

import faults
import pytest


@pytest.mark.parametrize(('statuses', 'what'), [
  ((0, 0), 'done'), ((75, -9), 'restart'), ((-9, 75), 'restart'), ((75, 75), 'restart'), ((134, 75), 'restart'),
  ((70, 70), 'restart'), ((2, 2), 'end'), ((2, 75), 'end')])
def test_all_launchers_do_the_same_after_the_end_of_the_processes(statuses: tuple[int, ...], what: str) -> None:
  found = faults.launchers(statuses)
  assert {found[name] for name in ('slurm', 'tpu_pod', 'k8s')} == {what}
  assert {'done': found['local'] == '0', 'end': found['local'] == '2',
          'restart': found['local'] not in ('0', '2')}[what]


def test_without_a_c_compiler_faults_of_files_are_skipped_with_the_reason(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(faults.shutil, 'which', lambda name: None)
  assert faults.compile_shim(tmp_path) == ''
  matrix = faults.Matrix(tmp_path, has_shim=False)
  cells = [matrix.run(fault, 'save') for fault in faults.OF_FILES]
  assert all('skipped: no C compiler' in line for line in faults.table(cells).splitlines()[2:])
  assert not any(cell.statuses or cell.ok for cell in cells)


CELLS = ('kill0:save', 'kill1:step', 'stop1:step', 'eio:save', '503:save')


@pytest.mark.timeout(900)
@pytest.mark.slow(reason='about 3 min: five cells of the matrix, each of two or more starts of two processes')
def test_a_part_of_the_matrix_ends_as_the_undisturbed_run() -> None:
  """`python tests/faults.py` runs all."""
  done = subprocess.run([sys.executable, str(faults.ROOT / 'tests' / 'faults.py'), *CELLS], capture_output=True,
                        text=True)
  assert done.returncode == 0, done.stdout + done.stderr[-3000:]
  assert f'{len(CELLS)} of {len(CELLS)} cells' in done.stdout
