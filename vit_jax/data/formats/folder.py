"""`folder:PATH`: images in one folder per class, `PATH/{train,val,test}/CLASS/...` or `PATH/CLASS/...`.

`data/opening.py` calls `opener`, which asks three modules in this order: `label_files.py` opens a folder that has label
files; `folder_layout.py` says which folders are splits and which are classes; and when a split is opened, `listing.py`
lists its images. Classes whose names are all numbers are in the order of these numbers, others in that of their names.

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
from typing import NamedTuple

import numpy as np

from vit_jax.config import schema
from vit_jax.core import documents
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.data import splits, user_files
from vit_jax.data.formats import folder_layout, label_files, listing
from vit_jax.data.formats.folder_layout import subfolders
from vit_jax.data.labels import classes
from vit_jax.data.source import Record, Rows, Source, warn_once
from vit_jax.data.user_files import OWN, Rules

LAYOUT = 'PATH/train/CLASS/*.jpg and PATH/test/CLASS/*.jpg, or PATH/CLASS/*.jpg'
_SHOWN = 5  # classes in a message


class FolderSource(Rows):
  """Image files below `root`, read on access; the class of a file is the number of its class folder.

  doubt: why the class folders are probably something else; '' = nothing says so.
  """

  own_files = True

  def __init__(self, root: str, files: listing.Table, order: listing.Table, *, name: str, class_names: tuple[str, ...],
               title: str = '', rules: Rules = OWN, doubt: str = '') -> None:
    """Takes a listing and an order of its files, see `listing.select`."""
    self.name, self.title, self.class_names, self.digest = name, title, class_names, order.notes['digest']
    self.doubt, self._root, self._files, self._order, self._rules = doubt, root, files, order, rules

  def __len__(self) -> int:
    return len(self._order)

  def example(self, row: int) -> Record:
    return Record(user_files.read_image(self.path(row), self._rules.max_bytes), self.labels(row))

  def labels(self, row: int) -> tuple[int, ...]:
    return (self._files.get('group', self._order.get('row', row)),)

  def path(self, row: int) -> str:
    return os.path.join(self._root, os.fsdecode(self._files.get('path', self._order.get('row', row))))

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
  del image_px
  if by_file := label_files.opener(where, data, order=order):
    return by_file
  refuse_placeholder(where)
  root = user_files.resolve(where, 'folder:PATH')
  if not os.path.isdir(root):
    raise UserError(f'{root}: expected a folder with {LAYOUT}, got no folder. Set --config.data.source=folder:PATH.')
  layout = folder_layout.find(root)
  doubt = '' if data.classes else layout.doubt
  if unread := label_files.beside(root):
    warn_once(f'{root}: classes are folders{unread}.')
    if not layout.splits and len(subfolders(root)) == 1:
      doubt = doubt or f'{root}: expected a folder for each of at least two classes, got one{unread}. Name the file so.'
  images = _Folder(root, data, order, doubt)
  if not layout.splits:
    return functools.cache(images.open_part)
  return functools.cache(lambda split: images.open_split(
      splits.resolve(split, layout.splits, source=f'folder:{root}'), layout.splits))


def refuse_placeholder(where: str) -> None:
  """Raises UserError for the folder `PATH`, which configs for own images name, unless there is one."""
  if where == 'PATH' and not os.path.isdir(where):
    raise UserError(f'data.source: expected a folder of images, got the placeholder folder:PATH. Set '
                    f'--config.data.source=folder:PATH, where PATH has {LAYOUT}.')


class _Folder(NamedTuple):
  """A folder of images without label files, the splits of which are opened.

  root: its path.
  data: the settings.
  order: the classes of a run that resumes.
  doubt: as that of `FolderSource`; stands in place of other messages about classes.
  """
  root: str
  data: schema.Data
  order: Sequence[str]
  doubt: str

  def open_split(self, split: str, folders: Mapping[str, str]) -> Source:
    """Opens a split that has a folder; `folders` has that of each split. The training split defines the classes."""
    defining, name = folders.get('train', folders[split]), folders[split]
    class_names, folder = self._class_names(defining), os.path.join(self.root, name)
    names = {classes.composed(one): one for one in _distinct(folder)}  # macOS archives have other forms of Unicode
    extra = sorted(set(names) - set(map(classes.composed, class_names)))
    if extra:
      raise UserError(self.doubt or f'{folder}: expected the classes of {os.path.join(self.root, defining)}, got '
                      f'{len(extra)} others: {documents.listed(extra, _SHOWN)}. Use the same class folders in both.')
    files = self._list(name, [names.get(classes.composed(one), one) for one in class_names],
                       needs_all=split == 'train')
    order = listing.select(files, 'all', lambda: splits.scattered(files.values('path'), len(files), seed=0))
    title = name if name.lower() == split else split
    return FolderSource(self.root, files, order, name=f'folder:{self.root}/{title}', class_names=class_names,
                        rules=Rules.of(self.data), doubt=self.doubt)

  def open_part(self, split: str) -> Source:
    """Opens `train`, `test` or `all` of a folder without folders for splits."""
    holdout, seed = self.data.holdout, self.data.holdout_seed
    part = splits.resolve_part(split, source=f'folder:{self.root}')
    if part != splits.ALL:
      splits.check_holdout(holdout)
    class_names = self._class_names('')
    files = self._list('', class_names, needs_all=True)

    def choose() -> HostArray:
      mixed = splits.scattered(files.values('path'), len(files), seed=seed)
      if part == splits.ALL:
        return mixed
      kept, held = splits.hold_out(files.array('group')[mixed], holdout)
      return mixed[kept if part == 'train' else held]
    order = listing.select(files, f'{part} {holdout} {seed}', choose)
    if not len(order):
      raise UserError(f'{self.root}: expected at least two images in some class, so that data.holdout={holdout} leaves '
                      f'images to test on, got {len(files)} images. Add images, or set data.holdout.')
    return FolderSource(self.root, files, order, name=f'folder:{self.root}/{part}', class_names=class_names,
                        title=splits.part_title(f'folder:{self.root}', part, holdout), rules=Rules.of(self.data),
                        doubt=self.doubt)

  def _class_names(self, split: str) -> tuple[str, ...]:
    """Returns the classes that the folder of a split has, in order; '' = those of the root."""
    folder = os.path.join(self.root, split) if split else self.root
    names, num_images = _distinct(folder), sum(1 for _ in user_files.images_in(folder))
    if names:
      if num_images:
        warn_once(f'{folder}: classes are folders; not read: {num_images:,} images beside them.')
      return classes.ordered(names, self.order)
    what = f'{num_images} images but no class folders' if num_images else 'no class folders'
    others = [name for name in subfolders(self.root) if split and not folder_layout.split_of(name)]
    if others:
      what += f', beside the folders {documents.listed(others, _SHOWN)}'
    raise UserError(f'{folder}: expected {LAYOUT}, got {what}{label_files.beside(self.root)}. Correct the path.')

  def _list(self, split: str, folders: Sequence[str], *, needs_all: bool) -> listing.Table:
    """Returns the image files of class folders of a split.

    Raises:
      UserError: there is no image, or with `needs_all` none in some of the folders, which the message lists.
    """
    files = listing.open_listing(self.root, [f'{split}/{name}' if split else name for name in folders],
                                 Rules.of(self.data))
    counts = np.bincount(files.array('group'), minlength=len(folders))
    empty = [name for name, count in zip(folders, counts, strict=True) if not count]
    where, ignored = os.path.join(self.root, split) if split else self.root, files.notes['ignored']
    if not len(files) or (needs_all and empty):
      raise UserError(self.doubt or f'{where}: expected files with the extension {" ".join(user_files.EXTENSIONS)} in '
                      f'each class, got none in {len(empty)} of {len(folders)} classes: '
                      f'{documents.listed(empty, _SHOWN)}.'
                      + (f' Ignored {user_files.describe_ignored(ignored)}.' if ignored else '')
                      + ' Add images, or correct the path.')
    user_files.report_ignored(ignored, where)
    return files


def _distinct(folder: str) -> list[str]:
  """Returns the folders in a folder. Raises UserError if the names of two differ in their Unicode form alone."""
  forms = collections.Counter(map(classes.composed, names := subfolders(folder)))
  if twice := [name for name, count in forms.items() if count > 1]:
    raise UserError(f'{folder}: expected one folder for each class, got two whose names differ in their Unicode '
                    f'form alone: {documents.listed(twice, _SHOWN)}. Move the images into one of them.')
  return names
