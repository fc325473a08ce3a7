"""`vtab:TASK`: the 19 tasks of the Visual Task Adaptation Benchmark (VTAB-1k, arXiv 1910.04867), from TFDS datasets.

A task is a TFDS dataset, its training, validation and test parts, and a rule from its features to a class; splits and
rules are those of the authors' `task_adaptation`. The splits of the source are

  train val trainval test             all examples
  train800 val200 train800val200      the first 800 and 200 of train and val; results are measured on all of test

Records are read in the order of the files, without TensorFlow. Their features are lists by path: a sequence of n
positions `[n, 3]` is `objects/location` with 3 n numbers.

`data/opening.py` calls `opener` with the name of a task. `TASKS` and `SETS` are the published definitions as data.
"""
from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.config import schema
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

CLEVR_EDGES = (0., 8., 8.5, 9., 9.5, 10., 100.)  # of depth, closest object
KITTI_EDGES = (-100., 8., 20., 999.)             # m, closest vehicle
KITTI_NONE = 1000.                               # m, if there is none
NUM_VEHICLES = 3                                 # first types of KITTI: Car, Van, Truck
CLEVR_FEWEST = 3                                 # objects in an image


class Rule(NamedTuple):
  """A part of a TFDS split, in percent."""
  split: str
  start: int
  stop: int


class Set(NamedTuple):
  """A dataset: its parts `train`, `val` and `test`, and manual instructions if TFDS cannot download it."""
  parts: Mapping[str, Rule]
  manual: str = ''

  @property
  def stored(self) -> list[str]:
    """The TFDS splits that are needed."""
    return list(dict.fromkeys(rule.split for rule in self.parts.values()))


class Task(NamedTuple):
  """A task.

  dataset: the TFDS dataset, with its configuration.
  label: maps the features of an example to its class.
  label_feature: the feature with the same classes as the task, if there is one.
  pixel_factor: factor of the stored pixels.
  """
  name: str
  group: str
  dataset: str
  num_classes: int
  label: Callable[[Features], int]
  label_feature: str = 'label'
  image: str = 'image'
  pixel_factor: int = 1


def take(name: str, features: Features) -> int:
  """Returns the class that a feature holds."""
  return int(features[name][0])


def merge(name: str, num_stored: int, num_classes: int, features: Features) -> int:
  """Returns the class of one of `num_stored` ordered values that are divided into `num_classes` equal parts."""
  return take(name, features) * num_classes // num_stored


def count_objects(features: Features) -> int:
  """Counts the objects of CLEVR, 3 to 10."""
  return len(features['objects/size']) - CLEVR_FEWEST


def closest_object(features: Features) -> int:
  """Returns the bin of the depth of the nearest object of CLEVR."""
  depth = np.reshape(np.asarray(features['objects/pixel_coords'], np.float32), (-1, 3))[:, 2]
  return bin_of(float(depth.min()), CLEVR_EDGES)


def closest_vehicle(features: Features) -> int:
  """Returns the bin of the distance along the road of the nearest car, van or truck of KITTI.

  It is the last bin if there is none.
  """
  kinds = np.asarray(features['objects/type'], np.int64)
  far = np.reshape(np.asarray(features['objects/location'], np.float32), (-1, 3))[:, 2]
  return bin_of(float(min([*far[kinds < NUM_VEHICLES], KITTI_NONE])), KITTI_EDGES)


def bin_of(value: float, edges: Sequence[float]) -> int:
  """Returns the last bin whose lower edge is below the value: bin i is (edges[i], edges[i + 1]]."""
  return int(np.searchsorted(edges, value, side='left')) - 1


def _of_train(percent: int, test: str = 'test') -> Mapping[str, Rule]:
  """Returns the first part of train, the rest of it, and another split."""
  return {'train': Rule('train', 0, percent), 'val': Rule('train', percent, 100), 'test': Rule(test, 0, 100)}


_NATIVE = {'train': Rule('train', 0, 100), 'val': Rule('validation', 0, 100), 'test': Rule('test', 0, 100)}
_SIXTY = {'train': Rule('train', 0, 60), 'val': Rule('train', 60, 80), 'test': Rule('train', 80, 100)}
_EIGHTY = {'train': Rule('train', 0, 80), 'val': Rule('train', 80, 90), 'test': Rule('train', 90, 100)}
_HALVED = {'train': Rule('train', 0, 100), 'val': Rule('test', 0, 50), 'test': Rule('test', 50, 100)}

_RETINOPATHY, _CLEVR, _DSPRITES, _NORB = 'diabetic_retinopathy_detection/btgraham-300', 'clevr', 'dsprites', 'smallnorb'
SETS: dict[str, Set] = {
    'caltech101': Set(_of_train(90)),
    'cifar100': Set(_of_train(90)),
    'dtd': Set(_NATIVE),
    'oxford_flowers102': Set(_NATIVE),
    'oxford_iiit_pet': Set(_of_train(80)),
    'sun397/tfds': Set(_NATIVE),
    'svhn_cropped': Set(_of_train(90)),
    'patch_camelyon': Set(_NATIVE),
    'eurosat/rgb': Set(_SIXTY),
    'resisc45': Set(_SIXTY, 'download NWPU-RESISC45.rar manually (https://1drv.ms/u/s!AmgKYzARBl5ca3HNaHIlzp_IXjs) and '
                            'unpack it'),
    _RETINOPATHY: Set(_NATIVE, 'download train, test, sample, trainLabels.csv and sampleSubmission.csv manually '
                               '(https://www.kaggle.com/c/diabetic-retinopathy-detection/data) and unpack them'),
    _CLEVR: Set(_of_train(90, 'validation')),
    'dmlab': Set(_NATIVE),
    'kitti': Set(_NATIVE),
    _DSPRITES: Set(_EIGHTY),
    _NORB: Set(_HALVED),
}


def _task(name: str, dataset: str, label: Callable[[Features], int] | str = 'label', *, pixel_factor: int = 1) -> Task:
  """Returns a task defined by its rule, or by the feature with its classes."""
  group, num_classes = vtab.TASKS[name]
  if isinstance(label, str):
    return Task(name, group, dataset, num_classes, functools.partial(take, label), label)
  return Task(name, group, dataset, num_classes, label, '', pixel_factor=pixel_factor)


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
    _task('clevr/count', _CLEVR, count_objects),
    _task('clevr/distance', _CLEVR, closest_object),
    _task('dmlab', 'dmlab'),
    _task('kitti/distance', 'kitti', closest_vehicle),
    _task('dsprites/x_position', _DSPRITES, functools.partial(merge, 'label_x_position', 32, 16), pixel_factor=255),
    _task('dsprites/orientation', _DSPRITES, functools.partial(merge, 'label_orientation', 40, 16), pixel_factor=255),
    _task('smallnorb/azimuth', _NORB, 'label_azimuth'),
    _task('smallnorb/elevation', _NORB, 'label_elevation'),
)}


class VtabSource(tfds.Stored):
  """A complete TFDS split with the classes of a task."""

  def __init__(self, dataset: tfds.Dataset, split: str, task: Task, rules: Rules = OWN) -> None:
    super().__init__(dataset, split, name=f'vtab:{task.name}/{split}', reading=task.name)
    self._task = task
    names = dataset.class_names(task.label_feature, rules) if task.label_feature in dataset.features else ()
    if names and len(names) != task.num_classes:
      raise UserError(f'{dataset.full_name}: expected {task.num_classes} classes, as VTAB has in {task.name}, got '
                      f'{len(names)}. Prepare the dataset again, in the version that VTAB names.')
    self.class_names = names or tuple(f'{task.name} {i}' for i in range(task.num_classes))

  def example(self, row: int) -> Record:
    features = self.features(row)
    stored, factor = example.encoded(features, self._task.image), self._task.pixel_factor
    image = stored if factor == 1 else decode.decode(stored) * np.uint8(factor)
    return Record(image, (self._label(features),))

  def labels(self, row: int) -> tuple[int, ...]:
    return (self._label(self.features(row)),)

  def _label(self, features: Features) -> int:
    try:
      label = self._task.label(features)
    except (KeyError, IndexError, TypeError, ValueError) as error:
      raise example.BadRecord(f'the record: expected the features of {self._task.dataset}, got '
                              f'{", ".join(sorted(features)) or "none"}') from error
    if not 0 <= label < self._task.num_classes:
      raise UserError(f'{self.name}: expected classes from 0 to {self._task.num_classes - 1}, got {label}. '
                      'Prepare the dataset again, in the version that VTAB names.')
    return label


def opener(where: str, data: schema.Data, image_px: tuple[int, int]) -> Callable[[str], Source]:
  """Opens the splits of a task such as `clevr/count_all`, whose dataset is in `data.data_dir`.

  Raises:
    UserError: there is no such task, or its dataset is not prepared; then with install instructions.
  """
  del image_px
  task, rules = find(where), Rules.of(data)
  definition = SETS[task.dataset]
  try:
    folder = tfds.find(task.dataset, data_dir=data.data_dir)
  except UserError as error:
    if 'is not prepared' not in str(error):
      raise
    data_dir = tfds.data_folder(data.data_dir)
    steps = [f'{definition.manual} into {os.path.join(data_dir, "downloads", "manual")}; then'
             if definition.manual else '', f'python -m vit_jax.data.formats.tfds_build {task.dataset} {data_dir}']
    raise UserError(
        f'VTAB task {task.name}: tfds:{task.dataset} is not prepared in {data_dir}. To prepare it (TFDS needs the '
        f'package tensorflow for this, reading does not): {" ".join(filter(None, steps))}') from None

  @functools.cache
  def stored(split: str) -> VtabSource:
    dataset = tfds.read(folder, rules)
    return VtabSource(dataset, splits.resolve(split, dataset.splits, source=f'tfds:{task.dataset}'), task, rules)

  def open_named(split: str) -> Source:
    split = splits.resolve(split, SPLITS, source=f'vtab:{where}')
    counts = {name: len(stored(name)) for name in definition.stored}
    return Parts([Part(stored(name), rows) for name, rows in ranges(definition, counts, split)],
                 name=f'vtab:{where}/{split}')
  return open_named


def find(name: str) -> Task:
  """Returns the task of a name; raises UserError if there is none."""
  if name not in TASKS:
    near = difflib.get_close_matches(name, TASKS, 1)
    raise UserError(f'VTAB task: expected one of {", ".join(TASKS)}, got {name!r}.'
                    + (f' Did you mean {near[0]}?' if near else ''))
  return TASKS[name]


def ranges(definition: Set, counts: Mapping[str, int], split: str) -> list[tuple[str, range]]:
  """Returns the TFDS splits that make up a split of VTAB, each with the examples that belong to it.

  Args:
    definition: of the dataset.
    counts: number of examples of each of its stored splits.
    split: one of `SPLITS`.

  Raises:
    UserError: there are fewer examples than 800 and 200.
  """
  whole = {part: (rule.split, range(rule.start * counts[rule.split] // 100, rule.stop * counts[rule.split] // 100))
           for part, rule in definition.parts.items()}
  wanted = {'trainval': {'train': 0, 'val': 0}, 'train800': {'train': NUM_TRAIN}, 'val200': {'val': NUM_VAL},
            'train800val200': {'train': NUM_TRAIN, 'val': NUM_VAL}}.get(split, {split: 0})
  for part, num in wanted.items():
    if num > len(whole[part][1]):
      raise UserError(f'{split}: expected {num} examples of {part}, got {len(whole[part][1])}. Prepare the complete '
                      'dataset.')
  return [(whole[part][0], whole[part][1][:num or None]) for part, num in wanted.items()]
