"""The order of training data that is stored in row groups, as in Parquet files. A row group is read as a whole.

`loader.py` and `formats/mixture.py` call `visit` for training, `prepare.py` calls `visit_once` for writing. Both return
`Windows`, or `order.Shuffled` if the source has no row groups or if a process can hold all row groups in memory.

A global shuffle would read and decode a row group of some hundred images for each image. Instead, `Windows` visits the
row groups in a random order, which differs from epoch to epoch. A window consists of consecutive row groups in that
order, and the images are shuffled inside of each window. The windows in use fit into the memory of a process. Each
epoch still visits each example once. The index at a position depends only on seed, position, batch size and files.

Each batch is divided into equal parts, and each part takes examples from one lane. A lane is a range of the row groups
of the epoch, divided into windows. The parts of the next batch take examples from the next lanes; the lanes repeat
after a cycle of batches. With 4 examples in a batch, 2 parts and a cycle of 2 batches:

    position  0 1 | 2 3 | 4 5 | 6 7 | 8 9 | ...
    batch     0     0     1     1     2
    lane      0     1     2     3     0

So hosts, which load different parts of a batch, and loader processes, which make different batches, read different row
groups.
"""
from __future__ import annotations

import dataclasses
import functools

import numpy as np

from vit_jax.core import streams
from vit_jax.core.streams import Stream
from vit_jax.core.types import HostArray
from vit_jax.data import order
from vit_jax.data.source import RowGroups, Source, row_groups

CYCLE = 4
"""Batches after which the lanes repeat, if there are enough row groups; else 2 or 1."""
MAX_PARTS = 64
"""Largest number of parts of a batch. With more hosts, several hosts share a lane."""
_MIN_PARTS = 8  # the cycle is shorter if there are fewer row groups than so many for each batch of the cycle
_WRITING_DIVISOR = 8  # a window for writing has 1/8 of the row groups that fit into memory: about the images of a shard


@dataclasses.dataclass(frozen=True, eq=False)
class Windows:
  """An `order.Visit` for examples in row groups, see the module docstring.

  sizes: number of examples of each row group, `[N] i64`.
  seed: seed of the order.
  span: number of positions after which the lanes repeat: the cycle times the batch size.
  num_lanes: a divisor of `span`: the cycle times the number of parts of a batch.
  window_size: number of row groups in a window.
  """
  sizes: HostArray
  seed: int
  span: int
  num_lanes: int
  window_size: int

  def __call__(self, positions: HostArray) -> HostArray:
    positions = np.asarray(positions, np.int64)
    epochs = positions // int(self.sizes.sum())
    indexes = np.empty_like(positions)
    for epoch in np.unique(epochs).tolist():
      inside = epochs == epoch
      indexes[inside] = self._in_epoch(positions[inside], epoch)
    return indexes

  def _in_epoch(self, positions: HostArray, epoch: int) -> HostArray:
    """Returns the indexes of the examples at positions that are all in one epoch."""
    groups, ends = _epoch_groups(self, epoch)
    # Step 1: the row of each position. A row is the place of an example if the groups of the epoch are read one after
    # the other, without shuffling. The rows of lane l are starts[l] ... stops[l] - 1.
    num_rows = int(ends[-1])
    first_position = epoch * num_rows  # of the epoch
    all_lanes = np.arange(self.num_lanes)
    num_before = self._count_before(first_position, all_lanes)
    stops = np.cumsum(self._count_before(first_position + num_rows, all_lanes) - num_before)
    starts = np.append(0, stops[:-1])
    lanes = positions % self.span * self.num_lanes // self.span
    rows = starts[lanes] + self._count_before(positions, lanes) - num_before[lanes]
    # Step 2: the rows are shuffled inside of each window. The windows of a lane are counted from the group in which the
    # lane starts. Neighboring lanes may share a group.
    first_groups = np.searchsorted(ends, starts, side='right')
    windows = (np.searchsorted(ends, rows, side='right') - first_groups[lanes]) // self.window_size
    for lane, window in np.unique(np.stack([lanes, windows]), axis=1).T.tolist():
      inside = (lanes == lane) & (windows == window)
      first_group = int(first_groups[lane]) + window * self.window_size  # of this window
      start = max(int(starts[lane]), int(ends[first_group - 1]) if first_group else 0)
      stop = min(int(stops[lane]), int(ends[min(first_group + self.window_size, len(ends)) - 1]))
      keys = streams.words(Stream.WINDOWS, self.seed, epoch, lane, window, num=order.ROUNDS)
      rows[inside] = start + order.permute(rows[inside] - start, size=stop - start, keys=keys)
    ranks = np.searchsorted(ends, rows, side='right')   # step 3: rank of the group of each row, in the epoch
    first_rows = ends - self.sizes[groups]              # first row of each group, in the epoch
    first_indexes = np.cumsum(self.sizes) - self.sizes  # first index of each group, in the source
    return first_indexes[groups[ranks]] + rows - first_rows[ranks]

  def _count_before(self, positions: HostArray | int, lanes: HostArray) -> HostArray:
    """Returns how many of the positions 0 ... p - 1 belong to lane l, for each pair p, l of `positions` and `lanes`."""
    num_per_lane = self.span // self.num_lanes  # positions of a lane in a span
    num_spans, offsets = np.divmod(positions, self.span)
    return num_spans * num_per_lane + np.clip(offsets - lanes * num_per_lane, 0, num_per_lane)


@functools.lru_cache(maxsize=4)
def _epoch_groups(visit: Windows, epoch: int) -> tuple[HostArray, HostArray]:
  """Returns the row groups in the order of an epoch, and the row after the end of each group, both `[N] i64`."""
  keys = streams.words(Stream.ROW_GROUPS, visit.seed, epoch, num=order.ROUNDS)
  groups = order.permute(np.arange(len(visit.sizes)), size=len(visit.sizes), keys=keys)
  return groups, np.cumsum(visit.sizes[groups])


def visit(source: Source, seed: int, batch_size: int) -> order.Visit:
  """Returns the order of training for a seed and a global batch size.

  One window of each lane together have the row groups that a process can hold. A batch has as many parts as possible.
  """
  large = _find_large_row_groups(source)
  if large is None:
    return order.Shuffled(len(source), seed)
  num_groups = large.num_mixed
  cycle = next((num_batches for num_batches in (CYCLE, CYCLE // 2) if num_groups >= num_batches * _MIN_PARTS), 1)
  max_parts = min(MAX_PARTS, num_groups // cycle, batch_size)
  num_parts = max(divisor for divisor in range(1, max_parts + 1) if batch_size % divisor == 0)
  num_lanes = cycle * num_parts
  return Windows(large.sizes, seed, cycle * batch_size, num_lanes, window_size=num_groups // num_lanes)


def describe(visit: order.Visit) -> str:
  """Returns the settings of all `Windows` in an order, for the digest of the data; '' if there are none."""
  if isinstance(visit, Windows):
    return f' row_groups={visit.span}/{visit.num_lanes}x{visit.window_size}'
  inner = [visit.visit] if isinstance(visit, order.Repeated) else getattr(visit, 'visits', ())
  return ''.join(map(describe, inner))


def visit_once(source: Source, seed: int) -> order.Visit:
  """Returns the order in which a source is written as a prepared dataset: each row group is read once."""
  large = _find_large_row_groups(source)
  if large is None:
    return order.Shuffled(len(source), seed)
  return Windows(large.sizes, seed, span=1, num_lanes=1, window_size=max(1, large.num_mixed // _WRITING_DIVISOR))


def _find_large_row_groups(source: Source) -> RowGroups | None:
  """Returns the row groups of a source; None if there are none, or if a process can hold all of them in memory."""
  groups = row_groups(source)
  return None if groups is None or int(groups.num_bytes.sum()) <= groups.held_bytes else groups
