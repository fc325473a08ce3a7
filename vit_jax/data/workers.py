"""Makes batches ahead of their consumer with Grain, in threads or in loader processes, as many as the machine holds.

Grain only schedules: the caller decides which batch has which number, so the stream is the same for any number of
threads and processes. A process has up to `open_files.MAX_THREADS` threads, which share one Python interpreter; more
cores than that need more processes.

`loader.py` calls `check_memory`, then `at_start` to choose the number of processes, then `batches`, which runs ahead of
the step. When `jobs/host_speed.py` has measured the first steps, `advice` returns a warning with a better number.
`start_worker` also sets up the processes of `prepare.py`. This module does not know what a batch contains.
"""
from __future__ import annotations

import concurrent.futures
import errno
import functools
import math
import os
import pathlib
import re
import signal
import threading
import time
import typing
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from typing import NamedTuple, Protocol

import numpy as np

from vit_jax.config import schema
from vit_jax.core import extras, failures
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.core.types import Batch, Shard
from vit_jax.data import open_files, shared, storage
from vit_jax.data.image import jpeg, opencv
from vit_jax.data.image.transform import Shapes
from vit_jax.record import console

MEMORY_SHARE = 0.25
"""The part of the memory that batches ahead of the step take at most, apart from one of each thread."""
HANDED = 2
"""Finished batches of each process that wait for the consumer. The process holds two more: one that is being made, and
one that is finished."""
SMALL_SET = 50_000
"""Below this number of examples a run starts with threads: it may end before processes have started, about 5 s."""
SPARE = 1.2
"""The processes that the warning names make this many times the images that the step takes."""
BUSY = 0.85
"""From this share of the cores on, the processor is what limits the host."""
PARENT_POLL_S = 1.
_LIMITS = ('sys/fs/cgroup/memory.max', 'sys/fs/cgroup/memory/memory.limit_in_bytes')  # cgroups v2, v1
_DEATH = 'Worker process was terminated unexpectedly'  # Grain 0.2.18
_STATUS = re.compile(r'exit code (-?\d+)')
_BUS_ERROR = '-7'  # status after SIGBUS: a mapped file or shared memory has no room, also after a restart


class Machine(NamedTuple):
  """Cores that this process may use, and bytes of its memory."""
  cores: int
  memory: int


class Workers(NamedTuple):
  """How many threads and loader processes make batches.

  threads: in total; 0 = one per core, at most 16 in a process.
  processes: 0 = the threads are those of this process.
  batch_bytes: size of this host's part of a batch, which processes write to shared memory; 0 = not known, and Grain
    copies the batch.
  """
  threads: int
  processes: int = 0
  batch_bytes: int = 0


class Sizes(NamedTuple):
  """The threads of one process, each of which makes a batch, and the finished batches that it holds."""
  threads: int
  buffer: int


class ClosableIterator(Iterator[Batch], Protocol):
  """An iterator that holds threads or processes until closed."""

  def close(self) -> None:
    ...


def batches(make: shared.MakeBatch | Callable[[int], Batch], numbers: range, workers: Workers) -> ClosableIterator:
  """Yields `make(n)` for each of `numbers`, in order, computed ahead of time.

  `make` must pickle if there are processes. If a process dies, the next batch raises a TemporaryError.
  """
  import grain
  opencv.quieten()
  each = sizes(workers, machine())
  num = min(workers.processes, len(numbers))
  is_shared = num > 0 and workers.batch_bytes > 0 and shared.is_possible()
  dataset = grain.MapDataset.range(numbers.start, numbers.stop, numbers.step).map(
      shared.MakeSharedBatch(typing.cast(shared.MakeBatch, make)) if is_shared else make)
  # Grain counts batches here, and would hold 500 of them by default.
  stream = dataset.to_iter_dataset(grain.ReadOptions(num_threads=each.threads, prefetch_buffer_size=each.buffer))
  if not num:
    return iter(stream)
  _let_grain_read_its_flags()
  options = grain.MultiprocessingOptions(num_workers=num, per_worker_buffer_size=HANDED)
  setup = functools.partial(_start_loader, os.getpid(), storage.settings(), console.messages(), failures.patience())
  stream = stream.mp_prefetch(options, worker_init_fn=setup)
  return _Processes(shared.OpenedBatches(iter(stream)) if is_shared else iter(stream))


class _Processes:
  """Iterates over the batches of loader processes, and explains why a process ended."""

  def __init__(self, made: ClosableIterator) -> None:
    self._made, self._is_started = made, False

  def __iter__(self) -> Iterator[Batch]:
    return self

  def __next__(self) -> Batch:
    """Returns the next batch.

    Raises:
      TemporaryError: a process has died, or the system failed.
      UserError: there is too little shared memory.
    """
    try:
      batch = next(self._made) if self._is_started else _start_shielded(self._made)
    except RuntimeError as error:
      if _DEATH not in str(error):
        raise
      status = ''.join(_STATUS.findall(str(error))) or 'unknown'
      kind = UserError if status == _BUS_ERROR else TemporaryError
      raise kind(
          f'data.workers: expected running loader processes, got one that ended with exit status {status}. The usual '
          'cause is too little memory of the machine or container (exit status -9): lower data.workers or batch_size, '
          'or set data.workers=0.') from error
    except OSError as error:
      found = failures.unreadable(error, 'the shared memory of loader processes (/dev/shm)')
      raise (UserError(str(found)) if error.errno == errno.ENOSPC else found) from error
    self._is_started = True
    return batch

  def close(self) -> None:
    """Ends the processes."""
    self._made.close()


def _start_shielded(made: Iterator[Batch]) -> Batch:
  """Returns the first batch, for which the processes start, from a thread that blocks SIGINT and SIGUSR1.

  The processes inherit the blocked signals. Both signals reach the whole process group, and would end a process with a
  traceback until it has run `start_worker`.
  """
  # The resource tracker of Python ignores SIGINT and SIGTERM, but not SIGUSR1. It starts here, since it would unblock
  # SIGINT in the other thread.
  before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
  resource_tracker.ensure_running()
  signal.pthread_sigmask(signal.SIG_SETMASK, before)
  block = functools.partial(signal.pthread_sigmask, signal.SIG_BLOCK, {signal.SIGINT, signal.SIGUSR1})
  pool = concurrent.futures.ThreadPoolExecutor(1, initializer=block)
  try:
    return pool.submit(next, made).result()
  finally:
    pool.shutdown(wait=False)


def _start_loader(parent: int, settings: storage.Settings, messages: tuple[float, str], patience_s: float, index: int,
                  count: int) -> None:
  """Sets up a loader process, which reads object storage and writes messages as its parent does."""
  del index, count
  start_worker(parent)
  console.follow(messages)
  storage.configure(settings)
  failures.configure(patience_s)


def start_worker(parent: int) -> None:
  """Sets up a process that reads data: no accelerator, no Ctrl-C, and it ends when its parent ends."""
  import jax
  for number in (signal.SIGINT, signal.SIGUSR1):  # they reach the whole group; the parent ends this process
    signal.signal(number, signal.SIG_IGN)
  jax.config.update('jax_platforms', 'cpu')
  opencv.quieten()

  def end_with_parent() -> None:  # a killed parent cannot end its processes, and they would keep shared memory
    while os.getppid() == parent:
      time.sleep(PARENT_POLL_S)
    os._exit(1)
  threading.Thread(target=end_with_parent, daemon=True).start()


def _let_grain_read_its_flags() -> None:
  # Grain 0.2.18 reads its own command-line flag when it starts workers, which fails in programs that have not parsed
  # flags with absl (tests, notebooks). Remove when the worker tests pass without it.
  from absl import flags
  if not flags.FLAGS.is_parsed():
    for name in flags.FLAGS:
      if name.startswith('grain_'):
        flags.FLAGS[name].present = True


def machine() -> Machine:
  """Returns the cores and the memory of this process."""
  return Machine(open_files.num_cores(), memory_bytes())


def memory_bytes(root: pathlib.Path = pathlib.Path('/')) -> int:
  """Returns the memory that this process may use: that of the machine, or of its container if that is less."""
  found = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
  for name in _LIMITS:
    try:
      text = (root / name).read_text().strip()
    except OSError:
      continue
    found = min(found, int(text)) if text.isdecimal() else found
  return found


def check_memory(name: str, batch_size: int, shard: Shard, shapes: Shapes) -> int:
  """Returns the bytes of this process's part of one batch.

  Args:
    name: of the setting, for the message.
    batch_size: examples of a global batch.
    shard: the rows that this process holds.
    shapes: shape and dtype of the arrays of an example.

  Raises:
    UserError: they are more than `memory_bytes`.
  """
  limit = memory_bytes()
  each = 8 + sum(math.prod(shape) * np.dtype(kind).itemsize for shape, kind in shapes.values())  # 8 of the index
  rows = batch_size * len(shard.parts) // shard.count
  if rows * each > limit:
    raise UserError(
        f'{name}: expected a batch that fits into {limit / 2**30:,.1f} GiB of memory, at most '
        f'{limit // each * shard.count // max(1, len(shard.parts)):,} examples, got {batch_size:,}, which are '
        f'{rows * each / 2**30:,.1f} GiB on this machine. Set a smaller {name}.')
  return rows * each


def sizes(workers: Workers, here: Machine) -> Sizes:
  """Returns the threads and the buffer of each process, such that all batches fit into `MEMORY_SHARE`."""
  threads, num, batch_bytes = workers
  if num:
    each, handed = min(open_files.MAX_THREADS, -(-(threads or here.cores) // num)), HANDED
  else:
    each, handed = threads or min(open_files.MAX_THREADS, here.cores), 0
  most = int(here.memory * MEMORY_SHARE / batch_bytes / max(1, num)) if batch_bytes else 2 * each + handed
  buffer = max(1, min(each, most - each - handed))
  return Sizes(max(1, min(each, most - buffer - handed)), buffer)


def at_start(workers: Workers, *, num_examples: int, here: Machine) -> Workers:
  """Returns the workers with the number of processes of a run: that of `data.workers`, or by the machine if `auto`."""
  num = workers.processes
  if num == schema.AUTO_WORKERS:
    few = num_examples < SMALL_SET or here.cores < 2 * open_files.MAX_THREADS
    num = 0 if few else _fitting(here.cores // open_files.MAX_THREADS, workers.batch_bytes, here)
  return workers._replace(processes=num)


def _fitting(num: int, batch_bytes: int, here: Machine) -> int:
  """Returns the largest number of processes, at most `num`, whose batches fit into their share of the memory."""
  return max(0, min(num, int(here.memory * MEMORY_SHARE) // ((HANDED + 2) * max(1, batch_bytes))))


def advice(host: float, step: float, busy_cores: float, workers: Workers, *, here: Machine) -> str:
  """Returns a warning with what helps a host that is slower than the step; '' if it keeps up.

  Args:
    host: images/s that the workers make.
    step: images/s that the step takes.
    busy_cores: mean number of busy cores of this machine.
    workers: of the run.
    here: the machine.
  """
  if host >= step:
    return ''
  num = workers.processes
  begin = f'The host makes {_short(host)} of the {_short(step)} images/s that the step takes: '
  if busy_cores >= BUSY * here.cores:
    partial = '' if jpeg.is_installed() else f'decode only crops of JPEG files ({extras.install("crop")}), '
    return (f'{begin}its {here.cores} cores are busy. Store smaller images (vit-jax prepare --short_px), {partial}'
            'or use a host with more cores.')
  begin += f'{num} loader processes use' if num else 'the threads of one process use'
  begin += f' {busy_cores:.1f} of {here.cores} cores'
  needed = math.ceil(max(1, num) * SPARE * step / max(host, 1e-9))
  if (wanted := _fitting(min(needed, here.cores // 2), workers.batch_bytes, here)) > num:
    return f'{begin}; set data.workers={wanted}.'
  return (f'{begin}, and there is no memory for more processes. If the disk is the limit, copy the data to a faster '
          'one.')


def _short(rate: float) -> str:
  """Returns a rate such as 840, 8.4k or 16k."""
  return f'{rate:,.0f}' if rate < 1_000 else f'{rate / 1_000:.1f}k' if rate < 9_950 else f'{rate / 1_000:,.0f}k'
