"""The main job in one process: run, resume, finish again, evaluate, and what is left in the run directory."""
from __future__ import annotations

import errno
import itertools
import json
import os
import pathlib
import re
import shutil
import signal
from collections.abc import Iterator
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from vit_jax import main
from vit_jax.config import engine
from vit_jax.core import failures, types
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.data import loader
from vit_jax.jobs import report, resume, train
from vit_jax.parallel import layout
from vit_jax.record import checkpoint_files, machine, reader, run_directory
from vit_jax.train.state import TrainState

TINY = ['--config=digits', '--config.model.depth=1', '--config.model.width=16', '--config.model.heads=2',
        '--config.model.mlp.hidden=16', '--config.batch_size=40', '--config.length=12 steps',
        '--config.evals.test.every=5 steps', '--config.evals.test.batch_size=80',
        '--config.checkpoints.every=5 steps', '--config.train.log_every=4 steps',
        '--config.train.ema=.9']


def run(workdir: pathlib.Path, *extra: str, job: str = 'train') -> int:
  return main.run([f'--job={job}', *TINY, f'--workdir={workdir}', *extra])


@pytest.fixture(scope='module')
def done(one_device: None, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  workdir = tmp_path_factory.mktemp('runs') / 'a'
  assert run(workdir) == 0
  return workdir


@pytest.fixture(autouse=True)
def no_other_page(done: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  """One report is enough."""
  monkeypatch.setattr(report, 'write_report', lambda workdir: f'{workdir}/report.html')


def load(path: pathlib.Path) -> dict:
  return json.loads(path.read_text())


def test_a_run_leaves_what_it_promises(done: pathlib.Path) -> None:
  final, evaluation = load(done / 'final.json'), load(done / 'evaluate.json')
  assert final['step'] == 12 and final['num_examples'] == {'test': 360} and final['seconds'] > 0
  assert evaluation['num_examples'] == 360 and evaluation['view'] == 'ema'
  assert evaluation['top1'] == final['metrics']['test/top1@ema'] and set(final['metrics']) == {
      f'test/{m}{v}' for m in ('top1', 'top5', 'nll') for v in ('', '@ema')}
  assert load(done / 'config.json')['model']['width'] == 16
  record = reader.read(done)
  logged = [int(row['step']) for row in record.rows if 'train/loss' in row]
  assert logged == [1, 4, 8, 12] and [int(r['step']) for r in record.rows if 'test/top1' in r] == [5, 10, 12]
  saved = [e for e in record.events if e['event'] == 'checkpoint']
  assert [e['step'] for e in saved] == [5, 10, 12] and saved[-1]['params_digest'] == final['params_digest']
  begun = record.events[0]['machine']
  assert begun['cpu_threads'] == machine.cpu_threads() and begun['versions']['jax'] == jax.__version__
  assert begun == checkpoint_files.read_meta(done / 'checkpoints' / '12')['machine']
  page = (done / 'report.html').read_text()
  assert '<svg' in page and 'http://' not in page.replace('http://www.w3.org', '') and 'https://' not in page
  assert sorted(int(p.name) for p in (done / 'checkpoints').iterdir()) == [10, 12]


def test_predictions_cover_every_example_once(done: pathlib.Path) -> None:
  with np.load(done / 'predictions.npz') as saved:
    assert sorted(saved['index']) == list(range(360)) and saved['top'].shape == (360, 5)
    right = float((saved['top'][:, 0] == saved['label']).mean())
    assert saved['example_image'].shape[1:] == (16, 16, 3) and len(saved['class_names']) == 10
  assert right == pytest.approx(load(done / 'evaluate.json')['top1'], abs=1e-7)


def test_a_finished_run_says_so_and_stays_as_it_is(
    done: pathlib.Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
  before = load(done / 'final.json')
  with caplog.at_level('INFO'):
    assert run(done) == 0
  assert 'Already finished: step 12 of 12' in caplog.text and 'of 360 images' in capsys.readouterr().out
  assert load(done / 'final.json') == before


def test_an_evaluation_of_the_weights_of_a_run_has_the_step_of_their_checkpoint(
    done: pathlib.Path, tmp_path: pathlib.Path) -> None:
  assert main.run(['evaluate', '--config=digits', f'--weights={done}', f'--workdir={tmp_path}']) == 0
  assert load(tmp_path / 'evaluate.json')['step'] == 12


def test_evaluate_gives_the_numbers_of_the_run_for_any_batch_size(
    done: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  before = load(done / 'final.json')['metrics']
  assert run(done, '--config.evals.test.batch_size=56', job='evaluate') == 0
  after = load(done / 'evaluate.json')
  assert after['num_examples'] == 360 and after['metrics'] == pytest.approx(before, rel=1e-6)
  out = capsys.readouterr().out
  assert 'test (ema, 360 images): top1' in out and out.endswith(f'evaluate.json\nReport: {done}/report.html\n')


def test_a_longer_run_goes_on_where_the_shorter_one_ended(
    done: pathlib.Path, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch) -> None:
  shutil.copytree(done, tmp_path / 'b')
  taken, batches = [], loader.TrainLoader.batches

  def noted(self: loader.TrainLoader, start: int) -> Iterator[types.Batch]:
    for batch in batches(self, start):
      taken.append((batch['index'], self.indexes(12)))
      yield batch

  monkeypatch.setattr(loader.TrainLoader, 'batches', noted)
  with caplog.at_level('INFO'):
    assert run(tmp_path / 'b', '--config.length=13 steps') == 0
  np.testing.assert_array_equal(*taken[0])  # of steps 0 to 11 the first run had the batches
  assert 'length: 12 steps -> 13 steps' in caplog.text and 'Resuming at step 12 of 13' in caplog.text
  assert [e['resumed_from'] for e in reader.read(tmp_path / 'b').events if e['event'] == 'start'][-1] == 12
  assert load(tmp_path / 'b' / 'final.json')['step'] == 13


def test_a_run_that_pauses_twice_is_evaluated_there_and_ends_with_the_bits_of_one_that_does_not(
    done: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  paused = tmp_path / 'paused'
  assert run(paused, '--until=25 %') == 0  # 3 steps, between evaluations and checkpoints
  assert 'Paused after step 3 of 12 by --until=25 %, evaluated and saved' in capsys.readouterr().out
  assert not (paused / 'final.json').exists() and checkpoint_files.steps(paused / 'checkpoints') == [3]
  first = load(paused / 'paused_25%.json')
  assert run(paused, '--until=25 %') == 0 and load(paused / 'paused_25%.json') == first
  assert run(paused, '--until=5 steps') == 0
  measured = {row['step']: row for row in reader.read(done).rows if 'test/top1' in row}
  assert first['step'] == 3 and first['top1'] == first['metrics']['test/top1@ema'] and 3 not in measured
  second = load(paused / 'paused_5steps.json')
  assert second['metrics'].items() <= measured[5].items()
  capsys.readouterr()
  assert run(paused, '--until=4 steps') == 2
  assert '--until: expected at least 5 steps, which the run in' in capsys.readouterr().err
  assert run(paused, '--until=soon') == 2 and '--until: expected a number and a unit' in capsys.readouterr().err
  assert run(paused) == 0
  a, b = (load(w / 'final.json') for w in (done, paused))
  assert a['params_digest'] == b['params_digest'] and a['metrics'] == b['metrics'] and b['step'] == 12
  events = reader.read(paused).events
  assert [e['step'] for e in events if e['event'] == 'stop'] == [3, 5]
  assert [e['resumed_from'] for e in events if e['event'] == 'start'] == [None, 3, 5]


def test_a_program_that_jaxlib_cannot_print_gives_a_warning_and_the_run_continues(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
  """So it is with calls of SparseCores, in jaxlib 0.10.2."""
  class Program:
    """A step that lowers and compiles to itself."""
    step_fn, abstract_state = property(lambda self: self), None

    def lower(self, *_: object) -> Program:
      return self

    def compile(self) -> Program:
      return self

    def as_text(self) -> str:
      raise jax.errors.JaxRuntimeError('INTERNAL: async-update should have 1 operands\nmore')

  monkeypatch.setattr(train.build, 'abstract_batch', lambda config: None)
  one = SimpleNamespace(workdir=tmp_path, config=None, parts=SimpleNamespace(program=Program()))
  train.Run._dump_hlo(one)  # type: ignore[arg-type]
  assert 'train.dump_hlo: expected a program that jaxlib can print, got INTERNAL: async-update should' in caplog.text
  assert '--xla_jf_dump_to=DIR' in caplog.text and not (tmp_path / 'hlo').exists()


@pytest.mark.slow(reason='9 s: a step is compiled and profiled; a longer run is above')
def test_a_longer_run_resumes_in_a_relative_workdir_logs_what_changed_and_leaves_the_profile_it_was_asked_for(
    done: pathlib.Path, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str]) -> None:
  shutil.copytree(done, tmp_path / 'runs' / 'here')
  monkeypatch.chdir(tmp_path)
  longer = '--config.length=14 steps'
  with caplog.at_level('INFO'):
    assert run(pathlib.Path('runs/here'), longer, '--config.train.profile=13..13', '--config.train.dump_hlo=true') == 0
  assert len(list(pathlib.Path('runs/here').glob('profile/plugins/profile/*/*.xplane.pb'))) == 1
  assert 'Profile of steps 13 to 13: tensorboard --logdir=' in caplog.text
  text = pathlib.Path('runs/here/hlo/train_step.txt').read_text()
  assert text.startswith('HloModule jit_step') and 'here/hlo/train_step.txt' in caplog.text
  assert 'length: 12 steps -> 14 steps' in caplog.text and 'Resuming at step 12 of 14' in caplog.text
  assert (tmp_path / 'runs' / 'here' / 'checkpoints' / '14').is_dir()
  assert load(tmp_path / 'runs' / 'here' / 'final.json')['step'] == 14
  capsys.readouterr()
  assert run(pathlib.Path('runs/here'), longer, job='evaluate') == 0
  assert 'evaluate.json' in capsys.readouterr().out


EARLY = ('--config.train.early_stop.metric=test/top1', '--config.train.early_stop.patience=1',
         '--config.train.early_stop.min_delta=.9')


@pytest.mark.slow(reason='14 s: five starts; the resumed run below is one of the default suite')
def test_a_run_ends_early_as_if_done_and_one_stopped_by_sigterm_goes_on_to_the_same_bits(
    done: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch) -> None:
  batches = loader.TrainLoader.batches

  def stopped(self: loader.TrainLoader, start: int) -> Iterator[types.Batch]:
    for number, batch in enumerate(batches(self, start), 1):
      if number == 6:
        os.kill(os.getpid(), signal.SIGTERM)
      yield batch

  whole, split = tmp_path / 'whole', tmp_path / 'split'
  with monkeypatch.context() as patch:
    patch.setattr(loader.TrainLoader, 'batches', stopped)
    assert run(split, *EARLY) == 75
  out = capsys.readouterr().out
  assert 'Stopped by SIGTERM after step' in out and 'Run the same command again to resume' in out
  [step] = [event['step'] for event in reader.read(split).events if event['event'] == 'stop']
  assert 5 <= step < 8 and (split / 'checkpoints' / str(step)).is_dir()
  for again in (whole, split):
    caplog.clear()
    with caplog.at_level('INFO'):
      assert run(again, *EARLY) == 0
    assert 'Ended at step 10 of 12 by early stopping: test/top1' in caplog.text
  before = (whole / 'final.json').read_bytes()
  assert run(whole, *EARLY) == 0 and (whole / 'final.json').read_bytes() == before  # a run that has ended
  a, b = (load(w / 'final.json') for w in (whole, split))
  assert a['step'] == b['step'] == 10 and a['params_digest'] == b['params_digest'] and a['metrics'] == b['metrics']
  assert [e['resumed_from'] for e in reader.read(split).events if e['event'] == 'start'] == [None, step]


@pytest.mark.slow(reason='15 s: a run is started twice')
def test_a_run_whose_loader_gives_up_saves_and_goes_on_to_the_same_end(
    done: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch) -> None:
  whole = loader.TrainLoader.batches

  def seven(self: loader.TrainLoader, start: int) -> Iterator[types.Batch]:
    yield from itertools.islice(whole(self, start), 7)
    raise TemporaryError('data.workers: no more')

  with monkeypatch.context() as patch:
    patch.setattr(loader.TrainLoader, 'batches', seven)
    assert run(tmp_path / 'b') == 75
  said = capsys.readouterr().err
  assert 'error: data.workers: no more. Step 7 is saved; run the same command again to resume.' in said
  assert 'Traceback' not in said
  assert run(tmp_path / 'b') == 0
  assert load(tmp_path / 'b' / 'final.json')['params_digest'] == load(done / 'final.json')['params_digest']


@pytest.mark.dear('--config.batch_size=48-batch_size: 40 -> 48', reason='1 s: builds the run; that order has a test')
@pytest.mark.parametrize(('extra', 'said'), [
    ('--config.length=3 steps', 'length: expected at least 12 steps, .* got .3 steps., 3 steps'),
    ('--config.seed=5', r'expected a run on the same data in the same order, got changes:\n  seed: 0 -> 5'),
    ('--config.batch_size=48', r'batch_size: 40 -> 48'),
    ('--config.model.width=32', 'made with another model'),
    ('--config.checkpoints.keep_every=7 steps', 'expected a multiple of checkpoints.every=.5 steps., 5 steps, got'),
])
def test_a_run_is_not_continued_as_another(
    done: pathlib.Path, extra: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
  before = (done / 'config.json').read_bytes()
  assert run(done, extra) == 2
  assert re.search(said, capsys.readouterr().err)
  assert (done / 'config.json').read_bytes() == before


@pytest.fixture
def other(done: pathlib.Path) -> Iterator[str]:
  """The finished run with a config that differs where no shape does; what the difference is called."""
  path = done / 'config.json'
  before = path.read_text()
  path.write_text(before.replace('"gelu": "tanh"', '"gelu": "exact"'))
  yield 'model.gelu: tanh in the checkpoint, exact in the config'
  path.write_text(before)


def test_a_config_that_is_not_the_checkpoints_is_refused_by_all_that_read_it(
    done: pathlib.Path, other: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  for job in (['evaluate', f'--workdir={done}'], ['predict', f'--weights={done}', __file__],
              ['report', f'--workdir={done}'],
              ['average', f'--workdir={done}', '--last=2', f'--to={tmp_path / "mean"}'],
              ['convert', f'--weights={done}', f'--to={tmp_path / "x.npz"}'],
              ['inspect', f'--workdir={done}', f'--to={tmp_path / "page"}']):
    assert main.run(job) == 2, job
    error = capsys.readouterr().err
    assert f'{done / "config.json"}: expected the settings that checkpoint 1' in error and other in error, (job, error)
  assert not list(tmp_path.iterdir())


@pytest.mark.slow(reason='2 s: builds the run twice; the config of another is refused above')
def test_a_finished_run_is_not_measured_as_another_network(
    done: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  for extra in ('--config.model.gelu=exact', '--config.data.recipe.mean=.4,.4,.4'):
    before = {name: (done / name).read_bytes() for name in ('config.json', 'final.json')}
    assert run(done, extra) == 2
    assert 'got one with other settings:\n' in capsys.readouterr().err
    assert {name: (done / name).read_bytes() for name in before} == before


def test_what_a_run_chooses_for_itself_is_no_change(done: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
  chosen = engine.read_file(done / 'config.json')
  assert chosen.mesh.chosen
  path = done / 'config.json'
  path.write_text(engine.to_json(layout.unchosen(chosen)))  # as a study writes it before the run starts
  resume.write_config(done, chosen)
  assert not caplog.text and engine.read_file(path) == chosen
  resume.write_config(done, layout.put(chosen, {'optimizer.lr': 1.}))
  assert 'These settings differ from those the run was started with:\n  optimizer.lr: ' in caplog.text


@pytest.mark.parametrize('content', [b'', b'{"name": ', b'\xff\xfe'])
def test_a_damaged_config_is_an_error_for_readers_and_written_again_by_training(
    done: pathlib.Path, content: bytes, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture) -> None:
  path = done / 'config.json'
  before = path.read_bytes()
  path.write_bytes(content)
  for job in (['evaluate', f'--workdir={done}'], ['predict', f'--weights={done}', __file__],
              ['convert', f'--weights={done}', f'--to={tmp_path / "x.npz"}']):
    assert main.run(job) == 2
    assert f'{path}: expected a config as JSON, got' in capsys.readouterr().err
  resume.write_config(done, engine.from_json(before.decode()))
  assert 'config.json is damaged' in caplog.text and path.read_bytes() == before


def test_two_runs_cannot_share_a_directory(done: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  with run_directory.locked(done):
    assert run(done) == 2
  said = f'--workdir={done}: expected a directory that no other run uses, got one in use by process'
  assert said in capsys.readouterr().err


@pytest.mark.parametrize('name', ['config.json', 'report.html', 'metrics.jsonl', 'final.json',
                                  'evaluate.json', 'predictions.npz', 'init.json', 'paused_50%.json', 'trackers.json',
                                  'features/x', 'checkpoints/99/x', 'damaged/x', '.lock'])
def test_a_directory_with_files_of_others_is_refused_and_stays_as_it_is(
    name: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
  (tmp_path / name).write_text('{"mine": 1}')
  assert run(tmp_path) == 2
  first = name.split('/')[0]
  assert f'expected a new directory or one that this program wrote, got one with another {first}. Move that away' in (
      capsys.readouterr().err)
  assert [path for path in tmp_path.rglob('*') if path.is_file()] == [tmp_path / name]
  assert (tmp_path / name).read_text() == '{"mine": 1}'


@pytest.mark.parametrize('kept', ['config.json', 'metrics.jsonl', 'final.json', 'evaluate.json', 'checkpoints'])
def test_a_run_is_known_by_each_of_its_files(kept: str, done: pathlib.Path, tmp_path: pathlib.Path) -> None:
  copy = shutil.copytree if (done / kept).is_dir() else shutil.copy
  copy(done / kept, tmp_path / kept)
  (tmp_path / 'predictions.npz').write_text('')
  run_directory.check_ours(tmp_path)
  (tmp_path / kept).rename(tmp_path / 'mine')
  with pytest.raises(UserError, match='expected a new directory or one that this program wrote'):
    run_directory.check_ours(tmp_path)


def test_a_workdir_that_cannot_be_written_is_refused(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  (tmp_path / 'file').write_text('')
  assert run(tmp_path / 'file' / 'run') == 2
  assert 'expected to write it, got "Not a directory". ' in capsys.readouterr().err


def test_evaluating_nothing_is_refused(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  assert run(tmp_path, job='evaluate') == 2
  assert 'expected the directory of a run' in capsys.readouterr().err


@pytest.mark.slow(reason='3 s: compiles a step; tests/train/test_step.py has steps that are not finite')
def test_a_loss_that_is_not_finite_stops_the_run_with_a_message(
    done: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch) -> None:
  initialize = train.Run._initialize

  def spoilt(self: train.Run) -> TrainState:
    state = initialize(self)
    return state._replace(params=jax.tree.map(lambda leaf: leaf * np.float32('nan'), state.params))

  monkeypatch.setattr(train.Run, '_initialize', spoilt)
  assert run(tmp_path) == 2
  text = capsys.readouterr().err
  assert 'Step 1 is not finite: loss' in text and 'on_nonfinite=skip' in text


def test_a_profile_outside_of_the_run_is_refused(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  assert run(tmp_path, '--config.train.profile=11..13') == 2
  assert 'train.profile: expected steps from 1 to 12, the end of the run, got 11..13' in capsys.readouterr().err


@pytest.mark.slow(reason='6 s: a run whose saves fail three times')
@pytest.mark.parametrize('number', [errno.EIO, errno.ENOSPC])
def test_saves_that_fail_for_a_time_are_repeated_and_change_no_bit(
    done: pathlib.Path, tmp_path: pathlib.Path, number: int, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture) -> None:
  from orbax.checkpoint import CheckpointManager
  from orbax.checkpoint._src.path import atomicity
  save, finalize, errors = CheckpointManager.save, atomicity.AtomicRenameTemporaryPath.finalize, [2, 1]

  def failing(self: CheckpointManager, *words: object, **named: object) -> object:
    if errors[0]:
      errors[0] -= 1
      raise OSError(number, os.strerror(number))
    return save(self, *words, **named)

  async def not_committed(self: object) -> None:
    if errors[1]:
      errors[1] -= 1
      raise OSError(number, os.strerror(number))
    await finalize(self)

  monkeypatch.setattr(CheckpointManager, 'save', failing)
  monkeypatch.setattr(atomicity.AtomicRenameTemporaryPath, 'finalize', not_committed)
  monkeypatch.setattr(failures, 'FIRST_WAIT_S', .01)
  assert run(tmp_path / 'b') == 0
  assert errors == [0, 0] and 'saving the checkpoint of step 5 failed and is tried again' in caplog.text
  assert load(tmp_path / 'b' / 'final.json')['params_digest'] == load(done / 'final.json')['params_digest']
  assert (tmp_path / 'b' / 'checkpoints' / '12').is_dir()
  saved = [event['step'] for event in reader.read(tmp_path / 'b').events if event['event'] == 'checkpoint']
  assert len(saved) == len(set(saved)) and {5, 12} <= set(saved)


def test_a_storage_that_stays_broken_ends_the_run_with_75(
    done: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str]) -> None:
  from orbax.checkpoint import CheckpointManager

  def failing(*_: object, **__: object) -> None:
    raise OSError(errno.EIO, 'Input/output error')

  monkeypatch.setattr(CheckpointManager, 'save', failing)
  assert run(tmp_path / 'b', '--config.train.retry=0') == 75
  assert 'A checkpoint could not be written to' in capsys.readouterr().err
