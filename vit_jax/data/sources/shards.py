"""Writes prepared datasets (`prepared.py`): completely, or not at all.

All files are written to `DIR.part`, shard by shard, which is renamed to `DIR` at the end. A finished shard has a note
beside it, so that the same command resumes after a kill; another command starts over.
"""
from __future__ import annotations

import concurrent.futures
import dataclasses
import fcntl
import json
import logging
import os
import pathlib
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vit_jax.core import lazy
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.data.files import checksums, open_files, records
from vit_jax.data.image import decode, headers
from vit_jax.data.pipeline import order
from vit_jax.data.source import UNKNOWN, Source, most_labels
from vit_jax.data.sources import prepared

if TYPE_CHECKING:
  import cv2
else:
  cv2 = lazy.Module('cv2')

_CHUNK = 64  # examples converted at a time
log = logging.getLogger('vit_jax.data')
_PLAN, _LOCK, _NOTE = 'plan.json', '.lock', '.done'


@dataclasses.dataclass(frozen=True)
class Settings:
  """How a dataset is made.

  short_px: images with a longer short side are resized to this one; 0 keeps all files unchanged.
  quality: JPEG quality of resized images, 1 to 100.
  num_shards: number of shards of each split; 0 = one for about every 256 MiB of the stored files.
  seed: of the order of examples.
  """
  short_px: int
  quality: int
  num_shards: int
  seed: int


def write(splits: Mapping[str, Source], folder: pathlib.Path, settings: Settings, *, name_of: Callable[[str], str],
          on_written: Callable[[int], None]) -> bool:
  """Writes the splits as a prepared dataset.

  Args:
    splits: sources by the names of the splits to write.
    folder: the folder to write.
    settings: how the dataset is made.
    name_of: shortens the description of an example, such as a path.
    on_written: called with the number of examples after they are written.

  Returns:
    False if the same dataset exists already.

  Raises:
    UserError: the folder has other content, or another process writes it.
  """
  plan = {'from': {k: s.name for k, s in splits.items()}, 'digests': {k: s.digest for k, s in splits.items()},
          **dataclasses.asdict(settings)}
  if folder.is_dir() and any(folder.iterdir()):
    _check_same(folder, plan)
    return False
  part = folder.with_name(f'{folder.name}.part')
  part.mkdir(parents=True, exist_ok=True)
  with open(part / _LOCK, 'w') as lock:
    _take(lock.fileno(), part)
    _start_over_unless(part, plan)
    listed = {name: [_finish(job, on_written) for job in _jobs(name, source, part, settings, name_of)]
              for name, source in splits.items()}
    several = {'most_labels': most} if (most := _most_labels(splits.values())) else {}
    _close(part, folder, listed, {'format': prepared.FORMAT, 'made': plan, 'class_names':
                                  list(next(iter(splits.values())).class_names), **several})
  return True


def _most_labels(found: Collection[Source]) -> int:
  """Returns the largest number of labels of an image; a source that does not know it is read completely."""
  counts = [most_labels(source) for source in found]
  return max(max((len(source[i].labels or ()) for i in range(len(source))), default=1) if count == UNKNOWN
             else count for source, count in zip(found, counts, strict=True))


@dataclasses.dataclass(frozen=True)
class _Job:
  """One shard to write: examples `indexes` of a source."""
  path: pathlib.Path
  source: Source
  indexes: HostArray
  settings: Settings
  name_of: Callable[[str], str]

  def record(self, index: int) -> bytes:
    image, label, labels = self.source[index]
    several = {} if labels is None else {'labels': labels}
    name = self.name_of(self.source.describe(index))
    return records.encode({'image': stored(image, short_px=self.settings.short_px, quality=self.settings.quality),
                           'label': label, 'name': os.fsencode(name), **several})


def stored(image: bytes | HostArray, *, short_px: int, quality: int) -> bytes:
  """Returns the bytes to store: the file if the image is not resized, a JPEG if it is, a PNG of an array.

  The JPEG of a resized image keeps only the orientation of its EXIF data.
  A file that cannot be decoded is kept unchanged: it is reported when the dataset is read.
  """
  if isinstance(image, bytes) and not short_px:
    return image
  try:
    pixels = decode.as_rgb(image)
  except decode.BadImage:
    return bytes(image)
  height, width = pixels.shape[:2]
  factor = short_px / min(height, width)
  if not short_px or factor >= 1:
    return image if isinstance(image, bytes) else _encoded(pixels, '.png', [])
  size = (max(1, round(width * factor)), max(1, round(height * factor)))
  small = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)
  made = _encoded(small, '.jpg', [cv2.IMWRITE_JPEG_QUALITY, quality])
  orientation = decode.find_orientation(image) if isinstance(image, bytes) else 1
  return headers.write_orientation(made, orientation) if orientation != 1 else made


def _encoded(pixels: HostArray, extension: str, options: list[int]) -> bytes:
  return cv2.imencode(extension, pixels[..., ::-1], options)[1].tobytes()


def _check_same(folder: pathlib.Path, plan: Mapping[str, Any]) -> None:
  there = prepared.read_info(folder)['made'] if (folder / prepared.INFO).is_file() else None
  if there != json.loads(json.dumps(plan)):
    what = 'a dataset prepared with other settings' if there else 'other content'
    raise UserError(f'--to={folder}: expected a new folder, got one with {what}. Choose another folder.')


def _take(descriptor: int, part: pathlib.Path) -> None:
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError:
    raise UserError(f'{part}: expected no other process to write it, got one. Wait for it, or choose another --to.'
                    ) from None


def _start_over_unless(part: pathlib.Path, plan: Mapping[str, Any]) -> None:
  """Empties `part` unless it was started with the same plan."""
  path, text = part / _PLAN, json.dumps(plan)
  if path.is_file() and path.read_text() == text:
    return
  for entry in part.iterdir():
    if entry.name != _LOCK:
      shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
  path.write_text(text)


def _jobs(split: str, source: Source, part: pathlib.Path, settings: Settings,
          name_of: Callable[[str], str]) -> Iterator[_Job]:
  indexes = order.shuffled(np.arange(len(source)), num_examples=len(source), seed=settings.seed)
  num = min(len(source), settings.num_shards or _default_shards(source, indexes))
  for number, chosen in enumerate(np.array_split(indexes, num)):
    path = part / f'{split}-{number:05d}-of-{num:05d}.array_record'
    yield _Job(path, source, chosen, settings, name_of)


def _default_shards(source: Source, indexes: HostArray) -> int:
  """Returns one per 256 MiB, estimated from the first examples of a random order."""
  sizes = [len(image) if isinstance(image, bytes) else image.nbytes
           for image in (source[i].image for i in indexes[:50].tolist())]
  return max(1, round(float(np.mean(sizes)) * len(source) / 2**28))


def _read_note(note: pathlib.Path) -> prepared.Shard | None:
  """Returns the note of a finished shard; None if it is missing or damaged, so that the shard is written again."""
  try:
    return prepared.Shard(**json.loads(note.read_text()))
  except FileNotFoundError:
    return None
  except (ValueError, TypeError) as error:
    log.warning('%s is damaged (%s); the shard is written again.', note, error)
    return None


def _finish(job: _Job, on_written: Callable[[int], None]) -> prepared.Shard:
  """Writes a shard, unless its note exists."""
  note = job.path.with_name(f'{job.path.name}{_NOTE}')
  if job.path.is_file() and (written := _read_note(note)):
    on_written(len(job.indexes))
    return written
  half = job.path.with_name(f'{job.path.name}.half')
  _write_records(half, job, on_written)
  with open(half, 'rb') as file:
    os.fsync(file.fileno())
  content = checksums.sha256(half)
  half.replace(job.path)
  shard = prepared.Shard(job.path.name, len(job.indexes), job.path.stat().st_size, content)
  temporary = note.with_name(f'{note.name}.half')
  temporary.write_text(json.dumps(shard._asdict()))
  temporary.replace(note)
  return shard


def _write_records(path: pathlib.Path, job: _Job, on_written: Callable[[int], None]) -> None:
  from array_record.python import array_record_module as array_record
  writer = array_record.ArrayRecordWriter(str(path), 'group_size:1')  # one record per group, for random access
  with concurrent.futures.ThreadPoolExecutor(open_files.num_threads(0)) as pool:
    for start in range(0, len(job.indexes), _CHUNK):
      records = list(pool.map(job.record, job.indexes[start:start + _CHUNK].tolist()))
      for record in records:
        writer.write(record)
      on_written(len(records))
  writer.close()


def _close(part: pathlib.Path, folder: pathlib.Path, listed: Mapping[str, Sequence[prepared.Shard]],
           info: Mapping[str, Any]) -> None:
  """Writes the description of the dataset, and renames the folder."""
  content = {**info, 'splits': {name: [s._asdict() for s in shards] for name, shards in listed.items()}}
  (part / prepared.INFO).write_text(json.dumps(content, indent=1))
  sums = ''.join(f'{s.sha256}  {s.file}\n' for shards in listed.values() for s in shards)
  (part / prepared.SUMS).write_text(sums)
  for leftover in [*part.glob(f'*{_NOTE}'), part / _PLAN, part / _LOCK]:
    leftover.unlink()
  part.rename(folder)
