"""Makes batches ahead of the consumer with Grain, in threads or in loader processes, as many as fit the machine.

Grain only schedules: the caller decides which batch has which number, so the batches are the same for any number of
threads and processes. A process has up to `open_files.MAX_THREADS` threads, which share one Python interpreter; to use
more cores, several processes are needed.

`loader.py` calls `check_memory`, `choose_processes` and `batches`, in this order. `jobs/host_speed.py` measures the
first steps, and calls `advice`, which returns a warning with a better number of processes. `prepare.py` also calls
`start_worker` in its processes. This module does not know what a batch contains.
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

_MEMORY_SHARE = 0.25     # share of the memory for batches made ahead; each thread makes a batch even if that is more
_NUM_QUEUED = 2          # finished batches of each process in Grain's queue to the consumer
_MIN_BATCHES = 4         # least batches of a process: those in the queue, one being made, and one finished
_MIN_EXAMPLES = 50_000   # with fewer, a run may end before processes have started, which takes about 5 s
_SPARE_FACTOR = 1.2      # the warning names enough processes for so many times the images that the step takes
_BUSY_SHARE = 0.85       # if at least this share of the cores is busy, the processor limits the host
_PARENT_POLL_S = 1.
_MEMORY_LIMITS = ('sys/fs/cgroup/memory.max', 'sys/fs/cgroup/memory/memory.limit_in_bytes')  # cgroups v2, v1
_ENDED_MESSAGE = 'Worker process was terminated unexpectedly'  # part of an error message of Grain 0.2.18
_EXIT_STATUS = re.compile(r'exit code (-?\d+)')  # such as "exit code -9"
_BUS_ERROR = '-7'  # status after SIGBUS: there is no space for a mapped file or shared memory; a restart does not help


class Machine(NamedTuple):
  """The number of cores and the bytes of memory that this process may use."""
  cores: int
  memory_bytes: int


class Workers(NamedTuple):
  """How many threads and loader processes make batches.

  threads: number of threads in total; 0 = one per core, at most 16 in a process.
  processes: number of loader processes; 0 = the threads run in this process.
  batch_bytes: size of this host's part of a batch, which loader processes write to shared memory; 0 = the size is not
    known, and Grain copies the batch.
  """
  threads: int
  processes: int = 0
  batch_bytes: int = 0


class Sizes(NamedTuple):
  """The number of threads of one process, each making a batch, and the number of finished batches that it holds."""
  threads: int
  buffer: int


class ClosableIterator(Iterator[Batch], Protocol):
  """An iterator that has threads or processes until it is closed."""

  def close(self) -> None:
    ...


def batches(make: shared.MakeBatch | Callable[[int], Batch], numbers: range, workers: Workers) -> ClosableIterator:
  """Yields `make(n)` for each of `numbers`, in order, computed ahead of time.

  If there are processes, `make` must be picklable; if `workers.batch_bytes` is set too, it must be a
  `shared.MakeBatch`. If a process ends early, the next batch raises a TemporaryError.
  """
  import grain
  opencv.quieten()
  process = sizes(workers, machine())
  num_processes = min(workers.processes, len(numbers))
  is_shared = num_processes > 0 and workers.batch_bytes > 0 and shared.is_possible()
  dataset = grain.MapDataset.range(numbers.start, numbers.stop, numbers.step).map(
      shared.MakeSharedBatch(typing.cast(shared.MakeBatch, make)) if is_shared else make)
  # The elements that Grain counts are batches here; by default, Grain would hold 500 batches.
  stream = dataset.to_iter_dataset(grain.ReadOptions(num_threads=process.threads, prefetch_buffer_size=process.buffer))
  if not num_processes:
    return iter(stream)
  _let_grain_read_its_flags()
  options = grain.MultiprocessingOptions(num_workers=num_processes, per_worker_buffer_size=_NUM_QUEUED)
  setup = functools.partial(_start_loader, os.getpid(), storage.settings(), console.message_form(), failures.patience())
  stream = stream.mp_prefetch(options, worker_init_fn=setup)
  return _Processes(shared.OpenedBatches(iter(stream)) if is_shared else iter(stream))


class _Processes:
  """Iterates over the batches of loader processes: the first `next` starts the processes, `close` ends them."""

  def __init__(self, iterator: ClosableIterator) -> None:
    self._iterator, self._is_started = iterator, False

  def __iter__(self) -> Iterator[Batch]:
    return self

  def __next__(self) -> Batch:
    """Returns the next batch.

    Raises:
      TemporaryError: a process has ended, or the system failed.
      UserError: there is too little shared memory.
    """
    try:
      batch = next(self._iterator) if self._is_started else _start_shielded(self._iterator)
    except RuntimeError as error:
      if _ENDED_MESSAGE not in str(error):
        raise
      status = ''.join(_EXIT_STATUS.findall(str(error))) or 'unknown'
      error_type = UserError if status == _BUS_ERROR else TemporaryError
      raise error_type(
          f'data.workers: expected running loader processes, got one that ended with exit status {status}. The usual '
          'cause is too little memory of the machine or container (exit status -9): lower data.workers or batch_size, '
          'or set data.workers=0.') from error
    except OSError as error:
      unreadable = failures.unreadable(error, 'the shared memory of loader processes (/dev/shm)')
      raise (UserError(str(unreadable)) if error.errno == errno.ENOSPC else unreadable) from error
    self._is_started = True
    return batch

  def close(self) -> None:
    """Ends the processes."""
    self._iterator.close()


def _start_shielded(iterator: Iterator[Batch]) -> Batch:
  """Starts the processes and returns the first batch, in a thread that blocks SIGINT and SIGUSR1.

  Both signals are sent to the complete process group. They would end a new process, with a traceback, before the
  process has called `start_worker`. But the new process inherits the blocked signals from the thread.
  """
  # Python starts its resource tracker process together with the first process, and then unblocks SIGINT in the thread.
  # So the tracker is started here, before the thread. The tracker ignores SIGINT; SIGUSR1 is blocked while it starts.
  old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
  resource_tracker.ensure_running()
  signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
  block = functools.partial(signal.pthread_sigmask, signal.SIG_BLOCK, {signal.SIGINT, signal.SIGUSR1})
  pool = concurrent.futures.ThreadPoolExecutor(1, initializer=block)
  try:
    return pool.submit(next, iterator).result()
  finally:
    pool.shutdown(wait=False)


def _start_loader(parent: int, settings: storage.Settings, messages: tuple[float, str], patience_s: float, index: int,
                  count: int) -> None:
  """Sets up a loader process with the settings of the parent process for object storage, messages and retries."""
  del index, count
  start_worker(parent)
  console.follow_parent(messages)
  storage.configure(settings)
  failures.configure(patience_s)


def start_worker(parent: int) -> None:
  """Sets up a process that reads data: it uses no accelerator, ignores Ctrl-C, and ends when its parent ends."""
  import jax
  for stop_signal in (signal.SIGINT, signal.SIGUSR1):  # the parent receives the signal too, and ends this process
    signal.signal(stop_signal, signal.SIG_IGN)
  jax.config.update('jax_platforms', 'cpu')
  opencv.quieten()

  def end_with_parent() -> None:  # a killed parent cannot end this process, which would keep shared memory
    while os.getppid() == parent:
      time.sleep(_PARENT_POLL_S)
    os._exit(1)
  threading.Thread(target=end_with_parent, daemon=True).start()


def _let_grain_read_its_flags() -> None:
  # Grain 0.2.18 reads its own command-line flag when it starts workers. This fails in programs that have not parsed
  # flags with absl (tests, notebooks). Remove this function when the tests of this module pass without it.
  from absl import flags
  if not flags.FLAGS.is_parsed():
    for name in flags.FLAGS:
      if name.startswith('grain_'):
        flags.FLAGS[name].present = True


def machine() -> Machine:
  """Returns the cores and the memory of this process."""
  return Machine(open_files.num_cores(), memory_bytes())


def memory_bytes(root: pathlib.Path = pathlib.Path('/')) -> int:
  """Returns the memory that this process may use: the smaller of the memories of the machine and the container."""
  num_bytes = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
  for name in _MEMORY_LIMITS:
    try:
      text = (root / name).read_text().strip()
    except OSError:
      continue
    if text.isdecimal():  # 'max' means no limit
      num_bytes = min(num_bytes, int(text))
  return num_bytes


def check_memory(name: str, batch_size: int, shard: Shard, shapes: Shapes) -> int:
  """Returns the bytes of this process's part of one batch.

  Args:
    name: name of the setting, for the message.
    batch_size: number of examples of a global batch.
    shard: the rows of the batch that this process makes.
    shapes: shape and dtype of the arrays of an example.

  Raises UserError if the part is larger than the memory of this process.
  """
  limit = memory_bytes()
  example_bytes = sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in shapes.values()) + 8  # index
  batch_bytes = batch_size * len(shard.parts) // shard.count * example_bytes
  if batch_bytes > limit:
    raise UserError(
        f'{name}: expected a batch that fits into {limit / 2**30:,.1f} GiB of memory, at most '
        f'{limit // example_bytes * shard.count // max(1, len(shard.parts)):,} examples, got {batch_size:,}, which are '
        f'{batch_bytes / 2**30:,.1f} GiB on this machine. Set a smaller {name}.')
  return batch_bytes


def sizes(workers: Workers, here: Machine) -> Sizes:
  """Returns the sizes for each process: lowered, at least to 1, until the batches fit into the memory of `here`."""
  threads, num_processes, batch_bytes = workers
  num_queued = _NUM_QUEUED if num_processes else 0
  if num_processes:
    num_threads = min(open_files.MAX_THREADS, -(-(threads or here.cores) // num_processes))
  else:
    num_threads = threads or min(open_files.MAX_THREADS, here.cores)
  max_batches = 2 * num_threads + num_queued  # one in each thread, as many in the buffer, and those in the queue
  if batch_bytes:
    max_batches = int(here.memory_bytes * _MEMORY_SHARE / batch_bytes / max(1, num_processes))
  buffer = max(1, min(num_threads, max_batches - num_threads - num_queued))
  return Sizes(max(1, min(num_threads, max_batches - buffer - num_queued)), buffer)


def choose_processes(workers: Workers, *, num_examples: int, here: Machine) -> Workers:
  """Returns the workers of a run; replaces `schema.AUTO_WORKERS` by a number for the machine `here` and the data."""
  if workers.processes != schema.AUTO_WORKERS:
    return workers
  if num_examples < _MIN_EXAMPLES or here.cores < 2 * open_files.MAX_THREADS:
    return workers._replace(processes=0)
  max_processes = here.cores // open_files.MAX_THREADS
  return workers._replace(processes=_limit_by_memory(max_processes, workers.batch_bytes, here))


def _limit_by_memory(num_processes: int, batch_bytes: int, here: Machine) -> int:
  """Returns `num_processes`, or the largest number of processes whose batches fit into memory if that is less."""
  process_bytes = _MIN_BATCHES * max(1, batch_bytes)
  return max(0, min(num_processes, int(here.memory_bytes * _MEMORY_SHARE) // process_bytes))


def advice(host_rate: float, step_rate: float, busy_cores: float, workers: Workers, *, here: Machine) -> str:
  """Returns a warning that says what to change if the host is slower than the step; '' if the host is fast enough.

  Args:
    host_rate: images/s that the workers make.
    step_rate: images/s that the step takes.
    busy_cores: mean number of busy cores of this machine.
    workers: the threads and processes of the run.
    here: the cores and the memory of this machine.
  """
  if host_rate >= step_rate:
    return ''
  num_processes = workers.processes
  problem = f'The host makes {_short(host_rate)} of the {_short(step_rate)} images/s that the step takes: '
  if busy_cores >= _BUSY_SHARE * here.cores:
    crop = '' if jpeg.is_installed() else f'decode only crops of JPEG files ({extras.install("crop")}), '
    return (f'{problem}its {here.cores} cores are busy. Store smaller images (vit-jax prepare --short_px), {crop}'
            'or use a host with more cores.')
  problem += f'{num_processes} loader processes use' if num_processes else 'the threads of one process use'
  problem += f' {busy_cores:.1f} of {here.cores} cores'
  num_needed = math.ceil(max(1, num_processes) * _SPARE_FACTOR * step_rate / max(host_rate, 1e-9))
  num_better = _limit_by_memory(min(num_needed, here.cores // 2), workers.batch_bytes, here)
  if num_better > num_processes:
    return f'{problem}; set data.workers={num_better}.'
  return (f'{problem}, and there is no memory for more processes. If the disk is the limit, copy the data to a faster '
          'one.')


def _short(rate: float) -> str:
  """Returns a rate as a short text, such as 840, 8.4k or 16k."""
  if rate < 1_000:
    return f'{rate:,.0f}'
  return f'{rate / 1_000:.1f}k' if rate < 9_950 else f'{rate / 1_000:,.0f}k'
