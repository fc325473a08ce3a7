"""Evaluations of one run by one, two and four processes: the same numbers, whoever took the features."""
from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import sys

import pytest
import runs

from tests.evaluate.test_evaluators import CONFIG
from tests.test_processes import LAUNCH, PROGRAM, environment

pytestmark = pytest.mark.slow(reason='a run and three evaluations of it, two by several processes: about 80 s')


def launch(workdir: pathlib.Path, processes: int, *extra: str) -> str:
  """Runs the program on four devices of so many processes; what it printed."""
  command = [*LAUNCH, str(processes), str(4 // processes), '--', sys.executable, *PROGRAM,
             f'--config={workdir.parent / "tiny.py"}', f'--workdir={workdir}', *extra]
  process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                             start_new_session=True)
  return runs.finish(process, timeout_s=600)


def metrics(workdir: pathlib.Path) -> dict[str, float]:
  return json.loads((workdir / 'evaluate.json').read_text())['metrics']


def features(workdir: pathlib.Path) -> dict[str, int]:
  return {str(path): path.stat().st_mtime_ns for path in (workdir / 'features').rglob('*.parquet')}


@pytest.fixture(scope='module')
def run(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """A run, without features beside it."""
  folder = tmp_path_factory.mktemp('processes')
  (folder / 'tiny.py').write_text(CONFIG)
  launch(folder / 'run', 1, '--job=train')
  shutil.rmtree(folder / 'run' / 'features')
  return folder / 'run'


def test_neither_the_number_of_processes_nor_who_took_the_features_changes_a_result(run: pathlib.Path) -> None:
  launch(run, 1, '--job=evaluate')
  want = metrics(run)
  shutil.rmtree(run / 'features')
  launch(run, 4, '--job=evaluate')
  assert metrics(run) == pytest.approx(want, abs=1e-6)
  parts = sorted(path.name for path in (run / 'features').rglob('*.parquet'))
  assert set(parts) == {f'{part:05d}-of-00004.parquet' for part in range(4)}
  before = features(run)  # others and other batches use them
  launch(run, 2, '--job=evaluate', '--config.evals=knn,few', '--config.evals.knn.batch_size=80',
         '--config.evals.few.batch_size=80')
  assert metrics(run) == pytest.approx({name: want[name] for name in metrics(run)}, abs=1e-6) and metrics(run)
  assert features(run) == before
