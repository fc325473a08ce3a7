"""Sets prepared by TensorFlow Datasets in ArrayRecord or TFRecord files, read without TensorFlow.

Images come as the stored JPEG or PNG bytes. The order is that of the files: the same for both formats.
"""
from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from vit_jax.core.errors import UserError
from vit_jax.data.source import UNKNOWN, Record, Source
from vit_jax.data.sources import array_records, local_paths, splits, system_errors, tf_example, tfrecord
from vit_jax.data.sources.tf_example import BadRecord

if TYPE_CHECKING:
  from tensorflow_datasets.core import DatasetBuilder

_VERSION = re.compile(r'\d+\.\d+\.\d+')
_TRIES = 100  # damaged records in a row, until which a set is asked for labels
_Feature = TypeVar('_Feature')


class Columns(NamedTuple):
  """Names of the features that hold image and class, the names of the classes, and whether an image has several."""
  image: str
  label: str
  class_names: tuple[str, ...]
  several: bool = False


class TfdsSource:
  """A split of a set prepared as ArrayRecord or TFRecord files."""

  def __init__(self, builder: DatasetBuilder, split: str, *, columns: Columns) -> None:
    info = builder.info.splits[split]
    self.name, self.class_names = f'tfds:{builder.info.full_name}/{split}', columns.class_names
    self._columns, self.most_labels = columns, UNKNOWN if columns.several else 0
    self._records = open_records(builder, split)
    text = f'{builder.info.full_name} {split} {list(info.shard_lengths)} {info.num_bytes} {columns}'
    self.digest = hashlib.sha256(text.encode()).hexdigest()

  def __len__(self) -> int:
    return len(self._records)

  def __getitem__(self, index: int) -> Record:
    found = tf_example.parse(self._records[index])
    image, column = tf_example.first(found, self._columns.image), self._columns.label
    if self._columns.several:
      return Record.multilabel(image, tf_example.integers(found, column))  # type: ignore[arg-type]
    return Record(image, int(tf_example.first(found, column)))  # type: ignore[arg-type]

  def features(self, index: int) -> Mapping[str, Any]:
    """All features of an example by name, as they are stored; text as bytes, other ones as lists."""
    found = tf_example.parse(self._records[index])
    return {name: x[0] if x and isinstance(x[0], bytes) else x for name, x in found.items()}

  def label(self, index: int) -> int:
    found = tf_example.parse(self._records[index])
    if self._columns.several:
      return next(iter(tf_example.integers(found, self._columns.label)), -1)
    return int(tf_example.first(found, self._columns.label))

  def describe(self, index: int) -> str:
    return f'{self.name}[{index}]'


def open_records(builder: DatasetBuilder, split: str) -> array_records.Records | tfrecord.Records:
  """The records of a split, in the order of its files.

  Raises:
    UserError: it was prepared in a format that cannot be read in any order.
  """
  info = builder.info.splits[split]
  paths, counts = [os.path.abspath(os.fspath(path)) for path in info.filepaths], list(info.shard_lengths)
  match builder.info.file_format.value:
    case 'array_record':
      return array_records.Records(paths, counts)
    case 'tfrecord':
      return tfrecord.Records(paths, counts)
    case kind:
      raise UserError(f'{builder.data_dir}: expected ArrayRecord or TFRecord, which can be read in any order, got '
                      f'{kind}. Prepare the dataset in one of these formats.')


def open_builder(folder: str) -> DatasetBuilder:
  """What TFDS knows of a prepared set. Raises UserError where its description is damaged."""
  import tensorflow_datasets as tfds
  from google.protobuf import json_format
  try:
    return tfds.builder_from_directory(folder)
  except (json_format.Error, ValueError, KeyError, TypeError, AttributeError, OSError, RuntimeError) as error:
    raise UserError(f'{folder}: expected dataset_info.json and features.json as TFDS writes them, got '
                    f'{type(error).__name__}: {error}. Copy or prepare the set again') from error


def opener(name: str, *, data_dir: str, label_column: str = '') -> Callable[[str], Source]:
  """How to open a split of the set `NAME[/CONFIG][:VERSION]`.

  Args:
    name: of the set; without configuration, the only one; without version, the newest.
    data_dir: where prepared sets lie; '' is $TFDS_DATA_DIR, or ~/tensorflow_datasets.
    label_column: the feature with the class or classes; '' is `label`, or the only one.

  Raises:
    UserError: it is not there, or prepared in another format.
  """
  folder = find(name, data_dir=data_dir)

  @functools.cache
  def builder() -> DatasetBuilder:
    return open_builder(folder)

  @functools.cache
  def open_named(split: str) -> Source:
    found = splits.resolve(split, builder().info.splits, source=f'tfds:{name}')
    source = TfdsSource(builder(), found, columns=_columns(builder(), folder, label_column))
    if not source.most_labels and (label := _first_label(source)) < 0:
      raise UserError(f'{source.name}: expected examples with labels, got the label {label}. Choose another split.')
    return source
  return open_named


def _first_label(source: TfdsSource) -> int:
  """The class of the first example that is not damaged; 0 if there is none among the first."""
  for index in range(min(len(source), _TRIES)):
    try:
      return source.label(index)
    except BadRecord:
      continue
    except OSError as error:
      raise system_errors.stop(error, source.name) from error
  return 0


def data_folder(data_dir: str) -> str:
  """Where prepared sets lie: `data_dir`, or for '' $TFDS_DATA_DIR, or ~/tensorflow_datasets."""
  data_dir = data_dir or os.environ.get('TFDS_DATA_DIR', '') or os.path.join('~', 'tensorflow_datasets')
  return local_paths.resolve(data_dir, 'data_dir, where sets of TFDS lie')


def find(name: str, *, data_dir: str) -> str:
  """The directory of a prepared set: DATA_DIR/NAME[/CONFIG]/VERSION.

  Raises:
    UserError: it is not there.
  """
  data_dir = data_folder(data_dir)
  path, _, version = name.partition(':')
  folder = os.path.join(data_dir, path)
  if not version and not _versions(folder):
    configs = [c for c in _entries(folder) if _versions(os.path.join(folder, c))]
    if len(configs) > 1:
      raise UserError(f'tfds:{name} has several configurations in {folder}: {", ".join(sorted(configs))}; '
                      f'right would be one of them, such as tfds:{path}/{sorted(configs)[0]}')
    folder = os.path.join(folder, *configs)
  version = version or max(_versions(folder), key=lambda v: tuple(map(int, v.split('.'))), default='')
  found = os.path.join(folder, version)
  if not version or not os.path.isfile(os.path.join(found, 'dataset_info.json')):
    raise UserError(f'tfds:{name} is not prepared in {data_dir} (looked at {found}); right would be another '
                    'data.data_dir, or to make it, which may take TensorFlow: python -m vit_jax.main --job=prepare '
                    f'--data=tfds:{name} --to=DIR, and then data.source=array_record:DIR')
  return found


def _entries(folder: str) -> list[str]:
  return os.listdir(folder) if os.path.isdir(folder) else []


def _versions(folder: str) -> list[str]:
  return [v for v in _entries(folder) if _VERSION.fullmatch(v)]


def _columns(builder: DatasetBuilder, folder: str, label_column: str) -> Columns:
  import tensorflow_datasets as tfds
  features = dict(builder.info.features)
  image = _the_one({k: f for k, f in features.items() if isinstance(f, tfds.features.Image)}, 'image', folder)
  single = {k: f for k, f in features.items() if isinstance(f, tfds.features.ClassLabel)}
  lists = {k: f.feature for k, f in features.items()
           if isinstance(f, tfds.features.Sequence) and isinstance(f.feature, tfds.features.ClassLabel)}
  both = single | lists
  if label_column and label_column not in both:
    raise UserError(f'data.label_column: expected a feature of {folder} with classes ({", ".join(both) or "none"}), '
                    f'got {label_column!r}.')
  label = label_column or (_the_one(single, 'label', folder) if single or not lists else
                           _the_one(lists, 'labels', folder))
  return Columns(image, label, tuple(both[label].names), label in lists)


def _the_one(found: dict[str, _Feature], usual: str, folder: str) -> str:
  """The feature of the usual name, or the only one."""
  if usual in found or len(found) == 1:
    return usual if usual in found else next(iter(found))
  raise UserError(f'{folder} has {len(found)} features that could be the {usual}: '
                  f'{", ".join(found) or "none"}; right would be one, or one named {usual}')
