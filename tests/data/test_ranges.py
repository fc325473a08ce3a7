"""Parts of files by offset: local ones, and objects of object storage."""
from __future__ import annotations

import pathlib
import time

import buckets
import pytest

from vit_jax.core import retrying
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.data.files import ranges, remote
from vit_jax.data.files.ranges import Range
from vit_jax.data.files.user_files import TooLarge

CONTENT = bytes(range(250)) * 8


@pytest.fixture(params=['local', 'remote'])
def path(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> str:
  """A file with CONTENT, of both kinds."""
  if request.param == 'local':
    (tmp_path / 'folder').mkdir()
    (tmp_path / 'folder' / 'a').write_bytes(CONTENT)
    (tmp_path / 'folder' / 'b').write_bytes(b'')
    return str(tmp_path / 'folder' / 'a')
  bucket = request.getfixturevalue('bucket')
  put(bucket, 'gs://bucket/folder/a', CONTENT)
  put(bucket, 'gs://bucket/folder/b', b'')
  put(bucket, 'gs://bucket/folder0', b'')
  return 'gs://bucket/folder/a'


def put(server: buckets.Server, address: str, content: bytes) -> None:
  server.generation += 1
  server.objects[address.removeprefix('gs://')] = (server.generation, content)


@pytest.mark.parametrize('offset, size', [(0, 10), (100, 1), (0, 2000), (1990, 10), (1990, 11), (1990, 5000), (2000, 1),
                                          (9000, 10), (5, 0)])
def test_a_read_returns_the_bytes_that_the_file_has_there(path: str, offset: int, size: int) -> None:
  assert ranges.read(path, offset, size) == CONTENT[offset:offset + size]


def test_the_end_and_the_whole_of_a_file_are_read(path: str) -> None:
  assert ranges.read_end(path, 7) == CONTENT[-7:]
  assert ranges.read_file(path, 2000) == CONTENT
  with pytest.raises(TooLarge):
    ranges.read_file(path, 1999)


def test_names_in_a_folder_are_listed(path: str) -> None:
  assert ranges.list_names(path.rpartition('/')[0]) == ['a', 'b']


def test_a_missing_file_is_a_file_that_is_not_found(path: str) -> None:
  with pytest.raises(FileNotFoundError) as error:
    ranges.read(f'{path}x', 0, 10)
  assert error.value.filename == f'{path}x'


def test_a_read_that_was_started_is_made_once(bucket: buckets.Server) -> None:
  put(bucket, 'gs://bucket/one', CONTENT)
  parts = [Range('gs://bucket/one', offset, 100) for offset in range(0, 2000, 100)]
  before = bucket.requests.get('GET', 0)
  assert all(ranges.start(part) for part in parts)
  assert [ranges.read(*part) for part in parts] == [CONTENT[i:i + 100] for i in range(0, 2000, 100)]
  for part in parts:
    ranges.drop(part)
  assert bucket.requests['GET'] - before == 20


def test_a_range_that_two_started_is_read_by_both_with_one_request(bucket: buckets.Server) -> None:
  put(bucket, 'gs://bucket/two', CONTENT)
  part, before = Range('gs://bucket/two', 0, 100), bucket.requests.get('GET', 0)
  assert ranges.start(part) and ranges.start(part)
  assert ranges.read(*part) == ranges.read(*part) == CONTENT[:100]
  ranges.drop(part)
  assert ranges.read(*part) == CONTENT[:100]
  assert bucket.requests['GET'] - before == 1
  ranges.drop(part)
  assert ranges.read(*part) == CONTENT[:100]
  assert bucket.requests['GET'] - before == 2


def test_bytes_that_wait_are_bounded_and_dropped_ones_do_not_count(bucket: buckets.Server,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
  put(bucket, 'gs://bucket/many', CONTENT)
  monkeypatch.setattr(ranges, '_state', ranges._State(ranges.Settings(ahead_bytes=250)))
  first, second, third = (Range('gs://bucket/many', i, 100) for i in (0, 100, 200))
  assert ranges.start(first) and ranges.start(second) and not ranges.start(third)
  ranges.drop(first)
  assert ranges.start(third)
  assert ranges.read(*third) == CONTENT[200:300]
  assert not ranges.start(Range('gs://bucket/many', 0, 150))
  ranges.drop(third)
  assert ranges.start(Range('gs://bucket/many', 0, 150))


def test_storage_that_is_away_is_a_temporary_error(bucket: buckets.Server, monkeypatch: pytest.MonkeyPatch) -> None:
  put(bucket, 'gs://bucket/away', CONTENT)
  monkeypatch.setattr(retrying, 'PATIENCE_S', .1)
  monkeypatch.setattr(retrying, 'FIRST_WAIT_S', .05)
  monkeypatch.setattr(remote, 'ANSWER_S', .2)
  monkeypatch.setattr(buckets._Handler, 'handle_any', lambda self: __import__('time').sleep(1))
  monkeypatch.setattr(buckets._Handler, 'do_GET', lambda self: __import__('time').sleep(1))
  with pytest.raises(TemporaryError, match=r'reading gs://bucket/away: expected success within'):
    ranges.read('gs://bucket/away', 0, 10)


def test_a_name_that_no_bucket_has_is_an_error() -> None:
  with pytest.raises(UserError, match='gs://b: expected the address of a bucket, got .*Invalid GCS bucket name'):
    ranges.read('gs://b/x', 0, 10)


def test_an_object_that_may_not_be_read_names_the_right_that_is_missing(bucket: buckets.Server,
                                                                        monkeypatch: pytest.MonkeyPatch) -> None:
  def refuse(self: buckets._Handler) -> None:
    self._answer(403, {'error': {'code': 403, 'message': 'denied'}})
  monkeypatch.setattr(buckets._Handler, 'do_GET', refuse)
  with pytest.raises(UserError, match=r'gs://bucket/x: expected permission to read it, got .* roles/storage'):
    ranges.read('gs://bucket/x', 0, 10)


@pytest.mark.parametrize('kind', ['503', '429', '500', 'lost answer'])
def test_a_read_that_fails_for_a_time_is_repeated(bucket: buckets.Server, kind: str) -> None:
  put(bucket, 'gs://bucket/busy', CONTENT)
  fault = bucket.fail(kind, 'GET', 'bucket/busy')
  part = Range('gs://bucket/busy', 5, 100)
  assert ranges.start(part)
  assert ranges.read(*part) == CONTENT[5:105] and len(fault.hits) == 1
  ranges.drop(part)


@pytest.mark.parametrize('kind', ['503', '429', '500'])
def test_a_read_that_keeps_failing_is_a_temporary_error(bucket: buckets.Server, kind: str,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
  put(bucket, 'gs://bucket/down', CONTENT)
  monkeypatch.setattr(retrying, 'patience', lambda: .01)
  monkeypatch.setattr(remote, '_RETRIES', {'max_retries': 1, 'initial_delay': '0.01s', 'max_delay': '0.01s'})
  for cached in (remote._context, remote._store):
    cached.cache_clear()
  try:
    bucket.fail(kind, 'GET', 'bucket/down', count=1_000)
    with pytest.raises(TemporaryError, match='reading gs://bucket/down: expected success within 0 s, got'):
      ranges.read('gs://bucket/down', 0, 10)
  finally:
    for cached in (remote._context, remote._store):
      cached.cache_clear()


def test_slow_answers_are_waited_for_together(bucket: buckets.Server) -> None:
  put(bucket, 'gs://bucket/slow', CONTENT)
  bucket.fail('slow', 'GET', 'bucket/slow', count=1_000, seconds=.2)
  parts = [Range('gs://bucket/slow', i, 10) for i in range(40)]
  began_s = time.monotonic()
  assert all(ranges.start(part) for part in parts)
  assert [ranges.read(*part) for part in parts] == [CONTENT[i:i + 10] for i in range(40)]
  assert time.monotonic() - began_s < 4.  # one after the other they take 8 s
  for part in parts:
    ranges.drop(part)
