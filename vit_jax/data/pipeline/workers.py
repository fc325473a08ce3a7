"""How many loader processes a run uses: chosen at its start, and again when the first steps have been measured.

Any number gives the same batches. A process has up to `open_files.MAX_THREADS` threads, which share one Python
interpreter; more cores than that need more processes.
"""
from __future__ import annotations

import math
from typing import NamedTuple

from vit_jax.config import schema
from vit_jax.data.files import open_files
from vit_jax.data.pipeline import memory, prefetch

SMALL_SET = 50_000
"""Below this number of examples a run starts with threads: it may end before processes have started, about 5 s."""
SPARE = 1.2
"""The processes chosen after measuring make this many times the images that the step takes."""
BUSY = 0.85
"""From this share of the cores on, the processor is what limits the host."""


class Machine(NamedTuple):
  """Cores that this process may use, and bytes of its memory."""
  cores: int
  memory: int


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
  """Returns what is here."""
  return Machine(open_files.num_cores(), memory.memory_bytes())


def at_start(setting: int, *, num_examples: int, batch_bytes: int, here: Machine) -> int:
  """Returns the number of processes that a run starts with: `data.workers`, or by the machine if that is auto."""
  if setting != schema.AUTO_WORKERS:
    return setting
  if num_examples < SMALL_SET or here.cores < 2 * open_files.MAX_THREADS:
    return 0
  return _fitting(here.cores // open_files.MAX_THREADS, batch_bytes, here)


def after(found: Measured, workers: int, *, batch_bytes: int, here: Machine) -> int:
  """Returns the number of processes that would make what the step takes; `workers` itself if more would not help."""
  if found.keeps_up or found.busy_cores >= BUSY * here.cores:
    return workers
  needed = math.ceil(max(1, workers) * SPARE * found.step / max(found.host, 1e-9))
  return max(workers, _fitting(min(needed, here.cores // 2), batch_bytes, here))


def _fitting(workers: int, batch_bytes: int, here: Machine) -> int:
  """Returns at most `workers`: as many as leave each of them the memory of the fewest batches that it needs."""
  fewest = prefetch.FEWEST * max(1, batch_bytes)
  return max(0, min(workers, int(here.memory * prefetch.MEMORY_SHARE) // fewest))


def sentence(found: Measured, workers: int, wanted: int, *, setting: int, here: Machine) -> str:
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
    return (f'{begin}its {here.cores} cores are busy. Store smaller images (vit-jax prepare --short_px), set '
            'data.decode=crop, or use a host with more cores.')
  return (f'{begin}{own} use {found.busy_cores:.1f} of {here.cores} cores, and there is no memory for more processes. '
          'If the disk is the limit, copy the data to a faster one.')


def _short(rate: float) -> str:
  """Returns a rate such as 840, 8.4k or 16k."""
  return f'{rate:,.0f}' if rate < 1_000 else f'{rate / 1_000:.1f}k' if rate < 9_950 else f'{rate / 1_000:,.0f}k'
