"""A run is the same run however often it was started: its best checkpoint, its costs and its results stay."""
from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import sys

import pytest
import restarts

from vit_jax import main
from vit_jax.record import checkpoint_files, clock, reader

pytestmark = [pytest.mark.usefixtures('one_device'), pytest.mark.xdist_group('test_restarts')]
BEST = [*restarts.RUN, *restarts.POLICIES['best']]


@pytest.fixture(scope='module')
def resumed(one_device: None, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """A run that has kept its best checkpoint, which is an early one, over a pause."""
  workdir = tmp_path_factory.mktemp('runs') / 'run'
  for more in (['--until=40 %'], []):
    assert main.run([*BEST, f'--workdir={workdir}', *more]) == 0
  return workdir


def test_the_best_checkpoint_survives_a_restart_and_every_job_takes_it(
    resumed: pathlib.Path, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
  right = restarts.truth(resumed)
  assert right.step is not None and right.step < 16 and restarts.steps(resumed) == [right.step, 40]
  with caplog.at_level('INFO'):
    said = restarts.ask(resumed, tmp_path, exports=False)
  assert restarts.differences(said, right) == [] and set(said) == {'evaluate', 'report', 'convert', 'push', 'predict'}
  assert f'the weights are those of step {right.step}, the best test/nll' in caplog.text


def test_the_checkpoint_and_not_the_record_alone_says_how_good_it_is(resumed: pathlib.Path,
                                                                     tmp_path: pathlib.Path) -> None:
  step = restarts.truth(resumed).step
  for name in ('without', 'resumed'):
    shutil.copytree(resumed, tmp_path / name)
    (tmp_path / name / 'metrics.jsonl').unlink()
  (tmp_path / 'resumed' / 'final.json').unlink()
  longer = [*BEST, f'--workdir={tmp_path / "resumed"}', '--config.length=45 steps']
  assert main.run(longer) == 0 and restarts.steps(tmp_path / 'resumed') == [step, 45]
  said = restarts.ask(tmp_path / 'without', tmp_path / 'out', exports=False)
  assert {one.step for one in said.values()} - {None} == {step}  # cards without a record name no digest


def test_checkpoints_of_older_versions_are_kept_by_the_record(resumed: pathlib.Path, tmp_path: pathlib.Path) -> None:
  workdir, right = tmp_path / 'run', restarts.truth(resumed)
  shutil.copytree(resumed, workdir)
  for step in restarts.steps(workdir):
    path = workdir / 'checkpoints' / str(step)
    body = checkpoint_files.read_meta(path)
    del body['metrics']
    (path / checkpoint_files.META).write_text(json.dumps(checkpoint_files.seal(body)))
  assert main.run([*BEST, f'--workdir={workdir}', '--config.length=45 steps']) == 0
  assert restarts.steps(workdir) == [right.step, 45]


def test_a_finished_run_that_is_started_again_changes_no_file_and_prints_its_results(
    resumed: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  before, final = restarts.files(resumed), json.loads((resumed / 'final.json').read_text())
  assert main.run([*BEST, f'--workdir={resumed}']) == 0
  assert restarts.files(resumed) == before
  shown = f'{final["metrics"]["test/top1"]:.2%} of 80 images, {final["seconds"]:.0f} s.'
  assert f'test/top1 at the last step, 40: {shown}' in capsys.readouterr().out


def test_costs_are_those_of_all_starts(resumed: pathlib.Path) -> None:
  final, events = json.loads((resumed / 'final.json').read_text()), reader.read(resumed).events
  paused = json.loads((resumed / 'paused_40%.json').read_text())
  assert (paused['starts'], final['starts']) == (1, 2) and final['seconds'] == clock.sum_starts(events).total_s
  assert all(final[name] > paused[name] > 0 for name in ('seconds', 'training_processor_s'))


@pytest.mark.slow(reason='about 30 s each: processes that are stopped, killed and started again, and all jobs')
@pytest.mark.parametrize('way', restarts.WAYS)
@pytest.mark.parametrize('policy', [*restarts.POLICIES, *restarts.JOBS])
def test_every_job_tells_the_truth_of_a_run(policy: str, way: str) -> None:
  done = subprocess.run([sys.executable, restarts.__file__, policy, way], capture_output=True, text=True, timeout=600)
  assert done.returncode == 0, done.stdout + done.stderr[-3000:]
