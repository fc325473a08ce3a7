"""Loader processes: the same batches, and none of them left behind."""
from __future__ import annotations

import errno
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest

from vit_jax.config import schema
from vit_jax.core import retrying
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.core.types import Shard
from vit_jax.data.files import open_files
from vit_jax.data.pipeline import loader, prefetch, shared
from vit_jax.data.sources import opening

SCRIPT = """
import sys, time
from vit_jax.config import schema
from vit_jax.core.types import Shard
from vit_jax.data.pipeline import loader
from vit_jax.data.sources import opening
if __name__ == '__main__':
  source = opening.open_split(schema.Data(source='synthetic', num_examples=37), 'train', image_px=(64, 64))
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
  assert open_files.num_threads(5) == 5
  assert 1 <= open_files.num_threads(0) <= open_files.MAX_THREADS


class Dying:
  """Numbers as batches, of processes that die before some of them, each once."""

  def __init__(self, before: dict[int, Exception]) -> None:
    self.before, self.started = before, list[range]()

  def __call__(self, numbers: range) -> Iterator[int]:
    self.started.append(numbers)
    for number in numbers:
      if number in self.before:
        raise self.before.pop(number)
      yield number


def death(status: int = -9) -> RuntimeError:
  return RuntimeError(f'Worker process was terminated unexpectedly with exit code {status}. Search the logs above')


def test_processes_that_die_are_started_once_more_from_the_same_batch(caplog: pytest.LogCaptureFixture) -> None:
  dying = Dying({9: death()})
  assert list(prefetch.RestartingIterator(dying, range(4, 20, 2))) == [4, 6, 8, 10, 12, 14, 16, 18]
  dying = Dying({8: death()})
  assert list(prefetch.RestartingIterator(dying, range(4, 20, 2))) == [4, 6, 8, 10, 12, 14, 16, 18]
  assert dying.started == [range(4, 20, 2), range(8, 20, 2)]
  assert 'A loader process ended with exit status -9; all are restarted from the same batch' in caplog.text


def test_another_number_of_processes_goes_on_with_the_next_batch() -> None:
  workers, started = [0], list[tuple[range, int]]()

  def start(numbers: range, num: int) -> Iterator[int]:
    started.append((numbers, num))
    return iter_closable(numbers)
  made = prefetch.AdjustingIterator(start, range(4, 20, 2), lambda: workers[0])
  assert [next(made), next(made)] == [4, 6]
  workers[0] = 3
  assert list(made) == [8, 10, 12, 14, 16, 18]
  assert started == [(range(4, 20, 2), 0), (range(8, 20, 2), 3)]


def iter_closable(numbers: range) -> Iterator[int]:
  yield from numbers


def test_a_second_death_soon_after_stops_with_the_usual_causes(monkeypatch: pytest.MonkeyPatch) -> None:
  made = prefetch.RestartingIterator(Dying({2: death(), 3: death(-7)}), range(9))
  assert [next(made) for _ in range(3)] == [0, 1, 2]
  with pytest.raises(UserError, match='ended with exit status -7, the second within 10 minutes. The usual cause'):
    next(made)
  monkeypatch.setattr(shared, 'is_possible', lambda: True)
  assert 'too little memory of the machine or container' in prefetch.causes() and '/dev/shm' not in prefetch.causes()
  monkeypatch.setattr(shared, 'is_possible', lambda: False)
  assert re.search('too little memory .* /dev/shm has [0-9,]+ MiB here, [0-9,]+ MiB of them free.*'
                   'emptyDir with medium: Memory at /dev/shm', prefetch.causes())
  assert 'there is no /none here' in prefetch.causes('/none')
  now = iter([1_000., 1_000. + prefetch.DEATHS_WITHIN_S + 1])
  monkeypatch.setattr(prefetch.time, 'monotonic', lambda: next(now))
  assert list(prefetch.RestartingIterator(Dying({2: death(), 3: death()}), range(5))) == [0, 1, 2, 3, 4]


def test_other_errors_of_processes_are_no_deaths() -> None:
  with pytest.raises(RuntimeError, match='broken'):
    list(prefetch.RestartingIterator(Dying({2: RuntimeError('broken')}), range(5)))
  full = OSError(errno.ENOSPC, 'No space left on device')
  with pytest.raises(UserError, match='the shared memory of loader processes ./dev/shm.: expected .* got "No space'):
    list(prefetch.RestartingIterator(Dying({2: full}), range(5)))


def kill_one(before: set[int]) -> None:
  """Kills a loader process: the largest of the new children."""
  def memory(pid: int) -> int:
    return int(pathlib.Path(f'/proc/{pid}/statm').read_text().split()[1])
  os.kill(max(descendants(os.getpid()) - before, key=memory), signal.SIGKILL)


@pytest.mark.slow(reason='20 s: a loader process is killed twice, and started twice')
@pytest.mark.skipif(not pathlib.Path('/proc').is_dir(), reason='looks at /proc')
def test_a_killed_loader_process_changes_no_batch_and_a_second_one_stops_the_run(image_folder: pathlib.Path) -> None:
  data = schema.Data(source=f'folder:{image_folder}')
  train = opening.open_sources(data, image_px=(8, 10)).train
  taken = []
  for workers in (0, 1):
    made = loader.train_loader(train, recipe=data.recipe, image_px=(8, 10), batch_size=6, seed=0, shard=Shard((0,), 1),
                               workers=workers, threads=2, in_memory=False, max_bad_images=0)
    before, stream, batches = descendants(os.getpid()), made.batches(4), []
    for number in range(20):
      batches.append({k: np.array(v) for k, v in next(stream).items()})
      if workers and number == 5:
        kill_one(before)
    taken.append(batches)
    if workers:
      kill_one(before)
      with pytest.raises(TemporaryError, match='exit status -9, the second within 10 minutes'):
        for _ in range(50):
          next(stream)
    made.close()
  for one, two in zip(*taken, strict=True):
    for name in one:
      np.testing.assert_array_equal(one[name], two[name], err_msg=name)


@pytest.mark.slow(reason='8 s: three loader processes import everything anew')
def test_loader_processes_give_the_same_batches(image_folder: pathlib.Path) -> None:
  data = schema.Data(source=f'folder:{image_folder}')
  opened = opening.open_sources(data, image_px=(8, 10))
  taken, evaluated = [], []
  for workers in (0, 2):
    train = loader.train_loader(opened.train, recipe=data.recipe, image_px=(8, 10), batch_size=6, seed=0,
                                shard=Shard((0,), 1), workers=workers, threads=2, in_memory=False,
                                max_bad_images=0)
    stream = train.batches(4)
    taken.append([{k: np.array(v) for k, v in next(stream).items()} for _ in range(9)])
    train.close()
    evaluation = loader.eval_loader(opened.eval, recipe=data.recipe, image_px=(8, 10), batch_size=6,
                                    shard=Shard((0,), 1), threads=2, workers=min(workers, 1))
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


WARNING = """
import logging, sys
import numpy as np
from vit_jax.data.pipeline import prefetch
from vit_jax.record import console
def make(number):
  logging.getLogger('vit_jax.storage').warning('reading %d failed and is tried again', number)
  return {'index': np.arange(3)}
if __name__ == '__main__':
  console.name_host(3)
  stream = prefetch.prefetched(make, range(2), threads=1, workers=1)
  print(len(list(stream)))
"""


@pytest.mark.slow(reason='4 s: a process that starts a loader process')
def test_warnings_of_a_loader_process_look_like_those_of_its_host(tmp_path: pathlib.Path) -> None:
  (tmp_path / 'warning.py').write_text(WARNING)
  done = subprocess.run([sys.executable, str(tmp_path / 'warning.py')], capture_output=True, text=True, check=True,
                        env=os.environ | {'PYTHONPATH': str(pathlib.Path(__file__).parents[2])}, timeout=120)
  assert done.stdout == '2\n'
  assert re.findall(r'^ *[\d.]+ s  (.*)$', done.stderr, re.M) == [
      f'host 3: warning: reading {number} failed and is tried again' for number in range(2)], done.stderr


def test_loader_processes_have_the_patience_of_their_parent(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(prefetch, 'start_worker', lambda *_: None)
  prefetch._start_loader(1, prefetch.ranges.settings(), prefetch.console.messages(), 7., 0, 1)
  assert retrying.patience() == 7.
