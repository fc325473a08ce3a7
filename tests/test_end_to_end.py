"""Runs that are killed, stopped, or fed with a person's own pictures, in processes of their own."""
from __future__ import annotations

import json
import pathlib
import random
import signal
import time

import numpy as np
import pytest
import runs
from PIL import Image

from vit_jax.record import goodput, writer

pytestmark = pytest.mark.xdist_group('test_end_to_end')  # in one worker, for what the tests share

LONG = ('--config.length=60 steps', '--config.checkpoints.every=10 steps', '--config.train.log_every=1 steps')


@pytest.fixture(scope='module')
def whole(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  workdir = tmp_path_factory.mktemp('whole') / 'run'
  runs.finish(runs.start(workdir, *LONG))
  return workdir


def assert_same_run(workdir: pathlib.Path, whole: pathlib.Path) -> None:
  """Losses of every step, metrics and parameters, to the last bit."""
  assert runs.losses(workdir) == runs.losses(whole)
  got, want = runs.final(workdir), runs.final(whole)
  assert got['params_digest'] == want['params_digest'] and got['metrics'] == want['metrics']
  digests = [{e['step']: e['params_digest'] for e in runs.events(w, 'checkpoint')} for w in (workdir, whole)]
  assert digests[0] == digests[1]


def test_a_run_killed_at_any_moment_goes_on_bit_for_bit(tmp_path: pathlib.Path, whole: pathlib.Path) -> None:
  process = runs.start(tmp_path, *LONG)
  runs.wait_for_checkpoint(process, tmp_path)
  time.sleep(random.uniform(0, .5))
  runs.kill(process)
  runs.finish(runs.start(tmp_path, *LONG))
  resumed = runs.events(tmp_path, 'start')[-1]['resumed_from']
  assert 0 < resumed < 60 and resumed % 10 == 0
  assert_same_run(tmp_path, whole)
  assert_time_is_accounted_for(tmp_path)


def assert_time_is_accounted_for(workdir: pathlib.Path) -> None:
  """The record of a run that was killed once says where its time went, and what the kill cost."""
  rows = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines() if line.endswith('}')]
  again = max(i for i, row in enumerate(rows) if row.get('event') == 'start')
  before, lost = rows[:again], rows[again]['lost']
  reached = max(row['step'] for row in before if 'train/loss' in row)
  assert lost['steps'] == reached - rows[again]['resumed_from']
  found = goodput.sum_starts(writer.read(workdir).events)
  assert {'startup', 'compile', 'step', 'data_wait', 'evaluate', 'checkpoint'} <= set(found.seconds)
  assert found.seconds.get('lost', 0.) == pytest.approx(lost['seconds'], abs=1e-6)
  assert (lost['seconds'] > 0) == (lost['steps'] > 0)
  # The record's own time leaves out the start-up before it is opened.
  recorded_s = sum(part[-1]['time_s'] - part[0]['time_s'] for part in (before, rows[again:]))
  assert found.total_s - found.seconds['startup'] == pytest.approx(recorded_s, rel=.1, abs=.5)
  assert 'Where the time went' in (workdir / 'report.html').read_text()


def test_sigterm_saves_and_ends_with_the_status_for_resumable(tmp_path: pathlib.Path, whole: pathlib.Path) -> None:
  process = runs.start(tmp_path, *LONG)
  runs.wait_for_checkpoint(process, tmp_path)
  process.send_signal(signal.SIGTERM)
  out = runs.finish(process, status=75)
  assert 'Stopped by SIGTERM after step' in out and 'Run the same command again to resume' in out
  stopped = runs.events(tmp_path, 'stop')[0]['step']
  runs.finish(runs.start(tmp_path, *LONG))
  assert runs.events(tmp_path, 'start')[-1]['resumed_from'] == stopped
  assert runs.losses(tmp_path) == runs.losses(whole)
  assert runs.final(tmp_path)['params_digest'] == runs.final(whole)['params_digest']


@pytest.fixture(scope='module')
def pictures(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """Two kinds of pictures of several sizes and formats, with one broken file among them."""
  root = tmp_path_factory.mktemp('pictures')
  write_pictures(root, num_train=45, num_test=11, seed=0)
  (root / 'train' / 'dark' / '0.jpg').write_text('this is no picture')
  return root


def write_pictures(root: pathlib.Path, *, num_train: int, num_test: int, seed: int) -> None:
  rng = np.random.default_rng(seed)
  for split, count in (('train', num_train), ('test', num_test)):
    for label, kind in enumerate(('dark', 'light')):
      (root / split / kind).mkdir(parents=True)
      for i in range(count):
        size = (int(rng.integers(20, 60)), int(rng.integers(20, 60)), 3)
        pixels = rng.integers(128 * label, 128 * label + 128, size).astype(np.uint8)
        Image.fromarray(pixels).save(root / split / kind / f'{i}.{["jpg", "png", "webp", "bmp"][i % 4]}')


FOLDER = ('--config.image_px=32,32', '--config.model.patch=16', '--config.batch_size=16', '--config.length=40 steps',
          '--config.data.recipe.eval_resize_px=36', '--config.checkpoints.every=5 steps', '--config.train.ema=.9',
          '--config.train.log_every=1 steps', '--config.optimizer.lr=3e-3')


def test_a_folder_of_pictures_is_learned_and_a_broken_file_is_named(
    tmp_path: pathlib.Path, pictures: pathlib.Path) -> None:
  source = f'--config.data.source=folder:{pictures}'
  out = runs.finish(runs.start(tmp_path, *FOLDER, source, config='from_folder'))
  assert 'bad image' in out and str(pictures / 'train' / 'dark' / '0.jpg') in out
  final = runs.final(tmp_path)
  assert final['num_examples'] == {'test': 22} and final['metrics']['test/top1@ema'] > .9
  stopped = runs.start(tmp_path / 'strict', *FOLDER, source, '--config.data.max_bad_images=0', config='from_folder')
  assert 'at most data.max_bad_images=0' in runs.finish(stopped, status=2)


@pytest.mark.slow(reason='about 60 s: five processes, with loader workers')
def test_kills_at_three_moments_with_two_loader_workers(tmp_path: pathlib.Path, pictures: pathlib.Path) -> None:
  extra = (*FOLDER, f'--config.data.source=folder:{pictures}', '--config.data.workers=2', '--config.length=120 steps')
  whole = tmp_path / 'whole'
  runs.finish(runs.start(whole, *extra, config='from_folder'))
  workdir = tmp_path / 'killed'
  for number in (1, 2, 2):
    process = runs.start(workdir, *extra, config='from_folder')
    runs.wait_for_checkpoint(process, workdir, number=number)
    time.sleep(random.uniform(0, 1))
    runs.kill(process)
  runs.finish(runs.start(workdir, *extra, config='from_folder'))
  assert_same_run(workdir, whole)


@pytest.mark.slow(reason='about 60 s: four processes, with loader workers')
def test_a_mixture_of_two_folders_killed_twice_with_two_loader_workers_goes_on_bit_for_bit(
    tmp_path: pathlib.Path, pictures: pathlib.Path) -> None:
  write_pictures(tmp_path / 'more', num_train=13, num_test=5, seed=1)
  extra = (*FOLDER, f'--config.data.source=mix:0.7*folder:{pictures},0.3*folder:{tmp_path / "more"}',
           '--config.data.workers=2', '--config.length=120 steps', '--config.data.recipe.randaugment.layers=2',
           '--config.data.recipe.repeats=2')
  whole, workdir = tmp_path / 'whole', tmp_path / 'killed'
  runs.finish(runs.start(whole, *extra, config='from_folder'), timeout_s=600.)
  for number in (1, 2):
    process = runs.start(workdir, *extra, config='from_folder')
    runs.wait_for_step(process, workdir, 15 * number)
    time.sleep(random.uniform(0, 1))
    runs.kill(process)
  runs.finish(runs.start(workdir, *extra, config='from_folder'), timeout_s=600.)
  resumed = [e['resumed_from'] for e in runs.events(workdir, 'start')]
  assert resumed[0] is None and all(resumed[1:]) and len(resumed) == 3
  assert len(runs.losses(whole)) == 120 and runs.final(whole)['num_examples'] == {'test': 32}
  assert_same_run(workdir, whole)
