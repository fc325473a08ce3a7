"""`vtab:TASK`: the 19 tasks of the Visual Task Adaptation Benchmark (VTAB-1k, arXiv 1910.04867), from TFDS datasets.

A task is a TFDS dataset, its training, validation and test parts, and a function that maps the features of an example
to its class. Parts and functions are those of the authors' code (github.com/google-research/task_adaptation). The
splits of a task are

  train val trainval test             all examples of the parts
  train800 val200 train800val200      the first 800 of train and 200 of val; results are measured on all of test

Records are read in the order of the files, without TensorFlow. Their features are flat lists: `n` positions `[n, 3]` in
the sequence `objects` are the feature `objects/location` with `3 n` numbers.

`data/opening.py` calls `opener` with the name of a task. For a split of the task, `find_ranges` returns the TFDS splits
and their examples that belong to the split, and a `VtabSource` reads each TFDS split. `TASKS` and `DATASETS` are the
published definitions as data.
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

CLEVR_EDGES = (0., 8., 8.5, 9., 9.5, 10., 100.)  # of the depth of the nearest object; task_adaptation, data/clevr.py
CLEVR_MIN_OBJECTS = 3                            # in an image; task_adaptation, data/clevr.py
KITTI_EDGES_M = (-100., 8., 20., 999.)           # of the distance of a vehicle; task_adaptation, data/kitti.py
KITTI_NO_VEHICLE_M = 1000.                       # distance if there is no vehicle; task_adaptation, data/kitti.py
NUM_VEHICLE_TYPES = 3                            # the first types of objects of KITTI: Car, Van and Truck


class Slice(NamedTuple):
  """A part of a TFDS split, from `start` to `stop` percent of its examples."""
  split: str
  start: int
  stop: int


class Definition(NamedTuple):
  """The parts `train`, `val` and `test` of a dataset, and the steps to download it if TFDS cannot ('' = TFDS can)."""
  parts: Mapping[str, Slice]
  manual_steps: str = ''

  @property
  def tfds_splits(self) -> list[str]:
    """The TFDS splits that the parts are slices of."""
    return list(dict.fromkeys(part.split for part in self.parts.values()))


class Task(NamedTuple):
  """A task.

  name, group: such as `clevr/count` and `structured`.
  dataset: the TFDS dataset, with its configuration.
  read_class: returns the class of an example, given its features. If the features are wrong, it may raise BadRecord,
    KeyError, IndexError, TypeError, ValueError or OverflowError.
  label_feature: the feature with the same classes as the task; '' = there is none.
  pixel_factor: the factor by which stored pixels are multiplied: 255 for dSprites, whose pixels are 0 and 1.
  """
  name: str
  group: str
  dataset: str
  num_classes: int
  read_class: Callable[[Features], int]
  label_feature: str = ''
  pixel_factor: int = 1


def merge_classes(features: Features, name: str, *, num_stored: int, num_classes: int) -> int:
  """Returns the class of an example, for which neighbors of the `num_stored` classes in the feature are merged."""
  return example.get_class(features, name, num_classes=num_stored) * num_classes // num_stored


def count_objects(features: Features) -> int:
  """Returns the number of objects of CLEVR, 3 to 10, as a class from 0."""
  return len(features['objects/size']) - CLEVR_MIN_OBJECTS


def bin_nearest_object(features: Features) -> int:
  """Returns the bin of the depth of the nearest object of CLEVR."""
  depth = np.reshape(np.asarray(features['objects/pixel_coords'], np.float32), (-1, 3))[:, 2]
  return find_bin(float(depth.min()), CLEVR_EDGES)


def bin_nearest_vehicle(features: Features) -> int:
  """Returns the bin of the distance along the road of the nearest car, van or truck of KITTI; the last bin for none."""
  types = np.asarray(features['objects/type'], np.int64)
  distances_m = np.reshape(np.asarray(features['objects/location'], np.float32), (-1, 3))[:, 2]
  nearest_m = np.min(distances_m[types < NUM_VEHICLE_TYPES], initial=KITTI_NO_VEHICLE_M)
  return find_bin(float(nearest_m), KITTI_EDGES_M)


def find_bin(value: float, edges: Sequence[float]) -> int:
  """Returns the bin of a value: bin i has the values in (edges[i], edges[i + 1]]. Raises ValueError for NaN."""
  if math.isnan(value):
    raise ValueError('not a number')
  return int(np.searchsorted(edges, value, side='left')) - 1


def _split_train(percent: int, test: str = 'test') -> Mapping[str, Slice]:
  """Returns the parts: the first `percent` of the TFDS split train, its other examples as val, and all of `test`."""
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
  """Returns a task of the recipe `vtab.TASKS`. By default, its classes are the classes of `feature`.

  With `num_stored`, the classes are merged from the `num_stored` classes of the feature, as in dSprites. With
  `read_class`, this function computes the class.
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
  """All examples of a TFDS split, with the classes of a task."""

  def __init__(self, dataset: tfds.Dataset, split: str, *, task: Task, rules: Rules = OWN) -> None:
    super().__init__(dataset, split, name=f'vtab:{task.name}/{split}', reading=task.name)
    self._task = task
    has_names = task.label_feature in dataset.features
    names = dataset.class_names(task.label_feature, rules) if has_names else ()
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

  Raises UserError if there is no such task, or its dataset is not prepared; the message then says how to prepare it.
  """
  del image_px  # images have the stored size
  task, rules = find(where), Rules.of(data)
  definition, folder = DATASETS[task.dataset], _find_dataset(task, data.data_dir)

  @functools.cache
  def open_tfds_split(tfds_split: str) -> VtabSource:
    dataset = tfds.read(folder, rules)
    tfds_split = splits.resolve(tfds_split, dataset.splits, source=f'tfds:{task.dataset}')
    return VtabSource(dataset, tfds_split, task=task, rules=rules)

  def open_split(split: str) -> Source:
    split = splits.resolve(split, SPLITS, source=f'vtab:{where}')
    counts = {tfds_split: len(open_tfds_split(tfds_split)) for tfds_split in definition.tfds_splits}
    ranges = find_ranges(definition, counts, split=split)
    return Parts([Part(open_tfds_split(tfds_split), rows) for tfds_split, rows in ranges],
                 name=f'vtab:{where}/{split}')
  return open_split


def _find_dataset(task: Task, data_dir: str) -> str:
  """Returns the folder of the dataset of a task. Raises UserError, which says how to prepare it, if it is missing."""
  try:
    return tfds.find(task.dataset, data_dir=data_dir)
  except tfds.NotPrepared:
    data_dir = tfds.data_folder(data_dir)
    steps = f'python -m vit_jax.data.formats.tfds_build {task.dataset} {shlex.quote(data_dir)}'
    if manual_steps := DATASETS[task.dataset].manual_steps:
      steps = f'{manual_steps} into {os.path.join(data_dir, "downloads", "manual")}; then {steps}'
    raise UserError(
        f'VTAB task {task.name}: tfds:{task.dataset} is not prepared in {data_dir}. To prepare it (TFDS needs the '
        f'package tensorflow for this, reading does not): {steps}') from None


def find(name: str) -> Task:
  """Returns the task of a name. Raises UserError if there is no such task."""
  if name not in TASKS:
    raise UserError(f'VTAB task: expected one of {", ".join(TASKS)}, got {name!r}.{globs.nearest(name, TASKS)}')
  return TASKS[name]


def find_ranges(definition: Definition, counts: Mapping[str, int], *, split: str) -> list[tuple[str, range]]:
  """Returns the TFDS splits that have the examples of a VTAB split, each with the rows of these examples.

  `counts` has the number of examples of each TFDS split of the dataset, and `split` is one of `SPLITS`. Raises
  UserError if a part has fewer than the 800 or 200 examples of the split.
  """
  limits_by_split: dict[str, dict[str, int | None]] = {  # the first examples of each part; None = all examples
      'trainval': {'train': None, 'val': None}, 'train800': {'train': NUM_TRAIN}, 'val200': {'val': NUM_VAL},
      'train800val200': {'train': NUM_TRAIN, 'val': NUM_VAL}}
  limit_by_part = limits_by_split.get(split, {split: None})  # the splits train, val and test are parts
  ranges = []
  for name, limit in limit_by_part.items():
    part = definition.parts[name]
    count = counts[part.split]
    rows = range(part.start * count // 100, part.stop * count // 100)
    if limit is not None and limit > len(rows):
      raise UserError(f'{split}: expected {limit} examples of {name}, got {len(rows)}. Prepare the complete dataset.')
    ranges.append((part.split, rows[:limit]))
  return ranges
