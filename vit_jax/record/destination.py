"""The output of a job at the path of its flag `--to`: the path is checked first, complete output is moved there last.

Export, convert, inspect, prepare and other jobs that write files use this module. A job calls `checked`, `check_free`
or `check_writable` before its work begins, so that a wrong path costs no time. Then the job writes files into the
temporary folder that `staged` or `filled` yields; they are moved to the path if the job succeeds.
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

  Its parent directory must exist, so that a mistyped path is an error and creates no directories.

  Raises UserError if `to` is an address, names no file, or its directory does not exist or is not writable.
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
  """Raises UserError if something is at a path of `paths`; with `overwrite`, only if it is not a file."""
  for path in paths:
    may_replace = overwrite and path.is_file() and not path.is_symlink()
    if os.path.lexists(path) and not may_replace:
      advice = 'Move it away, or choose another.' if overwrite else 'Choose another, or add --overwrite.'
      raise UserError(f'{setting}: expected a path where nothing is, got {path}, which exists. {advice}')


@contextlib.contextmanager
def filled(folder: pathlib.Path, *, overwrite: bool) -> Iterator[pathlib.Path]:
  """Yields a temporary folder. At the end its entries are moved into `folder`, which is created if it is missing.

  Raises UserError if an entry exists in `folder` and may not be overwritten, or the folder cannot be written.
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
      with contextlib.suppress(OSError):  # a folder that has files is not removed
        folder.rmdir()


def check_writable(folder: storage.Path, *, setting: str, advice: str) -> None:
  """Checks that files can be written into a local directory, or where it will be created.

  Else raises UserError or TemporaryError, with a message that names the flag `setting` and ends with `advice`.
  """
  if not isinstance(folder, pathlib.Path):
    return
  try:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    handle, name = tempfile.mkstemp(prefix='.vit_jax_', dir=existing)
    os.close(handle)
    os.unlink(name)
  except OSError as error:
    raise failures.error_class(error)(f'{setting}={folder}: expected a directory that can be written, got '
                                      f'{error.strerror or error}. {advice}') from error


@contextlib.contextmanager
def staged(path: pathlib.Path, *, shown: str, overwrite: bool = False,
           is_ours: Callable[[pathlib.Path], bool]) -> Iterator[pathlib.Path]:
  """Yields a temporary folder beside `path`. At the end its entries are moved to the parent of `path`.

  The job writes an entry with the name of `path`, and may write others beside it. After an error nothing is moved.

  Args:
    path: of the output.
    shown: the path as the user gave it, for messages.
    overwrite: whether to replace existing files.
    is_ours: returns whether this program wrote an existing file, which is then replaced or removed in any case.

  Raises UserError if the folder cannot be written, or an entry cannot be moved.
  """
  try:
    with files.staged(path.parent) as part:
      yield part
      files.publish_all(part, path.parent, overwrite=overwrite, is_ours=is_ours)
  except OSError as error:
    raise failures.writing(f'--to={shown}', error) from error
