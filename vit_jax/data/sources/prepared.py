"""`array_record:DIR`: datasets written by `--job=prepare`, as ArrayRecord shards of `tf.Example` records.

A record has `image` (the bytes of a file), `label` (its class) and `name`; if images have several classes, also
`labels`, and `info.json` has their largest number. Of images with other channels than RGB it has `channels`, and the
mean and the standard deviation of each one in the training split. With captions (`vit-jax prepare --tokens=…`) it has
these and their ids (`text/encoded.py`). `info.json` also has the names of the classes, how
the dataset was made, and size, number of examples and SHA-256 of each shard; `SHA256SUMS` is for `sha256sum -c`. A
folder without `info.json` is not a prepared dataset.
"""
from __future__ import annotations

import fnmatch
import functools
import hashlib
import os
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from vit_jax.config import schema
from vit_jax.config.schema import Placement, VerifyShards
from vit_jax.config.schema.data import RGB
from vit_jax.core.errors import UserError
from vit_jax.data.files import access, checksums, json_fields, ranges, records, remote, user_files, verification
from vit_jax.data.files.ranges import Range
from vit_jax.data.files.user_files import Rules
from vit_jax.data.labels import classes
from vit_jax.data.source import Record, Source
from vit_jax.data.sources import splits
from vit_jax.data.text import encoded
from vit_jax.data.text.encoded import Encoding

FORMAT = 'vit_jax images 1'
INFO, SUMS = 'info.json', 'SHA256SUMS'
_AGAIN = 'The file is damaged: copy it again, or prepare the dataset again.'


class Shard(NamedTuple):
  """A file of a split."""
  file: str
  num_examples: int
  num_bytes: int
  sha256: str


class Statistics(NamedTuple):
  """Mean and standard deviation of each channel, in the units of the images."""
  mean: tuple[float, ...]
  std: tuple[float, ...]


class PreparedSource:
  """Shards of one split."""

  def __init__(self, folder: str, shards: Sequence[Shard], *, name: str, class_names: tuple[str, ...],
               most_labels: int = 0, verify: checksums.Expected | None = None,
               statistics: Statistics | None = None, encoding: Encoding | None = None) -> None:
    """Takes the shards, and the checksums that are to be compared when they are used (`file`)."""
    self.name, self.class_names, self.most_labels, self._verify = name, class_names, most_labels, verify
    self.statistics, self.encoding = statistics, encoding
    self._folder, self._shards = folder, [s.file for s in shards]
    self.shard_sizes = [s.num_examples for s in shards]
    self._records = records.ArrayRecords(
        [f'{folder}/{s.file}' for s in shards], [s.num_examples for s in shards], [s.num_bytes for s in shards])
    text = ' '.join([*(s.sha256 for s in shards), *class_names])
    self.digest = hashlib.sha256(text.encode(errors='surrogateescape')).hexdigest()

  def __len__(self) -> int:
    return len(self._records)

  def __getitem__(self, index: int) -> Record:
    found = records.pick(self._records[index], 'image', 'labels' if self.most_labels else 'label')
    image = records.encoded(found, 'image')
    if self.most_labels:
      return Record.multilabel(image, records.classes(found, 'labels', len(self.class_names)))
    return Record(image, records.label(found, 'label', len(self.class_names)))

  @property
  def caption_column(self) -> str:
    return encoded.CAPTIONS if self.encoding else ''

  def captions(self, index: int) -> tuple[str, ...]:
    """Returns the captions of an image. Raises BadImage if the record is damaged."""
    return encoded.texts(records.pick(self._records[index], encoded.CAPTIONS))

  def token_ids(self, index: int) -> list[list[int]]:
    """Returns the ids of each caption of an image. Raises BadImage if the record is damaged."""
    return encoded.rows(records.pick(self._records[index], encoded.IDS, encoded.ENDS), self.name)

  def file(self, index: int) -> verification.File | None:
    """Returns the shard of an example, if its checksum is to be compared when it is used."""
    if self._verify is None:
      return None
    number = self._records.find_file(index)
    return verification.File(self._verify, self._shards[number], number)

  def check_file(self, index: int) -> None:
    """Raises UserError if the shard of an example is not on this host."""
    path = f'{self._folder}/{self._shards[self._records.find_file(index)]}'
    if not remote.is_address(path) and not os.path.isfile(path):
      raise UserError(f'{path}: expected this shard on this host, got no file. Copy it here: of H hosts, host h reads '
                      'the shards whose place in info.json is h, h + H, h + 2H, ...')

  def opening(self, index: int) -> Range | None:
    """Returns the range to read before `part` of an example is known; None if it is known, or the file is local."""
    return self._records.opening(index)

  def part(self, index: int) -> Range | None:
    """Returns the range that is read for an example; None if the file is local."""
    return self._records.part(index)

  def label(self, index: int) -> int:
    found = records.pick(self._records[index], 'labels' if self.most_labels else 'label')
    if self.most_labels:
      return next(iter(records.classes(found, 'labels', len(self.class_names))), -1)
    return records.label(found, 'label', len(self.class_names))

  def describe(self, index: int) -> str:
    place = f'{self.name}[{index}]'
    try:
      name = records.first(records.pick(self._records[index], 'name'), 'name')
    except (records.BadRecord, OSError):  # the caller describes this record in its error message
      return place
    return f'{place} ({os.fsdecode(name)})' if isinstance(name, bytes) else place


def opener(where: str, data: schema.Data, image_px: tuple[int, int]) -> Callable[[str], Source]:
  """Opens the splits of a prepared dataset: its folder, or a pattern of shards in it such as `DIR/train-0000*`.

  With `data.verify_shards=first`, the checksums of its shards are compared, each once. Shards in object storage are
  read by ranges; each is found, and its size compared, when it is used.

  Raises:
    UserError: there is no such dataset, or (when opening) it is incomplete.
  """
  del image_px
  path = access.locate(where, 'array_record:DIR')
  folder, _, pattern = path.rpartition('/') if is_pattern(path) else (path, '', '*')
  info = read_info(folder)
  if (found := len(info.statistics.mean) if info.statistics else RGB) != data.channels:
    raise UserError(f'data.channels: expected {found}, the number of channels of the images of {folder}, got '
                    f'{data.channels}. Set --config.data.channels={found}.')

  @functools.cache
  def open_named(split: str) -> Source:
    name = splits.resolve(split, info.splits, source=f'array_record:{where}')
    listed = info.splits[name]
    shards = [s for s in listed if fnmatch.fnmatch(s.file, pattern)]
    if not shards:
      raise UserError(f'array_record:{where}: expected a pattern of shards of {name}, such as '
                      f'{", ".join(s.file for s in listed[:5])}, got none in {folder}. Correct the pattern.')
    part_is_enough = data.placement is Placement.HOST_SHARDS and name == _training_split(data, info)
    return PreparedSource(folder, shards, name=f'array_record:{where}/{name}', class_names=info.class_names,
                          most_labels=info.most_labels, statistics=info.statistics, encoding=info.encoding,
                          verify=_check(folder, shards, data, part_is_enough=part_is_enough))
  return open_named


def is_pattern(path: str) -> bool:
  """Returns whether a path is a pattern of shards."""
  return bool(set(path.rpartition('/')[2]) & set('*?['))


def _training_split(data: schema.Data, info: Info) -> str:
  return splits.resolve(splits.parse(data.train_split)[0].name, info.splits, source=data.source)


def _check(folder: str, shards: Sequence[Shard], data: schema.Data, *,
           part_is_enough: bool) -> checksums.Expected | None:
  """Checks shards as far as the settings ask for it, and returns the checksums that are left to compare.

  With `part_is_enough`, only shards that are there are checked.

  Raises:
    UserError: one is missing or has changed.
  """
  if remote.is_address(folder):
    if data.verify_shards is VerifyShards.FIRST:
      raise UserError(f'data.verify_shards: expected lazy or no with {folder}, whose shards are not read completely, '
                      'got first. Each record is compared with its own checksum.')
    return None
  place = pathlib.Path(folder)
  if part_is_enough:
    shards = [shard for shard in shards if (place / shard.file).is_file()]
  for shard in shards:
    user_files.check_inside(str(place / shard.file), folder, Rules.of(data))
  _check_sizes(place, shards)
  expected = checksums.Expected(place, {shard.file: shard.sha256 for shard in shards})
  if data.verify_shards is VerifyShards.FIRST:
    _check_sums(expected)
  return expected if data.verify_shards is VerifyShards.LAZY else None


class Info(NamedTuple):
  """Content of `info.json`: shards by split, classes, the largest number of labels (0 = each image has one class).

  made: how the dataset was made, as JSON has it.
  statistics: of the channels, if they are not RGB.
  encoding: of the captions; None if it has none.
  """
  splits: dict[str, tuple[Shard, ...]]
  class_names: tuple[str, ...]
  most_labels: int
  made: Any
  statistics: Statistics | None = None
  encoding: Encoding | None = None


def read_info(folder: str | os.PathLike[str]) -> Info:
  """Returns the content of `folder/info.json`; the folder may be an address.

  Raises:
    UserError: it is missing, damaged, or of another format.
    TemporaryError: its storage fails.
  """
  path, expected = f'{os.fspath(folder)}/{INFO}', 'the output of vit-jax prepare'
  if remote.is_address(path):
    found = json_fields.parse(_read_remote(path), path, expected=expected, advice=_AGAIN)
  else:
    _check_there(pathlib.Path(folder))
    found = json_fields.read(path, expected=expected, advice=_AGAIN)
  kind = found.field('format')
  if kind.value != FORMAT:
    raise UserError(f'{path}: expected the format {FORMAT!r}, got {json_fields.describe(kind.value)}. Prepare the '
                    'dataset again.')
  if wrong := [name for name in found.field('splits').object() if not re.fullmatch(r'[\w.-]{1,100}', name)]:
    raise UserError(f'{path}, splits: expected names of letters and digits, got {json_fields.listed(wrong, 3)}. '
                    f'{_AGAIN}')
  splits_of = {name: tuple(read_shard(one) for one in some.items()) for name, some in found.field('splits').fields()}
  num = sum(shard.num_examples for some in splits_of.values() for shard in some)
  most = found.optional('most_labels')
  return Info(splits_of, classes.from_json(found.field('class_names'), num_examples=num),
              most.whole(0, 2**31 - 1) if most else 0, found.field('made').value, _read_statistics(found),
              encoded.from_json(texts) if (texts := found.optional('texts')) else None)


def _read_statistics(found: json_fields.Field) -> Statistics | None:
  channels = found.optional('channels')
  if channels is None:
    return None
  num = channels.whole(1, 1024)
  mean, std = (tuple(one.number() for one in found.field(name).items()) for name in ('mean', 'std'))
  if len(mean) != num or len(std) != num or min(std) <= 0:
    raise channels.error(f'{num} means and {num} standard deviations above 0')
  return Statistics(mean, std)


def _read_remote(path: str) -> bytes:
  try:
    return ranges.read_file(path, user_files.TEXT_BYTES)
  except FileNotFoundError:
    raise UserError(f'{os.path.dirname(path)}: expected a prepared dataset, got no {INFO}. Prepare one with '
                    'vit-jax prepare --data=folder:PATH --to=DIR, and copy it there: gcloud storage rsync --recursive '
                    'DIR gs://BUCKET/DIR, or aws s3 sync DIR s3://BUCKET/DIR.') from None
  except user_files.TooLarge as error:
    raise UserError(f'{path}: expected at most {user_files.TEXT_BYTES:,} bytes, got {error}. {_AGAIN}') from None
  except OSError as error:
    raise access.unreadable(error, path) from error


def _check_there(folder: pathlib.Path) -> None:
  if not (folder / INFO).is_file():
    part = folder.with_name(f'{folder.name}.part')
    hint = (f'{part} is not finished: run the same vit-jax prepare again.' if part.is_dir() else
            f'Prepare one with vit-jax prepare --data=folder:PATH --to={folder}.')
    raise UserError(f'{folder}: expected a prepared dataset, got no {INFO}. {hint}')


def read_shard(found: json_fields.Field) -> Shard:
  """Returns a shard as `info.json` describes it. Raises UserError if a field is missing or wrong."""
  file = found.field('file')
  if not user_files.is_below(file.text()) or '/' in file.text():
    raise file.error(f'the name of a file in {os.path.dirname(found.file)}')
  num_bytes = found.field('num_bytes').whole(0)
  return Shard(file.text(), found.field('num_examples').whole(0, num_bytes), num_bytes, found.field('sha256').text())


def _check_sums(expected: checksums.Expected) -> None:
  changed = checksums.find_changed(expected.folder, expected.digests, setting='data.verify_shards=lazy')
  if changed:
    raise UserError(verification.changed(expected, changed))


def _check_sizes(folder: pathlib.Path, shards: Sequence[Shard]) -> None:
  problems = []
  for shard in shards:
    path = folder / shard.file
    size = path.stat().st_size if path.is_file() else None
    if size != shard.num_bytes:
      problems.append(f'{shard.file}: expected {shard.num_bytes:,} bytes, got '
                      + ('no file' if size is None else f'{size:,} bytes'))
  if problems:
    raise UserError(f'{folder}: {len(problems)} shards have changed: {"; ".join(problems[:5])}. Copy the dataset again '
                    f'(check the copy with sha256sum -c {SUMS}), or prepare it again.')
