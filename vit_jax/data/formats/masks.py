"""`masks:PATH` and `masks:tfds:NAME`: images with masks, which give each pixel a class, for semantic segmentation.

A folder has these files, where a mask has the path of its image with another extension:

  PATH/images/[train|val|test/]…/NAME.jpg   the images
  PATH/masks/[train|val|test/]…/NAME.png    their masks; or in `annotations`, as ADE20K has it
  PATH/classes.txt                          optional: the name of a class in each line

Of a dataset prepared by TFDS, the mask is the image feature that is not `image`. `opening.py` calls `opener`. Each
`Record` has the encoded mask; `image/masks.py` decodes it and numbers its classes from `first_class` on.
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
_SPLITS = {'training': 'train', **{name: name for name in splits.NAMES}}
"""Names of folders for splits, and the name of the split."""
_SHOWN = 5  # names in a message


class Known(NamedTuple):
  """The masks of a dataset: the value of the first class (lower ones are ignored), and the names of the classes."""
  first_class: int
  class_names: tuple[str, ...]


KNOWN = {
    'oxford_iiit_pet': Known(1, ('pet', 'background', 'border')),  # trimaps: Parkhi et al. 2012, section 2
    'scene_parse150': Known(1, tuple(f'class {i}' for i in range(1, 151)))}  # ADE20K benchmark: 0 = other
"""TFDS datasets whose description lacks this."""


class Pair(NamedTuple):
  """The paths of an image and of its mask, relative to the root."""
  image: str
  mask: str


class FolderMasks(Rows):
  """Image files below `root`, each with a mask file."""

  first_class = 0

  def __init__(self, root: str, pairs: Sequence[Pair], *, name: str, class_names: tuple[str, ...],
               rules: Rules = OWN) -> None:
    self.name, self.class_names, self._root, self._pairs, self._rules = name, class_names, root, tuple(pairs), rules
    sizes = [(*pair, *(os.path.getsize(os.path.join(root, path)) for path in pair)) for pair in pairs]
    self.digest = hashlib.sha256(repr((sizes, class_names)).encode(errors='surrogateescape')).hexdigest()

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

  def __init__(self, dataset: tfds.Dataset, split: str, *, mask: str) -> None:
    super().__init__(dataset, split, name=f'masks:tfds:{dataset.full_name}/{split}', reading=mask)
    self.first_class, self.class_names = KNOWN.get(dataset.name, Known(0, ()))
    self._mask = mask

  def example(self, row: int) -> Record:
    features = self.features(row)
    return Record(example.get_bytes(features, 'image'), mask=example.get_bytes(features, self._mask))

  def labels(self, row: int) -> tuple[int, ...]:
    return ()

  def describe_mask(self, row: int) -> str:
    """Returns the name of the mask."""
    return f'{self.describe(row)}, {self._mask}'


def opener(where: str, data: schema.Data, image_px: tuple[int, int]) -> Callable[[str], Source]:
  """Returns the function that opens a split of a folder, or of `tfds:NAME[/CONFIG][:VERSION]`.

  `data.label_column` is the TFDS feature with the masks, '' = the only image feature beside `image`; `data.holdout` is
  the fraction held out of a folder without splits. Raises UserError if there is no such dataset, or (when opening) a
  mask is missing.
  """
  del image_px
  rules = Rules.of(data)
  kind, _, name = where.partition(':')
  if kind == 'tfds' and name:
    return _open_tfds(name, data, rules)
  root = user_files.resolve(where, 'masks:PATH')
  if not os.path.isdir(os.path.join(root, 'images')):
    raise UserError(f'{root}: expected {LAYOUT}, got no folder images. Set masks:PATH.')
  folders = _split_folders(os.path.join(root, 'images'))

  @functools.cache
  def open_named(split: str) -> Source:
    if folders:
      name = folders[splits.resolve(split, folders, source=f'masks:{root}')]
      pairs = _list_pairs(root, name, rules, seed=0)
    else:
      name = splits.resolve_part(split, source=f'masks:{root}')
      pairs = _list_pairs(root, '', rules, seed=data.holdout_seed)
      if name != splits.ALL:
        splits.check_holdout(data.holdout)
        num_held = max(1, round(data.holdout * len(pairs)))
        if num_held >= len(pairs):
          raise UserError(f'{root}: expected at least two images, so that data.holdout={data.holdout} leaves some to '
                          f'train on, got {len(pairs)}. Add images, or set data.holdout.')
        pairs = pairs[num_held:] if name == 'train' else pairs[:num_held]
    return FolderMasks(root, pairs, name=f'masks:{root}/{name}', class_names=_class_names(root, rules), rules=rules)
  return open_named


def _split_folders(images: str) -> dict[str, str]:
  """Returns the name of the folder of each split in `images`; {} = none. Raises UserError if a split has two."""
  entries = sorted(name for name in os.listdir(images) if not name.startswith('.'))
  names = [name for name in entries if name.lower() in _SPLITS]
  folders: dict[str, str] = {}
  for split in dict.fromkeys(_SPLITS[name.lower()] for name in names):
    of_split = [name for name in names if _SPLITS[name.lower()] == split]
    if len(of_split) > 1:
      raise UserError(f'{images}: expected one folder for each split, got {documents.listed(of_split, _SHOWN)}. Rename '
                      'one of them.')
    folders[split] = of_split[0]
  if names and (unread := [name for name in entries if name not in names]):
    warn_once(f'{images}: images are those of the folders {documents.listed(names, _SHOWN)}; not read: '
              f'{documents.listed(unread, _SHOWN)}.')
  return folders


def _list_pairs(root: str, split: str, rules: Rules, *, seed: int) -> list[Pair]:
  """Returns the pairs of a split, '' = of the root, in an order by `seed`. Raises UserError if a mask is missing."""
  images = _by_name(root, os.path.join('images', split), user_files.EXTENSIONS, rules)
  folder = next((name for name in MASKS if os.path.isdir(os.path.join(root, name, split))), MASKS[0])
  masks = _by_name(root, os.path.join(folder, split), EXTENSIONS, rules)
  if not images:
    raise UserError(f'{os.path.join(root, "images", split)}: expected images, got none. Expected {LAYOUT}.')
  if missing := [path for name, path in sorted(images.items()) if name not in masks]:
    named = ', '.join(os.path.join(root, path) for path in missing[:_SHOWN])
    more = f' and {len(missing) - _SHOWN:,} more' if len(missing) > _SHOWN else ''
    raise UserError(f'{os.path.join(root, folder, split)}: expected a mask (NAME.png) for every image, got none for '
                    f'{len(missing):,} of {len(images):,}: {named}{more}.')
  if num_unused := len(masks.keys() - images.keys()):
    log.warning('%s: %s masks have no image and are not used.', os.path.join(root, folder, split), f'{num_unused:,}')
  pairs = [Pair(path, masks[name]) for name, path in sorted(images.items())]
  order = splits.scattered((os.fsencode(pair.image) for pair in pairs), len(pairs), seed=seed)
  return [pairs[i] for i in order.tolist()]


def _by_name(root: str, folder: str, extensions: Sequence[str], rules: Rules) -> Mapping[str, str]:
  """Returns the paths of the files in and below `root/folder`, by their paths in `folder` without extension."""
  paths: dict[str, str] = {}
  if not os.path.isdir(os.path.join(root, folder)):
    return paths
  finder = user_files.Finder(rules)
  for path in finder.find(root, folder.rstrip('/')):
    name, extension = os.path.splitext(os.path.relpath(path, folder))
    if extension.lower() in extensions and paths.setdefault(name, path) != path:
      raise UserError(f'{os.path.join(root, folder)}: expected one file of each name, got {paths[name]} and '
                      f'{path}. Remove or rename one of them.')
  user_files.report_ignored(finder.ignored, os.path.join(root, folder))
  return paths


def _class_names(root: str, rules: Rules) -> tuple[str, ...]:
  """Returns the lines of `classes.txt`; () without such a file."""
  path = os.path.join(root, 'classes.txt')
  if not os.path.isfile(path):
    return ()
  user_files.check_inside(path, root, rules)
  return classes.read(path, setting='classes.txt')


def _open_tfds(name: str, data: schema.Data, rules: Rules) -> Callable[[str], Source]:
  """Returns the function that opens a split of a dataset of TFDS; its errors are those of `opener`."""
  folder, column = tfds.find(name, data_dir=data.data_dir), data.label_column

  @functools.cache
  def open_named(split: str) -> Source:
    dataset = tfds.read(folder, rules)
    split = splits.resolve(split, dataset.splits, source=f'masks:tfds:{name}')
    others = [feature for feature in dataset.images if feature != 'image']
    possible = [feature for feature in others if column in ('', feature)]
    if 'image' not in dataset.images or len(possible) != 1:
      raise UserError(f'{folder}: expected the features image and {column or "one other with the mask"}, got '
                      f'{", ".join(dataset.images) or "none"}. Set data.label_column to the feature with the masks.')
    return TfdsMasks(dataset, split, mask=possible[0])
  return open_named
