"""`vtab:TASK`: the 19 tasks of the Visual Task Adaptation Benchmark (VTAB-1k, arXiv 1910.04867), from TFDS datasets.

A task is a TFDS dataset, its training, validation and test parts, and a function from the features of an example to its
class. Parts and functions are those of the authors' code (github.com/google-research/task_adaptation). The splits are

  train val trainval test             all examples
  train800 val200 train800val200      the first 800 and 200 of train and val; results are measured on all of test

Records are read in the order of the files, without TensorFlow. Their features are flat lists: `n` positions `[n, 3]` in
the sequence `objects` are the feature `objects/location` with `3 n` numbers.

`data/opening.py` calls `opener` with the name of a task. For each split, `find_ranges` says which examples of which
TFDS splits it has, and a `VtabSource` reads each of them. `TASKS` and `DATASETS` are the published definitions as data.
"""
from __future__ import annotations

import functools
import math
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.config import schema
from vit_jax.core import globs
from vit_jax.core.errors import UserError
from vit_jax.data import splits
from vit_jax.data.formats import example, tfds
from vit_jax.data.formats.example import Values
from vit_jax.data.image import decode
from vit_jax.data.source import Part, Parts, Record, Source
from vit_jax.data.user_files import OWN, Rules
from vit_jax.recipes import vtab

NUM_TRAIN, NUM_VAL = 800, 200
SPLITS = ('train', 'val', 'trainval', 'test', 'train800', 'val200', 'train800val200')
Features = Mapping[str, Values]

CLEVR_EDGES = (0., 8., 8.5, 9., 9.5, 10., 100.)  # depth of the nearest object; task_adaptation, data/clevr.py
CLEVR_FEWEST = 3                                 # objects in an image; likewise
KITTI_EDGES = (-100., 8., 20., 999.)             # m, nearest vehicle; task_adaptation, data/kitti.py
KITTI_NONE = 1000.                               # m, if there is none; likewise
NUM_VEHICLES = 3                                 # first types of KITTI: Car, Van, Truck


class Slice(NamedTuple):
  """A slice of a TFDS split, in percent."""
  split: str
  start: int
  stop: int


class Definition(NamedTuple):
  """A dataset: its parts `train`, `val` and `test`, and what to download by hand if TFDS cannot download it."""
  parts: Mapping[str, Slice]
  manual: str = ''

  @property
  def tfds_splits(self) -> list[str]:
    """The TFDS splits that the parts are slices of."""
    return list(dict.fromkeys(part.split for part in self.parts.values()))


class Task(NamedTuple):
  """A task.

  dataset: the TFDS dataset, with its configuration.
  read_class: returns the class of an example, given its features; raises BadRecord, KeyError or ValueError and the
    like if they are wrong.
  label_feature: the feature with the same classes as the task, if there is one.
  pixel_factor: stored pixels are multiplied by it; 255 for dSprites, whose pixels are 0 and 1.
  """
  name: str
  group: str
  dataset: str
  num_classes: int
  read_class: Callable[[Features], int]
  label_feature: str = ''
  pixel_factor: int = 1


def merge_classes(features: Features, name: str, *, num_stored: int, num_classes: int) -> int:
  """Returns the class of one of `num_stored` ordered values that are divided into `num_classes` equal parts."""
  return example.get_class(features, name, num_classes=num_stored) * num_classes // num_stored


def count_objects(features: Features) -> int:
  """Returns the number of objects of CLEVR, 3 to 10, as a class from 0."""
  return len(features['objects/size']) - CLEVR_FEWEST


def bin_nearest_object(features: Features) -> int:
  """Returns the bin of the depth of the nearest object of CLEVR."""
  depth = np.reshape(np.asarray(features['objects/pixel_coords'], np.float32), (-1, 3))[:, 2]
  return find_bin(float(depth.min()), CLEVR_EDGES)


def bin_nearest_vehicle(features: Features) -> int:
  """Returns the bin of the distance along the road of the nearest car, van or truck of KITTI.

  It is the last bin if there is none.
  """
  types = np.asarray(features['objects/type'], np.int64)
  distance_m = np.reshape(np.asarray(features['objects/location'], np.float32), (-1, 3))[:, 2]
  return find_bin(float(np.min(distance_m[types < NUM_VEHICLES], initial=KITTI_NONE)), KITTI_EDGES)


def find_bin(value: float, edges: Sequence[float]) -> int:
  """Returns the last bin whose lower edge is below the value: bin i is (edges[i], edges[i + 1]]."""
  if math.isnan(value):
    raise ValueError('not a number')
  return int(np.searchsorted(edges, value, side='left')) - 1


def _split_train(percent: int, test: str = 'test') -> Mapping[str, Slice]:
  """Returns the parts: the first `percent` of the split train, the rest of it as val, and all of the split `test`."""
  return {'train': Slice('train', 0, percent), 'val': Slice('train', percent, 100), 'test': Slice(test, 0, 100)}


_NATIVE = {'train': Slice('train', 0, 100), 'val': Slice('validation', 0, 100), 'test': Slice('test', 0, 100)}
_SPLIT_60_20_20 = {'train': Slice('train', 0, 60), 'val': Slice('train', 60, 80), 'test': Slice('train', 80, 100)}
_SPLIT_80_10_10 = {'train': Slice('train', 0, 80), 'val': Slice('train', 80, 90), 'test': Slice('train', 90, 100)}
_HALF_OF_TEST = {'train': Slice('train', 0, 100), 'val': Slice('test', 0, 50), 'test': Slice('test', 50, 100)}

_RETINOPATHY = 'diabetic_retinopathy_detection/btgraham-300'
DATASETS: dict[str, Definition] = {
    'caltech101': Definition(_split_train(90)),
    'cifar100': Definition(_split_train(90)),
    'dtd': Definition(_NATIVE),
    'oxford_flowers102': Definition(_NATIVE),
    'oxford_iiit_pet': Definition(_split_train(80)),
    'sun397/tfds': Definition(_NATIVE),
    'svhn_cropped': Definition(_split_train(90)),
    'patch_camelyon': Definition(_NATIVE),
    'eurosat/rgb': Definition(_SPLIT_60_20_20),
    'resisc45': Definition(
        _SPLIT_60_20_20,
        'download NWPU-RESISC45.rar manually (https://1drv.ms/u/s!AmgKYzARBl5ca3HNaHIlzp_IXjs) and unpack it'),
    _RETINOPATHY: Definition(
        _NATIVE, 'download train, test, sample, trainLabels.csv and sampleSubmission.csv manually '
        '(https://www.kaggle.com/c/diabetic-retinopathy-detection/data) and unpack them'),
    'clevr': Definition(_split_train(90, 'validation')),
    'dmlab': Definition(_NATIVE),
    'kitti': Definition(_NATIVE),
    'dsprites': Definition(_SPLIT_80_10_10),
    'smallnorb': Definition(_HALF_OF_TEST),
}


def _task(name: str, dataset: str, feature: str = 'label', *, num_stored: int = 0,
          read_class: Callable[[Features], int] | None = None) -> Task:
  """Returns a task, whose class is that of a feature by default.

  With `num_stored`, it is merged from that many classes of the feature, as in dSprites. With `read_class`, it is
  computed by this function.
  """
  group, num_classes = vtab.TASKS[name]
  if read_class:
    return Task(name, group, dataset, num_classes, read_class)
  if num_stored:
    merge = functools.partial(merge_classes, name=feature, num_stored=num_stored, num_classes=num_classes)
    return Task(name, group, dataset, num_classes, merge, pixel_factor=255)
  return Task(name, group, dataset, num_classes,
              functools.partial(example.get_class, name=feature, num_classes=num_classes), feature)


TASKS: dict[str, Task] = {task.name: task for task in (
    _task('caltech101', 'caltech101'),
    _task('cifar100', 'cifar100'),
    _task('dtd', 'dtd'),
    _task('flowers102', 'oxford_flowers102'),
    _task('pets', 'oxford_iiit_pet'),
    _task('sun397', 'sun397/tfds'),
    _task('svhn', 'svhn_cropped'),
    _task('patch_camelyon', 'patch_camelyon'),
    _task('eurosat', 'eurosat/rgb'),
    _task('resisc45', 'resisc45'),
    _task('retinopathy', _RETINOPATHY),
    _task('clevr/count', 'clevr', read_class=count_objects),
    _task('clevr/distance', 'clevr', read_class=bin_nearest_object),
    _task('dmlab', 'dmlab'),
    _task('kitti/distance', 'kitti', read_class=bin_nearest_vehicle),
    _task('dsprites/x_position', 'dsprites', 'label_x_position', num_stored=32),
    _task('dsprites/orientation', 'dsprites', 'label_orientation', num_stored=40),
    _task('smallnorb/azimuth', 'smallnorb', 'label_azimuth'),
    _task('smallnorb/elevation', 'smallnorb', 'label_elevation'),
)}


class VtabSource(tfds.Stored):
  """A complete TFDS split with the classes of a task."""

  def __init__(self, dataset: tfds.Dataset, split: str, *, task: Task, rules: Rules = OWN) -> None:
    super().__init__(dataset, split, name=f'vtab:{task.name}/{split}', reading=task.name)
    self._task = task
    names = dataset.class_names(task.label_feature, rules) if task.label_feature in dataset.features else ()
    if names and len(names) != task.num_classes:
      raise UserError(f'{dataset.full_name}: expected {task.num_classes} classes, as VTAB has in {task.name}, got '
                      f'{len(names)}. Prepare the dataset again, in the version that VTAB names.')
    self.class_names = names or tuple(f'{task.name} {i}' for i in range(task.num_classes))

  def example(self, row: int) -> Record:
    features = self.features(row)
    encoded = example.get_bytes(features, 'image')
    factor = self._task.pixel_factor
    image = encoded if factor == 1 else decode.decode(encoded) * np.uint8(factor)
    return Record(image, (self._read_class(features),))

  def labels(self, row: int) -> tuple[int, ...]:
    return (self._read_class(self.features(row)),)

  def _read_class(self, features: Features) -> int:
    """Returns the class of an example. Raises BadRecord if its features are damaged."""
    try:
      label = self._task.read_class(features)
    except example.BadRecord:
      raise
    except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
      raise example.BadRecord(f'the record: expected the features of {self._task.dataset}, got '
                              f'{", ".join(sorted(features)) or "none"}') from error
    if not 0 <= label < self._task.num_classes:
      raise example.BadRecord(f'the record: expected a class of {self._task.name} from 0 to '
                              f'{self._task.num_classes - 1}, got {label}')
    return label


def opener(where: str, data: schema.Data, image_px: tuple[int, int]) -> Callable[[str], Source]:
  """Returns the function that opens a split of a task such as `clevr/count`, whose dataset is in `data.data_dir`.

  Raises:
    UserError: there is no such task, or its dataset is not prepared; then with install instructions.
  """
  del image_px  # images have the stored size
  task, rules = find(where), Rules.of(data)
  definition, folder = DATASETS[task.dataset], _find_dataset(task, data.data_dir)

  @functools.cache
  def open_complete(split: str) -> VtabSource:  # of TFDS
    dataset = tfds.read(folder, rules)
    split = splits.resolve(split, dataset.splits, source=f'tfds:{task.dataset}')
    return VtabSource(dataset, split, task=task, rules=rules)

  def open_named(split: str) -> Source:  # of VTAB
    split = splits.resolve(split, SPLITS, source=f'vtab:{where}')
    counts = {name: len(open_complete(name)) for name in definition.tfds_splits}
    return Parts([Part(open_complete(name), rows) for name, rows in find_ranges(definition, counts, split=split)],
                 name=f'vtab:{where}/{split}')
  return open_named


def _find_dataset(task: Task, data_dir: str) -> str:
  """Returns the directory of the dataset of a task. Raises UserError with install instructions if it is missing."""
  try:
    return tfds.find(task.dataset, data_dir=data_dir)
  except tfds.NotPrepared:
    data_dir = tfds.data_folder(data_dir)
    steps = f'python -m vit_jax.data.formats.tfds_build {task.dataset} {shlex.quote(data_dir)}'
    if manual := DATASETS[task.dataset].manual:
      steps = f'{manual} into {os.path.join(data_dir, "downloads", "manual")}; then {steps}'
    raise UserError(
        f'VTAB task {task.name}: tfds:{task.dataset} is not prepared in {data_dir}. To prepare it (TFDS needs the '
        f'package tensorflow for this, reading does not): {steps}') from None


def find(name: str) -> Task:
  """Returns the task of a name; raises UserError if there is none."""
  if name not in TASKS:
    raise UserError(f'VTAB task: expected one of {", ".join(TASKS)}, got {name!r}.{globs.nearest(name, TASKS)}')
  return TASKS[name]


def find_ranges(definition: Definition, counts: Mapping[str, int], *, split: str) -> list[tuple[str, range]]:
  """Returns the TFDS splits that make up a split of VTAB, each with the examples that belong to it.

  Args:
    definition: of the dataset.
    counts: number of examples of each of its TFDS splits.
    split: one of `SPLITS`.

  Raises:
    UserError: there are fewer examples than 800 and 200.
  """
  joined: dict[str, dict[str, int | None]] = {  # how many of the first examples of each part a split has; None = all
      'trainval': {'train': None, 'val': None}, 'train800': {'train': NUM_TRAIN}, 'val200': {'val': NUM_VAL},
      'train800val200': {'train': NUM_TRAIN, 'val': NUM_VAL}}
  ranges = []
  for name, limit in joined.get(split, {split: None}).items():
    part = definition.parts[name]
    count = counts[part.split]
    rows = range(part.start * count // 100, part.stop * count // 100)
    if limit is not None and limit > len(rows):
      raise UserError(f'{split}: expected {limit} examples of {name}, got {len(rows)}. Prepare the complete dataset.')
    ranges.append((part.split, rows[:limit]))
  return ranges
