"""Writes prepared sets (`prepared.py`): whole, or not at all.

Everything is made in `DIR.part`, shard by shard, and becomes `DIR` by one renaming at the end. A shard that is
finished leaves a note beside it, so that the same command goes on after a kill; another command starts over.
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
from typing import Any

import cv2
import numpy as np

from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.data.image import headers, image_ops
from vit_jax.data.pipeline import order, prefetch
from vit_jax.data.source import UNKNOWN, Source, most_labels
from vit_jax.data.sources import checksums, prepared, tf_example

_CHUNK = 64  # examples converted at a time
log = logging.getLogger('vit_jax.data')
_PLAN, _LOCK, _NOTE = 'plan.json', '.lock', '.done'


@dataclasses.dataclass(frozen=True)
class Settings:
  """How a set is made.

  short_px: pictures with a longer short side are shrunk to this one; 0 keeps all files as they are.
  quality: of the JPEG files of shrunk pictures, 1 to 100.
  num_shards: of each split; 0 = one for about every 256 MiB of the stored files.
  seed: of the order of examples.
  """
  short_px: int
  quality: int
  num_shards: int
  seed: int


def write(splits: Mapping[str, Source], folder: pathlib.Path, settings: Settings, *, name_of: Callable[[str], str],
          on_written: Callable[[int], None]) -> bool:
  """Writes the splits as a prepared set.

  Args:
    splits: sources by the names their splits shall have.
    folder: to become the set.
    settings: how.
    name_of: shortens what a source calls an example, such as a path.
    on_written: told of examples as they are written.

  Returns:
    False if the same set is there already.

  Raises:
    UserError: something else is there, or another process writes it.
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
  """The most labels of an image; a source that does not know is read through."""
  counts = [most_labels(source) for source in found]
  return max(max((len(source[i].labels or ()) for i in range(len(source))), default=1) if count == UNKNOWN
             else count for source, count in zip(found, counts, strict=True))


@dataclasses.dataclass(frozen=True)
class _Job:
  """One shard to be written: examples `indexes` of a source."""
  path: pathlib.Path
  source: Source
  indexes: HostArray
  settings: Settings
  name_of: Callable[[str], str]

  def record(self, index: int) -> bytes:
    image, label, labels = self.source[index]
    several = {} if labels is None else {'labels': labels}
    name = self.name_of(self.source.describe(index))
    return tf_example.encode({'image': stored(image, short_px=self.settings.short_px, quality=self.settings.quality),
                            'label': label, 'name': os.fsencode(name), **several})


def stored(image: bytes | HostArray, *, short_px: int, quality: int) -> bytes:
  """The bytes to keep of a picture: its file, if it is not to be shrunk; a JPEG, if it is; a PNG of an array.

  The JPEG of a shrunk image keeps the EXIF orientation, and nothing else of EXIF.
  A file that cannot be decoded is kept as it is: what reads the set reports it.
  """
  if isinstance(image, bytes) and not short_px:
    return image
  try:
    pixels = image_ops.as_rgb(image)
  except image_ops.BadImage:
    return bytes(image)
  height, width = pixels.shape[:2]
  factor = short_px / min(height, width)
  if not short_px or factor >= 1:
    return image if isinstance(image, bytes) else _encoded(pixels, '.png', [])
  size = (max(1, round(width * factor)), max(1, round(height * factor)))
  small = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)
  made = _encoded(small, '.jpg', [cv2.IMWRITE_JPEG_QUALITY, quality])
  orientation = image_ops.find_orientation(image) if isinstance(image, bytes) else 1
  return headers.write_orientation(made, orientation) if orientation != 1 else made


def _encoded(pixels: HostArray, extension: str, options: list[int]) -> bytes:
  return cv2.imencode(extension, pixels[..., ::-1], options)[1].tobytes()


def _check_same(folder: pathlib.Path, plan: Mapping[str, Any]) -> None:
  there = prepared.read_info(folder)['made'] if (folder / prepared.INFO).is_file() else None
  if there != json.loads(json.dumps(plan)):
    what = 'a set prepared otherwise' if there else 'something else'
    raise UserError(f'--to={folder} holds {what}; right would be a folder that is not there yet')


def _take(descriptor: int, part: pathlib.Path) -> None:
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError:
    raise UserError(f'{part} is being written by another process; wait for it, or take another --to') from None


def _start_over_unless(part: pathlib.Path, plan: Mapping[str, Any]) -> None:
  """Empties `part` unless it was begun with the same plan."""
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
  """One for about 256 MiB, as the first examples of a random order say."""
  sizes = [len(image) if isinstance(image, bytes) else image.nbytes
           for image in (source[i].image for i in indexes[:50].tolist())]
  return max(1, round(float(np.mean(sizes)) * len(source) / 2**28))


def _read_note(note: pathlib.Path) -> prepared.Shard | None:
  """What was noted of a shard; None if it was not, or the note is damaged, so that the shard is written again."""
  try:
    return prepared.Shard(**json.loads(note.read_text()))
  except FileNotFoundError:
    return None
  except (ValueError, TypeError) as error:
    log.warning('%s is damaged (%s); its shard is written again.', note, error)
    return None


def _finish(job: _Job, on_written: Callable[[int], None]) -> prepared.Shard:
  """Writes a shard, unless its note says that it has been."""
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
  writer = array_record.ArrayRecordWriter(str(path), 'group_size:1')  # one record a group: read in any order
  with concurrent.futures.ThreadPoolExecutor(prefetch.num_threads(0)) as pool:
    for start in range(0, len(job.indexes), _CHUNK):
      records = list(pool.map(job.record, job.indexes[start:start + _CHUNK].tolist()))
      for record in records:
        writer.write(record)
      on_written(len(records))
  writer.close()


def _close(part: pathlib.Path, folder: pathlib.Path, listed: Mapping[str, Sequence[prepared.Shard]],
           info: Mapping[str, Any]) -> None:
  """Writes what the set is, and gives it its name."""
  content = {**info, 'splits': {name: [s._asdict() for s in shards] for name, shards in listed.items()}}
  (part / prepared.INFO).write_text(json.dumps(content, indent=1))
  sums = ''.join(f'{s.sha256}  {s.file}\n' for shards in listed.values() for s in shards)
  (part / prepared.SUMS).write_text(sums)
  for leftover in [*part.glob(f'*{_NOTE}'), part / _PLAN, part / _LOCK]:
    leftover.unlink()
  part.rename(folder)
