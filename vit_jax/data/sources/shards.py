"""Writes prepared datasets (`prepared.py`): completely, or not at all.

All files are written to `DIR.part`, shard by shard, which is renamed to `DIR` at the end. The same command resumes
after a kill, and joins if it already runs, on this host or another one that shares the folder (`shard_jobs.py`); a
command with other settings starts over.
"""
from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import logging
import pathlib
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.config.schema.data import RGB
from vit_jax.core import os_errors
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.data.image import channels
from vit_jax.data.image.headers import BadImage
from vit_jax.data.pipeline import group_order
from vit_jax.data.source import UNKNOWN, Record, Source, most_labels
from vit_jax.data.sources import prepared, shard_jobs
from vit_jax.data.sources.prepared import Shard
from vit_jax.data.sources.shard_jobs import Job
from vit_jax.data.text.encoded import Encoder

SHARD_BYTES, SHARD_RECORDS = 2**28, 2**13
"""About how much a shard holds by default: opening one takes 0.2 ms with 1,000 records, 0.6 ms with 8,000 and 11 ms
with 125,000."""
_PLAN, _LOCK, _CLOSING = 'plan.json', '.lock', '.closing'
log = logging.getLogger('vit_jax.data')


@dataclasses.dataclass(frozen=True)
class Settings:
  """How a dataset is made.

  short_px: images with a longer short side are resized to this one; 0 keeps all files unchanged.
  quality: JPEG quality of resized images, 1 to 100.
  num_shards: number of shards of each split; 0 = by `SHARD_BYTES` of the stored files, and by `SHARD_RECORDS`.
  seed: of the order of examples; None = that of the source.
  channels: of the images; mean and standard deviation of others than RGB are measured.
  captions: encodes the captions of the images, which are stored too; None = they are left out.
  """
  short_px: int
  quality: int
  num_shards: int
  seed: int | None
  channels: int = RGB
  captions: Encoder | None = None


def write(splits: Mapping[str, Source], folder: pathlib.Path, settings: Settings, *, name_of: Callable[[str], str],
          on_written: Callable[[int], None], processes: int = 1) -> bool:
  """Writes the splits as a prepared dataset.

  Args:
    splits: sources by the names of the splits to write.
    folder: the folder to write.
    settings: how the dataset is made.
    name_of: shortens the description of an example, such as a path; pickles if there are several processes.
    on_written: called with the number of examples after they are written.
    processes: of this machine that write shards; 0 = `shard_jobs.default_processes`.

  Returns:
    False if the same dataset exists already.

  Raises:
    UserError: the folder has other content, or another process writes it with other settings.
  """
  plan = describe_plan(splits, settings)
  if folder.is_dir() and any(folder.iterdir()):
    check_same(folder, plan)
    return False
  part = folder.with_name(f'{folder.name}.part')
  part.mkdir(parents=True, exist_ok=True)
  with open(part / _LOCK, 'w') as lock:
    _join(lock.fileno(), part, plan)
    jobs = {name: list(_jobs(name, source, part, settings, name_of)) for name, source in splits.items()}
    every = [job for some in jobs.values() for job in some]
    shard_jobs.run_in_processes(every, on_written, processes=processes or shard_jobs.default_processes(len(every)))
    with _closing(part) as is_mine:
      if is_mine:
        _close(part, folder, jobs, describe_content(splits, plan) | _measured(jobs, settings.channels))
  check_same(folder, plan)  # another process may have completed it
  return True


def describe_plan(splits: Mapping[str, Source], settings: Settings) -> dict[str, Any]:
  """Returns how a dataset is made, as `info.json` has it: equal plans make equal datasets."""
  plan = {'from': {k: s.name for k, s in splits.items()}, 'digests': {k: s.digest for k, s in splits.items()},
          **{one.name: getattr(settings, one.name) for one in dataclasses.fields(settings)}}
  if settings.channels == RGB:  # as plans were before there were others
    del plan['channels']
  del plan['captions']
  if settings.captions:
    plan['texts'] = settings.captions.encoding.to_json()
  return plan


def describe_content(splits: Mapping[str, Source], plan: Mapping[str, Any]) -> dict[str, Any]:
  """Returns what `info.json` says of a dataset, without its shards."""
  several = {'most_labels': most} if (most := _most_labels(splits.values())) else {}
  return {'format': prepared.FORMAT, 'made': plan, 'class_names': list(next(iter(splits.values())).class_names),
          **several, **({'texts': plan['texts']} if 'texts' in plan else {})}


def _measured(jobs: Mapping[str, Sequence[Job]], num_channels: int) -> dict[str, Any]:
  """Returns mean and standard deviation of each channel over `train`, or else the first split; {} for RGB.

  Raises:
    UserError: a channel has one value everywhere.
  """
  if num_channels == RGB:
    return {}
  split = 'train' if 'train' in jobs else next(iter(jobs))
  mean, std = channels.statistics(np.sum([job.sums() for job in jobs[split]], axis=0))
  if constant := [str(number) for number, value in enumerate(std) if not value > 0]:
    raise UserError(f'--data: expected channels whose values differ, got {", ".join(constant)} (counted from 0) with '
                    'one value in all images. Leave them out of the files.')
  return {'channels': num_channels, 'mean': mean, 'std': std}


def _most_labels(found: Collection[Source]) -> int:
  """Returns the largest number of labels of an image; a source that does not know it is read completely."""
  counts = [most_labels(source) for source in found]
  return max(max((len(_stored(source, i).labels or ()) for i in range(len(source))), default=1) if count == UNKNOWN
             else count for source, count in zip(found, counts, strict=True))


def _stored(source: Source, index: int) -> Record:
  """Returns a stored example; an empty one if it is damaged, and will be left out."""
  try:
    return source[index]
  except BadImage:
    return Record(b'', -1)


def check_same(folder: pathlib.Path, plan: Mapping[str, Any]) -> None:
  """Raises UserError if a folder has other content than the dataset of this plan."""
  there = prepared.read_info(folder).made if (folder / prepared.INFO).is_file() else None
  if there != json.loads(json.dumps(plan)):
    what = 'a dataset prepared with other settings' if there else 'other content'
    raise UserError(f'--to={folder}: expected a new folder, got one with {what}. Choose another folder.')


def _join(lock: int, part: pathlib.Path, plan: Mapping[str, Any]) -> None:
  """Shares the lock with the other processes that write the same dataset; the first one prepares the folder."""
  try:
    _lock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, part)
  except BlockingIOError:
    log.info('Another process writes %s; joining it.', part)
  else:
    try:
      _start_over_unless(part, plan)
    except OSError as error:
      raise os_errors.writing(f'--to={part}', error) from error
  _lock(lock, fcntl.LOCK_SH, part)  # waits while another process prepares the folder
  with contextlib.suppress(FileNotFoundError):  # the dataset has just been completed
    if (part / _PLAN).read_text() != json.dumps(plan):
      raise UserError(f'{part}: expected no other process to write it, got one with other settings. Wait for it, or '
                      'choose another --to.')


def _lock(lock: int, how: int, part: pathlib.Path) -> None:
  """Locks a file as `fcntl.flock`; raises UserError if the file system has no locks, BlockingIOError if it is taken."""
  try:
    fcntl.flock(lock, how)
  except BlockingIOError:
    raise
  except OSError as error:
    raise os_errors.kind(error)(f'--to={part}: expected a file system with locks (flock), got "{error.strerror}". '
                                'Choose a folder on a local disk or NFS, and copy the dataset afterwards.') from error


@contextlib.contextmanager
def _closing(part: pathlib.Path) -> Iterator[bool]:
  """Yields whether this process completes the dataset, which one of them does."""
  try:
    with open(part / _CLOSING, 'w') as file:
      fcntl.flock(file, fcntl.LOCK_EX)
      yield (part / _CLOSING).exists()
  except FileNotFoundError:
    if part.exists():
      raise
    yield False


def _start_over_unless(part: pathlib.Path, plan: Mapping[str, Any]) -> None:
  """Empties `part` unless it was started with the same plan."""
  path, text = part / _PLAN, json.dumps(plan)
  if path.is_file() and path.read_text() == text:
    for leftover in part.glob(f'*{shard_jobs.HALF}'):
      leftover.unlink()
    return
  for entry in part.iterdir():
    if entry.name != _LOCK:
      shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
  path.write_text(text)


def count_shards(split: str, source: Source, settings: Settings) -> int:
  """Returns the number of shards of a split. Raises UserError if it has no examples."""
  if not len(source):
    raise UserError(f'--data: expected at least one example in the split {split}, got none. Choose another '
                    'split or source.')
  num = settings.num_shards
  if not num:  # by the sizes of the first examples
    images = [_stored(source, i).image for i in _order(np.arange(min(50, len(source))), source, settings).tolist()]
    size = float(np.mean([len(image) if isinstance(image, bytes) else image.nbytes for image in images]))
    num = max(1, round(size * len(source) / SHARD_BYTES), -(-len(source) // SHARD_RECORDS))
  return min(len(source), num)


def plan_shard(split: str, number: int, count: int, source: Source, part: pathlib.Path, settings: Settings,
               name_of: Callable[[str], str]) -> Job:
  """Returns shard `number` of the `count` shards of a split: its part of a random order."""
  size, longer = divmod(len(source), count)  # the first `longer` shards have one example more
  start = number * size + min(number, longer)
  chosen = _order(np.arange(start, start + size + (number < longer)), source, settings)
  path = part / file_name(split, number, count)
  return Job(path, source, chosen, settings.short_px, settings.quality, name_of, settings.channels, settings.captions)


def file_name(split: str, number: int, count: int) -> str:
  """Returns the name of a shard."""
  return f'{split}-{number:05d}-of-{count:05d}.array_record'


def _jobs(split: str, source: Source, part: pathlib.Path, settings: Settings,
          name_of: Callable[[str], str]) -> Iterator[Job]:
  count = count_shards(split, source, settings)
  for number in range(count):
    yield plan_shard(split, number, count, source, part, settings, name_of)


def _order(positions: HostArray, source: Source, settings: Settings) -> HostArray:
  """Returns the examples at these positions of the order in which a split is written."""
  if settings.seed is None:
    return positions
  return group_order.stored(source, settings.seed)(positions)


def finish(shards: Mapping[str, Sequence[Shard]], info: Mapping[str, Any],
           num_examples: Mapping[str, int]) -> dict[str, str]:
  """Returns the files that complete a dataset, by name; `info.json` last, which says that it is complete.

  Args:
    shards: of each split, all written.
    info: from `describe_content`.
    num_examples: of each split, with those that were left out.

  Raises:
    UserError: a split has no images.
  """
  for name, some in shards.items():
    if not sum(shard.num_examples for shard in some):
      raise UserError(f'--data: expected images in the split {name}, got {num_examples[name]:,} files whose image or '
                      'label cannot be used. Their names and the reasons are above.')
  content = {**info, 'splits': {name: [s._asdict() for s in some] for name, some in shards.items()}}
  sums = ''.join(f'{s.sha256}  {s.file}\n' for some in shards.values() for s in some)
  return {prepared.SUMS: sums, prepared.INFO: json.dumps(content, indent=1)}


def _close(part: pathlib.Path, folder: pathlib.Path, jobs: Mapping[str, Sequence[Job]],
           info: Mapping[str, Any]) -> None:
  """Writes the description of the dataset, and renames the folder."""
  listed = {name: [shard for job in some if (shard := job.written())] for name, some in jobs.items()}
  for name, some in jobs.items():
    assert len(listed[name]) == len(some), f'{part}: a shard of {name} has no note'
  content = finish(listed, info, {name: sum(len(job.indexes) for job in some) for name, some in jobs.items()})
  for name, text in content.items():
    (part / name).write_text(text)
  known = {shard.file for shards in listed.values() for shard in shards}
  for leftover in sorted(part.iterdir(), key=lambda path: path.name in (_PLAN, _LOCK)):  # these last
    if leftover.name not in known | {prepared.INFO, prepared.SUMS}:
      leftover.unlink()
  part.rename(folder)
