"""The contract of a source: random access to stored examples in a fixed order; and parts of sources.

A source knows nothing of recipes, batches or the training order. It must pickle to few bytes, since loader processes
get a copy. `sources/opening.py` opens sources by name.
"""
from __future__ import annotations

import bisect
import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from vit_jax.core import retrying
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.core.types import HostArray
from vit_jax.data.files import access
from vit_jax.data.image.headers import BadImage

UNKNOWN = -1
"""Value of `most_labels` if images have several labels, and the largest number is not known without reading them."""
UNLABELED = ('unlabeled',)
"""The only class of images without labels."""


class Record(NamedTuple):
  """A stored example: encoded bytes or `[H, W, 3 or 1] u8`, and its class.

  If the images of a source have any number of classes, `labels` has all of them, and `label` is the first, or -1.
  If they have masks (`has_masks`), `mask` is the encoded mask, and `label` is -1.
  """
  image: bytes | HostArray
  label: int
  labels: tuple[int, ...] | None = None
  mask: bytes | None = None

  @classmethod
  def multilabel(cls, image: bytes | HostArray, labels: Sequence[int]) -> Record:
    """Returns an example with these classes."""
    return cls(image, int(labels[0]) if len(labels) else -1, tuple(int(c) for c in labels))


class Source(Protocol):
  """A split, or a part of one, in a fixed order."""
  name: str
  class_names: tuple[str, ...]
  digest: str
  """Identity of the data: it changes with the number, the sizes and the labels of the examples."""

  def __len__(self) -> int:
    ...

  def __getitem__(self, index: int) -> Record:
    ...

  def label(self, index: int) -> int:
    """Returns the class of an example, if possible without reading its image."""
    ...

  def describe(self, index: int) -> str:
    """Returns a name by which a person finds the example."""
    ...


def title(source: Source) -> str:
  """Returns what a person reads of a source: where its images are, and which part of them; `name` is its identity."""
  return getattr(source, 'title', '') or source.name


def most_labels(source: Source) -> int:
  """Returns 0 if every image has one class; else the largest number of classes of an image, or `UNKNOWN`."""
  return getattr(source, 'most_labels', 0)


def has_masks(source: Source) -> bool:
  """Returns whether the images of a source have masks, which give each pixel a class, in place of classes."""
  return hasattr(find_origin(source, 0)[0] if len(source) else source, 'describe_mask')


class Part(NamedTuple):
  """Examples `start` to `stop` of a source."""
  source: Source
  start: int
  stop: int


class Derived:
  """A source whose examples are those of others; subclasses define `origin`, which maps indexes to theirs."""

  def origin(self, index: int) -> tuple[Source, int]:
    """Returns the source of an example, and its index there."""
    raise NotImplementedError

  def __getitem__(self, index: int) -> Record:
    source, place = self.origin(index)
    return source[place]

  def label(self, index: int) -> int:
    source, place = self.origin(index)
    return source.label(place)

  def describe(self, index: int) -> str:
    source, place = self.origin(index)
    return source.describe(place)


class ConcatSource(Derived):
  """Parts of sources, one after the other, as one source."""

  def __init__(self, parts: Sequence[Part], *, name: str, title: str = '') -> None:
    self.name, self.title, self.parts = name, title, tuple(parts)
    self.class_names = parts[0].source.class_names
    self._starts = [sum(p.stop - p.start for p in parts[:i]) for i in range(len(parts) + 1)]
    text = ' '.join(f'{p.source.digest}[{p.start}:{p.stop}]' for p in parts)
    self.digest = hashlib.sha256(text.encode()).hexdigest()

  def __len__(self) -> int:
    return self._starts[-1]

  @property
  def most_labels(self) -> int:
    counts = [most_labels(part.source) for part in self.parts]
    return UNKNOWN if UNKNOWN in counts else max(counts)

  def origin(self, index: int) -> tuple[Source, int]:
    if not 0 <= index < len(self):
      raise IndexError(f'{self.name}: expected an index below {len(self):,}, got {index}')
    number = bisect.bisect_right(self._starts, index) - 1
    part = self.parts[number]
    return part.source, part.start + index - self._starts[number]


def shard_sizes(source: Source) -> list[int] | None:
  """Returns the number of examples in each shard of a source, in order; None if it does not consist of shards."""
  if isinstance(source, ConcatSource):
    inner = [(shard_sizes(part.source), part) for part in source.parts]
    return None if any(sizes is None for sizes, _ in inner) else [
        num for sizes, part in inner for num in _clipped(sizes or [], part.start, part.stop)]
  if isinstance(source, Relabeled):
    return shard_sizes(source.origin(0)[0])
  return getattr(source, 'shard_sizes', None)


def _clipped(sizes: Sequence[int], start: int, stop: int) -> Iterator[int]:
  """Yields the number of examples of each shard between two places; shards without any are left out."""
  first = 0
  for size in sizes:
    if (num := min(stop, first + size) - max(start, first)) > 0:
      yield num
    first += size


class RowGroups(NamedTuple):
  """The row groups of a source, each of which is read as a whole.

  sizes: examples of each, in order, `[N] i64`.
  num_bytes: of the images of each, decompressed, `[N] i64`.
  held_bytes: of the row groups that a process may hold.
  """
  sizes: HostArray
  num_bytes: HostArray
  held_bytes: int

  @property
  def num_mixed(self) -> int:
    """How many row groups are shuffled at a time, at least one: a quarter of the memory is for those that follow."""
    return max(1, min(len(self.sizes), int(0.75 * self.held_bytes / max(1., float(self.num_bytes.mean())))))


  def take(self, sizes: HostArray) -> RowGroups:
    """Returns those of a part that has so many examples of each, `[N] i64`."""
    return self._replace(sizes=sizes[sizes > 0], num_bytes=self.num_bytes[sizes > 0])


class Subset(Derived):
  """The examples `rows` of a source."""

  def __init__(self, source: Source, rows: Sequence[int] | HostArray, *, name: str, title: str = '') -> None:
    self.name, self.title, self.class_names, self._source = name, title, source.class_names, source
    self._rows = np.asarray(rows, np.int64)
    self.digest = hashlib.sha256(source.digest.encode() + self._rows.tobytes()).hexdigest()

  def __len__(self) -> int:
    return len(self._rows)

  @property
  def most_labels(self) -> int:
    return most_labels(self._source)

  def origin(self, index: int) -> tuple[Source, int]:
    return self._source, int(self._rows[index])


class Relabeled(Derived):
  """A source whose class c has the number `labels[c]`, `labels [C] i32`, among other class names."""

  def __init__(self, source: Source, labels: HostArray, class_names: tuple[str, ...]) -> None:
    self.name, self.title, self.class_names = source.name, title(source), class_names
    self._source, self._labels = source, labels
    self.digest = hashlib.sha256(f'{source.digest} {labels.tolist()}'.encode()).hexdigest()

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index: int) -> Record:
    record = self._source[index]
    if record.labels is not None:
      return Record.multilabel(record.image, [int(self._labels[c]) for c in record.labels])
    return record._replace(label=int(self._labels[record.label]))

  def label(self, index: int) -> int:
    label = self._source.label(index)
    return int(self._labels[label]) if label >= 0 else label

  @property
  def most_labels(self) -> int:
    return most_labels(self._source)

  def origin(self, index: int) -> tuple[Source, int]:
    return self._source, index


def row_groups(source: Source) -> RowGroups | None:
  """Returns the row groups of a source or of a part of one; None if its examples are read one by one."""
  if isinstance(source, ConcatSource):
    parts = [_clipped_groups(row_groups(part.source), part) for part in source.parts]
    found = [part for part in parts if part]
    return None if len(found) < len(parts) else RowGroups(
        np.concatenate([one.sizes for one in found]), np.concatenate([one.num_bytes for one in found]),
        found[0].held_bytes)
  if isinstance(source, Relabeled):
    return row_groups(source._source)
  if isinstance(source, Subset):
    inner, rows = row_groups(source._source), source._rows
    if inner is None or (np.diff(rows) <= 0).any():
      return None
    return inner.take(np.diff(np.searchsorted(rows, np.append(0, np.cumsum(inner.sizes)))))
  return getattr(source, 'row_groups', None)


def _clipped_groups(found: RowGroups | None, part: Part) -> RowGroups | None:
  if found is None:
    return None
  ends = np.cumsum(found.sizes)
  return found.take(np.minimum(ends, part.stop) - np.maximum(ends - found.sizes, part.start))


def take_first(source: Source, num: int) -> Source:
  """Returns the first `num` examples of a source, or all if it has fewer; 0 = all."""
  if not 0 < num < len(source):
    return source
  return Subset(source, np.arange(num), name=f'{source.name}[:{num}]')


def find_origin(source: Source, index: int) -> tuple[Source, int]:
  """Returns the stored source of an example, and its index there, through all parts and subsets."""
  while isinstance(source, Derived):
    source, index = source.origin(index)
  return source, index


def read_labels(source: Source) -> HostArray:
  """Returns the class of each example, `[S] i32`; all records are read if the source stores records.

  Raises:
    UserError: a record is damaged, so that its class is not known, or it cannot be read.
  """
  found = np.empty(len(source), np.int32)
  for index in range(len(source)):
    try:
      found[index] = retrying.retried(lambda: source.label(index),  # noqa: B023
                                      lambda: f'reading {source.describe(index)}')  # noqa: B023
    except (BadImage, OSError) as error:
      raise reading_error(error, source, index, expected='its class') from error
  return found


def reading_error(error: BadImage | OSError, source: Source, index: int, *,
                  expected: str) -> UserError | TemporaryError:
  """Returns the error about an example that cannot be read: its record is damaged, or an error of the system."""
  if isinstance(error, OSError):
    return access.unreadable(error, source.describe(index))
  return UserError(f'{source.describe(index)}: expected {expected}, got a damaged record ({error}). Copy or prepare '
                   'the dataset again.')
