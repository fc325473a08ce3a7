"""A run on a mounted bucket whose host is lost at any moment: its record has every step once."""
from __future__ import annotations

import pathlib
import subprocess
import sys

import mounted
import pytest
import runs
from tensorboardX.proto import event_pb2

from vit_jax.record import reader

SHORT = (*runs.TINY, '--config.length=40 steps', '--config.checkpoints.every=10 steps',
         '--config.train.log_every=1 steps')


def start(mount: pathlib.Path, killed_at: int) -> None:
  """A start that ends by a kill, after which the host is lost; or the last one."""
  command = [sys.executable, str(runs.ROOT / 'tests' / 'mounted.py'), str(mount), str(killed_at), '--config=digits',
             f'--workdir={mount / "run"}', *SHORT]
  done = subprocess.run(command, env=runs.environment(), capture_output=True, text=True, timeout=300)
  assert done.returncode == (-9 if killed_at else 0), done.stdout[-3000:] + done.stderr[-3000:]
  mounted.lose_host(mount)


def board_steps(folder: pathlib.Path) -> list[int]:
  """Steps of the training loss that TensorBoard shows: a start drops what it repeats."""
  shown: list[int] = []
  for path in sorted(folder.glob('events.out.tfevents.*')):
    raw = path.read_bytes()
    while raw:
      size = int.from_bytes(raw[:8], 'little')
      event = event_pb2.Event.FromString(raw[12:12 + size])
      raw = raw[16 + size:]
      if event.session_log.status == event_pb2.SessionLog.START:
        shown = [step for step in shown if step < event.step]
      shown += [event.step for value in event.summary.value if value.tag == 'train/loss']
  return shown


@pytest.mark.slow(reason='about 25 s: four starts')
def test_a_record_on_a_mounted_bucket_has_every_step_once_after_hosts_are_lost(tmp_path: pathlib.Path) -> None:
  mount = tmp_path / 'my bucket'
  for killed_at in (15, 27, 38, 0):
    start(mount, killed_at)
  run, every = reader.read(mount / 'run'), list(range(1, 41))
  assert [e['resumed_from'] for e in run.events if e['event'] == 'start'] == [None, 10, 20, 30]
  assert [e['step'] for e in run.events if e['event'] == 'checkpoint'] == [10, 20, 30, 40] and not run.num_broken
  assert [row['step'] for row in run.rows if 'train/loss' in row] == every
  assert [event['step'] for event in run.events if event['event'] == 'norms'] == every
  assert board_steps(mount / 'run') == every


def test_the_stand_in_for_a_mount_loses_what_is_neither_closed_nor_synced(tmp_path: pathlib.Path) -> None:
  mount = tmp_path / 'mount'
  mount.mkdir()
  (mount / 'old').write_text('old')
  text = f"""
import os, pathlib, signal, sys
sys.path.insert(0, {str(runs.ROOT / "tests")!r})
import mounted
mount = pathlib.Path({str(mount)!r})
mounted.install(mount)
(mount / 'closed').write_text('closed')
appended, synced = open(mount / 'old', 'a'), open(mount / 'synced', 'w')
new = open(mount / 'new', 'wb')
appended.write(' and new'), synced.write('synced'), new.write(b'1')
appended.flush(), synced.flush(), new.flush()
os.fsync(synced.fileno())
synced.write(' and more'), synced.flush()
assert (mount / 'old').read_text() == 'old and new' and (mount / 'synced').read_text() == 'synced and more'
os.kill(os.getpid(), signal.SIGKILL)
"""
  assert subprocess.run([sys.executable, '-c', text], timeout=60).returncode == -9
  assert sorted(mounted.lose_host(mount)) == ['new', 'old', 'synced']
  assert {p.name: p.read_text() for p in mount.iterdir()} == {'old': 'old', 'closed': 'closed', 'synced': 'synced'}
