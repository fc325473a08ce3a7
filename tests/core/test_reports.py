"""The report of an unforeseen error is saved where that is possible, else printed."""
from __future__ import annotations

import pathlib

import pytest

from vit_jax.core import reports


def explain(home: object) -> reports.Failure:
  try:
    raise KeyError('x')
  except KeyError as error:
    return reports.explain(error, ['train'], {'XDG_STATE_HOME': str(home)})


def test_where_the_state_directory_cannot_be_made_a_temporary_file_holds_the_traceback(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  (tmp_path / 'file').touch()
  monkeypatch.setattr(reports.tempfile, 'tempdir', str(tmp_path))
  _, message = explain(tmp_path / 'file')
  [path] = tmp_path.glob('vit_jax-failure-*')
  assert str(path) in message and 'Traceback' in path.read_text()


def test_where_no_file_can_be_written_the_traceback_is_printed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(reports.tempfile, 'tempdir', str(tmp_path / 'absent'))
  status, message = explain('/dev/null')
  assert status == 70 and message.startswith('Command: ') and 'Traceback' in message


def test_old_tracebacks_are_deleted(tmp_path: pathlib.Path) -> None:
  folder = tmp_path / 'vit_jax'
  folder.mkdir()
  for i in range(30):
    (folder / f'failure-2000-{i:02}.txt').touch()
  explain(tmp_path)
  kept = sorted(path.name for path in folder.iterdir())
  assert len(kept) == reports.MAX_REPORTS and kept[0] == 'failure-2000-11.txt' and 'failure-2000-29.txt' in kept
