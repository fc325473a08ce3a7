"""The images that a label file names: paths below its folder, as other systems and programs write them, too.

A path that is not there may have backslashes, no extension, or another Unicode form than the file system. It is an
image if exactly one file fits. Links are resolved once for each folder, as a list may have millions of files.
"""
from __future__ import annotations

import functools
import os
import re
import stat
from collections.abc import Sequence
from typing import NamedTuple

from vit_jax.core import documents, failures
from vit_jax.data import user_files
from vit_jax.data.labels import classes
from vit_jax.data.user_files import Rules

_MISSING = 'which does not exist'
_MOST_FOLDERS = 200  # in which a missing image is looked for
_SHOWN = 5


class Found(NamedTuple):
  """A file: path relative to the folder, size in bytes."""
  path: str
  size: int


class Inside:
  """The files below a folder."""

  def __init__(self, root: str, rules: Rules) -> None:
    self.root, self.rules, self._base = root, rules, os.path.realpath(root)
    self._leads_out: dict[str, bool] = {}
    self._names = functools.lru_cache(64)(self._read_names)

  def find(self, image: str) -> Found | str:
    """Returns the file that a path names, or why it is not read."""
    if not user_files.is_below(image):
      return 'which is not a path inside of the folder'
    size = self._size(image)
    if size != _MISSING:
      return size if isinstance(size, str) else Found(image, size)
    fitting = self._fitting(image.replace('\\', '/')) if '\0' not in image else []
    if len(fitting) > 1:
      return f'which may be {documents.listed(fitting, _SHOWN)}'
    path = fitting[0] if fitting else ''
    if not path or not user_files.is_below(path) or isinstance(size := self._size(path), str):
      return size if path else _MISSING
    return Found(path, size)

  def cause(self, missing: Sequence[Sequence[str]]) -> str:
    """Returns why none of some listed images is found, and what to do; `missing` has the cells of their lines."""
    if any(not isinstance(self.find(cell), str) for _, *cells in missing for cell in cells):
      return 'Another cell of these lines is the path of an image. Write the path first.'
    images = [cells[0] for cells in missing]
    if images and all(re.match(r'/|\\|[A-Za-z]:[/\\]', image) for image in images):
      return f'The paths are absolute. Write them relative to {self.root}.'
    for image in images:
      base = image.replace('\\', '/').rpartition('/')[2]
      for folder in self._folders() if base else ():
        found = next(iter(self._named(folder, base) or self._named(folder, os.path.splitext(base)[0])), '')
        if found:
          return (f'{documents.shown(os.path.join(folder, found))} is there. Write paths relative to {self.root}, '
                  'with the extensions of the files.')
    there = sorted(os.listdir(self.root))
    return f'{self.root} has {documents.listed(there, _SHOWN)}. Write paths of images relative to this folder.'

  def _size(self, image: str) -> int | str:
    """Returns the size of a file in bytes, or why it is not read."""
    path, is_outside = os.path.join(self.root, image), False
    try:
      found = os.lstat(path)
      if stat.S_ISLNK(found.st_mode):
        is_outside = not self.rules.follow_links and user_files.leads_out(path, self._base)
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):
      return _MISSING
    except OSError as error:
      if failures.is_temporary(error):
        raise failures.unreadable(error, path) from error
      return f'which cannot be read: "{error.strerror or error}"'
    if not stat.S_ISREG(found.st_mode):
      return 'which is not a file'
    folder = os.path.dirname(path)
    if folder not in self._leads_out:
      self._leads_out[folder] = not self.rules.follow_links and user_files.leads_out(folder, self._base)
    if is_outside or self._leads_out[folder]:
      return f'a link out of the folder (to read it, {user_files.FOLLOW})'
    return found.st_size

  def _fitting(self, image: str) -> list[str]:
    """Returns the paths that fit one whose names are in another form; none if a folder leads out of the root."""
    *folders, base = os.path.normpath(image).split('/')
    path = ''
    for name in folders:
      found = self._names(path).get(classes.composed(name), [])
      if len(found) != 1:
        return []
      path = os.path.join(path, found[0])
    return [os.path.join(path, name) for name in self._named(path, base)]

  def _named(self, folder: str, base: str) -> list[str]:
    """Returns the files in a folder with a name, or with this name and the extension of an image."""
    names, name = self._names(folder), classes.composed(base)
    return names.get(name, []) or names.get(f'{name}.', [])

  def _read_names(self, folder: str) -> dict[str, list[str]]:
    """Returns the names in a folder by their composed form, and those of images also without extension, but its dot."""
    path, found = os.path.join(self.root, folder), dict[str, list[str]]()
    if not self.rules.follow_links and user_files.leads_out(path, self._base):
      return found
    try:
      names = os.listdir(path)
    except OSError:  # the path that was listed is missing, too
      return found
    for name in names:
      stem, extension = os.path.splitext(name)
      found.setdefault(classes.composed(name), []).append(name)
      if extension.lower() in user_files.EXTENSIONS:
        found.setdefault(f'{classes.composed(stem)}.', []).append(name)
    return found

  def _folders(self) -> list[str]:
    """Returns the first folders below the root, relative to it, and the root itself, as ''."""
    found = []
    for folder, below, _ in os.walk(self.root):
      below[:] = sorted(name for name in below if not name.startswith('.'))
      found.append(os.path.relpath(folder, self.root).removeprefix('.').lstrip('/'))
      if len(found) == _MOST_FOLDERS:
        break
    return found
