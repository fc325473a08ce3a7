"""`array_record:DIR`: datasets that `vit-jax prepare` has written, as ArrayRecord shards of `tf.Example` records.

`opening.py` calls `opener`, which reads `info.json` (`read_info`) and then opens splits (`PreparedSource`).
`prepare.py` writes datasets, with the names and types of this module. The package `array_record` reads the records of
the shards in any order (`ArrayRecords`, which `tfds.py` uses, too). From shards in object storage, only the bytes of
the records are read (`remote_records.py`). A prepared dataset is a folder DIR with these files:

  train-00000-of-00004.array_record   a shard; its records have `image` (the bytes of a file), `name`, and `label` or
                                      `labels` (classes); and captions with the ids of their tokens (`text/stored.py`)
  SHA256SUMS                          the checksums of the shards, for `sha256sum -c`
  info.json                           `splits` (shards, see `Shard`), `class_names`, and `made` (how the dataset was
                                      made); if needed also `most_labels`, `texts` (how captions were encoded), and
                                      `channels`, `mean` and `std` of the training images, unless they are RGB
"""
from __future__ import annotations

import bisect
import contextlib
import fnmatch
import functools
import hashlib
import itertools
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from vit_jax.config import schema
from vit_jax.config.schema.data import RGB
from vit_jax.core import documents, failures, files
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.data import open_files, splits, storage, user_files
from vit_jax.data.formats import example, remote_records
from vit_jax.data.formats.example import BadRecord
from vit_jax.data.formats.remote_records import RemoteRecords
from vit_jax.data.labels import classes
from vit_jax.data.source import Record, Source
from vit_jax.data.storage import Span
from vit_jax.data.text import stored
from vit_jax.data.text.stored import Encoding
from vit_jax.data.user_files import Rules

FORMAT = 'vit_jax images 1'
INFO, SUMS = 'info.json', 'SHA256SUMS'
_AGAIN = 'The file is damaged: copy it again, or prepare the dataset again.'
_MAX_CHARS_SHOWN = 160  # of the error of the reader, in a message


class ArrayRecords:
  """The records of several ArrayRecord files, numbered from 0 in the order of the files.

  Pickles to few bytes; safe for threads. The format has a checksum of every record, which the reader compares.
  """

  def __init__(self, paths: Sequence[str], counts: Sequence[int], sizes: Sequence[int] = ()) -> None:
    """Takes for each file the absolute path or address, the number of records, and for an address the size in bytes."""
    self._paths, self._counts, self._sizes = tuple(paths), tuple(counts), tuple(sizes)
    self._starts = [0, *itertools.accumulate(counts)]  # the number of records before each file, and in all files

  def __len__(self) -> int:
    return self._starts[-1]

  def _find(self, number: int) -> tuple[int, int]:
    """Returns the index of the file with a record, and the position of the record in the file."""
    if not 0 <= number < len(self):
      raise IndexError(f'expected a number below {len(self):,}, the number of records, got {number}')
    file = bisect.bisect_right(self._starts, number) - 1
    return file, number - self._starts[file]

  def path(self, number: int) -> str:
    """Returns the path or address of the file of a record."""
    return self._paths[self._find(number)[0]]

  def read(self, numbers: Sequence[int]) -> Iterator[bytes]:
    """Yields the records with these numbers. Object storage reads the ends of files, then records, at the same time.

    Raises BadRecord at a record that is damaged, OSError if its file cannot be read, and UserError if the file has
    another number of records.
    """
    needed_files = dict.fromkeys(self._find(number)[0] for number in numbers)
    if not any(storage.is_address(self._paths[file]) for file in needed_files):
      yield from map(self.__getitem__, numbers)
      return
    closed_files = [file for file in needed_files if ('array_record', self._paths[file]) not in open_files.pool()]
    ends = storage.read_many(remote_records.find_end(self._paths[file], self._counts[file], self._sizes[file])
                             for file in closed_files)
    for file, end in zip(closed_files, ends, strict=True):
      with self._open_remote(file, end):
        pass  # the file is open now, and stays in the pool

    def find_span(number: int) -> Span:
      file, position = self._find(number)
      with self._open_remote(file) as opened:
        return opened.span(position)
    for number, content in zip(numbers, storage.read_many(map(find_span, numbers)), strict=True):
      yield self._read_record(number, content)

  def __getitem__(self, number: int) -> bytes:
    """Returns a record; raises as `read`."""
    return self._read_record(number)

  def _read_record(self, number: int, content: bytes = b'') -> bytes:
    """Returns a record; `content` has the bytes of the span of the record in object storage, b'' = not read yet."""
    file, position = self._find(number)
    path, count = self._paths[file], self._counts[file]
    try:
      if storage.is_address(path):
        with self._open_remote(file) as opened:
          return opened.decode(position, content or storage.read(*opened.span(position)))
      with open_files.pool().use(('array_record', path), lambda: _open_array_record(path, count),
                                 lambda opened: opened.close()) as reader:
        record: bytes = reader.read(position, position + 1)[0]  # with a list of positions, large files take longer
        return record
    except TemporaryError:
      raise
    except (RuntimeError, IndexError) as error:
      if system_error := failures.system_error(error, path):
        raise system_error from error
      raise BadRecord(f'record {position} of {path} is damaged: {str(error)[:_MAX_CHARS_SHOWN]}') from error

  def _open_remote(self, file: int, end: bytes = b'') -> contextlib.AbstractContextManager[RemoteRecords]:
    """Returns a context with an open file in object storage; `end` has the bytes of `find_end`, b'' = not read yet."""
    path, count, size = self._paths[file], self._counts[file], self._sizes[file]
    return open_files.pool().use(('array_record', path), lambda: RemoteRecords(path, count, size, end),
                                 RemoteRecords.close, num_files=RemoteRecords.NUM_FILES)


def _open_array_record(path: str, count: int) -> Any:
  """Returns the reader of a local file. Raises OSError if the file cannot be read, UserError if `count` is wrong."""
  from array_record.python import array_record_module
  with documents.open_file(path):
    pass  # unlike the reader, `open_file` raises OSError with an `errno`
  reader = array_record_module.ArrayRecordReader(path, **remote_records.READER)
  num_records = reader.num_records()
  if num_records not in (0, count):  # 0 in a truncated file
    reader.close()
    raise UserError(f'{path}: expected {count:,} records, got {num_records:,}. Copy or prepare the dataset again.')
  return reader


class Shard(NamedTuple):
  """A file with examples of a split; `file` is the name in the folder of the dataset."""
  file: str
  num_examples: int
  num_bytes: int
  sha256: str


class Statistics(NamedTuple):
  """Mean and standard deviation of each channel, in the units of the images."""
  mean: tuple[float, ...]
  std: tuple[float, ...]


class PreparedSource:
  """The examples of one split, a `Source`; `row` is the position of an example in the shards, from 0."""

  def __init__(self, folder: str, shards: Sequence[Shard], *, name: str, class_names: tuple[str, ...],
               most_labels: int = 0, statistics: Statistics | None = None, encoding: Encoding | None = None,
               own_files: bool = False) -> None:
    """Takes the path or address of the folder, the shards, and attributes as `Info` and `Source` describe them."""
    self.name, self.class_names, self.most_labels = name, class_names, most_labels
    self.statistics, self.encoding, self.own_files = statistics, encoding, own_files
    self._label_feature = 'labels' if most_labels else 'label'
    self._records = ArrayRecords([f'{folder}/{shard.file}' for shard in shards],
                                 [shard.num_examples for shard in shards], [shard.num_bytes for shard in shards])
    text = ' '.join([*(shard.sha256 for shard in shards), *class_names])
    self.digest = hashlib.sha256(text.encode(errors='surrogateescape')).hexdigest()

  def __len__(self) -> int:
    return len(self._records)

  def read(self, rows: Sequence[int]) -> Iterator[Record]:
    for record in self._records.read(rows):
      features = example.pick(record, 'image', self._label_feature)
      yield Record(example.get_bytes(features, 'image'), self._get_labels(features))

  @property
  def caption_column(self) -> str:
    return stored.CAPTIONS if self.encoding else ''

  def captions(self, row: int) -> tuple[str, ...]:
    """Returns the captions of an image. Raises BadImage if the record is damaged."""
    if not self.encoding:
      return ()
    features = example.pick(self._records[row], stored.CAPTIONS)
    return stored.texts(features.get(stored.CAPTIONS, ()), f'the feature {stored.CAPTIONS}')

  def token_ids(self, row: int) -> list[list[int]]:
    """Returns the ids of each caption of an image. Raises BadImage if the record is damaged."""
    return stored.ids(example.pick(self._records[row], stored.IDS, stored.ENDS), self.name)

  def path(self, row: int) -> str:
    """Returns the path or address of the shard with an example."""
    return self._records.path(row)

  def labels(self, row: int) -> tuple[int, ...]:
    return self._get_labels(example.pick(self._records[row], self._label_feature))

  def _get_labels(self, features: Mapping[str, Sequence[Any]]) -> tuple[int, ...]:
    num_classes = len(self.class_names)
    if self.most_labels and 'labels' in features:  # a split whose images have one class each may lack `labels`
      return tuple(example.get_classes(features, 'labels', num_classes=num_classes))
    return (example.get_class(features, 'label', num_classes=num_classes),)

  def describe(self, row: int) -> str:
    position = f'{self.name}[{row}]'
    try:
      name = example.get_first(example.pick(self._records[row], 'name'), 'name')
    except (BadRecord, OSError, TemporaryError):  # the message about the record then has the position alone
      return position
    return f'{position} ({os.fsdecode(name)})' if isinstance(name, bytes) else position


def opener(where: str, data: schema.Data, image_px: tuple[int, int]) -> Callable[[str], Source]:
  """Returns the function that opens a split of a prepared dataset, or of shards in it such as `DIR/train-0000*`.

  The checksum of each record is compared when the record is read. The sizes of shards are compared when a split is
  opened, and in object storage when a shard is first read. Raises UserError if there is no such dataset, or (when a
  split is opened) the dataset is incomplete.
  """
  del image_px
  path = user_files.locate(where, 'array_record:DIR')
  folder, _, pattern = path.rpartition('/') if is_pattern(path) else (path, '', '*')
  info = read_info(folder)
  channels = len(info.statistics.mean) if info.statistics else RGB
  if channels != data.channels:
    raise UserError(f'data.channels: expected {channels}, the number of channels of the images of {folder}, got '
                    f'{data.channels}. Set --config.data.channels={channels}.')

  @functools.cache
  def open_named(split: str) -> Source:
    name = splits.resolve(split, info.splits, source=f'array_record:{where}')
    shards = [shard for shard in info.splits[name] if fnmatch.fnmatch(shard.file, pattern)]
    if not shards:
      raise UserError(f'array_record:{where}: expected a pattern of shards of {name}, such as '
                      f'{", ".join(shard.file for shard in info.splits[name][:5])}, got none in {folder}. Correct the '
                      'pattern.')
    if not storage.is_address(folder):
      for shard in shards:
        user_files.check_inside(os.path.join(folder, shard.file), folder, Rules.of(data))
      _check_sizes(pathlib.Path(folder), shards)
    return PreparedSource(folder, shards, name=f'array_record:{where}/{name}', class_names=info.class_names,
                          most_labels=info.most_labels, statistics=info.statistics, encoding=info.encoding,
                          own_files=info.is_of_folder)
  return open_named


def is_pattern(path: str) -> bool:
  """Returns whether a path has a wildcard in its last part, and is not the path of a folder."""
  return any(mark in path.rpartition('/')[2] for mark in '*?[') and not os.path.isdir(path)


class Info(NamedTuple):
  """The content of `info.json`.

  splits: the shards of each split, by its name.
  most_labels: the largest number of classes of an image; 0 = each image has one class.
  made: how the dataset was made, as JSON; the field `from` has the source of each split.
  statistics: the statistics of the training images; None = the images are RGB.
  encoding: how the captions were encoded; None = there are no captions.
  """
  splits: dict[str, tuple[Shard, ...]]
  class_names: tuple[str, ...]
  most_labels: int
  made: Any
  statistics: Statistics | None = None
  encoding: Encoding | None = None

  @property
  def is_of_folder(self) -> bool:
    """Whether the images were files of a folder. The shards keep their EXIF data, which tells which side is up."""
    sources = self.made.get('from') if isinstance(self.made, dict) else None
    return isinstance(sources, dict) and any(str(name).startswith('folder:') for name in sources.values())


def read_info(folder: str | os.PathLike[str]) -> Info:
  """Returns the content of `folder/info.json`; the folder may be an address.

  Raises UserError if the file is missing, damaged, or of another format, and TemporaryError if the storage fails.
  """
  path, expected = f'{os.fspath(folder)}/{INFO}', 'the output of vit-jax prepare'
  with documents.explained(path, path, max_bytes=documents.MAX_BYTES, expected=expected, advice=_AGAIN):
    try:
      content = failures.retried(lambda: storage.read_file(path, documents.MAX_BYTES), f'reading {path}')
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
      raise UserError(f'{folder}: expected a prepared dataset, got no {INFO}. {_advise(os.fspath(folder))}') from None
    except OSError as error:
      raise failures.unreadable(error, path) from error
  info = documents.field(content, path, expected=expected, advice=_AGAIN)
  file_format = info.field('format').value
  if file_format != FORMAT:
    raise UserError(f'{path}: expected the format {FORMAT!r}, got {documents.describe(file_format)}. Prepare the '
                    'dataset again.')
  if wrong := [name for name in info.field('splits').object() if not re.fullmatch(r'[\w.-]{1,100}', name)]:
    raise UserError(f'{path}, splits: expected names of letters and digits, got {documents.listed(wrong, 3)}. '
                    f'{_AGAIN}')
  shards_by_split = {name: tuple(read_shard(shard) for shard in shards.elements())
                     for name, shards in info.field('splits').fields()}
  num_examples = sum(shard.num_examples for shards in shards_by_split.values() for shard in shards)
  class_names = classes.from_json(info.field('class_names'), num_examples=num_examples)
  most_labels, texts = info.optional('most_labels'), info.optional('texts')
  return Info(shards_by_split, class_names, most_labels=most_labels.whole(0, 2**31 - 1) if most_labels else 0,
              made=info.field('made').value, statistics=_read_statistics(info),
              encoding=stored.from_json(texts) if texts else None)


def _advise(folder: str) -> str:
  """Returns the advice of a message that a folder has no prepared dataset."""
  if storage.is_address(folder):
    return ('Prepare one with vit-jax prepare --data=folder:PATH --to=DIR, and copy it there: gcloud storage rsync '
            '--recursive DIR gs://BUCKET/DIR, or aws s3 sync DIR s3://BUCKET/DIR.')
  if unfinished := files.find_parts(pathlib.Path(folder)):
    return f'{unfinished[0]} is not finished: run the same vit-jax prepare again.'
  return f'Prepare one with vit-jax prepare --data=folder:PATH --to={folder}.'


def _read_statistics(info: documents.Field) -> Statistics | None:
  """Returns the statistics in `info.json`; None if the images are RGB."""
  channels = info.optional('channels')
  if channels is None:
    return None
  num_channels = channels.whole(1, 1024)
  mean, std = (tuple(value.number() for value in info.field(name).elements()) for name in ('mean', 'std'))
  if len(mean) != num_channels or len(std) != num_channels or min(std) <= 0:
    raise channels.error(f'{num_channels} means and {num_channels} standard deviations above 0')
  return Statistics(mean, std)


def read_shard(shard: documents.Field) -> Shard:
  """Returns a shard that `info.json` describes. Raises UserError if a field is missing or wrong."""
  file = shard.field('file')
  if not user_files.is_below(file.text()) or '/' in file.text():
    raise file.error(f'the name of a file in {os.path.dirname(shard.source)}')
  num_bytes = shard.field('num_bytes').whole(0)
  num_examples = shard.field('num_examples').whole(0, num_bytes)
  return Shard(file.text(), num_examples, num_bytes, shard.field('sha256').text())


def _check_sizes(folder: pathlib.Path, shards: Sequence[Shard]) -> None:
  """Raises UserError unless all shards exist and have the sizes that `info.json` lists."""
  problems = []
  for shard in shards:
    path = folder / shard.file
    if not path.is_file():
      problems.append(f'{shard.file}: expected {shard.num_bytes:,} bytes, got no file')
    elif path.stat().st_size != shard.num_bytes:
      problems.append(f'{shard.file}: expected {shard.num_bytes:,} bytes, got {path.stat().st_size:,} bytes')
  if problems:
    raise UserError(f'{folder}: {len(problems)} shards have changed: {"; ".join(problems[:5])}. Copy the dataset again '
                    f'(check the copy with sha256sum -c {SUMS}), or prepare it again.')
