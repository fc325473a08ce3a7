"""Memory that this process uses now: that of its first accelerator, or its own where there is none."""
from __future__ import annotations

import pathlib
import resource

import jax

_STATM = pathlib.Path('/proc/self/statm')


def used_gib() -> float | None:
  """Returns the memory in use in GiB: of the first local device if it counts its memory, else resident; None = unknown.

  It must not be called before devices are in use, which it would initialize.
  """
  stats = jax.local_devices()[0].memory_stats() or {}
  if 'bytes_in_use' in stats:
    return stats['bytes_in_use'] / 2**30
  try:
    return int(_STATM.read_text().split()[1]) * resource.getpagesize() / 2**30
  except (OSError, ValueError, IndexError):
    return None
