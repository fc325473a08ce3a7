"""A lease on a run directory in object storage allows one run."""
from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time

import buckets
import pytest

from vit_jax.core.errors import UserError
from vit_jax.record import run_directory

WORKDIR = 'gs://mine/run'


def hold(expires_s: float = .4) -> run_directory.Lease:
  return run_directory.Lease(WORKDIR, renew_s=.05, expires_s=expires_s, settle_s=.01)


def write(bucket: buckets.Server, **changes: object) -> None:
  content = {'host': 'elsewhere pid', 'pid': 7, 'token': 'x', 'time': time.time(), **changes}
  bucket.objects['mine/run/.lock'] = (99, json.dumps(content).encode())


def test_a_lease_ends_with_the_run(bucket: buckets.Server) -> None:
  with hold():
    assert json.loads(bucket.read('mine/run/.lock'))['pid'] == os.getpid()
  assert bucket.names(WORKDIR) == []
  with hold():
    pass


def test_a_lease_that_is_renewed_is_not_taken(bucket: buckets.Server, monkeypatch: pytest.MonkeyPatch) -> None:
  with hold(expires_s=60.):
    monkeypatch.setattr(run_directory, '_machine', lambda: 'another pid:[1]')
    with pytest.raises(UserError, match=rf'{WORKDIR}: .* got one in use by process {os.getpid()} on .*\. Wait for'):
      hold(expires_s=60.)


def test_a_lease_of_another_machine_is_taken_after_it_expires(
    bucket: buckets.Server, caplog: pytest.LogCaptureFixture) -> None:
  write(bucket)
  began = time.monotonic()
  with caplog.at_level('INFO'), hold(expires_s=.5):
    assert .3 < time.monotonic() - began < 5
  assert 'was last used by process 7 on elsewhere. Waiting' in caplog.text


def test_a_lease_of_an_ended_process_of_this_machine_is_taken_immediately(bucket: buckets.Server) -> None:
  gone = subprocess.Popen([sys.executable, '-c', ''])
  gone.wait()
  write(bucket, host=run_directory._machine(), pid=gone.pid)
  began = time.monotonic()
  with hold(expires_s=60.):
    assert time.monotonic() - began < 5


def test_an_unreadable_lock_file_is_ignored(bucket: buckets.Server) -> None:
  bucket.objects['mine/run/.lock'] = (1, b'{"pid"')
  with hold():
    pass


def test_of_two_runs_that_start_together_the_first_stops(
    bucket: buckets.Server, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(run_directory.time, 'sleep', lambda seconds: write(bucket, host='other pid:[2]', pid=8))
  with pytest.raises(UserError, match=r'in use by process 8 on other\.'):
    hold()


def test_a_lease_is_renewed_after_failures_and_a_second_writer_is_reported(
    bucket: buckets.Server, caplog: pytest.LogCaptureFixture) -> None:
  def wait_for(text: str) -> None:
    for _ in range(400):
      if text in caplog.text:
        return
      time.sleep(.01)
    raise AssertionError(caplog.text)

  with hold():
    before = json.loads(bucket.read('mine/run/.lock'))['time']
    bucket.broken = True
    wait_for('could not be renewed and will be tried again')
    bucket.broken = False
    for _ in range(400):
      if json.loads(bucket.read('mine/run/.lock'))['time'] > before:
        break
      time.sleep(.01)
    write(bucket)
    wait_for('is also used by another run, process 7 on elsewhere')
  assert bucket.names(WORKDIR) == ['.lock']  # the other's


def test_a_bucket_without_write_permission_is_refused(bucket: buckets.Server) -> None:
  bucket.broken = True
  with pytest.raises(UserError, match=rf'{WORKDIR}: expected a bucket that this machine may write to, got .*\. Check'):
    hold()


def test_local_directories_are_locked_and_remote_ones_leased(bucket: buckets.Server, tmp_path: str) -> None:
  with run_directory.hold(tmp_path) as near:
    assert isinstance(near, run_directory.Lock)
  with run_directory.hold(WORKDIR) as far:
    assert isinstance(far, run_directory.Lease)
  assert 'lease' not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize('ahead_s', [1e6, 0., float('nan')])
def test_a_clock_that_is_set_back_lengthens_no_wait(
    ahead_s: float, bucket: buckets.Server, monkeypatch: pytest.MonkeyPatch) -> None:
  """Before the start of this run, or while it waits."""
  write(bucket, time=time.time() + ahead_s)
  began, clock = time.monotonic(), time.time
  monkeypatch.setattr(run_directory.time, 'time', lambda: clock() - 3600 * (time.monotonic() - began > .1))
  with hold(expires_s=.5):
    assert time.monotonic() - began < 5


def test_a_lease_is_kept_while_the_clock_is_set_back(bucket: buckets.Server, monkeypatch: pytest.MonkeyPatch) -> None:
  with hold(expires_s=60.):
    clock = time.time
    monkeypatch.setattr(run_directory.time, 'time', lambda: clock() - 3600)
    time.sleep(.2)
    monkeypatch.setattr(run_directory, '_machine', lambda: 'another pid:[1]')
    monkeypatch.setattr(run_directory.time, 'time', clock)
    assert json.loads(bucket.read('mine/run/.lock'))['pid'] == os.getpid()
