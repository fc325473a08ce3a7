"""Starts the reads of remote examples before they are needed: the rows of a batch are known when it begins.

A record of object storage takes tens of milliseconds to arrive, and a thread decodes one in a few. So each thread keeps
up to `MOST_ROWS` reads of its batch in flight, within the bytes that the process may have waiting
(`data.read_ahead_mib`).
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, cast

from vit_jax.data.files import ranges
from vit_jax.data.files.ranges import Range
from vit_jax.data.source import Source, find_origin

MOST_ROWS = 128


class Remote(Protocol):
  """What a source has if its examples may be remote."""

  def opening(self, index: int) -> Range | None:
    """Returns the range to read before `part` of an example is known; None if it is known, or the file is local."""
    ...

  def part(self, index: int) -> Range | None:
    """Returns the range that is read for an example; None if the file is local."""
    ...


def rows(source: Source, indexes: Sequence[int]) -> Iterator[int]:
  """Yields 0 ... len(indexes) - 1, the rows of a batch, while the reads of rows after the present one begin.

  Raises:
    OSError, TemporaryError, UserError: a file cannot be opened.
  """
  places = [find_origin(source, index) for index in indexes]
  if not any(hasattr(origin, 'part') for origin, _ in places):
    yield from range(len(indexes))
    return
  reads = _Reads([(cast(Remote, origin) if hasattr(origin, 'part') else None, place) for origin, place in places])
  try:
    for row in range(len(indexes)):
      reads.begin(row)
      yield row
      reads.end(row)
  finally:
    reads.close()


class _Reads:
  """The reads of a batch that have begun."""

  def __init__(self, places: Sequence[tuple[Remote | None, int]]) -> None:
    self._places, self._next = places, 0
    self._parts: dict[int, Range] = {}
    self._openings = [origin.opening(place) if origin else None for origin, place in places]
    self._begun = {part for part in dict.fromkeys(self._openings) if part and ranges.start(part)}

  def begin(self, row: int) -> None:
    """Starts the reads of this row and of those after it, as far as is allowed."""
    self._next = max(self._next, row)
    while self._next < min(len(self._places), row + MOST_ROWS):
      if (part := self._find(self._next)) is not None:
        if not ranges.start(part):
          return
        self._parts[self._next] = part
      self._next += 1

  def end(self, row: int) -> None:
    """Takes a row that was read."""
    if (part := self._parts.pop(row, None)) is not None:
      ranges.drop(part)

  def close(self) -> None:
    """Discards what was not read."""
    for part in [*self._parts.values(), *self._begun]:
      ranges.drop(part)
    self._parts, self._begun = {}, set()

  def _find(self, row: int) -> Range | None:
    """Returns the range of a row, whose file is opened for it."""
    origin, place = self._places[row]
    if origin is None:
      return None
    try:
      return origin.part(place)
    except OSError:  # who reads the example meets the error again, and explains it
      return None
    finally:
      if (opening := self._openings[row]) in self._begun:
        self._begun.remove(opening)
        ranges.drop(opening)
