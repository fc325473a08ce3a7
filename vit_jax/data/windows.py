"""The order of training data that are stored in row groups, each of which is read as a whole, such as Parquet files.

`loader.py` and `formats/mixture.py` call `visit` for training, `prepare.py` calls `stored` for writing. Both return
`order.Shuffled` if the source has no row groups, or if a process can hold all of them; else `Windows`.

A global shuffle would read and decode a row group of some hundred images for each image. `Windows` visits the row
groups in a random order in each epoch, and shuffles images among the row groups that a process can hold at a time: the
window. Each epoch still visits each example once, and the index at any position is a pure function of (seed, position),
the size of a batch and the files.

The row groups of an epoch are dealt to lanes, and each lane has its own windows. The rows of a batch are divided into
parts, one for each lane, and `cycle` batches in a row have different lanes. So each of several hosts, which load
different parts of a batch, reads its own row groups, and so does each of `cycle` loader processes, which take batches
in turn.
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
"""Batches in a row that have different lanes, if there are enough row groups."""
MOST_PARTS = 64
"""Lanes of a batch at most. With more hosts, several hosts share a lane."""
_FEWEST_PARTS = 8  # the cycle is shortened if a batch would have fewer lanes
_WRITTEN = 8  # windows are so many times smaller for writing: about the images of a shard


@dataclasses.dataclass(frozen=True, eq=False)
class Windows:
  """An `order.Visit` for examples in row groups.

  sizes: examples of each row group, `[N] i64`.
  seed: of the order.
  span: number of positions after which the lanes repeat, `cycle` times the batch size.
  lanes: number of lanes, a divisor of `span`.
  groups: number of row groups in a window, whose rows are shuffled together.
  """
  sizes: HostArray
  seed: int
  span: int
  lanes: int
  groups: int

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
    groups, ends = _sequence(self, epoch)
    first = epoch * int(ends[-1])  # position at which the epoch starts
    # The rows of an epoch are counted group after group, in the order of the epoch. Each lane has a range of them.
    all_lanes = np.arange(self.lanes)
    stops = np.cumsum(self._before(all_lanes, first + int(ends[-1])) - self._before(all_lanes, first))
    starts = np.append(0, stops[:-1])
    lanes = positions % self.span * self.lanes // self.span
    rows = starts[lanes] + self._before(lanes, positions) - self._before(lanes, first)
    # A window is `self.groups` groups of a lane, counted from the group in which the lane starts.
    first_groups = np.searchsorted(ends, starts, side='right')
    numbers = (np.searchsorted(ends, rows, side='right') - first_groups[lanes]) // self.groups
    for lane, number in np.unique(np.stack([lanes, numbers]), axis=1).T.tolist():
      inside = (lanes == lane) & (numbers == number)
      group = int(first_groups[lane]) + number * self.groups
      start = max(int(starts[lane]), int(ends[group - 1]) if group else 0)
      stop = min(int(stops[lane]), int(ends[min(group + self.groups, len(ends)) - 1]))
      keys = streams.words(Stream.WINDOWS, self.seed, epoch, lane, number, num=order.ROUNDS)
      rows[inside] = start + order.permute(rows[inside] - start, size=stop - start, keys=keys)
    chosen = np.searchsorted(ends, rows, side='right')  # the group of each row, in the order of the epoch
    before = np.cumsum(self.sizes) - self.sizes         # examples of the source before each of its groups
    return before[groups[chosen]] + rows - (ends - self.sizes[groups])[chosen]

  def _before(self, lanes: HostArray, positions: HostArray | int) -> HostArray:
    """Returns how many of the positions before each one belong to its lane."""
    each = self.span // self.lanes
    whole, rest = np.divmod(positions, self.span)
    return whole * each + np.clip(rest - lanes * each, 0, each)


@functools.lru_cache(maxsize=4)
def _sequence(visit: Windows, epoch: int) -> tuple[HostArray, HostArray]:
  """Returns the row groups of an epoch in their order, and the number of rows up to the end of each, `[N] i64`."""
  keys = streams.words(Stream.ROW_GROUPS, visit.seed, epoch, num=order.ROUNDS)
  groups = order.permute(np.arange(len(visit.sizes)), size=len(visit.sizes), keys=keys)
  return groups, np.cumsum(visit.sizes[groups])


def visit(source: Source, seed: int, batch_size: int) -> order.Visit:
  """Returns the order of training for a seed and a global batch size."""
  found = _large(source)
  if found is None:
    return order.Shuffled(len(source), seed)
  num = found.num_mixed
  cycle = next((one for one in (CYCLE, CYCLE // 2) if num >= one * _FEWEST_PARTS), 1)
  parts = next(one for one in range(min(MOST_PARTS, num // cycle, batch_size), 0, -1) if batch_size % one == 0)
  return Windows(found.sizes, seed, cycle * batch_size, cycle * parts, num // (cycle * parts))


def describe(visit: order.Visit) -> str:
  """Returns the settings of the windows in an order, for a digest of the data; '' without windows."""
  if isinstance(visit, Windows):
    return f' row_groups={visit.span}/{visit.lanes}x{visit.groups}'
  inner = [visit.visit] if isinstance(visit, order.Repeated) else getattr(visit, 'visits', ())
  return ''.join(map(describe, inner))


def stored(source: Source, seed: int) -> order.Visit:
  """Returns the order in which a source is written as a prepared dataset: each row group is read once."""
  found = _large(source)
  if found is None:
    return order.Shuffled(len(source), seed)
  return Windows(found.sizes, seed, 1, 1, max(1, found.num_mixed // _WRITTEN))


def _large(source: Source) -> RowGroups | None:
  """Returns the row groups of a source; None if it has none, or if a process can hold all of them."""
  found = row_groups(source)
  return None if found is None or int(found.num_bytes.sum()) <= found.held_bytes else found
