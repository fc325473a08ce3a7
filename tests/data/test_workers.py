"""Threads and loader processes: as many as there is room for, the same batches, and none of them left behind."""
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

from vit_jax.config import overrides, schema
from vit_jax.core import failures
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.core.types import Shard
from vit_jax.data import loader, open_files, opening, workers
from vit_jax.data.workers import Machine, Workers

SCRIPT = """
import sys, time
from vit_jax.config import schema
from vit_jax.core.types import Shard
from vit_jax.data import loader
from vit_jax.data import opening
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


def failing(error: Exception) -> Iterator[int]:
  """A batch of processes that then fail."""
  yield 0
  raise error


def test_a_loader_process_that_dies_stops_the_run_with_the_usual_causes() -> None:
  for status, kind in ((-9, TemporaryError), (-7, UserError)):
    death = RuntimeError(f'Worker process was terminated unexpectedly with exit code {status}. Search the logs above')
    made = workers._Processes(failing(death))
    assert next(made) == 0
    with pytest.raises(kind, match='expected running loader processes, got one that ended with exit status '
                       f'{status}.*too little memory of the machine or container'):
      next(made)


def test_other_errors_of_processes_are_no_deaths() -> None:
  with pytest.raises(RuntimeError, match='broken'):
    list(workers._Processes(failing(RuntimeError('broken'))))
  full = OSError(errno.ENOSPC, 'No space left on device')
  with pytest.raises(UserError, match='the shared memory of loader processes ./dev/shm.: expected .* got "No space'):
    list(workers._Processes(failing(full)))


def kill_one(before: set[int]) -> None:
  """Kills a loader process: the largest of the new children."""
  def memory(pid: int) -> int:
    return int(pathlib.Path(f'/proc/{pid}/statm').read_text().split()[1])
  os.kill(max(descendants(os.getpid()) - before, key=memory), signal.SIGKILL)


@pytest.mark.slow(reason='10 s: a loader process is killed, and started again')
@pytest.mark.skipif(not pathlib.Path('/proc').is_dir(), reason='looks at /proc')
def test_a_killed_loader_process_ends_the_run_which_resumes_with_the_next_batch(image_folder: pathlib.Path) -> None:
  data = schema.Data(source=f'folder:{image_folder}')
  train = opening.open_sources(data, image_px=(8, 10)).train

  def make(processes: int) -> loader.TrainLoader:
    return loader.train_loader(train, recipe=data.recipe, image_px=(8, 10), batch_size=6, seed=0, shard=Shard((0,), 1),
                               workers=processes, threads=2, in_memory=False, max_bad_images=0)
  whole = [{k: np.array(v) for k, v in batch.items()} for batch, _ in zip(make(0).batches(4), range(20), strict=False)]
  made, taken, before = make(1), [], descendants(os.getpid())
  with pytest.raises(TemporaryError, match='got one that ended with exit status -9'):
    for number, batch in enumerate(made.batches(4)):
      taken.append({k: np.array(v) for k, v in batch.items()})
      if number == 5:
        kill_one(before)
      assert number < 60
  made.close()
  for batch, _ in zip(make(0).batches(4 + len(taken)), range(20), strict=False):
    taken.append(batch)
  for one, two in zip(whole, taken, strict=False):
    for name in one:
      np.testing.assert_array_equal(one[name], two[name], err_msg=name)


@pytest.mark.slow(reason='8 s: three loader processes import everything anew')
def test_loader_processes_give_the_same_batches(image_folder: pathlib.Path) -> None:
  data = schema.Data(source=f'folder:{image_folder}')
  opened = opening.open_sources(data, image_px=(8, 10))
  taken = []
  for processes in (0, 2):
    train = loader.train_loader(opened.train, recipe=data.recipe, image_px=(8, 10), batch_size=6, seed=0,
                                shard=Shard((0,), 1), workers=processes, threads=2, in_memory=False,
                                max_bad_images=0)
    stream = train.batches(4)
    taken.append([{k: np.array(v) for k, v in next(stream).items()} for _ in range(9)])
    train.close()
  for one, two in zip(*taken, strict=True):
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
from vit_jax.data import workers
from vit_jax.record import console
def make(number):
  logging.getLogger('vit_jax.storage').warning('reading %d failed and is tried again', number)
  return {'index': np.arange(3)}
if __name__ == '__main__':
  console.name_host(3)
  stream = workers.batches(make, range(2), workers.Workers(1, 1))
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
  monkeypatch.setattr(workers, 'start_worker', lambda *_: None)
  workers._start_loader(1, workers.storage.settings(), workers.console.message_form(), 7., 0, 1)
  assert failures.patience() == 7.


GIB = 2**30
TPU_HOST, LAPTOP = Machine(240, 400 * GIB), Machine(8, 16 * GIB)
AUTO = schema.AUTO_WORKERS
SHAPES = {'image': ((10, 10, 3), np.uint8), 'box': ((4,), np.float32)}  # 316 bytes, and 8 of its number


@pytest.mark.parametrize(('batch', 'shard', 'fits'), [
    (10, Shard((0,), 1), True), (11, Shard((0,), 1), False), (20, Shard((1,), 2), True), (22, Shard((1,), 2), False),
    (10**9, Shard((0,), 1), False)])
def test_the_part_of_this_process_counts(batch: int, shard: Shard, fits: bool,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(workers, 'memory_bytes', lambda: 3240)
  if fits:
    workers.check_memory('batch_size', batch, shard, SHAPES)
    return
  most = 10 * shard.count
  with pytest.raises(UserError, match=f'^batch_size: expected .* at most {most} examples, got {batch:,},'):
    workers.check_memory('batch_size', batch, shard, SHAPES)


def test_a_container_may_have_less_than_the_machine(tmp_path: pathlib.Path) -> None:
  whole = workers.memory_bytes(tmp_path)
  assert whole > 2**28
  (tmp_path / 'sys/fs/cgroup').mkdir(parents=True)
  for text, found in (('max\n', whole), ('123456789\n', 123456789), (f'{whole * 8}', whole)):
    (tmp_path / 'sys/fs/cgroup/memory.max').write_text(text)
    assert workers.memory_bytes(tmp_path) == found


def test_auto_is_the_default_and_a_word_of_the_command_line() -> None:
  assert schema.Data().workers == AUTO
  config = {'x': schema.Config(data=schema.Data(workers=3))}
  assert overrides.changed(config, ['data.workers=auto'])['x'].data.workers == AUTO
  assert overrides.changed(config, ['data.workers=0'])['x'].data.workers == 0


@pytest.mark.parametrize(('setting', 'num_examples', 'batch_bytes', 'here', 'found'), [
    (5, 10, 10, LAPTOP, 5), (0, 10**9, 10, TPU_HOST, 0),
    (AUTO, 10**9, 150 * 2**20, TPU_HOST, 15), (AUTO, 10**9, 150 * 2**20, LAPTOP, 0), (AUTO, 1_000, 10, TPU_HOST, 0),
    (AUTO, 10**9, 5 * GIB, TPU_HOST, 5), (AUTO, 10**9, 50 * GIB, TPU_HOST, 0)])
def test_a_run_starts_with_processes_where_cores_data_and_memory_are_there(
    setting: int, num_examples: int, batch_bytes: int, here: Machine, found: int) -> None:
  made = workers.choose_processes(Workers(1, setting, batch_bytes), num_examples=num_examples, here=here)
  assert made == Workers(1, found, batch_bytes)


@pytest.mark.parametrize(('host', 'step', 'busy_cores', 'processes', 'batch_bytes', 'said'), [
    (8_400, 16_000, 14., 0, 2**20, 'The host makes 8.4k of the 16k images/s that the step takes: the threads of one '
     'process use 14.0 of 240 cores; set data.workers=3.'),
    (16_000, 44_000, 30., 3, 2**20, '3 loader processes use 30.0 of 240 cores; set data.workers=10.'),
    (16_000, 16_000, 30., 3, 2**20, ''),
    (900, 16_000, 230., 3, 2**20, 'The host makes 900 of the 16k images/s that the step takes: its 240 cores are busy. '
     'Store smaller images'),
    (900, 16_000, 30., 3, 50 * GIB, '240 cores, and there is no memory for more processes.')])
def test_the_advice_names_the_processes_that_the_step_needs(
    host: float, step: float, busy_cores: float, processes: int, batch_bytes: int, said: str) -> None:
  text = workers.advice(host, step, busy_cores, Workers(0, processes, batch_bytes), here=TPU_HOST)
  assert said in text and bool(said) == bool(text)


def test_busy_cores_are_told_of_the_decoder_of_crops_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
  for is_installed in (True, False):
    monkeypatch.setattr(workers.jpeg, 'is_installed', lambda is_installed=is_installed: is_installed)
    text = workers.advice(900, 16_000, 230., Workers(0, 3, 2**20), here=TPU_HOST)
    assert ('decode only crops of JPEG files (pip install ' in text) == (not is_installed)
    assert text.endswith(', or use a host with more cores.')


@pytest.mark.parametrize(('threads', 'processes', 'batch_bytes', 'cores', 'expected'), [
    (0, 0, 10, 4, (4, 4)), (0, 0, 10, 112, (16, 16)), (0, 7, 10, 112, (16, 16)), (0, 10, 10, 112, (12, 12)),
    (6, 4, 10, 112, (2, 2)), (40, 0, 0, 4, (40, 40)),
    (0, 0, 1_000, 112, (16, 9)),  # a quarter of 100,000 bytes: 25 batches
    (0, 2, 1_000, 112, (9, 1)), (0, 2, 4_000, 112, (1, 1)), (0, 0, 10**9, 112, (1, 1))])
def test_batches_ahead_take_a_quarter_of_the_memory(threads: int, processes: int, batch_bytes: int, cores: int,
                                                    expected: tuple[int, int]) -> None:
  assert workers.sizes(Workers(threads, processes, batch_bytes), Machine(cores, 100_000)) == expected
