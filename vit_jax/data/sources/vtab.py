"""`vtab:TASK`: the 19 tasks of the Visual Task Adaptation Benchmark (VTAB-1k, arXiv 1910.04867), from TFDS datasets.

A task is a TFDS dataset, its training, validation and test parts, and a rule from its features to a class; splits and
rules are those of the authors' `task_adaptation`. The splits of the source are

  train val trainval test             all examples
  train800 val200 train800val200      the first 800 and 200 of train and val; results are measured on all of test

Records are read in the order of the files, without TensorFlow.
"""
from __future__ import annotations

import difflib
import functools
import hashlib
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.data.files import records
from vit_jax.data.files.user_files import OWN, Rules
from vit_jax.data.image import decode
from vit_jax.data.source import ConcatSource, Part, Record, Source
from vit_jax.data.sources import splits, tfds, tfds_description
from vit_jax.data.sources.vtab_tasks import SETS, TASKS, Features, Set, Task

if TYPE_CHECKING:
  from tensorflow_datasets.core import DatasetBuilder

NUM_TRAIN, NUM_VAL = 800, 200
SPLITS = ('train', 'val', 'trainval', 'test', 'train800', 'val200', 'train800val200')


class Range(NamedTuple):
  """Examples `start` to `stop` of a TFDS split."""
  split: str
  start: int
  stop: int


class VtabSource:
  """A complete TFDS split with the classes of a task."""

  def __init__(self, builder: DatasetBuilder, split: str, task: Task, rules: Rules = OWN) -> None:
    info = builder.info.splits[split]
    self.name = f'vtab:{task.name}/{split}'
    self._task = task
    self.class_names = _class_names(builder, task)
    self._records = tfds.open_records(builder, split, rules)
    text = f'{builder.info.full_name} {split} {list(info.shard_lengths)} {info.num_bytes} {task.name}'
    self.digest = hashlib.sha256(text.encode()).hexdigest()

  def __len__(self) -> int:
    return len(self._records)

  def __getitem__(self, index: int) -> Record:
    features = self.features(index)
    stored = records.encoded(features, self._task.image)
    image: bytes | HostArray = stored
    if self._task.pixel_factor != 1:
      image = decode.decode(stored) * np.uint8(self._task.pixel_factor)
    return Record(image, self._label(features))

  def features(self, index: int) -> Features:
    """Returns all features of an example, in lists, as they are stored."""
    return records.parse(self._records[index])

  def label(self, index: int) -> int:
    return self._label(self.features(index))

  def describe(self, index: int) -> str:
    return f'{self.name}[{index}]'

  def _label(self, features: Features) -> int:
    try:
      label = self._task.label(features)
    except (KeyError, IndexError, TypeError, ValueError) as error:
      raise records.BadRecord(f'the record: expected the features of {self._task.dataset}, got '
                              f'{", ".join(sorted(features)) or "none"}') from error
    if not 0 <= label < self._task.num_classes:
      raise UserError(f'{self.name}: expected classes from 0 to {self._task.num_classes - 1}, got {label}.')
    return label


def _class_names(builder: DatasetBuilder, task: Task) -> tuple[str, ...]:
  """Returns the class names of the dataset if the task has its classes, else numbers."""
  names = tuple(builder.info.features[task.label_feature].names) if task.label_feature else ()
  if names and len(names) != task.num_classes:
    raise UserError(f'{builder.info.full_name}: expected {task.num_classes} classes, as VTAB has in {task.name}, got '
                    f'{len(names)}.')
  return names or tuple(f'{task.name} {i}' for i in range(task.num_classes))


def opener(where: str, data: schema.Data, image_px: tuple[int, int]) -> Callable[[str], Source]:
  """Opens the splits of a task such as `clevr/count_all`, whose dataset is in `data.data_dir`.

  Raises:
    UserError: there is no such task, or its dataset is not prepared; then with install instructions.
  """
  del image_px
  task, rules = find(where), Rules.of(data)
  own = SETS[task.dataset]
  try:
    folder = tfds.find(task.dataset, data_dir=data.data_dir)
  except UserError as error:
    if 'is not prepared' not in str(error):
      raise
    raise UserError(how_to_get(task, own, tfds.data_folder(data.data_dir))) from None

  @functools.cache
  def builder() -> DatasetBuilder:
    return tfds_description.open_builder(folder, rules)

  @functools.cache
  def stored(split: str) -> VtabSource:
    return VtabSource(builder(), splits.resolve(split, builder().info.splits, source=f'tfds:{task.dataset}'), task,
                      rules)

  def open_named(split: str) -> Source:
    split = splits.resolve(split, SPLITS, source=f'vtab:{where}')
    counts = {one: len(stored(one)) for one in own.stored}
    return ConcatSource([Part(stored(r.split), r.start, r.stop) for r in ranges(own, counts, split)],
                        name=f'vtab:{where}/{split}')
  return open_named


def find(name: str) -> Task:
  """Returns the task of a name; raises UserError if there is none."""
  if name not in TASKS:
    near = difflib.get_close_matches(name, TASKS, 1)
    raise UserError(f'VTAB task: expected one of {", ".join(TASKS)}, got {name!r}.'
                    + (f' Did you mean {near[0]}?' if near else ''))
  return TASKS[name]


def ranges(own: Set, counts: Mapping[str, int], split: str) -> list[Range]:
  """Returns the ranges of TFDS splits that make up a split of VTAB.

  Args:
    own: the dataset.
    counts: number of examples of each of its stored splits.
    split: one of `SPLITS`.

  Raises:
    UserError: there are fewer examples than 800 and 200.
  """
  whole = {part: _range(rule.split, rule.start, rule.stop, counts) for part, rule in own.parts.items()}
  first = {part: whole[part]._replace(stop=whole[part].start + num)
           for part, num in (('train', NUM_TRAIN), ('val', NUM_VAL))}
  found = {'trainval': [whole['train'], whole['val']], 'train800': [first['train']], 'val200': [first['val']],
           'train800val200': [first['train'], first['val']]}.get(split) or [whole[split]]
  for part in ('train', 'val'):
    if first[part] in found and first[part].stop > whole[part].stop:
      raise UserError(f'{split}: expected {first[part].stop - first[part].start} examples of {part}, got '
                      f'{whole[part].stop - whole[part].start}. Prepare the complete dataset.')
  return found


def _range(split: str, start: int, stop: int, counts: Mapping[str, int]) -> Range:
  """Converts percentages of a split to examples, rounded down."""
  return Range(split, start * counts[split] // 100, stop * counts[split] // 100)


def how_to_get(task: Task, own: Set, data_dir: str) -> str:
  """Returns the instructions to prepare a dataset."""
  steps = [f'{own.manual} into {os.path.join(data_dir, "downloads", "manual")}; then' if own.manual else '',
           f'python -m vit_jax.data.sources.tfds_build {task.dataset} {data_dir}']
  return (f'VTAB task {task.name}: tfds:{task.dataset} is not prepared in {data_dir}. To prepare it (TFDS needs the '
          f'package tensorflow for this, reading does not): {" ".join(filter(None, steps))}')
