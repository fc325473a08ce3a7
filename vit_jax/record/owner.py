"""The owner of a run directory that several hosts can reach: the run that was started last.

A run that starts writes its token into `owner.json`. It reads the file again before everything that must not come from
two runs: a part of its record, a small file, the commit of a checkpoint. A run that finds another token was replaced:
it writes nothing more and ends with status 2, so that launchers do not start it again beside the new one. No clocks are
compared, and nothing is renewed.

The check and the write are two operations: one write that a check has allowed can still come after the replacement.
Arrays of a checkpoint are written without a check; they count for nothing without the commit.
"""
from __future__ import annotations

import json
import os
import socket
import uuid
from types import TracebackType
from typing import Any

from vit_jax.core import documents, failures
from vit_jax.core.errors import UserError
from vit_jax.record import storage

FILE = 'owner.json'
_held: dict[str, Owner] = {}  # of this process, by run directory


class Replaced(UserError):
  """Another run owns the run directory of this one, which must write nothing more."""


class Owner:
  """Owns a run directory from its start on, as a context manager.

  Raises:
    UserError: the directory is not writable.
    TemporaryError: the storage still fails after a time.
  """

  def __init__(self, workdir: storage.PathLike) -> None:
    self._workdir = storage.open_path(workdir)
    self._path, self._token, self._replaced = self._workdir / FILE, uuid.uuid4().hex, ''
    content = json.dumps({'host': socket.gethostname(), 'pid': os.getpid(), 'token': self._token}).encode()
    failures.stored(lambda: storage.write_bytes(self._path, content), f'--workdir={workdir}')

  def __enter__(self) -> Owner:
    _held[os.fspath(self._workdir)] = self
    return self

  def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
               trace: TracebackType | None) -> None:
    del _held[os.fspath(self._workdir)]

  @property
  def is_replaced(self) -> bool:
    """Whether it is known that another run owns the directory."""
    return bool(self._replaced)

  def look(self) -> None:
    """Reads the file once. Raises Replaced if another run owns the directory, and errors of storage."""
    if not self._replaced:
      storage.refresh(self._path)
      try:
        found = _read(storage.read_text(self._path))
      except FileNotFoundError:
        found = {}
      if found.get('token') == self._token:
        return
      self._replaced = (
          f'--workdir={self._workdir}: expected this run, process {os.getpid()} on {socket.gethostname()}, to remain '
          f'the only one in its directory, got {_name(found)}, which was started later. This one writes nothing more. '
          'Let the other one continue, or stop it and run the same command again.')
    raise Replaced(self._replaced)

  def check(self) -> None:
    """Reads the file, before anything is written.

    Raises:
      Replaced: another run owns the directory.
      UserError: the file cannot be read.
      TemporaryError: the storage still fails after a time.
    """
    failures.stored(self.look, os.fspath(self._workdir))


def find(path: storage.PathLike) -> Owner | None:
  """Returns the owner, in this process, of the run directory that has a path; None if there is none."""
  text = os.fspath(path)
  text = os.path.abspath(text) if storage.is_local(text) else text.rstrip('/')
  return next((one for folder, one in list(_held.items()) if text == folder or text.startswith(f'{folder}/')), None)


def check(path: storage.PathLike) -> None:
  """Checks that this process still owns the run directory that has a path, if it did, before a write.

  Raises:
    Replaced: another run owns it.
    TemporaryError: the storage still fails after a time.
  """
  if (one := find(path)) is not None:
    one.check()


def _read(text: str) -> dict[str, Any]:
  try:
    found = documents.parse(text)
  except ValueError:
    return {}
  return found if isinstance(found, dict) else {}


def _name(found: dict[str, Any]) -> str:
  return f'process {found["pid"]} on {found["host"]}' if {'pid', 'host'} <= found.keys() else 'another one'
