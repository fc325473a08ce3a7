"""Which files of prepared datasets a loader will use, in the order of their first use, to verify them meanwhile.

The order is a pure function of the step, so it is computed in the thread that compares the checksums.
"""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from vit_jax.core.types import HostArray
from vit_jax.data.files.verification import Background, File
from vit_jax.data.source import Source, find_origin

_PEEKED = 1_000  # examples that tell whether files are to be verified; a mixture uses each source in so many
_POLL_S = 0.2


class Used:
  """Verifies the files of the examples of a loader while its batches are used.

  Args:
    source: of the examples.
    indexes: returns those of a batch by its number; none after the last batch.
    ahead: batches for which files are found before they are used, an epoch.
  """

  def __init__(self, source: Source, indexes: Callable[[int], HostArray], *, start: int, ahead: int) -> None:
    self._source, self._indexes, self._start, self._ahead = source, indexes, start, ahead
    self._now, self._closed = start, threading.Event()
    self._running = Background(self._files()) if self._is_needed() else None

  def check(self, number: int) -> None:
    """Raises UserError if a file has another checksum; batch `number` is used next."""
    self._now = number
    if self._running:
      self._running.check()

  def finish(self) -> None:
    """Waits until the files of all batches are verified; raises UserError if one has another checksum."""
    if self._running:
      self._running.finish()

  def close(self) -> None:
    """Ends the thread."""
    self._closed.set()
    if self._running:
      self._running.close()

  def _is_needed(self) -> bool:
    """Returns whether files are to be verified."""
    number, num = self._start, 0
    while num < _PEEKED and (chosen := self._indexes(number).tolist()):
      if any(self._file(index) is not None for index in chosen[:_PEEKED]):
        return True
      number, num = number + 1, num + len(chosen)
    return False

  def _file(self, index: int) -> File | None:
    source, place = find_origin(self._source, index)
    find: Callable[[int], File | None] | None = getattr(source, 'file', None)
    return find(place) if find else None

  def _files(self) -> Iterator[File]:
    """Yields the files in the order of their first use, until all files of all datasets have come."""
    number, num, seen, counts = self._start, 0, set[tuple[str, str]](), dict[str, int]()
    while num < _PEEKED or len(seen) < sum(counts.values()):
      while number > self._now + self._ahead:
        if self._closed.wait(_POLL_S):
          return
      chosen = self._indexes(number).tolist()
      if not chosen:
        return
      for index in chosen:
        file = self._file(index)
        if file and (key := (str(file.expected.folder), file.name)) not in seen:
          seen.add(key)
          counts[key[0]] = len(file.expected.digests)
          yield file
      number, num = number + 1, num + len(chosen)
