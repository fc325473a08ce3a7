"""Writes files and folders: complete or not at all, and never in place of what this program did not make.

A file is written under a random name beside its path, which it then replaces (`replacing`, `replace`). Several files
are written in a new folder with such a name (`staged`), and moved to their places together (`publish_all`).

Work that resumes has a folder `NAME.DIGEST.part` (`Unfinished`): the digest is that of the plan, a text that says what
is written and how, which is also in its file `plan.json`. So the same command finds its unfinished files, and another
one leaves them alone. A process calls `open`, which locks `plan.json`, writes the files of the plan, and calls
`complete`; of several processes, the one for which `alone` is true. Only files whose names belong to the plan are ever
removed.

Imports only `core`.
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
import stat
import tempfile
from collections.abc import Callable, Collection, Iterator
from typing import IO, Any

from vit_jax.core import failures
from vit_jax.core.errors import UserError

PLAN, NOTE = 'plan.json', '.done'
"""The plan of an unfinished folder, and the ending of the names of notes beside its files."""
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""Error numbers of network file systems that are mounted without file locks."""
_OWN, _PART = '.vit_jax-', '.part'
log = logging.getLogger('vit_jax.files')


def fresh(folder: pathlib.Path) -> pathlib.Path:
  """Returns a path in a folder whose name nothing has."""
  return folder / f'{_OWN}{secrets.token_hex(8)}{_PART}'


@contextlib.contextmanager
def replacing(path: pathlib.Path, *, beside: pathlib.Path | None = None,
              is_new: bool = False) -> Iterator[pathlib.Path]:
  """Yields the path of a file to write, which replaces `path` at the end. After an error `path` is unchanged.

  After a power failure, `path` is the complete old or new file. Of two processes that write it, the later one wins.

  Args:
    path: of the file; its folder is created if it is missing.
    beside: the folder where it is written; None = that of `path`.
    is_new: `publish` the file, which fails where something is.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  part = fresh(beside or path.parent)
  try:
    yield part
    (publish if is_new else settle)(part, path)
  finally:
    with contextlib.suppress(OSError):
      part.unlink(missing_ok=True)


def settle(part: pathlib.Path, path: pathlib.Path) -> None:
  """Moves a complete file to a path, in place of what is there."""
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
  """Moves a complete file or folder to a path where nothing is, or an empty folder.

  Raises:
    OSError: there is something else.
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
  """Moves all entries of a folder to `parent`.

  Args:
    overwrite: replace what is at the place of an entry; a folder only if it has no other files than its successor.
    is_ours: whether a file is one of this program that is always replaced, and removed with its folder.

  Raises:
    UserError: a folder that would be replaced has other files.
    OSError: an entry cannot be moved, or may not be replaced. Those that were moved before are removed.
  """
  places = {one: parent / one.name for one in sorted(part.iterdir())}
  for one, place in places.items():
    if os.path.lexists(place) and (place.is_symlink() or not (overwrite or is_ours(place))):
      raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(place))
    if place.is_dir() and (others := [name for name in _files(place) - _files(one) if not is_ours(place / name)]):
      raise UserError(f'{place}: expected a folder that has only what this command replaces, got {min(others)} as '
                      'well. Move it away, or choose another path.')
    for path in (one, *one.rglob('*')):
      _sync(path)
  added = [one for one, place in places.items() if not os.path.lexists(place)]
  with staged(parent) as old:
    try:
      for one, place in places.items():
        if place.is_dir():
          os.rename(place, old / one.name)
        if one in added:
          publish(one, place)
        else:
          os.replace(one, place)
    except OSError:
      for one, place in places.items():
        if (old / one.name).exists() and not place.exists():
          os.rename(old / one.name, place)
        elif one in added and not one.exists():
          os.rename(place, one)
      raise


def _files(folder: pathlib.Path) -> set[str]:
  """Returns the paths of all files in a folder but those that Orbax names by random digits."""
  return {str(path.relative_to(folder)) for path in folder.rglob('*')
          if (path.is_symlink() or not path.is_dir()) and not re.fullmatch('[0-9a-f]{32}', path.name)}


def _sync(path: pathlib.Path) -> None:
  """Brings a file, or the entries of a folder, to disk. Not every file system can do that for folders."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    with contextlib.suppress(OSError) if path.is_dir() else contextlib.nullcontext():
      os.fsync(descriptor)
  finally:
    os.close(descriptor)


@contextlib.contextmanager
def staged(parent: pathlib.Path) -> Iterator[pathlib.Path]:
  """Yields a temporary folder in `parent`, which is removed at the end with what is left in it."""
  with tempfile.TemporaryDirectory(prefix=_OWN, suffix=_PART, dir=parent, ignore_cleanup_errors=True) as folder:
    yield pathlib.Path(folder)


@dataclasses.dataclass(frozen=True)
class Unfinished:
  """The unfinished files of a command that resumes.

  path: the file or folder that they become.
  plan: what is written and how; equal plans give equal files.
  names: of the files of the plan. A note may stand beside each.
  """
  path: pathlib.Path
  plan: str
  names: Collection[str]

  @property
  def folder(self) -> pathlib.Path:
    """Their folder, which is the same for every process and host."""
    digest = hashlib.sha256(self.plan.encode()).hexdigest()[:12]
    return self.path.with_name(f'{self.path.name}.{digest}{_PART}')

  @contextlib.contextmanager
  def open(self, *, joins: bool = False) -> Iterator[pathlib.Path]:
    """Yields the folder, created if it is missing, while this process has its lock. An empty one is not kept.

    Args:
      joins: several processes may write different files of the plan; else a second process is refused.

    Raises:
      UserError: another process writes to `path`, or others have made the folder or files in it.
    """
    with contextlib.ExitStack() as stack:
      try:
        for other in [one for one in find_parts(self.path) if one != self.folder]:  # of other plans for this path
          with contextlib.suppress(PermissionError), open(other / PLAN, 'r+b') as lock:
            if not try_lock(lock, where=f'--to={lock.name}'):
              raise self._used('one with other settings')
          log.warning('%s has unfinished files of a command with other settings, which are kept. Run that command '
                      'again to complete them, or remove the folder.', other)
        self._begin()
        lock = stack.enter_context(open(self.folder / PLAN, 'r+b'))
        self._take(lock, joins)
      except FileNotFoundError:  # another process has just completed it
        if not joins:
          raise self._used('one that has just ended') from None
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
    """Yields whether no other process has the folder open, while none can open it. Of several that join, the last."""
    with contextlib.ExitStack() as stack:
      try:
        lock = stack.enter_context(open(self.folder / PLAN, 'r+b'))
      except FileNotFoundError:  # another process has just completed it
        yield False
        return
      yield try_lock(lock, where=f'--to={lock.name}') and bool(os.fstat(lock.fileno()).st_nlink)

  def complete(self, kept: Collection[str]) -> None:
    """Moves the folder to `path` with the files of these names; the others of the plan are removed."""
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
    own = {*self.names, PLAN}
    return name in own or name.removesuffix(NOTE) in own or (name.startswith(_OWN) and name.endswith(_PART))

  def _begin(self) -> None:
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
    other = [name for name in sorted(os.listdir(self.folder)) if not self.has(name)] if is_ours else ['']
    if other:
      raise UserError(f'--to={self.path}: expected {self.folder} to have only unfinished files of this command, got '
                      f'{other[0] or "a file or folder that it did not make"}. Move it away, or choose another --to.')

  def _take(self, lock: IO[bytes], joins: bool) -> None:
    """Locks the folder. The first process removes what an earlier one was writing when it was killed."""
    if try_lock(lock, where=f'--to={lock.name}'):
      for leftover in self.folder.glob(f'{_OWN}*{_PART}'):
        leftover.unlink()
    elif not joins:
      raise self._used('one that does')
    else:
      log.info('Another process writes %s; joining it.', self.folder)
    if joins:
      fcntl.flock(lock, fcntl.LOCK_SH)  # waits while another process prepares the folder
    if not os.fstat(lock.fileno()).st_nlink or not self.folder.exists():
      raise FileNotFoundError(self.folder)

  def _used(self, by: str) -> UserError:
    return UserError(f'--to={self.path}: expected no other process to write it, got {by}. Wait for it, or choose '
                     'another --to.')


def find_parts(path: pathlib.Path) -> list[pathlib.Path]:
  """Returns the folders with unfinished files for a path, of any plan."""
  found = path.parent.glob(f'{glob.escape(path.name)}.{"[0-9a-f]" * 12}{_PART}')
  return sorted(one for one in found if _is_regular(one / PLAN))


def _is_regular(path: pathlib.Path) -> bool:
  return stat.S_ISREG(os.lstat(path).st_mode) if os.path.lexists(path) else False


def try_lock(file: IO[Any], *, where: str) -> bool:
  """Locks a file if no other process has; returns whether it did. `where` names the folder in messages.

  Raises:
    UserError, TemporaryError: the file system has no locks; it failed.
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
