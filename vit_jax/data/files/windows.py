"""Reads a file from its beginning to its end for an index, which needs a few bytes here and there.

Of a local file, some kilobytes are read at a time, and what lies between is left out. A request to object storage takes
tens of milliseconds, whether it brings a header or some megabytes. So an object is read in blocks, the next of which
are in flight; the bytes that wait are bounded by `data.read_ahead_mib`, as for images. Imports no jax.
"""
from __future__ import annotations

import os

from vit_jax.data.files import ranges, remote
from vit_jax.data.files.ranges import Range

_LOCAL, BLOCK = 2**12, 2**22  # bytes that are read at a time
_AHEAD = 3  # blocks in flight for each object
_MOST = 2**62  # bytes of a file


class Window:
  """A local file, of which a part is in memory: a header, a small label and the next header are one read."""

  def __init__(self, path: str) -> None:
    self.path, self._start, self._content = path, 0, b''
    self._size = os.path.getsize(path)

  def read(self, offset: int, size: int) -> bytes:
    """Returns up to `size` bytes; fewer at the end of the file."""
    start = offset - self._start
    if start < 0 or start + size > len(self._content):
      self._start, self._content = offset, ranges.read(self.path, offset, max(size, _LOCAL))
      start = 0
    return self._content[start:start + size]

  def holds(self, end: int) -> bool:
    """Returns whether the file has at least `end` bytes."""
    return end <= self._size

  def place(self, offset: int) -> str:
    """Returns how a message names a place in the file."""
    return f'at byte {offset:,} of {self._size:,}'

  def close(self) -> None:
    """Discards what was read ahead."""


class RemoteWindow(Window):
  """An object, read in blocks. Its size is not asked for: storage tells it when its end is read."""

  def __init__(self, path: str) -> None:
    self.path, self._blocks = path, dict[int, bytes]()
    self._begun: list[Range] = []
    self._known = 0  # bytes that the object has at least

  def read(self, offset: int, size: int) -> bytes:
    if offset + size > _MOST:
      return b''
    first, last = offset // BLOCK, (offset + max(size, 1) - 1) // BLOCK
    if last - first > _AHEAD:  # more than an index needs: in one request, which is not kept
      return ranges.read(self.path, offset, size, keep=False)
    content = b''.join(self._block(number) for number in range(first, last + 1))
    self._blocks = {number: found for number, found in self._blocks.items() if number >= first}
    return content[offset - first * BLOCK:offset - first * BLOCK + size]

  def holds(self, end: int) -> bool:
    if end <= self._known or not 0 < end <= _MOST:
      return end <= self._known
    number, place = divmod(end - 1, BLOCK)
    return len(self._block(number)) > place  # blocks before it stay, as they may still be needed

  def place(self, offset: int) -> str:
    return f'at byte {offset:,}'

  def close(self) -> None:
    for part in self._begun:
      ranges.drop(part)
    self._begun = []

  def _block(self, number: int) -> bytes:
    if number in self._blocks:
      return self._blocks[number]
    now, *later = (Range(self.path, (number + ahead) * BLOCK, BLOCK) for ahead in range(_AHEAD + 1))
    kept = [part for part in self._begun if part in later]
    unused = [part for part in self._begun if part not in later]
    self._begun = kept + [part for part in later if part not in kept and ranges.start(part)]
    try:
      found = self._blocks[number] = ranges.read(*now, keep=False)
    finally:
      for part in unused:  # also the present one
        ranges.drop(part)
    self._known = max(self._known, number * BLOCK + len(found)) if found else self._known
    return found


def open_window(path: str) -> Window:
  """Returns a file as a window; raises OSError if a local one is missing."""
  return RemoteWindow(path) if remote.is_address(path) else Window(path)
