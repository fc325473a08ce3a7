"""What a part costs, and how parts are timed in turns. Imports no jax: a command line chooses its platform first."""
from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

log = logging.getLogger('vit_jax.jobs')
MIN_S = .5  # of one part in one turn, so that the clock's resolution and the first call do not matter
PAUSE_S = .2  # before each part, so that other programs finish what follows their answer, such as freeing memory


class Spent(NamedTuple):
  """Seconds until the last of some calls is done: elapsed, and of the processors (this process, all threads)."""
  clock_s: float
  processor_s: float


Part = Callable[[int], Spent]
"""Runs a part this many times in sequence."""


def now() -> Spent:
  """Returns the clocks; `since` gives what was spent after it."""
  return Spent(time.perf_counter(), time.process_time())


def since(began: Spent) -> Spent:
  """Returns what was spent since `began`."""
  clock_s, processor_s = now()
  return Spent(clock_s - began.clock_s, processor_s - began.processor_s)


def take_turns(parts: Mapping[str, Part], *, turns: int) -> dict[str, list[Spent]]:
  """Returns seconds per call of each part, one for each turn; a turn calls a part for about `MIN_S` seconds."""
  counts = {}
  for name, part in parts.items():
    part(1)  # compiles, fills caches
    counts[name] = max(1, round(MIN_S / max(part(1).clock_s, 1e-9)))
  spent: dict[str, list[Spent]] = {name: [] for name in parts}
  for turn in range(turns):
    log.info('Turn %d of %d.', turn + 1, turns)
    for name, part in parts.items():
      time.sleep(PAUSE_S)
      spent[name].append(Spent(*(seconds / counts[name] for seconds in part(counts[name]))))
  return spent
