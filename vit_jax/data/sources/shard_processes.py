"""Several processes of this machine that write the shards of a prepared dataset together."""
from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.context import SpawnProcess
from multiprocessing.sharedctypes import SynchronizedArray

from vit_jax.data.files import open_files
from vit_jax.data.pipeline import prefetch
from vit_jax.data.sources import shard_jobs
from vit_jax.data.sources.shard_jobs import Job

CORES_EACH = 8
"""Cores for each process, by default: the threads of one process keep about so many busy."""
SHARDS_EACH = 4
"""Fewer shards than this are not worth a process, which takes some seconds to start."""


def default(num_shards: int) -> int:
  """Returns the number of processes for so many shards on this machine."""
  return max(1, min(open_files.num_cores() // CORES_EACH, num_shards // SHARDS_EACH))


def run_all(jobs: Sequence[Job], on_written: Callable[[int], None], *, processes: int) -> None:
  """Does what `shard_jobs.run_all` does, in `processes`. If they end early, this process does what is left.

  Args:
    jobs: all shards.
    on_written: called with a number of written examples; first, and perhaps with 0, with that of shards found complete.
    processes: 1 = this one.
  """
  sizes = {job.path.name: len(job.indexes) for job in jobs}
  told = sum(sizes.get(name, 0) for name in _noted(jobs[0]))
  on_written(told)
  left = [job for job in jobs if not job.written()]
  if min(processes, len(left)) <= 1:
    return shard_jobs.run_all(left, lambda _, num: on_written(num))

  def tell(num: int) -> None:
    nonlocal told
    on_written(max(0, num - told))
    told = max(told, num)

  with _running(left, min(processes, len(left))) as (started, begun):
    while any(one.is_alive() for one in started):
      time.sleep(shard_jobs.POLL_S)
      # A process counts from 0 after each shard, so that finished and begun shards add up.
      tell(min(sum(sizes.values()), sum(sizes.get(name, 0) for name in _noted(jobs[0])) + sum(begun[:])))
  shard_jobs.run_all(jobs, lambda *_: None)
  tell(sum(sizes.values()))
  return None


@contextlib.contextmanager
def _running(jobs: Sequence[Job], processes: int) -> Iterator[tuple[list[SpawnProcess], SynchronizedArray[int]]]:
  """Yields processes, which end with this one, and the number of examples of the shard that each is writing."""
  context = multiprocessing.get_context('spawn')
  begun = context.Array('q', processes)
  threads = max(1, open_files.num_cores() // processes)
  started = [context.Process(target=_run, args=(os.getpid(), jobs, begun, place, threads), daemon=True)
             for place in range(processes)]
  for one in started:
    one.start()
  try:
    yield started, begun
  finally:
    for one in started:
      one.kill()
      one.join()


def _run(parent: int, jobs: Sequence[Job], begun: SynchronizedArray[int], place: int, threads: int) -> None:
  """The part of one process. An error is left to the parent, which meets it again, and shows it."""
  prefetch.start_worker(parent, 0, 0)

  def count(job: Job, num: int) -> None:
    begun[place] = (begun[place] + num) % len(job.indexes)

  with contextlib.suppress(Exception):
    shard_jobs.run_all(jobs, count, threads=threads)


def _noted(job: Job) -> set[str]:
  """Returns the file names of the finished shards beside this one."""
  with contextlib.suppress(FileNotFoundError):  # another host has completed the dataset
    return {name.removesuffix(shard_jobs.NOTE) for name in os.listdir(job.path.parent)
            if name.endswith(shard_jobs.NOTE)}
  return set()
