"""`folder:PATH`: images in one folder per class, `PATH/{train,val,test}/CLASS/...` or `PATH/CLASS/...`.

Images may be in subfolders of their class folder, also behind symbolic links; a link to a parent folder is skipped.
Files with other extensions are counted in a line of the log. The order is by a hash of the relative path: it is the
same on every file system, and a slice of a split has all classes.
"""
from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.core.errors import UserError
from vit_jax.data.files import access, image_files
from vit_jax.data.source import Record, Source
from vit_jax.data.sources import splits

SPLIT_NAMES = ('train', 'val', 'valid', 'validation', 'test')
LAYOUT = 'PATH/train/CLASS/*.jpg and PATH/test/CLASS/*.jpg, or PATH/CLASS/*.jpg'


class File(NamedTuple):
  """An image file: path relative to the dataset's folder, with forward slashes; size in bytes; class."""
  path: str
  size: int
  label: int


class FolderSource:
  """Image files below `root`, read on access."""

  def __init__(self, root: str, files: Sequence[File], *, name: str, class_names: tuple[str, ...]) -> None:
    self.name, self.class_names, self._root = name, class_names, root
    encoded = [os.fsencode(f.path) for f in files]
    # One block of bytes: a million Python strings would pickle slowly to a loader process.
    self._paths, self._ends = b''.join(encoded), np.cumsum([0] + [len(p) for p in encoded])
    self._labels = np.array([f.label for f in files], np.int32)
    lines = [b'%s %d %d' % (p, f.size, f.label) for p, f in zip(encoded, files, strict=True)]
    self.digest = hashlib.sha256(b'\n'.join(lines)).hexdigest()

  def __len__(self) -> int:
    return len(self._labels)

  def __getitem__(self, index: int) -> Record:
    with open(self.describe(index), 'rb') as f:
      return Record(f.read(), int(self._labels[index]))

  def label(self, index: int) -> int:
    return int(self._labels[index])

  def describe(self, index: int) -> str:
    return os.path.join(self._root, os.fsdecode(self._paths[self._ends[index]:self._ends[index + 1]]))


def opener(root: str, *, holdout: float, seed: int) -> Callable[[str], Source]:
  """Returns what opens a split of the folder `root`.

  Args:
    root: the folder; `~` is the home directory.
    holdout: fraction of each class held out as `test` if there are no folders for splits.
    seed: selects the held-out examples.

  Raises:
    UserError: there is no such folder, or (when opening) its layout is wrong.
  """
  given, root = root, access.resolve(root, 'folder:PATH')
  if given == 'PATH' and not os.path.isdir(root):
    raise UserError(f'data.source: expected a folder of images, got the placeholder folder:PATH. Set '
                    f'--config.data.source=folder:PATH, where PATH has {LAYOUT}.')
  if not os.path.isdir(root):
    raise UserError(f'{root}: expected a folder with {LAYOUT}, got no folder. Set --config.data.source=folder:PATH.')
  found = {name.lower(): name for name in _subfolders(root) if name.lower() in SPLIT_NAMES}

  @functools.cache
  def open_named(split: str) -> Source:
    if not found:
      return _open_single(root, split, holdout=holdout, seed=seed)
    name = found[splits.resolve(split, found, source=f'folder:{root}')]
    return _open_split(root, name, train=found.get('train', name))
  return open_named


def _open_split(root: str, name: str, *, train: str) -> Source:
  class_names = _class_names(root, train)
  folder = os.path.join(root, name)
  if extra := sorted(set(_subfolders(folder)) - set(class_names)):
    raise UserError(f'{folder}: expected the classes of {os.path.join(root, train)}, got {len(extra)} others: '
                    f'{_listed(extra)}. Use the same class folders in both.')
  files = _scan(root, name, class_names, all_filled=name.lower() == 'train')
  order = splits.scattered([f.path for f in files], seed=0)
  return FolderSource(root, [files[i] for i in order], name=f'folder:{root}/{name}', class_names=class_names)


def _open_single(root: str, split: str, *, holdout: float, seed: int) -> Source:
  """Opens `train` or `test` of a folder without split folders."""
  if not 0 < holdout < 1:
    raise UserError(f'data.holdout: expected a fraction between 0 and 1, such as 0.1, got {holdout}.')
  name = 'test' if split in splits.SYNONYMS else split
  split = splits.resolve(name, ('train', 'test'), source=f'folder:{root}')
  class_names = _class_names(root, '')
  files = _scan(root, '', class_names, all_filled=True)
  files = [files[i] for i in splits.scattered([f.path for f in files], seed=seed)]
  kept, held = splits.hold_out(np.array([f.label for f in files]), holdout)
  rows = kept if split == 'train' else held
  if not len(rows):
    raise UserError(f'{root}: expected at least two images in some class, so that data.holdout={holdout} leaves images '
                    f'to test on, got {len(files)} images.')
  return FolderSource(root, [files[i] for i in rows], name=f'folder:{root}/{split}', class_names=class_names)


def _class_names(root: str, split: str) -> tuple[str, ...]:
  folder = os.path.join(root, split) if split else root
  if names := _subfolders(folder):
    return tuple(sorted(names))
  images = [e.name for e in os.scandir(folder) if image_files.is_image(e)]
  what = f'{len(images)} images but no class folders' if images else 'no class folders'
  raise UserError(f'{folder}: expected {LAYOUT}, got {what}.')


def _scan(root: str, split: str, class_names: Sequence[str], *, all_filled: bool) -> list[File]:
  """Returns the image files of a split; with `all_filled`, an error lists the classes without images."""
  files: list[File] = []
  empty: list[str] = []
  finder = image_files.Finder()
  for label, name in enumerate(class_names):
    prefix = f'{split}/{name}' if split else name
    below = list(finder.find(root, prefix)) if os.path.isdir(os.path.join(root, prefix)) else []
    files += [File(path, size, label) for path, size in below]
    empty += [] if below else [name]
  where, ignored = os.path.join(root, split), image_files.describe(finder.ignored)
  if not files or (all_filled and empty):
    raise UserError(f'{where}: expected files with the extension {" ".join(image_files.EXTENSIONS)} in each class, got '
                    f'none in {len(empty)} of {len(class_names)} classes: {_listed(empty)}.'
                    + (f' Ignored {ignored}.' if ignored else ''))
  image_files.report(finder.ignored, where)
  return files


def _subfolders(folder: str) -> list[str]:
  try:
    with os.scandir(folder) as entries:
      return [e.name for e in entries if not e.name.startswith('.') and image_files.is_folder(e)]
  except OSError as error:
    raise access.user_error(error, folder) from error


def _listed(names: Sequence[str]) -> str:
  return ', '.join(names[:20]) + (f' and {len(names) - 20} more' if len(names) > 20 else '')
