"""A disk that is full, at every stage of a run: one message, and the same command continues when there is room."""
from __future__ import annotations

import os
import pathlib
import subprocess
from collections.abc import Iterator

import pytest
import runs

SIZE_KB = 2048
SHORT = ('--config.length=20 steps', '--config.checkpoints.every=5 steps', '--config.train.log_every=1 steps',
         '--config.train.retry=0')


@pytest.fixture
def disk(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
  """A small disk of its own."""
  place = tmp_path / 'disk'
  place.mkdir()
  command = ['mount', '-t', 'tmpfs', '-o', f'size={SIZE_KB}k', 'tmpfs', str(place)]
  if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
    pytest.skip('needs the right to mount a file system')
  yield place
  subprocess.run(['umount', '-l', str(place)], check=True)


def fill(disk: pathlib.Path, left_kb: int) -> None:
  """Leaves so much room."""
  ballast = disk / 'ballast'
  ballast.unlink(missing_ok=True)
  free = os.statvfs(disk)
  ballast.write_bytes(bytes(free.f_bavail * free.f_frsize - left_kb * 1024))


@pytest.mark.slow(reason='about 60 s: six starts')
def test_each_stage_ends_with_one_message_and_the_run_continues_when_there_is_room(
    disk: pathlib.Path, tmp_path: pathlib.Path) -> None:
  """Room for nothing, for the lock, for the record, for a part of a checkpoint; then for all.

  A save in the background takes the last room, so that it is chance whether it is noticed there or in the record.
  """
  runs.finish(runs.start(tmp_path / 'whole', *SHORT))
  record = 'metrics.jsonl: expected to write it, got "No space left on device'
  for left_kb, said in ((0, [f'error: --workdir={disk / "run"}: expected to write it, got "No space']),
                        (8, ['config.json: expected to write it, got "No space left on device']),
                        (40, [record]),
                        (300, [f'could not be written to {disk / "run" / "checkpoints"}: No space left', record])):
    fill(disk, left_kb)
    out = runs.finish(runs.start(disk / 'run', *SHORT), status=75)
    assert any(one in out for one in said) and out.count('error: ') == 1, (left_kb, out)
    assert 'Traceback' not in out and 'Free some space' in out, (left_kb, out)
  (disk / 'ballast').unlink()
  runs.finish(runs.start(disk / 'run', *SHORT))
  assert runs.final(disk / 'run')['params_digest'] == runs.final(tmp_path / 'whole')['params_digest']
  assert runs.losses(disk / 'run') == runs.losses(tmp_path / 'whole')
