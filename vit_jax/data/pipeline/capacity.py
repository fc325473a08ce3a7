"""Whether a batch fits into the memory of this machine, before anything of its size is allocated."""
from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping

import numpy as np

from vit_jax.core.errors import UserError
from vit_jax.core.types import Shard

_LIMITS = ('sys/fs/cgroup/memory.max', 'sys/fs/cgroup/memory/memory.limit_in_bytes')  # cgroups v2, v1


def memory_bytes(root: pathlib.Path = pathlib.Path('/')) -> int:
  """Memory that this process may have: that of the machine, or of its container if that is less."""
  found = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
  for name in _LIMITS:
    try:
      text = (root / name).read_text().strip()
    except OSError:
      continue
    found = min(found, int(text)) if text.isdecimal() else found
  return found


def check_batch(name: str, batch_size: int, shard: Shard, shapes: Mapping[str, tuple[tuple[int, ...], type]], *,
                memory: int | None = None) -> None:
  """Raises UserError if this process's part of one batch alone is larger than its memory.

  Args:
    name: of the setting.
    batch_size: examples a step, over all processes.
    shard: what of it this process holds.
    shapes: shape and dtype of what an example consists of.
    memory: bytes; None = `memory_bytes()`.
  """
  memory = memory_bytes() if memory is None else memory
  an_example = 8 + sum(int(np.prod(shape, dtype=np.int64)) * np.dtype(kind).itemsize for shape, kind in shapes.values())
  rows = batch_size * len(shard.parts) // shard.count
  if rows * an_example > memory:
    raise UserError(
        f'{name}: expected a batch that fits into {memory / 2**30:,.1f} GiB of memory, at most '
        f'{memory // an_example * shard.count // max(1, len(shard.parts)):,} examples, got {batch_size:,}, which are '
        f'{rows * an_example / 2**30:,.1f} GiB on this machine. Set a smaller {name}.')
