"""Writes prepared datasets (`formats/array_record.py`): completely, or not at all.

`jobs/prepare.py` calls `write` with the sources of all splits and a `Runner`: `Here`, for processes of this machine, or
`beam.Beam`. The runner calls `write_shard` for each `Job`; several hosts may each have a share of the jobs (`Share`). A
shard depends only on its job. When it is finished, a note with its checksum is written beside it:

    train-00000-of-00002.array_record         a shard
    train-00000-of-00002.array_record.done    its note: `array_record.Shard` as JSON, and `sums` of channels
    plan.json                                 how the dataset is made, see `_plan`
    info.json, SHA256SUMS                     written last, when all shards have notes

So the same command resumes after a kill. Until the dataset is complete, its files are in the folder of
`files.Unfinished`. In object storage they are in the final folder from the start.
"""
from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import enum
import functools
import io
import itertools
import json
import logging
import multiprocessing
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from vit_jax.config.schema.data import RGB
from vit_jax.core import documents, failures, files
from vit_jax.core.errors import UserError
from vit_jax.core.files import NOTE, PLAN
from vit_jax.core.types import HostArray
from vit_jax.data import open_files, user_files, windows, workers
from vit_jax.data.formats import array_record, example
from vit_jax.data.image import channels, decode, headers
from vit_jax.data.image.headers import BadImage
from vit_jax.data.image.opencv import cv2
from vit_jax.data.source import UNKNOWN, Record, Source, read_one
from vit_jax.data.text.stored import Encoder
from vit_jax.record import storage

SHARD_BYTES, SHARD_RECORDS = 2**28, 2**13
"""Size of a shard by default. Opening one takes 0.2 ms with 1,000 records, and 11 ms with 125,000."""
CORES_EACH, SHARDS_EACH = 8, 4
"""Cores and shards for each process by default: its threads keep about 8 cores busy, and it starts in seconds."""
POLL_S = 0.5
"""Seconds between two looks at the notes that processes have written."""
_CHUNK = 64  # examples converted at a time
_ANY_SIZE = headers.DecodeOptions(max_pixels=2**30)
_JPEG_PX = 65_500  # longest side that libjpeg writes
log = logging.getLogger('vit_jax.data')


@dataclasses.dataclass(frozen=True)
class Settings:
  """How a dataset is made.

  short_px: images with a longer short side are resized to this short side; 0 keeps all files unchanged.
  quality: JPEG quality of resized images, 1 to 100.
  num_shards: number of shards of each split; 0 = by `SHARD_BYTES` of the stored files, and by `SHARD_RECORDS`.
  seed: of the order of examples; None = that of the source.
  channels: of the images; mean and standard deviation of others than RGB are measured.
  captions: encodes the captions of the images, which are then stored too; None = captions are left out.
  """
  short_px: int
  quality: int
  num_shards: int
  seed: int | None
  channels: int = RGB
  captions: Encoder | None = None


@dataclasses.dataclass(frozen=True)
class Job:
  """A shard to write. It pickles.

  folder, file: where it is written.
  source: the split.
  positions: of its examples, in the order in which the split is written.
  name_of: shortens the description of an example, such as a path.
  """
  folder: str
  file: str
  source: Source
  positions: range
  settings: Settings
  name_of: Callable[[str], str]

  def note(self) -> documents.Field | None:
    """Returns the note of a finished shard; None if it is missing or damaged, so that the shard is written again."""
    path = storage.open_path(self.folder) / f'{self.file}{NOTE}'
    if not path.exists():
      return None
    try:
      with storage.local(str(path)) as local:
        note = documents.read(local, expected='the note of a shard', advice='')
      array_record.read_shard(note)  # raises if it is damaged
      return note
    except UserError as error:
      log.warning('%s The shard is written again.', error)
      return None

  def record(self, row: int) -> tuple[bytes, HostArray | None] | None:
    """Returns the record of an example, and its `channels.sums` unless it is RGB.

    Returns None, and logs the reason, if it is not an image file, or has no usable caption although it should.
    """
    source, settings = self.source, self.settings
    sums, texts = None, dict[str, list[bytes] | list[int]]()
    try:
      if settings.captions:
        texts = settings.captions.features(source.captions(row))
      stored = read_one(source, row)
      if settings.channels != RGB:
        sums = channels.sums(channels.read(stored.image, settings.channels, _ANY_SIZE))
      elif isinstance(stored.image, bytes):
        decode.read_size(stored.image)  # raises if it is not an image
    except BadImage as error:
      log.warning('%s is left out: %s', source.describe(row), error)
      return None
    several = {'labels': stored.labels} if source.most_labels else {}
    name = os.fsencode(self.name_of(source.describe(row)))
    return example.serialize({'image': encode(stored.image, settings), 'label': stored.label, 'name': name,
                              **several, **texts}), sums


class Share(NamedTuple):
  """The shards that a host writes: number `host`, and every `num_hosts`-th shard after it."""
  host: int
  num_hosts: int


ALL = Share(0, 1)


class Outcome(enum.Enum):
  """State of a dataset after `write`."""
  WRITTEN = 'written'
  THERE = 'there'  # it was complete before
  PART = 'part'    # shards of other hosts are missing


PlanJobs = Callable[[Mapping[str, Source]], Sequence[Job]]
"""Returns the jobs for sources by their splits. They are the same on each machine that has opened the same sources."""
OnWritten = Callable[[int], None]
"""Called with the number of examples that were written since the last call."""


class Runner(Protocol):
  """Writes the shards of jobs that have no note, here or on workers, which get their jobs from `plan_jobs`."""

  def __call__(self, jobs: Sequence[Job], plan_jobs: PlanJobs) -> None:
    ...


def write(splits: Mapping[str, Source], folder: storage.Path, settings: Settings, *, name_of: Callable[[str], str],
          run: Runner, share: Share = ALL) -> Outcome:
  """Writes the splits as a prepared dataset, or a share of it; the last host completes the dataset.

  Args:
    splits: sources by the names of the splits to write.
    folder: the folder to write.
    settings: how the dataset is made.
    name_of: shortens the description of an example, such as a path; it pickles.
    run: writes the shards, such as `Here`.
    share: of the shards, that this host writes.

  Raises:
    UserError: the folder has other content, or another process writes it; a split has no images, or other classes.
  """
  _check_classes(splits)
  plan = _plan(splits, settings)
  if (folder / array_record.INFO).exists() or (isinstance(folder, pathlib.Path) and not files.is_vacant(folder)):
    _check_same(folder, plan)
    return Outcome.THERE
  counts = {name: _count_shards(name, source, settings) for name, source in splits.items()}
  jobs_of = functools.partial(_jobs, counts=counts, settings=settings, name_of=name_of)
  finish = functools.partial(_finish, splits=splits, settings=settings, plan=plan, jobs_of=jobs_of)

  def write_share(part: storage.Path) -> None:
    plan_jobs = functools.partial(jobs_of, folder=str(part))
    run(plan_jobs(splits)[share.host::share.num_hosts], plan_jobs)
  if not isinstance(folder, pathlib.Path):
    _begin(folder, plan)
    write_share(folder)
    dataset_files = finish(folder)
    for name in {*(f'{name}{NOTE}' for name in dataset_files), PLAN}:
      (folder / name).unlink(missing_ok=True)
    return Outcome.WRITTEN
  names = {file_name(name, number, count) for name, count in counts.items() for number in range(count)}
  unfinished = files.Unfinished(folder, json.dumps(plan), names | {array_record.INFO, array_record.SUMS})
  has_other_hosts = share.num_hosts > 1
  with unfinished.open(joins=has_other_hosts) as part:
    if files.is_vacant(folder):  # else another host has just completed it
      write_share(part)
    if not has_other_hosts and (dataset_files := finish(part)):
      unfinished.complete(dataset_files)
  with unfinished.alone() as is_last:
    if is_last and (dataset_files := finish(part)):
      unfinished.complete(dataset_files)
  if files.is_vacant(folder):
    return Outcome.PART
  _check_same(folder, plan)
  return Outcome.WRITTEN


def _check_classes(splits: Mapping[str, Source]) -> None:
  """Raises UserError with some of the classes that differ if a split has other classes than the first one."""
  first, *others = splits
  for other in others:
    classes, other_classes = splits[first].class_names, splits[other].class_names
    if classes == other_classes:
      continue
    parts = []
    for name, only in ((first, [label for label in classes if label not in other_classes]),
                       (other, [label for label in other_classes if label not in classes])):
      if only:
        parts.append(f'{documents.listed(only, 3)} only in {name}')
    raise UserError(f'--splits: expected splits with the same classes, got '
                    f'{" and ".join(parts) or f"another order in {other} than in {first}"}. Leave out one of '
                    f'them, or write it to a folder of its own, such as --splits={first}.')


def _finish(part: storage.Path, *, splits: Mapping[str, Source], settings: Settings, plan: Mapping[str, Any],
            jobs_of: Callable[..., list[Job]]) -> set[str]:
  """Writes `info.json` if all shards exist, and returns the names of all files of the dataset; else an empty set."""
  notes: dict[str, list[documents.Field]] = {name: [] for name in splits}
  for name, source in splits.items():
    for job in jobs_of({name: source}, folder=str(part)):
      if (note := job.note()) is None:
        return set()
      notes[name].append(note)
  shards = {name: [array_record.read_shard(note) for note in of_split] for name, of_split in notes.items()}
  for name, of_split in shards.items():
    if not sum(shard.num_examples for shard in of_split):
      raise UserError(f'--data: expected images in the split {name}, got {len(splits[name]):,} files whose image or '
                      'label cannot be used. Their names and the reasons are above.')
  most_labels = max(map(_most_labels, splits.values()))
  info = {'format': array_record.FORMAT, 'made': plan, 'class_names': list(next(iter(splits.values())).class_names),
          **({'most_labels': most_labels} if most_labels else {}),
          **({'texts': plan['texts']} if 'texts' in plan else {}), **_statistics(notes, settings.channels),
          'splits': {name: [shard._asdict() for shard in of_split] for name, of_split in shards.items()}}
  all_shards = [shard for of_split in shards.values() for shard in of_split]
  sums = ''.join(f'{shard.sha256}  {shard.file}\n' for shard in all_shards)
  storage.write_bytes(part / array_record.SUMS, sums.encode())
  storage.write_bytes(part / array_record.INFO, json.dumps(info, indent=1).encode())
  return {array_record.SUMS, array_record.INFO, *(shard.file for shard in all_shards)}


def _most_labels(source: Source) -> int:
  """Returns `source.most_labels`; if it is not known, every example is read."""
  if source.most_labels != UNKNOWN:
    return source.most_labels
  return max((len(_read(source, row).labels) for row in range(len(source))), default=1)


def _plan(splits: Mapping[str, Source], settings: Settings) -> dict[str, Any]:
  """Returns how a dataset is made, as `info.json` states it: equal plans make equal datasets."""
  plan = {'from': {name: source.name for name, source in splits.items()},
          'digests': {name: source.digest for name, source in splits.items()},
          **{field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}}
  if settings.channels == RGB:  # plans had no channels before there were others than RGB, and stay the same
    del plan['channels']
  del plan['captions']
  if settings.captions:
    plan['texts'] = settings.captions.encoding.to_json()
  return plan


def _begin(folder: storage.Path, plan: Mapping[str, Any]) -> None:
  """Writes the plan to object storage. Shards of an interrupted command with the same plan stay there."""
  names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
  if names and (PLAN not in names or (folder / PLAN).read_text() != json.dumps(plan)):
    raise UserError(f'--to={folder}: expected a new folder, got one with other content. Choose another folder.')
  storage.write_bytes(folder / PLAN, json.dumps(plan).encode())


def _check_same(folder: storage.Path, plan: Mapping[str, Any]) -> None:
  """Raises UserError if a folder has other content than the dataset of this plan."""
  plan_there = None
  if (folder / array_record.INFO).is_file():
    with storage.local(str(folder / array_record.INFO)) as path:
      plan_there = array_record.read_info(path.parent).made
  if plan_there != documents.parse(json.dumps(plan)):
    what = 'a dataset prepared with other settings' if plan_there else 'other content'
    raise UserError(f'--to={folder}: expected a new folder, got one with {what}. Choose another folder.')


def file_name(split: str, number: int, count: int) -> str:
  """Returns the name of a shard, such as `train-00000-of-00002.array_record`."""
  return f'{split}-{number:05d}-of-{count:05d}.array_record'


def _jobs(splits: Mapping[str, Source], *, counts: Mapping[str, int], folder: str, settings: Settings,
          name_of: Callable[[str], str]) -> list[Job]:
  """Returns the jobs of all shards, split by split; the first shards of a split may have one example more."""
  jobs = []
  for name, source in splits.items():
    size, longer = divmod(len(source), counts[name])
    starts = [number * size + min(number, longer) for number in range(counts[name] + 1)]
    jobs += [Job(folder, file_name(name, number, counts[name]), source, range(*positions), settings, name_of)
             for number, positions in enumerate(itertools.pairwise(starts))]
  return jobs


def _rows(positions: HostArray, source: Source, settings: Settings) -> HostArray:
  """Returns the rows in the source of the examples at positions in the order in which a split is written."""
  return positions if settings.seed is None else windows.visit_once(source, settings.seed)(positions)


def _count_shards(split: str, source: Source, settings: Settings) -> int:
  """Returns the number of shards of a split. Raises UserError if it has no examples."""
  if not len(source):
    raise UserError(f'--data: expected at least one example in the split {split}, got none. Choose another '
                    'split or source.')
  num = settings.num_shards
  if not num:  # by the sizes of the first examples
    images = [_read(source, row).image for row in _rows(np.arange(min(50, len(source))), source, settings).tolist()]
    size = float(np.mean([len(image) if isinstance(image, bytes) else image.nbytes for image in images]))
    num = max(1, round(size * len(source) / SHARD_BYTES), -(-len(source) // SHARD_RECORDS))
  return min(len(source), num)


def _read(source: Source, row: int) -> Record:
  """Returns a stored example; an empty one if it is damaged, as the dataset will not contain it."""
  try:
    return read_one(source, row)
  except BadImage:
    return Record(b'')


def _statistics(notes: Mapping[str, Sequence[documents.Field]], num_channels: int) -> dict[str, Any]:
  """Returns mean and standard deviation of each channel over `train`, or else the first split; {} for RGB.

  Raises:
    UserError: a channel has one value everywhere.
  """
  if num_channels == RGB:
    return {}
  notes_measured = notes.get('train', next(iter(notes.values())))
  sums = [[[value.number() for value in row.items()] for row in note.field('sums').items()] for note in notes_measured]
  mean, std = channels.statistics(np.sum(sums, axis=0))
  if constant := [str(number) for number, value in enumerate(std) if not value > 0]:
    raise UserError(f'--data: expected channels whose values differ, got {", ".join(constant)} (counted from 0) with '
                    'one value in all images. Leave them out of the files.')
  return {'channels': num_channels, 'mean': mean, 'std': std}


def write_shard(job: Job, on_written: OnWritten = lambda num: None, threads: int = 0) -> array_record.Shard:
  """Writes a shard and then its note, and returns its entry of `info.json`.

  Args:
    job: the shard.
    on_written: called after each part that is written.
    threads: that convert images; 0 = one per core, at most 16.
  """
  folder = storage.open_path(job.folder)
  with contextlib.ExitStack() as stack:
    if isinstance(folder, pathlib.Path):
      local = stack.enter_context(files.replacing(folder / job.file))
    else:
      local = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix='vit_jax_shard_')), job.file)
    num_examples, sums = write_records(local, job, on_written, threads)
    shard = array_record.Shard(job.file, num_examples, local.stat().st_size, user_files.sha256(local))
    if not isinstance(folder, pathlib.Path):
      failures.retried(lambda: (folder / job.file).write_bytes(local.read_bytes()), f'writing {folder / job.file}')
  note = {**shard._asdict(), **({'sums': sums.tolist()} if job.settings.channels != RGB else {})}
  note_path = folder / f'{job.file}{NOTE}'
  failures.retried(lambda: storage.write_bytes(note_path, json.dumps(note).encode()), f'writing {note_path}')
  return shard


def write_records(path: pathlib.Path, job: Job, on_written: OnWritten, threads: int) -> tuple[int, HostArray]:
  """Writes the records of a shard; examples without a usable image or caption have none.

  Returns:
    The number of records, and the sum of their `channels.sums`, `[3, C]` f64, added in their order.
  """
  from array_record.python import array_record_module
  rows = _rows(np.arange(job.positions.start, job.positions.stop), job.source, job.settings).tolist()
  writer = array_record_module.ArrayRecordWriter(str(path), 'group_size:1')  # one record per group, for random access
  num_records, total = 0, np.zeros((3, job.settings.channels))
  with concurrent.futures.ThreadPoolExecutor(open_files.num_threads(threads)) as pool:
    for start in range(0, len(rows), _CHUNK):
      chunk = rows[start:start + _CHUNK]
      for record, sums in filter(None, pool.map(job.record, chunk)):
        writer.write(record)
        num_records += 1
        if sums is not None:
          total = total + sums
      on_written(len(chunk))
  writer.close()
  return num_records, total


class Here(NamedTuple):
  """Writes shards in processes of this machine. If a process ends early, this process writes the rest.

  on_written: the first call, which may be with 0, counts the examples of finished shards.
  processes: 1 = this one; 0 = by the cores.
  """
  on_written: OnWritten = lambda num: None
  processes: int = 1

  def __call__(self, jobs: Sequence[Job], plan_jobs: PlanJobs) -> None:
    """Writes the shards that have no note."""
    del plan_jobs  # all jobs are here
    left = [job for job in jobs if job.note() is None]
    self.on_written(sum(len(job.positions) for job in jobs) - sum(len(job.positions) for job in left))
    default = max(1, min(open_files.num_cores() // CORES_EACH, len(left) // SHARDS_EACH))
    num = min(self.processes or default, len(left))
    if num > 1:
      self._in_processes(left, num)
      left = [job for job in left if job.note() is None]
    for job in left:
      write_shard(job, self.on_written)

  def _in_processes(self, jobs: Sequence[Job], num: int) -> None:
    """Writes shards in `num` processes, which end with this one."""
    context, threads = multiprocessing.get_context('spawn'), max(1, open_files.num_cores() // num)
    processes = [context.Process(target=_run_quietly, args=(os.getpid(), jobs[number::num], threads), daemon=True)
                 for number in range(num)]
    folder, sizes = jobs[0].folder, {f'{job.file}{NOTE}': len(job.positions) for job in jobs}
    num_reported = 0
    for process in processes:
      process.start()
    try:
      is_running = True
      while is_running:
        time.sleep(POLL_S)
        is_running = any(process.is_alive() for process in processes)
        num_written = sum(sizes.get(name, 0) for name in os.listdir(folder))
        self.on_written(num_written - num_reported)
        num_reported = num_written
    finally:
      for process in processes:
        process.kill()
        process.join()


def _run_quietly(parent: int, jobs: Sequence[Job], threads: int) -> None:
  """Writes shards in a child process. An error is ignored here: the parent meets it again, and shows it."""
  workers.start_worker(parent)
  with contextlib.suppress(Exception):
    for job in jobs:
      write_shard(job, threads=threads)


def encode(image: bytes | HostArray, settings: Settings) -> bytes:
  """Returns the bytes to store of an image, which is a file or an array `[H, W, C]`.

  An RGB image whose short side exceeds `short_px` becomes a JPEG of that size, with only the orientation of its EXIF
  data. Other RGB files are kept, as are those that cannot be decoded, which are reported when the dataset is read, and
  those that would be longer than a JPEG can be. Other RGB arrays become PNG. Images with other channels are not
  resized: files are kept, and arrays become `.npy` files.
  """
  if isinstance(image, bytes) and not (settings.short_px and settings.channels == RGB):
    return image
  if settings.channels != RGB:
    out = io.BytesIO()
    np.lib.format.write_array(out, np.ascontiguousarray(image), version=(1, 0))
    return out.getvalue()
  try:
    pixels = decode.decode(image)
  except BadImage:
    return bytes(image)
  height, width = pixels.shape[:2]
  factor = settings.short_px / min(height, width)
  size = (max(1, round(width * factor)), max(1, round(height * factor)))
  if not settings.short_px or factor >= 1 or max(size) > _JPEG_PX:
    return image if isinstance(image, bytes) else _encode_rgb(image, '.png', [])
  small = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)
  jpeg = _encode_rgb(small, '.jpg', [cv2.IMWRITE_JPEG_QUALITY, settings.quality])
  orientation = decode.find_orientation(image) if isinstance(image, bytes) else 1  # 1 = upright
  return headers.write_orientation(jpeg, orientation) if orientation != 1 else jpeg


def _encode_rgb(pixels: HostArray, extension: str, options: list[int]) -> bytes:
  return cv2.imencode(extension, pixels[..., ::-1], options)[1].tobytes()  # OpenCV takes BGR
