"""The run directory: one run writes to it, and its small files are replaced atomically.

A job that writes a run enters `hold` before anything else. `hold` locks the file `.lock`, so that no second process of
this host uses the directory. Where other hosts can write to the directory, locks do not suffice: there, the run that
was started last owns the directory (`Owner`). At its start, a run writes a random token into `owner.json`:

  {"host": "node3", "pid": 4711, "token": "5e0c…"}

The run reads the file again (`check_owned`) before it writes a part of its record, a small file, or the commit of a
checkpoint. If there is another token, the run was replaced: it writes nothing more and ends with status 2, so that
launchers do not start it again. The check and the write are two operations, so one write can still follow the
replacement. The arrays of a checkpoint are written without a check, as nothing reads them without the commit.
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
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any

import jax

from vit_jax.core import documents, failures, files
from vit_jax.core.errors import UserError, redacted
from vit_jax.record import storage

LOCK_FILE, CONFIG, PAGE, OWNER_FILE = '.lock', 'config.json', 'report.html', 'owner.json'
_WRITTEN = (CONFIG, PAGE, OWNER_FILE, 'metrics.jsonl', 'final.json', 'paused_*.json', 'evaluate.json',
            'predictions.npz', 'weights.json', 'init.json', 'trackers.json', 'frozen_features.json',
            'plan.json', 'checkpoints', 'damaged', 'features', 'figures', 'probes')
"""Names of the files and folders that a run writes or moves in its directory, as patterns of `fnmatch`."""
_OURS = {LOCK_FILE: rb'[0-9]+$', CONFIG: rb'\s*{\s*"type": "Config"', 'metrics.jsonl': rb'{"(event|step)": ',
         'final.json': rb'{\s*"step": \d+,\s*"starts": ', 'evaluate.json': rb'{\s*"step": \d+,\s*"evaluation": ',
         'checkpoints/*/meta/metadata': rb'{"body": ', f'features/{"[0-9a-f]" * 16}': b''}
"""Maps the path of a file to a pattern of its first bytes: this program wrote a directory with one such file."""
_owners: dict[str, Owner] = {}  # of this process, by run directory


@contextlib.contextmanager
def hold(workdir: storage.PathLike) -> Iterator[None]:
  """Keeps a run directory for one run: by a file lock unless it is in object storage, and by a token if it is shared.

  Raises:
    UserError: another process holds the lock, or the directory is not writable.
    TemporaryError: the storage still fails after `failures.patience()`.
  """
  with contextlib.ExitStack() as stack:
    if storage.is_local(workdir):
      stack.enter_context(locked(workdir))
    if storage.is_shared(workdir):
      stack.enter_context(Owner(workdir))
    yield


@contextlib.contextmanager
def locked(workdir: storage.PathLike) -> Iterator[None]:
  """Creates and locks a local run directory. The system releases the lock when the process ends, however it ends.

  A new directory is removed again if the run ends with a `UserError` and has written nothing (`holds_nothing`).

  Raises UserError if another process holds the lock, or the directory is not writable or has files of another program.
  """
  check_ours(workdir)
  folder = pathlib.Path(workdir)
  created = [path for path in (folder, folder.parent) if not path.exists()]
  try:
    folder.mkdir(parents=True, exist_ok=True)
    # O_NOFOLLOW: a link at this path must not make the run write to another file.
    file = open(folder / LOCK_FILE, 'a+', opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, 0o666))
    _lock(file, folder)
  except OSError as error:
    raise failures.writing(f'--workdir={workdir}', error) from error
  try:
    yield
  except Replaced:
    raise
  except UserError:
    if created and holds_nothing(folder):
      with contextlib.suppress(OSError):  # another run uses the directory, or a person has put a file into it
        _remove_new(folder, created)
    raise
  finally:
    with contextlib.suppress(OSError):  # on a mounted bucket, another host has written the file
      file.close()


def _remove_new(folder: pathlib.Path, created: Iterable[pathlib.Path]) -> None:
  """Removes the files and the empty folders in a run directory, then the directories that its run has created."""
  for path in folder.iterdir():
    if path.is_dir():
      path.rmdir()
    else:
      path.unlink()
  for path in created:
    path.rmdir()


def _lock(file: IO[str], folder: pathlib.Path) -> None:
  """Locks the file `.lock` and writes the id of this process into it; closes it if another process holds the lock."""
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
  """The ownership of a run directory: writes `owner.json` when it is made. Inside the context, `owner_of` returns it.

  Raises UserError if the directory is not writable, and TemporaryError as `check`.
  """

  def __init__(self, workdir: storage.PathLike) -> None:
    self._workdir = storage.open_path(workdir)
    self._path, self._token = self._workdir / OWNER_FILE, uuid.uuid4().hex
    self._replaced_message = ''  # the error message once a check has found that the run was replaced
    content = json.dumps({'host': socket.gethostname(), 'pid': os.getpid(), 'token': self._token}).encode()
    failures.stored(lambda: storage.write_bytes(self._path, content), f'--workdir={workdir}')

  def __enter__(self) -> Owner:
    _owners[os.fspath(self._workdir)] = self
    return self

  def __exit__(self, *_: object) -> None:
    del _owners[os.fspath(self._workdir)]

  @property
  def is_replaced(self) -> bool:
    """Whether a check has found that another run owns the directory."""
    return bool(self._replaced_message)

  def check_once(self) -> None:
    """Checks as `check`, but raises errors of the storage unchanged, at once."""
    if not self._replaced_message:
      storage.refresh(self._path)
      owner = _read_owner(self._path)
      if owner.get('token') == self._token:
        return
      other = f'process {owner["pid"]} on {owner["host"]}' if {'pid', 'host'} <= owner.keys() else 'another one'
      self._replaced_message = (
          f'--workdir={self._workdir}: expected this run, process {os.getpid()} on {socket.gethostname()}, to remain '
          f'the only one in its directory, got {other}, which was started later. This one writes nothing more. '
          'Let the other one continue, or stop it and run the same command again.')
    raise Replaced(self._replaced_message)

  def check(self) -> None:
    """Reads `owner.json`, and checks that the file has the token of this run.

    Raises:
      Replaced: another run owns the directory.
      UserError: the file cannot be read.
      TemporaryError: the storage still fails after `failures.patience()`.
    """
    failures.stored(self.check_once, os.fspath(self._workdir))


def _read_owner(path: storage.PathLike) -> dict[str, Any]:
  """Returns the content of `owner.json`; {} if there is no such file, or the content is not a JSON object."""
  try:
    text = storage.read_text(path)
  except FileNotFoundError:
    return {}
  with contextlib.suppress(ValueError):
    content = documents.parse(text)
    return content if isinstance(content, dict) else {}
  return {}


def owner_of(path: storage.PathLike) -> Owner | None:
  """Returns the `Owner` that this process has for the run directory around a path; None if there is no `Owner`."""
  text = os.fspath(path)
  text = os.path.abspath(text) if storage.is_local(text) else text.rstrip('/')
  for folder, owner in list(_owners.items()):
    if text == folder or text.startswith(f'{folder}/'):
      return owner
  return None


def check_owned(path: storage.PathLike) -> None:
  """Calls `Owner.check` for the run directory of a path, before a write; does nothing if there is no `Owner`."""
  if owner := owner_of(path):
    owner.check()


def holds_nothing(workdir: storage.PathLike) -> bool:
  """Returns whether a run directory has only the files that every start writes first, and no checkpoint."""
  names = {*os.listdir(workdir)}
  if not names <= {LOCK_FILE, OWNER_FILE, CONFIG, 'checkpoints'}:
    return False
  return 'checkpoints' not in names or not os.listdir(os.path.join(workdir, 'checkpoints'))


def check_ours(workdir: storage.PathLike, setting: str = '--workdir') -> None:
  """Raises UserError if a local directory has files with names that a run writes, which this program did not write."""
  foreign = _find_foreign(pathlib.Path(workdir)) if storage.is_local(workdir) else None
  if foreign:
    raise UserError(f'{setting}={workdir}: expected a new directory or one that this program wrote, got one with '
                    f'another {foreign.name}. Move that away, or choose another directory.')


def _find_foreign(folder: pathlib.Path) -> pathlib.Path | None:
  """Returns a path at which a run would write, and where another program has written; None if there is no such path."""
  lock, config = folder / LOCK_FILE, folder / CONFIG
  ours = {path for name, pattern in _OURS.items() for path in folder.glob(name)
          if re.match(pattern, _first_bytes(path)) and not path.is_symlink()}
  if lock in ours:
    return None
  if os.path.lexists(lock) and (lock.is_symlink() or not lock.is_file() or _first_bytes(lock)):
    return lock
  if os.path.lexists(config) and config not in ours:
    return config
  if ours or not folder.is_dir():
    return None
  names = sorted(os.listdir(folder))  # with broken links, unlike `glob`
  written = [folder / name for pattern in _WRITTEN for name in fnmatch.filter(names, pattern)]
  return next((path for path in written if not files.is_vacant(path)), None)


def _first_bytes(path: pathlib.Path) -> bytes:
  """Returns the first 64 bytes of a file; b'' if it cannot be read."""
  with contextlib.suppress(OSError), open(path, 'rb') as file:  # a folder, or a link that leads nowhere
    return file.read(64)
  return b''


def default_name(name: str) -> str:
  """Returns the name of a config as the name of a directory in `runs/`; other characters become `_`."""
  return re.sub(r'[^\w.=+-]+', '_', name).lstrip('.') or 'run'


def paused_file(until: str) -> str:
  """Returns the file name for the results of a run that pauses after a part of its length: 'paused_25%.json'."""
  return f'paused_{until.replace(" ", "")}.json'


def write_json(path: storage.PathLike, content: Mapping[str, Any]) -> None:
  """Replaces a JSON file atomically, with null for numbers that are not finite; only process 0 writes."""
  write_text(path, json.dumps(documents.finite(content), indent=2, allow_nan=False) + '\n')


def write_text(path: storage.PathLike, text: str) -> None:
  """Replaces a text file atomically, and removes passwords and tokens of addresses; only process 0 writes."""
  write_bytes(path, storage.encode(redacted(text)))


def write_bytes(path: storage.PathLike, content: bytes) -> None:
  """Replaces a file atomically; only process 0 writes.

  Raises:
    UserError: the file cannot be written, or another run has taken over the directory.
    TemporaryError: the storage fails, or the disk is full.
  """
  if jax.process_index():
    return
  check_owned(path)
  failures.stored(lambda: storage.write_bytes(path, content), os.fspath(path), patience_s=0.)
