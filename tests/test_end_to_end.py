"""Runs that are killed and stopped, in processes of their own, and one on a person's own pictures."""
from __future__ import annotations

import json
import pathlib
import random
import signal
import subprocess
import time

import numpy as np
import pytest
import runs
from PIL import Image

from vit_jax import main
from vit_jax.record import clock, reader

LONG = ('--config.length=120 steps', '--config.checkpoints.every=10 steps', '--config.train.log_every=1 steps')


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


@pytest.mark.slow(reason='about 40 s: four processes')
def test_a_run_killed_at_any_moment_and_stopped_by_sigterm_goes_on_bit_for_bit(
    tmp_path: pathlib.Path, whole: pathlib.Path) -> None:
  process = runs.start(tmp_path, *LONG)
  runs.wait_for_checkpoint(process, tmp_path)
  time.sleep(random.uniform(0, .3))
  runs.kill(process)
  process = runs.start(tmp_path, *LONG)
  wait_for_second_start(process, tmp_path)
  process.send_signal(signal.SIGTERM)
  out = runs.finish(process, status=75)
  assert 'Stopped by SIGTERM after step' in out and 'Run the same command again to resume' in out
  stopped = runs.events(tmp_path, 'stop')[0]['step']
  runs.finish(runs.start(tmp_path, *LONG))
  resumed = [event['resumed_from'] for event in runs.events(tmp_path, 'start')]
  assert resumed[0] is None and 0 < resumed[1] < 120 and resumed[1] % 10 == 0 and resumed[2] == stopped
  assert runs.losses(tmp_path) == runs.losses(whole)
  assert runs.final(tmp_path)['params_digest'] == runs.final(whole)['params_digest']
  assert runs.final(tmp_path)['metrics'] == runs.final(whole)['metrics']
  saved = [{e['step']: e['params_digest'] for e in runs.events(w, 'checkpoint')} for w in (tmp_path, whole)]
  assert {step: digest for step, digest in saved[0].items() if step % 10 == 0} == saved[1]
  assert_time_is_accounted_for(tmp_path)


def wait_for_second_start(process: subprocess.Popen[str], workdir: pathlib.Path) -> None:
  """Returns once the second start of a run has logged a step."""
  while True:
    rows = read_rows(workdir)
    begun = [i for i, row in enumerate(rows) if row.get('event') == 'start']
    if len(begun) == 2 and any('train/loss' in row for row in rows[begun[1]:]):
      return
    assert process.poll() is None, (process.communicate()[0] or '')[-3000:]
    time.sleep(.02)


def read_rows(workdir: pathlib.Path) -> list[dict]:
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  return [json.loads(line) for line in lines if line.endswith('}')]


def assert_time_is_accounted_for(workdir: pathlib.Path) -> None:
  """The record of a run that was killed once says where its time went, and what the kill cost."""
  rows = read_rows(workdir)
  begun = [i for i, row in enumerate(rows) if row.get('event') == 'start']
  parts = [rows[i:j] for i, j in zip(begun, [*begun[1:], len(rows)], strict=True)]
  lost = [part[0]['lost'] for part in parts]
  for before, part in zip(parts, parts[1:], strict=False):
    # The lost work is that of the events `goodput`; a kill may come between the row of a step and its event.
    reached = max(row['step'] for row in before if row.get('event') == 'goodput')
    assert part[0]['lost']['steps'] == reached - part[0]['resumed_from']
    assert max(row['step'] for row in before if 'train/loss' in row) in (reached, reached + 1)
  assert [one['seconds'] > 0 for one in lost] == [one['steps'] > 0 for one in lost] and lost[2]['steps'] == 0
  found = clock.sum_starts(reader.read(workdir).events)
  assert {'startup', 'compile', 'step', 'data_wait', 'evaluate', 'checkpoint'} <= set(found.seconds)
  assert found.seconds.get('lost', 0.) == pytest.approx(sum(one['seconds'] for one in lost), abs=1e-6)
  # The record's own time leaves out the start-up before it is opened.
  recorded_s = sum(part[-1]['time_s'] - part[0]['time_s'] for part in parts)
  assert found.total_s - found.seconds['startup'] == pytest.approx(recorded_s, rel=.1, abs=.75)
  assert 'Where the time went' in (workdir / 'report.html').read_text()


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


@pytest.mark.slow(reason='10 s: a network that learns')
@pytest.mark.usefixtures('one_device', 'no_page')
def test_a_folder_of_pictures_is_learned_and_a_broken_file_is_named(
    tmp_path: pathlib.Path, pictures: pathlib.Path, caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str]) -> None:
  words = ['--config=from_folder', *runs.TINY, *FOLDER, f'--config.data.source=folder:{pictures}']
  assert main.run([*words, f'--workdir={tmp_path / "run"}']) == 0
  assert 'bad image' in caplog.text and str(pictures / 'train' / 'dark' / '0.jpg') in caplog.text
  final = runs.final(tmp_path / 'run')
  assert final['num_examples'] == {'test': 22} and final['metrics']['test/top1@ema'] > .9
  capsys.readouterr()
  assert main.run([*words, '--config.data.max_bad_images=0', f'--workdir={tmp_path / "strict"}']) == 2
  assert 'at most data.max_bad_images=0' in capsys.readouterr().err


@pytest.mark.slow(reason='about 60 s: four processes, with loader workers')
def test_a_mixture_of_two_folders_killed_twice_with_two_loader_workers_goes_on_bit_for_bit(
    tmp_path: pathlib.Path, pictures: pathlib.Path) -> None:
  write_pictures(tmp_path / 'more', num_train=13, num_test=5, seed=1)
  extra = (*FOLDER, f'--config.data.source=mix:0.7*folder:{pictures},0.3*folder:{tmp_path / "more"}',
           '--config.data.workers=2', '--config.length=120 steps', '--config.data.recipe.randaugment.layers=2',
           '--config.data.recipe.repeats=2')
  whole, workdir = tmp_path / 'whole', tmp_path / 'killed'
  runs.finish(runs.start(whole, *extra, config='from_folder'), timeout_s=600.)
  for step in (15, 65):  # so far apart that the first process does not reach the second one
    process = runs.start(workdir, *extra, config='from_folder')
    runs.wait_for_step(process, workdir, step)
    time.sleep(random.uniform(0, 1))
    runs.kill(process)
  runs.finish(runs.start(workdir, *extra, config='from_folder'), timeout_s=600.)
  resumed = [e['resumed_from'] for e in runs.events(workdir, 'start')]
  assert resumed[0] is None and all(resumed[1:]) and len(resumed) == 3
  assert len(runs.losses(whole)) == 120 and runs.final(whole)['num_examples'] == {'test': 32}
  assert_same_run(workdir, whole)
