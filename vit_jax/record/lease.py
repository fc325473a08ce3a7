"""A lease on a run directory that several hosts can reach: it has one writer, and a replaced one writes nothing more.

A run renews its lease every `RENEW_S`. A run that starts and finds a lease watches it for `EXPIRES_S`: if it changes,
its holder exists, and the starting run ends with a message; if it does not, the starting run takes it over. A lease of
a process of this machine that has ended is taken at once. No clocks are compared: a run only sees whether the lease
changes while it watches.

Every write of a lease is conditional: it succeeds only if the lease is still the one that the writer has seen. Of two
runs that take over at the same time, one wins. In object storage these are writes by generation (`if_generation_match`,
through TensorStore). In folders, version N of the lease is the file `.lease.N`; it is created exclusively, and counts
only if there is no higher one.

A holder can be stopped for longer than `EXPIRES_S`, by SIGSTOP, a suspended machine or a lost network, and be replaced
meanwhile. Therefore it reads the lease before it writes anything: a part of its record, a small file, the commit of a
checkpoint. If another run has taken it, `Replaced` is raised, which ends the run with status 2, so that launchers do
not start it again beside the new holder. The check and the write are two operations: one write that a check has allowed
can still come after the replacement. Arrays of a checkpoint are written without a check; they count for nothing without
the commit. Before old checkpoints are removed, the lease is read again.
"""
from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import pathlib
import socket
import threading
import time
import uuid
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

from vit_jax.core import os_errors, retrying
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.record import storage

FILE, VERSIONS, RELEASED = '.lock', '.lease.', b'released'
RENEW_S = 15.
EXPIRES_S = 60.
ANSWER_S = 20.
"""Seconds within which object storage has to answer."""
log = logging.getLogger('vit_jax.record')
_held: dict[str, Lease] = {}  # the leases of this process, by run directory


class InUse(UserError):
  """Another run holds the run directory."""


class Replaced(InUse):
  """Another run has taken over the run directory of this one, which must write nothing more."""


class Lease:
  """Holds the lease on a run directory, as a context manager.

  Args:
    workdir: the run directory.
    renew_s: seconds between two renewals; None = `RENEW_S`.
    expires_s: seconds without a change after which a lease is taken over; None = `EXPIRES_S`.

  Raises:
    InUse: another run holds it.
    UserError: the directory is not writable.
    TemporaryError: the storage still fails after a time.
  """

  def __init__(self, workdir: storage.PathLike, *, renew_s: float | None = None,
               expires_s: float | None = None) -> None:
    self._workdir = storage.open_path(workdir)
    self._renew_s = RENEW_S if renew_s is None else renew_s
    self._expires_s = EXPIRES_S if expires_s is None else expires_s
    self._own = {'host': _machine(), 'pid': os.getpid(), 'token': uuid.uuid4().hex}
    self._replaced = ''
    self._lock, self._closed = threading.Lock(), threading.Event()
    try:
      self._register: _Register = (_Files(self._workdir) if isinstance(self._workdir, pathlib.Path)
                                   else _Object(os.fspath(self._workdir)))
      self._generation = self._take()
    except (UserError, TemporaryError):
      raise
    except storage.faults() as error:
      raise os_errors.kind(error)(f'--workdir={workdir}: expected storage that this machine may write to, got '
                                  f'{os_errors.first_line(error)}. Check its permissions, or use another '
                                  '--workdir.') from error
    self._confirmed_s = _now_s()
    self._thread = threading.Thread(target=self._run, name='lease', daemon=True)
    self._thread.start()

  def __enter__(self) -> Lease:
    _held[os.fspath(self._workdir)] = self
    return self

  def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
               trace: TracebackType | None) -> None:
    del _held[os.fspath(self._workdir)]
    self._closed.set()
    self._thread.join()
    with contextlib.suppress(*storage.faults(), UserError):  # it then expires
      self.look()
      self._register.release(self._generation)

  @property
  def is_replaced(self) -> bool:
    """Whether it is known that another run has taken over."""
    return bool(self._replaced)

  def raise_if_replaced(self) -> None:
    """Raises Replaced if it is known that another run has taken over; reads nothing."""
    if self._replaced:
      raise Replaced(self._replaced)

  def ensure(self) -> None:
    """Raises Replaced if another run may have taken over; reads the lease only if it was not renewed lately."""
    self.raise_if_replaced()
    if _now_s() - self._confirmed_s > self._expires_s / 2:
      self.check()

  def look(self) -> None:
    """Reads the lease once. Raises Replaced if another run has taken over, and errors of `storage.faults`."""
    with self._lock:
      self.raise_if_replaced()
      began_s = _now_s()
      generation, holder = self._read()
      self._verify(holder)
      self._generation, self._confirmed_s = generation, began_s

  def check(self) -> None:
    """Reads the lease, before anything is written.

    Raises:
      Replaced: another run has taken over.
      UserError: it cannot be read.
      TemporaryError: the storage still fails after a time.
    """
    try:
      self._retried(self.look)
    except (UserError, TemporaryError):
      raise
    except storage.faults() as error:
      raise os_errors.writing(os.fspath(self._workdir), error) from error

  def _renew(self) -> None:
    with self._lock:
      self.raise_if_replaced()
      began_s = _now_s()
      self._generation, self._confirmed_s = self._write(), began_s

  def _verify(self, holder: dict[str, Any]) -> None:
    if holder.get('token') == self._own['token']:
      return
    who = _name(holder) if holder else 'another run, which has ended since'
    self._replaced = (f'--workdir={self._workdir}: expected this run, process {os.getpid()} on {socket.gethostname()}, '
                      f'to remain the only one in its directory, got {who}. The other one took over because this one '
                      'had not renewed its lease in time. This one writes nothing more. Let the other one continue, or '
                      'stop it and run the same command again.')
    raise Replaced(self._replaced)

  def _retried(self, operation: Callable[[], Any]) -> Any:
    return retrying.retried(operation, f'the lease on {self._workdir}')

  def _take(self) -> Any:
    """Returns the generation of the lease once it is this run's. Raises InUse if its holder exists."""
    first, holder = generation, _ = self._retried(self._read)
    if holder and not _is_gone(holder):
      log.info('%s was last used by %s. Waiting %.0f s to see whether that run still exists.', self._workdir,
               _name(holder), self._expires_s)
      until_s = _now_s() + self._expires_s
      while holder and _now_s() < until_s:
        time.sleep(min(self._renew_s / 4, 5.))
        generation, holder = self._retried(self._read)
        if holder and generation != first:
          raise InUse(self._used_by(holder))
    self._generation = generation
    with contextlib.suppress(Replaced):
      return self._retried(self._write)
    raise InUse(self._used_by(self._retried(self._read)[1]))

  def _write(self) -> Any:
    """Writes the lease if nobody else did since it was read, and returns its new generation; else raises Replaced."""
    generation = self._register.write(json.dumps(self._own).encode(), self._generation)
    if generation is None:
      generation, holder = self._read()
      self._verify(holder)  # it is this run's if it was written and the answer was lost
    return generation

  def _read(self) -> tuple[Any, dict[str, Any]]:
    """Returns the generation and the holder; {} = nobody."""
    generation, content = self._register.read()
    if content is None:
      return generation, {}
    try:
      found = json.loads(content)
    except ValueError:
      found = None
    is_holder = isinstance(found, dict) and {'host', 'pid', 'token'} <= found.keys()
    return generation, found if is_holder else {'host': 'unknown', 'pid': 'unknown', 'token': ''}

  def _used_by(self, holder: dict[str, Any]) -> str:
    return (f'--workdir={self._workdir}: expected a directory that no other run uses, got one in use by '
            f'{_name(holder)}. Wait for that run, stop it, or use another --workdir.')

  def _run(self) -> None:
    while not self._closed.wait(self._renew_s):
      try:
        self._renew()
      except Replaced as error:
        log.error('%s', error)
        return
      except storage.faults() as error:
        log.warning('The lease on %s could not be renewed and will be tried again: %s', self._workdir,
                    os_errors.first_line(error))


def find(path: storage.PathLike) -> Lease | None:
  """Returns the lease of this process on the run directory that has a path; None if it holds none."""
  text = os.fspath(path)
  text = os.path.abspath(text) if storage.is_local(text) else text.rstrip('/')
  return next((lease for folder, lease in list(_held.items()) if text == folder or text.startswith(f'{folder}/')), None)


def check(path: storage.PathLike) -> None:
  """Reads the lease of this process on the run directory that has a path, if it holds one, before a write.

  Raises:
    Replaced: another run has taken over.
    TemporaryError: the storage still fails after a time.
  """
  if (lease := find(path)) is not None:
    lease.check()


class _Register(Protocol):
  """A value in storage that is replaced only if it is the expected one. Methods raise errors of `storage.faults`."""

  def read(self) -> tuple[Any, bytes | None]:
    """Returns the generation and the value; None if there is none."""
    ...

  def write(self, content: bytes, expected: Any) -> Any:
    """Replaces the value of the generation `expected`, and returns the new one; None if it is another one."""
    ...

  def release(self, expected: Any) -> None:
    """Removes the value of the generation `expected`; does nothing if it is another one."""
    ...


class _Object:
  """An object, which is written by generation."""

  def __init__(self, workdir: str) -> None:
    import tensorstore  # imported here because local runs do not need it
    bucket, _, folder = workdir.removeprefix(storage.REMOTE).partition('/')
    spec = {'driver': 'gcs', 'bucket': bucket, 'path': f'{folder.rstrip("/")}/'}
    retries = tensorstore.Context({'gcs_request_retries': {'max_retries': 2, 'initial_delay': '1s'}})
    self._store = tensorstore.KvStore.open(spec, context=retries).result(ANSWER_S)

  def read(self) -> tuple[Any, bytes | None]:
    with _as_os_error():
      found = self._store.read(FILE).result(ANSWER_S)
    return found.stamp.generation, bytes(found.value) if found.state == 'value' else None

  def write(self, content: bytes, expected: Any) -> Any:
    with _as_os_error():
      return self._store.write(FILE, content, if_equal=expected).result(ANSWER_S).generation or None

  def release(self, expected: Any) -> None:
    with _as_os_error():
      self._store.write(FILE, None, if_equal=expected).result(ANSWER_S)


class _Files:
  """Files in a folder, `.lease.N`, of which the highest one is the value.

  That the value was released is a version, too: without it, a writer that was stopped before could create its next one.
  """

  def __init__(self, workdir: pathlib.Path) -> None:
    self._folder = workdir

  def read(self) -> tuple[Any, bytes | None]:
    while numbers := self._numbers():
      try:
        content = self._path(numbers[-1]).read_bytes()
        return numbers[-1], None if content == RELEASED else content
      except FileNotFoundError:  # replaced meanwhile
        continue
    return 0, None

  def write(self, content: bytes, expected: Any) -> Any:
    number = expected + 1
    path = self._path(number)
    try:
      with open(path, 'xb') as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
      is_own = path.read_bytes() == content  # some mounts create it for two hosts, and drop what the later one writes
    except FileExistsError:
      return None
    except OSError as error:
      if error.errno == errno.ESTALE:  # on some mounts, another host has created it
        return None
      path.unlink(missing_ok=True)
      raise
    numbers = self._numbers()
    if not is_own or numbers[-1] != number:
      if is_own:
        path.unlink(missing_ok=True)
      return None
    for older in numbers[:-1]:
      self._path(older).unlink(missing_ok=True)
    return number

  def release(self, expected: Any) -> None:
    self.write(RELEASED, expected)

  def _path(self, number: int) -> pathlib.Path:
    return self._folder / f'{VERSIONS}{number}'

  def _numbers(self) -> list[int]:
    names = (name.removeprefix(VERSIONS) for name in os.listdir(self._folder) if name.startswith(VERSIONS))
    return sorted(int(name) for name in names if name.isascii() and name.isdecimal())


@contextlib.contextmanager
def _as_os_error() -> Any:
  """Raises errors of TensorStore, which are ValueError, as OSError."""
  try:
    yield
  except ValueError as error:
    raise OSError(os_errors.first_line(error)) from error


def _now_s() -> float:
  """Returns the seconds of a clock that continues while the machine is suspended, where there is one."""
  return time.clock_gettime(getattr(time, 'CLOCK_BOOTTIME', time.CLOCK_MONOTONIC))


def _name(holder: dict[str, Any]) -> str:
  return f'process {holder["pid"]} on {str(holder["host"]).split()[0]}' if holder else 'another process'


def _machine() -> str:
  """Returns the host name, and on Linux the process namespace, which every container has, and the id of the boot."""
  found = [socket.gethostname()]
  with contextlib.suppress(OSError):
    found += [os.readlink('/proc/self/ns/pid'), pathlib.Path('/proc/sys/kernel/random/boot_id').read_text().strip()]
  return ' '.join(found)


def _is_gone(holder: dict[str, Any]) -> bool:
  """Whether the holder was a process of this machine that has ended."""
  if holder['host'] != _machine():
    return False
  try:
    os.kill(int(holder['pid']), 0)
  except (ProcessLookupError, ValueError):
    return True
  except PermissionError:
    return False
  return int(holder['pid']) == os.getpid()
