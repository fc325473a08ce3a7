"""Checks the path of a job's output, which must be local and in an existing directory; moves complete output there."""
from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

from vit_jax.core import address, os_errors
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
    path = pathlib.Path(text).expanduser().absolute()
    parent = path.parent
    if path.name in ('', '..') or '\0' in text:
      raise UserError(f'--to: expected the name of a file or folder to write, got {text!r}. Add a name.')
    if not parent.is_dir():
      raise UserError(f'--to: expected a path in an existing directory, got {text}, and there is no directory '
                      f'{parent}. Create it, or check the path.')
    path.exists()  # raises for names that are too long
  except (OSError, RuntimeError) as error:  # RuntimeError: no home directory
    raise os_errors.kind(error)(f'--to: expected a path that can be written, got {text[:200]}: '
                                f'{getattr(error, "strerror", None) or error}. Choose another.') from error
  if not os.access(parent, os.W_OK | os.X_OK):
    raise UserError(f'--to: expected a path in a directory that can be written, got {text}. Change the '
                    f'permissions of {parent}, or choose another.')
  return path


def check_writable(folder: storage.Path, *, setting: str, advice: str) -> None:
  """Checks that files can be written into a directory, or where it will be created, by creating and removing one.

  Raises:
    UserError: they cannot; says why.
  """
  if not isinstance(folder, pathlib.Path):
    return
  try:
    place = next(path for path in (folder, *folder.parents) if path.exists())
    handle, name = tempfile.mkstemp(prefix='.vit_jax_', dir=place)
    os.close(handle)
    os.unlink(name)
  except OSError as error:
    raise os_errors.kind(error)(f'{setting}={folder}: expected a directory that can be written, got '
                                f'{error.strerror or error}. {advice}') from error


@contextlib.contextmanager
def staged(path: pathlib.Path, *, shown: str) -> Iterator[pathlib.Path]:
  """Yields a new folder beside `path` for output, which is moved there at the end; nothing is kept after an error.

  Args:
    path: the new path of the folder's entry with this name; others keep their names.
    shown: the path as the user gave it.

  Raises:
    UserError: the folder cannot be written or moved.
  """
  part = path.with_name(f'.{path.name}.{os.getpid()}.part')
  try:
    part.mkdir()
    yield part
    publish(part, path)
  except OSError as error:
    raise os_errors.kind(error)(f'--to: expected a path that can be written, got {shown}: {error.strerror or error}. '
                                'Nothing was kept. Free some space, or choose another path.') from error
  finally:
    shutil.rmtree(part, ignore_errors=True)


def publish(part: pathlib.Path, path: pathlib.Path) -> None:
  """Moves all entries of the folder `part` to the directory of `path`; an existing folder at `path` is deleted last.

  Args:
    part: a folder in the same directory as `path`.
    path: the new path of the entry with this name; others keep their names.

  Raises:
    OSError: a file cannot be moved; an existing folder at `path` is unchanged.
  """
  for one in part.rglob('*'):
    if one.is_file():
      with open(one, 'rb') as file:
        os.fsync(file.fileno())
  old = part.with_suffix('.old')
  if path.is_dir():
    path.replace(old)
  try:
    for one in sorted(part.iterdir()):
      one.replace(path.with_name(one.name))
  except OSError:
    if old.exists():
      old.replace(path)
    raise
  shutil.rmtree(old, ignore_errors=True)
