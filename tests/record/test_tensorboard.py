"""Event files for TensorBoard."""
from __future__ import annotations

import pathlib
import resource

import pytest
from tensorboardX.proto import event_pb2

from vit_jax.record import tensorboard


def events(path: pathlib.Path) -> list[event_pb2.Event]:
  """Records of a file: length, checksum of it, content, checksum of it."""
  raw, found = path.read_bytes(), []
  while raw:
    size = int.from_bytes(raw[:8], 'little')
    found.append(event_pb2.Event.FromString(raw[12:12 + size]))
    raw = raw[16 + size:]
  return found


def test_scalars_are_in_the_file_with_their_steps(tmp_path: pathlib.Path) -> None:
  for purge in (None, 5):
    one = tensorboard.Board(str(tmp_path), purge_step=purge)
    one.add_scalar('train/loss', 1.5, 7)
    one.close()
  first, second = (events(path) for path in sorted(tmp_path.glob('events.out.tfevents.*')))
  assert [e.file_version for e in first] == ['brain.Event:2', '']
  assert (first[-1].step, first[-1].summary.value[0].tag) == (7, 'train/loss')
  assert first[-1].summary.value[0].simple_value == 1.5
  assert second[1].step == 5 and second[1].session_log.status == event_pb2.SessionLog.START


def test_a_full_disk_is_an_error_of_the_caller(tmp_path: pathlib.Path) -> None:
  one = tensorboard.Board(str(tmp_path), purge_step=None)
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
  try:
    with pytest.raises(OSError, match='too large'):
      for step in range(1000):
        one.add_scalar('train/loss', 1., step)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
