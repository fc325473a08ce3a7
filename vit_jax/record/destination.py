"""The output of a job, at the value of its flag `--to`: its path is checked first, complete output is moved there last.

A job calls `checked`, `check_free` or `check_writable` before its work begins, so that a wrong path costs no time. It
writes in the folder of `staged` or `filled`, whose files appear at the path only if the job succeeds.
"""
from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterable, Iterator

from vit_jax.core import address, failures, files
from vit_jax.core.errors import UserError
from vit_jax.record import storage


def checked(to: str | pathlib.Path) -> pathlib.Path:
  """Returns the absolute path of `to`, the value of the flag `--to`.

  Its parent must exist: a missing slash or a mistyped directory is an error and does not create directories.

  Raises:
    UserError: `to` is an address, names no file, or its directory does not exist or is not writable.
  """
  text = str(to)
  address.check(text, '--to')
  if '://' in text:
    raise UserError(f'--to: expected a path on this machine, got the address {text}. Write to a local path and '
                    'copy the result.')
  try:
    path = pathlib.Path(storage.expand_home(text, '--to')).absolute()
    parent = path.parent
    if path.name in ('', '..') or '\0' in text:
      raise UserError(f'--to: expected the name of a file or folder to write, got {text!r}. Add a name.')
    if not parent.is_dir():
      raise UserError(f'--to: expected a path in an existing directory, got {text}, and there is no directory '
                      f'{parent}. Create it, or check the path.')
    path.exists()  # raises for names that are too long
  except OSError as error:
    raise failures.writing(f'--to={text[:200]}', error) from error
  if not os.access(parent, os.W_OK | os.X_OK):
    raise UserError(f'--to: expected a path in a directory that can be written, got {text}. Change the '
                    f'permissions of {parent}, or choose another.')
  return path


def check_free(paths: Iterable[pathlib.Path], *, setting: str, overwrite: bool) -> None:
  """Raises UserError if there is something at one of the paths of files to write, unless it may be overwritten."""
  for path in paths:
    if os.path.lexists(path) and not (overwrite and path.is_file() and not path.is_symlink()):
      advice = 'Move it away, or choose another.' if overwrite else 'Choose another, or add --overwrite.'
      raise UserError(f'{setting}: expected a path where nothing is, got {path}, which exists. {advice}')


@contextlib.contextmanager
def filled(folder: pathlib.Path, *, overwrite: bool) -> Iterator[pathlib.Path]:
  """Yields a new folder, whose entries are moved into `folder` at the end, which is created if it is missing.

  Raises:
    UserError: one of them exists there, or the folder cannot be written.
  """
  is_new = not folder.exists()
  try:
    folder.mkdir(parents=True, exist_ok=True)
    with files.staged(folder) as part:
      yield part
      check_free([folder / entry.name for entry in part.iterdir() if entry.is_file()], setting='--to',
                 overwrite=overwrite)
      files.publish_all(part, folder, overwrite=overwrite, is_ours=lambda path: False)
  except OSError as error:
    raise failures.writing(f'--to={folder}', error) from error
  finally:
    if is_new:
      with contextlib.suppress(OSError):  # it has files
        folder.rmdir()


def check_writable(folder: storage.Path, *, setting: str, advice: str) -> None:
  """Checks that files can be written into a directory, or where it will be created, by creating and removing one.

  Raises:
    UserError, TemporaryError: they cannot.
  """
  if not isinstance(folder, pathlib.Path):
    return
  try:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    handle, name = tempfile.mkstemp(prefix='.vit_jax_', dir=existing)
    os.close(handle)
    os.unlink(name)
  except OSError as error:
    raise failures.kind(error)(f'{setting}={folder}: expected a directory that can be written, got '
                                f'{error.strerror or error}. {advice}') from error


@contextlib.contextmanager
def staged(path: pathlib.Path, *, shown: str, overwrite: bool = False,
           is_ours: Callable[[pathlib.Path], bool]) -> Iterator[pathlib.Path]:
  """Yields a new folder beside `path` for output, which is moved there at the end; nothing is kept after an error.

  Args:
    path: the new path of the folder's entry with this name; others keep their names.
    shown: the path as the user gave it.
    overwrite: replace what is there.
    is_ours: whether a file is one of this program that is always replaced or removed.

  Raises:
    UserError: the folder cannot be written or moved.
  """
  try:
    with files.staged(path.parent) as part:
      yield part
      files.publish_all(part, path.parent, overwrite=overwrite, is_ours=is_ours)
  except OSError as error:
    raise failures.writing(f'--to={shown}', error) from error
