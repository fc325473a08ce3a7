"""Writes the shards of a prepared dataset with Apache Beam, on any of its runners, to a folder or to object storage.

The dataset is that of the local command, byte for byte: every shard is a function of the sources and the settings. An
element of the pipeline is the number of a shard. A worker reads the examples of its shard at random from the source, so
nothing is shuffled between workers, which would send every image over the network twice. A finished shard has a note
beside it, so that a pipeline that runs again, or an element that a runner repeats, writes only what is missing.
`info.json` is written last; a folder without it is not a dataset.
"""
from __future__ import annotations

import dataclasses
import json
import logging
import pathlib
import shlex
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from vit_jax.core import extras, retrying
from vit_jax.core.errors import UserError
from vit_jax.data.files import json_fields
from vit_jax.data.source import Source
from vit_jax.data.sources import prepared, shard_jobs, shards
from vit_jax.data.sources.prepared import Shard
from vit_jax.data.sources.shards import Settings
from vit_jax.record import storage

Opener = Callable[[], Mapping[str, Source]]
log = logging.getLogger('vit_jax.data')
PLAN = 'plan.json'


@dataclasses.dataclass(frozen=True)
class Shards:
  """All shards of a dataset; pickles to what the workers need.

  open_splits: opens the sources by split. Workers call it once, since sources share memory with processes of their own
    machine.
  digests: of the sources, which must be the same for every worker.
  folder: where shards are written, a path that every worker has or an address such as `gs://…`.
  counts: the number of shards by split.
  """
  open_splits: Opener
  digests: tuple[str, ...]
  folder: str
  settings: Settings
  counts: Mapping[str, int]
  name_of: Callable[[str], str]

  @property
  def splits(self) -> Mapping[str, Source]:
    """The sources by split.

    Raises:
      UserError: they are others than where the pipeline was started.
    """
    with _opening:
      if self.digests not in _opened:
        found = self.open_splits()
        if tuple(source.digest for source in found.values()) != self.digests:
          raise UserError(f'--data: expected the same files for every worker, got others on {socket.gethostname()}. '
                          'Put them on storage that all workers share.')
        _opened[self.digests] = found
      return _opened[self.digests]

  def place(self, number: int) -> tuple[str, int]:
    """Returns the split of a shard, and its number in this split."""
    for split, count in self.counts.items():
      if number < count:
        return split, number
      number -= count
    raise IndexError(number)

  def job(self, number: int, folder: pathlib.Path) -> shard_jobs.Job:
    """Returns the work of writing a shard into a folder of this machine."""
    split, place = self.place(number)
    return shards.plan_shard(split, place, self.counts[split], self.splits[split], folder, self.settings, self.name_of)

  def write(self, number: int) -> Shard:
    """Returns what `info.json` says of a shard, which is written unless it is complete."""
    folder = storage.open_path(self.folder)
    split, place = self.place(number)
    file = shards.file_name(split, place, self.counts[split])
    if (note := _note(folder, file)) is not None:
      return note
    if isinstance(folder, pathlib.Path):
      return shard_jobs.write_shard(self.job(number, folder))
    with tempfile.TemporaryDirectory(prefix='vit_jax_shard_') as place_here:
      job = self.job(number, pathlib.Path(place_here))
      shard = shard_jobs.write_shard(job)
      for name in (file, f'{file}{shard_jobs.NOTE}'):  # the note says that the shard is complete
        content = job.path.with_name(name).read_bytes()
        retrying.retried(lambda name=name, content=content: (folder / name).write_bytes(content),  # type: ignore[misc]
                         f'writing {folder / name}')
      return shard


_opening, _opened = threading.Lock(), dict[tuple[str, ...], Mapping[str, Source]]()


class Written(NamedTuple):
  """A shard that a worker has written, by its number."""
  number: int
  shard: Shard


def write(open_splits: Opener, to: str, settings: Settings, *, name_of: Callable[[str], str], runner: str,
          options: str) -> bool:
  """Writes the splits as a prepared dataset; returns False if it existed.

  Args:
    open_splits: opens the sources by the names of the splits to write; every worker calls it. Pickles.
    to: a folder that every worker has, or `gs://BUCKET/FOLDER`.
    settings: how the dataset is made.
    name_of: shortens the description of an example; pickles.
    runner: of Beam, such as DirectRunner, DataflowRunner, FlinkRunner or SparkRunner.
    options: further pipeline options as on a command line, `--project=P --region=R`.

  Raises:
    UserError: Beam is not installed, or the folder has other content.
  """
  beam = extras.load('apache_beam', 'beam', '--runner')
  splits = open_splits()
  whole = storage.open_path(to)
  part = whole.with_name(f'{whole.name}.part') if isinstance(whole, pathlib.Path) else whole
  plan = shards.describe_plan(splits, settings)
  if (whole / prepared.INFO).exists():
    _check(whole, plan)
    return False
  _begin(whole, part, plan)
  counts = {name: shards.count_shards(name, source, settings) for name, source in splits.items()}
  digests = tuple(source.digest for source in splits.values())
  every = Shards(open_splits, digests, str(part), settings, counts, name_of)
  numbers = range(sum(every.counts.values()))
  log.info('%s shards are written by %s.', f'{len(numbers):,}', runner)
  flags = [f'--runner={runner}', *shlex.split(options)]
  with beam.Pipeline(options=beam.options.pipeline_options.PipelineOptions(flags)) as pipeline:
    _ = (pipeline | 'numbers' >> beam.Create(numbers) | beam.Reshuffle()
         | 'shards' >> beam.Map(_Write(every)))
  found: dict[str, list[Shard]] = {name: [] for name in splits}
  for number in numbers:
    found[every.place(number)[0]].append(every.write(number))  # reads its note
  content = shards.finish(found, shards.describe_content(splits, plan),
                          {name: len(source) for name, source in splits.items()})
  for name, text in content.items():
    (part / name).write_text(text)
  kept = {shard.file for some in found.values() for shard in some} | set(content)
  for path in list(part.iterdir()):
    if path.name not in kept:
      path.unlink()
  if part != whole:
    assert isinstance(part, pathlib.Path)
    part.rename(str(whole))
  return True


@dataclasses.dataclass(frozen=True)
class _Write:
  """Writes a shard by its number in a worker, which counts it."""
  shards: Shards

  def __call__(self, number: int) -> Written:
    import apache_beam as beam
    shard = self.shards.write(number)
    beam.metrics.Metrics.counter('vit_jax', 'images').inc(shard.num_examples)
    beam.metrics.Metrics.counter('vit_jax', 'shards').inc()
    return Written(number, shard)


def _begin(whole: storage.Path, part: storage.Path, plan: Mapping[str, Any]) -> None:
  """Prepares the folder, in which shards of an interrupted pipeline with the same plan stay."""
  text = json.dumps(plan)
  part.mkdir(parents=True, exist_ok=True)
  there = {path.name for path in part.iterdir()} if part.is_dir() else set()
  if whole != part and whole.is_dir() and any(whole.iterdir()) or (
      there and (PLAN not in there or (part / PLAN).read_text() != text)):
    beside = f' (or {part.name}, of a command with other settings)' if whole != part else ''
    raise UserError(f'--to={whole}: expected a new folder, got one with other content{beside}. Choose another folder.')
  (part / PLAN).write_text(text)


def _check(folder: storage.Path, plan: Mapping[str, Any]) -> None:
  made = json.loads((folder / prepared.INFO).read_text()).get('made')
  if made != json.loads(json.dumps(plan)):
    raise UserError(f'--to={folder}: expected a new folder, got one with a dataset prepared with other settings. '
                    'Choose another folder.')


def _note(folder: storage.Path, file: str) -> Shard | None:
  """Returns the note of a finished shard; None if it is missing or damaged, so that the shard is written again."""
  path = folder / f'{file}{shard_jobs.NOTE}'
  if not path.exists():
    return None
  with storage.local(str(path)) as here:
    try:
      return prepared.read_shard(json_fields.read(here, expected='the note of a shard', advice=''))
    except UserError as error:
      log.warning('%s The shard is written again.', error)
      return None

