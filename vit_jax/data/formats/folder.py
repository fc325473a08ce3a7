"""`folder:PATH`: images in one folder per class, `PATH/{train,val,test}/CLASS/...` or `PATH/CLASS/...`.

`data/opening.py` calls `opener`, which uses three modules in this order: `label_files.py` opens a folder that has label
files; `folder_layout.py` finds out which folders are splits and which are classes; and when a split is opened,
`listing.py` lists its images. Classes are in the order of their names, or of their numbers if all names are numbers.

Images may be in subfolders of their class folder. Links to files inside PATH are followed; other links are followed if
the rules of the data allow it (`data/user_files.py`); a link to a parent folder is skipped. A line of the log counts
the files with other extensions. Images are in the order of a hash of their relative path. So the order is the same on
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
_MAX_SHOWN = 5  # names in a message


class FolderSource(Rows):
  """Image files below `root`, read on access; the class of a file is the number of its class folder.

  doubt: the message why the class folders are probably something else, see `folder_layout.Layout`; '' = no doubt.
  """

  own_files = True

  def __init__(self, root: str, files: listing.Table, order: listing.Table, *, name: str, class_names: tuple[str, ...],
               title: str = '', rules: Rules = OWN, doubt: str = '') -> None:
    """Takes the listing of files below `root`, and the order of the files of this source, see `listing.select`."""
    self.name, self.title, self.class_names, self.doubt = name, title, class_names, doubt
    self.digest = order.notes['digest']
    self._root, self._files, self._order, self._rules = root, files, order, rules

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
  classes of a run that resumes: if the folder has the same classes, they keep that order. Raises UserError if there is
  no such folder, or (when a split is opened) the layout is wrong.
  """
  del image_px
  if open_labeled := label_files.opener(where, data, order=order):
    return open_labeled
  refuse_placeholder(where)
  root = user_files.resolve(where, 'folder:PATH')
  if not os.path.isdir(root):
    raise UserError(f'{root}: expected a folder with {LAYOUT}, got no folder. Set --config.data.source=folder:PATH.')
  layout = folder_layout.find(root)
  doubt = '' if data.classes else layout.doubt
  if unread_tables := label_files.beside(root):
    warn_once(f'{root}: classes are folders{unread_tables}.')
    if not doubt and not layout.splits and len(subfolders(root)) == 1:
      doubt = f'{root}: expected a folder for each of at least two classes, got one{unread_tables}. Name the file so.'
  folder = _Folder(root, layout.splits, data, order, doubt)
  return functools.cache(folder.open_split if layout.splits else folder.open_part)


def refuse_placeholder(where: str) -> None:
  """Raises UserError for the folder `PATH`, a placeholder in the configs of this package, unless it exists."""
  if where == 'PATH' and not os.path.isdir(where):
    raise UserError(f'data.source: expected a folder of images, got the placeholder folder:PATH. Set '
                    f'--config.data.source=folder:PATH, where PATH has {LAYOUT}.')


class _Folder(NamedTuple):
  """A folder of images without label files: `open_split` opens splits, or `open_part` if no folder is a split.

  folder_by_split: the folder of each split, relative to the root.
  order: the classes of a run that resumes.
  doubt: as in `FolderSource`; it replaces the messages of errors about classes.
  """
  root: str
  folder_by_split: Mapping[str, str]
  data: schema.Data
  order: Sequence[str]
  doubt: str

  def open_split(self, split: str) -> Source:
    """Opens a split. The training split, or else the split itself, defines the classes."""
    split = splits.resolve(split, self.folder_by_split, source=f'folder:{self.root}')
    split_folder = self.folder_by_split[split]
    defining_folder = self.folder_by_split.get('train', split_folder)
    class_names = self._read_class_names(defining_folder)
    folder = os.path.join(self.root, split_folder)
    # The keys are composed names, as archives of macOS have names in another form of Unicode.
    name_by_key = {classes.composed(name): name for name in _class_folders(folder)}
    if unknown := sorted(set(name_by_key) - set(map(classes.composed, class_names))):
      raise UserError(self.doubt or f'{folder}: expected the classes of {os.path.join(self.root, defining_folder)}, '
                      f'got {len(unknown)} others: {documents.listed(unknown, _MAX_SHOWN)}. Use the same class folders '
                      'in both.')
    class_folders = [name_by_key.get(classes.composed(name), name) for name in class_names]
    files = self._list_images(split_folder, class_folders, needs_all=split == 'train')
    order = listing.select(files, 'all', lambda: splits.scattered(files.values('path'), len(files), seed=0))
    split_name = split_folder if split_folder.lower() == split else split
    return FolderSource(self.root, files, order, name=f'folder:{self.root}/{split_name}', class_names=class_names,
                        rules=Rules.of(self.data), doubt=self.doubt)

  def open_part(self, split: str) -> Source:
    """Opens `train`, `test` or `all` of a folder without folders for splits."""
    holdout = self.data.holdout
    part = splits.resolve_part(split, source=f'folder:{self.root}')
    if part != splits.ALL:
      splits.check_holdout(holdout)
    class_names = self._read_class_names('')
    files = self._list_images('', class_names, needs_all=True)

    def choose_rows() -> HostArray:
      rows = splits.scattered(files.values('path'), len(files), seed=self.data.holdout_seed)
      if part == splits.ALL:
        return rows
      kept, held = splits.hold_out(files.array('group')[rows], holdout)
      return rows[kept if part == 'train' else held]
    order = listing.select(files, f'{part} {holdout} {self.data.holdout_seed}', choose_rows)
    if not len(order):
      raise UserError(f'{self.root}: expected at least two images in some class, so that data.holdout={holdout} leaves '
                      f'images to test on, got {len(files)} images. Add images, or set data.holdout.')
    return FolderSource(self.root, files, order, name=f'folder:{self.root}/{part}', class_names=class_names,
                        title=splits.part_title(f'folder:{self.root}', part, holdout), rules=Rules.of(self.data),
                        doubt=self.doubt)

  def _read_class_names(self, split_folder: str) -> tuple[str, ...]:
    """Returns the classes by the folders in the folder of a split, '' = in the root; warns about images beside them."""
    folder = os.path.join(self.root, split_folder) if split_folder else self.root
    names = _class_folders(folder)
    num_images = sum(1 for _ in user_files.images_in(folder))
    if names:
      if num_images:
        warn_once(f'{folder}: classes are folders; not read: {num_images:,} images beside them.')
      return classes.ordered(names, self.order)
    got = f'{num_images} images but no class folders' if num_images else 'no class folders'
    others = [name for name in subfolders(self.root) if split_folder and not folder_layout.split_of(name)]
    if others:
      got += f', beside the folders {documents.listed(others, _MAX_SHOWN)}'
    raise UserError(f'{folder}: expected {LAYOUT}, got {got}{label_files.beside(self.root)}. Correct the path.')

  def _list_images(self, split_folder: str, names: Sequence[str], *, needs_all: bool) -> listing.Table:
    """Returns the image files of the class folders `names` in the folder of a split, '' = in the root.

    Logs ignored files. Raises UserError if there is no image; with `needs_all` also if a class folder has no image.
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
                      f'{documents.listed(empty, _MAX_SHOWN)}.'
                      + (f' Ignored {user_files.describe_ignored(ignored)}.' if ignored else '')
                      + ' Add images, or correct the path.')
    user_files.report_ignored(ignored, folder)
    return files


def _class_folders(folder: str) -> list[str]:
  """Returns the names of the folders in a folder. Raises UserError if two differ in their Unicode form alone."""
  names = subfolders(folder)
  counts = collections.Counter(map(classes.composed, names))
  if repeated := [name for name, count in counts.items() if count > 1]:
    raise UserError(f'{folder}: expected one folder for each class, got two whose names differ in their Unicode '
                    f'form alone: {documents.listed(repeated, _MAX_SHOWN)}. Move the images into one of them.')
  return names
