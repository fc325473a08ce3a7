"""Image files in and below a folder, in no order; links that lead back are not followed, other files are counted."""
from __future__ import annotations

import collections
import logging
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from vit_jax.core.errors import UserError
from vit_jax.data.sources import system_errors

log = logging.getLogger('vit_jax.data')

EXTENSIONS = ('.jpg', '.jpeg', '.jpe', '.jfif', '.png', '.webp', '.bmp', '.gif', '.tif', '.tiff', '.avif', '.jp2')
UNREAD = ('.heic', '.heif', '.jxl')
"""Endings of images that are not decoded here."""
_LINK, _NONE = 'links that lead nowhere or back', 'without an ending'


class Found(NamedTuple):
  """A file below a folder: path relative to it, with forward slashes; bytes."""
  path: str
  size: int


class Finder:
  """Finds image files, and counts by their endings the others that it passes. Hidden files are neither."""

  def __init__(self) -> None:
    self.ignored: collections.Counter[str] = collections.Counter()

  def find(self, root: str, prefix: str = '') -> Iterator[Found]:
    """The image files in and below `root/prefix`.

    Raises:
      UserError: the system does not let a folder be read.
    """
    parents = pathlib.Path(os.path.realpath(os.path.join(root, prefix))).parents
    return self._walk(root, prefix, tuple((stat.st_dev, stat.st_ino) for stat in map(os.stat, parents)))

  def _walk(self, root: str, prefix: str, above: tuple[tuple[int, int], ...]) -> Iterator[Found]:
    folder = os.path.join(root, prefix) if prefix else root
    try:
      stat = os.stat(folder)
      entries = list(os.scandir(folder))
    except OSError as error:
      raise system_errors.stop(error, folder) from error
    identity = stat.st_dev, stat.st_ino
    if identity in above:  # a link to a folder that this one lies in, such as that of all classes
      self.ignored[_LINK] += 1
      return
    for entry in entries:
      path = f'{prefix}/{entry.name}' if prefix else entry.name
      if entry.name.startswith('.'):
        continue
      if is_folder(entry):
        yield from self._walk(root, path, (*above, identity))
      elif (size := self._size(entry)) is not None:
        yield Found(path, size)

  def _size(self, entry: os.DirEntry[str]) -> int | None:
    """Bytes of an image file; None, and counted, for anything else."""
    ending = os.path.splitext(entry.name)[1].lower()
    try:
      if entry.is_file() and ending in EXTENSIONS:
        return entry.stat().st_size
      is_lost = entry.is_symlink() and not os.path.exists(entry.path)
    except OSError:
      is_lost = True
    self.ignored[_LINK if is_lost else ending or _NONE] += 1
    return None


def is_folder(entry: os.DirEntry[str]) -> bool:
  """Whether an entry is a folder, or a link to one; one that leads to itself is not."""
  try:
    return entry.is_dir()
  except OSError:
    return False


def is_image(entry: os.DirEntry[str]) -> bool:
  """Whether an entry is an image file by its ending."""
  return Finder()._size(entry) is not None and not entry.name.startswith('.')


def describe(ignored: Mapping[str, int]) -> str:
  """What was passed over, such as `12 files: .heic (10), .txt (2)`, with what to do about images among it; or ''."""
  if not ignored:
    return ''
  parts = ', '.join(f'{name} ({count:,})' for name, count in sorted(ignored.items(), key=lambda one: (-one[1], one[0])))
  num = sum(ignored.values())
  text = f'{num:,} file{"s" * (num > 1)}: {parts}'
  if unread := [ending for ending in UNREAD if ending in ignored]:
    text += (f'. Images in {" ".join(unread)} are not decoded here: convert them to JPEG first, such as by '
             "ImageMagick, magick mogrify -format jpg '*.heic'")
  return text


def report(ignored: Mapping[str, int], where: str) -> None:
  """Logs what was passed over below a folder, if anything."""
  if ignored:
    log.warning('%s: ignored %s', where, describe(ignored))


def check(found: Sequence[object], finder: Finder, where: str) -> None:
  """Raises UserError if there is none."""
  if not found:
    passed = describe(finder.ignored)
    raise UserError(f'{where}: expected images, files ending in {" ".join(EXTENSIONS)}, in or below it; got '
                    f'{passed or "none"}')
