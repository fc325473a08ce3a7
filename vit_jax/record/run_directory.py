"""The run directory: one run writes to it, and its small files are replaced atomically.

A job that writes a run enters `hold` before anything else. A file lock keeps a second process of the host out. Where
other hosts reach the directory, locks do not suffice; there, the run that was started last owns it (`Owner`). This run
writes its token into `owner.json`, and reads the file again before everything that must not come from two runs: a part
of its record, a small file, the commit of a checkpoint. A run that finds another token was replaced: it writes nothing
more and ends with status 2, so that launchers do not start it again beside the new one. No clocks are compared, and
nothing is renewed.

The check and the write are two operations: one write that a check has allowed can still come after the replacement.
Arrays of a checkpoint are written without a check; they count for nothing without the commit.
"""
from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import json
import os
import pathlib
import re
import socket
import uuid
from collections.abc import Iterator, Mapping
from typing import IO, Any

import jax

from vit_jax.core import documents, failures, files
from vit_jax.core.errors import UserError, redacted
from vit_jax.record import storage

LOCK_FILE, CONFIG, PAGE, OWNER_FILE = '.lock', 'config.json', 'report.html', 'owner.json'
_WRITTEN = (CONFIG, PAGE, OWNER_FILE, 'metrics.jsonl', 'final.json', 'paused_*.json', 'evaluate.json',
            'predictions.npz', 'weights.json', 'init.json', 'trackers.json', 'frozen_features.json',
            'plan.json', 'checkpoints', 'damaged', 'features', 'figures', 'probes')
"""Names of the files and folders that a run writes, or moves, in its directory."""
_OURS = {LOCK_FILE: rb'[0-9]+$', CONFIG: rb'\s*{\s*"type": "Config"', 'metrics.jsonl': rb'{"(event|step)": ',
         'final.json': rb'{\s*"step": \d+,\s*"starts": ', 'evaluate.json': rb'{\s*"step": \d+,\s*"evaluation": ',
         'checkpoints/*/meta/metadata': rb'{"body": ', f'features/{"[0-9a-f]" * 16}': b''}
"""The first bytes of files by which a directory is recognized as one of this program: it has at least one of them."""
_held: dict[str, Owner] = {}  # of this process, by run directory


@contextlib.contextmanager
def hold(workdir: storage.PathLike) -> Iterator[None]:
  """Keeps a run directory for one run: with a file lock on disks, and on storage of several hosts by a token.

  The operating system releases a file lock at once, however the process ends.

  Raises:
    UserError: another process holds the lock, or the directory is not writable.
    TemporaryError: the storage still fails after a time.
  """
  with contextlib.ExitStack() as stack:
    if storage.is_local(workdir):
      stack.enter_context(locked(workdir))
    if storage.is_shared(workdir):
      stack.enter_context(Owner(workdir))
    yield


@contextlib.contextmanager
def locked(workdir: storage.PathLike) -> Iterator[None]:
  """Locks a local run directory. The operating system releases the lock when the process ends, however it ends.

  A new directory is removed again if the run ends with a `UserError` before it has written anything of value.

  Raises:
    UserError: another process holds the lock, or the directory is not writable.
  """
  check_ours(workdir)
  folder = pathlib.Path(workdir)
  made = [path for path in (folder, folder.parent) if not path.exists()]
  try:
    folder.mkdir(parents=True, exist_ok=True)
    # Not a file to which a link leads.
    file = open(folder / LOCK_FILE, 'a+', opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, 0o666))
    _take(file, folder)
  except OSError as error:
    raise failures.writing(f'--workdir={workdir}', error) from error
  try:
    yield
  except Replaced:
    raise
  except UserError:
    if made and holds_nothing(folder):
      with contextlib.suppress(OSError):  # another run uses the directory, or a person has put something into it
        for path in folder.iterdir():
          path.rmdir() if path.is_dir() else path.unlink()
        for path in made:
          path.rmdir()
    raise
  finally:
    with contextlib.suppress(OSError):  # on a mounted bucket, another host has written the file
      file.close()


def _take(file: IO[str], folder: pathlib.Path) -> None:
  """Locks a file and writes the id of this process into it."""
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    file.seek(0)
    holder = file.read().strip() or 'unknown'
    file.close()
    raise UserError(f'--workdir={folder}: expected a directory that no other run uses, got one in use by process '
                    f'{holder}. Wait for that run, stop it, or use another --workdir.') from None
  except OSError as error:
    if error.errno not in files.NO_LOCKS or not storage.is_shared(folder):
      raise
  file.seek(0)
  file.truncate()
  os.write(file.fileno(), str(os.getpid()).encode())


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
    self._path, self._token, self._replaced = self._workdir / OWNER_FILE, uuid.uuid4().hex, ''
    content = json.dumps({'host': socket.gethostname(), 'pid': os.getpid(), 'token': self._token}).encode()
    failures.stored(lambda: storage.write_bytes(self._path, content), f'--workdir={workdir}')

  def __enter__(self) -> Owner:
    _held[os.fspath(self._workdir)] = self
    return self

  def __exit__(self, *_: object) -> None:
    del _held[os.fspath(self._workdir)]

  @property
  def is_replaced(self) -> bool:
    """Whether it is known that another run owns the directory."""
    return bool(self._replaced)

  def look(self) -> None:
    """Reads the file once. Raises Replaced if another run owns the directory, and errors of storage."""
    if not self._replaced:
      storage.refresh(self._path)
      owner = _read_owner(self._path)
      if owner.get('token') == self._token:
        return
      other = f'process {owner["pid"]} on {owner["host"]}' if {'pid', 'host'} <= owner.keys() else 'another one'
      self._replaced = (
          f'--workdir={self._workdir}: expected this run, process {os.getpid()} on {socket.gethostname()}, to remain '
          f'the only one in its directory, got {other}, which was started later. This one writes nothing more. '
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


def _read_owner(path: storage.PathLike) -> dict[str, Any]:
  """Returns the content of `owner.json`; {} if there is no such file, or it is not one that a run writes."""
  with contextlib.suppress(FileNotFoundError):
    text = storage.read_text(path)
    with contextlib.suppress(ValueError):
      content = documents.parse(text)
      return content if isinstance(content, dict) else {}
  return {}


def owner_of(path: storage.PathLike) -> Owner | None:
  """Returns the owner, in this process, of the run directory that has a path; None if there is none."""
  text = os.fspath(path)
  text = os.path.abspath(text) if storage.is_local(text) else text.rstrip('/')
  return next((owner for folder, owner in list(_held.items()) if text == folder or text.startswith(f'{folder}/')), None)


def check_owned(path: storage.PathLike) -> None:
  """Checks that this process still owns the run directory that has a path, if it did, before a write.

  Raises:
    Replaced: another run owns it.
    TemporaryError: the storage still fails after a time.
  """
  if owner := owner_of(path):
    owner.check()


def holds_nothing(workdir: storage.PathLike) -> bool:
  """Returns whether a run directory has only files that every start writes first."""
  names = {*os.listdir(workdir)}
  return names <= {LOCK_FILE, OWNER_FILE, CONFIG, 'checkpoints'} and not (
      'checkpoints' in names and os.listdir(os.path.join(workdir, 'checkpoints')))


def check_ours(workdir: storage.PathLike, setting: str = '--workdir') -> None:
  """Checks that a local directory is new, or one that this program wrote, before anything is written there.

  Raises:
    UserError: it has files with names that a run writes, which this program did not write.
  """
  if not storage.is_local(workdir):
    return
  folder = pathlib.Path(workdir)
  lock, config = folder / LOCK_FILE, folder / CONFIG
  ours = {path for name, begin in _OURS.items() for path in folder.glob(name) if re.match(begin, _begin_of(path))
          and not path.is_symlink()}
  if lock in ours:
    return
  if os.path.lexists(lock) and (lock.is_symlink() or not lock.is_file() or _begin_of(lock)):
    foreign = lock
  elif os.path.lexists(config) and config not in ours:
    foreign = config
  elif ours or not (others := [path for path in _written(folder) if not files.is_new(path)]):
    return
  else:
    foreign = others[0]
  raise UserError(f'{setting}={workdir}: expected a new directory or one that this program wrote, got one with another '
                  f'{foreign.name}. Move that away, or choose another directory.')


def _written(folder: pathlib.Path) -> list[pathlib.Path]:
  """Returns the entries with names that a run writes, including links to nothing, which `glob` may leave out."""
  names = os.listdir(folder) if folder.is_dir() else []
  return [folder / name for pattern in _WRITTEN for name in sorted(fnmatch.filter(names, pattern))]


def _begin_of(path: pathlib.Path) -> bytes:
  with contextlib.suppress(OSError), open(path, 'rb') as file:  # a folder, or a link that leads nowhere
    return file.read(64)
  return b''


def default_name(name: str) -> str:
  """Returns the name of a config as a directory name, for `runs/NAME`."""
  return re.sub(r'[^\w.=+-]+', '_', name).lstrip('.') or 'run'


def paused_file(until: str) -> str:
  """Returns the name of the file with the results of a run that paused after a part such as '25 %'."""
  return f'paused_{until.replace(" ", "")}.json'


def write_json(path: storage.PathLike, content: Mapping[str, Any]) -> None:
  """Replaces a JSON file atomically, with null for numbers that are not finite; only process 0 writes."""
  write_text(path, json.dumps(documents.finite(content), indent=2, allow_nan=False) + '\n')


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
  check_owned(path)
  failures.stored(lambda: storage.write_bytes(path, content), os.fspath(path), patience_s=0.)
