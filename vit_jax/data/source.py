"""The contract of a source: random access to stored examples, in a fixed order.

A source knows nothing of recipes, batches or the order of training. It pickles small, since loader processes get a
copy. `sources/opening.py` opens sources by name.
"""
from __future__ import annotations

import bisect
import hashlib
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from vit_jax.core.types import HostArray

UNKNOWN = -1
"""Of `most_labels`: images have several labels, how many is not known before they are read."""


class Record(NamedTuple):
  """A stored example: encoded bytes or `[H, W, 3 or 1] u8`, and the class.

  Of a source whose images have any number of classes, `labels` holds them all, and `label` is the first, or -1.
  """
  image: bytes | HostArray
  label: int
  labels: tuple[int, ...] | None = None

  @classmethod
  def multilabel(cls, image: bytes | HostArray, labels: Sequence[int]) -> Record:
    """An example with these classes."""
    return cls(image, int(labels[0]) if len(labels) else -1, tuple(int(c) for c in labels))


class Source(Protocol):
  """A split, or a part of one, in a fixed order."""
  name: str
  class_names: tuple[str, ...]
  digest: str
  """Identity of the set: another number, size or label of examples gives another one."""

  def __len__(self) -> int:
    ...

  def __getitem__(self, index: int) -> Record:
    ...

  def label(self, index: int) -> int:
    """The class of an example, where possible without reading its image."""
    ...

  def describe(self, index: int) -> str:
    """A name a person can find the example by."""
    ...


def most_labels(source: Source) -> int:
  """0 where every image has one class; else how many an image has at most, or `UNKNOWN`."""
  return getattr(source, 'most_labels', 0)


def combined(found: Sequence[Source]) -> int:
  """`most_labels` of several sources together."""
  counts = [most_labels(source) for source in found]
  return UNKNOWN if UNKNOWN in counts else max(counts)


class Part(NamedTuple):
  """Examples `start` to `stop` of a source."""
  source: Source
  start: int
  stop: int


class Parts:
  """Parts of sources, one after the other, as one source."""

  def __init__(self, parts: Sequence[Part], *, name: str) -> None:
    self.name, self._parts = name, tuple(parts)
    self.class_names = parts[0].source.class_names
    self._starts = [sum(p.stop - p.start for p in parts[:i]) for i in range(len(parts) + 1)]
    text = ' '.join(f'{p.source.digest}[{p.start}:{p.stop}]' for p in parts)
    self.digest = hashlib.sha256(text.encode()).hexdigest()

  def __len__(self) -> int:
    return self._starts[-1]

  def __getitem__(self, index: int) -> Record:
    source, place = self.origin(index)
    return source[place]

  def label(self, index: int) -> int:
    source, place = self.origin(index)
    return source.label(place)

  def describe(self, index: int) -> str:
    source, place = self.origin(index)
    return source.describe(place)

  @property
  def most_labels(self) -> int:
    return combined([p.source for p in self._parts])

  def origin(self, index: int) -> tuple[Source, int]:
    """The source that an example comes from, and its place there."""
    if not 0 <= index < len(self):
      raise IndexError(f'{index} is not in {self.name} of {len(self):,} examples')
    number = bisect.bisect_right(self._starts, index) - 1
    part = self._parts[number]
    return part.source, part.start + index - self._starts[number]
