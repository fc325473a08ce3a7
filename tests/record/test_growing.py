"""Files that grow: on disks whose storage fails for a time, and where nothing can be appended: buckets and mounts."""
from __future__ import annotations

import errno
import os
import pathlib
import time

import buckets
import mounted
import pytest

from vit_jax.core import failures
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.record import growing, reader, storage, writer

LINES = [f'line {i}\n'.encode() * 3 for i in range(9)]


class Disk:
  """Stands in for `os.write`: writes `parts` bytes at a time, and fails with `number` while it is broken."""

  def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
    self.number, self.calls, self._write = 0, 0, os.write
    monkeypatch.setattr(growing.os, 'write', self)

  def __call__(self, descriptor: int, content: bytes) -> int:
    self.calls += 1
    if self.number:
      raise OSError(self.number, os.strerror(self.number))
    return self._write(descriptor, content[:5])


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
  found = [0.]
  monkeypatch.setattr(growing.time, 'monotonic', lambda: found[0])
  monkeypatch.setattr(failures.time, 'sleep', lambda s: found.__setitem__(0, found[0] + s))
  return found


@pytest.mark.usefixtures('now')
@pytest.mark.parametrize('number', [errno.EIO, errno.ENOSPC, errno.ESTALE, errno.EDQUOT])
def test_what_could_not_be_written_is_written_later_in_order(
    number: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
  disk, file = Disk(monkeypatch), growing.Appender(str(tmp_path / 'a'))
  for i, line in enumerate(LINES):
    disk.number = number if 3 <= i < 6 else 0
    file.write(line)
  file.close()
  assert (tmp_path / 'a').read_bytes() == b''.join(LINES)
  assert caplog.text.count('The lines are kept in memory') == 1 and caplog.text.count('is complete') == 1


def test_a_refusal_is_an_error_at_once_and_promises_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
  disk, file = Disk(monkeypatch), growing.Appender(str(tmp_path / 'a'))
  disk.number = errno.EACCES
  with pytest.raises(OSError, match='Permission denied'):
    file.write(b'a')
  assert not caplog.text


def test_after_the_patience_it_is_an_error(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, now: list[float]) -> None:
  disk, file = Disk(monkeypatch), growing.Appender(str(tmp_path / 'a'))
  disk.number = errno.ENOSPC
  file.write(b'a')
  now[0] = failures.PATIENCE_S - 1
  file.write(b'b')
  now[0] = failures.PATIENCE_S
  with pytest.raises(OSError, match='No space left'):
    file.write(b'c')
  disk.number = 0
  file.close()
  assert (tmp_path / 'a').read_bytes() == b'abc'


@pytest.mark.usefixtures('now')
def test_what_a_person_must_change_is_an_error_at_once(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  disk, file = Disk(monkeypatch), growing.Appender(str(tmp_path / 'a'))
  disk.number = errno.EROFS
  with pytest.raises(OSError, match='Read-only'):
    file.write(b'a')


def test_making_it_durable_waits_for_the_storage_and_then_gives_up(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, now: list[float]) -> None:
  disk, file = Disk(monkeypatch), growing.Appender(str(tmp_path / 'a'))
  disk.number = errno.EIO
  file.write(b'a')
  with pytest.raises(TemporaryError, match='expected success within 300 s'):
    file.settle()
  assert now[0] >= failures.PATIENCE_S and disk.calls > 5


@pytest.mark.usefixtures('now')
def test_a_record_over_a_failing_disk_has_the_lines_of_an_undisturbed_one(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  disk = Disk(monkeypatch)
  monkeypatch.setattr(writer.time, 'monotonic', lambda: 0.)
  for name in ('whole', 'disturbed'):
    with writer.Writer(tmp_path / name, process_index=0, resumed_from=None, progress_total=9, progress=False,
                       trackers=lambda folder: []) as record:
      for step in range(9):
        disk.number = errno.EIO if name == 'disturbed' and 3 <= step < 7 else 0
        record.write(step, {'train/loss': step / 3})
  whole, disturbed = ((tmp_path / name / 'metrics.jsonl').read_bytes() for name in ('whole', 'disturbed'))
  assert whole == disturbed != b''


def wait_for(bucket: buckets.Server, name: str, content: bytes) -> None:
  for _ in range(400):
    if bucket.objects.get(name, (0, b''))[1] == content:
      return
    time.sleep(.01)
  raise AssertionError(f'{name}: {bucket.objects.get(name)}')


def test_what_has_changed_is_copied_and_nothing_else(bucket: buckets.Server) -> None:
  copies = growing.Mirror('gs://mine/run', every_s=99.)
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
  copies = growing.Mirror('gs://mine/run', every_s=.02)
  (copies.folder / 'a').write_bytes(b'1')
  wait_for(bucket, 'mine/run/a', b'1')
  bucket.broken = True
  (copies.folder / 'a').write_bytes(b'12')
  for _ in range(400):
    if 'could not be written to, and is tried again' in caplog.text:
      break
    time.sleep(.01)
  with pytest.raises(UserError, match='gs://mine/run: expected to write it, got "POST .*: 400'):
    copies.settle()
  bucket.broken = False
  wait_for(bucket, 'mine/run/a', b'12')
  copies.close()


def test_what_could_not_be_copied_in_the_end_stays_and_is_named(
    bucket: buckets.Server, caplog: pytest.LogCaptureFixture) -> None:
  copies = growing.Mirror('gs://mine/run', every_s=99.)
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
  monkeypatch.setattr(growing, 'BLOCK_BYTES', 4)
  copies = growing.Mirror('gs://mine/run', growing='a', every_s=99.)
  (copies.folder / 'a').write_bytes(b'0123456')
  copies.push()
  assert bucket.names('gs://mine/run') == ['a', 'a.0001']
  assert growing.read('gs://mine/run/a') == b'0123456'
  before = bucket.objects['mine/run/a'][0]
  (copies.folder / 'a').write_bytes(b'0123456789ab')
  copies.close()
  assert bucket.objects['mine/run/a'][0] == before and growing.read('gs://mine/run/a') == b'0123456789ab'
  again = growing.Mirror('gs://mine/run', growing='a', every_s=99.)
  again.fetch()
  assert (again.folder / 'a').read_bytes() == b'0123456789ab'
  with open(again.folder / 'a', 'ab') as file:
    file.write(b'c')
  again.close()
  assert bucket.objects['mine/run/a'][0] == before and growing.read('gs://mine/run/a') == b'0123456789abc'


def test_a_long_record_is_read_from_object_storage(bucket: buckets.Server, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(growing, 'BLOCK_BYTES', 100)
  for resumed_from, steps in ((None, range(1, 30)), (20, range(21, 40))):
    with writer.Writer('gs://mine/run', process_index=0, resumed_from=resumed_from, progress_total=99,
                       progress=False) as out:
      for step in steps:
        out.write(step, {'train/loss': 1.})
  assert [row['step'] for row in reader.read('gs://mine/run').rows] == list(range(1, 40))


def begin(workdir: pathlib.Path, resumed_from: int | None = None) -> writer.Writer:
  return writer.Writer(workdir, process_index=0, resumed_from=resumed_from, progress_total=9, progress=False)


def add(record: writer.Writer, *steps: int) -> None:
  for step in steps:
    record.write(step, {'train/loss': 1. / step})


def open_files(folder: pathlib.Path) -> list[str]:
  """Names of files in a folder that this process has open."""
  found = []
  for number in os.listdir('/proc/self/fd'):
    try:
      path = os.readlink(f'/proc/self/fd/{number}')
    except FileNotFoundError:
      continue
    found += [path] if path.startswith(str(folder.resolve())) else []
  return found


@pytest.fixture
def mount(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
  """A folder that counts as a mounted bucket."""
  folder = tmp_path / 'mount'
  folder.mkdir()
  monkeypatch.setattr(storage, 'MOUNTS', str(mounted.table(folder)))
  return folder


def test_a_record_on_a_mounted_bucket_is_complete_at_a_checkpoint_and_no_file_stays_open(mount: pathlib.Path) -> None:
  record = begin(mount / 'run')
  add(record, 1, 2)
  record.event('checkpoint', step=2)
  add(record, 3)  # lost at a kill now
  assert [row['step'] for row in reader.read(mount / 'run').rows] == [1, 2]
  assert (mount / 'run' / 'metrics.jsonl').exists() and not open_files(mount)
  again = begin(mount / 'run', resumed_from=2)
  add(again, 3, 4)
  again.close()
  assert [row['step'] for row in reader.read(mount / 'run').rows] == [1, 2, 3, 4]
  record.close()


def test_a_record_continues_in_blocks_on_a_mount_and_as_one_file_on_a_disk(
    mount: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  """A run directory is copied from one storage to the other between starts; each step is there once."""
  monkeypatch.setattr(growing, 'BLOCK_BYTES', 150)
  places = [mount / 'run', tmp_path / 'disk', mount / 'again', tmp_path / 'other']
  for number, place in enumerate(places):
    if number:
      storage.copy(places[number - 1], place)
    with begin(place, resumed_from=10 * number or None) as record:
      add(record, *range(10 * number + 1, 10 * number + 13))  # two more than the next start resumes from
    expected = list(range(1, 10 * number + 13))
    assert [row['step'] for row in reader.read(place).rows] == expected
    assert (place / 'metrics.jsonl.0001').exists() == (number % 2 == 0)


def test_blocks_of_an_earlier_longer_file_are_removed(mount: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(growing, 'BLOCK_BYTES', 4)
  for content in (b'0123456789', b'01'):
    copies = growing.Mirror(mount, growing='a', every_s=99.)
    (copies.folder / 'a').write_bytes(content)
    copies.close()
  assert [path.name for path in mount.iterdir()] == ['a'] and growing.read(mount / 'a') == b'01'


def test_a_kill_while_a_copied_file_becomes_blocks_leaves_it_whole(
    mount: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(growing, 'BLOCK_BYTES', 4)
  (mount / 'a').write_bytes(b'0123456789')
  copies, written, write = growing.Mirror(mount, growing='a', every_s=99.), [], storage.write_bytes
  copies.fetch()

  def once(path: pathlib.Path, content: bytes) -> None:
    assert growing.read(mount / 'a') == b'0123456789'
    written.append(path.name)
    write(path, content)

  monkeypatch.setattr(storage, 'write_bytes', once)
  copies.push()
  assert written == ['a.0002', 'a.0001', 'a'] and growing.read(mount / 'a') == b'0123456789'
  copies.close()


def test_folders_of_trackers_are_copied_at_the_end(mount: pathlib.Path) -> None:
  copies = growing.Mirror(mount, every_s=99.)
  (copies.folder / 'wandb').mkdir()
  (copies.folder / 'wandb' / 'run.wandb').write_bytes(b'x')
  (copies.folder / 'z').write_bytes(b'1')
  copies.push()
  assert sorted(p.name for p in mount.iterdir()) == ['z']
  copies.close()
  assert (mount / 'wandb' / 'run.wandb').read_bytes() == b'x'
