"""Paths of run directories: local ones as they were, those in object storage without what that cannot do."""
from __future__ import annotations

import pathlib

import buckets
import pytest

from vit_jax.core.errors import UserError
from vit_jax.record import storage


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


