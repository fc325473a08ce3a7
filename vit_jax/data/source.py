"""The contract of a source: random access to stored examples in a fixed order; and parts of sources.

`data/opening.py` opens sources by name. Then the loader calls `read` with the rows of a batch, in any order and in
several threads or processes, and calls `labels`, `captions` and `describe` for single rows. A source must pickle to few
bytes, because loader processes get a copy. A source does not depend on recipes, batches or the training order.

The formats in `data/formats` implement `Source`. `Parts` makes one source from parts of other sources: a slice, a
hold-out or a mixture. All functions of this module take any source. A source that is not a `Parts` is called a stored
source. Optional attributes of a source: `title`, `own_files`, `describe_mask`, `caption_column` and `row_groups`.
"""
from __future__ import annotations

import bisect
import functools
import hashlib
import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from vit_jax.core import failures
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.core.types import HostArray
from vit_jax.data.image.headers import BadImage

log = logging.getLogger('vit_jax.data')

UNKNOWN = -1
"""Value of `most_labels` if images have several labels, and the largest number is only known after reading them all."""
UNLABELED = ('unlabeled',)
"""The class names of a source whose images have no labels."""
_NUM_CHECKED_CAPTIONS = 100  # first examples that are read to see whether a source has captions


class Record(NamedTuple):
  """A stored example: the image, encoded or `[H, W, 3 or 1] u8`; its classes; and its encoded mask, None without."""
  image: bytes | HostArray
  labels: tuple[int, ...] = ()
  mask: bytes | None = None

  @property
  def label(self) -> int:
    """The first class; -1 if there is none."""
    return self.labels[0] if self.labels else -1


class Source(Protocol):
  """A split, or a part of a split, in a fixed order. The position of an example, from 0, is called its row.

  name: identity of the source for programs, WHERE/SPLIT; the function `title` returns a name for people.
  digest: identity of the data; the digest changes with the number, the sizes and the labels of the examples.
  most_labels: 0 if every example has one class; else the largest number of classes of an example, or `UNKNOWN`.
  """
  name: str
  class_names: tuple[str, ...]
  digest: str

  @property
  def most_labels(self) -> int:
    ...

  def __len__(self) -> int:
    ...

  def read(self, rows: Sequence[int]) -> Iterator[Record]:
    """Yields the stored examples of `rows`, in this order. Raises BadImage if one is damaged, OSError if unreadable."""
    ...

  def labels(self, row: int) -> tuple[int, ...]:
    """Returns the classes of an example, if possible without reading the image. Raises BadImage if damaged."""
    ...

  def captions(self, row: int) -> tuple[str, ...]:
    """Returns the texts of an example; () if there are none. Raises BadImage if the example is damaged."""
    ...

  def describe(self, row: int) -> str:
    """Returns where a person finds the example, such as the path of its file, for messages."""
    ...


class Rows:
  """Base class of a source that reads examples one at a time; a subclass adds `example` and the rest of `Source`."""
  name: str
  most_labels: int = 0

  def example(self, row: int) -> Record:
    """Returns a stored example. Raises BadImage if the example is damaged, OSError if the file cannot be read."""
    raise NotImplementedError

  def read(self, rows: Sequence[int]) -> Iterator[Record]:
    """Yields the stored examples of `rows`, in this order."""
    return map(self.example, rows)

  def captions(self, row: int) -> tuple[str, ...]:
    """Returns (), for a source without texts."""
    del row
    return ()

  def describe(self, row: int) -> str:
    """Returns the name of the source and the number of the example."""
    return f'{self.name}[{row}]'


class Part(NamedTuple):
  """Some examples of a source.

  rows: the rows of the examples in the source, as a range or `[N] i64`; None = all rows.
  labels: `labels[i]` is the new number of class i of the source; None = the numbers stay.
  """
  source: Source
  rows: range | HostArray | None = None
  labels: tuple[int, ...] | None = None

  @property
  def num_examples(self) -> int:
    return len(self.source) if self.rows is None else len(self.rows)

  @property
  def digest(self) -> str:
    """Identity of the examples, apart from a range of rows: `Parts` adds the range to its own digest."""
    digest = self.source.digest
    if self.labels is not None:
      digest = _sha256(f'{digest} {list(self.labels)}'.encode())
    return _sha256(digest.encode() + self.rows.tobytes()) if isinstance(self.rows, np.ndarray) else digest

  def renumbered(self, labels: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the new numbers of classes of the source."""
    return labels if self.labels is None else tuple(self.labels[label] for label in labels)


class Parts:
  """Parts of sources, one after the other, as one source: slices, hold-outs, mixtures, and renumbered classes."""

  def __init__(self, parts: Sequence[Part], *, name: str = '', title: str = '',
               class_names: tuple[str, ...] | None = None) -> None:
    """Joins parts. By default, the name, the title and the classes are those of the first source."""
    first = parts[0].source
    self.parts = tuple(part if part.rows is None or isinstance(part.rows, range)
                       else part._replace(rows=np.asarray(part.rows, np.int64)) for part in parts)
    self.name = name or first.name
    self.title = title or ('' if name else getattr(first, 'title', ''))
    self.class_names = first.class_names if class_names is None else class_names
    self._starts = np.cumsum([0, *(part.num_examples for part in self.parts)]).tolist()  # first rows, and the end
    if len(parts) == 1 and not isinstance(parts[0].rows, range):
      self.digest = self.parts[0].digest
    else:
      spans = [part.rows if isinstance(part.rows, range) else range(part.num_examples) for part in self.parts]
      self.digest = _sha256(' '.join(f'{part.digest}[{span.start}:{span.stop}]' for part, span in zip(
          self.parts, spans, strict=True)).encode())

  def __len__(self) -> int:
    return int(self._starts[-1])

  @property
  def most_labels(self) -> int:
    counts = [part.source.most_labels for part in self.parts]
    return UNKNOWN if UNKNOWN in counts else max(counts)

  def find(self, row: int) -> tuple[Part, int]:
    """Returns the part that has an example, and the row of the example in the source of that part."""
    if not 0 <= row < len(self):
      raise IndexError(f'{self.name}: expected an index below {len(self):,}, got {row}')
    number = bisect.bisect_right(self._starts, row) - 1
    part, position = self.parts[number], row - self._starts[number]
    return part, position if part.rows is None else int(part.rows[position])

  def read(self, rows: Sequence[int]) -> Iterator[Record]:
    """Yields the stored examples of `rows`, in this order. The source of each part reads its rows in one call."""
    located = [self.find(row) for row in rows]
    records_by_part = {id(part): part.source.read([part_row for other, part_row in located if other is part])
                       for part, _ in located}
    for part, _ in located:
      record = next(records_by_part[id(part)])
      yield record if part.labels is None else record._replace(labels=part.renumbered(record.labels))

  def labels(self, row: int) -> tuple[int, ...]:
    part, part_row = self.find(row)
    return part.renumbered(part.source.labels(part_row))

  def captions(self, row: int) -> tuple[str, ...]:
    part, part_row = self.find(row)
    return part.source.captions(part_row)

  def describe(self, row: int) -> str:
    part, part_row = self.find(row)
    return part.source.describe(part_row)


def _count_in_groups(part: Part, sizes: Sequence[int] | HostArray) -> HostArray:
  """Returns the number of examples of a part in each row group, `[N] i64`, given the `sizes` of the groups."""
  ends = np.cumsum(sizes)
  if isinstance(part.rows, np.ndarray):  # the rows ascend
    return np.diff(np.searchsorted(part.rows, np.append(0, ends)))
  rows = range(part.num_examples) if part.rows is None else part.rows
  return np.maximum(0, np.minimum(ends, rows.stop) - np.maximum(ends - sizes, rows.start))


def _sha256(content: bytes) -> str:
  return hashlib.sha256(content).hexdigest()


def take(source: Source, rows: Sequence[int] | HostArray, *, name: str, title: str = '') -> Parts:
  """Returns a source of the examples `rows` of a source."""
  return Parts([Part(source, rows if isinstance(rows, range) else np.asarray(rows, np.int64))], name=name, title=title)


def take_first(source: Source, num: int) -> Source:
  """Returns a source of the first `num` examples of a source, or of all examples if there are fewer; 0 = all."""
  return take(source, np.arange(num), name=f'{source.name}[:{num}]') if 0 < num < len(source) else source


@functools.cache
def warn_once(text: str) -> None:
  """Logs a warning unless this process has logged the same text before: a command opens a source several times."""
  log.warning('%s', text)


def title(source: Source) -> str:
  """Returns the name of a source for messages: where the images are, and which part of them; `name` by default."""
  return getattr(source, 'title', '') or source.name


def read_one(source: Source, row: int) -> Record:
  """Returns a stored example. Raises BadImage if the example is damaged, and OSError if the file cannot be read."""
  return next(iter(source.read((row,))))


def first_label(source: Source, row: int) -> int:
  """Returns the first class of an example; -1 if there is none. Raises BadImage if the example is damaged."""
  return next(iter(source.labels(row)), -1)


def find_origin(source: Source, row: int) -> tuple[Source, int]:
  """Returns the stored source of an example, and the row of the example in the stored source."""
  while isinstance(source, Parts):  # a `Parts` may consist of other `Parts`
    part, row = source.find(row)
    source = part.source
  return source, row


def origins(source: Source) -> list[Source]:
  """Returns the stored sources of the examples, each once."""
  if not isinstance(source, Parts):
    return [source]
  return list({id(stored): stored for part in source.parts for stored in origins(part.source)}.values())


def has_masks(source: Source) -> bool:
  """Returns whether each image of a source has a mask, with a class for each pixel, in place of labels."""
  return hasattr(origins(source)[0], 'describe_mask')


def has_captions(source: Source) -> bool:
  """Returns whether a stored source has captions: it names their column, or some of the first examples have one."""
  column: str | None = getattr(source, 'caption_column', None)
  if column is not None:
    return bool(column)
  try:
    return any(source.captions(row) for row in range(min(len(source), _NUM_CHECKED_CAPTIONS)))
  except (BadImage, OSError):  # the caller will read the captions, and then report the error
    return True


class RowGroups(NamedTuple):
  """The row groups of a source of Parquet files; each group is read as a whole.

  sizes: the number of examples of each group, in the order of the source, `[N] i64`.
  num_bytes: the decompressed bytes of the images of each group, `[N] i64`.
  held_bytes: the most bytes of row groups that a process may hold in memory.
  """
  sizes: HostArray
  num_bytes: HostArray
  held_bytes: int

  @property
  def num_mixed(self) -> int:
    """Number of row groups shuffled together, in 3/4 of `held_bytes`; the last quarter is for groups read ahead."""
    return max(1, min(len(self.sizes), int(0.75 * self.held_bytes / max(1., float(self.num_bytes.mean())))))

  def take(self, sizes: HostArray) -> RowGroups:
    """Returns the row groups of a part; `sizes [N] i64` has the number of examples of the part in each group."""
    return self._replace(sizes=sizes[sizes > 0], num_bytes=self.num_bytes[sizes > 0])


def row_groups(source: Source) -> RowGroups | None:
  """Returns the row groups of a source; None if there are none, or if the rows of a part do not ascend."""
  if not isinstance(source, Parts):
    return getattr(source, 'row_groups', None)
  groups_of_parts = list[RowGroups]()
  for part in source.parts:
    groups = row_groups(part.source)
    if groups is None or (isinstance(part.rows, np.ndarray) and (np.diff(part.rows) <= 0).any()):
      return None
    groups_of_parts.append(groups.take(_count_in_groups(part, groups.sizes)))
  return RowGroups(np.concatenate([groups.sizes for groups in groups_of_parts]),
                   np.concatenate([groups.num_bytes for groups in groups_of_parts]), groups_of_parts[0].held_bytes)


def read_labels(source: Source) -> HostArray:
  """Returns the first class of each example, `[S] i32`; -1 = no class. Some sources read all records for this.

  Raises UserError or TemporaryError if a record is damaged or cannot be read.
  """
  labels = np.empty(len(source), np.int32)
  for row in range(len(source)):
    try:
      labels[row] = failures.retried(lambda: first_label(source, row),  # noqa: B023
                                    lambda: f'reading {source.describe(row)}')  # noqa: B023
    except (BadImage, OSError) as error:
      raise reading_error(error, source, row, expected='its class') from error
  return labels


def reading_error(error: BadImage | OSError, source: Source, row: int, *, expected: str) -> UserError | TemporaryError:
  """Returns the error to raise in place of `error`, which occurred while the source read the example at `row`."""
  if isinstance(error, OSError):
    return failures.unreadable(error, source.describe(row))
  return UserError(f'{source.describe(row)}: expected {expected}, got a damaged record ({error}). Copy or prepare '
                   'the dataset again.')
