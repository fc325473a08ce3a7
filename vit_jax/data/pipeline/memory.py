"""The memory of this process, and whether batches fit into it."""
from __future__ import annotations

import os
import pathlib

import numpy as np

from vit_jax.core.errors import UserError
from vit_jax.core.types import Shard
from vit_jax.data.image import transform as transforms

_LIMITS = ('sys/fs/cgroup/memory.max', 'sys/fs/cgroup/memory/memory.limit_in_bytes')  # cgroups v2, v1


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


def check(name: str, batch_size: int, shard: Shard, shapes: transforms.Shapes, *, limit: int | None = None) -> None:
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


def example_bytes(shapes: transforms.Shapes) -> int:
  """Returns the bytes of an example in a batch, with its index."""
  return 8 + sum(int(np.prod(shape, dtype=np.int64)) * np.dtype(kind).itemsize for shape, kind in shapes.values())


def batch_bytes(batch_size: int, shard: Shard, shapes: transforms.Shapes) -> int:
  """Returns the bytes of this process's part of one batch."""
  return batch_size * len(shard.parts) // shard.count * example_bytes(shapes)
