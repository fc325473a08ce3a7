"""The run directory: a lock that allows one writer, and small files that are replaced atomically."""
from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import re
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import jax

from vit_jax.core import json_text, os_errors
from vit_jax.core.errors import UserError
from vit_jax.core.redaction import redacted
from vit_jax.record import storage

LOCK_FILE = '.lock'
LEASE_RENEW_S = 30.
LEASE_EXPIRES_S = 120.
LEASE_SETTLE_S = 1.
log = logging.getLogger('vit_jax.record')


def hold(workdir: storage.PathLike) -> Lock | Lease:
  """Locks a run directory for one run, as a context manager.

  Raises:
    UserError: another process holds the lock, or the directory is not writable.
  """
  return Lock(workdir) if storage.is_local(workdir) else Lease(workdir)


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
    self._file.seek(0)
    self._file.truncate()
    os.write(self._file.fileno(), str(os.getpid()).encode())

  def __enter__(self) -> Lock:
    return self

  def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
               trace: TracebackType | None) -> None:
    if self._made and isinstance(error, UserError) and _holds_nothing(self._workdir):
      shutil.rmtree(self._workdir, ignore_errors=True)
      for parent in self._made[1:]:
        with contextlib.suppress(OSError):  # another run uses the directory
          os.rmdir(parent)
    self._file.close()


def _holds_nothing(workdir: str) -> bool:
  """Whether a run directory holds only the files that every start writes first."""
  found = set(os.listdir(workdir))
  return found <= {LOCK_FILE, 'config.json', 'checkpoints'} and not (
      'checkpoints' in found and os.listdir(os.path.join(workdir, 'checkpoints')))


class Lease:
  """Locks a run directory in object storage, which has no file locks: the holder renews its lease.

  `.lock` names the holder and the time of its last renewal. A holder that has not renewed for `LEASE_EXPIRES_S` has
  ended, for example by a kill; the next run waits that long, or not at all if the process was on this machine and has
  ended. Two runs that start within the same second notice it by reading back what they wrote. The clocks of the
  machines have to agree to a minute.

  Raises:
    UserError: another process holds the lease, or the directory is not writable.
  """

  def __init__(self, workdir: storage.PathLike, *, renew_s: float = LEASE_RENEW_S, expires_s: float = LEASE_EXPIRES_S,
               settle_s: float = LEASE_SETTLE_S) -> None:
    self._workdir, self._path = workdir, storage.open_path(workdir) / LOCK_FILE
    self._renew_s, self._expires_s = renew_s, expires_s
    self._own = {'host': _machine(), 'pid': os.getpid(), 'token': uuid.uuid4().hex}
    try:
      self._wait()
      self._renew()
      time.sleep(settle_s)
      if not self._is_own():
        raise UserError(self._taken(self._read()))
    except storage.faults() as error:
      raise os_errors.kind(error)(f'--workdir={workdir}: expected a bucket that this machine may write to, got '
                                  f'{error}. Check its permissions, or use another --workdir.') from error
    self._closed = threading.Event()
    self._thread = threading.Thread(target=self._run, name='lease', daemon=True)
    self._thread.start()

  def __enter__(self) -> Lease:
    return self

  def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
               trace: TracebackType | None) -> None:
    self._closed.set()
    self._thread.join()
    if self._is_own():
      self._path.unlink(missing_ok=True)

  def _wait(self) -> None:
    """Returns when the lease is free. Raises UserError if its holder renews it meanwhile."""
    first = holder = self._read()
    if not holder or _is_gone(holder):
      return
    # No longer than the lease is valid, whatever the clocks of both machines show, also if this one is set back.
    wait_s = min(_renewed_s(first) + self._expires_s - time.time(), self._expires_s)
    until_s = time.monotonic() + wait_s
    if wait_s > 0:
      log.info('%s was last used by %s. Waiting %.0f s to see whether that run still exists.', self._workdir,
               _holder_name(first), wait_s)
    while time.monotonic() < until_s:
      time.sleep(min(self._renew_s / 4, 5.))
      holder = self._read()
      if not holder:
        return
      if holder != first:
        raise UserError(self._taken(holder))

  def _run(self) -> None:
    while not self._closed.wait(self._renew_s):
      try:
        if not self._is_own():
          log.error('%s is also used by another run, %s. Stop one of them.', self._workdir, _holder_name(self._read()))
          return
        self._renew()
      except storage.faults() as error:
        log.warning('The lease on %s could not be renewed and will be tried again: %s', self._workdir, error)

  def _renew(self) -> None:
    storage.write_bytes(self._path, json.dumps({**self._own, 'time': time.time()}).encode())

  def _is_own(self) -> bool:
    return self._read().get('token') == self._own['token']

  def _read(self) -> dict[str, Any]:
    """Returns the content of the file; {} if it is missing or unreadable."""
    try:
      found = json.loads(storage.read_text(self._path))
    except (FileNotFoundError, ValueError):
      return {}
    return found if isinstance(found, dict) and {'host', 'pid', 'token', 'time'} <= found.keys() else {}

  def _taken(self, holder: dict[str, Any]) -> str:
    return (f'--workdir={self._workdir}: expected a directory that no other run uses, got one in use by '
            f'{_holder_name(holder)}. Wait for that run, stop it, or use another --workdir.')


def _holder_name(holder: dict[str, Any]) -> str:
  return f'process {holder["pid"]} on {str(holder["host"]).split()[0]}' if holder else 'an unknown process'


def _renewed_s(holder: dict[str, Any]) -> float:
  """Returns the time of the last renewal; now, if the file has none."""
  value = holder['time']
  return float(value) if isinstance(value, int | float) and math.isfinite(value) else time.time()


def _machine() -> str:
  """Returns the host name, and on Linux the process namespace, which is different in every container."""
  try:
    return f'{socket.gethostname()} {os.readlink("/proc/self/ns/pid")}'
  except OSError:
    return socket.gethostname()


def _is_gone(holder: dict[str, Any]) -> bool:
  """Whether the holder was a process of this machine that has ended."""
  if holder['host'] != _machine():
    return False
  try:
    os.kill(int(holder['pid']), 0)
  except ProcessLookupError:
    return True
  except PermissionError:
    return False
  return int(holder['pid']) == os.getpid()


def default_name(name: str) -> str:
  """Returns the name of a config as a directory name, for `runs/NAME`."""
  return re.sub(r'[^\w.=+-]+', '_', name).lstrip('.') or 'run'


def write_json(path: storage.PathLike, content: Mapping[str, Any]) -> None:
  """Replaces a JSON file atomically, with null for numbers that are not finite; only process 0 writes."""
  write_text(path, json.dumps(json_text.finite(content), indent=2, allow_nan=False) + '\n')


def write_text(path: storage.PathLike, text: str) -> None:
  """Replaces a text file atomically, without passwords and tokens of addresses; only process 0 writes."""
  write_bytes(path, storage.encode(redacted(text)))


def write_bytes(path: storage.PathLike, content: bytes) -> None:
  """Replaces a file atomically; only process 0 writes.

  Raises:
    UserError: it cannot be written, for example because the disk is full.
  """
  if jax.process_index():
    return
  try:
    storage.write_bytes(path, content)
  except storage.faults() as error:
    raise os_errors.writing(os.fspath(path), error) from error
