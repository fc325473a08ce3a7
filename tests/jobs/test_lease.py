"""One run for a run directory in object storage."""
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
from vit_jax.jobs import lease, run_directory

WORKDIR = 'gs://mine/run'


def hold(expires_s: float = .4) -> lease.Lease:
  return lease.Lease(WORKDIR, renew_s=.05, expires_s=expires_s, settle_s=.01)


def write(bucket: buckets.Server, **changes: object) -> None:
  content = {'host': 'elsewhere pid', 'pid': 7, 'token': 'x', 'time': time.time(), **changes}
  bucket.objects['mine/run/.lock'] = (99, json.dumps(content).encode())


def test_a_directory_is_held_until_the_end_and_no_longer(bucket: buckets.Server) -> None:
  with hold():
    assert json.loads(bucket.read('mine/run/.lock'))['pid'] == os.getpid()
  assert bucket.names(WORKDIR) == []
  with hold():
    pass


def test_a_holder_that_renews_is_found_to_be_alive(bucket: buckets.Server, monkeypatch: pytest.MonkeyPatch) -> None:
  with hold(expires_s=5.):
    monkeypatch.setattr(lease, '_machine', lambda: 'another pid:[1]')
    with pytest.raises(UserError, match=rf'{WORKDIR} is in use by another run \(process {os.getpid()} on .*; wait for'):
      hold(expires_s=5.)


def test_a_holder_elsewhere_that_does_not_renew_is_waited_for_and_replaced(
    bucket: buckets.Server, caplog: pytest.LogCaptureFixture) -> None:
  write(bucket)
  began = time.monotonic()
  with caplog.at_level('INFO'), hold(expires_s=.5):
    assert .3 < time.monotonic() - began < 5
  assert 'was last held by process 7 on elsewhere; taken in' in caplog.text


def test_a_process_of_this_machine_that_is_no_more_is_replaced_at_once(bucket: buckets.Server) -> None:
  gone = subprocess.Popen([sys.executable, '-c', ''])
  gone.wait()
  write(bucket, host=lease._machine(), pid=gone.pid)
  began = time.monotonic()
  with hold(expires_s=60.):
    assert time.monotonic() - began < 5


def test_a_file_that_says_nothing_holds_nothing(bucket: buckets.Server) -> None:
  bucket.objects['mine/run/.lock'] = (1, b'{"pid"')
  with hold():
    pass


def test_of_two_that_start_at_once_the_first_gives_way(
    bucket: buckets.Server, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(lease.time, 'sleep', lambda seconds: write(bucket, host='other pid:[2]', pid=8))
  with pytest.raises(UserError, match=r'in use by another run \(process 8 on other\)'):
    hold()


def test_it_is_renewed_through_failures_and_a_second_writer_is_said(
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
    wait_for('could not be renewed, and is tried again')
    bucket.broken = False
    for _ in range(400):
      if json.loads(bucket.read('mine/run/.lock'))['time'] > before:
        break
      time.sleep(.01)
    write(bucket)
    wait_for('is written to by another run too, process 7 on elsewhere')
  assert bucket.names(WORKDIR) == ['.lock']  # the other's


def test_a_bucket_that_cannot_be_written_is_refused(bucket: buckets.Server) -> None:
  bucket.broken = True
  with pytest.raises(UserError, match=rf'--workdir={WORKDIR} cannot be written: .*; want a bucket'):
    hold()


def test_a_run_directory_is_held_by_what_its_place_can_do(bucket: buckets.Server, tmp_path: str) -> None:
  with run_directory.hold(tmp_path) as near:
    assert isinstance(near, run_directory.Lock)
  with run_directory.hold(WORKDIR) as far:
    assert isinstance(far, lease.Lease)
  assert 'lease' not in {thread.name for thread in threading.enumerate()}
