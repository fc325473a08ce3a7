"""`tfds:NAME[/CONFIG][:VERSION]`: datasets prepared by TensorFlow Datasets, read from their files without the package.

`dataset_info.json` has the splits and the number of records of each file, `features.json` the features of a record, and
`FEATURE.labels.txt` the names of classes. Images are the stored JPEG or PNG bytes. The order is that of the files: the
same for ArrayRecord and TFRecord files.

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
_VERSION = re.compile(r'\d+\.\d+\.\d+')
_TRIES = 100  # the first records, in which a label is searched
_AGAIN = 'Copy or prepare the dataset again.'
_IMAGES, _TEXT, _CLASS = ('Image', 'LabeledImage'), 'Text', 'ClassLabel'
_DICT, _LISTS = 'FeaturesDict', ('Sequence', 'Dataset')
_CONTENT = ('featuresDict', 'sequence', 'dataset', 'classLabel')


class Feature(NamedTuple):
  """A feature of a record, such as `objects/label`.

  kind: the name of its class in TFDS.
  several: whether a record has a list of values.
  num_classes: of a feature with classes.
  """
  kind: str
  several: bool = False
  num_classes: int = 0


class Split(NamedTuple):
  """The files of a split, the number of records of each, and the bytes of all."""
  paths: tuple[str, ...]
  counts: tuple[int, ...]
  num_bytes: int


class Dataset(NamedTuple):
  """The description of a prepared dataset; `full_name` has its configuration and version."""
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
            if feature.kind in _IMAGES and not feature.several and '/' not in path]

  @property
  def texts(self) -> list[str]:
    """The features that are texts."""
    return [path for path, feature in self.features.items() if feature.kind == _TEXT]

  @property
  def labels(self) -> dict[str, Feature]:
    """The features that are classes."""
    return {path: feature for path, feature in self.features.items() if feature.kind == _CLASS}

  def class_names(self, path: str, rules: Rules) -> tuple[str, ...]:
    """Returns the names of the classes of a feature; numbers if there are no names. Raises UserError if damaged."""
    num, images = self.features[path].num_classes, sum(sum(split.counts) for split in self.splits.values())
    if num > (most := max(classes.MOST_CLASSES, images)):
      raise UserError(f'{self.folder}: expected at most {most:,} classes for {images:,} images, got {num:,} of {path}. '
                      f'{_AGAIN}')
    file = os.path.join(self.folder, f'{path.replace("/", "-")}.labels.txt')
    if not os.path.lexists(file):
      return tuple(map(str, range(num)))
    user_files.check_inside(file, self.folder, rules)
    lines = user_files.split_lines(documents.read_text(file, file, advice=_AGAIN))
    names = tuple(line.strip() for line in lines if line.strip())
    if len(names) != num:
      raise UserError(f'{file}: expected {num:,} classes, as in {FEATURES}, got {len(names):,}. {_AGAIN}')
    return names


class NotPrepared(UserError):
  """A dataset is missing in the data folder."""


class Columns(NamedTuple):
  """The features with image and class ('' = none), the names of the classes, and whether an image has several.

  The digest of a source contains the representation of this tuple, so its names cannot change.
  """
  image: str
  label: str
  class_names: tuple[str, ...]
  several: bool = False


class Stored(Rows):
  """The records of a split; the sources of TFDS datasets inherit from it."""

  def __init__(self, dataset: Dataset, split: str, *, name: str, reading: object) -> None:
    """Takes the name of the source, and `reading`, the settings of a subclass, as part of the digest."""
    files, self.name = dataset.splits[split], name
    readers = {'array_record': array_record.ArrayRecords, 'tfrecord': tfrecord.TfRecords}
    if dataset.file_format not in readers:
      raise UserError(f'{dataset.folder}: expected ArrayRecord or TFRecord, which support random access, got '
                      f'{dataset.file_format}. Prepare the dataset in one of these formats.')
    self._records = readers[dataset.file_format](files.paths, files.counts)
    text = f'{dataset.full_name} {split} {list(files.counts)} {_size(files.num_bytes)} {reading}'
    self.digest = hashlib.sha256(text.encode()).hexdigest()

  def __len__(self) -> int:
    return len(self._records)

  def features(self, row: int) -> Mapping[str, Any]:
    """Returns all features of an example, in lists. Raises BadImage if the record is damaged."""
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
    features = example.pick(self._records[row], *filter(None, (self._columns.image, self._columns.label)))
    return Record(example.get_bytes(features, self._columns.image), self._labels(features))

  def labels(self, row: int) -> tuple[int, ...]:
    return self._labels(self.features(row) if self._columns.label else {})

  def _labels(self, features: Mapping[str, Sequence[Any]]) -> tuple[int, ...]:
    column, num = self._columns.label, len(self.class_names)
    if self._columns.several:  # an image may have several objects of one class
      return tuple(dict.fromkeys(example.get_classes(features, column, num_classes=num)))
    return (example.get_class(features, column, num_classes=num) if column else 0,)


def _size(num_bytes: int) -> str:
  """Returns a number of bytes as TFDS writes it, which is part of the digest of a source."""
  unit = next((unit for unit in (50, 40, 30, 20, 10) if num_bytes >= 2**unit), 0)
  if not num_bytes:
    return 'Unknown size'
  return f'{num_bytes / 2**unit:.2f} {"KMGTP"[unit // 10 - 1]}iB' if unit else f'{num_bytes} bytes'


def opener(where: str, data: schema.Data, image_px: tuple[int, int]) -> Callable[[str], Source]:
  """Opens the splits of the dataset `NAME[/CONFIG][:VERSION]`, whose folder is in `data.data_dir`.

  The default configuration is the only one, the default version the newest. `data.label_column` is the feature with the
  class or classes, `data.caption_column` that with texts.

  Raises:
    UserError: the dataset is not prepared, or prepared in another format.
  """
  del image_px
  folder, rules = find(where, data_dir=data.data_dir), Rules.of(data)

  @functools.cache
  def open_named(split: str) -> Source:
    dataset = read(folder, rules)
    captions = _captions(dataset, data.caption_column)
    columns = _columns(dataset, data.label_column, rules, has_captions=bool(captions))
    source = TfdsSource(dataset, splits.resolve(split, dataset.splits, source=f'tfds:{where}'), columns=columns,
                        caption_column=captions)
    if not source.most_labels:
      _check_labels(source)
    return source
  return open_named


def data_folder(data_dir: str) -> str:
  """Returns the folder of prepared datasets: `data_dir`, or for '' $TFDS_DATA_DIR, or ~/tensorflow_datasets."""
  data_dir = data_dir or os.environ.get('TFDS_DATA_DIR', '') or os.path.join('~', 'tensorflow_datasets')
  return user_files.resolve(data_dir, 'data_dir, the folder of TFDS datasets')


def find(name: str, *, data_dir: str) -> str:
  """Returns the directory of a prepared dataset: DATA_DIR/NAME[/CONFIG]/VERSION.

  Raises:
    NotPrepared: it is missing.
    UserError: there are several configurations.
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
  folder = os.path.join(folder, version)
  if not version or not os.path.isfile(os.path.join(folder, INFO)):
    advice = (f'prepare it: vit-jax prepare --data={path}' if path in archives.ARCHIVES else
              f'prepare it, which may need TensorFlow: vit-jax prepare --data=tfds:{name}')
    raise NotPrepared(f'tfds:{name} is not prepared in {data_dir} (expected in {folder}). Set another data.data_dir, '
                      f'or {advice} --to=DIR, and then data.source=array_record:DIR')
  return folder


def _versions(folder: str) -> list[str]:
  """Returns the folders of versions in a folder, which may not exist."""
  return [v for v in os.listdir(folder) if _VERSION.fullmatch(v)] if os.path.isdir(folder) else []


def read(folder: str, rules: Rules = OWN) -> Dataset:
  """Returns the description of a prepared dataset.

  Raises:
    UserError: it is damaged or too large, or a link leads out of the folder and the rules do not allow it.
  """
  for name in (INFO, FEATURES):
    user_files.check_inside(os.path.join(folder, name), folder, rules)
  info, features = (documents.read(os.path.join(folder, name), expected='the description of a dataset', advice=_AGAIN)
                    for name in (INFO, FEATURES))
  name, config, version = (info.field(key, default='').text() for key in ('name', 'configName', 'version'))
  kind = info.field('fileFormat', default='tfrecord').text()
  for document in (info, features):
    if not documents.is_unicode(document.value):
      raise UserError(f'{document.where}: expected text that is valid Unicode, got half of a surrogate pair. {_AGAIN}')
  if '' in (by_path := dict(_flat(features))) or not by_path:
    raise features.error('features by name')
  by_name = {split.field('name').text(): _split(split, folder, name, kind, rules)
             for split in info.field('splits').items()}
  if not by_name:
    raise info.field('splits').error('at least one split')
  return Dataset(folder, name, '/'.join(filter(None, (name, config, version))), kind, by_name, by_path)


def _split(described: Field, folder: str, name: str, kind: str, rules: Rules) -> Split:
  """Returns a split of the dataset `name` as `dataset_info.json` describes it; `kind` is the file format."""
  counts = tuple(_whole(count) for count in described.field('shardLengths', default=[]).items())
  if not counts:
    raise described.error('the number of records of at least one file, shardLengths')
  template = described.field('filepathTemplate', default='').text() or '{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}'
  paths = []
  for number in range(len(counts)):
    index, num = f'{number:05d}', f'{len(counts):05d}'
    file = template
    for key, value in {'DATASET': name, 'SPLIT': described.field('name').text(), 'FILEFORMAT': kind,
                       'SHARD_INDEX': index, 'NUM_SHARDS': num, 'SHARD_X_OF_Y': f'{index}-of-{num}'}.items():
      file = file.replace(f'{{{key}}}', value)
    if not user_files.is_below(file) or os.path.basename(file) != file:
      raise UserError(f'{folder}: expected files in this folder, got {documents.shown(file)}. {_AGAIN}')
    user_files.check_inside(os.path.join(folder, file), folder, rules)
    paths.append(os.path.join(folder, file))
  return Split(tuple(paths), counts, _whole(described.field('numBytes', default=0)))


def _flat(node: Field, path: str = '', several: bool = False) -> Iterator[tuple[str, Feature]]:
  """Yields the features of a description by path, also those inside of dictionaries and of a sequence.

  Args:
    node: the description, an object of `features.json`.
    path: of the node, such as `objects`; '' = the root.
    several: whether the node is inside of a sequence, so that a record has a list of values.
  """
  content: Field | None
  if 'content' in node:  # as written before TFDS 4.7
    kind, content = node.field('type').text(), node.field('content')
    if isinstance(content.value, str):
      content = documents.field(content.value, content.where, expected='JSON', advice=_AGAIN)
  else:
    kind = node.field('pythonClassName').text()
    content = next((node.field(key) for key in _CONTENT if key in node), None)
  match kind.rpartition('.')[2]:
    case name if content is None:
      yield path, Feature(name, several)
    case name if name == _DICT:
      for key, inner in (content.optional('features') or content).fields():
        yield from _flat(inner, f'{path}/{key}'.lstrip('/'), several)
    case name if name in _LISTS:
      if not several:  # a sequence in a sequence is stored as a ragged array
        yield from _flat(content.field('feature'), path, True)
    case name:
      num = next((content.field(key) for key in ('numClasses', 'num_classes') if key in content), None)
      yield path, Feature(name, several, 0 if num is None or num.value is None else _whole(num))


def _whole(field: Field) -> int:
  """Returns a whole number, which protobuf writes as text."""
  if isinstance(field.value, str) and field.value.isdecimal() and len(field.value) < 19:
    return int(field.value)
  return field.whole(0)


def _captions(dataset: Dataset, given: str) -> str:
  """Returns the feature with captions, such as `captions/text`; '' if there is none.

  Raises:
    UserError: there is no feature `given`, the one that the settings name.
  """
  if given and given not in dataset.texts:
    raise UserError(f'data.caption_column: expected a feature of {dataset.folder} with texts '
                    f'({", ".join(dataset.texts) or "none"}), got {given!r}. Set one of these.')
  usual = [*stored.NAMES, *(f'{name}/text' for name in stored.NAMES)]
  return given or next((name for name in usual if name in dataset.texts), '')


def _columns(dataset: Dataset, given: str, rules: Rules, *, has_captions: bool) -> Columns:
  """Returns the features with image and classes; `given` is the feature with classes that the settings name."""
  folder, labels = dataset.folder, dataset.labels
  image = _choose(dataset.images, 'image', folder)
  if given and given not in labels:
    raise UserError(f'data.label_column: expected a feature of {folder} with classes '
                    f'({", ".join(sorted(labels)) or "none"}), got {given!r}. Set one of these.')
  if has_captions and not given and not {'label', 'labels'} & set(labels):
    return Columns(image, '', UNLABELED)
  single = [path for path, feature in labels.items() if not feature.several and '/' not in path]
  lists = [path for path, feature in labels.items() if feature.several and '/' not in path]
  path = given or (_choose(single, 'label', folder) if single else
                   _choose(lists or list(labels), 'labels' if labels else 'label', folder))
  return Columns(image, path, dataset.class_names(path, rules), labels[path].several)


def _choose(paths: Sequence[str], usual: str, folder: str) -> str:
  """Returns the feature with the usual name, or the only one. Raises UserError if there is neither."""
  if usual in paths or len(paths) == 1:
    return usual if usual in paths else paths[0]
  raise UserError(f'{folder}: expected one feature that can be the {usual}, or one of that name, got '
                  f'{", ".join(paths) or "none"}.' + (' Set data.label_column.' if paths and usual != 'image' else ''))


def _check_labels(source: TfdsSource) -> None:
  """Raises UserError if the first examples have no label, as in some test splits."""
  problem: example.BadLabel | None = None
  for row in range(min(len(source), _TRIES)):
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
