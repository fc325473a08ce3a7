"""Writes files and folders: complete or not at all, and without touching files that this program did not make.

A file is written as `.vit_jax-RANDOM.part` beside its path, and then moved to the path (`replacing`, `replace`).
Several files are written in a folder with such a name (`staged`), and moved to their paths together (`publish_all`).
A command that can resume writes in a folder `NAME.DIGEST.part`, which `Unfinished` describes. Imports only `core`.
"""
from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import glob
import hashlib
import logging
import os
import pathlib
import re
import secrets
import tempfile
from collections.abc import Callable, Collection, Iterator
from typing import IO, Any

from vit_jax.core import failures
from vit_jax.core.errors import UserError

PLAN = 'plan.json'  # the plan of an unfinished folder; a process that writes there holds the lock of this file
NOTE = '.done'  # the end of the name of a note, a small file beside a file of the plan
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""Error numbers of network file systems that are mounted without file locks."""
_PREFIX, _PART = '.vit_jax-', '.part'  # of temporary files and folders; the name of an unfinished folder only ends so
log = logging.getLogger('vit_jax.files')


def temporary_path(folder: pathlib.Path) -> pathlib.Path:
  """Returns a path in a folder for a temporary file or folder: `.vit_jax-RANDOM.part`."""
  return folder / f'{_PREFIX}{secrets.token_hex(8)}{_PART}'


@contextlib.contextmanager
def replacing(path: pathlib.Path, *, beside: pathlib.Path | None = None,
              is_new: bool = False) -> Iterator[pathlib.Path]:
  """Yields a temporary path, at which the caller writes a file; the file is moved to `path` at the end.

  After an error `path` is unchanged. After a power failure, `path` is the complete old or the complete new file. Of two
  processes that write `path`, the later one wins.

  Args:
    path: the final path of the file. Missing parent folders are created.
    beside: the folder of the temporary file; None = the folder of `path`.
    is_new: whether the file is moved by `publish`, which fails if there is something at `path`.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  part = temporary_path(beside or path.parent)
  try:
    yield part
    if is_new:
      publish(part, path)
    else:
      publish_over(part, path)
  finally:
    with contextlib.suppress(OSError):
      part.unlink(missing_ok=True)


def publish_over(part: pathlib.Path, path: pathlib.Path) -> None:
  """Moves a complete file to a path, and replaces a file that is there."""
  _sync(part)
  os.replace(part, path)
  _sync(path.parent)


def replace(path: pathlib.Path, content: bytes) -> None:
  """Creates or replaces a file atomically, as `replacing` does."""
  with replacing(path) as part:
    part.write_bytes(content)


def is_vacant(path: pathlib.Path) -> bool:
  """Returns whether there is nothing at a path, or an empty folder."""
  if path.is_symlink() or not path.is_dir():
    return not os.path.lexists(path)
  return not any(path.iterdir())


def publish(part: pathlib.Path, path: pathlib.Path) -> None:
  """Moves a complete file or folder to a path where there is nothing, or an empty folder.

  Raises:
    OSError: there is something else at the path.
  """
  if part.is_dir():
    os.rename(part, path)  # fails if there is a file, a link, or a folder that is not empty
  else:
    _sync(part)
    try:
      os.link(part, path)
      part.unlink()
    except FileExistsError:
      raise
    except OSError:  # a file system without links
      if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
      os.rename(part, path)
  _sync(path.parent)


def publish_all(part: pathlib.Path, parent: pathlib.Path, *, overwrite: bool,
                is_ours: Callable[[pathlib.Path], bool]) -> None:
  """Moves all entries of the folder `part` to `parent`. If an entry cannot be moved, the moves before it are undone.

  Args:
    part: a folder on the same file system, with complete files and folders.
    parent: an existing folder.
    overwrite: whether to replace entries of the same name in `parent`; a folder only if the new one has all its files.
    is_ours: returns whether this program owns a file. Such a file is always replaced, or removed with its folder.

  Raises:
    UserError: a folder that would be replaced has files of others.
    OSError: an entry cannot be moved, or may not be replaced.
  """
  targets = {entry: parent / entry.name for entry in sorted(part.iterdir())}
  for entry, target in targets.items():
    if os.path.lexists(target) and (target.is_symlink() or not (overwrite or is_ours(target))):
      raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    lost = _relative_files(target) - _relative_files(entry) if target.is_dir() else set()
    others = [name for name in lost if not is_ours(target / name)]
    if others:
      raise UserError(f'{target}: expected a folder that has only what this command replaces, got {min(others)} as '
                      'well. Move it away, or choose another path.')
    for path in (entry, *entry.rglob('*')):
      _sync(path)
  added = [entry for entry, target in targets.items() if not os.path.lexists(target)]
  with staged(parent) as replaced:
    try:
      for entry, target in targets.items():
        if target.is_dir():
          os.rename(target, replaced / entry.name)
        if entry in added:
          publish(entry, target)
        else:
          os.replace(entry, target)
    except OSError:  # undo the moves
      for entry, target in targets.items():
        if (replaced / entry.name).exists() and not target.exists():
          os.rename(replaced / entry.name, target)
        elif entry in added and not entry.exists():
          os.rename(target, entry)
      raise


def _relative_files(folder: pathlib.Path) -> set[str]:
  """Returns the relative paths of all files below a folder, except the files of Orbax that have random names."""
  files = [path for path in folder.rglob('*') if path.is_symlink() or not path.is_dir()]
  return {str(path.relative_to(folder)) for path in files if not re.fullmatch('[0-9a-f]{32}', path.name)}


def _sync(path: pathlib.Path) -> None:
  """Flushes a file, or the list of a folder's entries, to disk. Some file systems cannot flush a folder."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    with contextlib.suppress(OSError) if path.is_dir() else contextlib.nullcontext():
      os.fsync(descriptor)
  finally:
    os.close(descriptor)


@contextlib.contextmanager
def staged(parent: pathlib.Path) -> Iterator[pathlib.Path]:
  """Yields a temporary folder in `parent`, which is removed at the end with the entries that are left in it."""
  with tempfile.TemporaryDirectory(prefix=_PREFIX, suffix=_PART, dir=parent, ignore_cleanup_errors=True) as folder:
    yield pathlib.Path(folder)


@dataclasses.dataclass(frozen=True)
class Unfinished:
  """The folder `NAME.DIGEST.part` with the unfinished files of a command that can resume.

  DIGEST is computed from the plan, which is also in the folder, as `plan.json`. So the same command finds the files of
  an earlier call, and other commands do not touch them. Only files whose names belong to the plan are removed.

  A process writes files of the plan in `with unfinished.open()`, which holds the lock of `plan.json`, and calls
  `complete` there, which moves the folder to `path`. Several processes share the lock with `open(joins=True)`. Each of
  them enters `alone` after writing; `alone` yields True in the last process, which calls `complete`.

  path: the final path of the files: a folder, or a single file.
  plan: a text that says what is written and how; equal plans give equal files.
  names: the names of the files of the plan. Beside a file there may be a note, `NAME.done`.
  """
  path: pathlib.Path
  plan: str
  names: Collection[str]

  @property
  def folder(self) -> pathlib.Path:
    """The folder with the unfinished files, which is the same for every process and host."""
    digest = hashlib.sha256(self.plan.encode()).hexdigest()[:12]
    return self.path.with_name(f'{self.path.name}.{digest}{_PART}')

  @contextlib.contextmanager
  def open(self, *, joins: bool = False) -> Iterator[pathlib.Path]:
    """Creates the folder if it is missing, and yields the folder while this process has its lock.

    After an error in the `with` statement, a folder that has only `plan.json` is removed.

    Args:
      joins: whether several processes may write different files of the plan at the same time.

    Raises:
      UserError: another process writes to `path`, or the folder has files that this command did not write.
    """
    with contextlib.ExitStack() as stack:
      try:
        self._warn_of_other_plans()
        self._create()
        lock = stack.enter_context(open(self.folder / PLAN, 'r+b'))
        self._lock(lock, joins)
      except FileNotFoundError:  # another process has just completed the folder
        if not joins:
          raise self._in_use('one that has just ended') from None
        yield self.folder
        return
      except OSError as error:
        raise failures.writing(f'--to={self.path}', error) from error
      try:
        yield self.folder
      except BaseException:
        with contextlib.suppress(OSError):
          if os.listdir(self.folder) == [PLAN] and try_lock(lock, where=f'--to={lock.name}'):
            self.discard()
        raise

  @contextlib.contextmanager
  def alone(self) -> Iterator[bool]:
    """Yields whether no other process has the folder open. If so, no other process can open it before the end."""
    with contextlib.ExitStack() as stack:
      try:
        lock = stack.enter_context(open(self.folder / PLAN, 'r+b'))
      except FileNotFoundError:  # another process has just completed the folder
        yield False
        return
      yield try_lock(lock, where=f'--to={lock.name}') and bool(os.fstat(lock.fileno()).st_nlink)

  def complete(self, kept: Collection[str]) -> None:
    """Removes the files of the plan whose names are not in `kept`, and moves the folder to `path`."""
    for name in os.listdir(self.folder):
      if name not in kept and name != PLAN and self.has(name):
        (self.folder / name).unlink()
    publish(self.folder, self.path)
    (self.path / PLAN).unlink()

  def discard(self) -> None:
    """Removes the files of the plan (`plan.json` last), and the folder if nothing else is in it."""
    with contextlib.suppress(OSError):
      for name in sorted(filter(self.has, os.listdir(self.folder)), key=lambda name: name == PLAN):
        (self.folder / name).unlink()
      self.folder.rmdir()

  def has(self, name: str) -> bool:
    """Returns whether a file in the folder belongs to the plan: one of its files, a note, or a temporary file."""
    is_temporary = name.startswith(_PREFIX) and name.endswith(_PART)
    return is_temporary or not {name, name.removesuffix(NOTE)}.isdisjoint([*self.names, PLAN])

  def _warn_of_other_plans(self) -> None:
    """Warns of unfinished files of other plans for `path`; raises UserError if a process is writing such files."""
    for other in find_parts(self.path):
      if other == self.folder:
        continue
      with contextlib.suppress(PermissionError), open(other / PLAN, 'r+b') as lock:
        if not try_lock(lock, where=f'--to={lock.name}'):
          raise self._in_use('one with other settings')
      log.warning('%s has unfinished files of a command with other settings, which are kept. Run that command again to '
                  'complete them, or remove the folder.', other)

  def _create(self) -> None:
    """Creates the folder with the plan in one step; if there is a folder, checks that it belongs to this plan."""
    self.path.parent.mkdir(parents=True, exist_ok=True)
    if not os.path.lexists(self.folder):
      part = temporary_path(self.path.parent)
      part.mkdir()
      (part / PLAN).write_text(self.plan)
      try:
        os.rename(part, self.folder)
      except OSError:  # another process was faster
        (part / PLAN).unlink()
        part.rmdir()
    plan = self.folder / PLAN
    if self.folder.is_symlink() or not _is_regular(plan) or plan.read_text(errors='replace') != self.plan:
      others = ['a file or folder that it did not make']
    else:
      others = [name for name in sorted(os.listdir(self.folder)) if not self.has(name)]
    if others:
      raise UserError(f'--to={self.path}: expected {self.folder} to have only unfinished files of this command, got '
                      f'{others[0]}. Move it away, or choose another --to.')

  def _lock(self, lock: IO[bytes], joins: bool) -> None:
    """Locks the open file `plan.json`: shared with `joins`, else exclusively.

    The first process that holds the lock removes temporary files of a process that was killed.
    """
    if try_lock(lock, where=f'--to={lock.name}'):
      for leftover in self.folder.glob(f'{_PREFIX}*{_PART}'):
        leftover.unlink()
    elif not joins:
      raise self._in_use('one that does')
    else:
      log.info('Another process writes %s; joining it.', self.folder)
    if joins:
      fcntl.flock(lock, fcntl.LOCK_SH)  # waits while another process prepares the folder
    if not os.fstat(lock.fileno()).st_nlink or not self.folder.exists():
      raise FileNotFoundError(self.folder)

  def _in_use(self, user: str) -> UserError:
    """Returns the error about another process; `user` describes that process, such as `one with other settings`."""
    return UserError(f'--to={self.path}: expected no other process to write it, got {user}. Wait for it, or choose '
                     'another --to.')


def find_parts(path: pathlib.Path) -> list[pathlib.Path]:
  """Returns the folders with unfinished files for a path, one for each plan."""
  folders = path.parent.glob(f'{glob.escape(path.name)}.{"[0-9a-f]" * 12}{_PART}')
  return sorted(folder for folder in folders if _is_regular(folder / PLAN))


def _is_regular(path: pathlib.Path) -> bool:
  return os.path.isfile(path) and not os.path.islink(path)


def try_lock(file: IO[Any], *, where: str) -> bool:
  """Locks an open file for this process alone, and returns True; returns False if another process has a lock on it.

  The messages begin with `where`. The lock ends when the file is closed.

  Raises:
    UserError: the file system has no locks.
    TemporaryError: the file system failed.
  """
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return True
  except BlockingIOError:
    return False
  except OSError as error:
    error_class = UserError if error.errno in NO_LOCKS else failures.error_class(error)
    raise error_class(f'{where}: expected a file system with locks (flock), got "{error.strerror}". Choose a folder on '
                      'a local disk or NFS, and copy the results afterwards.') from error
