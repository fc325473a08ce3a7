"""Averaging checkpoints of a real run: the arithmetic, the new run directory, and what is refused."""
from __future__ import annotations

import functools
import json
import os
import pathlib
import subprocess
import sys
import weakref
from typing import Any

import chex
import jax
import numpy as np
import pytest
import runs

from vit_jax import main
from vit_jax.config import files
from vit_jax.core.errors import UserError
from vit_jax.jobs import average, build
from vit_jax.train import checkpoint, checkpoint_reader
from vit_jax.train.state import TrainState
from vit_jax.train.step import Program

pytestmark = pytest.mark.usefixtures('one_device', 'no_page')

SETTINGS = ['--config=digits', '--config.model.depth=1', '--config.model.width=16', '--config.model.heads=2',
            '--config.model.mlp.hidden=16', '--config.batch_size=40', '--config.length=7 steps',
            '--config.evals.test.every=7 steps', '--config.evals.test.batch_size=80',
            '--config.checkpoints.every=2 steps', '--config.checkpoints.keep_latest=4', '--config.train.ema=.9']


@pytest.fixture(scope='module')
def done(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  workdir = tmp_path_factory.mktemp('runs') / 'a'
  assert main.run([*SETTINGS, f'--workdir={workdir}']) == 0
  return workdir


@functools.cache
def program() -> Program:
  config = files.load('digits', [s.removeprefix('--config.') for s in SETTINGS[1:]])
  mesh, _ = build.open_mesh(config)
  return build.parts(config, mesh=mesh, num_examples=1437, num_classes=10, in_memory=True).program


def states(workdir: pathlib.Path) -> dict[int, TrainState]:
  saved = checkpoint_reader.Reader(workdir / 'checkpoints')
  found = {step: jax.device_get(saved.read(step, program().placed_state).state)
           for step in saved.steps()}
  with pytest.raises(UserError, match='has no checkpoint of step 3; it has: '):
    saved.read(3, program().placed_state)
  return found


@pytest.fixture(scope='module')
def before(done: pathlib.Path) -> dict[int, TrainState]:
  return states(done)


@pytest.mark.slow(reason='12 s: a run, its average and an evaluation; the arithmetic is below')
@pytest.mark.parametrize(('which', 'steps'), [('--last=3', (4, 6, 7)), ('--steps=6,2', (2, 6))])
def test_the_mean_is_a_run_of_its_own_that_evaluates(
    done: pathlib.Path, before: dict[int, TrainState], tmp_path: pathlib.Path, which: str, steps: tuple[int, ...],
    capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run(['--job=average', *SETTINGS, f'--workdir={done}', f'--to={tmp_path}', which]) == 0
  assert f'The average of {len(steps)} checkpoints (steps {", ".join(map(str, steps))})' in capsys.readouterr().out
  (after,) = states(tmp_path).values()
  for item in ('params', 'extra'):
    want = jax.tree.map(lambda *x: np.mean(np.asarray(x, np.float64), 0), *(getattr(before[s], item) for s in steps))
    chex.assert_trees_all_close(getattr(after, item), want, rtol=1e-5, atol=1e-7)
  chex.assert_trees_all_equal(after.opt, before[steps[-1]].opt)
  assert int(after.step) == steps[-1]
  if which == '--last=3':
    assert main.run(['--job=evaluate', *SETTINGS, f'--workdir={tmp_path}']) == 0
    assert json.loads((tmp_path / 'evaluate.json').read_text())['num_examples'] == 360


def test_parameters_and_views_are_averaged_and_the_rest_is_that_of_the_newest() -> None:
  class Saved:
    def read(self, step: int, abstract: object) -> checkpoint_reader.Restored:
      params, views = {'kernel': np.full((2, 3), step, np.float32)}, {'ema': {'kernel': np.float32(2 * step)}}
      state = TrainState(np.int32(step), params, {'mu': np.float32(step)}, views | {'seen': np.int32(step)})
      return checkpoint_reader.Restored(state, {'step': step})

  compared: list[object] = []
  _, state, about = average.read_average(Saved(), None, find_steps=lambda: [2, 3, 7],  # type: ignore[arg-type]
                                         check_settings=compared.append, max_tries=1)
  # Two means of f32 values below 16, each of three operations.
  np.testing.assert_allclose(state.params['kernel'], np.full((2, 3), 4.), rtol=6 * 2.**-24)
  np.testing.assert_allclose(state.extra['ema']['kernel'], 8., rtol=6 * 2.**-24)
  assert (int(state.step), float(state.opt['mu']), int(state.extra['seen'])) == (7, 7., 7)
  assert about == {'step': 7} and compared == [{'step': 2}, {'step': 3}, {'step': 7}]


def test_a_checkpoint_is_freed_before_the_next_is_read() -> None:
  alive: list[list[bool]] = []
  seen: list[weakref.ref[np.ndarray]] = []

  class Saved:
    def read(self, step: int, abstract: object) -> checkpoint_reader.Restored:
      alive.append([one() is not None for one in seen])
      moment = np.zeros(step, np.float32)
      seen.append(weakref.ref(moment))
      return checkpoint_reader.Restored(TrainState(np.int32(step), {'a': np.float32(step)}, {'mu': moment}, {}), {})

  average.read_average(Saved(), None, find_steps=lambda: [2, 3, 7],  # type: ignore[arg-type]
                       check_settings=lambda about: None, max_tries=1)
  assert alive == [[], [False], [False, False]] and seen[-1]() is None


@pytest.mark.parametrize(('flags', 'said'), [
    ({}, r'expected either --last or --steps, got none\. a has checkpoints of steps 2, 4, 6, 7\.'),
    ({'last': 2, 'steps': [2, 4]}, 'expected either --last or --steps, got both'),
    ({'last': 0, 'steps': [2, 4]}, 'expected either --last or --steps, got both'),
    ({'last': 1}, '--last: expected 2 to 4, got 1'),
    ({'last': 5}, '--last: expected 2 to 4, got 5'),
    ({'steps': [2, 5]}, r'--steps: expected at least two of the checkpoints, got 2,5\. a has .* of steps 2, 4, 6, 7'),
    ({'steps': [4]}, r'--steps: expected at least two .* got 4\.')])
def test_an_impossible_choice_of_checkpoints_is_refused(flags: dict[str, Any], said: str) -> None:
  with pytest.raises(UserError, match=said):
    average.choose_steps([2, 4, 6, 7], workdir=pathlib.Path('a'), **({'last': None, 'steps': None} | flags))


@pytest.mark.parametrize('saved', [[], [7]])
def test_a_run_with_fewer_than_two_checkpoints_has_no_average(saved: list[int]) -> None:
  said = rf'--workdir=a: expected a run with at least two checkpoints, got {len(saved)}\.'
  with pytest.raises(UserError, match=said):
    average.choose_steps(saved, last=2, steps=None, workdir=pathlib.Path('a'))


@pytest.mark.slow(reason='6 s with the run that it reads')
def test_a_wrong_flag_is_reported_before_the_data_are_opened(
    done: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str]) -> None:
  monkeypatch.setattr(build, 'open_data', None)
  assert main.run(['--job=average', f'--workdir={done}', '--last=99', f'--to={tmp_path / "b"}']) == 2
  assert '--last: expected 2 to 4, got 99' in capsys.readouterr().err and not (tmp_path / 'b').exists()


@pytest.mark.slow(reason='6 s with the run that it reads')
def test_the_config_is_written_before_the_checkpoint(
    done: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  def kill(*_: object, **__: object) -> None:
    raise KeyboardInterrupt
  command = ['--job=average', f'--workdir={done}', '--last=2', f'--to={tmp_path / "b"}']
  with monkeypatch.context() as patch:
    patch.setattr(checkpoint.Checkpointer, 'close', kill)
    assert main.run(command) == 130
  assert (tmp_path / 'b' / 'checkpoints' / '7').is_dir() and (tmp_path / 'b' / 'config.json').is_file()


@pytest.mark.slow(reason='half a minute: two processes start')
def test_two_processes_average_into_one_directory(done: pathlib.Path, tmp_path: pathlib.Path) -> None:
  environment = {name: value for name, value in os.environ.items() if name != 'XLA_FLAGS'} | {
      'NO_CHECK': '1', 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(runs.ROOT)}
  launch = ['bash', str(runs.ROOT / 'launch' / 'local_processes.sh'), '2', '1', '--']
  command = [sys.executable, '-m', 'vit_jax.main', '--job=average', f'--workdir={done}', '--last=2']
  ended = subprocess.run([*launch, *command, f'--to={tmp_path / "two"}'], env=environment, capture_output=True,
                         text=True, timeout=300)
  assert ended.returncode == 0, ended.stdout + ended.stderr
  assert main.run(['--job=average', f'--workdir={done}', '--last=2', f'--to={tmp_path / "one"}']) == 0
  (one,), (two,) = (states(tmp_path / name).values() for name in ('one', 'two'))
  chex.assert_trees_all_equal(two, one)


@pytest.mark.slow(reason='6 s with the run that it reads')
def test_a_directory_with_checkpoints_is_not_written_to(
    done: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run(['--job=average', *SETTINGS, f'--workdir={done}', f'--to={done}', '--last=2']) == 2
  assert '--to: expected a directory without checkpoints' in capsys.readouterr().err
  assert main.run(['--job=average', *SETTINGS, f'--workdir={tmp_path}', f'--to={done}', '--last=2']) == 2
  assert 'expected the directory of a run' in capsys.readouterr().err


@pytest.mark.slow(reason='6 s with the run that it reads')
def test_a_directory_with_other_files_is_not_written_to(
    done: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  (tmp_path / 'features-00000-of-00001.parquet').write_text('x')
  assert main.run(['--job=average', f'--workdir={done}', '--last=2', f'--to={tmp_path}']) == 2
  assert f'--to: expected a new or empty directory, got {tmp_path}, which has files.' in capsys.readouterr().err
  assert len(list(tmp_path.iterdir())) == 1


def test_the_newest_checkpoints_are_chosen_again_when_a_live_run_removed_one() -> None:
  class Saved:
    def read(self, step: int, abstract: object) -> checkpoint_reader.Restored:
      if step < 6:
        raise checkpoint_reader.Removed(f'{step}: gone')
      return checkpoint_reader.Restored(TrainState(np.int32(step), {'a': np.float32(step)}, {}, {}), {'step': step})

  def read(found: list[list[int]], tries: int) -> average.Average:
    steps = iter(found)
    return average.read_average(Saved(), None, find_steps=lambda: next(steps),  # type: ignore[arg-type]
                                check_settings=lambda about: None, max_tries=tries)
  steps, state, about = read([[2, 4], [4, 6], [6, 8]], tries=5)
  assert (steps, about, float(state.params['a'])) == ([6, 8], {'step': 8}, 7.)
  with pytest.raises(checkpoint_reader.Removed, match='2: gone'):
    read([[2, 4]], tries=1)
  with pytest.raises(checkpoint_reader.Removed, match='4: gone'):
    read([[2, 4], [4, 6], [6, 8]], tries=2)
