"""Batches in memory that a loader process shares with the process that trains, so that no batch is copied.

`workers.batches` uses both ends. In the loader process, `MakeSharedBatch` writes a batch to a segment of memory and
returns its description, a `Lease`, which Grain pickles. In the process that trains, `OpenedBatches` maps the segment
and yields the arrays. A segment is reused when the consumer has dropped all arrays of its batch, because its pages then
exist already: a new segment of 150 kB per image takes 37 page faults per image in each of the two processes. Segments
have no name, do not count toward the size of `/dev/shm`, and end with the processes that use them.

The two processes communicate by byte 0 of a segment. The loader process sets it to 1 before it writes a batch, and uses
only segments in which it is 0. The consumer sets it to 0 when the last array of the batch is gone. Neither waits for
the other: if no segment is free, a new one is made. The arrays begin at byte 64.
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
Layout = dict[str, tuple[int, tuple[int, ...], str]]
"""First byte, shape and dtype of the arrays in a segment by name."""
_ALIGNED = 64  # bytes: where the first array begins, and a divisor of where the others do


Allocate = Callable[[Specs], Batch]
"""Returns arrays of these shapes with any content; the caller writes every element."""


class MakeBatch(Protocol):
  """Makes the batch with a number, in arrays that `allocate` returns; such as `loader.Train`.

  It calls `allocate` exactly once. The batch has every name that was allocated, with the same array or with another one
  in its place, and may have more. An array that was not allocated is pickled, so it should be small.
  """

  def __call__(self, number: int, allocate: Allocate = ...) -> Batch:
    ...


def allocate_private(specs: Specs) -> Batch:
  """Returns arrays of zeros in the memory of this process alone."""
  return {name: np.zeros(shape, dtype) for name, (shape, dtype) in specs.items()}


def is_possible() -> bool:
  """Returns whether this platform has such memory."""
  return hasattr(os, 'memfd_create') and os.path.isdir('/proc/self/fd')


class Lease:
  """Describes a batch in a segment: the path of the segment, its arrays, and those that are pickled with the lease.

  It is not a tuple, whose items Grain would handle one by one.
  """

  def __init__(self, path: str, layout: Layout, pickled: Batch) -> None:
    self.path, self.layout, self.pickled = path, layout, pickled


class MakeSharedBatch:
  """Makes the batches of `make` in segments, and returns their leases. It is called in a loader process.

  It pickles, and several threads may call it at once.
  """

  def __init__(self, make: MakeBatch) -> None:
    self._make = make
    self._segments: list[_Segment] = []
    self._lock = threading.Lock()

  def __reduce__(self) -> tuple[Any, ...]:
    return MakeSharedBatch, (self._make,)

  def __call__(self, number: int) -> Lease:
    allocated: list[_Allocated] = []  # has one item once `allocate` is called

    def allocate(specs: Specs) -> Batch:
      allocated.append(self._allocate(specs))
      return dict(allocated[-1].arrays)

    try:
      batch = self._make(number, allocate)
    except BaseException:
      for one in allocated:
        one.segment.memory[0] = 0
      raise
    found, = allocated
    layout = {name: place for name, place in found.layout.items() if batch[name] is found.arrays[name]}
    pickled = {name: array for name, array in batch.items() if name not in layout}
    return Lease(f'/proc/{os.getpid()}/fd/{found.segment.descriptor}', layout, pickled)

  def _allocate(self, specs: Specs) -> _Allocated:
    layout: Layout = {}
    size = _ALIGNED
    for name, (shape, dtype) in specs.items():
      layout[name] = (size, shape, np.dtype(dtype).str)
      size += -(-math.prod(shape) * np.dtype(dtype).itemsize // _ALIGNED) * _ALIGNED
    with self._lock:
      segment = next((one for one in self._segments if not one.memory[0] and len(one.memory) == size), None)
      if segment is None:
        segment = _Segment(size)
        self._segments.append(segment)
      segment.memory[0] = 1
    return _Allocated(segment, layout, _views(segment.memory, layout))


class _Segment:
  """Memory of this process, which other processes open by the path of its descriptor."""

  def __init__(self, size: int) -> None:
    self.descriptor = os.memfd_create('batch')
    os.ftruncate(self.descriptor, size)
    self.memory = mmap.mmap(self.descriptor, size)


class _Allocated(NamedTuple):
  """The result of one call of `allocate`: a segment, and the arrays in it with their layout."""
  segment: _Segment
  layout: Layout
  arrays: Batch


def _views(memory: Any, layout: Layout) -> Batch:
  return {name: np.frombuffer(memory, dtype, math.prod(shape), start).reshape(shape)
          for name, (start, shape, dtype) in layout.items()}


class OpenedBatches:
  """The batches of leases, as an iterator that can be closed. The arrays of a batch are valid while they are held."""

  def __init__(self, leases: Iterator[Lease]) -> None:
    self._leases, self._memories = leases, dict[str, mmap.mmap]()

  def __iter__(self) -> Iterator[Batch]:
    return self

  def __next__(self) -> Batch:
    lease = next(self._leases)
    try:
      memory = self._memories.get(lease.path) or self._open(lease.path)
    except FileNotFoundError:
      # The process has ended, and its segments with it. Grain knows the exit status, and raises an error with it when
      # the turn of this process comes again. Before that it yields the finished batches of other processes, a few
      # of each. They are of no use now, so they are dropped without being opened.
      collections.deque(self._leases, maxlen=0)
      raise
    # Every array refers to this object, so it lives as long as the last array. When it is freed, byte 0 becomes 0.
    held = (ctypes.c_char * len(memory)).from_buffer(memory)
    weakref.finalize(held, memory.__setitem__, 0, 0).atexit = False
    return _views(held, lease.layout) | lease.pickled

  def _open(self, path: str) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR)
    try:
      memory = self._memories[path] = mmap.mmap(descriptor, 0)
    finally:
      os.close(descriptor)
    return memory

  def close(self) -> None:
    """Ends the processes; arrays that are held stay valid."""
    self._leases.close()  # type: ignore[attr-defined]
    self._memories.clear()
