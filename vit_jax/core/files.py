"""Writes files and folders: complete or not at all, and never in place of what this program did not make.

A file is written as `.vit_jax-RANDOM.part` beside its path, and then moved to the path (`replacing`, `replace`).
Several files are written in a folder with such a name (`staged`), and moved to their paths together (`publish_all`).

A command that resumes writes in a folder `NAME.DIGEST.part` (`Unfinished`). DIGEST is that of the plan, a text that
says what is written and how; it is also in the folder, as `plan.json`. So the same command finds its unfinished files,
and another command does not touch them. A process writes files of the plan inside of `with unfinished.open()`, which
holds the lock of `plan.json`, and calls `complete` there, which moves the folder to its path. Several processes share
the lock with `open(joins=True)`; afterwards each enters `alone`, which is true for the last one, and that completes.
Only files whose names belong to the plan are ever removed. Imports only `core`.
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

PLAN, NOTE = 'plan.json', '.done'
"""The plan of an unfinished folder, and the ending of the names of notes beside its files."""
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""Error numbers of network file systems that are mounted without file locks."""
_PREFIX, _PART = '.vit_jax-', '.part'  # of temporary files and folders; unfinished folders only end in `.part`
log = logging.getLogger('vit_jax.files')


def fresh(folder: pathlib.Path) -> pathlib.Path:
  """Returns the path of a new temporary file or folder in a folder: `.vit_jax-RANDOM.part`."""
  return folder / f'{_PREFIX}{secrets.token_hex(8)}{_PART}'


@contextlib.contextmanager
def replacing(path: pathlib.Path, *, beside: pathlib.Path | None = None,
              is_new: bool = False) -> Iterator[pathlib.Path]:
  """Yields the path of a file to write, which replaces `path` at the end. After an error `path` is unchanged.

  After a power failure, `path` is the complete old or new file. Of two processes that write it, the later one wins.

  Args:
    path: of the file; its folder is created if it is missing.
    beside: the folder where it is written; None = that of `path`.
    is_new: the file is moved by `publish`, which fails if there is something at `path`.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  part = fresh(beside or path.parent)
  try:
    yield part
    if is_new:
      publish(part, path)
    else:
      settle(part, path)
  finally:
    with contextlib.suppress(OSError):
      part.unlink(missing_ok=True)


def settle(part: pathlib.Path, path: pathlib.Path) -> None:
  """Moves a complete file to a path, in place of a file that is there."""
  _sync(part)
  os.replace(part, path)
  _sync(path.parent)


def replace(path: pathlib.Path, content: bytes) -> None:
  """Creates or replaces a file atomically, as `replacing`."""
  with replacing(path) as part:
    part.write_bytes(content)


def is_new(path: pathlib.Path) -> bool:
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
    os.rename(part, path)  # which fails for a file, a link, and a folder that is not empty
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
  """Moves all entries of the folder `part` to `parent`; if one cannot be moved, new entries are taken back.

  Args:
    part: a folder on the same file system, with complete files and folders.
    parent: an existing folder.
    overwrite: replace what `parent` has of the same name; a folder only if the new one has all its files.
    is_ours: returns whether a file is one of this program that is always replaced, and removed with its folder.

  Raises:
    UserError: a folder that would be replaced has other files.
    OSError: an entry cannot be moved, or may not be replaced.
  """
  targets = {entry: parent / entry.name for entry in sorted(part.iterdir())}
  for entry, target in targets.items():
    if os.path.lexists(target) and (target.is_symlink() or not (overwrite or is_ours(target))):
      raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    others = [name for name in _files(target) - _files(entry) if not is_ours(target / name)] if target.is_dir() else []
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
    except OSError:  # undo what was done
      for entry, target in targets.items():
        if (replaced / entry.name).exists() and not target.exists():
          os.rename(replaced / entry.name, target)
        elif entry in added and not entry.exists():
          os.rename(target, entry)
      raise


def _files(folder: pathlib.Path) -> set[str]:
  """Returns the relative paths of all files in a folder, without those that Orbax gives random names."""
  return {str(path.relative_to(folder)) for path in folder.rglob('*')
          if (path.is_symlink() or not path.is_dir()) and not re.fullmatch('[0-9a-f]{32}', path.name)}


def _sync(path: pathlib.Path) -> None:
  """Writes a file, or the list of the entries of a folder, to disk. Not every file system can do that for folders."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    with contextlib.suppress(OSError) if path.is_dir() else contextlib.nullcontext():
      os.fsync(descriptor)
  finally:
    os.close(descriptor)


@contextlib.contextmanager
def staged(parent: pathlib.Path) -> Iterator[pathlib.Path]:
  """Yields a temporary folder in `parent`, which is removed at the end with what is left in it."""
  with tempfile.TemporaryDirectory(prefix=_PREFIX, suffix=_PART, dir=parent, ignore_cleanup_errors=True) as folder:
    yield pathlib.Path(folder)


@dataclasses.dataclass(frozen=True)
class Unfinished:
  """The unfinished files of a command that resumes; the module describes the order of calls.

  path: the file or folder that they become.
  plan: what is written and how; equal plans give equal files.
  names: of the files of the plan. Beside each there may be a note, `NAME.done`.
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
    """Yields the folder, created if it is missing, while this process has its lock; removes it if it stays empty.

    Args:
      joins: whether several processes may write different files of the plan at the same time.

    Raises:
      UserError: another process writes to `path`, or the folder has files that this command did not write.
    """
    with contextlib.ExitStack() as stack:
      try:
        for other in find_parts(self.path):
          if other == self.folder:
            continue
          with contextlib.suppress(PermissionError), open(other / PLAN, 'r+b') as lock:
            if not try_lock(lock, where=f'--to={lock.name}'):
              raise self._in_use('one with other settings')
          log.warning('%s has unfinished files of a command with other settings, which are kept. Run that command '
                      'again to complete them, or remove the folder.', other)
        self._create()
        lock = stack.enter_context(open(self.folder / PLAN, 'r+b'))
        self._lock(lock, joins)
      except FileNotFoundError:  # another process has just completed it
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
    """Yields whether this is the only process that has the folder open. While it is, no other can open it."""
    with contextlib.ExitStack() as stack:
      try:
        lock = stack.enter_context(open(self.folder / PLAN, 'r+b'))
      except FileNotFoundError:  # another process has just completed it
        yield False
        return
      yield try_lock(lock, where=f'--to={lock.name}') and bool(os.fstat(lock.fileno()).st_nlink)

  def complete(self, kept: Collection[str]) -> None:
    """Moves the folder to `path` with the files of these names, after removing the other files of the plan."""
    for name in os.listdir(self.folder):
      if name not in kept and name != PLAN and self.has(name):
        (self.folder / name).unlink()
    publish(self.folder, self.path)
    (self.path / PLAN).unlink()

  def discard(self) -> None:
    """Removes the files of the plan, and the folder if nothing else is in it."""
    with contextlib.suppress(OSError):
      for name in sorted(filter(self.has, os.listdir(self.folder)), key=lambda name: name == PLAN):
        (self.folder / name).unlink()
      self.folder.rmdir()

  def has(self, name: str) -> bool:
    """Returns whether a file in the folder belongs to the plan."""
    is_temporary = name.startswith(_PREFIX) and name.endswith(_PART)
    return is_temporary or not {name, name.removesuffix(NOTE)}.isdisjoint([*self.names, PLAN])

  def _create(self) -> None:
    """Creates the folder with its plan in one step, or checks that it is one of this plan."""
    self.path.parent.mkdir(parents=True, exist_ok=True)
    if not os.path.lexists(self.folder):
      part = fresh(self.path.parent)
      part.mkdir()
      (part / PLAN).write_text(self.plan)
      try:
        os.rename(part, self.folder)
      except OSError:  # another process was faster
        (part / PLAN).unlink()
        part.rmdir()
    is_ours = not self.folder.is_symlink() and _is_regular(self.folder / PLAN) and (
        (self.folder / PLAN).read_text(errors='replace') == self.plan)
    others = [name for name in sorted(os.listdir(self.folder)) if not self.has(name)] if is_ours else []
    if others or not is_ours:
      raise UserError(f'--to={self.path}: expected {self.folder} to have only unfinished files of this command, got '
                      f'{others[0] if others else "a file or folder that it did not make"}. Move it away, or choose '
                      'another --to.')

  def _lock(self, lock: IO[bytes], joins: bool) -> None:
    """Locks the open file `plan.json`: shared with `joins`, else exclusively.

    The first process removes temporary files that an earlier one was writing when it was killed.
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

  def _in_use(self, by: str) -> UserError:
    return UserError(f'--to={self.path}: expected no other process to write it, got {by}. Wait for it, or choose '
                     'another --to.')


def find_parts(path: pathlib.Path) -> list[pathlib.Path]:
  """Returns the folders with unfinished files for a path, of any plan."""
  folders = path.parent.glob(f'{glob.escape(path.name)}.{"[0-9a-f]" * 12}{_PART}')
  return sorted(folder for folder in folders if _is_regular(folder / PLAN))


def _is_regular(path: pathlib.Path) -> bool:
  return os.path.isfile(path) and not os.path.islink(path)


def try_lock(file: IO[Any], *, where: str) -> bool:
  """Locks a file for this process alone, and returns True; returns False if another process has locked it.

  `where` begins messages. The lock ends when the file is closed.

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
    raise (UserError if error.errno in NO_LOCKS else failures.kind(error))(
        f'{where}: expected a file system with locks (flock), got "{error.strerror}". Choose a folder on a local disk '
        'or NFS, and copy the results afterwards.') from error
