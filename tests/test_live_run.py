"""Jobs that read a run leave what training owns as it is, also while it trains."""
from __future__ import annotations

import pathlib
import shutil

import numpy as np
import pytest
import runs
import saved
from PIL import Image

from vit_jax import main

pytestmark = pytest.mark.usefixtures('one_device')

OFTEN = ('--config.length=80 steps', '--config.checkpoints.every=2 steps', '--config.checkpoints.keep_latest=1',
         '--config.evals.test.every=80 steps', '--config.train.log_every=40 steps')


@pytest.fixture(scope='module')
def done(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  workdir = tmp_path_factory.mktemp('runs') / 'a'
  runs.finish(runs.start(workdir, '--config.length=6 steps', '--config.checkpoints.every=2 steps'))
  return workdir


@pytest.fixture
def image(tmp_path: pathlib.Path) -> pathlib.Path:
  path = tmp_path / 'image.png'
  Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(path)
  return path


READERS = {
    'evaluate': ('evaluate', '--workdir={run}'),
    'average': ('average', '--workdir={run}', '--to={out}', '--last=2'),
    'report': ('report', '--workdir={run}'),
    'predict': ('predict', '--weights={run}', '{image}'),
    'inspect': ('inspect', '--workdir={run}', '--to={out}', '{image}'),
    'convert': ('convert', '--weights={run}', '--to={out}.npz'),
    'init_from': ('train', '--config=digits', *runs.TINY, '--config.length=1 steps', '--config.init_from={run}',
                  '--workdir={out}')}
OWN = {'evaluate': {'evaluate.json', 'predictions.npz', 'report.html'}, 'report': {'report.html'}}
"""What a job writes into the run, by design."""


@pytest.mark.slow(reason='about 3 s each: a job of its own')
@pytest.mark.parametrize('job', READERS)
def test_a_job_that_reads_a_run_changes_nothing_that_training_owns(
    job: str, done: pathlib.Path, image: pathlib.Path, tmp_path: pathlib.Path) -> None:
  """Beside a save that is under way, and with a newest checkpoint that is damaged where the job may take another."""
  workdir = pathlib.Path(shutil.copytree(done, tmp_path / 'run'))
  saved.half_write(workdir / 'checkpoints')
  if job == 'evaluate':
    next((workdir / 'checkpoints' / '6' / 'params').rglob('_METADATA')).write_bytes(b'')
  before = saved.snapshot(workdir)
  words = [word.format(run=workdir, out=tmp_path / 'out', image=image) for word in READERS[job]]
  assert main.run(words) == 0
  after = saved.snapshot(workdir)
  own = OWN.get(job, set())
  changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
  assert changed == own


@pytest.mark.slow(reason='about 30 s: a run that saves every other step, twice')
def test_evaluating_again_and_again_beside_training_changes_nothing_of_it(
    tmp_path: pathlib.Path, image: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  runs.finish(runs.start(tmp_path / 'alone', *OFTEN), timeout_s=900.)
  workdir = tmp_path / 'watched'
  assert main.run(['evaluate', f'--workdir={tmp_path / "alone"}']) == 0  # later ones find it compiled
  process = runs.start(workdir, *OFTEN)
  runs.wait_for_checkpoint(process, workdir)
  evaluated = 0
  while process.poll() is None:
    assert main.run(['evaluate', f'--workdir={workdir}']) == 0
    assert main.run(['predict', f'--weights={workdir}', str(image)]) == 0
    evaluated += process.poll() is None
  out = runs.finish(process)
  assert evaluated >= 1 and 'damaged' not in out
  error = capsys.readouterr().err
  assert 'damaged' not in error and 'Traceback' not in error
  assert runs.final(workdir)['params_digest'] == runs.final(tmp_path / 'alone')['params_digest']
  assert runs.losses(workdir) == runs.losses(tmp_path / 'alone')


@pytest.mark.slow(reason='8 s: a run of its own')
def test_a_run_whose_directory_is_moved_stops_and_resumes_there(tmp_path: pathlib.Path) -> None:
  run, moved = tmp_path / 'run', tmp_path / 'moved'
  process = runs.start(run, '--config.length=20000 steps', '--config.checkpoints.every=20 steps',
                       '--config.evals.test.every=20000 steps')
  runs.wait_for_checkpoint(process, run)
  run.rename(moved)
  out = runs.finish(process, status=2)
  assert 'expected the directory in which the run began, got none' in out and 'Traceback' not in out
  assert not (run / 'metrics.jsonl').exists() and not (run / 'config.json').exists()
  assert [path.name for path in (moved / 'checkpoints').iterdir() if path.name.isdigit()]
