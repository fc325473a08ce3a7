"""Finds the image files that a label file names: paths below its folder, as other systems and programs write them, too.

A path that does not exist may have backslashes, no extension, or another Unicode form than the file system. It is the
path of an image if exactly one file fits. Whether a folder is a link out of the root is found once for each folder, as
a label file may have millions of lines.

`label_files.py` makes an `ImagePaths` for each label file and calls `find` for each line. If no image of a file is
found, it calls `explain_missing` for the error message.
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
_MOST_FOLDERS = 200  # in which `explain_missing` looks for a missing image
_SHOWN = 5  # names in a message


class ImageFile(NamedTuple):
  """A file: its path relative to the root, and its size in bytes."""
  path: str
  size: int


class ImagePaths:
  """The image files below the folder `root`. Paths of images and folders are relative to it."""

  def __init__(self, root: str, rules: Rules) -> None:
    self.root, self.rules, self._real_root = root, rules, os.path.realpath(root)
    self._is_folder_outside = functools.cache(self._is_outside)
    self._names = functools.lru_cache(64)(self._read_names)

  def find(self, image: str) -> ImageFile | str:
    """Returns the file of a path, or the reason why it is not read: the end of a sentence, `which does not exist`."""
    if not user_files.is_below(image):
      return 'which is not a path inside of the folder'
    path, size = image, self._size(image)
    if size == _MISSING:
      fitting = self._fitting(image.replace('\\', '/'))
      if len(fitting) > 1:
        return f'which may be {documents.listed(fitting, _SHOWN)}'
      if not fitting or not user_files.is_below(fitting[0]):
        return _MISSING
      path, size = fitting[0], self._size(fitting[0])
    return size if isinstance(size, str) else ImageFile(path, size)

  def explain_missing(self, lines: Sequence[Sequence[str]]) -> str:
    """Returns why images are not found, and what to do, given the cells of their lines; the first is a path."""
    other_cells = [cell for cells in lines for cell in cells[1:]]
    if any(isinstance(self.find(cell), ImageFile) for cell in other_cells):
      return 'Another cell of these lines is the path of an image. Write the path first.'
    images = [cells[0] for cells in lines]
    if images and all(re.match(r'/|\\|[A-Za-z]:[/\\]', image) for image in images):  # `/a.jpg`, `\a.jpg` or `C:\a.jpg`
      return f'The paths are absolute. Write them relative to {self.root}.'
    for image in images:
      base = image.replace('\\', '/').rpartition('/')[2]
      for folder in self._first_folders() if base else ():
        if names := self._named(folder, base) or self._named(folder, os.path.splitext(base)[0]):
          return (f'{documents.shown(os.path.join(folder, names[0]))} is there. Write paths relative to {self.root}, '
                  'with the extensions of the files.')
    names = sorted(os.listdir(self.root))
    return f'{self.root} has {documents.listed(names, _SHOWN)}. Write paths of images relative to this folder.'

  def _size(self, image: str) -> int | str:
    """Returns the size of a file in bytes, or the reason why it is not read."""
    path, is_link_outside = os.path.join(self.root, image), False
    try:
      status = os.lstat(path)
      if stat.S_ISLNK(status.st_mode):
        status, is_link_outside = os.stat(path), self._is_outside(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):
      return _MISSING
    except OSError as error:
      if failures.is_temporary(error):
        raise failures.unreadable(error, path) from error
      return f'which cannot be read: "{error.strerror or error}"'
    if not stat.S_ISREG(status.st_mode):
      return 'which is not a file'
    if is_link_outside or self._is_folder_outside(os.path.dirname(path)):
      return f'a link out of the folder (to read it, {user_files.FOLLOW})'
    return status.st_size

  def _is_outside(self, path: str) -> bool:
    """Returns whether a path leads out of the root by a link that may not be followed."""
    return not self.rules.follow_links and user_files.leads_out(path, self._real_root)

  def _fitting(self, image: str) -> list[str]:
    """Returns the paths of files that `image` may mean, which lacks its extension or has another Unicode form."""
    *folders, base = os.path.normpath(image).split('/')
    path = ''
    for folder in folders:
      names = self._names(path).get(classes.composed(folder), [])
      if len(names) != 1:
        return []  # missing, not clear, or outside of the root
      path = os.path.join(path, names[0])
    return [os.path.join(path, name) for name in self._named(path, base)]

  def _named(self, folder: str, base: str) -> list[str]:
    """Returns the names in a folder that are `base`, or else `base` and the extension of an image."""
    names, name = self._names(folder), classes.composed(base)
    return names.get(name, []) or names.get(f'{name}.', [])

  def _read_names(self, folder: str) -> dict[str, list[str]]:
    """Returns the names in a folder by their composed form; `cat.jpg` also by `cat.`, its stem and a dot."""
    path, by_form = os.path.join(self.root, folder), dict[str, list[str]]()
    if self._is_outside(path):
      return by_form
    try:
      names = os.listdir(path)
    except OSError:  # then the image is missing, too
      return by_form
    for name in names:
      stem, extension = os.path.splitext(name)
      by_form.setdefault(classes.composed(name), []).append(name)
      if extension.lower() in user_files.EXTENSIONS:
        by_form.setdefault(f'{classes.composed(stem)}.', []).append(name)
    return by_form

  def _first_folders(self) -> list[str]:
    """Returns the root, as '', and the folders below it, at most `_MOST_FOLDERS`."""
    folders = []
    for folder, subfolders, _ in os.walk(self.root):
      subfolders[:] = sorted(name for name in subfolders if not name.startswith('.'))
      folders.append(os.path.relpath(folder, self.root).removeprefix('.').lstrip('/'))
      if len(folders) == _MOST_FOLDERS:
        break
    return folders
