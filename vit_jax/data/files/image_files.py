"""Finds image files in and below a folder, in no order; other files are counted.

Circular links are not followed, nor links that lead out of the folder, unless the rules of the data allow them.
"""
from __future__ import annotations

import collections
import logging
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from vit_jax.core import failures
from vit_jax.core.errors import UserError
from vit_jax.data.files import user_files
from vit_jax.data.files.user_files import OWN, Rules
from vit_jax.data.image import headers

log = logging.getLogger('vit_jax.data')

EXTENSIONS = tuple(extension for one in headers.FORMATS.values() for extension in one.extensions)
ARRAY = '.npy'
"""Extension of arrays, which are images if `data.channels` is not 3."""
UNREAD = tuple(extension for one in headers.UNREAD.values() for extension in one.extensions)
"""Extensions of images that are not supported."""
_LINK, _OUT, _NONE = 'broken or circular links', 'links out of the folder', 'without an extension'
_AGAIN = 'links to a folder that another link leads to'
_MOST_FOLDERS = 100  # inside of one another
_SHOWN = 6  # kinds of ignored files in a message


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

  def __init__(self, rules: Rules = OWN) -> None:
    self.ignored: collections.Counter[str] = collections.Counter()
    self._rules, self._base, self._linked = rules, '', set[tuple[int, int]]()

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
      UserError: a folder cannot be read, also while its files are consumed; or `root/prefix` is outside of `root`.
    """
    self._base, start, self._linked = os.path.realpath(root), os.path.join(root, prefix), set()
    user_files.check_inside(start, root, self._rules)
    above = [*pathlib.Path(os.path.realpath(start)).parents,
             *(pathlib.Path(root, one) for one in pathlib.PurePath(prefix).parents)]
    return self._walk(root, prefix, tuple((stat.st_dev, stat.st_ino) for stat in map(os.stat, above)))

  def _walk(self, root: str, prefix: str, above: tuple[tuple[int, int], ...]) -> Iterator[Folder]:
    folder = os.path.join(root, prefix) if prefix else root
    if prefix.count('/') >= _MOST_FOLDERS:
      raise UserError(f'{root}: expected at most {_MOST_FOLDERS} folders inside of one another, got more in '
                      f'{prefix[:80]}…. Move the images up.')
    try:
      stat = os.stat(folder)
    except OSError as error:
      raise failures.unreadable(error, folder) from error
    identity = stat.st_dev, stat.st_ino
    if identity in above:  # a link to a parent folder
      self.ignored[_LINK] += 1
      return
    if os.path.islink(folder) and identity in self._linked:  # links to links could lead to one folder 2^n times
      self.ignored[_AGAIN] += 1
      return
    self._linked |= {identity} if os.path.islink(folder) else set()
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
          if not self._rules.follow_links and entry.is_symlink() and user_files.leads_out(entry.path, self._base):
            self.ignored[_OUT] += 1
          elif is_folder(entry):
            below.append(entry.name)
          elif (size := self._size(entry)) is not None:
            yield os.fsencode(entry.name), size
    except OSError as error:
      raise failures.unreadable(error, folder) from error

  def _size(self, entry: os.DirEntry[str]) -> int | None:
    """Returns the size of an image file in bytes; counts any other file and returns None."""
    extension = os.path.splitext(entry.name)[1].lower()
    try:
      if entry.is_file() and (extension in EXTENSIONS or (self._rules.arrays and extension == ARRAY)):
        return entry.stat().st_size
      is_lost = entry.is_symlink() and not os.path.exists(entry.path)
    except OSError as error:
      if failures.is_temporary(error):  # the image is there
        raise
      is_lost = True
    self.ignored[_LINK if is_lost else extension or _NONE] += 1
    return None


def is_folder(entry: os.DirEntry[str]) -> bool:
  """Returns whether an entry is a folder or a link to one; a link to itself is not."""
  try:
    return entry.is_dir()
  except OSError as error:
    if failures.is_temporary(error):
      raise
    return False


def is_image(entry: os.DirEntry[str]) -> bool:
  """Returns whether an entry is an image file by its extension."""
  return Finder()._size(entry) is not None and not entry.name.startswith('.')


def describe(ignored: Mapping[str, int]) -> str:
  """Returns the ignored files, such as `12 files: .heic (10), .txt (2)`, with advice about images among them; or ''."""
  if not ignored:
    return ''
  kinds = [f'{name} ({count:,})' for name, count in sorted(ignored.items(), key=lambda one: (-one[1], one[0]))]
  num, more = sum(ignored.values()), len(kinds) - _SHOWN
  text = f'{num:,} file{"s" * (num > 1)}: {", ".join(kinds[:_SHOWN])}'
  if more > 0:
    text += f' and {more} more kind{"s" * (more > 1)}'
  if unread := [name for name in UNREAD if name in ignored]:
    text += (f'. {" ".join(unread)} images are not supported. Convert them to JPEG, for example with ImageMagick: '
             "magick mogrify -format jpg '*.heic'")
  if _OUT in ignored:
    text += f'. Links out of the folder are not read; {user_files.FOLLOW} to read them'
  return text


def report(ignored: Mapping[str, int], where: str) -> None:
  """Logs the ignored files below a folder, if there are any."""
  if ignored:
    log.warning('%s: ignored %s', where, describe(ignored))


def check(found: Sequence[object], finder: Finder, where: str) -> None:
  """Raises UserError if no image was found."""
  if not found:
    raise UserError(f'{where}: expected images with the extension {" ".join(EXTENSIONS)} in or below it, got '
                    f'{describe(finder.ignored) or "none"}. Name another folder.')
