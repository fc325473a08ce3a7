"""The run directory: a lock that allows one writer, and small files that are replaced atomically.

A run whose directory was taken over by another one writes none of these files any more (`owner.py`).
"""
from __future__ import annotations

import contextlib
import errno
import fcntl
import fnmatch
import json
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import IO, Any

import jax

from vit_jax.core import documents, failures, files
from vit_jax.core.errors import UserError, redacted
from vit_jax.record import mounts, owner, storage

LOCK_FILE, CONFIG, PAGE = '.lock', 'config.json', 'report.html'
_WRITTEN = (CONFIG, PAGE, owner.FILE, 'metrics.jsonl', 'final.json', 'paused_*.json', 'evaluate.json',
            'predictions.npz', 'weights.json', 'init.json', 'trackers.json', 'frozen_features.json',
            'plan.json', 'checkpoints', 'damaged', 'features', 'figures', 'probes')
"""Files and folders that this program writes, or moves, in a directory of its own."""
_OURS = {LOCK_FILE: rb'[0-9]+$', CONFIG: rb'\s*{\s*"type": "Config"', 'metrics.jsonl': rb'{"(event|step)": ',
         'final.json': rb'{\s*"step": \d+,\s*"starts": ', 'evaluate.json': rb'{\s*"step": \d+,\s*"evaluation": ',
         'checkpoints/*/meta/metadata': rb'{"body": ', f'features/{"[0-9a-f]" * 16}': b''}
"""How files begin of which a directory of this program has at least one."""
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""Error numbers of network file systems that are mounted without file locks."""


@contextlib.contextmanager
def hold(workdir: storage.PathLike) -> Iterator[None]:
  """Locks a run directory for one run: with a file lock on disks, and on storage of several hosts by a token.

  The operating system releases a file lock at once, however the process ends. It does not always hold for other hosts
  and other mounts of a network file system or a bucket, where the last start owns the directory (`owner.py`).

  Raises:
    UserError: another process holds the lock, or the directory is not writable.
    TemporaryError: the storage still fails after a time.
  """
  with contextlib.ExitStack() as stack:
    if storage.is_local(workdir):
      stack.enter_context(locked(workdir))
    if not storage.is_local(workdir) or mounts.is_shared(workdir):
      stack.enter_context(owner.Owner(workdir))
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
  except owner.Replaced:
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
    if error.errno not in _NO_LOCKS or not mounts.is_shared(folder):
      raise
  file.seek(0)
  file.truncate()
  os.write(file.fileno(), str(os.getpid()).encode())


def holds_nothing(workdir: storage.PathLike) -> bool:
  """Returns whether a run directory has only files that every start writes first."""
  found = {*os.listdir(workdir)}
  return found <= {LOCK_FILE, owner.FILE, 'config.json', 'checkpoints'} and not (
      'checkpoints' in found and os.listdir(os.path.join(workdir, 'checkpoints')))


def check_ours(workdir: storage.PathLike, setting: str = '--workdir') -> None:
  """Checks that a local directory is new, or one of this program, before anything is written there.

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
    found = lock
  elif os.path.lexists(config) and config not in ours:
    found = config
  elif ours or not (others := [path for path in _written(folder) if not files.is_new(path)]):
    return
  else:
    found = others[0]
  raise UserError(f'{setting}={workdir}: expected a new directory or one that this program wrote, got one with another '
                  f'{found.name}. Move that away, or choose another directory.')


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
  owner.check(path)
  failures.stored(lambda: storage.write_bytes(path, content), os.fspath(path), patience_s=0.)
