"""A lease on a run directory in object storage, which has no file locks: its holder renews it.

`.lock` names the holder and the time of its last renewal. A holder that has not renewed for `EXPIRES_S` has ended, for
example by a kill; the next run waits that long, or not at all if the process was on this machine and has ended. Two
runs that start within the same second notice it by reading back what they wrote. The clocks of the machines have to
agree to a minute.
"""
from __future__ import annotations

import json
import logging
import math
import os
import socket
import threading
import time
import uuid
from types import TracebackType
from typing import Any

from vit_jax.core.errors import UserError
from vit_jax.record import storage

RENEW_S = 30.
EXPIRES_S = 120.
SETTLE_S = 1.
FILE = '.lock'
log = logging.getLogger('vit_jax.record')


class Lease:
  """Locks a remote run directory for one run, until `__exit__` or until `EXPIRES_S` after the process ended.

  Raises:
    UserError: another process holds the lease, or the directory is not writable.
  """

  def __init__(self, workdir: storage.PathLike, *, renew_s: float = RENEW_S, expires_s: float = EXPIRES_S,
               settle_s: float = SETTLE_S) -> None:
    self._workdir, self._path = workdir, storage.open_path(workdir) / FILE
    self._renew_s, self._expires_s = renew_s, expires_s
    self._own = {'host': _machine(), 'pid': os.getpid(), 'token': uuid.uuid4().hex}
    try:
      self._wait()
      self._renew()
      time.sleep(settle_s)
      if not self._is_own():
        raise UserError(self._taken(self._read()))
    except storage.faults() as error:
      raise UserError(f'--workdir={workdir}: expected a bucket that this machine may write to, got {error}. Check its '
                      'permissions, or use another --workdir.') from error
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
    wait_s = min(_time(first) + self._expires_s - time.time(), self._expires_s)
    until_s = time.monotonic() + wait_s
    if wait_s > 0:
      log.info('%s was last used by %s. Waiting %.0f s to see whether that run still exists.', self._workdir,
               _name(first), wait_s)
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
          log.error('%s is also used by another run, %s. Stop one of them.', self._workdir, _name(self._read()))
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
            f'{_name(holder)}. Wait for that run, stop it, or use another --workdir.')


def _name(holder: dict[str, Any]) -> str:
  return f'process {holder["pid"]} on {str(holder["host"]).split()[0]}' if holder else 'an unknown process'


def _time(holder: dict[str, Any]) -> float:
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
