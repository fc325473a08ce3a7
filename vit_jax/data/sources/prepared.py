"""Sets written by `--job=prepare`: ArrayRecord shards of `tf.Example` records, and what they are in `info.json`.

A record holds `image` (a file's bytes), `label` (its class) and `name`; where images have several classes, `labels`
too, and `info.json` says how many at most. It also holds the names of the classes, how the set was made, and of each
shard its size, number of examples and SHA-256; `SHA256SUMS` is for `sha256sum -c`. A folder without `info.json` is no
prepared set.
"""
from __future__ import annotations

import fnmatch
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from vit_jax.core.errors import UserError
from vit_jax.data.source import Record, Source
from vit_jax.data.sources import array_records, checksums, local_paths, splits, system_errors, tf_example
from vit_jax.data.sources.tf_example import BadRecord

FORMAT = 'vit_jax images 1'
INFO, SUMS = 'info.json', 'SHA256SUMS'


class Shard(NamedTuple):
  """A file of a split."""
  file: str
  num_examples: int
  num_bytes: int
  sha256: str


class PreparedSource:
  """Shards of one split."""

  def __init__(self, folder: pathlib.Path, shards: Sequence[Shard], *, name: str, class_names: tuple[str, ...],
               most_labels: int = 0) -> None:
    self.name, self.class_names, self.most_labels = name, class_names, most_labels
    self._records = array_records.Records([str(folder / s.file) for s in shards], [s.num_examples for s in shards])
    text = ' '.join([*(s.sha256 for s in shards), *class_names])
    self.digest = hashlib.sha256(text.encode(errors='surrogateescape')).hexdigest()

  def __len__(self) -> int:
    return len(self._records)

  def __getitem__(self, index: int) -> Record:
    found = tf_example.parse(self._records[index])
    image = tf_example.first(found, 'image')
    if self.most_labels:
      return Record.multilabel(image, tf_example.integers(found, 'labels'))  # type: ignore[arg-type]
    return Record(image, int(tf_example.first(found, 'label')))  # type: ignore[arg-type]

  def label(self, index: int) -> int:
    return int(tf_example.first(tf_example.parse(self._records[index]), 'label'))

  def describe(self, index: int) -> str:
    place = f'{self.name}[{index}]'
    try:
      name = tf_example.first(tf_example.parse(self._records[index]), 'name')
    except (BadRecord, OSError):  # it is named in a message about just that
      return place
    return f'{place} ({os.fsdecode(name)})' if isinstance(name, bytes) else place


def opener(where: str, *, verify: bool = True) -> Callable[[str], Source]:
  """How to open a split of a prepared set.

  Args:
    where: its folder, or a pattern of shards in it such as `DIR/train-0000*`.
    verify: compare the checksums of its shards, of each once.

  Raises:
    UserError: there is no such set, or (when opening) it is not whole.
  """
  path = pathlib.Path(local_paths.resolve(where, 'array_record:DIR'))
  folder, pattern = (path.parent, path.name) if set(path.name) & set('*?[') else (path, '*')
  info = read_info(folder)

  @functools.cache
  def open_named(split: str) -> Source:
    name = splits.resolve(split, info['splits'], source=f'array_record:{where}')
    listed = [Shard(**s) for s in info['splits'][name]]
    shards = [s for s in listed if fnmatch.fnmatch(s.file, pattern)]
    if not shards:
      raise UserError(f'array_record:{where} matches no shard of {name} in {folder}; there are: '
                      f'{", ".join(s.file for s in listed[:5])}')
    _check_sizes(folder, shards)
    if verify:
      _check_sums(folder, shards)
    return PreparedSource(folder, shards, name=f'array_record:{where}/{name}', class_names=tuple(info['class_names']),
                          most_labels=info.get('most_labels', 0))
  return open_named


def read_info(folder: pathlib.Path) -> dict[str, Any]:
  """What `folder/info.json` says.

  Raises:
    UserError: it is not there, or of another format.
  """
  path = folder / INFO
  if not path.is_file():
    part = folder.with_name(f'{folder.name}.part')
    hint = (f'; {part} is one that was not finished: run the same --job=prepare again' if part.is_dir() else
            f'; right would be a folder written by --job=prepare --data=folder:PATH --to={folder}')
    raise UserError(f'there is no prepared set in {folder} (no {INFO}){hint}')
  try:
    info = json.loads(path.read_text())
    if not isinstance(info, dict):
      raise TypeError(f'a {type(info).__name__}')
    if info.get('format') == FORMAT:
      shards = [Shard(**shard) for shards in info['splits'].values() for shard in shards]
      if outside := [shard.file for shard in shards if not _is_inside(shard.file)]:
        raise ValueError(f'{outside[0]!r}, which is not a file of this folder')
      tuple(info['class_names'])
  except OSError as error:
    raise system_errors.stop(error, str(path)) from error
  except (ValueError, TypeError, KeyError, AttributeError) as error:
    raise UserError(f'{path}: expected what --job=prepare wrote, got {type(error).__name__}: {error}. It is damaged: '
                    'copy it again, or prepare the set again') from error
  if info.get('format') != FORMAT:
    raise UserError(f'{path} says format {info.get("format")!r}; right would be {FORMAT!r}: prepare the set again')
  return info


def _is_inside(file: str) -> bool:
  """Whether a file that a description names lies in its folder."""
  path = pathlib.PurePath(file)
  return bool(path.parts) and not path.is_absolute() and '..' not in path.parts and '\0' not in file


def _check_sums(folder: pathlib.Path, shards: Sequence[Shard]) -> None:
  changed = checksums.find_changed(folder, {s.file: s.sha256 for s in shards}, setting='data.verify_shards=false')
  if changed:
    expected = {s.file: s.sha256 for s in shards}
    shown = '; '.join(f'{file}: expected SHA-256 {expected[file][:12]}…, got {found[:12]}…'
                      for file, found in list(changed.items())[:5])
    raise UserError(f'{len(changed)} of {len(shards)} shards in {folder} are not as they were written: {shown}. Copy '
                    'them again, or prepare the set again; data.verify_shards=false reads them all the same, and '
                    'counts damaged records as bad images')


def _check_sizes(folder: pathlib.Path, shards: Sequence[Shard]) -> None:
  faults = []
  for shard in shards:
    path = folder / shard.file
    size = path.stat().st_size if path.is_file() else None
    if size != shard.num_bytes:
      faults.append(f'{shard.file}: ' + ('missing' if size is None else f'{size:,} bytes') +
                    f', want {shard.num_bytes:,} bytes')
  if faults:
    raise UserError(f'{len(faults)} shards in {folder} are not as they were written: {"; ".join(faults[:5])}; '
                    f'right would be a whole copy (sha256sum -c {SUMS} tells), or to prepare it again')
