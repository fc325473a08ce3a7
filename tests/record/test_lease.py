"""A lease allows one run in a directory that several hosts reach, and a run that was replaced writes nothing more."""
from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import buckets
import mounted
import pytest

from vit_jax.core import retrying
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.record import lease, mounts, reader, run_directory, storage, writer

BUCKET = 'gs://mine/run'


@pytest.fixture(params=['bucket', 'folder'])
def workdir(request: pytest.FixtureRequest, bucket: buckets.Server, tmp_path: pathlib.Path) -> str | pathlib.Path:
  """A run directory in object storage, or in a folder."""
  if request.param == 'bucket':
    return BUCKET
  (tmp_path / 'run').mkdir()
  return tmp_path / 'run'


def hold(workdir: str | pathlib.Path, expires_s: float = .4) -> lease.Lease:
  return lease.Lease(workdir, renew_s=.05, expires_s=expires_s)


def register(workdir: str | pathlib.Path) -> lease._Object | lease._Files:
  return lease._Files(workdir) if isinstance(workdir, pathlib.Path) else lease._Object(workdir)


def write(workdir: str | pathlib.Path, **changes: object) -> None:
  """Another run writes the lease, whoever holds it."""
  found, content = register(workdir), {'host': 'elsewhere pid', 'pid': 7, 'token': 'x', **changes}
  while found.write(json.dumps(content).encode(), found.read()[0]) is None:
    pass


def read(workdir: str | pathlib.Path) -> dict[str, object]:
  return json.loads(register(workdir).read()[1] or b'{}')


def wait_for(is_so: Callable[[], object]) -> None:
  for _ in range(1000):
    if is_so():
      return
    time.sleep(.01)
  raise AssertionError('not within 10 s')


def test_a_lease_ends_with_the_run(workdir: str | pathlib.Path) -> None:
  for _ in range(2):
    with hold(workdir):
      assert read(workdir)['pid'] == os.getpid() and lease.find(os.path.join(workdir, 'a', 'b')) is not None
    assert register(workdir).read()[1] is None and lease.find(workdir) is None


def test_a_lease_that_is_renewed_is_not_taken(workdir: str | pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  with hold(workdir, expires_s=60.):
    monkeypatch.setattr(lease, '_machine', lambda: 'another pid:[1]')
    with pytest.raises(UserError, match=rf'{workdir}: .* got one in use by process {os.getpid()} on .*\. Wait for'):
      hold(workdir, expires_s=60.)


def test_a_lease_of_another_machine_is_taken_when_it_has_not_changed_for_its_time(
    workdir: str | pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
  """Whatever time the clock of that machine shows: none is compared."""
  write(workdir)
  began = time.monotonic()
  with caplog.at_level('INFO'), hold(workdir, expires_s=.5):
    assert .4 < time.monotonic() - began < 5
    assert read(workdir)['pid'] == os.getpid()
  assert 'was last used by process 7 on elsewhere. Waiting' in caplog.text


def test_a_lease_of_an_ended_process_of_this_machine_is_taken_at_once(workdir: str | pathlib.Path) -> None:
  gone = subprocess.Popen([sys.executable, '-c', ''])
  gone.wait()
  write(workdir, host=lease._machine(), pid=gone.pid)
  began = time.monotonic()
  with hold(workdir, expires_s=60.):
    assert time.monotonic() - began < 5


def test_a_machine_is_known_by_its_boot_and_not_by_its_name_alone(workdir: str | pathlib.Path) -> None:
  gone = subprocess.Popen([sys.executable, '-c', ''])
  gone.wait()
  host = lease._machine().split()
  assert len(host) == 3 and pathlib.Path('/proc/sys/kernel/random/boot_id').read_text().strip() == host[2]
  write(workdir, host=' '.join([*host[:2], 'another-boot']), pid=gone.pid)
  began = time.monotonic()
  with hold(workdir, expires_s=.5):
    assert time.monotonic() - began > .4


def test_a_lease_that_cannot_be_read_is_watched_like_any_other(workdir: str | pathlib.Path) -> None:
  found = register(workdir)
  found.write(b'{"pid"', found.read()[0])
  began = time.monotonic()
  with hold(workdir, expires_s=.5):
    assert time.monotonic() - began > .4


def test_a_lease_that_is_released_is_taken_at_once(workdir: str | pathlib.Path) -> None:
  write(workdir)
  found = register(workdir)
  threading.Timer(.2, lambda: found.release(found.read()[0])).start()
  began = time.monotonic()
  with hold(workdir, expires_s=60.):
    assert time.monotonic() - began < 10


def test_of_runs_that_take_over_together_one_wins(workdir: str | pathlib.Path) -> None:
  """Eight starts have seen the same lease, which has not changed; each writes its own."""
  write(workdir)
  expected = register(workdir).read()[0]
  barrier, won = threading.Barrier(8), []

  def take(number: int) -> None:
    own = register(workdir)
    barrier.wait()
    if own.write(b'{"number": %d}' % number, expected) is not None:
      won.append(number)

  threads = [threading.Thread(target=take, args=(number,)) for number in range(8)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert len(won) == 1 and read(workdir) == {'number': won[0]}


def test_of_two_runs_that_start_together_one_ends(
    workdir: str | pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  kind, first = (lease._Files if isinstance(workdir, pathlib.Path) else lease._Object), []
  own = kind.write

  def late(self: lease._Files, content: bytes, expected: object) -> object:
    if not first:  # between the look of a run and its write
      first.append(1)
      write(workdir, host='other pid:[2]', pid=8)
    return own(self, content, expected)

  monkeypatch.setattr(kind, 'write', late)
  with pytest.raises(UserError, match=r'in use by process 8 on other\.'):
    hold(workdir)


def test_a_write_whose_answer_was_lost_holds_the_lease(
    workdir: str | pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  kind = lease._Files if isinstance(workdir, pathlib.Path) else lease._Object
  own, lost = kind.write, []

  def write_and_fail(self: lease._Files, content: bytes, expected: object) -> object:
    found = own(self, content, expected)
    if len(lost) < 2:
      lost.append(found)
      raise TimeoutError('no answer')
    return found

  monkeypatch.setattr(retrying, 'FIRST_WAIT_S', .01)
  monkeypatch.setattr(kind, 'write', write_and_fail)
  with hold(workdir) as held:
    held.check()
    wait_for(lambda: register(workdir).read()[0] != lost[-1])  # renewed
  assert lost[0] is not None


def test_a_replaced_run_writes_nothing_more_and_names_the_new_holder(
    workdir: str | pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
  run_directory.write_text(os.path.join(workdir, 'a'), 'before')
  with lease.Lease(workdir, renew_s=99., expires_s=99.) as held:
    run_directory.write_text(os.path.join(workdir, 'a'), 'mine')
    write(workdir)
    for path in ('a', 'b/c'):
      with pytest.raises(lease.Replaced, match=rf'--workdir={workdir}: .* got process 7 on elsewhere\. The other one'):
        run_directory.write_text(os.path.join(workdir, path), 'late')
    for again in (held.raise_if_replaced, held._renew, held.look):  # it does not take the lease back
      with pytest.raises(lease.Replaced):
        again()
    run_directory.write_text(f'{workdir}2', 'elsewhere')  # not in that directory
  assert storage.read_text(os.path.join(workdir, 'a')) == 'mine'
  assert not storage.open_path(os.path.join(workdir, 'b', 'c')).exists()
  assert read(workdir)['pid'] == 7  # the lease of the other one stays


def test_a_run_whose_successor_has_ended_is_replaced_too(workdir: str | pathlib.Path) -> None:
  with lease.Lease(workdir, renew_s=99., expires_s=.1) as held:
    for _ in range(3):
      write(workdir)
    found = register(workdir)
    found.release(found.read()[0])
    with pytest.raises(lease.Replaced, match='another run, which has ended since'):
      held._renew()
  assert register(workdir).read()[1] is None


def test_a_replaced_run_notices_at_its_next_renewal(
    workdir: str | pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
  with hold(workdir, expires_s=60.) as held:
    write(workdir)
    wait_for(lambda: held._replaced)
    with pytest.raises(lease.Replaced):
      held.ensure()
  assert caplog.text.count('to remain the only one') == 1


def test_a_lease_is_renewed_after_failures(bucket: buckets.Server, caplog: pytest.LogCaptureFixture) -> None:
  with hold(BUCKET, expires_s=60.):
    bucket.broken = True
    wait_for(lambda: 'could not be renewed and will be tried again' in caplog.text)
    bucket.broken = False
    before = bucket.objects['mine/run/.lock'][0]
    wait_for(lambda: bucket.objects['mine/run/.lock'][0] > before)


def test_a_bucket_without_write_permission_is_refused(bucket: buckets.Server) -> None:
  bucket.broken = True
  with pytest.raises(UserError, match=rf'{BUCKET}: expected storage that this machine may write to, got the network'):
    hold(BUCKET)


def test_a_lease_that_cannot_be_read_for_long_ends_the_run_as_temporary(
    workdir: str | pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  with lease.Lease(workdir, renew_s=99., expires_s=.1) as held:
    monkeypatch.setattr(retrying, 'PATIENCE_S', .01)
    monkeypatch.setattr(held._register, 'read', lambda: (_ for _ in ()).throw(TimeoutError('no answer')))
    with pytest.raises(TemporaryError, match='the lease on .* got no answer'):
      held.check()


def record(workdir: str | pathlib.Path) -> writer.Writer:
  return writer.Writer(workdir, process_index=0, resumed_from=None, progress_total=9, progress=False)


def test_the_record_of_a_replaced_run_ends_at_its_last_block(workdir: str | pathlib.Path) -> None:
  with lease.Lease(workdir, renew_s=99., expires_s=99.) as held:
    with record(workdir) as out:
      out.write(1, {'a': 1.})
      out.event('checkpoint', step=1)
      write(workdir)
      with pytest.raises(lease.Replaced):
        out.event('checkpoint', step=2)
      with pytest.raises(lease.Replaced):
        out.advance(3)
      with pytest.raises(lease.Replaced):
        out.write(3, {'a': 1.})
    assert held._replaced
  assert [row['step'] for row in reader.read(workdir).rows] == [1]
  assert 3 not in [event.get('step') for event in reader.read(workdir).events]


def test_a_row_of_a_run_that_was_stopped_for_long_is_not_appended(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  """The time that has passed tells it: the lease is read before the row is written."""
  with lease.Lease(tmp_path, renew_s=99., expires_s=60.), record(tmp_path) as out:
    out.write(1, {'a': 1.})
    write(tmp_path)
    out.write(2, {'a': 1.})  # within the time in which no other run can take over
    clock = lease._now_s
    monkeypatch.setattr(lease, '_now_s', lambda: clock() + 31)
    with pytest.raises(lease.Replaced):
      out.write(3, {'a': 1.})
  assert [row['step'] for row in reader.read(tmp_path).rows] == [1, 2]


def test_directories_on_disks_are_locked_those_of_several_hosts_leased_and_those_on_mounts_both(
    bucket: buckets.Server, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  for place, kind, files in ((BUCKET, '', {'.lock'}), (tmp_path / 'disk', 'ext4', {'.lock'}),
                             (tmp_path / 'nfs', 'nfs4', {'.lock', '.lease.1'})):
    if kind:
      monkeypatch.setattr(mounts, 'TABLE', str(mounted.table(place, kind)))
    with run_directory.hold(place):
      found = {*bucket.names(place)} if place == BUCKET else {path.name for path in pathlib.Path(place).iterdir()}
      assert found == files and (lease.find(place) is None) == (kind == 'ext4')
      if kind:
        with pytest.raises(UserError, match=f'in use by process {os.getpid()}'), run_directory.hold(place):
          pass
  assert 'lease' not in {thread.name for thread in threading.enumerate()}


def test_a_mount_without_file_locks_is_leased_alone(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  def refuse(*_: object) -> None:
    raise OSError(38, 'Function not implemented')

  monkeypatch.setattr(run_directory.fcntl, 'flock', refuse)
  monkeypatch.setattr(mounts, 'TABLE', str(mounted.table(tmp_path / 'run', 'lustre')))
  with run_directory.hold(tmp_path / 'run'):
    assert lease.find(tmp_path / 'run') is not None
  monkeypatch.setattr(mounts, 'TABLE', str(mounted.table(tmp_path / 'run', 'ext4')))
  with pytest.raises(UserError, match='got Function not implemented'), run_directory.hold(tmp_path / 'run'):
    pass


def test_a_new_directory_on_a_mount_is_removed_after_an_error_of_the_config(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(mounts, 'TABLE', str(mounted.table(tmp_path, 'nfs')))
  with pytest.raises(UserError, match='wrong'), run_directory.hold(tmp_path / 'runs' / 'a'):
    raise UserError('wrong')
  assert not (tmp_path / 'runs').exists()


def test_a_new_directory_that_another_run_has_taken_over_is_kept(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(mounts, 'TABLE', str(mounted.table(tmp_path, 'nfs')))
  with pytest.raises(lease.Replaced), run_directory.hold(tmp_path / 'run'):
    write(tmp_path / 'run')
    run_directory.write_text(tmp_path / 'run' / 'config.json', 'mine')
  assert read(tmp_path / 'run')['pid'] == 7


def test_a_process_that_was_stopped_and_replaced_notices_before_it_writes(tmp_path: pathlib.Path) -> None:
  """SIGSTOP for longer than the lease; a second process takes over; SIGCONT."""
  text = """
import pathlib, sys, time
from vit_jax.record import lease, run_directory
lease.RENEW_S, lease.EXPIRES_S = .1, .6
with lease.Lease(sys.argv[1]):
  print('held', flush=True)
  for number in range(100_000):
    run_directory.write_text(pathlib.Path(sys.argv[1], 'number'), f'{sys.argv[2]} {number}')
"""
  def start(name: str) -> subprocess.Popen[str]:
    environment = os.environ | {'PYTHONPATH': str(pathlib.Path(__file__).resolve().parents[2])}
    return subprocess.Popen([sys.executable, '-c', text, str(tmp_path), name], env=environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)

  first = start('first')
  assert first.stdout is not None and first.stdout.readline() == 'held\n'
  wait_for((tmp_path / 'number').exists)
  first.send_signal(signal.SIGSTOP)
  second = start('second')
  assert second.stdout is not None and second.stdout.readline() == 'held\n'
  wait_for(lambda: (tmp_path / 'number').read_text().startswith('second'))
  first.send_signal(signal.SIGCONT)
  _, error = first.communicate(timeout=20)
  assert f'got process {second.pid} on ' in error and 'Replaced' in error
  for _ in range(20):
    assert (tmp_path / 'number').read_text().startswith('second')
  second.kill()
  second.communicate()
