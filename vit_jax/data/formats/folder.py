"""`folder:PATH`: images in one folder per class, `PATH/{train,val,test}/CLASS/...` or `PATH/CLASS/...`.

`data/opening.py` calls `opener`, which uses three modules in this order: `label_files.py` opens a folder that has label
files; `folder_layout.py` finds out which folders are splits and which are classes; and when a split is opened,
`listing.py` lists its images. Classes are in the order of their names, or of their numbers if all names are numbers.

Images may be in subfolders of their class folder. Links to files inside the folder are followed, other links if the
rules of the data allow it (`data/user_files.py`); a link to a parent folder is skipped. Files with other extensions
are counted in a line of the log. Images are in the order of a hash of their relative path. So the order is the same on
every file system, and a slice of a split has all classes.
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
_SHOWN = 5  # names in a message


class FolderSource(Rows):
  """Image files below `root`, read on access; the class of a file is the number of its class folder.

  doubt: as that of `folder_layout.Layout`: why the class folders are probably something else; '' = no doubt.
  """

  own_files = True

  def __init__(self, root: str, files: listing.Table, order: listing.Table, *, name: str, class_names: tuple[str, ...],
               title: str = '', rules: Rules = OWN, doubt: str = '') -> None:
    """Takes the listing of files below `root`, and the order of those of the source, see `listing.select`."""
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
  """Returns the function that opens a split of the folder `where`, by its label files if it has some.

  The fraction `data.holdout` of each class is held out as `test` if there are no folders for splits. `order` has the
  classes of a run that resumes: if the folder has the same ones, they are in this order. Raises UserError if there is
  no such folder, or (when opening) its layout is wrong.
  """
  del image_px
  if labeled := label_files.opener(where, data, order=order):
    return labeled
  refuse_placeholder(where)
  root = user_files.resolve(where, 'folder:PATH')
  if not os.path.isdir(root):
    raise UserError(f'{root}: expected a folder with {LAYOUT}, got no folder. Set --config.data.source=folder:PATH.')
  layout = folder_layout.find(root)
  doubt = '' if data.classes else layout.doubt
  if unread := label_files.beside(root):
    warn_once(f'{root}: classes are folders{unread}.')
    if not doubt and not layout.splits and len(subfolders(root)) == 1:
      doubt = f'{root}: expected a folder for each of at least two classes, got one{unread}. Name the file so.'
  images = _Folder(root, data, order, doubt)
  if not layout.splits:
    return functools.cache(images.open_part)
  return functools.cache(lambda split: images.open_split(
      splits.resolve(split, layout.splits, source=f'folder:{root}'), layout.splits))


def refuse_placeholder(where: str) -> None:
  """Raises UserError for the folder `PATH`, a placeholder in the configs of this package, unless it exists."""
  if where == 'PATH' and not os.path.isdir(where):
    raise UserError(f'data.source: expected a folder of images, got the placeholder folder:PATH. Set '
                    f'--config.data.source=folder:PATH, where PATH has {LAYOUT}.')


class _Folder(NamedTuple):
  """A folder of images without label files, whose splits are opened by `open_split` or `open_part`.

  `order` has the classes of a run that resumes. A `doubt`, as that of `FolderSource`, replaces the messages of errors
  about classes.
  """
  root: str
  data: schema.Data
  order: Sequence[str]
  doubt: str

  def open_split(self, split: str, folders: Mapping[str, str]) -> Source:
    """Opens a split, given the folder of each split. The training split defines the classes."""
    defining, split_folder = folders.get('train', folders[split]), folders[split]
    class_names, folder = self._class_names(defining), os.path.join(self.root, split_folder)
    # By their composed form, as archives of macOS have names in another form of Unicode.
    names = {classes.composed(name): name for name in _class_folders(folder)}
    if extra := sorted(set(names) - set(map(classes.composed, class_names))):
      raise UserError(self.doubt or f'{folder}: expected the classes of {os.path.join(self.root, defining)}, got '
                      f'{len(extra)} others: {documents.listed(extra, _SHOWN)}. Use the same class folders in both.')
    files = self._list(split_folder, [names.get(classes.composed(name), name) for name in class_names],
                       needs_all=split == 'train')
    order = listing.select(files, 'all', lambda: splits.scattered(files.values('path'), len(files), seed=0))
    title = split_folder if split_folder.lower() == split else split
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
      rows = splits.scattered(files.values('path'), len(files), seed=seed)
      if part == splits.ALL:
        return rows
      kept, held = splits.hold_out(files.array('group')[rows], holdout)
      return rows[kept if part == 'train' else held]
    order = listing.select(files, f'{part} {holdout} {seed}', choose)
    if not len(order):
      raise UserError(f'{self.root}: expected at least two images in some class, so that data.holdout={holdout} leaves '
                      f'images to test on, got {len(files)} images. Add images, or set data.holdout.')
    return FolderSource(self.root, files, order, name=f'folder:{self.root}/{part}', class_names=class_names,
                        title=splits.part_title(f'folder:{self.root}', part, holdout), rules=Rules.of(self.data),
                        doubt=self.doubt)

  def _class_names(self, split_folder: str) -> tuple[str, ...]:
    """Returns the classes that have folders in the folder of a split, '' = in the root, in order."""
    folder = os.path.join(self.root, split_folder) if split_folder else self.root
    names, num_images = _class_folders(folder), sum(1 for _ in user_files.images_in(folder))
    if names:
      if num_images:
        warn_once(f'{folder}: classes are folders; not read: {num_images:,} images beside them.')
      return classes.ordered(names, self.order)
    got = f'{num_images} images but no class folders' if num_images else 'no class folders'
    others = [name for name in subfolders(self.root) if split_folder and not folder_layout.split_of(name)]
    if others:
      got += f', beside the folders {documents.listed(others, _SHOWN)}'
    raise UserError(f'{folder}: expected {LAYOUT}, got {got}{label_files.beside(self.root)}. Correct the path.')

  def _list(self, split_folder: str, names: Sequence[str], *, needs_all: bool) -> listing.Table:
    """Returns the image files of the class folders `names` in the folder of a split, '' = in the root.

    Raises UserError if there is no image; with `needs_all` also if some of the class folders have none.
    """
    prefixes = [f'{split_folder}/{name}' if split_folder else name for name in names]
    files = listing.open_listing(self.root, prefixes, Rules.of(self.data))
    counts = np.bincount(files.array('group'), minlength=len(names))
    empty = [name for name, count in zip(names, counts, strict=True) if not count]
    folder = os.path.join(self.root, split_folder) if split_folder else self.root
    ignored = files.notes['ignored']
    if not len(files) or (needs_all and empty):
      raise UserError(self.doubt or f'{folder}: expected files with the extension {" ".join(user_files.EXTENSIONS)} in '
                      f'each class, got none in {len(empty)} of {len(names)} classes: '
                      f'{documents.listed(empty, _SHOWN)}.'
                      + (f' Ignored {user_files.describe_ignored(ignored)}.' if ignored else '')
                      + ' Add images, or correct the path.')
    user_files.report_ignored(ignored, folder)
    return files


def _class_folders(folder: str) -> list[str]:
  """Returns the names of the folders in a folder. Raises UserError if two differ in their Unicode form alone."""
  names = subfolders(folder)
  forms = collections.Counter(map(classes.composed, names))
  if twice := [name for name, count in forms.items() if count > 1]:
    raise UserError(f'{folder}: expected one folder for each class, got two whose names differ in their Unicode '
                    f'form alone: {documents.listed(twice, _SHOWN)}. Move the images into one of them.')
  return names
