"""A bounded number of open files: the least recently used is closed first, and none that is being read."""
from __future__ import annotations

import concurrent.futures
import errno
import functools
import os
import pathlib
import resource
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from vit_jax.core import failures
from vit_jax.data import open_files, storage
from vit_jax.data.formats import array_record, tfrecord

SCRIPT = """
import os, pathlib, resource, sys
import numpy as np
from vit_jax.data import open_files
from vit_jax.data.formats import array_record, tfrecord
paths = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
open_files.raise_limit()
for kind in (array_record.ArrayRecords, tfrecord.TfRecords):
  chosen = [p for p in paths if p.endswith('.array_record') == (kind is array_record.ArrayRecords)]
  stored = kind(chosen, [1] * len(chosen))
  order = np.random.default_rng(0).permutation(len(chosen)).tolist()
  assert [stored[i] for i in order] == [str(i).encode() for i in order]
  held = len(os.listdir('/proc/self/fd'))
  assert held < 36, held  # some are left for others
"""


def write_shards(folder: pathlib.Path, num: int) -> list[str]:
  """Files of both formats with a record each, which is the file's number."""
  import struct

  from array_record.python import array_record_module

  for number in range(num):
    record = str(number).encode()
    writer = array_record_module.ArrayRecordWriter(str(folder / f'{number:04d}.array_record'), 'group_size:1')
    writer.write(record)
    writer.close()
    head = struct.pack('<Q', len(record))
    mask = tfrecord.mask
    (folder / f'{number:04d}.tfrecord').write_bytes(head + mask(head) + record + mask(record))
  return sorted(map(str, folder.iterdir()))


def use(pool: open_files.Pool, name: str, log: list[str]) -> str:
  with pool.use(name, lambda: log.append(f'+{name}') or name, lambda file: log.append(f'-{file}')) as file:  # type: ignore[func-returns-value]
    return file


def test_the_file_used_least_recently_is_closed_first() -> None:
  log: list[str] = []
  pool = open_files.Pool(2)
  for name in 'abacb':
    assert use(pool, name, log) == name
  assert log == ['+a', '+b', '+c', '-b', '+b', '-a'] and len(pool) == 2


def test_a_file_that_is_being_read_stays_open() -> None:
  log: list[str] = []
  pool = open_files.Pool(1)
  with pool.use('a', lambda: 'a', lambda file: log.append(f'-{file}')):
    use(pool, 'b', log)
    use(pool, 'c', log)
    assert '-a' not in log
  use(pool, 'd', log)
  assert '-a' in log and len(pool) == 1


def test_a_file_that_cannot_be_opened_leaves_nothing_behind() -> None:
  pool = open_files.Pool(2)
  with pytest.raises(FileNotFoundError), pool.use('a', lambda: open('/nowhere/at/all'), lambda file: file.close()):
    pass
  assert len(pool) == 0


def test_threads_share_files_and_none_is_closed_under_one(tmp_path: pathlib.Path) -> None:
  for number in range(9):
    (tmp_path / str(number)).write_bytes(bytes([number]) * 10)
  pool, opened = open_files.Pool(3), []

  def read(number: int) -> bytes:
    path = tmp_path / str(number % 9)
    with pool.use(path.name, lambda: opened.append(1) or os.open(path, os.O_RDONLY), os.close) as file:  # type: ignore[func-returns-value]
      return os.pread(file, 10, 0)

  before = len(os.listdir('/proc/self/fd'))
  with concurrent.futures.ThreadPoolExecutor(8) as threads:
    found = list(threads.map(read, range(2_000)))
  assert found == [bytes([number % 9]) * 10 for number in range(2_000)]
  assert len(pool) <= 3 and len(os.listdir('/proc/self/fd')) <= before + 3


def test_the_limit_is_raised_to_what_the_system_allows(monkeypatch: pytest.MonkeyPatch) -> None:
  for limits, want in (((1024, 4096), (4096, 4096)), ((1024, 10**9), (65_536, 10**9)), ((4096, 4096), None),
                       ((256, resource.RLIM_INFINITY), (65_536, resource.RLIM_INFINITY)),
                       ((resource.RLIM_INFINITY,) * 2, None), ((10**6, 10**6), None)):
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, 'getrlimit', lambda kind, limits=limits: limits)
    monkeypatch.setattr(resource, 'setrlimit', lambda kind, new, made=made: made.append(new))
    open_files.raise_limit()
    assert made == ([want] if want else []), limits


def test_an_error_of_the_system_is_no_damage_of_a_record(tmp_path: pathlib.Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
  paths = [p for p in write_shards(tmp_path, 1) if p.endswith('array_record')]
  stored = array_record.ArrayRecords(paths, [1])
  for text in ('open() failed: Too many open files; opening x', 'pread() failed: Input/output error; at byte 5'):
    def fail(path: str, count: int, text: str = text) -> None:
      raise RuntimeError(text)
    with monkeypatch.context() as patch, pytest.raises(OSError, match='Too many open files|output error') as found:
      patch.setattr(array_record, '_open_array_record', fail)
      patch.setattr(open_files, 'pool', functools.partial(open_files.Pool, 1))
      stored[0]
    assert found.value.filename == paths[0]
  assert stored[0] == b'0'


@pytest.mark.slow(reason='6 s: a program of its own, which may open 40 files, reads 200 shards of each format')
def test_more_shards_than_files_that_may_be_open_are_read(tmp_path: pathlib.Path) -> None:
  paths = write_shards(tmp_path, 200)
  environ = os.environ | {'PYTHONPATH': os.pathsep.join(sys.path), 'XDG_CACHE_HOME': str(tmp_path / 'cache')}
  subprocess.run([sys.executable, '-c', SCRIPT, *paths], check=True, timeout=120, env=environ)


def test_a_file_is_opened_in_place_of_an_idle_one_where_other_code_has_opened_many() -> None:
  pool, closed, tries = open_files.Pool(4), list[str](), list[int]()
  for name in ('a', 'b'):
    with pool.use(name, lambda name=name: name, closed.append):
      pass

  def open_third() -> str:
    tries.append(1)
    if len(closed) < 1:
      raise OSError(errno.EMFILE, 'Too many open files')
    return 'c'

  with pool.use('a', lambda: 'again', closed.append) as used, pool.use('c', open_third, closed.append) as third:
    assert (used, third, closed, len(tries)) == ('a', 'c', ['b'], 2)


def test_a_file_that_the_file_system_lost_is_opened_anew_before_the_next_try(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  (tmp_path / 'a').write_bytes(b'0123456789')
  read, stale, closed = os.pread, set[int](), list[int]()

  def pread(file: int, size: int, offset: int) -> bytes:
    if not stale:
      stale.add(file)
    if file in stale and file not in closed:
      raise OSError(errno.ESTALE, 'Stale file handle')
    return read(file, size, offset)

  pool, close = open_files.Pool(4), os.close
  monkeypatch.setattr(open_files, 'pool', lambda: pool)
  monkeypatch.setattr(os, 'pread', pread)
  monkeypatch.setattr(os, 'close', lambda file: (closed.append(file), close(file)))
  monkeypatch.setattr(failures.time, 'sleep', lambda s: None)
  assert storage.read(str(tmp_path / 'a'), 2, 3) == b'234'
  assert closed == list(stale) and len(pool) == 1


class _Handover:
  """A lock that lets another thread run once, right after it was released."""

  def __init__(self) -> None:
    self._lock, self.then = threading.Lock(), list[Callable[[], object]]()

  def __enter__(self) -> None:
    self._lock.acquire()

  def __exit__(self, *_: object) -> None:
    self._lock.release()
    if self.then:
      self.then.pop()()


def test_a_broken_file_that_two_threads_give_back_at_once_is_closed_once(monkeypatch: pytest.MonkeyPatch) -> None:
  """A second close would hit a descriptor that other code has opened meanwhile."""
  pool, lock, closed = open_files.Pool(2), _Handover(), list[str]()
  monkeypatch.setattr(pool, '_lock', lock)
  first, second = (pool.use('a', lambda: 'a', closed.append) for _ in range(2))
  first.__enter__()
  second.__enter__()
  lock.then.append(lambda: second.__exit__(None, None, None))
  first.__exit__(OSError, OSError(), None)
  assert closed == ['a']
