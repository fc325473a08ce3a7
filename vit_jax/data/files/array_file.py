"""Files with a few NumPy arrays and a JSON header, and the same in memory that loader processes share.

The layout is 8 bytes for the length of the header (little endian), the header, and the arrays, each from a multiple of
64 bytes.
"""
from __future__ import annotations

import contextlib
import json
import mmap
import os
import pathlib
import shutil
import weakref
from typing import IO, Any, NamedTuple

import numpy as np

from vit_jax.core.types import HostArray

_ALIGNED = 64


class Memory:
  """Memory without a name that other processes open by this process's number and `descriptor`."""

  def __init__(self, descriptor: int) -> None:
    self.descriptor = descriptor
    self._close = weakref.finalize(self, os.close, descriptor)


class Arrays(NamedTuple):
  """Notes, as JSON can express them, and flat arrays by name; `memory` holds them if it can be shared."""
  notes: dict[str, Any]
  arrays: dict[str, HostArray]
  memory: Memory | None = None

  def __reduce__(self) -> tuple[Any, ...]:
    """In the pickled form, shared memory is a few bytes, and valid while this process lives."""
    if self.memory is not None:
      return _open_memory, (f'/proc/{os.getpid()}/fd/{self.memory.descriptor}',)
    return Arrays, (self.notes, self.arrays)


def _open_memory(path: str) -> Arrays:
  return _map(Memory(os.open(path, os.O_RDONLY)), path)


def share(made: Arrays) -> Arrays:
  """Returns a copy in memory that loader processes share; where the platform has none, the same."""
  if not hasattr(os, 'memfd_create'):
    return made
  memory = Memory(os.memfd_create('arrays'))
  with open(memory.descriptor, 'wb', closefd=False) as file:
    _write(made, file)
  return _map(memory, 'memory')


def read(path: pathlib.Path) -> Arrays:
  """Reads a file, into memory that loader processes share: a file that is replaced later changes nothing.

  Raises:
    OSError: it cannot be read.
    ValueError: it is damaged or of another kind.
  """
  if not hasattr(os, 'memfd_create'):
    return _map(Memory(os.open(path, os.O_RDONLY)), str(path))._replace(memory=None)
  memory = Memory(os.memfd_create('arrays'))
  with open(path, 'rb') as source, open(memory.descriptor, 'wb', closefd=False) as file:
    shutil.copyfileobj(source, file, 2**22)
  return _map(memory, str(path))


def write(made: Arrays, path: pathlib.Path) -> None:
  """Writes a file, which appears complete or not at all; its folder is created.

  Raises:
    OSError: it cannot be written.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  part = path.with_name(f'{path.name}.{os.getpid()}.part')
  try:
    with open(part, 'wb') as file:
      _write(made, file)
    part.replace(path)
  finally:
    with contextlib.suppress(OSError):
      part.unlink(missing_ok=True)


def _write(made: Arrays, file: IO[bytes]) -> None:
  described = {name: (array.dtype.str, len(array)) for name, array in made.arrays.items()}
  header = json.dumps({'notes': made.notes, 'arrays': described}).encode()
  file.write(len(header).to_bytes(8, 'little') + header)
  for array in made.arrays.values():
    file.write(bytes(-file.tell() % _ALIGNED))
    file.write(np.ascontiguousarray(array).data)


def _map(memory: Memory, name: str) -> Arrays:
  try:
    data = mmap.mmap(memory.descriptor, 0, access=mmap.ACCESS_READ)
    start = 8 + int.from_bytes(data[:8], 'little')
    header = json.loads(data[8:start])
    notes, arrays = header['notes'], {}
    for key, (dtype, length) in header['arrays'].items():
      start += -start % _ALIGNED
      arrays[key] = np.frombuffer(data, np.dtype(dtype), length, start)
      start += arrays[key].nbytes
  except (KeyError, TypeError, AttributeError, ValueError) as error:
    raise ValueError(f'{name}: expected arrays behind a header, got {error}') from error
  return Arrays(notes, arrays, memory)
