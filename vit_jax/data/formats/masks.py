"""`masks:PATH` and `masks:tfds:NAME`: images with masks, which give each pixel a class, for semantic segmentation.

A folder has these files, where a mask has the path of its image with another extension:

  PATH/images/[train|val|test/]…/NAME.jpg   the images
  PATH/masks/[train|val|test/]…/NAME.png    their masks; or in `annotations`, as ADE20K has it
  PATH/classes.txt                          optional: the name of a class in each line

In a dataset prepared by TFDS, the image feature that is not `image` has the masks. `opening.py` calls `opener`. Each
`Record` has an encoded mask; `image/masks.py` decodes the mask and numbers its classes from `first_class` on.
"""
from __future__ import annotations

import functools
import hashlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from vit_jax.config import schema
from vit_jax.core import documents
from vit_jax.core.errors import UserError
from vit_jax.data import splits, user_files
from vit_jax.data.formats import example, tfds
from vit_jax.data.image.headers import BadImage
from vit_jax.data.image.masks import EXTENSIONS, BadMask
from vit_jax.data.labels import classes
from vit_jax.data.source import Record, Rows, Source, warn_once
from vit_jax.data.user_files import OWN, Rules

log = logging.getLogger('vit_jax.data')

LAYOUT = 'PATH/images/train/NAME.jpg with PATH/masks/train/NAME.png, or PATH/images/NAME.jpg with PATH/masks/NAME.png'
MASKS = ('masks', 'annotations')
_SPLIT_BY_FOLDER = {'training': 'train', **{name: name for name in splits.NAMES}}
"""The split that each name of a folder stands for."""
_MAX_SHOWN = 5  # names in a message


class MaskClasses(NamedTuple):
  """The classes in masks: the value of the first class (lower values are ignored), and the names of the classes."""
  first_class: int
  class_names: tuple[str, ...]


CLASSES_BY_DATASET = {
    'oxford_iiit_pet': MaskClasses(1, ('pet', 'background', 'border')),  # trimaps: Parkhi et al. 2012, section 2
    'scene_parse150': MaskClasses(1, tuple(f'class {i}' for i in range(1, 151)))}  # ADE20K benchmark: 0 = other
"""The TFDS datasets whose description lacks the classes."""


class Pair(NamedTuple):
  """The paths of an image and of its mask, relative to the root."""
  image: str
  mask: str


class FolderMasks(Rows):
  """Image files below `root`, each with a mask file."""

  first_class = 0

  def __init__(self, root: str, pairs: Sequence[Pair], *, name: str, class_names: tuple[str, ...],
               rules: Rules = OWN) -> None:
    self.name, self.class_names = name, class_names
    self._root, self._rules = root, rules
    self._pairs = tuple(pairs)
    paths_and_sizes = [(*pair, *(os.path.getsize(os.path.join(root, path)) for path in pair)) for pair in pairs]
    self.digest = hashlib.sha256(repr((paths_and_sizes, class_names)).encode(errors='surrogateescape')).hexdigest()

  def __len__(self) -> int:
    return len(self._pairs)

  def example(self, row: int) -> Record:
    image = user_files.read_image(self.path(row), self._rules.max_bytes)
    try:
      return Record(image, mask=user_files.read_image(self.describe_mask(row), self._rules.max_bytes))
    except BadImage as error:
      raise BadMask(f'expected a mask, got one that is not read: {error}') from error

  def labels(self, row: int) -> tuple[int, ...]:
    return ()

  def path(self, row: int) -> str:
    return os.path.join(self._root, self._pairs[row].image)

  def describe(self, row: int) -> str:
    return self.path(row)

  def describe_mask(self, row: int) -> str:
    """Returns the path of the mask."""
    return os.path.join(self._root, self._pairs[row].mask)


class TfdsMasks(tfds.Stored):
  """A split of a dataset prepared by TFDS with images and masks."""

  def __init__(self, dataset: tfds.Dataset, split: str, *, mask_feature: str) -> None:
    super().__init__(dataset, split, name=f'masks:tfds:{dataset.full_name}/{split}', reading=mask_feature)
    self.first_class, self.class_names = CLASSES_BY_DATASET.get(dataset.name, MaskClasses(0, ()))
    self._mask_feature = mask_feature

  def example(self, row: int) -> Record:
    features = self.features(row)
    return Record(example.get_bytes(features, 'image'), mask=example.get_bytes(features, self._mask_feature))

  def labels(self, row: int) -> tuple[int, ...]:
    return ()

  def describe_mask(self, row: int) -> str:
    """Returns the name of the mask."""
    return f'{self.describe(row)}, {self._mask_feature}'


def opener(where: str, data: schema.Data, image_px: tuple[int, int]) -> Callable[[str], Source]:
  """Returns the function that opens a split of a folder, or of `tfds:NAME[/CONFIG][:VERSION]`.

  `data.label_column` is the TFDS feature with the masks, '' = the only image feature beside `image`; `data.holdout` is
  the fraction held out of a folder without splits. Raises UserError if there is no such dataset, or (when opening) a
  mask is missing.
  """
  del image_px
  rules = Rules.of(data)
  dataset_name = where.removeprefix('tfds:')
  if dataset_name not in ('', where):
    return _tfds_opener(dataset_name, data, rules)
  root = user_files.resolve(where, 'masks:PATH')
  if not os.path.isdir(os.path.join(root, 'images')):
    raise UserError(f'{root}: expected {LAYOUT}, got no folder images. Set masks:PATH.')
  folder_by_split = _find_split_folders(os.path.join(root, 'images'))

  @functools.cache
  def open_named(split: str) -> Source:
    if folder_by_split:
      part = folder_by_split[splits.resolve(split, folder_by_split, source=f'masks:{root}')]
      pairs = _list_pairs(root, part, rules, seed=0)
    else:
      part = splits.resolve_part(split, source=f'masks:{root}')
      pairs = _list_pairs(root, '', rules, seed=data.holdout_seed)
      if part != splits.ALL:
        splits.check_holdout(data.holdout)
        num_test = max(1, round(data.holdout * len(pairs)))
        if num_test >= len(pairs):
          raise UserError(f'{root}: expected at least two images, so that data.holdout={data.holdout} leaves some to '
                          f'train on, got {len(pairs)}. Add images, or set data.holdout.')
        pairs = pairs[num_test:] if part == 'train' else pairs[:num_test]
    return FolderMasks(root, pairs, name=f'masks:{root}/{part}', class_names=_read_classes(root, rules), rules=rules)
  return open_named


def _find_split_folders(images: str) -> dict[str, str]:
  """Returns the folder of each split in `images`; warns about the others. Raises UserError if a split has two."""
  entries = sorted(name for name in os.listdir(images) if not name.startswith('.'))
  names = [name for name in entries if name.lower() in _SPLIT_BY_FOLDER]
  folder_by_split = dict[str, str]()
  for name in names:
    of_split = [other for other in names if _SPLIT_BY_FOLDER[other.lower()] == _SPLIT_BY_FOLDER[name.lower()]]
    if len(of_split) > 1:
      raise UserError(f'{images}: expected one folder for each split, got {documents.listed(of_split, _MAX_SHOWN)}. '
                      'Rename one of them.')
    folder_by_split[_SPLIT_BY_FOLDER[name.lower()]] = name
  if names and (unread := [name for name in entries if name not in names]):
    warn_once(f'{images}: images are those of the folders {documents.listed(names, _MAX_SHOWN)}; not read: '
              f'{documents.listed(unread, _MAX_SHOWN)}.')
  return folder_by_split


def _list_pairs(root: str, split: str, rules: Rules, *, seed: int) -> list[Pair]:
  """Returns the pairs of a split, '' = all, in an order by `seed`. Raises UserError if a mask is missing."""
  image_by_name = _list_files(root, os.path.join('images', split), user_files.EXTENSIONS, rules)
  masks_folder = next((name for name in MASKS if os.path.isdir(os.path.join(root, name, split))), MASKS[0])
  mask_by_name = _list_files(root, os.path.join(masks_folder, split), EXTENSIONS, rules)
  if not image_by_name:
    raise UserError(f'{os.path.join(root, "images", split)}: expected images, got none. Expected {LAYOUT}.')
  if missing := [os.path.join(root, path) for name, path in sorted(image_by_name.items()) if name not in mask_by_name]:
    raise UserError(f'{os.path.join(root, masks_folder, split)}: expected a mask (NAME.png) for every image, got none '
                    f'for {len(missing):,} of {len(image_by_name):,}: {documents.joined(missing, _MAX_SHOWN)}.')
  if num_unused := len(mask_by_name.keys() - image_by_name.keys()):
    log.warning('%s: %s masks have no image and are not used.', os.path.join(root, masks_folder, split),
                f'{num_unused:,}')
  pairs = [Pair(image, mask_by_name[name]) for name, image in sorted(image_by_name.items())]
  order = splits.scattered((os.fsencode(pair.image) for pair in pairs), len(pairs), seed=seed)
  return [pairs[i] for i in order.tolist()]


def _list_files(root: str, folder: str, extensions: Sequence[str], rules: Rules) -> Mapping[str, str]:
  """Returns the path of each file in and below `root/folder`, by the path in `folder` without extension."""
  path_by_name = dict[str, str]()
  if not os.path.isdir(os.path.join(root, folder)):
    return path_by_name
  finder = user_files.Finder(rules)
  for path in finder.find(root, folder.rstrip('/')):
    name, extension = os.path.splitext(os.path.relpath(path, folder))
    if extension.lower() in extensions and path_by_name.setdefault(name, path) != path:
      raise UserError(f'{os.path.join(root, folder)}: expected one file of each name, got {path_by_name[name]} and '
                      f'{path}. Remove or rename one of them.')
  user_files.report_ignored(finder.ignored, os.path.join(root, folder))
  return path_by_name


def _read_classes(root: str, rules: Rules) -> tuple[str, ...]:
  """Returns the lines of `classes.txt`; () if there is no such file."""
  path = os.path.join(root, 'classes.txt')
  if not os.path.isfile(path):
    return ()
  user_files.check_inside(path, root, rules)
  return classes.read(path, setting='classes.txt')


def _tfds_opener(name: str, data: schema.Data, rules: Rules) -> Callable[[str], Source]:
  """Returns the function that opens a split of a dataset of TFDS. Raises UserError as `opener`."""
  folder = tfds.find(name, data_dir=data.data_dir)

  @functools.cache
  def open_named(split: str) -> Source:
    dataset = tfds.read(folder, rules)
    split = splits.resolve(split, dataset.splits, source=f'masks:tfds:{name}')
    wanted = data.label_column or 'one other with the mask'
    possible = [feature for feature in dataset.images if feature != 'image' and data.label_column in ('', feature)]
    if 'image' not in dataset.images or len(possible) != 1:
      raise UserError(f'{folder}: expected the features image and {wanted}, got {", ".join(dataset.images) or "none"}. '
                      'Set data.label_column to the feature with the masks.')
    return TfdsMasks(dataset, split, mask_feature=possible[0])
  return open_named
