"""Parts of files by offset: local ones, and objects of object storage."""
from __future__ import annotations

import pathlib
import time

import buckets
import pytest

from vit_jax.core import failures
from vit_jax.core.documents import TooLarge
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.data import storage
from vit_jax.data.storage import Span

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
  assert storage.read(path, offset, size) == CONTENT[offset:offset + size]


def test_the_end_and_the_whole_of_a_file_are_read(path: str) -> None:
  assert storage.read(path, -7, 7) == CONTENT[-7:]
  assert storage.read_file(path, 2000) == CONTENT
  with pytest.raises(TooLarge):
    storage.read_file(path, 1999)


def test_names_in_a_folder_are_listed(path: str) -> None:
  assert storage.list_names(path.rpartition('/')[0]) == ['a', 'b']


def test_a_missing_file_is_a_file_that_is_not_found(path: str) -> None:
  with pytest.raises(FileNotFoundError) as error:
    storage.read(f'{path}x', 0, 10)
  assert error.value.filename == f'{path}x'


def test_spans_are_read_ahead_with_one_request_each(bucket: buckets.Server) -> None:
  put(bucket, 'gs://bucket/one', CONTENT)
  before = bucket.requests.get('GET', 0)
  spans = [Span('gs://bucket/one', offset, 100) for offset in range(0, 2000, 100)]
  assert list(storage.read_many(spans)) == [CONTENT[i:i + 100] for i in range(0, 2000, 100)]
  assert bucket.requests['GET'] - before == 20


def test_bytes_that_wait_are_bounded(bucket: buckets.Server, monkeypatch: pytest.MonkeyPatch) -> None:
  put(bucket, 'gs://bucket/many', CONTENT)
  monkeypatch.setattr(storage, '_state', storage._State(storage.Settings(ahead_bytes=250)))
  spans = [Span('gs://bucket/many', i, 100) for i in range(0, 1000, 100)]
  stream, seen = storage.read_many(spans), []
  for content, span in zip(stream, spans, strict=True):
    seen.append(storage._state.num_bytes)
    assert content == CONTENT[span.offset:span.offset + 100]
  assert seen[0] == 100 and max(seen) <= 250 and not storage._state.num_bytes
  assert list(storage.read_many([Span('gs://bucket/many', 0, 500)])) == [CONTENT[:500]]  # one that is needed is read


def test_a_span_that_cannot_be_begun_reserves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
  def fail(*_: object) -> None:
    raise OSError('no bucket')

  monkeypatch.setattr(storage, '_store', fail)
  monkeypatch.setattr(storage, '_state', storage._State(storage.Settings(ahead_bytes=250)))
  with pytest.raises(OSError, match='no bucket'):
    list(storage.read_many([Span('gs://bucket/many', 0, 100)]))
  assert not storage._state.num_bytes


def test_storage_that_is_away_is_a_temporary_error(bucket: buckets.Server, monkeypatch: pytest.MonkeyPatch) -> None:
  put(bucket, 'gs://bucket/away', CONTENT)
  monkeypatch.setattr(failures, 'PATIENCE_S', .1)
  monkeypatch.setattr(failures, 'FIRST_WAIT_S', .05)
  monkeypatch.setattr(storage, 'ANSWER_S', .2)
  monkeypatch.setattr(buckets._Handler, 'handle_any', lambda self: __import__('time').sleep(1))
  monkeypatch.setattr(buckets._Handler, 'do_GET', lambda self: __import__('time').sleep(1))
  with pytest.raises(TemporaryError, match=r'reading gs://bucket/away: expected success within'):
    storage.read('gs://bucket/away', 0, 10)


def test_a_name_that_no_bucket_has_is_an_error() -> None:
  with pytest.raises(UserError, match='gs://b: expected the address of a bucket, got .*Invalid GCS bucket name'):
    storage.read('gs://b/x', 0, 10)


def test_an_object_that_may_not_be_read_names_the_right_that_is_missing(bucket: buckets.Server,
                                                                        monkeypatch: pytest.MonkeyPatch) -> None:
  def refuse(self: buckets._Handler) -> None:
    self._answer(403, {'error': {'code': 403, 'message': 'denied'}})
  monkeypatch.setattr(buckets._Handler, 'do_GET', refuse)
  with pytest.raises(UserError, match=r'gs://bucket/x: expected permission to read it, got .* roles/storage'):
    storage.read('gs://bucket/x', 0, 10)


@pytest.mark.parametrize('kind', ['503', '429', '500', 'lost answer'])
def test_a_read_that_fails_for_a_time_is_repeated(bucket: buckets.Server, kind: str) -> None:
  put(bucket, 'gs://bucket/busy', CONTENT)
  fault = bucket.fail(kind, 'GET', 'bucket/busy')
  assert storage.read('gs://bucket/busy', 5, 100) == CONTENT[5:105] and len(fault.hits) == 1


@pytest.mark.parametrize('kind', ['503', '429', '500'])
def test_a_read_that_keeps_failing_is_a_temporary_error(bucket: buckets.Server, kind: str,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
  put(bucket, 'gs://bucket/down', CONTENT)
  monkeypatch.setattr(failures, 'patience', lambda: .01)
  monkeypatch.setattr(storage, '_RETRIES', {'max_retries': 1, 'initial_delay': '0.01s', 'max_delay': '0.01s'})
  for cached in (storage._context, storage._store):
    cached.cache_clear()
  try:
    bucket.fail(kind, 'GET', 'bucket/down', count=1_000)
    with pytest.raises(TemporaryError, match='reading gs://bucket/down: expected success within 0 s, got'):
      storage.read('gs://bucket/down', 0, 10)
  finally:
    for cached in (storage._context, storage._store):
      cached.cache_clear()


def test_slow_answers_are_waited_for_together(bucket: buckets.Server) -> None:
  put(bucket, 'gs://bucket/slow', CONTENT)
  bucket.fail('slow', 'GET', 'bucket/slow', count=1_000, seconds=.2)
  parts = [Span('gs://bucket/slow', i, 10) for i in range(40)]
  began_s = time.monotonic()
  assert list(storage.read_many(parts)) == [CONTENT[i:i + 10] for i in range(40)]
  assert time.monotonic() - began_s < 4.  # one after the other they take 8 s
