"""The folder with parts of remote objects: bounded, shared by processes, and never incomplete."""
from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import buckets
import numpy as np
import pytest

from vit_jax.core.errors import UserError
from vit_jax.data.files import open_files, ranges
from vit_jax.data.files.range_cache import Cache
from vit_jax.data.files.ranges import Settings

RNG = np.random.default_rng(0)
PARTS = [(i * 50_000, RNG.bytes(int(RNG.integers(1, 50_000)))) for i in range(40)]
MIB = 2**20


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
  """No file of another test is open."""
  open_files.pool.cache_clear()
  yield
  open_files.pool.cache_clear()


@pytest.fixture
def cache(tmp_path: pathlib.Path) -> Cache:
  return Cache(tmp_path / 'kept', 100 * MIB)


def put_all(cache: Cache, path: str = 'gs://b/d/x', generation: bytes = b'1') -> None:
  for offset, content in PARTS:
    cache.put(path, generation, offset, content)


def find_all(cache: Cache, path: str = 'gs://b/d/x', generation: bytes = b'1') -> int:
  """The number of parts that are kept; each is right."""
  found = [cache.get(path, generation, offset, len(content)) for offset, content in PARTS]
  assert all(one in (None, content) for one, (_, content) in zip(found, PARTS, strict=True))
  return sum(one is not None for one in found)


def test_parts_are_returned_as_they_were_put_also_by_another_process(cache: Cache) -> None:
  assert find_all(cache) == 0
  put_all(cache)
  assert find_all(cache) == 40 == find_all(Cache(cache.folder, 100 * MIB))
  assert cache.has('gs://b/d/x', b'1', *map(int, (PARTS[3][0], len(PARTS[3][1]))))


def test_another_object_generation_or_range_is_not_there(cache: Cache) -> None:
  put_all(cache)
  assert find_all(cache, generation=b'2') == find_all(cache, 'gs://b/d/y') == 0
  offset, content = PARTS[5]
  assert cache.get('gs://b/d/x', b'1', offset, len(content) - 1) is None
  assert cache.get('gs://b/d/x', b'1', offset + 1, len(content) - 1) is None
  assert not cache.has('gs://b/d/x', b'1', offset, len(content) + 1)


def test_a_changed_byte_or_a_mark_without_its_part_is_not_returned(cache: Cache) -> None:
  put_all(cache)
  [file] = [path for path in cache.folder.rglob('*') if path.is_file() and path.name not in ('.lock', 'used')]
  with open(file, 'r+b') as opened:
    os.pwrite(opened.fileno(), b'\xff\x00\xff', PARTS[7][0])
    offset, content = PARTS[9]
    os.pwrite(opened.fileno(), bytes(len(content)), offset)
  assert find_all(cache) == 38


def test_the_folder_is_bounded_and_a_full_one_keeps_what_it_has(tmp_path: pathlib.Path) -> None:
  cache = Cache(tmp_path / 'kept', MIB // 2)
  put_all(cache)
  first = find_all(cache)
  assert 15 < first < 40
  put_all(cache, 'gs://b/other/x')
  assert find_all(cache) == first and find_all(cache, 'gs://b/other/x') == 0
  taken = sum(path.stat().st_blocks * 512 for path in cache.folder.rglob('*') if path.is_file())
  assert taken < MIB  # parts do not fill the blocks of the file system


def test_a_full_folder_replaces_data_that_no_process_uses_the_oldest_first(tmp_path: pathlib.Path) -> None:
  script = ('import sys; sys.path.insert(0, "."); from tests.data.test_range_cache import *; '
            'cache = Cache(pathlib.Path(sys.argv[1]), 2 * MIB + 2**19); put_all(cache, sys.argv[2]); '
            'print(1, flush=True); sys.stdin.read()')
  environment = os.environ | {'PYTHONPATH': '.:tests'}

  def fill(name: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, '-c', script, str(tmp_path / 'kept'), f'gs://b/{name}/x'],
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    assert process.stdout and process.stdout.readline()
    return process

  def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    time.sleep(.05)

  used = fill('used')
  for name in ('old', 'newer', 'now'):  # there is space for two
    kill(fill(name))
    found = Cache(tmp_path / 'kept', 2 * MIB + 2**19)
    names = ('used', 'old', 'newer', 'now')
    assert [other for other in names if find_all(found, f'gs://b/{other}/x')] == ['used', name]
    for lock in found._groups.values():
      lock.close()
    open_files.pool.cache_clear()
  kill(used)


def test_a_kill_while_parts_are_written_leaves_only_complete_ones(tmp_path: pathlib.Path) -> None:
  script = ('import sys; sys.path.insert(0, "."); from tests.data.test_range_cache import *\n'
            'cache = Cache(pathlib.Path(sys.argv[1]), 100 * MIB)\n'
            'print(1, flush=True)\n'
            'while True: put_all(cache, generation=b"%d" % RNG.integers(4))')
  for _ in range(4):
    with subprocess.Popen([sys.executable, '-c', script, str(tmp_path / 'kept')], stdout=subprocess.PIPE,
                          env=os.environ | {'PYTHONPATH': '.:tests'}) as process:
      assert process.stdout and process.stdout.readline()
      time.sleep(.03 * RNG.random())
      os.kill(process.pid, signal.SIGKILL)
  cache = Cache(tmp_path / 'kept', 100 * MIB)
  assert sum(find_all(cache, generation=b'%d' % i) for i in range(4)) > 0


def test_a_disk_that_fails_is_reported_once_and_reads_go_on(cache: Cache, monkeypatch: pytest.MonkeyPatch,
                                                           caplog: pytest.LogCaptureFixture) -> None:
  def full(*args: object) -> int:
    raise OSError(28, 'No space left on device')
  with monkeypatch.context() as patch:
    patch.setattr(os, 'pwrite', full)
    put_all(cache)
  assert find_all(cache) == 0
  assert [record.getMessage() for record in caplog.records] == [
      f'data.cache_dir: expected to keep data in {cache.folder}, got "No space left on device". This process keeps no '
      'more.']


def test_ranges_come_from_the_folder_in_a_later_process_until_the_object_changes(
    bucket: buckets.Server, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  settings = Settings(cache_bytes=100 * MIB, cache_dir=str(tmp_path / 'kept'))
  content = RNG.bytes(100_000)

  def read(server: buckets.Server) -> int:
    """Reads as a new process would; returns the number of requests."""
    monkeypatch.setattr(ranges, '_state', ranges._State(settings))
    before = server.requests.get('GET', 0)
    for offset in range(0, 100_000, 10_000):
      assert ranges.start(ranges.Range('gs://bucket/kept/x', offset, 10_000))
      assert ranges.read('gs://bucket/kept/x', offset, 10_000) == content[offset:offset + 10_000]
      ranges.drop(ranges.Range('gs://bucket/kept/x', offset, 10_000))
    assert not ranges._state.started
    return server.requests['GET'] - before

  bucket.objects['bucket/kept/x'] = (1, content)
  assert read(bucket) == 10
  assert read(bucket) == 1  # which tells that the object is the same
  content = RNG.bytes(100_000)
  bucket.objects['bucket/kept/x'] = (2, content)
  assert read(bucket) == 10 and read(bucket) == 1


def test_an_object_that_changes_during_a_run_stops_it(bucket: buckets.Server, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(ranges, '_state', ranges._State(Settings()))
  bucket.objects['bucket/changing'] = (1, bytes(100))
  ranges.read('gs://bucket/changing', 0, 10)
  bucket.objects['bucket/changing'] = (2, bytes(100))
  with pytest.raises(UserError, match='gs://bucket/changing: expected an object that does not change'):
    ranges.read('gs://bucket/changing', 10, 10)


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: pathlib.Path) -> None:
  (tmp_path / 'file').write_text('')
  with pytest.raises(UserError, match='data.cache_dir: expected a folder that can be written, got .*file.x .Not a dir'):
    ranges.configure(Settings(cache_bytes=1, cache_dir=str(tmp_path / 'file' / 'x')))
