"""Checksums are compared once, noted outside of the folder, and compared again where a file has changed."""
from __future__ import annotations

import hashlib
import os
import pathlib

import pytest

from vit_jax.core.errors import UserError
from vit_jax.data.files import access, checksums

CONTENT = {'a': b'one', 'b': b'two', 'c': b''}


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  (tmp_path / 'set').mkdir()
  for name, content in CONTENT.items():
    (tmp_path / 'set' / name).write_bytes(content)
  return tmp_path / 'set'


def find_changed(folder: pathlib.Path) -> dict[str, str]:
  expected = {name: hashlib.sha256(content).hexdigest() for name, content in CONTENT.items()}
  return checksums.find_changed(folder, expected, setting='x')


def test_files_are_read_once_and_again_when_they_change(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  read, real = [], checksums.sha256
  monkeypatch.setattr(checksums, 'sha256', lambda path: read.append(path.name) or real(path))
  assert find_changed(folder) == find_changed(folder) == {}
  assert sorted(read) == ['a', 'b', 'c'] and sorted(p.name for p in folder.iterdir()) == ['a', 'b', 'c']
  (folder / 'b').write_bytes(b'2wo')
  for _ in range(2):  # a difference is not noted
    assert find_changed(folder) == {'b': hashlib.sha256(b'2wo').hexdigest()}
  assert sorted(read) == ['a', 'b', 'b', 'b', 'c']
  (folder / 'b').write_bytes(b'two')
  os.utime(folder / 'b', ns=(5, 5))
  assert find_changed(folder) == {} and len(read) == 6


def test_damaged_notes_are_made_anew_and_a_cache_is_not_needed(folder: pathlib.Path,
                                                               caplog: pytest.LogCaptureFixture) -> None:
  find_changed(folder)
  [notes] = access.cache_folder('checksums').iterdir()
  for damaged in ('', '[1]', '{"a": 3}'):
    notes.write_text(damaged)
    assert find_changed(folder) == {}
  notes.unlink()
  access.cache_folder('checksums').rmdir()
  access.cache_folder('checksums').write_text('a file in the way')
  assert find_changed(folder) == {} and 'They will be compared again' in caplog.text


def test_a_large_set_says_what_it_takes(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch,
                                        caplog: pytest.LogCaptureFixture) -> None:
  monkeypatch.setattr(checksums, '_LOGGED_BYTES', 3)
  with caplog.at_level('INFO'):
    find_changed(folder)
  assert f'Comparing the checksums of 3 files of {folder} (0.0 GB), once; x skips this.' in caplog.text
  assert 'Compared in' in caplog.text


def test_a_file_that_cannot_be_read_is_no_difference(folder: pathlib.Path) -> None:
  (folder / 'b').unlink()
  with pytest.raises(UserError, match=f'{folder}/b: expected to read it, got "No such file or directory"'):
    find_changed(folder)
