"""Finds image files in and below a folder, in no order; circular links are not followed, other files are counted."""
from __future__ import annotations

import collections
import logging
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from vit_jax.core.errors import UserError
from vit_jax.data.files import access

log = logging.getLogger('vit_jax.data')

EXTENSIONS = ('.jpg', '.jpeg', '.jpe', '.jfif', '.png', '.webp', '.bmp', '.gif', '.tif', '.tiff', '.avif', '.jp2')
UNREAD = ('.heic', '.heif', '.jxl')
"""Extensions of images that are not supported."""
_LINK, _NONE = 'broken or circular links', 'without an extension'


class ImageFile(NamedTuple):
  """A file below a folder: path relative to the folder, with forward slashes; size in bytes."""
  path: str
  size: int


class Folder(NamedTuple):
  """A folder that is being read: its path relative to the root; modification time in ns; image files with their sizes.

  `files` must be consumed before the next folder is read.
  """
  path: str
  time_ns: int
  files: Iterator[tuple[bytes, int]]


class Finder:
  """Finds image files, and counts other files by extension. Hidden files are skipped and not counted."""

  def __init__(self) -> None:
    self.ignored: collections.Counter[str] = collections.Counter()

  def find(self, root: str, prefix: str = '') -> Iterator[ImageFile]:
    """Yields the image files in and below `root/prefix`.

    Raises:
      UserError: a folder cannot be read.
    """
    for folder in self.walk(root, prefix):
      for name, size in folder.files:
        text = os.fsdecode(name)
        yield ImageFile(f'{folder.path}/{text}' if folder.path else text, size)

  def walk(self, root: str, prefix: str = '') -> Iterator[Folder]:
    """Yields `root/prefix` and the folders below it, each before its subfolders.

    Raises:
      UserError: a folder cannot be read, also while its files are consumed.
    """
    parents = pathlib.Path(os.path.realpath(os.path.join(root, prefix))).parents
    return self._walk(root, prefix, tuple((stat.st_dev, stat.st_ino) for stat in map(os.stat, parents)))

  def _walk(self, root: str, prefix: str, above: tuple[tuple[int, int], ...]) -> Iterator[Folder]:
    folder = os.path.join(root, prefix) if prefix else root
    try:
      stat = os.stat(folder)
    except OSError as error:
      raise access.user_error(error, folder) from error
    identity = stat.st_dev, stat.st_ino
    if identity in above:  # a link to a parent folder
      self.ignored[_LINK] += 1
      return
    below: list[str] = []
    yield Folder(prefix, stat.st_mtime_ns, self._files(folder, below))
    for name in below:
      yield from self._walk(root, f'{prefix}/{name}' if prefix else name, (*above, identity))

  def _files(self, folder: str, below: list[str]) -> Iterator[tuple[bytes, int]]:
    """Yields the image files of a folder; adds its subfolders to `below`."""
    try:
      with os.scandir(folder) as entries:
        for entry in entries:
          if entry.name.startswith('.'):
            continue
          if is_folder(entry):
            below.append(entry.name)
          elif (size := self._size(entry)) is not None:
            yield os.fsencode(entry.name), size
    except OSError as error:
      raise access.user_error(error, folder) from error

  def _size(self, entry: os.DirEntry[str]) -> int | None:
    """Returns the size of an image file in bytes; counts any other file and returns None."""
    extension = os.path.splitext(entry.name)[1].lower()
    try:
      if entry.is_file() and extension in EXTENSIONS:
        return entry.stat().st_size
      is_lost = entry.is_symlink() and not os.path.exists(entry.path)
    except OSError:
      is_lost = True
    self.ignored[_LINK if is_lost else extension or _NONE] += 1
    return None


def is_folder(entry: os.DirEntry[str]) -> bool:
  """Returns whether an entry is a folder or a link to one; a link to itself is not."""
  try:
    return entry.is_dir()
  except OSError:
    return False


def is_image(entry: os.DirEntry[str]) -> bool:
  """Returns whether an entry is an image file by its extension."""
  return Finder()._size(entry) is not None and not entry.name.startswith('.')


def describe(ignored: Mapping[str, int]) -> str:
  """Returns the ignored files, such as `12 files: .heic (10), .txt (2)`, with advice about images among them; or ''."""
  if not ignored:
    return ''
  parts = ', '.join(f'{name} ({count:,})' for name, count in sorted(ignored.items(), key=lambda one: (-one[1], one[0])))
  num = sum(ignored.values())
  text = f'{num:,} file{"s" * (num > 1)}: {parts}'
  if unread := [name for name in UNREAD if name in ignored]:
    text += (f'. {" ".join(unread)} images are not supported. Convert them to JPEG, for example with ImageMagick: '
             "magick mogrify -format jpg '*.heic'")
  return text


def report(ignored: Mapping[str, int], where: str) -> None:
  """Logs the ignored files below a folder, if there are any."""
  if ignored:
    log.warning('%s: ignored %s', where, describe(ignored))


def check(found: Sequence[object], finder: Finder, where: str) -> None:
  """Raises UserError if no image was found."""
  if not found:
    raise UserError(f'{where}: expected images with the extension {" ".join(EXTENSIONS)} in or below it, got '
                    f'{describe(finder.ignored) or "none"}.')
