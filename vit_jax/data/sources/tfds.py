"""`tfds:NAME[/CONFIG][:VERSION]`: datasets prepared by TensorFlow Datasets, read without TensorFlow.

Images are the stored JPEG or PNG bytes. The order is that of the files: the same for ArrayRecord and TFRecord files.
"""
from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.data.files import access, records
from vit_jax.data.files.user_files import OWN, Rules
from vit_jax.data.labels import classes
from vit_jax.data.source import UNKNOWN, Record, Source
from vit_jax.data.sources import splits, tfds_description

if TYPE_CHECKING:
  from tensorflow_datasets.core import DatasetBuilder

_VERSION = re.compile(r'\d+\.\d+\.\d+')
_TRIES = 100  # damaged records in a row before the check for labels gives up


class Columns(NamedTuple):
  """The features that hold image and class, the names of the classes, and whether an image has several classes."""
  image: str
  label: str
  class_names: tuple[str, ...]
  several: bool = False


class ClassColumn(NamedTuple):
  """A feature with classes: its path, such as `objects/label`, the TFDS feature, and whether it is a sequence."""
  path: str
  feature: Any
  several: bool

  @property
  def num_classes(self) -> int:
    return int(self.feature.num_classes or 0)

  def class_names(self) -> tuple[str, ...]:
    return tuple(self.feature.names)


class TfdsSource:
  """A split of a dataset prepared as ArrayRecord or TFRecord files."""

  def __init__(self, builder: DatasetBuilder, split: str, *, columns: Columns, rules: Rules = OWN) -> None:
    info = builder.info.splits[split]
    self.name, self.class_names = f'tfds:{builder.info.full_name}/{split}', columns.class_names
    self._columns, self.most_labels = columns, UNKNOWN if columns.several else 0
    self._records = open_records(builder, split, rules)
    text = f'{builder.info.full_name} {split} {list(info.shard_lengths)} {info.num_bytes} {columns}'
    self.digest = hashlib.sha256(text.encode()).hexdigest()

  def __len__(self) -> int:
    return len(self._records)

  def __getitem__(self, index: int) -> Record:
    column = self._columns.label
    found = records.pick(self._records[index], self._columns.image, column)
    image = records.encoded(found, self._columns.image)
    if self._columns.several:  # objects of one class may be several
      return Record.multilabel(image, list(dict.fromkeys(records.classes(found, column, len(self.class_names)))))
    return Record(image, records.label(found, column, len(self.class_names)))

  def features(self, index: int) -> Mapping[str, Any]:
    """Returns all features of an example by name, as they are stored; text as bytes, others as lists."""
    found = records.parse(self._records[index])
    return {name: x[0] if x and isinstance(x[0], bytes) else x for name, x in found.items()}

  def label(self, index: int) -> int:
    found = records.parse(self._records[index])
    if self._columns.several:
      return next(iter(records.classes(found, self._columns.label, len(self.class_names))), -1)
    return records.label(found, self._columns.label, len(self.class_names))

  def describe(self, index: int) -> str:
    return f'{self.name}[{index}]'


def opener(where: str, data: schema.Data, image_px: tuple[int, int]) -> Callable[[str], Source]:
  """Opens the splits of the dataset `NAME[/CONFIG][:VERSION]`, whose folder is in `data.data_dir`.

  The default configuration is the only one, the default version the newest. `data.label_column` is the feature with the
  class or classes.

  Raises:
    UserError: the dataset is not prepared, or prepared in another format.
  """
  del image_px
  folder, rules = find(where, data_dir=data.data_dir), Rules.of(data)

  @functools.cache
  def builder() -> DatasetBuilder:
    return tfds_description.open_builder(folder, rules)

  @functools.cache
  def open_named(split: str) -> Source:
    found = splits.resolve(split, builder().info.splits, source=f'tfds:{where}')
    source = TfdsSource(builder(), found, columns=_columns(builder(), folder, data.label_column), rules=rules)
    if not source.most_labels:
      _check_labels(source)
    return source
  return open_named


def open_records(builder: DatasetBuilder, split: str, rules: Rules) -> records.ArrayRecords | records.TfRecords:
  """Returns the records of a split, in the order of its files.

  Raises:
    UserError: the description of the files is damaged, or their format does not support random access.
  """
  paths, counts = tfds_description.shards(builder, split, rules)
  match builder.info.file_format.value:
    case 'array_record':
      return records.ArrayRecords(paths, counts)
    case 'tfrecord':
      return records.TfRecords(paths, counts)
    case kind:
      raise UserError(f'{builder.data_dir}: expected ArrayRecord or TFRecord, which support random access, got {kind}. '
                      'Prepare the dataset in one of these formats.')


def data_folder(data_dir: str) -> str:
  """Returns the folder of prepared datasets: `data_dir`, or for '' $TFDS_DATA_DIR, or ~/tensorflow_datasets."""
  data_dir = data_dir or os.environ.get('TFDS_DATA_DIR', '') or os.path.join('~', 'tensorflow_datasets')
  return access.resolve(data_dir, 'data_dir, the folder of TFDS datasets')


def find(name: str, *, data_dir: str) -> str:
  """Returns the directory of a prepared dataset: DATA_DIR/NAME[/CONFIG]/VERSION.

  Raises:
    UserError: it is missing.
  """
  data_dir = data_folder(data_dir)
  path, _, version = name.partition(':')
  folder = os.path.join(data_dir, path)
  if not version and not _versions(folder):
    configs = [c for c in _entries(folder) if _versions(os.path.join(folder, c))]
    if len(configs) > 1:
      raise UserError(f'tfds:{name}: expected one of the configurations in {folder}, {", ".join(sorted(configs))}, got '
                      f'none. Set tfds:{path}/{sorted(configs)[0]}, for example.')
    folder = os.path.join(folder, *configs)
  version = version or max(_versions(folder), key=lambda v: tuple(map(int, v.split('.'))), default='')
  found = os.path.join(folder, version)
  if not version or not os.path.isfile(os.path.join(found, 'dataset_info.json')):
    raise UserError(f'tfds:{name} is not prepared in {data_dir} (expected in {found}). Set another data.data_dir, or '
                    'prepare it, which may need TensorFlow: python -m vit_jax.main --job=prepare '
                    f'--data=tfds:{name} --to=DIR, and then data.source=array_record:DIR')
  return found


def _check_labels(source: TfdsSource) -> None:
  """Raises UserError if the first examples have no label, as those of some test splits."""
  problem: records.BadLabel | None = None
  for index in range(min(len(source), _TRIES)):
    try:
      source.label(index)
      return
    except records.BadLabel as error:
      problem = problem or error
    except records.BadRecord:
      continue
    except OSError as error:
      raise access.user_error(error, source.name) from error
  if problem:
    raise UserError(f'{source.name}: expected examples with labels, got {problem.label}. Choose another split.')


def _entries(folder: str) -> list[str]:
  return os.listdir(folder) if os.path.isdir(folder) else []


def _versions(folder: str) -> list[str]:
  return [v for v in _entries(folder) if _VERSION.fullmatch(v)]


def image_columns(builder: DatasetBuilder) -> list[str]:
  """Returns the names of the features that are images."""
  import tensorflow_datasets as tfds
  return [name for name, feature in dict(builder.info.features).items() if isinstance(feature, tfds.features.Image)]


def _columns(builder: DatasetBuilder, folder: str, label_column: str) -> Columns:
  features = dict(builder.info.features)
  image = _the_one(image_columns(builder), 'image', folder)
  found = {column.path: column for column in class_columns(features)}
  if label_column and label_column not in found:
    known = ', '.join(sorted(found)) or 'none'
    raise UserError(f'data.label_column: expected a feature of {folder} with classes ({known}), got {label_column!r}.')
  single = [path for path, column in found.items() if not column.several and '/' not in path]
  lists = [path for path, column in found.items() if column.several and '/' not in path]
  path = label_column or (_the_one(single, 'label', folder) if single else
                          _the_one(lists or list(found), 'labels' if found else 'label', folder))
  num = sum(builder.info.splits[name].num_examples for name in builder.info.splits)
  if found[path].num_classes > max(classes.MOST_CLASSES, num):
    raise UserError(f'{folder}: expected at most {max(classes.MOST_CLASSES, num):,} classes for {num:,} images, got '
                    f'{found[path].num_classes:,} of {path}. Copy or prepare the dataset again.')
  return Columns(image, path, found[path].class_names(), found[path].several)


def class_columns(features: Mapping[str, Any], *, prefix: str = '', several: bool = False) -> Iterator[ClassColumn]:
  """Yields the features with classes, also inside of dictionaries and of sequences, such as `objects/label`."""
  import tensorflow_datasets as tfds
  for name, feature in features.items():
    is_sequence = isinstance(feature, tfds.features.Sequence)
    inner, path = feature.feature if is_sequence else feature, f'{prefix}{name}'
    if is_sequence and several:  # a sequence in a sequence is stored as a ragged array
      continue
    if isinstance(inner, tfds.features.ClassLabel):
      yield ClassColumn(path, inner, several or is_sequence)
    elif isinstance(inner, tfds.features.FeaturesDict):
      yield from class_columns(dict(inner), prefix=f'{path}/', several=several or is_sequence)


def _the_one(found: Sequence[str], usual: str, folder: str) -> str:
  """Returns the feature of the usual name, or the only one."""
  if usual in found or len(found) == 1:
    return usual if usual in found else found[0]
  raise UserError(f'{folder}: expected one feature that can be the {usual}, or one of that name, got '
                  f'{", ".join(found) or "none"}.' + (' Set data.label_column.' if found and usual != 'image' else ''))
