"""The run directory: a lock that allows one writer, and small files that are replaced atomically.

A run whose directory was taken over by another one writes none of these files any more (`lease.py`).
"""
from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import jax

from vit_jax.core import json_text, os_errors
from vit_jax.core.errors import UserError
from vit_jax.core.redaction import redacted
from vit_jax.record import lease, mounts, storage

LOCK_FILE = '.lock'
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""Error numbers of network file systems that are mounted without file locks."""


@contextlib.contextmanager
def hold(workdir: storage.PathLike) -> Iterator[None]:
  """Locks a run directory for one run: with a file lock on disks, a lease on storage that several hosts share, or both.

  The operating system releases a file lock at once, however the process ends. It does not always hold for other hosts
  and other mounts of a network file system or a bucket, for which there is the lease (`lease.py`).

  Raises:
    UserError: another process holds the lock, or the directory is not writable.
    TemporaryError: the storage of the lease still fails after a time.
  """
  with contextlib.ExitStack() as stack:
    if storage.is_local(workdir):
      stack.enter_context(Lock(workdir))
    if not storage.is_local(workdir) or mounts.is_shared(workdir):
      stack.enter_context(lease.Lease(workdir))
    yield


class Lock:
  """Locks a local run directory. The operating system releases the lock when the process ends, however it ends.

  A new directory is removed again if the run ends with a `UserError` before it has written anything of value.

  Raises:
    UserError: another process holds the lock, or the directory is not writable.
  """

  def __init__(self, workdir: storage.PathLike) -> None:
    self._workdir = os.fspath(workdir)
    self._made = [path for path in (self._workdir, os.path.dirname(self._workdir)) if not os.path.exists(path)]
    try:
      os.makedirs(workdir, exist_ok=True)
      self._file = open(os.path.join(workdir, LOCK_FILE), 'a+')
      self._take()
    except OSError as error:
      raise os_errors.kind(error)(f'--workdir={workdir}: expected a folder that can be written, got {error.strerror}. '
                                  f'{os_errors.find(error) or "Use a folder that this user may write to."} Then run '
                                  'the same command again.') from error

  def _take(self) -> None:
    """Locks the file and writes the id of this process into it."""
    try:
      fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      self._file.seek(0)
      holder = self._file.read().strip() or 'unknown'
      self._file.close()
      raise UserError(f'--workdir={self._workdir}: expected a directory that no other run uses, got one in use by '
                      f'process {holder}. Wait for that run, stop it, or use another --workdir.') from None
    except OSError as error:
      if error.errno not in _NO_LOCKS or not mounts.is_shared(self._workdir):
        raise
    self._file.seek(0)
    self._file.truncate()
    os.write(self._file.fileno(), str(os.getpid()).encode())

  def __enter__(self) -> Lock:
    return self

  def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
               trace: TracebackType | None) -> None:
    is_own = isinstance(error, UserError) and not isinstance(error, lease.InUse)
    if self._made and is_own and _holds_nothing(self._workdir):
      shutil.rmtree(self._workdir, ignore_errors=True)
      for parent in self._made[1:]:
        with contextlib.suppress(OSError):  # another run uses the directory
          os.rmdir(parent)
    with contextlib.suppress(OSError):  # on a mounted bucket, another host has written the file
      self._file.close()


def _holds_nothing(workdir: str) -> bool:
  """Whether a run directory holds only the files that every start writes first."""
  found = {name for name in os.listdir(workdir) if not name.startswith(lease.VERSIONS)}
  return found <= {LOCK_FILE, 'config.json', 'checkpoints'} and not (
      'checkpoints' in found and os.listdir(os.path.join(workdir, 'checkpoints')))


def default_name(name: str) -> str:
  """Returns the name of a config as a directory name, for `runs/NAME`."""
  return re.sub(r'[^\w.=+-]+', '_', name).lstrip('.') or 'run'


def paused_file(until: str) -> str:
  """Returns the name of the file with the results of a run that paused after a part such as '25 %'."""
  return f'paused_{until.replace(" ", "")}.json'


def write_json(path: storage.PathLike, content: Mapping[str, Any]) -> None:
  """Replaces a JSON file atomically, with null for numbers that are not finite; only process 0 writes."""
  write_text(path, json.dumps(json_text.finite(content), indent=2, allow_nan=False) + '\n')


def write_text(path: storage.PathLike, text: str) -> None:
  """Replaces a text file atomically, without passwords and tokens of addresses; only process 0 writes."""
  write_bytes(path, storage.encode(redacted(text)))


def write_bytes(path: storage.PathLike, content: bytes) -> None:
  """Replaces a file atomically; only process 0 writes.

  Raises:
    UserError: it cannot be written, or another run has taken over the directory.
    TemporaryError: the storage fails, or the disk is full.
  """
  if jax.process_index():
    return
  lease.check(path)
  try:
    storage.write_bytes(path, content)
  except storage.faults() as error:
    raise os_errors.writing(os.fspath(path), error) from error
