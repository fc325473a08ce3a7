"""Image files by their paths, without classes: the arguments of `predict` and `embed`, as a source.

A job calls `find` with the arguments, `check_exist` with the paths, and makes an `ImageList` of them.
"""
from __future__ import annotations

import errno
import hashlib
import logging
import os
from collections.abc import Iterator, Sequence

from vit_jax.core import documents
from vit_jax.core.errors import UserError
from vit_jax.data import user_files
from vit_jax.data.image.headers import BadImage
from vit_jax.data.source import Record, Rows
from vit_jax.data.user_files import Rules

log = logging.getLogger('vit_jax.data')
_MAX_SHOWN = 5  # missing files in a message
_ERRORS_OF_FILE = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP,
                   errno.ENAMETOOLONG)
"""Errors that concern a single file, which then counts as a bad image. Other errors, such as those of a disk, stop the
job. Unlike `failures.Meaning.is_of_file`, the list has the errors of a file that may not be read: the job continues."""


class ImageList(Rows):
  """Image files in the given order, without classes. A file that cannot be opened counts as a bad image."""

  own_files = True  # a person's own photos, which are turned upright by their EXIF entry (`data/orientation.py`)
  name = 'files'
  class_names: tuple[str, ...] = ()

  def __init__(self, paths: Sequence[str]) -> None:
    self._paths = tuple(paths)
    text = '\0'.join(f'{path} {os.path.getsize(path) if os.path.isfile(path) else -1}' for path in paths)
    self.digest = hashlib.sha256(text.encode(errors='surrogateescape')).hexdigest()

  def __len__(self) -> int:
    return len(self._paths)

  def example(self, row: int) -> Record:
    try:
      return Record(user_files.read_image(self._paths[row]))
    except OSError as error:
      if error.errno not in _ERRORS_OF_FILE:
        raise
      raise BadImage(error.strerror or str(error)) from error

  def labels(self, row: int) -> tuple[int, ...]:
    return ()

  def describe(self, row: int) -> str:
    return self._paths[row]


def find(arguments: Sequence[str], *, follow_links: bool = False) -> Iterator[str]:
  """Yields the path of each argument that is no folder, even if the file is missing, and the images of each folder.

  The images of a folder and of the folders below it are sorted by path; `~` is the home directory. Links that lead out
  of the folder are followed only with `follow_links`. Raises UserError if a folder has no image.
  """
  for path in map(user_files.expand_home, arguments):
    if not os.path.isdir(path):
      yield path
      continue
    finder = user_files.Finder(Rules(follow_links))
    images = sorted(os.path.join(path, image) for image in finder.find(path))
    if not images:
      raise UserError(f'{path}: expected images with the extension {" ".join(user_files.EXTENSIONS)} in or below it, '
                      f'got {user_files.describe_ignored(finder.ignored) or "none"}. Name another folder.')
    user_files.report_ignored(finder.ignored, path)
    yield from images


def check_exist(paths: Sequence[str]) -> None:
  """Warns about the files that do not exist. Raises UserError if none of them exists."""
  missing = [path for path in paths if not os.path.exists(path)]
  if not missing:
    return
  shown = documents.joined(missing, _MAX_SHOWN)
  if len(missing) == len(paths):
    raise UserError(f'{shown}: expected image files or folders of images, got no such file. Check the paths.')
  log.warning('%s of %s files do not exist: %s', f'{len(missing):,}', f'{len(paths):,}', shown)
