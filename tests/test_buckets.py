"""Clients of object storage against the stand-in's faults: TensorStore's driver, which Orbax uses, and fsspec's."""
from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import buckets
import numpy as np
import pytest
import tensorstore
from etils import epath


def store(path: str) -> Any:
  """A key-value store of TensorStore with short waits between its repetitions."""
  bucket, _, own = path.partition('/')
  context = tensorstore.Context({'gcs_request_retries': {
      'max_retries': 8, 'initial_delay': '20ms', 'max_delay': '100ms'}})
  return tensorstore.KvStore.open(
      {'driver': 'gcs', 'bucket': bucket, 'path': f'{own}/'}, context=context).result()


def write_by_tensorstore(path: str, content: bytes) -> None:
  folder, _, name = path.rpartition('/')
  store(folder).write(name, content).result()


def read_by_tensorstore(path: str) -> bytes:
  folder, _, name = path.rpartition('/')
  return bytes(store(folder).read(name).result().value)


def list_by_tensorstore(path: str) -> list[str]:
  return sorted(name.decode() for name in store(path).list().result())


def write_by_fsspec(path: str, content: bytes) -> None:
  epath.Path(f'gs://{path}').write_bytes(content)


def read_by_fsspec(path: str) -> bytes:
  return epath.Path(f'gs://{path}').read_bytes()


def list_by_fsspec(path: str) -> list[str]:
  return sorted(one.name for one in epath.Path(f'gs://{path}').iterdir())


CLIENTS = {'tensorstore': (write_by_tensorstore, read_by_tensorstore, list_by_tensorstore),
           'fsspec': (write_by_fsspec, read_by_fsspec, list_by_fsspec)}


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest, bucket: buckets.Server) -> tuple[Callable[..., Any], ...]:
  return CLIENTS[request.param]


@pytest.mark.parametrize('kind', ['503', '429'])
def test_what_is_refused_for_a_while_is_asked_for_again(
    kind: str, client: tuple[Callable[..., Any], ...], bucket: buckets.Server) -> None:
  write, read, _ = client
  upload = bucket.fail(kind, 'P*', '*/a', count=2, seconds=.1)
  write('mine/x/a', b'content')
  assert len(upload.hits) == 2 and bucket.read('mine/x/a') == b'content'
  download = bucket.fail(kind, 'GET', '*/a', count=2, seconds=.1)
  assert read('mine/x/a') == b'content' and len(download.hits) == 2


def test_an_upload_whose_answer_is_lost_is_repeated_and_the_object_is_whole(
    client: tuple[Callable[..., Any], ...], bucket: buckets.Server) -> None:
  write, read, _ = client
  lost = bucket.fail('lost answer', 'P*', '*/a')
  write('mine/x/a', b'content')
  assert len(lost.hits) == 1 and read('mine/x/a') == b'content'


def test_a_slow_answer_is_waited_for(client: tuple[Callable[..., Any], ...], bucket: buckets.Server) -> None:
  write, read, _ = client
  write('mine/x/a', b'content')
  bucket.fail('slow', 'GET', '*/a', seconds=.5)
  began = time.monotonic()
  assert read('mine/x/a') == b'content' and time.monotonic() - began > .4


def test_listings_of_several_pages_are_complete(
    client: tuple[Callable[..., Any], ...], bucket: buckets.Server, monkeypatch: pytest.MonkeyPatch) -> None:
  _, _, names = client
  wanted = [f'{i:02}' for i in range(11)]
  bucket.objects.update({f'mine/x/{name}': (1, b'') for name in wanted})
  monkeypatch.setattr(bucket, 'page_size', 3)
  assert names('mine/x') == wanted and bucket.requests['GET'] >= 4


def test_folders_of_a_listing_are_named_once_over_all_pages(
    bucket: buckets.Server, monkeypatch: pytest.MonkeyPatch) -> None:
  bucket.objects.update({f'mine/y/{step}/{item}': (1, b'') for step in range(5) for item in 'abc'})
  monkeypatch.setattr(bucket, 'page_size', 2)
  assert list_by_fsspec('mine/y') == ['0', '1', '2', '3', '4']


def test_a_resumable_upload_that_loses_its_session_is_an_error_or_is_begun_again(bucket: buckets.Server) -> None:
  """Of gcsfs, which alone uploads in parts; a run repeats the write."""
  if not buckets.has_gcsfs():
    pytest.skip('needs gcsfs, which alone uploads in parts')
  import gcsfs
  system = gcsfs.GCSFileSystem(token='anon', endpoint_url=bucket.address)
  lost = bucket.fail('lost session', 'P*', '*/a')
  content = bytes(range(256)) * 2**11
  try:
    with system.open('mine/x/a', 'wb', block_size=2**18) as file:
      file.write(content)
  except Exception:
    assert 'mine/x/a' not in bucket.objects
    with system.open('mine/x/a', 'wb', block_size=2**18) as file:
      file.write(content)
  assert len(lost.hits) == 1 and bucket.read('mine/x/a') == content


@pytest.mark.slow(reason='14 s: TensorStore waits 1 s and more before it repeats')
def test_arrays_of_orbax_survive_refusals_and_lost_answers(bucket: buckets.Server) -> None:
  import orbax.checkpoint as ocp
  bucket.fail('503', 'P*', '*ocdbt*', count=3, seconds=.1)
  bucket.fail('lost answer', 'P*', '*ocdbt*', count=1)
  bucket.fail('429', 'GET', '*ocdbt*', count=2, seconds=.1)
  tree = {'a': np.arange(8.), 'b': np.ones((2, 3))}
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save('gs://mine/x/1', tree)
    checkpointer.wait_until_finished()
    got = checkpointer.restore('gs://mine/x/1', tree)
  assert all(np.array_equal(got[name], tree[name]) for name in tree)
  assert [len(fault.hits) for fault in bucket.faults] == [3, 1, 2]
