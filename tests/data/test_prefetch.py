"""Loader processes: the same batches, and none of them left behind."""
from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from vit_jax.config import schema
from vit_jax.core.types import Shard
from vit_jax.data import loader, prefetch, sources

SCRIPT = """
import sys, time
from vit_jax.config import schema
from vit_jax.data import loader, sources
if __name__ == '__main__':
  source = sources.open_split(schema.Data(source='synthetic', num_examples=37), 'train', image_px=(64, 64))
  made = loader.train_loader(source, recipe=schema.Recipe(), image_px=(64, 64), batch_size=6, seed=0,
                             workers=2, threads=2, shard=Shard((0,), 1), in_memory=False,
                             max_bad_images=0)
  stream = made.batches(0)
  next(stream)
  print('running', flush=True)
  time.sleep(120)
"""


def descendants(pid: int) -> set[int]:
  tasks = pathlib.Path(f'/proc/{pid}/task').glob('*/children')
  children = {int(child) for task in tasks for child in task.read_text().split()}
  return children.union(*(descendants(c) for c in children)) if children else set()


def alive(pid: int) -> bool:
  try:
    state = pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0]
  except (FileNotFoundError, ProcessLookupError):
    return False
  return state != 'Z'


def test_threads_are_bounded_and_a_number_is_kept() -> None:
  assert prefetch.num_threads(5) == 5
  assert 1 <= prefetch.num_threads(0) <= prefetch.MAX_THREADS


@pytest.mark.slow(reason='12 s: two loader processes import everything anew')
def test_loader_processes_give_the_same_batches(image_folder: pathlib.Path) -> None:
  data = schema.Data(source=f'folder:{image_folder}')
  opened = sources.open_sources(data, image_px=(8, 10))
  taken, evaluated = [], []
  for workers in (0, 2):
    train = loader.train_loader(opened.train, recipe=data.recipe, image_px=(8, 10), batch_size=6, seed=0,
                                shard=Shard((0,), 1), workers=workers, threads=2, in_memory=False,
                                max_bad_images=0)
    stream = train.batches(4)
    taken.append([{k: np.array(v) for k, v in next(stream).items()} for _ in range(9)])
    train.close()
    evaluation = loader.eval_loader(opened.eval, recipe=data.recipe, image_px=(8, 10), batch_size=6,
                                    shard=Shard((0,), 1), threads=2, workers=workers)
    evaluated.append([{k: np.array(v) for k, v in b.items()} for b in evaluation.batches()])
    evaluation.close()
  for ones, twos in (taken, evaluated):
    for one, two in zip(ones, twos, strict=True):
      for name in one:
        np.testing.assert_array_equal(one[name], two[name], err_msg=name)


@pytest.mark.slow(reason='8 s: starts and kills a program with two loader processes')
@pytest.mark.skipif(not pathlib.Path('/dev/shm').is_dir(), reason='looks at /dev/shm and /proc')
def test_a_killed_program_leaves_no_process_and_no_shared_memory(tmp_path: pathlib.Path) -> None:
  script = tmp_path / 'program.py'
  script.write_text(SCRIPT)
  before = set(os.listdir('/dev/shm'))
  environment = os.environ | {'PYTHONPATH': os.pathsep.join(sys.path), 'JAX_PLATFORMS': 'cpu'}
  program = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True,
                             env=environment)
  assert program.stdout is not None and program.stdout.readline() == 'running\n'
  family = descendants(program.pid)
  held = set(os.listdir('/dev/shm')) - before
  assert len(family) >= 2 and held
  os.kill(program.pid, signal.SIGKILL)
  program.wait()
  deadline = time.monotonic() + 20
  while time.monotonic() < deadline and (any(map(alive, family)) or held & set(os.listdir('/dev/shm'))):
    time.sleep(.2)
  assert not [pid for pid in family if alive(pid)]
  assert not held & set(os.listdir('/dev/shm'))
