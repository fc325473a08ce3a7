"""On storage that several hosts reach, the last start owns a run directory, and a replaced run writes nothing more."""
from __future__ import annotations

import json
import os
import pathlib

import buckets
import mounted
import pytest

from vit_jax.core import failures
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.record import reader, run_directory, storage, writer

BUCKET = 'gs://mine/run'


@pytest.fixture(params=['bucket', 'mount'])
def workdir(request: pytest.FixtureRequest, bucket: buckets.Server, tmp_path: pathlib.Path,
            monkeypatch: pytest.MonkeyPatch) -> storage.Path:
  """A run directory in object storage, or on a network file system."""
  if request.param == 'bucket':
    return storage.open_path(BUCKET)
  monkeypatch.setattr(storage, 'MOUNTS', str(mounted.table(tmp_path, 'nfs')))
  return tmp_path / 'run'


def replace(workdir: storage.Path) -> None:
  """Another host starts a run in the directory."""
  (workdir / run_directory.OWNER_FILE).write_text(json.dumps({'host': 'elsewhere', 'pid': 7, 'token': 'x'}))


def record(workdir: storage.Path, resumed_from: int | None = None) -> writer.Writer:
  return writer.Writer(workdir, process_index=0, resumed_from=resumed_from, progress_total=9, progress=False)


def test_a_run_owns_its_directory_until_another_one_starts(workdir: storage.Path) -> None:
  with run_directory.hold(workdir):
    assert json.loads((workdir / run_directory.OWNER_FILE).read_text())['pid'] == os.getpid()
    run_directory.write_text(workdir / 'a', 'mine')
    replace(workdir)
    for _ in range(2):
      with pytest.raises(run_directory.Replaced, match=r'got process 7 on elsewhere, which was started later\. '):
        run_directory.write_text(workdir / 'a', 'mine again')
    run_directory.write_text(f'{workdir}2', 'elsewhere')  # not in that directory
  assert (workdir / 'a').read_text() == 'mine' and run_directory.owner_of(workdir) is None
  assert json.loads((workdir / run_directory.OWNER_FILE).read_text())['pid'] == 7
  with run_directory.hold(workdir):
    run_directory.write_text(workdir / 'a', 'the next one')


@pytest.mark.parametrize('left', [None, '{"host": 3', '[]', '{}'])
def test_a_run_without_its_token_is_replaced(workdir: storage.Path, left: str | None) -> None:
  with run_directory.hold(workdir):
    file = workdir / run_directory.OWNER_FILE
    file.unlink() if left is None else file.write_text(left)
    with pytest.raises(run_directory.Replaced, match='got another one, which was started later'):
      run_directory.write_text(workdir / 'a', 'mine')
  assert not (workdir / 'a').exists()


def test_rows_of_a_run_that_was_killed_and_of_one_that_was_replaced_are_there_once(workdir: storage.Path) -> None:
  """The first start is killed after step 100 with a checkpoint at 60; the second one is replaced by the third."""
  with run_directory.hold(workdir):
    killed = record(workdir)
    for step in range(10, 110, 10):
      killed.write(step, {'a': 1 / step})
      if step == 60:
        killed.event('checkpoint', step=60)
    if killed._mirror:
      killed._mirror.push()
    else:
      with open(workdir / 'metrics.jsonl', 'a') as file:
        file.write('{"step": 110, "ti')  # the line at which it was killed
  with run_directory.hold(workdir), record(workdir, 60) as second:
    second.write(70, {'a': 2.})
    replace(workdir)
    with pytest.raises(run_directory.Replaced):
      second.event('checkpoint', step=80)
    with pytest.raises(run_directory.Replaced):
      second.write(90, {'a': 2.})
  with run_directory.hold(workdir), record(workdir, 60) as third:
    for step in range(70, 130, 10):
      third.write(step, {'a': 3.})
  run = reader.read(workdir)
  assert [row['step'] for row in run.rows] == list(range(10, 130, 10)) and {row['a'] for row in run.rows[6:]} == {3.}
  assert [event['step'] for event in run.events if event['event'] == 'checkpoint'] == [60]
  if killed._mirror:
    killed._mirror.close()  # it is replaced, so it copies nothing
  killed._mirror = None
  killed.close()
  assert [row['step'] for row in reader.read(workdir).rows] == list(range(10, 130, 10))


def test_storage_that_cannot_be_written_or_read_is_an_error(
    workdir: storage.Path, bucket: buckets.Server, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(failures, 'PATIENCE_S', .01)
  with run_directory.hold(workdir):
    monkeypatch.setattr(storage, 'read_text', lambda path: (_ for _ in ()).throw(TimeoutError('no answer')))
    with pytest.raises(TemporaryError, match='no answer'):
      run_directory.write_text(workdir / 'a', 'mine')
  monkeypatch.setattr(storage, 'write_bytes', lambda *_: (_ for _ in ()).throw(PermissionError(13, 'refused')))
  with (pytest.raises(UserError, match='expected to write it, got "Permission denied"'),
        run_directory.hold(workdir)):
    pass


def test_a_directory_on_a_disk_is_locked_and_has_no_owner(tmp_path: pathlib.Path) -> None:
  with run_directory.hold(tmp_path / 'run'):
    assert {path.name for path in (tmp_path / 'run').iterdir()} == {'.lock'}
    assert run_directory.owner_of(tmp_path / 'run') is None
    with pytest.raises(UserError, match=f'in use by process {os.getpid()}'), run_directory.hold(tmp_path / 'run'):
      pass


def test_a_mount_without_file_locks_has_an_owner_alone(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  def refuse(*_: object) -> None:
    raise OSError(38, 'Function not implemented')

  monkeypatch.setattr(run_directory.fcntl, 'flock', refuse)
  monkeypatch.setattr(storage, 'MOUNTS', str(mounted.table(tmp_path / 'run', 'lustre')))
  with run_directory.hold(tmp_path / 'run'):
    assert run_directory.owner_of(tmp_path / 'run') is not None
  monkeypatch.setattr(storage, 'MOUNTS', str(mounted.table(tmp_path / 'run', 'ext4')))
  with pytest.raises(UserError, match='got "Function not implemented'), run_directory.hold(tmp_path / 'run'):
    pass


def test_a_new_directory_on_a_mount_is_removed_after_an_error_but_not_from_another_run(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(storage, 'MOUNTS', str(mounted.table(tmp_path, 'nfs')))
  with pytest.raises(UserError, match='wrong'), run_directory.hold(tmp_path / 'runs' / 'a'):
    raise UserError('wrong')
  assert not (tmp_path / 'runs').exists()
  with pytest.raises(run_directory.Replaced), run_directory.hold(tmp_path / 'runs' / 'a'):
    replace(tmp_path / 'runs' / 'a')
    run_directory.write_text(tmp_path / 'runs' / 'a' / 'config.json', 'mine')
  assert json.loads((tmp_path / 'runs' / 'a' / run_directory.OWNER_FILE).read_text())['pid'] == 7
