"""Image files by their paths, without classes: the arguments of `predict` and `embed`, as a source."""
from __future__ import annotations

import errno
import hashlib
import logging
import os
from collections.abc import Iterator, Sequence

from vit_jax.core.errors import UserError
from vit_jax.data.files import image_files, user_files
from vit_jax.data.files.user_files import Rules
from vit_jax.data.image.headers import BadImage
from vit_jax.data.source import Record

log = logging.getLogger('vit_jax.data')
SHOWN = 5  # missing files in a message
_OF_FILE = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
"""Errors that concern one file alone; others, such as those of a disk, stop the job."""


class ImageList:
  """Files in the given order; one that cannot be opened counts as a bad image."""

  def __init__(self, paths: Sequence[str], *, name: str = 'files') -> None:
    self.name, self._paths = name, tuple(paths)
    self.class_names: tuple[str, ...] = ()
    text = '\0'.join(f'{path} {os.path.getsize(path) if os.path.isfile(path) else -1}' for path in paths)
    self.digest = hashlib.sha256(text.encode(errors='surrogateescape')).hexdigest()

  def __len__(self) -> int:
    return len(self._paths)

  def __getitem__(self, index: int) -> Record:
    try:
      return Record(user_files.read_image(self._paths[index]), -1)
    except OSError as error:
      if error.errno not in _OF_FILE:
        raise
      raise BadImage(error.strerror or str(error)) from error

  def label(self, index: int) -> int:
    return -1

  def describe(self, index: int) -> str:
    return self._paths[index]


def find(given: Sequence[str], *, follow_links: bool = False) -> Iterator[str]:
  """Yields the given files, and all images in and below the given folders, ordered by path.

  Links in a folder that lead out of it are followed only with `follow_links`.

  Raises:
    UserError: a folder holds no image.
  """
  for name in given:
    if not os.path.isdir(name):
      yield name
      continue
    finder = image_files.Finder(Rules(follow_links))
    below = sorted(os.path.join(name, found.path) for found in finder.find(name))
    image_files.check(below, finder, name)
    image_files.report(finder.ignored, name)
    yield from below


def check_exist(paths: Sequence[str]) -> None:
  """Warns about files that do not exist, before weights are loaded and a program is compiled.

  Raises:
    UserError: none of them exists.
  """
  missing = [path for path in paths if not os.path.exists(path)]
  named = ', '.join(missing[:SHOWN]) + (f' and {len(missing) - SHOWN:,} more' if len(missing) > SHOWN else '')
  if missing and len(missing) == len(paths):
    raise UserError(f'{named}: expected image files or folders of images, got no such file. Check the paths.')
  if missing:
    log.warning('%s of %s files do not exist: %s', f'{len(missing):,}', f'{len(paths):,}', named)
