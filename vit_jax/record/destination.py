"""Where a job writes a file or folder: on this machine, in a directory that exists, and whole or not at all."""
from __future__ import annotations

import os
import pathlib
import re
import shutil

from vit_jax.core.errors import UserError


def checked(to: str | pathlib.Path, *, setting: str = '--to') -> pathlib.Path:
  """The absolute path that `to` means.

  Its parent must exist: a missing slash or a mistyped directory is an error, not a new chain of directories elsewhere.

  Args:
    to: what a person wrote.
    setting: the name of it, for messages.

  Raises:
    UserError: it is an address, names no file, or its directory does not exist or cannot be written.
  """
  text = str(to)
  if re.match(r'[A-Za-z][A-Za-z0-9+.-]+:/', text):  # pathlib makes gs:/b of gs://b
    raise UserError(f'{setting}: expected a path on this machine, got the address {text}. Write to a local path and '
                    'copy the result.')
  try:
    path = pathlib.Path(text).expanduser().absolute()
    parent = path.parent
    if path.name in ('', '..') or '\0' in text:
      raise UserError(f'{setting}: expected the name of a file or folder to write, got {text!r}. Add a name.')
    if not parent.is_dir():
      raise UserError(f'{setting}: expected a path in an existing directory, got {text}, and there is no directory '
                      f'{parent}. Create it, or check the path.')
    path.exists()  # raises for names that are too long
  except (OSError, RuntimeError) as error:  # RuntimeError: no home directory
    raise UserError(f'{setting}: expected a path that can be written, got {text[:200]}: '
                    f'{getattr(error, "strerror", None) or error}. Choose another.') from error
  if not os.access(parent, os.W_OK | os.X_OK):
    raise UserError(f'{setting}: expected a path in a directory that can be written, got {text}. Change the '
                    f'permissions of {parent}, or choose another.')
  return path


def publish(part: pathlib.Path, path: pathlib.Path) -> None:
  """Moves the files of the folder `part` beside `path`, those of its name onto it; a folder there is deleted last.

  Args:
    part: a folder in the same directory as `path`.
    path: what one entry of `part` becomes; others keep their names.

  Raises:
    OSError: a file cannot be moved; a folder at `path` is as it was.
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
