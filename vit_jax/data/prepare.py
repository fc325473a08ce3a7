"""Writes prepared datasets (`formats/array_record.py`): completely, or not at all.

`jobs/prepare.py` calls `write` with the sources of all splits and a `Runner`: `LocalRunner`, for processes of this
machine, or `beam.Beam`. The runner calls `write_shard` for each `Job`. Several hosts may each have a share of the jobs
(`Share`). A job determines the content of its shard. A finished shard gets a note with the checksum of the shard:

    train-00000-of-00002.array_record         a shard
    train-00000-of-00002.array_record.done    its note: `array_record.Shard` as JSON, and `sums` of channels
    plan.json                                 how the dataset is made, see `_plan`
    info.json, SHA256SUMS                     written last, when all shards have notes

So the same command resumes after a kill. On a local disk, the files of an incomplete dataset are in the folder of
`files.Unfinished`. In object storage the files are in the final folder from the start.
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
"""Default size of a shard. Opening a shard takes 0.2 ms with 1,000 records, and 11 ms with 125,000 records."""
CORES_PER_PROCESS, SHARDS_PER_PROCESS = 8, 4
"""The default number of processes leaves each so many cores and shards: a process takes seconds to start."""
POLL_S = 0.5
"""Seconds between two counts of the notes that processes have written."""
_CHUNK_EXAMPLES = 64  # examples converted at a time
_ANY_SIZE = headers.DecodeOptions(max_pixels=2**30)
_MAX_JPEG_PX = 65_500  # longest side that libjpeg writes
log = logging.getLogger('vit_jax.data')


@dataclasses.dataclass(frozen=True)
class Settings:
  """How a dataset is made.

  short_px: images with a longer short side are resized to this short side; 0 keeps all files unchanged.
  quality: JPEG quality of resized images, 1 to 100.
  num_shards: number of shards of each split; 0 = about `SHARD_BYTES` and at most `SHARD_RECORDS` in each shard.
  seed: seed of the order of examples; None = the order of the source.
  channels: number of channels of the images; unless it is 3 (RGB), `write` measures their mean and standard deviation.
  captions: encodes the captions of the images to store them; None = captions are left out.
  """
  short_px: int
  quality: int
  num_shards: int
  seed: int | None
  channels: int = RGB
  captions: Encoder | None = None


@dataclasses.dataclass(frozen=True)
class Job:
  """A shard to write. A job can be pickled.

  folder, file: the folder and the file name of the shard.
  source: the split.
  positions: the positions of the examples of the shard, in the order in which the split is written.
  name_of: shortens the description of an example, such as a path, to the name that is stored.
  """
  folder: str
  file: str
  source: Source
  positions: range
  settings: Settings
  name_of: Callable[[str], str]

  def read_note(self) -> documents.Field | None:
    """Returns the note of the finished shard; None if it is missing, or damaged, which is logged."""
    path = storage.open_path(self.folder) / f'{self.file}{NOTE}'
    if not path.exists():
      return None
    try:
      with storage.local(str(path)) as local:
        note = documents.read(local, expected='the note of a shard', advice='')
      array_record.read_shard(note)  # raises an error if the note is damaged
      return note
    except UserError as error:
      log.warning('%s The shard is written again.', error)
      return None

  def record(self, row: int) -> tuple[bytes, HostArray | None] | None:
    """Returns the record of an example to write, and the `channels.sums` of the image, None for RGB.

    Logs a warning and returns None if the stored file is not an image, or if a required caption cannot be used.
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
        decode.read_size(stored.image)  # raises BadImage if the file is not an image
    except BadImage as error:
      log.warning('%s is left out: %s', source.describe(row), error)
      return None
    all_labels = {'labels': stored.labels} if source.most_labels else {}
    name = os.fsencode(self.name_of(source.describe(row)))
    return example.serialize({'image': encode(stored.image, settings), 'label': stored.label, 'name': name,
                              **all_labels, **texts}), sums


class Share(NamedTuple):
  """The shards that a host writes: number `host`, and every `num_hosts`-th shard after it."""
  host: int
  num_hosts: int


ALL = Share(0, 1)


class Outcome(enum.Enum):
  """State of a dataset after `write`."""
  WRITTEN = 'written'
  UNCHANGED = 'unchanged'    # the dataset was complete before
  INCOMPLETE = 'incomplete'  # shards of other hosts are missing


PlanJobs = Callable[[Mapping[str, Source]], Sequence[Job]]
"""Returns the jobs for sources by split: the same jobs on each machine that has opened the same sources."""
OnWritten = Callable[[int], None]
"""Takes the number of examples that were written since the last call."""


class Runner(Protocol):
  """Writes the shards of those jobs that have no note. Workers on other machines call `plan_jobs` to get their jobs."""

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
    run: writes the shards, such as `LocalRunner`.
    share: the share of the shards that this host writes.

  Raises:
    UserError: the folder has other content, or another process writes it; a split has no images, or other classes.
  """
  _check_classes(splits)
  plan = _plan(splits, settings)
  if (folder / array_record.INFO).exists() or (isinstance(folder, pathlib.Path) and not files.is_vacant(folder)):
    _check_same(folder, plan)
    return Outcome.UNCHANGED
  counts = {name: _count_shards(name, source, settings) for name, source in splits.items()}
  make_jobs = functools.partial(_make_jobs, counts=counts, settings=settings, name_of=name_of)
  finish = functools.partial(_finish, splits=splits, settings=settings, plan=plan, make_jobs=make_jobs)

  def write_share(part_folder: storage.Path) -> None:
    plan_jobs = functools.partial(make_jobs, folder=str(part_folder))
    run(plan_jobs(splits)[share.host::share.num_hosts], plan_jobs)
  if not isinstance(folder, pathlib.Path):  # object storage
    _begin(folder, plan)
    write_share(folder)
    for name in {*(f'{name}{NOTE}' for name in finish(folder)), PLAN}:
      (folder / name).unlink(missing_ok=True)
    return Outcome.WRITTEN
  # On a local disk, all hosts write to the folder of `unfinished`, and the last host completes the dataset.
  shards = {file_name(split, number, count) for split, count in counts.items() for number in range(count)}
  unfinished = files.Unfinished(folder, json.dumps(plan), shards | {array_record.INFO, array_record.SUMS})
  has_other_hosts = share.num_hosts > 1
  with unfinished.open(joins=has_other_hosts) as part_folder:
    if files.is_vacant(folder):  # else another host has just completed the dataset
      write_share(part_folder)
    if not has_other_hosts and (dataset_files := finish(part_folder)):
      unfinished.complete(dataset_files)
  with unfinished.alone() as is_last_host:
    if is_last_host and (dataset_files := finish(part_folder)):
      unfinished.complete(dataset_files)
  if files.is_vacant(folder):
    return Outcome.INCOMPLETE
  _check_same(folder, plan)
  return Outcome.WRITTEN


def _check_classes(splits: Mapping[str, Source]) -> None:
  """Raises UserError if a split has other classes than the first split. The message names some of these classes."""
  first, *others = splits
  for other in others:
    classes, other_classes = splits[first].class_names, splits[other].class_names
    if classes == other_classes:
      continue
    only_first = [label for label in classes if label not in other_classes]
    only_other = [label for label in other_classes if label not in classes]
    differences = [f'{documents.listed(labels, 3)} only in {split}'
                   for split, labels in ((first, only_first), (other, only_other)) if labels]
    raise UserError(f'--splits: expected splits with the same classes, got '
                    f'{" and ".join(differences) or f"another order in {other} than in {first}"}. Leave out one of '
                    f'them, or write it to a folder of its own, such as --splits={first}.')


def _finish(folder: storage.Path, *, splits: Mapping[str, Source], settings: Settings, plan: Mapping[str, Any],
            make_jobs: Callable[..., list[Job]]) -> set[str]:
  """Writes `info.json` if all shards exist, and returns the names of all files of the dataset; else an empty set."""
  notes: dict[str, list[documents.Field]] = {name: [] for name in splits}
  for name, source in splits.items():
    for job in make_jobs({name: source}, folder=str(folder)):
      note = job.read_note()
      if note is None:
        return set()
      notes[name].append(note)
  shards = {name: [array_record.read_shard(note) for note in split_notes] for name, split_notes in notes.items()}
  for name, split_shards in shards.items():
    if not sum(shard.num_examples for shard in split_shards):
      raise UserError(f'--data: expected images in the split {name}, got {len(splits[name]):,} files whose image or '
                      'label cannot be used. Their names and the reasons are above.')
  max_labels = max(map(_find_max_labels, splits.values()))
  info = {'format': array_record.FORMAT, 'made': plan, 'class_names': list(next(iter(splits.values())).class_names),
          **({'most_labels': max_labels} if max_labels else {}),
          **({'texts': plan['texts']} if 'texts' in plan else {}), **_statistics(notes, settings.channels),
          'splits': {name: [shard._asdict() for shard in split_shards] for name, split_shards in shards.items()}}
  all_shards = [shard for split_shards in shards.values() for shard in split_shards]
  checksums = ''.join(f'{shard.sha256}  {shard.file}\n' for shard in all_shards)
  storage.write_bytes(folder / array_record.SUMS, checksums.encode())
  storage.write_bytes(folder / array_record.INFO, json.dumps(info, indent=1).encode())
  return {array_record.SUMS, array_record.INFO, *(shard.file for shard in all_shards)}


def _find_max_labels(source: Source) -> int:
  """Returns `source.most_labels`; if that is `UNKNOWN`, reads every example to find the number."""
  if source.most_labels != UNKNOWN:
    return source.most_labels
  return max((len(_read(source, row).labels) for row in range(len(source))), default=1)


def _plan(splits: Mapping[str, Source], settings: Settings) -> dict[str, Any]:
  """Returns a description of how a dataset is made, for `info.json`. Equal plans make equal datasets."""
  plan = {'from': {name: source.name for name, source in splits.items()},
          'digests': {name: source.digest for name, source in splits.items()},
          **{field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}}
  if settings.channels == RGB:  # plans for RGB have no `channels`, so that they equal the plans of older versions
    del plan['channels']
  del plan['captions']
  if settings.captions:
    plan['texts'] = settings.captions.encoding.to_json()
  return plan


def _begin(folder: storage.Path, plan: Mapping[str, Any]) -> None:
  """Writes the plan to object storage. Keeps the shards of an interrupted command with the same plan.

  Raises UserError if the folder has other content.
  """
  names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
  if names and (PLAN not in names or (folder / PLAN).read_text() != json.dumps(plan)):
    raise UserError(f'--to={folder}: expected a new folder, got one with other content. Choose another folder.')
  storage.write_bytes(folder / PLAN, json.dumps(plan).encode())


def _check_same(folder: storage.Path, plan: Mapping[str, Any]) -> None:
  """Raises UserError if a folder has other content than the dataset of this plan."""
  old_plan = None
  if (folder / array_record.INFO).is_file():
    with storage.local(str(folder / array_record.INFO)) as path:
      old_plan = array_record.read_info(path.parent).made
  if old_plan != documents.parse(json.dumps(plan)):
    content = 'a dataset prepared with other settings' if old_plan else 'other content'
    raise UserError(f'--to={folder}: expected a new folder, got one with {content}. Choose another folder.')


def file_name(split: str, number: int, count: int) -> str:
  """Returns the name of a shard, such as `train-00000-of-00002.array_record`."""
  return f'{split}-{number:05d}-of-{count:05d}.array_record'


def _make_jobs(splits: Mapping[str, Source], *, counts: Mapping[str, int], folder: str, settings: Settings,
               name_of: Callable[[str], str]) -> list[Job]:
  """Returns the jobs of all shards, split by split; the first shards of a split may have one example more.

  `counts` has the number of shards of each split.
  """
  jobs = []
  for name, source in splits.items():
    size, num_longer = divmod(len(source), counts[name])
    starts = [number * size + min(number, num_longer) for number in range(counts[name] + 1)]
    jobs += [Job(folder, file_name(name, number, counts[name]), source, range(*start_stop), settings, name_of)
             for number, start_stop in enumerate(itertools.pairwise(starts))]
  return jobs


def _rows(positions: HostArray, source: Source, settings: Settings) -> HostArray:
  """Returns the rows in the source, given positions in the order in which the split is written."""
  return positions if settings.seed is None else windows.visit_once(source, settings.seed)(positions)


def _count_shards(split: str, source: Source, settings: Settings) -> int:
  """Returns the number of shards of a split. Raises UserError if it has no examples."""
  if not len(source):
    raise UserError(f'--data: expected at least one example in the split {split}, got none. Choose another '
                    'split or source.')
  num_shards = settings.num_shards
  if not num_shards:  # the mean size of an image is estimated from the first examples
    images = [_read(source, row).image for row in _rows(np.arange(min(50, len(source))), source, settings).tolist()]
    mean_bytes = float(np.mean([len(image) if isinstance(image, bytes) else image.nbytes for image in images]))
    num_shards = max(1, round(mean_bytes * len(source) / SHARD_BYTES), -(-len(source) // SHARD_RECORDS))
  return min(len(source), num_shards)


def _read(source: Source, row: int) -> Record:
  """Returns a stored example; an empty record if the example is damaged, because the dataset will not contain it."""
  try:
    return read_one(source, row)
  except BadImage:
    return Record(b'')


def _statistics(notes: Mapping[str, Sequence[documents.Field]], num_channels: int) -> dict[str, Any]:
  """Returns mean and standard deviation of each channel over `train` or, without `train`, the first split; {} for RGB.

  Raises UserError if a channel has the same value everywhere.
  """
  if num_channels == RGB:
    return {}
  split_notes = notes.get('train', next(iter(notes.values())))
  sums = [[[x.number() for x in row.elements()] for row in note.field('sums').elements()] for note in split_notes]
  mean, std = channels.statistics(np.sum(sums, axis=0))
  if constant := [str(number) for number, value in enumerate(std) if not value > 0]:
    raise UserError(f'--data: expected channels whose values differ, got {", ".join(constant)} (counted from 0) with '
                    'one value in all images. Leave them out of the files.')
  return {'channels': num_channels, 'mean': mean, 'std': std}


def write_shard(job: Job, on_written: OnWritten = lambda num: None, threads: int = 0) -> array_record.Shard:
  """Writes a shard and then the note of the shard, and returns the entry of the shard in `info.json`.

  Args:
    job: describes the shard.
    on_written: called after each part of the shard.
    threads: number of threads that convert images; 0 = one per core, at most 16.
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
  """Writes the records of a shard; leaves out examples without a usable image or caption.

  Returns:
    The number of records, and the sum of `channels.sums` over the images, `[3, C]` f64, added in the order of records.
  """
  from array_record.python import array_record_module
  rows = _rows(np.arange(job.positions.start, job.positions.stop), job.source, job.settings).tolist()
  writer = array_record_module.ArrayRecordWriter(str(path), 'group_size:1')  # one record per group, for random access
  num_records, total = 0, np.zeros((3, job.settings.channels))
  with concurrent.futures.ThreadPoolExecutor(open_files.num_threads(threads)) as pool:
    for start in range(0, len(rows), _CHUNK_EXAMPLES):
      chunk = rows[start:start + _CHUNK_EXAMPLES]
      for record, sums in filter(None, pool.map(job.record, chunk)):
        writer.write(record)
        num_records += 1
        if sums is not None:
          total = total + sums
      on_written(len(chunk))
  writer.close()
  return num_records, total


class LocalRunner(NamedTuple):
  """Writes shards in processes of this machine. If a process ends early, this process writes the remaining shards.

  on_written: the first call counts the examples of shards that were finished before, perhaps 0.
  processes: number of processes; 1 = only this process; 0 = chosen by the number of cores.
  """
  on_written: OnWritten = lambda num: None
  processes: int = 1

  def __call__(self, jobs: Sequence[Job], plan_jobs: PlanJobs) -> None:
    """Writes the shards that have no note."""
    del plan_jobs  # `jobs` has all jobs
    unwritten = [job for job in jobs if job.read_note() is None]
    self.on_written(sum(len(job.positions) for job in jobs) - sum(len(job.positions) for job in unwritten))
    default = max(1, min(open_files.num_cores() // CORES_PER_PROCESS, len(unwritten) // SHARDS_PER_PROCESS))
    num_processes = min(self.processes or default, len(unwritten))
    if num_processes > 1:
      self._write_in_processes(unwritten, num_processes)
      unwritten = [job for job in unwritten if job.read_note() is None]
    for job in unwritten:
      write_shard(job, self.on_written)

  def _write_in_processes(self, jobs: Sequence[Job], num: int) -> None:
    """Writes shards in `num` processes, and reports their progress; the processes end when this process ends."""
    context, threads = multiprocessing.get_context('spawn'), max(1, open_files.num_cores() // num)
    processes = [context.Process(target=_run_quietly, args=(os.getpid(), jobs[number::num], threads), daemon=True)
                 for number in range(num)]
    folder, examples_by_note = jobs[0].folder, {f'{job.file}{NOTE}': len(job.positions) for job in jobs}
    num_reported = 0
    for process in processes:
      process.start()
    try:
      is_running = True
      while is_running:
        time.sleep(POLL_S)
        is_running = any(process.is_alive() for process in processes)
        num_written = sum(examples_by_note.get(name, 0) for name in os.listdir(folder))
        self.on_written(num_written - num_reported)
        num_reported = num_written
    finally:
      for process in processes:
        process.kill()
        process.join()


def _run_quietly(parent: int, jobs: Sequence[Job], threads: int) -> None:
  """Writes shards in a child process. Errors are ignored: the parent writes the missing shards and shows the error."""
  workers.start_worker(parent)
  with contextlib.suppress(Exception):
    for job in jobs:
      write_shard(job, threads=threads)


def encode(image: bytes | HostArray, settings: Settings) -> bytes:
  """Returns the bytes to store for an image, which is a file or an array `[H, W, C]`.

  An RGB image whose short side exceeds `short_px` becomes a JPEG of that size, with only the orientation of the EXIF
  data. All other RGB files are kept: also files that cannot be decoded, which are reported when the dataset is read,
  and files whose JPEG would exceed the largest size of a JPEG. Other RGB arrays become PNG. Images with other channels
  are not resized: files are kept, and arrays become `.npy` files.
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
  if not settings.short_px or factor >= 1 or max(size) > _MAX_JPEG_PX:
    return image if isinstance(image, bytes) else _encode_rgb(image, '.png', [])
  resized = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)
  jpeg = _encode_rgb(resized, '.jpg', [cv2.IMWRITE_JPEG_QUALITY, settings.quality])
  orientation = decode.find_orientation(image) if isinstance(image, bytes) else 1  # 1 = upright
  return headers.write_orientation(jpeg, orientation) if orientation != 1 else jpeg


def _encode_rgb(pixels: HostArray, extension: str, options: list[int]) -> bytes:
  return cv2.imencode(extension, pixels[..., ::-1], options)[1].tobytes()  # OpenCV expects BGR
