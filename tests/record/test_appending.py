"""A file that only grows: while its storage fails its bytes wait, and it ends with the bytes of an undisturbed one."""
from __future__ import annotations

import errno
import os
import pathlib

import pytest

from vit_jax.core import retrying
from vit_jax.core.errors import TemporaryError
from vit_jax.record import appending, writer

LINES = [f'line {i}\n'.encode() * 3 for i in range(9)]


class Disk:
  """Stands in for `os.write`: writes `parts` bytes at a time, and fails with `number` while it is broken."""

  def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
    self.number, self.calls, self._write = 0, 0, os.write
    monkeypatch.setattr(appending.os, 'write', self)

  def __call__(self, descriptor: int, content: bytes) -> int:
    self.calls += 1
    if self.number:
      raise OSError(self.number, os.strerror(self.number))
    return self._write(descriptor, content[:5])


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
  found = [0.]
  monkeypatch.setattr(appending.time, 'monotonic', lambda: found[0])
  monkeypatch.setattr(retrying.time, 'sleep', lambda s: found.__setitem__(0, found[0] + s))
  return found


def opened(path: pathlib.Path) -> appending.Appender:
  return appending.Appender(str(path), os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND))


@pytest.mark.parametrize('number', [errno.EIO, errno.ENOSPC, errno.ESTALE, errno.EDQUOT])
def test_what_could_not_be_written_is_written_later_in_order(
    number: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
  disk, file = Disk(monkeypatch), opened(tmp_path / 'a')
  for i, line in enumerate(LINES):
    disk.number = number if 3 <= i < 6 else 0
    file.write(line)
  file.close()
  assert (tmp_path / 'a').read_bytes() == b''.join(LINES)
  assert caplog.text.count('The lines are kept in memory') == 1 and caplog.text.count('is complete') == 1


def test_after_the_patience_it_is_an_error(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, now: list[float]) -> None:
  disk, file = Disk(monkeypatch), opened(tmp_path / 'a')
  disk.number = errno.ENOSPC
  file.write(b'a')
  now[0] = retrying.PATIENCE_S - 1
  file.write(b'b')
  now[0] = retrying.PATIENCE_S
  with pytest.raises(OSError, match='No space left'):
    file.write(b'c')
  disk.number = 0
  file.close()
  assert (tmp_path / 'a').read_bytes() == b'abc'


def test_what_a_person_must_change_is_an_error_at_once(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  disk, file = Disk(monkeypatch), opened(tmp_path / 'a')
  disk.number = errno.EROFS
  with pytest.raises(OSError, match='Read-only'):
    file.write(b'a')


def test_making_it_durable_waits_for_the_storage_and_then_gives_up(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, now: list[float]) -> None:
  disk, file = Disk(monkeypatch), opened(tmp_path / 'a')
  disk.number = errno.EIO
  file.write(b'a')
  with pytest.raises(TemporaryError, match='expected success within 300 s'):
    file.settle()
  assert now[0] >= retrying.PATIENCE_S and disk.calls > 5


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
        record.norms(step, {'grad': {'a': step / 7}, 'param': {'b': 1.}})
  for name in ('metrics.jsonl', 'norms.f32'):
    assert (tmp_path / 'whole' / name).read_bytes() == (tmp_path / 'disturbed' / name).read_bytes() != b''
