"""Paths of run directories: local ones as they were, those in object storage without what that cannot do."""
from __future__ import annotations

import pathlib
import sys
import time

import buckets
import pytest

from vit_jax.core.errors import UserError
from vit_jax.record import norms_file, reader, storage, writer


def test_a_local_path_is_filled_in_and_a_remote_one_stays(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, bucket: buckets.Server) -> None:
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('HOME', str(tmp_path / 'home'))
  assert storage.open_path('runs/a') == tmp_path / 'runs' / 'a'
  assert storage.open_path('~/a') == tmp_path / 'home' / 'a'
  found = storage.open_path('gs://mine/runs/a')
  assert str(found / 'b') == 'gs://mine/runs/a/b' and str(storage.open_path(found)) == 'gs://mine/runs/a'
  assert storage.is_local(tmp_path) and not storage.is_local(found)


@pytest.mark.parametrize('text', ['s3://mine/a', 'gs://', 'gs:///', 'http://mine/a'])
def test_another_kind_of_storage_is_refused(text: str) -> None:
  with pytest.raises(UserError, match=r'expected a (folder or gs://BUCKET/PATH for a run|path, or an address)'):
    storage.open_path(text)


def test_a_client_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(storage.importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(UserError, match=r'gs://a/b: expected the Python package gcsfs, got none. Run: pip install'):
    storage.open_path('gs://a/b')


@pytest.mark.parametrize('remote', [False, True])
def test_files_are_written_whole_read_moved_and_copied(
    remote: bool, tmp_path: pathlib.Path, bucket: buckets.Server) -> None:
  root = storage.open_path('gs://mine/x' if remote else tmp_path)
  storage.write_bytes(root / 'a' / 'b' / 'c', b'one')
  storage.write_bytes(root / 'a' / 'b' / 'c', b'two\xff')
  storage.write_bytes(root / 'a' / 'd', b'three')
  assert storage.read_text(root / 'a' / 'b' / 'c') == 'two\ufffd'
  assert not list((root / 'a').glob('*.part'))
  with storage.local(root / 'a' / 'd') as path:
    assert path.read_bytes() == b'three' and path.name == 'd'
  storage.move(root / 'a', root / 'new')
  assert not (root / 'a').exists() and storage.read_text(root / 'new' / 'd') == 'three'
  storage.copy(root / 'new', tmp_path / 'near')
  assert (tmp_path / 'near' / 'b' / 'c').read_bytes() == b'two\xff'
  with pytest.raises(FileNotFoundError):
    storage.read_text(root / 'a' / 'd')


def test_errors_of_clients_that_are_loaded_count_as_faults_of_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
  class HttpError(Exception):
    pass

  module = type(sys)('gcsfs.retry')
  module.HttpError = HttpError  # type: ignore[attr-defined]
  monkeypatch.setitem(sys.modules, 'gcsfs.retry', module)
  assert HttpError in storage.faults() and issubclass(FileNotFoundError, storage.faults())


def wait_for(bucket: buckets.Server, name: str, content: bytes) -> None:
  for _ in range(400):
    if bucket.objects.get(name, (0, b''))[1] == content:
      return
    time.sleep(.01)
  raise AssertionError(f'{name}: {bucket.objects.get(name)}')


def test_what_has_changed_is_copied_and_nothing_else(bucket: buckets.Server) -> None:
  copies = storage.Mirror('gs://mine/run', every_s=99.)
  (copies.folder / 'a').write_bytes(b'1')
  (copies.folder / 'b').write_bytes(b'2')
  copies.push()
  assert bucket.names('gs://mine/run') == ['a', 'b']
  before = bucket.objects['mine/run/b'][0]
  (copies.folder / 'a').write_bytes(b'11')
  copies.push()
  assert bucket.objects['mine/run/b'][0] == before and bucket.read('mine/run/a') == b'11'
  (copies.folder / 'b').write_bytes(b'22')
  copies.close()
  assert bucket.read('mine/run/b') == b'22' and not copies.folder.exists()


def test_it_copies_by_itself_and_goes_on_after_a_failure(
    bucket: buckets.Server, caplog: pytest.LogCaptureFixture) -> None:
  copies = storage.Mirror('gs://mine/run', every_s=.02)
  (copies.folder / 'a').write_bytes(b'1')
  wait_for(bucket, 'mine/run/a', b'1')
  bucket.broken = True
  (copies.folder / 'a').write_bytes(b'12')
  for _ in range(400):
    if 'could not be written to, and is tried again' in caplog.text:
      break
    time.sleep(.01)
  with pytest.raises(UserError, match='gs://mine/run: expected to write it, got POST .*: 400'):
    copies.settle()
  bucket.broken = False
  wait_for(bucket, 'mine/run/a', b'12')
  copies.close()


def test_what_could_not_be_copied_in_the_end_stays_and_is_named(
    bucket: buckets.Server, caplog: pytest.LogCaptureFixture) -> None:
  copies = storage.Mirror('gs://mine/run', every_s=99.)
  (copies.folder / 'a').write_bytes(b'1')
  bucket.broken = True
  copies.close()
  assert (copies.folder / 'a').exists() and f'The files missing in gs://mine/run are in {copies.folder}' in caplog.text


def test_a_record_goes_on_in_object_storage_and_is_whole_at_each_checkpoint(bucket: buckets.Server) -> None:
  first = writer.Writer('gs://mine/run', process_index=0, resumed_from=None, progress_total=9, progress=False)
  first.write(1, {'loss': 2.})
  first.event('checkpoint', step=1)
  first.write(2, {'loss': 1.})  # killed before the next copy: lost
  assert [row['step'] for row in reader.read('gs://mine/run').rows] == [1.]
  second = writer.Writer('gs://mine/run', process_index=0, resumed_from=1, progress_total=9, progress=False)
  second.write(2, {'loss': 1.5})
  second.close()
  found = reader.read('gs://mine/run')
  assert [(row['step'], row['loss']) for row in found.rows] == [(1., 2.), (2., 1.5)] and not found.num_broken
  assert [e['event'] for e in found.events] == ['start', 'checkpoint', 'start']
  assert sum(name.startswith('events.out') for name in bucket.names('gs://mine/run')) == 2
  first.close()


def test_a_file_that_grows_is_kept_in_blocks_of_which_complete_ones_are_uploaded_once(
    bucket: buckets.Server, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(storage, 'BLOCK_BYTES', 4)
  copies = storage.Mirror('gs://mine/run', growing=('a',), every_s=99.)
  (copies.folder / 'a').write_bytes(b'0123456')
  copies.push()
  assert bucket.names('gs://mine/run') == ['a', 'a.0001']
  assert storage.read_growing('gs://mine/run/a') == b'0123456'
  before = bucket.objects['mine/run/a'][0]
  (copies.folder / 'a').write_bytes(b'0123456789ab')
  copies.close()
  assert bucket.objects['mine/run/a'][0] == before and storage.read_growing('gs://mine/run/a') == b'0123456789ab'
  again = storage.Mirror('gs://mine/run', growing=('a',), every_s=99.)
  again.fetch('a', 'b')
  assert (again.folder / 'a').read_bytes() == b'0123456789ab' and not (again.folder / 'b').exists()
  with open(again.folder / 'a', 'ab') as file:
    file.write(b'c')
  again.close()
  assert bucket.objects['mine/run/a'][0] == before and storage.read_growing('gs://mine/run/a') == b'0123456789abc'


def test_norms_and_a_long_record_are_read_from_object_storage(bucket: buckets.Server,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(storage, 'BLOCK_BYTES', 100)
  for resumed_from, steps in ((None, range(1, 30)), (20, range(21, 40))):
    with writer.Writer('gs://mine/run', process_index=0, resumed_from=resumed_from, progress_total=99,
                       progress=False) as out:
      for step in steps:
        out.write(step, {'train/loss': 1.})
        out.norms(step, {'grad': {'a': float(step)}})
  assert [row['step'] for row in reader.read('gs://mine/run').rows] == list(range(1, 40))
  assert [event['grad']['a'] for event in norms_file.read('gs://mine/run')] == list(range(1, 40))
