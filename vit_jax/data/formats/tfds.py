"""`tfds:NAME[/CONFIG][:VERSION]`: datasets prepared by TensorFlow Datasets, read from their files without the package.

The folder DATA_DIR/NAME[/CONFIG]/VERSION of a dataset has

  dataset_info.json         the splits, with the number of records of each file
  features.json             the features of a record
  FEATURE.labels.txt        the names of the classes of a feature, a line each
  NAME-train.tfrecord-…     the records, `tf.train.Example` messages in TFRecord or ArrayRecord files

Images are the stored JPEG or PNG bytes. Examples have the order of the files, in both formats of records.

`opening.py` calls `opener`, which finds the folder of a dataset (`find`), reads its description (`read`), and
opens a split (`TfdsSource`). `masks.py` and `vtab.py` call `find` and `read`, too, and have subclasses of `Stored`.
`array_record.py` and `tfrecord.py` read the records. `tfds_build.py` prepares a dataset; this module only reads.
"""
from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from vit_jax.config import schema
from vit_jax.core import documents, failures
from vit_jax.core.documents import Field
from vit_jax.core.errors import UserError
from vit_jax.data import splits, user_files
from vit_jax.data.formats import archives, array_record, example, tfrecord
from vit_jax.data.labels import classes
from vit_jax.data.source import UNKNOWN, UNLABELED, Record, Rows, Source, first_label
from vit_jax.data.text import stored
from vit_jax.data.user_files import OWN, Rules

INFO, FEATURES = 'dataset_info.json', 'features.json'
_VERSION = re.compile(r'\d+\.\d+\.\d+')  # such as 3.0.2
_NUM_FIRST_RECORDS = 100  # records in which a label is searched
_AGAIN = 'Copy or prepare the dataset again.'
_IMAGES, _TEXT, _CLASS = ('Image', 'LabeledImage'), 'Text', 'ClassLabel'  # Python classes of features in TFDS
_DICT, _LISTS = 'FeaturesDict', ('Sequence', 'Dataset')  # Python classes of features that contain features
_CONTENT_KEYS = ('featuresDict', 'sequence', 'dataset', 'classLabel')  # keys of the content in `features.json`


class Feature(NamedTuple):
  """A feature of a record, such as `objects/label`.

  python_class: the name of the class of the feature in TFDS, such as `ClassLabel`.
  several: whether a record has a list of values of the feature.
  num_classes: the number of classes; 0 if the feature is no class.
  """
  python_class: str
  several: bool = False
  num_classes: int = 0


class Split(NamedTuple):
  """The paths of the files of a split, the number of records of each file, and the bytes of all files."""
  paths: tuple[str, ...]
  counts: tuple[int, ...]
  num_bytes: int


class Dataset(NamedTuple):
  """The description of a prepared dataset.

  full_name: the name with configuration and version, such as `cifar10/3.0.2`.
  file_format: the format of the files with records, such as `array_record`.
  splits, features: by name. The name of a feature inside another feature is a path, such as `objects/label`.
  """
  folder: str
  name: str
  full_name: str
  file_format: str
  splits: Mapping[str, Split]
  features: Mapping[str, Feature]

  @property
  def images(self) -> list[str]:
    """The features that are images."""
    return [path for path, feature in self.features.items()
            if feature.python_class in _IMAGES and not feature.several and '/' not in path]

  @property
  def texts(self) -> list[str]:
    """The features that are texts."""
    return [path for path, feature in self.features.items() if feature.python_class == _TEXT]

  @property
  def labels(self) -> dict[str, Feature]:
    """The features that are classes."""
    return {path: feature for path, feature in self.features.items() if feature.python_class == _CLASS}

  def class_names(self, path: str, rules: Rules) -> tuple[str, ...]:
    """Returns the names of the classes of a feature; numbers if no file has names. Raises UserError for a bad file."""
    num_classes = self.features[path].num_classes
    num_images = sum(sum(split.counts) for split in self.splits.values())
    max_classes = max(classes.MAX_CLASSES, num_images)
    if num_classes > max_classes:
      raise UserError(f'{self.folder}: expected at most {max_classes:,} classes for {num_images:,} images, got '
                      f'{num_classes:,} of {path}. {_AGAIN}')
    file = os.path.join(self.folder, f'{path.replace("/", "-")}.labels.txt')
    if not os.path.lexists(file):
      return tuple(map(str, range(num_classes)))
    user_files.check_inside(file, self.folder, rules)
    lines = user_files.split_lines(documents.read_text(file, file, advice=_AGAIN))
    names = tuple(line.strip() for line in lines if line.strip())
    if len(names) != num_classes:
      raise UserError(f'{file}: expected {num_classes:,} classes, as in {FEATURES}, got {len(names):,}. {_AGAIN}')
    return names


class NotPrepared(UserError):
  """A dataset is missing in the data folder."""


class Columns(NamedTuple):
  """The features with image and class ('' = none), the names of the classes, and whether an image has several classes.

  The digest of a source contains the `repr` of this tuple, so no field may be renamed.
  """
  image: str
  label: str
  class_names: tuple[str, ...]
  several: bool = False


class Stored(Rows):
  """The records of a split; the sources of TFDS datasets inherit from this class."""

  def __init__(self, dataset: Dataset, split: str, *, name: str, reading: object) -> None:
    """Takes the name of the source. The digest contains `str(reading)`, which says how a subclass reads records."""
    files, self.name = dataset.splits[split], name
    readers = {'array_record': array_record.ArrayRecords, 'tfrecord': tfrecord.TfRecords}
    if dataset.file_format not in readers:
      raise UserError(f'{dataset.folder}: expected ArrayRecord or TFRecord, which support random access, got '
                      f'{dataset.file_format}. Prepare the dataset in one of these formats.')
    self._records = readers[dataset.file_format](files.paths, files.counts)
    text = f'{dataset.full_name} {split} {list(files.counts)} {_format_bytes(files.num_bytes)} {reading}'
    self.digest = hashlib.sha256(text.encode()).hexdigest()

  def __len__(self) -> int:
    return len(self._records)

  def features(self, row: int) -> Mapping[str, Any]:
    """Returns the values of each feature of an example by its name. Raises BadImage if the record is damaged."""
    return example.parse(self._records[row])

  def path(self, row: int) -> str:
    """Returns the file with an example."""
    return self._records.path(row)

  def describe(self, row: int) -> str:
    return f'{self.name}[{row}]'


class TfdsSource(Stored):
  """A split with images and their classes."""

  def __init__(self, dataset: Dataset, split: str, *, columns: Columns, caption_column: str = '') -> None:
    super().__init__(dataset, split, name=f'tfds:{dataset.full_name}/{split}', reading=columns)
    self.class_names, self._columns, self.caption_column = columns.class_names, columns, caption_column
    self.most_labels = UNKNOWN if columns.several else 0

  def captions(self, row: int) -> tuple[str, ...]:
    name = self.caption_column
    texts = example.pick(self._records[row], name).get(name, ()) if name else ()
    return stored.texts(texts, f'the feature {name}')

  def example(self, row: int) -> Record:
    names = [name for name in (self._columns.image, self._columns.label) if name]
    features = example.pick(self._records[row], *names)
    return Record(example.get_bytes(features, self._columns.image), self._get_labels(features))

  def labels(self, row: int) -> tuple[int, ...]:
    return self._get_labels(self.features(row) if self._columns.label else {})

  def _get_labels(self, features: Mapping[str, Sequence[Any]]) -> tuple[int, ...]:
    """Returns the classes of an example, given its features; (0,) if images have no classes."""
    name, num_classes = self._columns.label, len(self.class_names)
    if self._columns.several:  # an image may have several objects of one class, which is returned once
      return tuple(dict.fromkeys(example.get_classes(features, name, num_classes=num_classes)))
    return (example.get_class(features, name, num_classes=num_classes) if name else 0,)


def _format_bytes(num_bytes: int) -> str:
  """Returns a number of bytes as TFDS writes it, such as `1.50 KiB`. It is a part of the digest of a source."""
  if not num_bytes:
    return 'Unknown size'
  for letter, exponent in (('P', 50), ('T', 40), ('G', 30), ('M', 20), ('K', 10)):
    if num_bytes >= 2**exponent:
      return f'{num_bytes / 2**exponent:.2f} {letter}iB'
  return f'{num_bytes} bytes'


def opener(where: str, data: schema.Data, image_px: tuple[int, int]) -> Callable[[str], Source]:
  """Returns the function that opens a split of the dataset `NAME[/CONFIG][:VERSION]`, given the name of the split.

  The folder of the dataset is in `data.data_dir`. CONFIG may be left out if there is only one; the default version is
  the newest. `data.label_column` is the feature with the class or classes, `data.caption_column` that with captions.
  Raises UserError if the dataset is not prepared.
  """
  del image_px
  folder, rules = find(where, data_dir=data.data_dir), Rules.of(data)

  @functools.cache
  def open_split(split: str) -> Source:
    dataset = read(folder, rules)
    caption_column = _choose_captions(dataset, data.caption_column)
    columns = _choose_columns(dataset, data.label_column, rules, has_captions=bool(caption_column))
    source = TfdsSource(dataset, splits.resolve(split, dataset.splits, source=f'tfds:{where}'), columns=columns,
                        caption_column=caption_column)
    if not source.most_labels:
      _check_labels(source)
    return source
  return open_split


def data_folder(data_dir: str) -> str:
  """Returns the folder of prepared datasets: `data_dir`, else $TFDS_DATA_DIR, else ~/tensorflow_datasets."""
  data_dir = data_dir or os.environ.get('TFDS_DATA_DIR', '') or os.path.join('~', 'tensorflow_datasets')
  return user_files.resolve(data_dir, 'data_dir, the folder of TFDS datasets')


def find(name: str, *, data_dir: str) -> str:
  """Returns the folder of a prepared dataset. Raises NotPrepared if it is missing, UserError if CONFIG is needed."""
  data_dir = data_folder(data_dir)
  path, _, version = name.partition(':')
  folder = os.path.join(data_dir, path)
  if not version and not _list_versions(folder):
    names = os.listdir(folder) if os.path.isdir(folder) else []
    configs = sorted(config for config in names if _list_versions(os.path.join(folder, config)))
    if len(configs) > 1:
      raise UserError(f'tfds:{name}: expected one of the configurations in {folder}, {", ".join(configs)}, got '
                      f'none. Set tfds:{path}/{configs[0]}, for example.')
    folder = os.path.join(folder, *configs)  # of the only configuration, if there is one
  if not version:
    version = max(_list_versions(folder), key=lambda text: tuple(map(int, text.split('.'))), default='')
  folder = os.path.join(folder, version)
  if not version or not os.path.isfile(os.path.join(folder, INFO)):
    advice = (f'prepare it: vit-jax prepare --data={path}' if path in archives.ARCHIVES else
              f'prepare it, which may need TensorFlow: vit-jax prepare --data=tfds:{name}')
    raise NotPrepared(f'tfds:{name} is not prepared in {data_dir} (expected in {folder}). Set another data.data_dir, '
                      f'or {advice} --to=DIR, and then data.source=array_record:DIR')
  return folder


def _list_versions(folder: str) -> list[str]:
  """Returns the names of versions in a folder, such as `3.0.2`; none if the folder does not exist."""
  return [name for name in os.listdir(folder) if _VERSION.fullmatch(name)] if os.path.isdir(folder) else []


def read(folder: str, rules: Rules = OWN) -> Dataset:
  """Returns the description of the dataset in a folder. Raises UserError if it is damaged, or a link leads outside."""
  paths = [os.path.join(folder, file_name) for file_name in (INFO, FEATURES)]
  for path in paths:
    user_files.check_inside(path, folder, rules)
  info, features = (documents.read(path, expected='the description of a dataset', advice=_AGAIN) for path in paths)
  name, config, version = (info.field(key, default='').text() for key in ('name', 'configName', 'version'))
  file_format = info.field('fileFormat', default='tfrecord').text()
  for document in (info, features):
    if not documents.is_unicode(document.value):
      raise UserError(f'{document.place}: expected text that is valid Unicode, got half of a surrogate pair. '
                      f'{_AGAIN}')
  feature_by_path = dict(_flatten_features(features))
  if not feature_by_path or '' in feature_by_path:
    raise features.error('features by name')
  split_by_name = {split.field('name').text(): _read_split(split, folder, name, file_format, rules)
                   for split in info.field('splits').elements()}
  if not split_by_name:
    raise info.field('splits').error('at least one split')
  full_name = '/'.join(part for part in (name, config, version) if part)
  return Dataset(folder, name, full_name, file_format, split_by_name, feature_by_path)


def _read_split(split: Field, folder: str, name: str, file_format: str, rules: Rules) -> Split:
  """Returns a split of the dataset `name`; `split` is the object in `dataset_info.json` that describes it."""
  counts = tuple(_whole(count) for count in split.field('shardLengths', default=[]).elements())
  if not counts:
    raise split.error('the number of records of at least one file, shardLengths')
  template = split.field('filepathTemplate', default='').text() or '{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}'
  paths = []
  for number in range(len(counts)):
    shard, num_shards = f'{number:05d}', f'{len(counts):05d}'
    values = {'DATASET': name, 'SPLIT': split.field('name').text(), 'FILEFORMAT': file_format,
              'SHARD_INDEX': shard, 'NUM_SHARDS': num_shards, 'SHARD_X_OF_Y': f'{shard}-of-{num_shards}'}
    file_name = template
    for key, value in values.items():
      file_name = file_name.replace(f'{{{key}}}', value)
    if not user_files.is_below(file_name) or os.path.basename(file_name) != file_name:
      raise UserError(f'{folder}: expected files in this folder, got {documents.shown(file_name)}. {_AGAIN}')
    path = os.path.join(folder, file_name)
    user_files.check_inside(path, folder, rules)
    paths.append(path)
  return Split(tuple(paths), counts, _whole(split.field('numBytes', default=0)))


def _flatten_features(node: Field, path: str = '', several: bool = False) -> Iterator[tuple[str, Feature]]:
  """Yields the path and each feature of a description, also the features inside of dictionaries and of a sequence.

  TFDS describes a feature as `{"pythonClassName": "a.b.ClassLabel", "classLabel": {"numClasses": "10"}}`, and before
  version 4.7 as `{"type": "a.b.ClassLabel", "content": …}`, where the content may be a text with JSON.

  Args:
    node: the object of `features.json` that describes a feature.
    path: the path of this feature, such as `objects`; '' = the root.
    several: whether the feature is inside of a sequence, so that a record has a list of values.
  """
  content: Field | None
  if 'content' in node:
    python_class, content = node.field('type').text(), node.field('content')
    if isinstance(content.value, str):
      content = documents.field(content.value, content.place, expected='JSON', advice=_AGAIN)
  else:
    python_class = node.field('pythonClassName').text()
    content = next((node.field(key) for key in _CONTENT_KEYS if key in node), None)
  python_class = python_class.rpartition('.')[2]
  if content is None:
    yield path, Feature(python_class, several)
  elif python_class == _DICT:
    for key, child in (content.optional('features') or content).fields():
      yield from _flatten_features(child, f'{path}/{key}'.lstrip('/'), several)
  elif python_class in _LISTS:
    if not several:  # a sequence in a sequence is stored as a ragged array, which is not read
      yield from _flatten_features(content.field('feature'), path, True)
  else:
    count = next((content.field(key) for key in ('numClasses', 'num_classes') if key in content), None)
    num_classes = 0 if count is None or count.value is None else _whole(count)
    yield path, Feature(python_class, several, num_classes)


def _whole(field: Field) -> int:
  """Returns the whole number in a field, from 0 on. It may be a text, as protobuf writes 64-bit numbers in JSON."""
  if isinstance(field.value, str) and field.value.isdecimal() and len(field.value) < 19:  # below 2**63
    return int(field.value)
  return field.whole(0)


def _choose_captions(dataset: Dataset, requested: str) -> str:
  """Returns the feature with captions: `requested`, which the settings name, else one with a usual name; '' = none."""
  if requested and requested not in dataset.texts:
    raise UserError(f'data.caption_column: expected a feature of {dataset.folder} with texts '
                    f'({", ".join(dataset.texts) or "none"}), got {requested!r}. Set one of these.')
  usual = [*stored.NAMES, *(f'{name}/text' for name in stored.NAMES)]
  return requested or next((name for name in usual if name in dataset.texts), '')


def _choose_columns(dataset: Dataset, requested: str, rules: Rules, *, has_captions: bool) -> Columns:
  """Returns the features with image and classes. If there are captions, there may be no classes.

  `requested` is the feature with classes that the settings name. If it is '', a feature with one class for an image is
  preferred to a list of classes, and a list to a feature inside another one. Raises UserError if the choice is unclear.
  """
  folder, labels = dataset.folder, dataset.labels
  image = _pick(dataset.images, 'image', folder)
  if requested and requested not in labels:
    raise UserError(f'data.label_column: expected a feature of {folder} with classes '
                    f'({", ".join(sorted(labels)) or "none"}), got {requested!r}. Set one of these.')
  if has_captions and not requested and not {'label', 'labels'} & set(labels):
    return Columns(image, '', UNLABELED)
  single = [path for path, feature in labels.items() if not feature.several and '/' not in path]
  lists = [path for path, feature in labels.items() if feature.several and '/' not in path]
  if requested:
    path = requested
  elif single or not labels:
    path = _pick(single, 'label', folder)
  else:
    path = _pick(lists or list(labels), 'labels', folder)
  return Columns(image, path, dataset.class_names(path, rules), labels[path].several)


def _pick(paths: Sequence[str], usual: str, folder: str) -> str:
  """Returns the feature with the usual name, else the only feature. Raises UserError if there is neither."""
  if usual in paths:
    return usual
  if len(paths) == 1:
    return paths[0]
  raise UserError(f'{folder}: expected one feature that can be the {usual}, or one of that name, got '
                  f'{", ".join(paths) or "none"}.' + (' Set data.label_column.' if paths and usual != 'image' else ''))


def _check_labels(source: TfdsSource) -> None:
  """Raises UserError if the first examples have no valid label, as in some test splits. Ignores damaged records."""
  problem: example.BadLabel | None = None  # of the first example whose label is out of range
  for row in range(min(len(source), _NUM_FIRST_RECORDS)):
    try:
      first_label(source, row)
      return
    except example.BadLabel as error:
      problem = problem or error
    except example.BadRecord:
      continue
    except OSError as error:
      raise failures.unreadable(error, source.name) from error
  if problem:
    raise UserError(f'{source.name}: expected examples with labels, got {problem.found}. Choose another split.')
