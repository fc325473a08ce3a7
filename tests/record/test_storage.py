"""Paths of run directories: local ones, those in object storage without what that cannot do, and those on mounts."""
from __future__ import annotations

import pathlib

import buckets
import pytest

from vit_jax.core.errors import UserError
from vit_jax.record import storage

TABLE = r"""22 1 0:21 / /proc rw,relatime - proc proc rw
27 1 8:1 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 27 0:40 / /runs rw,nosuid - fuse.gcsfuse my-bucket rw,user_id=0
31 27 0:41 / /runs2 rw - fuse /dev/fuse rw
32 27 0:42 / /home rw shared:9 master:2 - nfs4 server:/home rw,vers=4.2
33 32 8:2 / /home/me/my\040disk rw - xfs /dev/sdb rw
34 27 0:43 / /merged rw - fuse.mergerfs 1:2 rw
35 27 0:44 / /twice rw - ext4 /dev/sdc rw
36 27 0:45 / /twice rw - lustre 10.0.0.1@tcp:/x rw
a line of another form
"""


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


def test_the_home_of_an_unknown_user_is_an_error_unless_there_is_a_file_of_this_name(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.chdir(tmp_path)
  with pytest.raises(UserError, match="path: expected a path, got '~nobody99/a', whose home directory is not known"):
    storage.read_text('~nobody99/a')
  (tmp_path / '~nobody99').mkdir()
  (tmp_path / '~nobody99' / 'a').write_text('mine')
  assert storage.read_text('~nobody99/a') == 'mine'


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


@pytest.fixture
def table(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
  path = tmp_path / 'mountinfo'
  path.write_text(TABLE)
  monkeypatch.setattr(storage, 'MOUNTS', str(path))
  return path


@pytest.mark.parametrize(('path', 'kind', 'is_shared', 'can_append'), [
    ('/var/x', 'ext4', False, True), ('/runs/a/b', 'fuse.gcsfuse', True, False), ('/runs', 'fuse.gcsfuse', True, False),
    ('/runs2/a', 'fuse', True, False), ('/runs3', 'ext4', False, True), ('/home/me/run', 'nfs4', True, True),
    ('/home/me/my disk/run', 'xfs', False, True), ('/merged/a', 'fuse.mergerfs', False, True),
    ('/twice/a', 'lustre', True, True)])
@pytest.mark.usefixtures('table')
def test_the_deepest_and_last_mount_that_has_a_path_is_its_file_system(
    path: str, kind: str, is_shared: bool, can_append: bool) -> None:
  assert (storage.file_system(path), storage.is_shared(path), storage.can_append(path)) == (kind, is_shared, can_append)
  assert storage.is_shared('gs://mine/run') and not storage.can_append('gs://mine/run')


def test_links_are_followed_and_without_a_table_a_path_is_local(
    table: pathlib.Path, tmp_path: pathlib.Path) -> None:
  (tmp_path / 'link').symlink_to('/runs/a')
  assert storage.file_system(tmp_path / 'link' / 'run') == 'fuse.gcsfuse'
  table.unlink()
  assert storage.file_system('/runs/a') == '' and storage.can_append('/runs/a') and not storage.is_shared('/runs/a')


def test_this_machine_has_a_file_system_of_a_known_type() -> None:
  assert storage.file_system('/proc/self') == 'proc'
