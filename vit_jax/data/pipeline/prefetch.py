"""Runs a batch function ahead of the consumer, in threads or in loader processes, with Grain.

Grain only schedules: the caller decides which batch has which number, so the stream is the same for any number of
threads and processes.
"""
from __future__ import annotations

import concurrent.futures
import errno
import functools
import logging
import math
import os
import re
import shutil
import signal
import threading
import time
import typing
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from typing import Protocol

from vit_jax.core import retrying
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.core.types import Batch
from vit_jax.data.files import access, ranges
from vit_jax.data.image import opencv
from vit_jax.data.pipeline import capacity, shared
from vit_jax.record import console

log = logging.getLogger('vit_jax.data')

PARENT_POLL_S = 1.
DEATHS_WITHIN_S = 600.
SHARED = '/dev/shm'
_DEATH = 'Worker process was terminated unexpectedly'  # Grain 0.2.18
_STATUS = re.compile(r'exit code (-?\d+)')
_TOO_LITTLE_SHARED = '-7'
"""Status of a process that was killed with SIGBUS: shared memory had no room for what it wrote."""


class ClosableIterator(Iterator[Batch], Protocol):
  """An iterator that holds threads or processes until closed."""

  def close(self) -> None:
    ...


def prefetched(make: shared.Make | Callable[[int], Batch], numbers: range, *, threads: int, workers: int,
               batch_bytes: int = 0) -> ClosableIterator:
  """Yields `make(n)` for each of `numbers`, in order, computed ahead of time.

  Args:
    make: must pickle if there are workers.
    numbers: of the batches.
    threads: in total; 0 = one per core, at most 16 in a process.
    workers: processes; 0 = threads of this process. A process that dies is restarted once, from the same batch.
    batch_bytes: of a batch, whose arrays `make` then writes to shared memory; 0 = not known, batches are copied.
  """
  each = capacity.sizes(threads, workers, batch_bytes=batch_bytes, here=capacity.machine())
  start = functools.partial(_start_grain, make, each=each, workers=workers,
                            is_shared=batch_bytes > 0 and shared.is_possible())
  return RestartingIterator(start, numbers) if workers else start(numbers)


def _start_grain(make: Callable[[int], Batch], numbers: range, *, each: capacity.Sizes, workers: int,
                 is_shared: bool) -> ClosableIterator:
  import grain
  opencv.quieten()
  workers = min(workers, len(numbers))
  is_shared = is_shared and workers > 0
  dataset = grain.MapDataset.range(numbers.start, numbers.stop, numbers.step).map(
      shared.SharedMake(typing.cast(shared.Make, make)) if is_shared else make)
  # Grain counts batches here, and would hold 500 of them by default.
  stream = dataset.to_iter_dataset(grain.ReadOptions(num_threads=each.threads, prefetch_buffer_size=each.buffer))
  if workers:
    _let_grain_read_its_flags()
    options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=capacity.HANDED)
    setup = functools.partial(_start_loader, os.getpid(), ranges.settings(), console.messages(), retrying.patience())
    stream = stream.mp_prefetch(options, worker_init_fn=setup)
  return shared.Opened(iter(stream)) if is_shared else iter(stream)


class AdjustingIterator:
  """Batches of a number of processes that may change between two batches. `workers` returns the number."""

  def __init__(self, start: Callable[[range, int], ClosableIterator], numbers: range,
               workers: Callable[[], int]) -> None:
    self._start, self._numbers, self._get, self._done = start, numbers, workers, 0
    self._workers = workers()
    self._running = start(numbers, self._workers)

  def __iter__(self) -> Iterator[Batch]:
    return self

  def __next__(self) -> Batch:
    if (now := self._get()) != self._workers:
      self._running.close()
      self._workers, self._running = now, self._start(self._numbers[self._done:], now)
    batch = next(self._running)
    self._done += 1
    return batch

  def close(self) -> None:
    """Ends threads and processes."""
    self._running.close()


class RestartingIterator:
  """Batches of loader processes, which are restarted once from the next batch if one of them dies."""

  def __init__(self, start: Callable[[range], ClosableIterator], numbers: range) -> None:
    self._start, self._numbers, self._running = start, numbers, start(numbers)
    self._is_started = False
    self._done, self._died_s = 0, -math.inf

  def __iter__(self) -> Iterator[Batch]:
    return self

  def __next__(self) -> Batch:
    """Returns the next batch.

    Raises:
      TemporaryError: a process has died for the second time within `DEATHS_WITHIN_S`, or the system failed.
      UserError: there is too little shared memory.
    """
    try:
      batch = next(self._running) if self._is_started else _start_shielded(self._running)
      self._is_started = True
    except RuntimeError as error:
      if _DEATH not in str(error):
        raise
      self._restart(error)
      return next(self)
    except OSError as error:
      found = access.unreadable(error, f'the shared memory of loader processes ({SHARED})')
      raise (UserError(str(found)) if error.errno == errno.ENOSPC else found) from error
    self._done += 1
    return batch

  def close(self) -> None:
    """Ends the processes."""
    self._running.close()

  def _restart(self, error: RuntimeError) -> None:
    now_s = time.monotonic()
    status = ''.join(_STATUS.findall(str(error))) or 'unknown'
    if now_s - self._died_s < DEATHS_WITHIN_S:
      kind = UserError if status == _TOO_LITTLE_SHARED else TemporaryError
      raise kind(f'data.workers: expected running loader processes, got one that ended with exit status {status}, the '
                 f'second within {DEATHS_WITHIN_S / 60:.0f} minutes. {causes()}') from error
    self._died_s = now_s
    log.warning('A loader process ended with exit status %s; all are restarted from the same batch. %s', status,
                causes())
    self._running.close()
    self._running, self._is_started = self._start(self._numbers[self._done:]), False


def causes(folder: str = SHARED) -> str:
  """Returns why a loader process may be killed, and what to do; with the size of the folder for shared memory where
  batches are handed over there."""
  if shared.is_possible():
    return ('The usual cause is too little memory of the machine or container (exit status -9): lower data.workers or '
            'batch_size, or set data.workers=0.')
  try:
    usage = shutil.disk_usage(folder)
    size = f'{folder} has {usage.total / 2**20:,.0f} MiB here, {usage.free / 2**20:,.0f} MiB of them free'
  except OSError:
    size = f'there is no {folder} here'
  return ('The usual causes are too little memory (exit status -9: lower data.workers or batch_size) and too little '
          f'shared memory (-7): {size}. In a container, use docker run --shm-size=8g; in Kubernetes, mount a volume '
          f'emptyDir with medium: Memory at {folder}, as in launch/k8s.yaml; or set data.workers=0, which needs none.')


def _start_shielded(batches: Iterator[Batch]) -> Batch:
  """Takes the first batch, which starts the processes, in a thread that blocks SIGINT, as they do then.

  Ctrl-C reaches the whole process group, and would end processes with a traceback until they run `start_worker`.
  """
  resource_tracker.ensure_running()  # if it started in that thread, it would unblock SIGINT there
  block = functools.partial(signal.pthread_sigmask, signal.SIG_BLOCK, {signal.SIGINT})
  pool = concurrent.futures.ThreadPoolExecutor(1, initializer=block)
  try:
    return pool.submit(next, batches).result()
  finally:
    pool.shutdown(wait=False)


def _start_loader(parent: int, settings: ranges.Settings, messages: tuple[float, str], patience_s: float, index: int,
                  count: int) -> None:
  """Sets up a loader process, which reads object storage and writes messages as its parent does."""
  start_worker(parent, index, count)
  console.follow(messages)
  ranges.configure(settings)
  retrying.configure(patience_s)


def start_worker(parent: int, index: int, count: int) -> None:
  """Sets up a loader process: no accelerator, no Ctrl-C, and it ends when its parent ends."""
  import jax
  del index, count
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent closes us
  jax.config.update('jax_platforms', 'cpu')
  opencv.quieten()
  threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _let_grain_read_its_flags() -> None:
  # Grain 0.2.18 reads its own command-line flag when it starts workers, which fails in programs that have not parsed
  # flags with absl (tests, notebooks). Remove when the worker tests pass without it.
  from absl import flags
  if not flags.FLAGS.is_parsed():
    for name in flags.FLAGS:
      if name.startswith('grain_'):
        flags.FLAGS[name].present = True


def _end_with(parent: int) -> None:
  # A killed parent cannot stop its loader processes, and they would keep its shared memory.
  while os.getppid() == parent:
    time.sleep(PARENT_POLL_S)
  os._exit(1)
