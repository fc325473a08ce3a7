"""How many threads, loader processes and batches of images this machine has room for.

The number of loader processes is chosen at the start of a run, and again when the first steps have been measured. Any
number gives the same batches. A process has up to `open_files.MAX_THREADS` threads, which share one Python interpreter;
more cores than that need more processes.
"""
from __future__ import annotations

import math
import os
import pathlib
from typing import NamedTuple

import numpy as np

from vit_jax.config import schema
from vit_jax.core import extras
from vit_jax.core.errors import UserError
from vit_jax.core.types import Shard
from vit_jax.data.files import open_files
from vit_jax.data.image import jpeg
from vit_jax.data.image.transform import Shapes

MEMORY_SHARE = 0.25
"""The part of the memory that batches ahead of the step take at most, apart from one of each thread."""
HANDED = 2
"""Batches of each process that wait for the consumer."""
FEWEST = HANDED + 2
"""Batches that a process holds at least: these, one that it makes, and one that is finished."""
SMALL_SET = 50_000
"""Below this number of examples a run starts with threads: it may end before processes have started, about 5 s."""
SPARE = 1.2
"""The processes chosen after measuring make this many times the images that the step takes."""
BUSY = 0.85
"""From this share of the cores on, the processor is what limits the host."""
_LIMITS = ('sys/fs/cgroup/memory.max', 'sys/fs/cgroup/memory/memory.limit_in_bytes')  # cgroups v2, v1


class Machine(NamedTuple):
  """Cores that this process may use, and bytes of its memory."""
  cores: int
  memory: int


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


def check_batch(name: str, batch_size: int, shard: Shard, shapes: Shapes, *, limit: int | None = None) -> None:
  """Raises UserError if this process's part of one batch is larger than its memory.

  Args:
    name: of the setting.
    batch_size: examples per step, over all processes.
    shard: the rows that this process holds.
    shapes: shape and dtype of the arrays of an example.
    limit: bytes; None = `memory_bytes()`.
  """
  limit = memory_bytes() if limit is None else limit
  per_example = example_bytes(shapes)
  rows = batch_size * len(shard.parts) // shard.count
  if rows * per_example > limit:
    raise UserError(
        f'{name}: expected a batch that fits into {limit / 2**30:,.1f} GiB of memory, at most '
        f'{limit // per_example * shard.count // max(1, len(shard.parts)):,} examples, got {batch_size:,}, which are '
        f'{rows * per_example / 2**30:,.1f} GiB on this machine. Set a smaller {name}.')


def example_bytes(shapes: Shapes) -> int:
  """Returns the bytes of an example in a batch, with its index."""
  return 8 + sum(int(np.prod(shape, dtype=np.int64)) * np.dtype(kind).itemsize for shape, kind in shapes.values())


def batch_bytes(batch_size: int, shard: Shard, shapes: Shapes) -> int:
  """Returns the bytes of this process's part of one batch."""
  return batch_size * len(shard.parts) // shard.count * example_bytes(shapes)


class Sizes(NamedTuple):
  """Of one process: threads, each of which makes a batch, and finished batches that are held."""
  threads: int
  buffer: int


def sizes(threads: int, workers: int, *, batch_bytes: int, here: Machine) -> Sizes:
  """Returns the threads and the buffer of each process, so that all batches take at most a quarter of the memory.

  Args:
    threads: in total; 0 = one per core. A process has at most 16.
    workers: processes; 0 = this one.
    batch_bytes: of this host's part of a batch; 0 = not known.
    here: this machine.
  """
  each = min(open_files.MAX_THREADS, -(-(threads or here.cores) // workers)) if workers else (
      threads or min(open_files.MAX_THREADS, here.cores))
  handed = HANDED if workers else 0
  most = int(here.memory * MEMORY_SHARE / batch_bytes / max(1, workers)) if batch_bytes else 2 * each + handed
  buffer = max(1, min(each, most - each - handed))
  return Sizes(max(1, min(each, most - buffer - handed)), buffer)


class Measured(NamedTuple):
  """Images/s that this host makes and that the step takes, and the number of cores that were busy."""
  host: float
  step: float
  busy_cores: float

  @property
  def keeps_up(self) -> bool:
    """Whether the step does not wait for the host."""
    return self.host >= self.step


def machine() -> Machine:
  """Returns the cores and the memory of this process."""
  return Machine(open_files.num_cores(), memory_bytes())


def workers_at_start(setting: int, *, num_examples: int, batch_bytes: int, here: Machine) -> int:
  """Returns the number of processes that a run starts with: `data.workers`, or by the machine if that is auto."""
  if setting != schema.AUTO_WORKERS:
    return setting
  if num_examples < SMALL_SET or here.cores < 2 * open_files.MAX_THREADS:
    return 0
  return _fitting(here.cores // open_files.MAX_THREADS, batch_bytes, here)


def workers_after(found: Measured, workers: int, *, batch_bytes: int, here: Machine) -> int:
  """Returns the number of processes that would make what the step takes; `workers` itself if more would not help."""
  if found.keeps_up or found.busy_cores >= BUSY * here.cores:
    return workers
  needed = math.ceil(max(1, workers) * SPARE * found.step / max(found.host, 1e-9))
  return max(workers, _fitting(min(needed, here.cores // 2), batch_bytes, here))


def _fitting(workers: int, batch_bytes: int, here: Machine) -> int:
  """Returns at most `workers`: as many as leave each of them the memory of the fewest batches that it needs."""
  fewest = FEWEST * max(1, batch_bytes)
  return max(0, min(workers, int(here.memory * MEMORY_SHARE) // fewest))


def describe(found: Measured, workers: int, wanted: int, *, setting: int, here: Machine) -> str:
  """Returns what was measured and what follows, for the log."""
  host, step = _short(found.host), _short(found.step)
  if found.keeps_up:
    return f'The host makes the {step} images/s that the step takes.'
  begin = f'The host makes {host} of the {step} images/s that the step takes: '
  own = f'{workers} loader processes' if workers else 'the threads of one process'
  if wanted > workers:
    busy = f'{own} use {found.busy_cores:.1f} of {here.cores} cores'
    return f'{begin}{busy}; ' + (f'{wanted} loader processes take over now (data.workers={wanted}).'
                                 if setting == schema.AUTO_WORKERS else f'set data.workers={wanted}.')
  if found.busy_cores >= BUSY * here.cores:
    partial = '' if jpeg.is_installed() else f'decode only crops of JPEG files ({extras.install("crop")}), '
    return (f'{begin}its {here.cores} cores are busy. Store smaller images (vit-jax prepare --short_px), {partial}'
            'or use a host with more cores.')
  return (f'{begin}{own} use {found.busy_cores:.1f} of {here.cores} cores, and there is no memory for more processes. '
          'If the disk is the limit, copy the data to a faster one.')


def _short(rate: float) -> str:
  """Returns a rate such as 840, 8.4k or 16k."""
  return f'{rate:,.0f}' if rate < 1_000 else f'{rate / 1_000:.1f}k' if rate < 9_950 else f'{rate / 1_000:,.0f}k'
