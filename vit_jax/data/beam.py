"""Writes shards of a prepared dataset on the workers of Apache Beam, with any of its runners.

`jobs/prepare.py` passes `Beam` to `prepare.write` as its runner. An element of the pipeline is the number of a shard. A
worker reads the examples of its shard directly from the source, so no image passes from worker to worker. If an element
is repeated, the worker finds the note of its shard and writes nothing.
"""
from __future__ import annotations

import dataclasses
import shlex
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from vit_jax.core import extras
from vit_jax.core.errors import UserError
from vit_jax.data import prepare
from vit_jax.data.source import Source

Plan = Callable[[Mapping[str, Source]], Sequence[prepare.Job]]
_opening, _opened = threading.Lock(), dict[tuple[str, ...], Mapping[str, Source]]()


class Beam(NamedTuple):
  """Runs `prepare.write_shard` on workers of Beam.

  open_splits: opens the sources on a worker; it pickles.
  runner: name of a runner of Beam, such as `DirectRunner`.
  options: command line of its options.
  """
  open_splits: Callable[[], Mapping[str, Source]]
  runner: str
  options: str

  def __call__(self, jobs: Sequence[prepare.Job], plan: Plan) -> None:
    beam = extras.load('apache_beam', 'beam', '--runner')
    digests = tuple(dict.fromkeys(job.source.digest for job in jobs))
    try:
      flags = [f'--runner={self.runner}', *shlex.split(self.options)]
      made = beam.Pipeline(options=beam.options.pipeline_options.PipelineOptions(flags))
    except ValueError as error:  # an open quotation, an unknown runner, or options that the runner lacks
      raise UserError(f'--runner: expected a runner of Apache Beam, and in --runner_options its options, got '
                      f'{self.runner}: "{" ".join(str(error).split())[:300]}". Correct the flags.') from error
    with made as pipeline:
      _ = (pipeline | 'numbers' >> beam.Create(range(len(jobs))) | beam.Reshuffle()
           | 'shards' >> beam.Map(_Write(self.open_splits, plan, digests)))


@dataclasses.dataclass(frozen=True)
class _Write:
  """Writes a shard by its number in a worker, which opens the sources once."""
  open_splits: Callable[[], Mapping[str, Source]]
  plan: Plan
  digests: tuple[str, ...]

  def __call__(self, number: int) -> int:
    with _opening:
      if self.digests not in _opened:
        _opened[self.digests] = self.open_splits()
      splits = _opened[self.digests]
    if tuple(dict.fromkeys(source.digest for source in splits.values())) != self.digests:
      raise UserError(f'--data: expected the same files for every worker, got others on {socket.gethostname()}. '
                      'Put them on storage that all workers share.')
    job = self.plan(splits)[number]
    if job.note() is None:
      prepare.write_shard(job)
    extras.load('apache_beam', 'beam', '--runner').metrics.Metrics.counter('vit_jax', 'shards').inc()
    return number
