"""`folder:PATH`: images in one folder per class, `PATH/{train,val,test}/CLASS/...` or `PATH/CLASS/...`.

Images may be in subfolders of their class folder. Links that stay inside of the folder are followed, others if the
rules of the data allow it (`files/user_files.py`); a link to a parent folder is skipped. Files with other extensions
are counted in a line of the log. The order is by a hash of the relative path: it is the same on every file system, and
a slice of a split has all classes.
"""
from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence

import numpy as np

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.data.files import access, image_files, json_fields, listing, user_files
from vit_jax.data.files.user_files import OWN, Rules
from vit_jax.data.source import Record, Source
from vit_jax.data.sources import label_file, splits

LAYOUT = 'PATH/train/CLASS/*.jpg and PATH/test/CLASS/*.jpg, or PATH/CLASS/*.jpg'
_SHOWN = 5  # classes in a message


class FolderSource:
  """Image files below `root`, read on access; their class is their group in the listing."""

  def __init__(self, root: str, files: listing.Selection, *, name: str, class_names: tuple[str, ...],
               title: str = '', rules: Rules = OWN) -> None:
    self.name, self.class_names, self._root, self._files, self.digest = name, class_names, root, files, files.digest
    self.title, self._rules = title, rules

  def __len__(self) -> int:
    return len(self._files)

  def __getitem__(self, index: int) -> Record:
    return Record(user_files.read_image(self.describe(index), self._rules.max_bytes), self.label(index))

  def label(self, index: int) -> int:
    return self._files.listing.group(self._files.row(index))

  def describe(self, index: int) -> str:
    return os.path.join(self._root, os.fsdecode(self._files.listing.path(self._files.row(index))))


def opener(where: str, data: schema.Data, image_px: tuple[int, int]) -> Callable[[str], Source]:
  """Opens the splits of the folder `where`, by its label files if it has some.

  `data.holdout` of each class is held out as `test` if there are no folders for splits.

  Raises:
    UserError: there is no such folder, or (when opening) its layout is wrong.
  """
  if by_file := label_file.opener(where, data, image_px):
    return by_file
  refuse_placeholder(where)
  root = access.resolve(where, 'folder:PATH')
  rules = Rules.of(data)
  if not os.path.isdir(root):
    raise UserError(f'{root}: expected a folder with {LAYOUT}, got no folder. Set --config.data.source=folder:PATH.')
  found = {name.lower(): name for name in _subfolders(root) if name.lower() in splits.NAMES}

  @functools.cache
  def open_named(split: str) -> Source:
    if not found:
      return _open_single(root, split, holdout=data.holdout, seed=data.holdout_seed, rules=rules)
    name = found[splits.resolve(split, found, source=f'folder:{root}')]
    return _open_split(root, name, train=found.get('train', name), rules=rules)
  return open_named


def _open_split(root: str, name: str, *, train: str, rules: Rules) -> Source:
  class_names = _class_names(root, train)
  folder = os.path.join(root, name)
  if extra := sorted(set(_subfolders(folder)) - set(class_names)):
    raise UserError(f'{folder}: expected the classes of {os.path.join(root, train)}, got {len(extra)} others: '
                    f'{json_fields.listed(extra, _SHOWN)}. Use the same class folders in both.')
  found = _list(root, name, class_names, all_filled=name.lower() == 'train', rules=rules)
  files = listing.select(found, 'all', lambda: splits.scattered_paths(found.paths(), len(found), seed=0))
  return FolderSource(root, files, name=f'folder:{root}/{name}', class_names=class_names, rules=rules)


def refuse_placeholder(where: str) -> None:
  """Raises UserError for the folder `PATH`, which configs for own images name, unless there is one."""
  if where == 'PATH' and not os.path.isdir(where):
    raise UserError(f'data.source: expected a folder of images, got the placeholder folder:PATH. Set '
                    f'--config.data.source=folder:PATH, where PATH has {LAYOUT}.')


def _open_single(root: str, split: str, *, holdout: float, seed: int, rules: Rules) -> Source:
  """Opens `train` or `test` of a folder without split folders."""
  if not 0 < holdout < 1:
    raise UserError(f'data.holdout: expected a fraction between 0 and 1, such as 0.1, got {holdout}. '
                    'Set such a fraction.')
  split = splits.resolve_part(split, source=f'folder:{root}')
  class_names = _class_names(root, '')
  found = _list(root, '', class_names, all_filled=True, rules=rules)

  def choose() -> HostArray:
    order = splits.scattered_paths(found.paths(), len(found), seed=seed)
    kept, held = splits.hold_out(found.groups()[order], holdout)
    return order[kept if split == 'train' else held]
  files = listing.select(found, f'{split} {holdout} {seed}', choose)
  if not len(files):
    raise UserError(f'{root}: expected at least two images in some class, so that data.holdout={holdout} leaves images '
                    f'to test on, got {len(found)} images. Add images, or set data.holdout.')
  return FolderSource(root, files, name=f'folder:{root}/{split}', class_names=class_names,
                      title=splits.part_title(f'folder:{root}', split, holdout), rules=rules)


def _class_names(root: str, split: str) -> tuple[str, ...]:
  folder = os.path.join(root, split) if split else root
  if names := _subfolders(folder):
    return tuple(sorted(names))
  images = [e.name for e in os.scandir(folder) if image_files.is_image(e)]
  what = f'{len(images)} images but no class folders' if images else 'no class folders'
  raise UserError(f'{folder}: expected {LAYOUT}, got {what}. Correct the path.')


def _list(root: str, split: str, class_names: Sequence[str], *, all_filled: bool, rules: Rules) -> listing.Listing:
  """Returns the image files of a split; with `all_filled`, an error lists the classes without images."""
  found = listing.open_listing(root, [f'{split}/{name}' if split else name for name in class_names], rules)
  counts = np.bincount(found.groups(), minlength=len(class_names))
  empty = [name for name, count in zip(class_names, counts, strict=True) if not count]
  where, ignored = os.path.join(root, split) if split else root, image_files.describe(found.ignored)
  if not len(found) or (all_filled and empty):
    raise UserError(f'{where}: expected files with the extension {" ".join(image_files.EXTENSIONS)} in each class, got '
                    f'none in {len(empty)} of {len(class_names)} classes: {json_fields.listed(empty, _SHOWN)}.'
                    + (f' Ignored {ignored}.' if ignored else '') + ' Add images, or correct the path.')
  image_files.report(found.ignored, where)
  return found


def _subfolders(folder: str) -> list[str]:
  try:
    with os.scandir(folder) as entries:
      return [e.name for e in entries if not e.name.startswith('.') and image_files.is_folder(e)
              and not (e.is_symlink() and not user_files.leads_out(folder, os.path.realpath(e.path)))]  # to a parent
  except OSError as error:
    raise access.unreadable(error, folder) from error
