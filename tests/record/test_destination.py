"""A job writes where a person meant, or nowhere."""
from __future__ import annotations

import os
import pathlib

import pytest

from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.record import destination


def test_a_path_in_an_existing_directory_is_taken(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('HOME', str(tmp_path))
  for to in ('a.npz', './a.npz', '~/a.npz', tmp_path / 'a.npz', f'{tmp_path}/a.npz/'):
    assert destination.checked(to) == tmp_path / 'a.npz'
  assert destination.checked('a:b') == tmp_path / 'a:b'


@pytest.mark.parametrize(('to', 'says'), [
    ('gs://b/x', 'expected a path on this machine, got the address gs://b/x'), ('gs:/b/x', "got 'gs:/b/x'"),
    (pathlib.Path('s3://b/x'), "got 's3:/b/x'.* Write s3://b/x for"), ('hf://o/m', 'got the address'),
    ('out/a.npz', r'got out/a.npz, and there is no directory .*/out. Create it'),
    ('/rnus/vit/a.npz', 'there is no directory /rnus/vit'), ('file/a.npz', 'there is no directory .*/file'),
    ('/', "expected the name of a file or folder to write, got '/'"),
    ('..', 'expected the name'), ('x' * 300, 'x.*File name too long'),
    ('loop/a', 'no directory'),
    ('~nobody-here/a', "'~nobody-here/a', whose home directory is not known")])
def test_a_path_that_is_elsewhere_or_mistyped_is_an_error(
    to: str, says: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'file').write_text('mine')
  (tmp_path / 'loop').symlink_to('loop')
  before = sorted(tmp_path.rglob('*'))
  with pytest.raises(UserError, match=f'^--to[:=].*{says}'):
    destination.checked(to)
  assert sorted(tmp_path.rglob('*')) == before


def test_a_folder_that_is_replaced_comes_back_if_its_successor_cannot_be_moved(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  path = tmp_path / 'a'
  path.mkdir()
  (path / 'x').write_text('old')
  move = os.replace

  def full(source: pathlib.Path, target: pathlib.Path) -> None:
    if target == path:
      raise OSError(28, 'No space left on device')
    move(source, target)

  def write() -> None:
    with destination.staged(path, shown='a', overwrite=True, is_ours=lambda one: False) as part:
      (part / 'a').mkdir()
      (part / 'a' / 'x').write_text('new')

  with monkeypatch.context() as patch, pytest.raises(TemporaryError, match='No space left'):
    patch.setattr(os, 'replace', full)
    write()
  assert (path / 'x').read_text() == 'old'
  write()
  assert (path / 'x').read_text() == 'new' and [one.name for one in tmp_path.iterdir()] == ['a']


@pytest.mark.skipif(os.geteuid() == 0, reason='root may write everywhere')
def test_a_directory_that_cannot_be_written_is_an_error(tmp_path: pathlib.Path) -> None:
  tmp_path.chmod(0o500)
  with pytest.raises(UserError, match='--to: expected a path in a directory that can be written'):
    destination.checked(tmp_path / 'a')
  tmp_path.chmod(0o700)
