"""Writes shards of a prepared dataset on the workers of Apache Beam, with any of its runners.

`jobs/prepare.py` passes `Beam` to `prepare.write` as its runner. An element of the pipeline is the number of a job. A
worker opens the source itself and reads the examples of the shard from it, so no image passes from worker to worker.
Beam may repeat an element: the worker then finds the note of the shard and writes nothing.
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
"""Opens the sources by split on a worker; it pickles."""
_lock, _opened = threading.Lock(), dict[tuple[str, ...], Mapping[str, Source]]()
"""What this worker has opened, by the digests of the sources, and the lock of its threads for this dictionary."""


class Beam(NamedTuple):
  """A `prepare.Runner` that writes shards on workers of Beam.

  runner: name of a runner of Beam, such as `DirectRunner`.
  options: command line of its options.
  """
  open_splits: OpenSplits
  runner: str
  options: str

  def __call__(self, jobs: Sequence[prepare.Job], plan_jobs: prepare.PlanJobs) -> None:
    beam = extras.load('apache_beam', 'beam', '--runner')
    write = _WriteShard(self.open_splits, plan_jobs, _digests(job.source for job in jobs))
    try:
      flags = [f'--runner={self.runner}', *shlex.split(self.options)]
      unstarted = beam.Pipeline(options=beam.options.pipeline_options.PipelineOptions(flags))
    except ValueError as error:  # an open quotation, an unknown runner, or options that the runner lacks
      raise UserError(f'--runner: expected a runner of Apache Beam, and in --runner_options its options, got '
                      f'{self.runner}: "{" ".join(str(error).split())[:300]}". Correct the flags.') from error
    with unstarted as pipeline:
      _ = pipeline | 'numbers' >> beam.Create(range(len(jobs))) | beam.Reshuffle() | 'shards' >> beam.Map(write)


def _digests(sources: Iterable[Source]) -> tuple[str, ...]:
  """Returns the digests of the sources, each once, in their order."""
  return tuple(dict.fromkeys(source.digest for source in sources))


@dataclasses.dataclass(frozen=True)
class _WriteShard:
  """Writes the shard of a job, given its number, on a worker. `digests` are those of the sources of all jobs."""
  open_splits: OpenSplits
  plan_jobs: prepare.PlanJobs
  digests: tuple[str, ...]

  def __call__(self, number: int) -> int:
    with _lock:
      if self.digests not in _opened:
        _opened[self.digests] = self.open_splits()
      splits = _opened[self.digests]
    if _digests(splits.values()) != self.digests:
      raise UserError(f'--data: expected the same files for every worker, got others on {socket.gethostname()}. '
                      'Put them on storage that all workers share.')
    job = self.plan_jobs(splits)[number]
    if job.note() is None:
      prepare.write_shard(job)
    extras.load('apache_beam', 'beam', '--runner').metrics.Metrics.counter('vit_jax', 'shards').inc()
    return number
