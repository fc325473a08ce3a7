"""Batches in memory that a loader process shares with the process that trains, so that no batch is copied.

`workers.batches` uses both ends. In the loader process, `MakeSharedBatch` writes a batch to a segment of memory and
returns its description, a `Lease`, which Grain pickles. In the process that trains, `OpenedBatches` maps the segment
and yields the arrays. A segment is a file in memory without a name (`memfd_create`). The consumer opens it by its path
`/proc/PID/fd/DESCRIPTOR`. It does not count toward the size of `/dev/shm`, and ends with the processes that use it.

    byte 0        1 while the batch is written or used, 0 while the segment is free; bytes 1 to 63 are unused
    from byte 64  the arrays, each at a multiple of 64 bytes

The loader process takes only free segments, and sets byte 0 to 1 before it writes a batch. The consumer, which is the
process that trains, sets it to 0 when the last array of the batch is freed. Neither waits for the other: if no segment
is free, a new one is made, which costs time: with 150 kB per image, 37 page faults per image in both processes.
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
"""Returns arrays of these shapes with any content; the caller writes every element."""
_ALIGNMENT = 64  # bytes: the arrays of a segment begin at multiples of it


class ArrayPlace(NamedTuple):
  """Where an array is in a segment: its first byte, shape, and dtype as `np.dtype.str`, such as `<f4`."""
  start: int
  shape: tuple[int, ...]
  dtype: str


Layout = dict[str, ArrayPlace]
"""The arrays in a segment by name."""


class MakeBatch(Protocol):
  """Makes the batch with a number, in arrays that `allocate` returns; such as `loader.Train`.

  It calls `allocate` exactly once, and returns at least the names that it allocated. Usually it returns the allocated
  arrays. It may also replace some of them or add others: these are pickled, so they should be small.
  """

  def __call__(self, number: int, allocate: Allocate = ...) -> Batch:
    ...


def allocate_private(specs: Specs) -> Batch:
  """Returns arrays of zeros in the memory of this process alone."""
  return {name: np.zeros(shape, dtype) for name, (shape, dtype) in specs.items()}


def is_possible() -> bool:
  """Returns whether this platform has files in memory that another process can open."""
  return hasattr(os, 'memfd_create') and os.path.isdir('/proc/self/fd')


class Lease:
  """Describes a batch: the path of its segment, the arrays there, and `pickled`, the arrays outside of the segment.

  The loader process sends it to the consumer. It is no tuple, because Grain handles the items of a tuple one by one.
  """

  def __init__(self, path: str, layout: Layout, pickled: Batch) -> None:
    self.path, self.layout, self.pickled = path, layout, pickled


class MakeSharedBatch:
  """Makes the batches of `make` in segments, and returns their leases. It is called in a loader process.

  It can be pickled, without its segments. Several threads may call it at once.
  """

  def __init__(self, make: MakeBatch) -> None:
    self._make = make
    self._segments: list[_Segment] = []
    self._lock = threading.Lock()

  def __reduce__(self) -> tuple[Any, ...]:
    return MakeSharedBatch, (self._make,)

  def __call__(self, number: int) -> Lease:
    allocations: list[_Allocation] = []  # has one item once `allocate` is called

    def allocate(specs: Specs) -> Batch:
      allocations.append(self._allocate(specs))
      return dict(allocations[-1].arrays)

    try:
      batch = self._make(number, allocate)
    except BaseException:
      for allocation in allocations:
        allocation.segment.memory[0] = 0
      raise
    [allocation] = allocations
    layout = {name: place for name, place in allocation.layout.items() if batch[name] is allocation.arrays[name]}
    pickled = {name: array for name, array in batch.items() if name not in layout}
    return Lease(f'/proc/{os.getpid()}/fd/{allocation.segment.descriptor}', layout, pickled)

  def _allocate(self, specs: Specs) -> _Allocation:
    """Returns a free segment of the right size, or a new one, with arrays in it, and sets its byte 0."""
    layout: Layout = {}
    size = _ALIGNMENT
    for name, (shape, dtype) in specs.items():
      layout[name] = ArrayPlace(size, shape, np.dtype(dtype).str)
      size += -(-math.prod(shape) * np.dtype(dtype).itemsize // _ALIGNMENT) * _ALIGNMENT
    with self._lock:
      free = (segment for segment in self._segments if not segment.memory[0] and len(segment.memory) == size)
      segment = next(free, None)
      if segment is None:
        segment = _Segment(size)
        self._segments.append(segment)
      segment.memory[0] = 1
    return _Allocation(segment, layout, _views(segment.memory, layout))


class _Segment:
  """Memory of this process, which other processes open by the path of its descriptor."""

  def __init__(self, size: int) -> None:
    self.descriptor = os.memfd_create('batch')
    os.ftruncate(self.descriptor, size)
    self.memory = mmap.mmap(self.descriptor, size)


class _Allocation(NamedTuple):
  """The result of one call of `allocate`: a segment, and the arrays in it with their layout."""
  segment: _Segment
  layout: Layout
  arrays: Batch


def _views(memory: Any, layout: Layout) -> Batch:
  """Returns arrays that refer to `memory`, a buffer, and keep it alive."""
  return {name: np.frombuffer(memory, dtype, math.prod(shape), start).reshape(shape)
          for name, (start, shape, dtype) in layout.items()}


class OpenedBatches:
  """Iterates over the batches of leases. A segment is not reused while a reference to one of its arrays exists."""

  def __init__(self, leases: Iterator[Lease]) -> None:
    self._leases, self._memories = leases, dict[str, mmap.mmap]()

  def __iter__(self) -> Iterator[Batch]:
    return self

  def __next__(self) -> Batch:
    lease = next(self._leases)
    try:
      memory = self._memories.get(lease.path) or self._open(lease.path)
    except FileNotFoundError:
      # The loader process has ended, and its segments with it. Grain raises an error with the exit status, but first
      # it yields some finished batches of the other processes. This line drops them until Grain raises its error.
      collections.deque(self._leases, maxlen=0)
      raise
    # All arrays refer to this buffer, so it is freed after the last array. Then `memory[0] = 0` marks the segment free.
    buffer = (ctypes.c_char * len(memory)).from_buffer(memory)
    weakref.finalize(buffer, memory.__setitem__, 0, 0).atexit = False
    return _views(buffer, lease.layout) | lease.pickled

  def _open(self, path: str) -> mmap.mmap:
    """Returns the memory map of a segment, which stays open for its next batches."""
    descriptor = os.open(path, os.O_RDWR)
    try:
      memory = self._memories[path] = mmap.mmap(descriptor, 0)
    finally:
      os.close(descriptor)
    return memory

  def close(self) -> None:
    """Ends the loader processes. Arrays that the caller still has stay valid."""
    self._leases.close()  # type: ignore[attr-defined]
    self._memories.clear()
