"""Batches in memory that a loader process shares with its consumer, the process that trains. No batch is copied.

`workers.batches` uses the classes for both processes. In the loader process, `MakeSharedBatch` writes a batch to a
segment of memory and returns a `Lease`, which describes the batch and which Grain pickles. In the consumer,
`OpenedBatches` maps the segment and yields the arrays. A segment is a file in memory without a name (`memfd_create`).
The consumer opens the segment by the path `/proc/PID/fd/DESCRIPTOR`. Segments do not count toward the size of
`/dev/shm`, and the system frees them when the processes end. The content of a segment:

    byte 0        1 while the batch is written or used, 0 while the segment is free; bytes 1 to 63 are unused
    from byte 64  the arrays, each at a multiple of 64 bytes

The loader process takes only free segments, and sets byte 0 to 1 before it writes a batch. The consumer sets byte 0 to
0 when the last array of the batch is freed. Neither process waits: if no segment is free, the loader process makes a
new segment. This costs time: with 150 kB per image, 37 page faults per image in both processes.
"""
from __future__ import annotations

import collections
import ctypes
import math
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from vit_jax.core.types import Batch

Specs = Mapping[str, tuple[tuple[int, ...], Any]]
"""Shape and dtype of arrays by name."""
Allocate = Callable[[Specs], Batch]
"""Returns arrays of the given shapes with any content; the caller writes every element."""
_ALIGNMENT_BYTES = 64  # the arrays of a segment begin at multiples of so many bytes


class ArrayPlace(NamedTuple):
  """An array in a segment: the position of the first byte, the shape, and `np.dtype.str` such as `<f4`."""
  start: int
  shape: tuple[int, ...]
  dtype: str


Layout = dict[str, ArrayPlace]
"""The arrays in a segment by name."""


class MakeBatch(Protocol):
  """Makes the batch with a number; for example, `loader.Train`.

  The function calls `allocate` exactly once, writes to the allocated arrays, and returns them by name. The function may
  replace allocated arrays or add arrays; these further arrays are pickled, so they should be small.
  """

  def __call__(self, number: int, allocate: Allocate = ...) -> Batch:
    ...


def allocate_private(specs: Specs) -> Batch:
  """Returns arrays of zeros in memory that is not shared."""
  return {name: np.zeros(shape, dtype) for name, (shape, dtype) in specs.items()}


def is_possible() -> bool:
  """Returns whether this platform has files in memory that another process can open."""
  return hasattr(os, 'memfd_create') and os.path.isdir('/proc/self/fd')


class Lease:
  """Describes a batch: the path of the segment, the arrays in the segment, and `pickled`, the arrays outside of it.

  The loader process sends the lease to the consumer. A lease is not a tuple, because Grain would process the items of a
  tuple one by one.
  """

  def __init__(self, path: str, layout: Layout, pickled: Batch) -> None:
    self.path, self.layout, self.pickled = path, layout, pickled


class MakeSharedBatch:
  """Makes the batches of `make` in segments, and returns the lease of each batch. Called in a loader process.

  The pickled form has no segments. Several threads may call the object at once.
  """

  def __init__(self, make: MakeBatch) -> None:
    self._make = make
    self._segments: list[_Segment] = []
    self._lock = threading.Lock()

  def __reduce__(self) -> tuple[Any, ...]:
    return MakeSharedBatch, (self._make,)

  def __call__(self, number: int) -> Lease:
    allocations: list[_Allocation] = []  # `allocate` adds the only item

    def allocate(specs: Specs) -> Batch:
      allocations.append(self._allocate(specs))
      return dict(allocations[-1].arrays)

    try:
      batch = self._make(number, allocate)
    except BaseException:
      for allocation in allocations:
        allocation.segment.memory[0] = 0  # the segment is free again
      raise
    [allocation] = allocations
    layout = {name: place for name, place in allocation.layout.items() if batch[name] is allocation.arrays[name]}
    pickled = {name: array for name, array in batch.items() if name not in layout}
    return Lease(f'/proc/{os.getpid()}/fd/{allocation.segment.descriptor}', layout, pickled)

  def _allocate(self, specs: Specs) -> _Allocation:
    """Takes a free segment of the right size, or makes a segment; marks it as used, and returns arrays in it."""
    layout: Layout = {}
    num_bytes = _ALIGNMENT_BYTES
    for name, (shape, dtype) in specs.items():
      layout[name] = ArrayPlace(num_bytes, shape, np.dtype(dtype).str)
      num_blocks = -(-math.prod(shape) * np.dtype(dtype).itemsize // _ALIGNMENT_BYTES)
      num_bytes += num_blocks * _ALIGNMENT_BYTES
    with self._lock:
      free = (segment for segment in self._segments if not segment.memory[0] and len(segment.memory) == num_bytes)
      segment = next(free, None)
      if segment is None:
        segment = _Segment(num_bytes)
        self._segments.append(segment)
      segment.memory[0] = 1
    return _Allocation(segment, layout, _views(segment.memory, layout))


class _Segment:
  """Memory of the loader process; the consumer opens the memory by the path of `descriptor`."""

  def __init__(self, num_bytes: int) -> None:
    self.descriptor = os.memfd_create('batch')
    os.ftruncate(self.descriptor, num_bytes)
    self.memory = mmap.mmap(self.descriptor, num_bytes)


class _Allocation(NamedTuple):
  """The result of one call of `allocate`: a segment, and the arrays in it with their layout."""
  segment: _Segment
  layout: Layout
  arrays: Batch


def _views(memory: Any, layout: Layout) -> Batch:
  """Returns the arrays of a layout as views of `memory`, a buffer that lives as long as the arrays."""
  return {name: np.frombuffer(memory, dtype, math.prod(shape), start).reshape(shape)
          for name, (start, shape, dtype) in layout.items()}


class OpenedBatches:
  """Iterates over the batches of leases. A segment is not reused while a reference to one of its arrays exists."""

  def __init__(self, leases: Iterator[Lease]) -> None:
    self._leases, self._memory_by_path = leases, dict[str, mmap.mmap]()

  def __iter__(self) -> Iterator[Batch]:
    return self

  def __next__(self) -> Batch:
    lease = next(self._leases)
    try:
      memory = self._memory_by_path.get(lease.path) or self._open(lease.path)
    except FileNotFoundError:
      # The loader process has ended, and so its segments are gone. Grain will raise an error with the exit status, but
      # first yields some finished batches of other processes. The next line drops these batches until Grain raises.
      collections.deque(self._leases, maxlen=0)
      raise
    # All arrays are views of this buffer, so the buffer is freed after the last array. Then `memory[0] = 0` is run.
    buffer = (ctypes.c_char * len(memory)).from_buffer(memory)
    weakref.finalize(buffer, memory.__setitem__, 0, 0).atexit = False
    return _views(buffer, lease.layout) | lease.pickled

  def _open(self, path: str) -> mmap.mmap:
    """Maps a segment to memory, and keeps the map for the next batches in the segment."""
    descriptor = os.open(path, os.O_RDWR)
    try:
      memory = self._memory_by_path[path] = mmap.mmap(descriptor, 0)
    finally:
      os.close(descriptor)
    return memory

  def close(self) -> None:
    """Ends the loader processes. The arrays of earlier batches stay valid."""
    self._leases.close()  # type: ignore[attr-defined]
    self._memory_by_path.clear()
