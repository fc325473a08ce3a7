"""ArrayRecord files in object storage: the same records in the same order as those of files, and errors."""
from __future__ import annotations

import errno
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import buckets
import numpy as np
import pytest

from tests.data import prepared_sets
from vit_jax.config import schema
from vit_jax.core import failures
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.core.types import Shard
from vit_jax.data import loader, open_files, storage
from vit_jax.data.formats import array_record, example, remote_records
from vit_jax.data.source import Source

SIZES = np.random.default_rng(3).integers(0, 40_000, 300).tolist()
CONTENT = [np.random.default_rng(i).bytes(n) if i % 2 else bytes(n) for i, n in enumerate(SIZES)]


@pytest.fixture(autouse=True)
def own_state(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
  """Nothing that another test has started, kept or opened."""
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  monkeypatch.setattr(storage, '_state', storage._State(storage.Settings()))
  open_files.pool.cache_clear()
  yield
  open_files.pool.cache_clear()


def write(path: pathlib.Path, options: str, content: list[bytes]) -> pathlib.Path:
  from array_record.python import array_record_module
  writer = array_record_module.ArrayRecordWriter(str(path), options)
  for record in content:
    writer.write(record)
  writer.close()
  return path


def put(server: buckets.Server, path: pathlib.Path) -> str:
  server.generation += 1
  server.objects[f'bucket/{path.name}'] = (server.generation, path.read_bytes())
  return f'gs://bucket/{path.name}'


def open_remote(server: buckets.Server, path: pathlib.Path, num: int) -> array_record.ArrayRecords:
  return array_record.ArrayRecords([put(server, path)], [num], [path.stat().st_size])


@pytest.mark.parametrize('options', ['group_size:1', 'group_size:1,uncompressed', 'group_size:7', 'group_size:300',
                                     'group_size:10,transpose'])
def test_records_are_those_of_the_local_file_in_any_order(bucket: buckets.Server, tmp_path: pathlib.Path,
                                                          options: str) -> None:
  found = open_remote(bucket, write(tmp_path / 'x', options, CONTENT), 300)
  num = 20 if options == 'group_size:300' else 300  # each of them reads all
  for order in (range(num), range(num - 1, -1, -1), np.random.default_rng(0).permutation(300)[:num].tolist()):
    assert all(found[i] == CONTENT[i] for i in order)


@pytest.mark.parametrize('content', [[b'one'], [b'', b'two', b''], [b'x' * 70_000] * 2, [b'y'] * 20_000])
def test_small_and_large_files_are_read(bucket: buckets.Server, tmp_path: pathlib.Path, content: list[bytes]) -> None:
  found = open_remote(bucket, write(tmp_path / 'x', 'group_size:1', content), len(content))
  assert found[0] == content[0] and found[len(content) - 1] == content[-1]


def test_offsets_longer_than_expected_are_read_in_a_second_request(
    bucket: buckets.Server, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(remote_records, '_MAX_ENTRY_BYTES', 0)
  content = [np.random.default_rng(i).bytes(i % 90) for i in range(20_000)]
  found = open_remote(bucket, write(tmp_path / 'x', 'group_size:1,uncompressed', content), 20_000)
  assert [found[i] for i in (0, 19_999, 777)] == [content[i] for i in (0, 19_999, 777)]


def test_the_local_file_takes_no_space_and_leaves_nothing(bucket: buckets.Server, tmp_path: pathlib.Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
  import os
  (tmp_path / 'here').mkdir()
  monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path / 'here'))
  path = write(tmp_path / 'x', 'group_size:1,uncompressed', CONTENT)
  opened = remote_records.RemoteRecords(put(bucket, path), 300, path.stat().st_size)
  for place in range(300):
    assert opened.decode(place, storage.read(*opened.span(place))) == CONTENT[place]
    assert os.fstat(opened._local_file).st_blocks == 0
  assert list((tmp_path / 'here').iterdir()) == []
  opened.close()


def test_storage_that_fails_is_no_damaged_record(bucket: buckets.Server, tmp_path: pathlib.Path,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
  found = open_remote(bucket, write(tmp_path / 'x.array_record', 'group_size:1', [b'one', b'two']), 2)
  assert found[0] == b'one'

  def fail(*_: object) -> bytes:
    raise TemporaryError('reading gs://bucket/x: expected success within 300 s, got HTTP 503.')
  monkeypatch.setattr(storage, 'read', fail)
  with pytest.raises(TemporaryError, match='got HTTP 503'):
    found[1]


def test_a_damaged_record_is_a_bad_image_and_others_are_read(bucket: buckets.Server, tmp_path: pathlib.Path) -> None:
  path = write(tmp_path / 'x', 'group_size:1', CONTENT)
  content = bytearray(path.read_bytes())
  content[200_000] ^= 1
  path.write_bytes(content)
  found, bad = open_remote(bucket, path, 300), []
  for place in range(300):
    try:
      assert found[place] == CONTENT[place]
    except example.BadRecord as error:
      bad.append(str(error))
  assert len(bad) == 1 and 'of gs://bucket/x is damaged: Corrupted Riegeli/records file' in bad[0]


@pytest.mark.parametrize('change, said', [
    (lambda content: content[:-1], 'got another size'),
    (lambda content: content[:2**16], 'got another size'),
    (lambda content: bytes(len(content)), 'expected an ArrayRecord file of .* bytes, got'),
    (lambda content: content[:-2**16] + bytes(2**16), 'expected an ArrayRecord file of .* bytes, got')])
def test_another_file_is_an_error_that_names_it(bucket: buckets.Server, tmp_path: pathlib.Path, change: object,
                                                said: str) -> None:
  path = write(tmp_path / 'x', 'group_size:1', CONTENT)
  address = put(bucket, path)
  bucket.objects['bucket/x'] = (99, change(path.read_bytes()))  # type: ignore[operator]
  with pytest.raises(UserError, match=f'gs://bucket/x: .*{said}'):
    _ = array_record.ArrayRecords([address], [300], [path.stat().st_size])[0]


def test_another_number_of_records_is_an_error(bucket: buckets.Server, tmp_path: pathlib.Path) -> None:
  with pytest.raises(UserError, match='gs://bucket/x: expected 299 records, got 300'):
    _ = open_remote(bucket, write(tmp_path / 'x', 'group_size:1', CONTENT), 299)[0]


@pytest.fixture
def both(bucket: buckets.Server, tmp_path: pathlib.Path) -> tuple[Source, Source]:
  """The training split of a prepared dataset, of files and in object storage."""
  folder = prepared_sets.write(tmp_path / 'set')
  address = prepared_sets.upload(folder, bucket, f'gs://bucket/{tmp_path.name}/digits')
  return prepared_sets.open_all(folder).train, prepared_sets.open_all(address).train


def train(source: Source, workers: int = 0, threads: int = 2) -> loader.TrainLoader:
  return loader.train_loader(source, recipe=schema.Recipe(), image_px=(8, 8), batch_size=64, seed=0,
                             shard=Shard((0,), 1), workers=workers, threads=threads, in_memory=False, max_bad_images=0)


@pytest.mark.parametrize('workers', [0, pytest.param(2, marks=pytest.mark.slow(reason='5 s: starts processes'))])
def test_batches_are_those_of_the_files(both: tuple[Source, Source], workers: int, tmp_path: pathlib.Path) -> None:
  assert both[0].digest == both[1].digest and both[1].name == f'array_record:gs://bucket/{tmp_path.name}/digits/train'
  loaders = [train(source, workers) for source in both]
  for _, local, remote in zip(range(30), *(made.batches(0) for made in loaders), strict=False):
    assert local.keys() == remote.keys() and all(np.array_equal(local[name], remote[name]) for name in local)
  for made in loaders:
    made.close()


def test_reads_of_a_batch_begin_before_they_are_needed_and_none_is_left(
    both: tuple[Source, Source], bucket: buckets.Server) -> None:
  indexes = np.random.default_rng(0).permutation(len(both[1]))[:200].tolist()
  bucket.fail('slow', 'GET', 'bucket/*.array_record', count=1_000, seconds=.05)
  began_s = time.monotonic()
  assert [one.image for one in both[1].read(indexes)] == [one.image for one in both[0].read(indexes)]
  assert time.monotonic() - began_s < 3. and not storage._state.num_bytes  # one after the other they take 10 s
  given_up = both[1].read(indexes)
  next(given_up)
  assert storage._state.num_bytes
  del given_up
  assert not storage._state.num_bytes


def test_opening_data_sets_how_their_process_and_its_loader_processes_read(tmp_path: pathlib.Path) -> None:
  prepared_sets.open_all(prepared_sets.write(tmp_path / 'set'), read_ahead_mib=3)
  expected = storage.Settings(3 * 2**20)
  assert storage.settings() == expected
  script = ('from vit_jax.data import storage; from vit_jax.data import workers; import os; '
            'from vit_jax.record import console; '
            f'workers._start_loader(os.getppid(), storage.{expected!r}, console.message_form(), 5., 0, 1); '
            'print(storage.settings())')
  found = subprocess.run([sys.executable, '-c', script], capture_output=True, text=True, check=False, timeout=60)
  assert found.stdout.strip() == repr(expected), found.stderr


def test_a_shard_that_is_missing_or_another_dataset_is_named(bucket: buckets.Server, tmp_path: pathlib.Path) -> None:
  with pytest.raises(UserError, match='gs://bucket/none: expected a prepared dataset, got no info.json'):
    prepared_sets.open_all('gs://bucket/none')
  address = prepared_sets.upload(prepared_sets.write(tmp_path / 'set'), bucket, 'gs://bucket/sets/digits')
  opened = prepared_sets.open_all(f'{address}/t*-00001-of-*')
  assert len(opened.train) < prepared_sets.NUM_TRAIN
  del bucket.objects['bucket/sets/digits/train-00001-of-00004.array_record']
  with pytest.raises(UserError, match='train-00001-of-00004.array_record.*: expected to read it, got "No such file'):
    next(train(opened.train).batches(0))


def test_a_storage_that_fails_is_no_damaged_file(monkeypatch: pytest.MonkeyPatch) -> None:
  """Without repeating, as with train.retry=0."""
  def fail(*_: object) -> bytes:
    raise OSError(errno.EIO, os.strerror(errno.EIO))
  monkeypatch.setattr(storage, 'read_file', fail)
  monkeypatch.setattr(failures, '_patience_s', 0.)
  with pytest.raises(TemporaryError, match='^gs://bucket/set/info.json: expected to read it, got') as caught:
    array_record.read_info('gs://bucket/set')
  assert 'damaged' not in str(caught.value)
