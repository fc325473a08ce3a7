"""Runs that are killed, stopped, or fed with a person's own pictures, in processes of their own."""
from __future__ import annotations

import pathlib
import random
import signal
import time

import numpy as np
import pytest
import runs
from PIL import Image

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


def test_sigterm_saves_and_ends_with_the_status_for_resumable(tmp_path: pathlib.Path, whole: pathlib.Path) -> None:
  process = runs.start(tmp_path, *LONG)
  runs.wait_for_checkpoint(process, tmp_path)
  process.send_signal(signal.SIGTERM)
  out = runs.finish(process, status=75)
  assert 'Stopped by SIGTERM after step' in out and 'The same command goes on' in out
  stopped = runs.events(tmp_path, 'stop')[0]['step']
  runs.finish(runs.start(tmp_path, *LONG))
  assert runs.events(tmp_path, 'start')[-1]['resumed_from'] == stopped
  assert runs.losses(tmp_path) == runs.losses(whole)
  assert runs.final(tmp_path)['params_digest'] == runs.final(whole)['params_digest']


@pytest.fixture(scope='module')
def pictures(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """Two kinds of pictures of several sizes and formats, with one broken file among them."""
  root, rng = tmp_path_factory.mktemp('pictures'), np.random.default_rng(0)
  for split, count in (('train', 45), ('test', 11)):
    for label, kind in enumerate(('dark', 'light')):
      (root / split / kind).mkdir(parents=True)
      for i in range(count):
        size = (int(rng.integers(20, 60)), int(rng.integers(20, 60)), 3)
        pixels = rng.integers(128 * label, 128 * label + 128, size).astype(np.uint8)
        Image.fromarray(pixels).save(root / split / kind / f'{i}.{["jpg", "png", "webp", "bmp"][i % 4]}')
  (root / 'train' / 'dark' / '0.jpg').write_text('this is no picture')
  return root


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
