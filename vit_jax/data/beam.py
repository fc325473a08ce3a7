"""Writes shards of a prepared dataset on the workers of Apache Beam, with any of its runners.

`jobs/prepare.py` passes `Beam` to `prepare.write` as the runner. Each element of the Beam pipeline is the number of a
job, and each job writes one shard. The worker opens the sources and reads the examples of the shard, so no image passes
from worker to worker. If Beam repeats an element, the worker finds the note of the finished shard and writes nothing.
"""
from __future__ import annotations

import dataclasses
import shlex
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from vit_jax.core import extras
from vit_jax.core.errors import UserError
from vit_jax.data import prepare
from vit_jax.data.source import Source

OpenSplits = Callable[[], Mapping[str, Source]]
"""Returns the sources by split; a worker calls the function, which can be pickled."""
_splits_by_digests = dict[tuple[str, ...], Mapping[str, Source]]()
"""The splits that this worker has opened, by the digests of their sources."""
_lock = threading.Lock()  # held by the thread that uses `_splits_by_digests`


class Beam(NamedTuple):
  """A `prepare.Runner` that writes shards on workers of Beam.

  runner: name of a runner of Beam, such as `DirectRunner`.
  options: the options of this Beam runner, written as on a command line.
  """
  open_splits: OpenSplits
  runner: str
  options: str

  def __call__(self, jobs: Sequence[prepare.Job], plan_jobs: prepare.PlanJobs) -> None:
    beam = extras.load('apache_beam', 'beam', '--runner')
    write = _WriteShard(self.open_splits, plan_jobs, _digests(job.source for job in jobs))
    try:
      flags = [f'--runner={self.runner}', *shlex.split(self.options)]
      pipeline = beam.Pipeline(options=beam.options.pipeline_options.PipelineOptions(flags))
    except ValueError as error:  # a quotation mark is not closed, or the runner or one of the options is unknown
      raise UserError(f'--runner: expected a runner of Apache Beam, and in --runner_options its options, got '
                      f'{self.runner}: "{" ".join(str(error).split())[:300]}". Correct the flags.') from error
    with pipeline:  # the pipeline runs when the block ends
      _ = pipeline | 'numbers' >> beam.Create(range(len(jobs))) | beam.Reshuffle() | 'shards' >> beam.Map(write)


def _digests(sources: Iterable[Source]) -> tuple[str, ...]:
  """Returns the distinct digests of the sources, in the order of the sources."""
  return tuple(dict.fromkeys(source.digest for source in sources))


@dataclasses.dataclass(frozen=True)
class _WriteShard:
  """Writes the shard of the job with a given number, on a worker. `digests`: of the sources of all jobs."""
  open_splits: OpenSplits
  plan_jobs: prepare.PlanJobs
  digests: tuple[str, ...]

  def __call__(self, number: int) -> int:
    with _lock:
      if self.digests not in _splits_by_digests:
        _splits_by_digests[self.digests] = self.open_splits()
      splits = _splits_by_digests[self.digests]
    if _digests(splits.values()) != self.digests:
      raise UserError(f'--data: expected the same files for every worker, got others on {socket.gethostname()}. '
                      'Put them on storage that all workers share.')
    job = self.plan_jobs(splits)[number]
    if job.read_note() is None:
      prepare.write_shard(job)
    extras.load('apache_beam', 'beam', '--runner').metrics.Metrics.counter('vit_jax', 'shards').inc()
    return number
