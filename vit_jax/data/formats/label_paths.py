"""Finds the image files that a label file names: paths below its folder, also as other systems and programs write them.

A path of a label file that does not exist may have backslashes, no extension, or another Unicode form than the file
system. Such a path names an image if exactly one file fits. As a label file may have millions of lines, `ImagePaths`
checks each folder only once for a link out of the root.

`label_files.py` makes an `ImagePaths` for each label file and calls `find` for each line. If no image of a file is
found, `label_files.py` calls `explain_missing` for the error message.
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
_MAX_FOLDERS = 200  # in which `explain_missing` looks for a missing image
_MAX_SHOWN = 5  # names in a message
_MAX_CACHED_FOLDERS = 5_000  # whose names are kept; lines of a label file may go from folder to folder


class ImageFile(NamedTuple):
  """A file: its path relative to the root, and its size in bytes."""
  path: str
  size: int


class ImagePaths:
  """The image files below the folder `root`. Paths of images and folders are relative to the root."""

  def __init__(self, root: str, rules: Rules) -> None:
    self.root, self.rules = root, rules
    self._real_root = os.path.realpath(root)
    self._is_outside_cached = functools.cache(self._is_outside)
    self._read_names_cached = functools.lru_cache(_MAX_CACHED_FOLDERS)(self._read_names)

  def find(self, image: str) -> ImageFile | str:
    """Returns the file of a path, or why the file is not read: the end of a sentence such as `which does not exist`."""
    if not user_files.is_below(image):
      return 'which is not a path inside of the folder'
    file = self._check_file(image)
    if file != _MISSING:
      return file
    similar = self._find_similar(image.replace('\\', '/'))
    if len(similar) > 1:
      return f'which may be {documents.listed(similar, _MAX_SHOWN)}'
    return self._check_file(similar[0]) if similar and user_files.is_below(similar[0]) else _MISSING

  def explain_missing(self, lines: Sequence[Sequence[str]]) -> str:
    """Returns why images are not found, and what to do, given the cells of their lines; the first cell is the path."""
    other_cells = [cell for cells in lines for cell in cells[1:]]
    if any(user_files.is_below(cell) and isinstance(self._check_file(cell), ImageFile) for cell in other_cells):
      return 'Another cell of these lines is the path of an image. Write the path first.'
    images = [cells[0] for cells in lines]
    if images and all(re.match(r'/|\\|[A-Za-z]:[/\\]', image) for image in images):  # `/a.jpg`, `\a.jpg` or `C:\a.jpg`
      return f'The paths are absolute. Write them relative to {self.root}.'
    folders = self._first_folders()
    base_names = [image.replace('\\', '/').rpartition('/')[2] for image in images]
    for base in filter(None, base_names):
      for folder in folders:
        if names := self._find_names(folder, base) or self._find_names(folder, os.path.splitext(base)[0]):
          return (f'{documents.shown(os.path.join(folder, names[0]))} is there. Write paths relative to {self.root}, '
                  'with the extensions of the files.')
    names = sorted(os.listdir(self.root))
    return f'{self.root} has {documents.listed(names, _MAX_SHOWN)}. Write paths of images relative to this folder.'

  def _check_file(self, image: str) -> ImageFile | str:
    """Returns the file with exactly this path, or why it is not read. Raises TemporaryError if the storage fails."""
    path = os.path.join(self.root, image)
    is_link_outside = False
    try:
      status = os.lstat(path)
      if stat.S_ISLNK(status.st_mode):
        status = os.stat(path)
        is_link_outside = self._is_outside(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):
      return _MISSING
    except OSError as error:
      if failures.is_temporary(error):
        raise failures.unreadable(error, path) from error
      return f'which cannot be read: "{error.strerror or error}"'
    if not stat.S_ISREG(status.st_mode):
      return 'which is not a file'
    if is_link_outside or self._is_outside_cached(os.path.dirname(path)):
      return f'a link out of the folder (to read it, {user_files.FOLLOW})'
    return ImageFile(image, status.st_size)

  def _is_outside(self, path: str) -> bool:
    """Returns whether a path leads out of the root by a link that may not be followed."""
    return not self.rules.follow_links and user_files.leads_out(path, self._real_root)

  def _find_similar(self, image: str) -> list[str]:
    """Returns the paths of existing files that differ from `image` in their Unicode form, or by an extension alone."""
    *folders, base = os.path.normpath(image).split('/')
    path = ''
    for folder in folders:
      names = self._read_names_cached(path).get(classes.composed(folder), [])
      if len(names) != 1:
        return []  # the folder is missing, not clear, or outside of the root
      path = os.path.join(path, names[0])
    return [os.path.join(path, name) for name in self._find_names(path, base)]

  def _find_names(self, folder: str, base: str) -> list[str]:
    """Returns the names in a folder that equal `base` in composed form, or else have `base` as the stem of an image."""
    names_by_key = self._read_names_cached(folder)
    key = classes.composed(base)
    return names_by_key.get(key, []) or names_by_key.get(f'{key}.', [])

  def _read_names(self, folder: str) -> dict[str, list[str]]:
    """Returns the names in a folder by their composed form; `cat.jpg` also by `cat.`, which is no complete name."""
    path = os.path.join(self.root, folder)
    names_by_key = dict[str, list[str]]()
    if self._is_outside(path):
      return names_by_key
    try:
      names = os.listdir(path)
    except OSError:  # then the image is missing, too
      return names_by_key
    for name in names:
      stem, extension = os.path.splitext(name)
      names_by_key.setdefault(classes.composed(name), []).append(name)
      if extension.lower() in user_files.EXTENSIONS:
        names_by_key.setdefault(f'{classes.composed(stem)}.', []).append(name)
    return names_by_key

  def _first_folders(self) -> list[str]:
    """Returns the root, as '', and the folders below it, at most `_MAX_FOLDERS`."""
    folders = []
    for folder, subfolders, _ in os.walk(self.root):
      subfolders[:] = sorted(name for name in subfolders if not name.startswith('.'))
      folders.append('' if folder == self.root else os.path.relpath(folder, self.root))
      if len(folders) == _MAX_FOLDERS:
        break
    return folders
