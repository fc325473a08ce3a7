"""The file system of a path decides how a run directory is kept there."""
from __future__ import annotations

import os
import pathlib

import mounted
import pytest

from vit_jax.record import growing, reader, storage, writer

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
