"""The shards of a prepared dataset as jobs, which any number of processes on any number of hosts share.

A process that writes a shard holds its lock, which the system releases when the process ends, however it ends. A
finished shard has a note beside it with its checksum. The bytes of a shard do not depend on who writes it.
`run_all` is the work of one process; `run_in_processes` starts several on this machine.
"""
from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import io
import json
import logging
import multiprocessing
import os
import pathlib
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.context import SpawnProcess
from multiprocessing.sharedctypes import SynchronizedArray

import numpy as np

from vit_jax.config.schema.data import RGB
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.data.files import checksums, json_fields, open_files, records
from vit_jax.data.image import channels, decode, headers
from vit_jax.data.image.opencv import cv2
from vit_jax.data.pipeline import prefetch
from vit_jax.data.source import Source, find_origin
from vit_jax.data.sources import prepared
from vit_jax.data.text.encoded import Encoder

NOTE, HALF, LOCK = '.done', '.half', '.lock'
POLL_S = 0.5
_CHUNK = 64  # examples converted at a time
CORES_EACH = 8
"""Cores for each process, by default: the threads of one process keep about so many busy."""
SHARDS_EACH = 4
"""Fewer shards than this are not worth a process, which takes some seconds to start."""
_ANY_SIZE = headers.DecodeOptions(max_pixels=2**30)
_JPEG_PX = 65_500  # longest side that libjpeg writes
log = logging.getLogger('vit_jax.data')


@dataclasses.dataclass(frozen=True)
class Job:
  """One shard to write: examples `indexes` of a source; the other settings as in `shards.Settings`. Pickles."""
  path: pathlib.Path
  source: Source
  indexes: HostArray
  short_px: int
  quality: int
  name_of: Callable[[str], str]
  channels: int = RGB
  captions: Encoder | None = None

  def record(self, index: int) -> tuple[bytes, HostArray | None] | None:
    """Returns the record of an example, and unless it is RGB its `channels.sums`.

    None, with a line in the log, if it is not an image file, or has no usable caption although it should.
    """
    sums, texts = None, dict[str, list[bytes] | list[int]]()
    try:
      if self.captions:
        origin, place = find_origin(self.source, index)
        texts = self.captions.features(origin.captions(place))  # type: ignore[attr-defined]
      image, label, labels, _ = self.source[index]
      if self.channels != RGB:
        sums = channels.sums(channels.read(image, self.channels, _ANY_SIZE))
      elif isinstance(image, bytes):
        decode.read_size(image)
    except decode.BadImage as error:
      log.warning('%s is left out: %s', self.source.describe(index), error)
      return None
    several = {} if labels is None else {'labels': labels}
    name = self.name_of(self.source.describe(index))
    content = stored(image, short_px=self.short_px, quality=self.quality) if sums is None else array_file(image)
    return records.encode({'image': content, 'label': label, 'name': os.fsencode(name), **several, **texts}), sums

  def sums(self) -> HostArray:
    """Returns the sum of `channels.sums` of the examples of a finished shard."""
    return np.asarray(json.loads(self.note.read_text())['sums'], np.float64)

  @property
  def note(self) -> pathlib.Path:
    return self.path.with_name(f'{self.path.name}{NOTE}')

  def written(self) -> prepared.Shard | None:
    """Returns the note of a finished shard; None if it is missing or damaged, so that the shard is written again."""
    if not self.note.exists():
      return None
    try:
      return prepared.read_shard(json_fields.read(self.note, expected='the note of a shard', advice=''))
    except UserError as error:
      log.warning('%s The shard is written again.', error)
      return None


OnWritten = Callable[[Job, int], None]


def run_all(jobs: Sequence[Job], on_written: OnWritten, *, threads: int = 0) -> None:
  """Writes the shards that no other process has written or is writing, and waits until all are written.

  Returns early if the folder is gone, since another process has then completed the dataset.

  Args:
    jobs: all shards.
    on_written: called with a job and the number of its examples of each part that is found or written.
    threads: that convert images; 0 = one per core, at most 16.
  """
  left = list(jobs)
  while left and left[0].path.parent.is_dir():
    waiting = []
    for job in left:
      if job.written():
        on_written(job, len(job.indexes))
        continue
      with _claim(job.path) as is_mine:
        if not is_mine:
          waiting.append(job)
        elif job.written():
          on_written(job, len(job.indexes))
        else:
          write_shard(job, on_written, threads)
    if len(waiting) == len(left):
      time.sleep(POLL_S)
    left = waiting


@contextlib.contextmanager
def _claim(path: pathlib.Path) -> Iterator[bool]:
  """Yields whether this process may write the shard; nobody else does meanwhile, where the file system has locks."""
  with contextlib.ExitStack() as stack:
    try:
      file = stack.enter_context(open(path.with_name(f'{path.name}{LOCK}'), 'wb'))
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, FileNotFoundError):  # written by another process; or the dataset is complete
      yield False
      return
    except OSError:  # no locks here: two processes may write the same bytes
      pass
    yield True


def write_shard(job: Job, on_written: OnWritten = lambda job, num: None, threads: int = 0) -> prepared.Shard:
  """Writes a shard and its note, and returns what the note says."""
  half = job.path.with_name(f'{job.path.name}.{socket.gethostname()}-{os.getpid()}{HALF}')
  num_examples, sums = write_records(half, job, lambda num: on_written(job, num), threads)
  with open(half, 'rb') as file:
    os.fsync(file.fileno())
  shard = prepared.Shard(job.path.name, num_examples, half.stat().st_size, checksums.sha256(half))
  half.replace(job.path)
  half.write_text(json.dumps({**shard._asdict(), **({'sums': sums.tolist()} if job.channels != RGB else {})}))
  half.replace(job.note)
  return shard


def write_records(path: pathlib.Path, job: Job, on_written: Callable[[int], None], threads: int) -> tuple[
    int, HostArray]:
  """Writes the records of a shard: of its examples which are image files.

  Returns:
    Their number, and the sum of their `channels.sums`, in their order.
  """
  from array_record.python import array_record_module as array_record
  writer = array_record.ArrayRecordWriter(str(path), 'group_size:1')  # one record per group, for random access
  num, sums = 0, np.zeros((3, job.channels))
  with concurrent.futures.ThreadPoolExecutor(open_files.num_threads(threads)) as pool:
    for start in range(0, len(job.indexes), _CHUNK):
      found = list(pool.map(job.record, job.indexes[start:start + _CHUNK].tolist()))
      for record in found:
        if record is not None:
          writer.write(record[0])
          num += 1
          sums = sums if record[1] is None else sums + record[1]
      on_written(len(found))
  writer.close()
  return num, sums


def array_file(image: bytes | HostArray) -> bytes:
  """Returns the bytes to store of an image with other channels than RGB: the file, or a `.npy` file of an array."""
  if isinstance(image, bytes):
    return image
  out = io.BytesIO()
  np.lib.format.write_array(out, np.ascontiguousarray(image), version=(1, 0))
  return out.getvalue()


def stored(image: bytes | HostArray, *, short_px: int, quality: int) -> bytes:
  """Returns the bytes to store: the file if the image is not resized, a JPEG if it is, a PNG of an array.

  The JPEG of a resized image keeps only the orientation of its EXIF data.
  A file that cannot be decoded is kept unchanged: it is reported when the dataset is read. So is one that would be
  longer than a JPEG can be.
  """
  if isinstance(image, bytes) and not short_px:
    return image
  try:
    pixels = decode.as_rgb(image)
  except decode.BadImage:
    return bytes(image)
  height, width = pixels.shape[:2]
  factor = short_px / min(height, width)
  size = (max(1, round(width * factor)), max(1, round(height * factor)))
  if not short_px or factor >= 1 or max(size) > _JPEG_PX:
    return image if isinstance(image, bytes) else _encoded(image, '.png', [])
  small = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)
  made = _encoded(small, '.jpg', [cv2.IMWRITE_JPEG_QUALITY, quality])
  orientation = decode.find_orientation(image) if isinstance(image, bytes) else 1
  return headers.write_orientation(made, orientation) if orientation != 1 else made


def _encoded(pixels: HostArray, extension: str, options: list[int]) -> bytes:
  return cv2.imencode(extension, pixels[..., ::-1], options)[1].tobytes()


def default_processes(num_shards: int) -> int:
  """Returns the number of processes for so many shards on this machine."""
  return max(1, min(open_files.num_cores() // CORES_EACH, num_shards // SHARDS_EACH))


def run_in_processes(jobs: Sequence[Job], on_written: Callable[[int], None], *, processes: int) -> None:
  """Does what `run_all` does, in `processes` of this machine. If they end early, this process does what is left.

  Args:
    jobs: all shards.
    on_written: called with a number of written examples; first, and perhaps with 0, with that of shards found complete.
    processes: 1 = this one.
  """
  sizes = {job.path.name: len(job.indexes) for job in jobs}
  reported = sum(sizes.get(name, 0) for name in _finished(jobs[0]))
  on_written(reported)
  left = [job for job in jobs if not job.written()]
  if min(processes, len(left)) <= 1:
    return run_all(left, lambda _, num: on_written(num))

  def report(num: int) -> None:
    nonlocal reported
    on_written(max(0, num - reported))
    reported = max(reported, num)

  with _running(left, min(processes, len(left))) as (started, begun):
    while any(one.is_alive() for one in started):
      time.sleep(POLL_S)
      # A process counts from 0 after each shard, so that finished and begun shards add up.
      report(min(sum(sizes.values()), sum(sizes.get(name, 0) for name in _finished(jobs[0])) + sum(begun[:])))
  run_all(jobs, lambda *_: None)
  report(sum(sizes.values()))
  return None


@contextlib.contextmanager
def _running(jobs: Sequence[Job], processes: int) -> Iterator[tuple[list[SpawnProcess], SynchronizedArray[int]]]:
  """Yields processes, which end with this one, and the number of examples of the shard that each is writing."""
  context = multiprocessing.get_context('spawn')
  begun = context.Array('q', processes)
  threads = max(1, open_files.num_cores() // processes)
  started = [context.Process(target=_run_quietly, args=(os.getpid(), jobs, begun, place, threads), daemon=True)
             for place in range(processes)]
  for one in started:
    one.start()
  try:
    yield started, begun
  finally:
    for one in started:
      one.kill()
      one.join()


def _run_quietly(parent: int, jobs: Sequence[Job], begun: SynchronizedArray[int], place: int, threads: int) -> None:
  """Writes shards in a process. An error is left to the parent, which meets it again, and shows it."""
  prefetch.start_worker(parent, 0, 0)

  def count(job: Job, num: int) -> None:
    begun[place] = (begun[place] + num) % len(job.indexes)

  with contextlib.suppress(Exception):
    run_all(jobs, count, threads=threads)


def _finished(job: Job) -> set[str]:
  """Returns the file names of the finished shards beside this one."""
  with contextlib.suppress(FileNotFoundError):  # another host has completed the dataset
    return {name.removesuffix(NOTE) for name in os.listdir(job.path.parent)
            if name.endswith(NOTE)}
  return set()
