"""`folder:PATH`: images in one folder per class, `PATH/{train,val,test}/CLASS/...` or `PATH/CLASS/...`.

Which folders are splits and which are classes says `folder_layout.py`. Classes whose names are all numbers are in the
order of these numbers, others in that of their names.

Images may be in subfolders of their class folder. Links that stay inside of the folder are followed, others if the
rules of the data allow it (`data/user_files.py`); a link to a parent folder is skipped. Files with other extensions
are counted in a line of the log. The order is by a hash of the relative path: it is the same on every file system, and
a slice of a split has all classes.
"""
from __future__ import annotations

import collections
import functools
import os
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from vit_jax.config import schema
from vit_jax.core import documents
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.data import splits, user_files
from vit_jax.data.formats import folder_layout, label_files, listing
from vit_jax.data.formats.folder_layout import subfolders
from vit_jax.data.labels import classes
from vit_jax.data.source import Record, Rows, Source
from vit_jax.data.user_files import OWN, Rules

LAYOUT = 'PATH/train/CLASS/*.jpg and PATH/test/CLASS/*.jpg, or PATH/CLASS/*.jpg'
_SHOWN = 5  # classes in a message


class FolderSource(Rows):
  """Image files below `root`, read on access; their class is their group in the listing."""

  own_files = True

  def __init__(self, root: str, files: listing.Selection, *, name: str, class_names: tuple[str, ...],
               title: str = '', rules: Rules = OWN, doubt: str = '') -> None:
    self.name, self.class_names, self._root, self._files, self.digest = name, class_names, root, files, files.digest
    self.title, self._rules, self.doubt = title, rules, doubt

  def __len__(self) -> int:
    return len(self._files)

  def example(self, row: int) -> Record:
    return Record(user_files.read_image(self.describe(row), self._rules.max_bytes), self.labels(row))

  def labels(self, row: int) -> tuple[int, ...]:
    return (self._files.group(row),)

  def path(self, row: int) -> str:
    return os.path.join(self._root, os.fsdecode(self._files.path(row)))

  def describe(self, row: int) -> str:
    return self.path(row)


def opener(where: str, data: schema.Data, image_px: tuple[int, int], *,
           order: Sequence[str] = ()) -> Callable[[str], Source]:
  """Opens the splits of the folder `where`, by its label files if it has some.

  `data.holdout` of each class is held out as `test` if there are no folders for splits. `order` has the classes of a
  run that resumes: if the folder has the same ones, they are in this order.

  Raises:
    UserError: there is no such folder, or (when opening) its layout is wrong.
  """
  if by_file := label_files.opener(where, data, order=order):
    return by_file
  refuse_placeholder(where)
  root = user_files.resolve(where, 'folder:PATH')
  rules = Rules.of(data)
  if not os.path.isdir(root):
    raise UserError(f'{root}: expected a folder with {LAYOUT}, got no folder. Set --config.data.source=folder:PATH.')
  found = folder_layout.find(root)
  doubt = '' if data.classes else found.doubt
  if unread := label_files.beside(root):
    folder_layout.say(f'{root}: classes are folders{unread}.')
    if not found.splits and len(subfolders(root)) == 1:
      doubt = doubt or f'{root}: expected a folder for each of at least two classes, got one{unread}. Name the file so.'

  @functools.cache
  def open_named(split: str) -> Source:
    if not found.splits:
      return _open_single(root, split, holdout=data.holdout, seed=data.holdout_seed, order=order, rules=rules,
                          doubt=doubt)
    resolved = splits.resolve(split, found.splits, source=f'folder:{root}')
    return _open_split(root, resolved, found.splits, order=order, rules=rules, doubt=doubt)
  return open_named


def _open_split(root: str, split: str, found: Mapping[str, str], *, order: Sequence[str], rules: Rules,
                doubt: str) -> Source:
  train, name = found.get('train', found[split]), found[split]
  class_names, folder = _class_names(root, train, order), os.path.join(root, name)
  own = {classes.composed(one): one for one in subfolders(folder)}  # archives of macOS have other forms of Unicode
  extra = sorted(set(own) - set(map(classes.composed, class_names)))
  if extra and doubt:
    raise UserError(doubt)
  if extra:
    raise UserError(f'{folder}: expected the classes of {os.path.join(root, train)}, got {len(extra)} others: '
                    f'{documents.listed(extra, _SHOWN)}. Use the same class folders in both.')
  folders = [own.get(classes.composed(one), one) for one in class_names]
  listed = _list(root, name, folders, all_filled=split == 'train', rules=rules, doubt=doubt)
  files = listing.select(listed, 'all', lambda: splits.scattered(listed.values('path'), len(listed), seed=0))
  title = name if name.lower() == split else split
  return FolderSource(root, files, name=f'folder:{root}/{title}', class_names=class_names, rules=rules, doubt=doubt)


def refuse_placeholder(where: str) -> None:
  """Raises UserError for the folder `PATH`, which configs for own images name, unless there is one."""
  if where == 'PATH' and not os.path.isdir(where):
    raise UserError(f'data.source: expected a folder of images, got the placeholder folder:PATH. Set '
                    f'--config.data.source=folder:PATH, where PATH has {LAYOUT}.')


def _open_single(root: str, split: str, *, holdout: float, seed: int, order: Sequence[str], rules: Rules,
                 doubt: str) -> Source:
  """Opens `train`, `test` or `all` of a folder without split folders."""
  if not 0 < holdout < 1:
    raise UserError(f'data.holdout: expected a fraction between 0 and 1, such as 0.1, got {holdout}. '
                    'Set such a fraction.')
  split = splits.resolve_part(split, source=f'folder:{root}')
  class_names = _class_names(root, '', order)
  found = _list(root, '', class_names, all_filled=True, rules=rules, doubt=doubt)

  def choose() -> HostArray:
    order = splits.scattered(found.values('path'), len(found), seed=seed)
    if split == splits.ALL:
      return order
    kept, held = splits.hold_out(found.array('group')[order], holdout)
    return order[kept if split == 'train' else held]
  files = listing.select(found, f'{split} {holdout} {seed}', choose)
  if not len(files):
    raise UserError(f'{root}: expected at least two images in some class, so that data.holdout={holdout} leaves images '
                    f'to test on, got {len(found)} images. Add images, or set data.holdout.')
  return FolderSource(root, files, name=f'folder:{root}/{split}', class_names=class_names,
                      title=splits.part_title(f'folder:{root}', split, holdout), rules=rules, doubt=doubt)


def _class_names(root: str, split: str, order: Sequence[str]) -> tuple[str, ...]:
  folder = os.path.join(root, split) if split else root
  if names := subfolders(folder):
    forms = collections.Counter(map(classes.composed, names))
    if twice := [name for name, count in forms.items() if count > 1]:
      raise UserError(f'{folder}: expected one folder for each class, got two whose names differ in their Unicode form '
                      f'alone: {documents.listed(twice, _SHOWN)}. Move the images into one of them.')
    if loose := sum(1 for _ in user_files.images_in(folder)):
      folder_layout.say(f'{folder}: classes are folders; not read: {loose:,} images beside them.')
    return classes.ordered(names, order)
  num_images = sum(1 for _ in user_files.images_in(folder))
  what = f'{num_images} images but no class folders' if num_images else 'no class folders'
  others = [name for name in subfolders(root) if split and not folder_layout.is_split(name)]
  if others:
    what += f', beside the folders {documents.listed(others, _SHOWN)}'
  raise UserError(f'{folder}: expected {LAYOUT}, got {what}{label_files.beside(root)}. Correct the path.')


def _list(root: str, split: str, class_names: Sequence[str], *, all_filled: bool, rules: Rules,
          doubt: str) -> listing.Table:
  """Returns the image files of a split; with `all_filled`, an error lists the classes without images, or is `doubt`."""
  found = listing.open_listing(root, [f'{split}/{name}' if split else name for name in class_names], rules)
  counts = np.bincount(found.array('group'), minlength=len(class_names))
  empty = [name for name, count in zip(class_names, counts, strict=True) if not count]
  where, ignored = os.path.join(root, split) if split else root, user_files.describe_ignored(found.notes['ignored'])
  if not len(found) or (all_filled and empty):
    if doubt:
      raise UserError(doubt)
    raise UserError(f'{where}: expected files with the extension {" ".join(user_files.EXTENSIONS)} in each class, got '
                    f'none in {len(empty)} of {len(class_names)} classes: {documents.listed(empty, _SHOWN)}.'
                    + (f' Ignored {ignored}.' if ignored else '') + ' Add images, or correct the path.')
  user_files.report_ignored(found.notes['ignored'], where)
  return found
