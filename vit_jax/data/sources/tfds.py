"""`tfds:NAME[/CONFIG][:VERSION]`: datasets prepared by TensorFlow Datasets, read without TensorFlow.

Images are the stored JPEG or PNG bytes. The order is that of the files: the same for ArrayRecord and TFRecord files.

The description of a dataset is checked before TFDS reads it and after: TFDS imports the modules that `features.json`
names, reads text files of any size, and takes the names of the shards from `dataset_info.json`.
"""
from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vit_jax.config import schema
from vit_jax.core import os_errors
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.data.files import access, json_fields, records, user_files
from vit_jax.data.files.user_files import OWN, Rules
from vit_jax.data.labels import classes
from vit_jax.data.source import UNKNOWN, UNLABELED, Record, Source
from vit_jax.data.sources import archives, splits
from vit_jax.data.text import stored

if TYPE_CHECKING:
  from tensorflow_datasets.core import DatasetBuilder

_VERSION = re.compile(r'\d+\.\d+\.\d+')
_TRIES = 100  # damaged records in a row before the check for labels gives up
INFO, FEATURES = 'dataset_info.json', 'features.json'
_EXPECTED = f'{INFO} and {FEATURES} as TFDS writes them'
_AGAIN = 'Copy or prepare the dataset again.'
_CLASSES, _OWN = ('pythonClassName', 'python_class_name', 'type', 'proto_cls'), 'tensorflow_datasets.'
"""Fields of `features.json` that name a class; `type` and `proto_cls` are of earlier versions."""
_ERRORS = (ValueError, KeyError, TypeError, AttributeError, OSError, RuntimeError, IndexError, AssertionError,
           ImportError, OverflowError, RecursionError, NotImplementedError, UnicodeError)


class Columns(NamedTuple):
  """The features that hold image and class ('' = none), the names of the classes, and whether an image has several.
  """
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


class Stored:
  """The records of a split, as ArrayRecord or TFRecord files; sources of TFDS datasets inherit from it."""

  def __init__(self, builder: DatasetBuilder, split: str, *, name: str, reading: object, rules: Rules) -> None:
    """Takes the name of the source, and for its digest how the records are read."""
    info, self.name = builder.info.splits[split], name
    self._records = open_records(builder, split, rules)
    self.shard_sizes = [int(num) for num in info.shard_lengths]
    text = f'{builder.info.full_name} {split} {list(info.shard_lengths)} {info.num_bytes} {reading}'
    self.digest = hashlib.sha256(text.encode()).hexdigest()

  def __len__(self) -> int:
    return len(self._records)

  def describe(self, index: int) -> str:
    return f'{self.name}[{index}]'


class TfdsSource(Stored):
  """A split with images and their classes."""

  def __init__(self, builder: DatasetBuilder, split: str, *, columns: Columns, caption_column: str = '',
               rules: Rules = OWN) -> None:
    super().__init__(builder, split, name=f'tfds:{builder.info.full_name}/{split}', reading=columns, rules=rules)
    self.class_names, self._columns, self.caption_column = columns.class_names, columns, caption_column
    self.most_labels = UNKNOWN if columns.several else 0

  def captions(self, index: int) -> tuple[str, ...]:
    """Returns the texts of an image that are not empty. Raises BadImage if one is not UTF-8, or the record is damaged.
    """
    name = self.caption_column
    return stored.texts(records.pick(self._records[index], name).get(name, ()), f'the feature {name}')

  def __getitem__(self, index: int) -> Record:
    column = self._columns.label
    if not column:
      return Record(records.encoded(records.pick(self._records[index], self._columns.image), self._columns.image), 0)
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
    if not self._columns.label:
      return 0
    found = records.parse(self._records[index])
    if self._columns.several:
      return next(iter(records.classes(found, self._columns.label, len(self.class_names))), -1)
    return records.label(found, self._columns.label, len(self.class_names))


def opener(where: str, data: schema.Data, image_px: tuple[int, int]) -> Callable[[str], Source]:
  """Opens the splits of the dataset `NAME[/CONFIG][:VERSION]`, whose folder is in `data.data_dir`.

  The default configuration is the only one, the default version the newest. `data.label_column` is the feature with the
  class or classes.

  Raises:
    UserError: the dataset is not prepared, or prepared in another format.
  """
  del image_px
  folder, rules = find(where, data_dir=data.data_dir), Rules.of(data)
  builder = functools.cache(lambda: open_builder(folder, rules))

  @functools.cache
  def open_named(split: str) -> Source:
    found = splits.resolve(split, builder().info.splits, source=f'tfds:{where}')
    captions = _captions(builder(), folder, data.caption_column)
    columns = _columns(builder(), folder, data.label_column, has_captions=bool(captions))
    source = TfdsSource(builder(), found, columns=columns, caption_column=captions, rules=rules)
    if not source.most_labels:
      _check_labels(source)
    return source
  return open_named


def open_records(builder: DatasetBuilder, split: str, rules: Rules) -> records.ArrayRecords | records.TfRecords:
  """Returns the records of a split, in the order of its files.

  Raises:
    UserError: the description of the files is damaged, or their format does not support random access.
  """
  paths, counts = find_shards(builder, split, rules)
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
    configs = [c for c in (os.listdir(folder) if os.path.isdir(folder) else []) if _versions(os.path.join(folder, c))]
    if len(configs) > 1:
      raise UserError(f'tfds:{name}: expected one of the configurations in {folder}, {", ".join(sorted(configs))}, got '
                      f'none. Set tfds:{path}/{sorted(configs)[0]}, for example.')
    folder = os.path.join(folder, *configs)
  version = version or max(_versions(folder), key=lambda v: tuple(map(int, v.split('.'))), default='')
  found = os.path.join(folder, version)
  if not version or not os.path.isfile(os.path.join(found, 'dataset_info.json')):
    advice = (f'prepare it: vit-jax prepare --data={path}' if path in archives.ARCHIVES else
              f'prepare it, which may need TensorFlow: vit-jax prepare --data=tfds:{name}')
    raise UserError(f'tfds:{name} is not prepared in {data_dir} (expected in {found}). Set another data.data_dir, or '
                    f'{advice} --to=DIR, and then data.source=array_record:DIR')
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
      raise access.unreadable(error, source.name) from error
  if problem:
    raise UserError(f'{source.name}: expected examples with labels, got {problem.label}. Choose another split.')


def _versions(folder: str) -> list[str]:
  """Returns the folders of versions in a folder, which may not exist."""
  return [v for v in os.listdir(folder) if _VERSION.fullmatch(v)] if os.path.isdir(folder) else []


def image_columns(builder: DatasetBuilder) -> list[str]:
  """Returns the names of the features that are images."""
  import tensorflow_datasets as tfds
  return [name for name, feature in dict(builder.info.features).items() if isinstance(feature, tfds.features.Image)]


def _captions(builder: DatasetBuilder, folder: str, given: str) -> str:
  """Returns the feature with captions, such as `captions/text`; '' if there is none. Raises UserError if it is unknown.
  """
  found = list(_texts(dict(builder.info.features)))
  if given and given not in found:
    raise UserError(f'data.caption_column: expected a feature of {folder} with texts ({", ".join(found) or "none"}), '
                    f'got {given!r}. Set one of these.')
  usual = [*stored.NAMES, *(f'{name}/text' for name in stored.NAMES)]
  return given or next((name for name in usual if name in found), '')


def _texts(features: Mapping[str, Any], prefix: str = '') -> Iterator[str]:
  """Yields the features with texts, also inside of dictionaries and of sequences."""
  import tensorflow_datasets as tfds
  for name, feature in features.items():
    inner, path = feature.feature if isinstance(feature, tfds.features.Sequence) else feature, f'{prefix}{name}'
    if isinstance(inner, tfds.features.Text):
      yield path
    elif isinstance(inner, tfds.features.FeaturesDict):
      yield from _texts(dict(inner), f'{path}/')


def _columns(builder: DatasetBuilder, folder: str, label_column: str, *, has_captions: bool = False) -> Columns:
  features = dict(builder.info.features)
  image = _the_one(image_columns(builder), 'image', folder)
  found = {column.path: column for column in class_columns(features)}
  if label_column and label_column not in found:
    known = ', '.join(sorted(found)) or 'none'
    raise UserError(f'data.label_column: expected a feature of {folder} with classes ({known}), got {label_column!r}. '
                    'Set one of these.')
  if has_captions and not label_column and not any(path in ('label', 'labels') for path in found):
    return Columns(image, '', UNLABELED)
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


def check_files(folder: str, rules: Rules) -> None:
  """Checks the files of a description.

  Raises:
    UserError: one is too large, a link out of the folder, or not JSON; or `features.json` names a class that is not one
      of TFDS.
  """
  with os.scandir(folder) as entries:
    for entry in entries:
      if entry.name.endswith(('.json', '.txt')):
        user_files.check_inside(entry.path, folder, rules)
        if not entry.is_file() or entry.stat().st_size > user_files.TEXT_BYTES:
          raise UserError(f'{entry.path}: expected a file of at most {user_files.TEXT_BYTES:,} bytes, got '
                          + (f'{entry.stat().st_size:,}' if entry.is_file() else 'something that is not a file')
                          + f'. {_AGAIN}')
  for name in (INFO, FEATURES):
    found = json_fields.read(os.path.join(folder, name), expected='the description of a dataset', advice=_AGAIN)
    found.object()
    if not json_fields.is_unicode(found.value):  # which protobuf answers with a SystemError
      raise UserError(f'{found.where}: expected text that is valid Unicode, got half of a surrogate pair. {_AGAIN}')
    for place in _objects(found) if name == FEATURES else ():
      for key in _CLASSES:
        named = place.optional(key)
        is_other = named is not None and not (isinstance(named.value, str) and named.value.startswith(_OWN))
        if named and is_other and (key != 'type' or 'content' in place.value):
          raise named.error(f'a class of {_OWN.rstrip(".")}')


def _objects(field: json_fields.Field) -> Iterator[json_fields.Field]:
  """Yields all objects in a value, and itself."""
  if isinstance(field.value, dict):
    yield field
    for _, inner in field.fields():
      yield from _objects(inner)
  elif isinstance(field.value, list):
    for inner in field.items():
      yield from _objects(inner)


def open_builder(folder: str, rules: Rules) -> DatasetBuilder:
  """Returns the TFDS builder of a prepared dataset.

  Raises:
    UserError: its description is damaged.
  """
  import tensorflow_datasets as tfds
  check_files(folder, rules)
  with _damage_as_user_error(folder):
    found = tfds.builder_from_directory(folder)
    problem = ('features by name' if not isinstance(found.info.features, tfds.features.FeaturesDict) else
               'splits' if not dict(found.info.splits) else '')
  if problem:
    raise UserError(f'{folder}: expected {_EXPECTED}, got no {problem}. {_AGAIN}')
  return found


@contextlib.contextmanager
def _damage_as_user_error(folder: str) -> Iterator[None]:
  """Raises UserError in place of what TFDS raises for a damaged description."""
  from google.protobuf import json_format
  try:
    yield
  except (UserError, TemporaryError):
    raise
  except (json_format.Error, *_ERRORS) as error:
    raise os_errors.kind(error)(f'{folder}: expected {_EXPECTED}, got a description that TFDS cannot read. '
                                f'{_AGAIN}') from error


def find_shards(builder: DatasetBuilder, split: str, rules: Rules) -> tuple[list[str], list[int]]:
  """Returns the paths of the files of a split, and the number of records of each.

  Raises:
    UserError: a file is outside of the folder, or the description is damaged.
  """
  folder = os.path.abspath(os.fspath(builder.data_dir))
  with _damage_as_user_error(folder):
    info = builder.info.splits[split]
    paths, counts = [os.path.abspath(os.fspath(path)) for path in info.filepaths], [int(n) for n in info.shard_lengths]
  if not paths or len(paths) != len(counts) or any(count < 0 for count in counts):
    raise UserError(f'{folder}: expected {_EXPECTED}, got {len(paths):,} files with '
                    f'{", ".join(f"{n:,}" for n in counts[:5]) or "no"} records. {_AGAIN}')
  for path in paths:
    if os.path.dirname(path) != folder or not user_files.is_below(os.path.basename(path)):
      raise UserError(f'{folder}: expected files in this folder, got {json_fields.shown(path)}. {_AGAIN}')
    user_files.check_inside(path, folder, rules)
  return paths, counts
