"""Batches that loader processes make in memory which they share with the process that trains, so that none is copied.

A loader process writes a batch to a segment of memory and hands over its description. The segment is used again when
the consumer has dropped all arrays of the batch, so that its pages are there already: a new segment of 150 kB an image
takes 37 page faults an image in each of both processes. Segments have no name, do not count for the size of `/dev/shm`,
and end with the processes that use them.
"""
from __future__ import annotations

import collections
import ctypes
import math
import mmap
import os
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from vit_jax.core.types import Batch

Specs = Mapping[str, tuple[tuple[int, ...], Any]]
"""Shape and dtype of arrays by name."""
Layout = dict[str, tuple[int, tuple[int, ...], str]]
"""First byte, shape and dtype of the arrays in a segment by name."""
_ALIGNED = 64  # bytes; the first byte of a segment is 1 while it is in use


class Allocate(Protocol):
  """Returns arrays; `zero` = they must be 0, otherwise every element is written later."""

  def __call__(self, specs: Specs, *, zero: bool) -> Batch:
    ...


class Make(Protocol):
  """Makes the batch of a number in arrays that `allocate` returns."""

  def __call__(self, number: int, allocate: Allocate = ...) -> Batch:
    ...


def new(specs: Specs, *, zero: bool) -> Batch:
  """Returns arrays of this process; they are 0, which costs nothing here."""
  del zero
  return {name: np.zeros(shape, dtype) for name, (shape, dtype) in specs.items()}


def is_possible() -> bool:
  """Returns whether this platform has such memory."""
  return hasattr(os, 'memfd_create') and os.path.isdir('/proc/self/fd')


class Lease:
  """A batch in a segment: where the segment and its arrays are, and arrays that are pickled, since they are small.

  It is not a tuple, whose items Grain would handle one by one.
  """

  def __init__(self, path: str, layout: Layout, rest: Batch) -> None:
    self.path, self.layout, self.rest = path, layout, rest


class SharedMake:
  """Makes batches as `make` does, in segments, and returns leases; of a loader process. Pickles; safe for threads."""

  def __init__(self, make: Make) -> None:
    self._make = make
    self._segments: list[_Segment] = []
    self._lock = threading.Lock()

  def __reduce__(self) -> tuple[Any, ...]:
    return SharedMake, (self._make,)

  def __call__(self, number: int) -> Lease:
    taken: list[_Placed] = []

    def allocate(specs: Specs, *, zero: bool) -> Batch:
      taken.append(self._take(specs, zero=zero))
      return dict(taken[-1].arrays)

    try:
      batch = self._make(number, allocate)
    except BaseException:
      for one in taken:
        one.segment.memory[0] = 0
      raise
    placed, = taken
    layout = {name: place for name, place in placed.layout.items() if batch[name] is placed.arrays[name]}
    rest = {name: array for name, array in batch.items() if name not in layout}
    return Lease(f'/proc/{os.getpid()}/fd/{placed.segment.descriptor}', layout, rest)

  def _take(self, specs: Specs, *, zero: bool) -> _Placed:
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
    arrays = _arrays(segment.memory, layout)
    if zero and segment.is_used:
      for array in arrays.values():
        array[...] = 0
    segment.is_used = True
    return _Placed(segment, layout, arrays)


class _Segment:
  """Memory of this process, which others open by its path."""

  def __init__(self, size: int) -> None:
    self.descriptor = os.memfd_create('batch')
    os.ftruncate(self.descriptor, size)
    self.memory, self.is_used = mmap.mmap(self.descriptor, size), False


class _Placed(NamedTuple):
  """Arrays in a segment."""
  segment: _Segment
  layout: Layout
  arrays: Batch


def _arrays(memory: Any, layout: Layout) -> Batch:
  return {name: np.frombuffer(memory, dtype, math.prod(shape), start).reshape(shape)
          for name, (start, shape, dtype) in layout.items()}


class Opened:
  """The batches of leases, as an iterator that can be closed. The arrays of a batch are valid while they are held."""

  def __init__(self, leases: Iterator[Lease]) -> None:
    self._leases, self._memories = leases, dict[str, mmap.mmap]()

  def __iter__(self) -> Iterator[Batch]:
    return self

  def __next__(self) -> Batch:
    lease = next(self._leases)
    try:
      memory = self._memories.get(lease.path) or self._open(lease.path)
    except FileNotFoundError:  # the process has ended, and its segments with it: Grain raises an error soon
      collections.deque(self._leases, maxlen=0)
      raise
    # Every array refers to this object, of which NumPy makes no view of its own; it dies with the last of them.
    held = (ctypes.c_char * len(memory)).from_buffer(memory)
    weakref.finalize(held, memory.__setitem__, 0, 0).atexit = False
    return _arrays(held, lease.layout) | lease.rest

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
