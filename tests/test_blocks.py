"""Every code block of the documentation runs as it stands on its page, or says beside it why it does not.

The blocks of a page run in their order in one folder, as a reader would: it has `photos/CLASS/*.jpg`, `new_photos`,
the images of `docs/images`, the runs `runs/digits` and `runs/mine`, the weights `vit.safetensors`, and the model
`siglip2` with a text tower, all of them tiny.
"""
from __future__ import annotations

import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import blocks
import numpy as np
import pytest
from PIL import Image
from runs import environment

from tests.weights import text_models
from vit_jax import main

ROOT = blocks.ROOT
WITH_BLOCKS = [page for page in blocks.PAGES if any(block.runs for block in blocks.read(page))]
SEED_RUNS = (['train', '--config=digits', '--workdir=runs/digits', *blocks.DIGITS],
             ['train', '--config=from_folder', '--config.data.source=folder:photos', '--workdir=runs/mine',
              *blocks.PHOTOS],
             ['convert', '--weights=runs/mine', '--to=vit.safetensors'])
"""What the folder of a page begins with."""


def write_images(folder: pathlib.Path, num: int = 10) -> None:
  """Images of three classes, by color, and a few more that have none."""
  rng = np.random.default_rng(0)
  for number, name in enumerate(('bird', 'cat', 'dog')):
    (folder / 'photos' / name).mkdir(parents=True)
    for index in range(num):
      noise = rng.integers(0, 120, (40, 48, 3)) + 100 * (np.arange(3) == number)
      Image.fromarray(noise.astype(np.uint8)).save(folder / 'photos' / name / f'{index}.jpg')
  shutil.copytree(folder / 'photos' / 'cat', folder / 'new_photos')


@pytest.fixture(scope='module')
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
  """The environment of blocks: `vit-jax` and `python` on its path are forks of one process."""
  home = tmp_path_factory.mktemp('home')
  where = home / 'socket'
  for name, kind in (('vit-jax', 'run'), ('python', 'script')):
    path = home / 'bin' / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -S {ROOT}/tests/forking.py {kind} {where} "$@"\n')
    path.chmod(0o755)
  found = environment() | {
      'HOME': str(home), 'PYTHON': sys.executable, 'PATH': f'{home / "bin"}:{os.environ["PATH"]}', 'NO_COLOR': '1',
      'COLUMNS': '120',
      'JAX_COMPILATION_CACHE_DIR': os.environ.get('JAX_COMPILATION_CACHE_DIR', str(home / 'xla')),
      'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0.1'}
  server = subprocess.Popen([sys.executable, str(ROOT / 'tests' / 'forking.py'), 'serve', str(where)], env=found,
                            start_new_session=True)
  while not where.exists():
    assert server.poll() is None
    time.sleep(.05)
  yield found
  os.killpg(server.pid, signal.SIGKILL)
  server.wait()


@pytest.fixture(scope='module')
def start(programs: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """The folder that every page begins with."""
  folder = tmp_path_factory.mktemp('start')
  write_images(folder)
  text_models.write('siglip2', folder / 'siglip2')
  for words in SEED_RUNS:
    done = subprocess.run(['vit-jax', *words], cwd=folder, env=programs, text=True, capture_output=True,
                          timeout=blocks.TIMEOUT_S)
    assert done.returncode == 0, f'{words}\n{done.stdout}\n{done.stderr}'
  return folder


SMALLER = re.compile(
    r'config[.](length|batch_size|image_px|model[.](depth|width|heads|mlp[.]hidden|patch|pool)|checkpoints[.].*'
    r'|evals|evals[.].*[.](every|batch_size|max_steps|neighbors|headline|split|train_split)'
    r'|data[.]recipe[.](eval_resize_px|native_lengths)|optimizer[.]schedule[.]warmup|train[.]accumulate'
    r'|objective[.](out_dim|hidden_dim|group|text[.]depth|teacher[.]px))|search|preprocess|segment|dry_run|to')
"""Flags that make a run smaller, or fit it to a smaller set."""


def test_flags_that_do_not_show_only_make_a_run_smaller() -> None:
  """Weights that are downloaded have a stand-in; whatever else a command needs is on the page."""
  wrong = []
  for page in blocks.PAGES:
    for block in blocks.read(page):
      for flag in (flag for flags in block.flags.values() for flag in flags):
        name, _, value = flag.removeprefix('--').partition('=')
        is_stand_in = name in ('weights', 'config.init_from') and value in ('', 'vit.safetensors')
        if not SMALLER.fullmatch(name) and not is_stand_in:
          wrong.append(f'{block.where}: {flag}')
  assert not wrong


def printed(job: str) -> Iterator[tuple[str, list[str]]]:
  """The commands of a job on all pages that begin with nothing but `photos`, each with its place."""
  for page in blocks.PAGES:
    for block in blocks.read(page):
      for line in block.text.replace('\\\n', ' ').splitlines() if block.runs and block.language == 'sh' else ():
        needs_more = any(name in line for name in ('init_from', 'teacher.weights'))
        if f'vit-jax {job} ' in line and 'folder:photos' in line and not needs_more:
          yield block.where, shlex.split(line.partition(f'vit-jax {job}')[2], comments=True)


@pytest.mark.slow(reason='1 s for each of 8 commands')
@pytest.mark.parametrize(('where', 'words'), [pytest.param(*one, id=one[0]) for one in printed('train')])
def test_a_training_command_is_right_as_it_is_printed(
    where: str, words: list[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str]) -> None:
  """With 240 images of a reader."""
  write_images(tmp_path, num=80)
  monkeypatch.chdir(tmp_path)
  assert main.run(['check', *words]) == 0, capsys.readouterr().err


@pytest.mark.slow(reason='10 to 100 s for a page, compilation included')
@pytest.mark.xdist_group('documents')
@pytest.mark.parametrize('page', WITH_BLOCKS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_blocks_of_a_page_run(page: pathlib.Path, start: pathlib.Path, programs: dict[str, str],
                                  tmp_path: pathlib.Path) -> None:
  if page.name == 'images_and_text.md':
    pytest.importorskip('tokenizers')
  if page.name == 'embed.md':
    pytest.importorskip('pyarrow')
    pytest.importorskip('pandas')
  folder, found = tmp_path / 'page', [block for block in blocks.read(page) if block.runs]
  shutil.copytree(start, folder)
  (folder / 'launch').symlink_to(ROOT / 'launch')
  (folder / 'docs').mkdir()
  (folder / 'docs' / 'images').symlink_to(ROOT / 'docs' / 'images')
  for block in found:
    done = blocks.run(block, folder, programs)
    assert done.returncode == block.status, f'{block.where}: status {done.returncode}\n{block.text}\n{done.stdout}'
