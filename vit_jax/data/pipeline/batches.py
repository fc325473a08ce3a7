"""Batches of one process as pure functions of their number: decoded from a source, or gathered from memory.

Batch n of size B has examples n * B ... (n + 1) * B - 1 of the global stream, for any number of processes; each process
reads and makes only the rows of its shard. The classes pickle, and loader processes run them.
"""
from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from concurrent import futures
from typing import NamedTuple

import numpy as np

from vit_jax.core import retrying
from vit_jax.core.errors import UserError
from vit_jax.core.types import Batch, HostArray, Shard
from vit_jax.data.files import access
from vit_jax.data.image.headers import BadImage
from vit_jax.data.image.transform import EvalTransform, Example, Shapes, Transform, eval_shapes
from vit_jax.data.pipeline import ahead, order, shared
from vit_jax.data.source import Source, title
from vit_jax.data.text.captions import AnyTexts

MAX_TRIES = 1_000  # bad images in a row
_CHUNK = 64        # examples that a thread decodes at a time
_POSITIONS = 4096  # of the order that are computed together


class DecodedExample(NamedTuple):
  """An example; `bad` if it replaces one that cannot be decoded."""
  example: Example
  bad: bool


class DecodedSource(NamedTuple):
  """A complete source in memory: `image [S, H, W, 3] u8, label [S] i32, box [S, 4] f32, bad [S] bool`.

  If images may have several classes, also `label_list [S, T] i32`.
  """
  image: HostArray
  label: HostArray
  box: HostArray
  bad: HostArray
  label_list: HostArray | None = None

  def rows(self, index: HostArray) -> Batch:
    """Returns the examples at `index [B]`."""
    return {name: x[index] for name, x in self._asdict().items() if x is not None}


def reason_bad(source: Source, index: int, transform: EvalTransform, texts: AnyTexts | None = None) -> str:
  """Returns why an example cannot be used, with its texts if there are some; '' if it can."""
  def read() -> None:
    example = transform(source[index])
    if texts:
      texts.add(example, index, 0)

  try:
    retrying.retried(read, lambda: f'reading {source.describe(index)}')
  except BadImage as error:
    return str(error)
  except (OSError, MemoryError) as error:
    raise access.unreadable(error, source.describe(index)) from error
  return ''


def decode_or_next(source: Source, index: int, transform: Callable[[int], Example],
                   within: range | None = None) -> DecodedExample:
  """Returns the example at `index`, or, if it cannot be decoded, the next good one in the order of the source.

  Only examples `within` a range are taken, by default all.

  Raises:
    UserError: `MAX_TRIES` examples in a row, or all, are bad; or the data cannot be read.
  """
  within = within or range(len(source))
  tries = min(len(within), MAX_TRIES)
  for more in range(tries):
    place = within[(index - within.start + more) % len(within)]
    try:
      return DecodedExample(retrying.retried(lambda: transform(place),  # noqa: B023
                                             lambda: f'reading {source.describe(place)}'), more > 0)  # noqa: B023
    except BadImage as error:
      reason = error
    except (OSError, MemoryError) as error:
      raise access.unreadable(error, source.describe(place)) from error
  raise UserError(f'{title(source)}: expected images that can be decoded, got {tries} bad images in a row, starting at '
                  f'{source.describe(index)}. The last reason: {reason}')


@dataclasses.dataclass(frozen=True)
class TrainBatches:
  """Maps a number to the training batch `image label index box bad`, decoded and augmented on the host.

  A recipe with views has those in place of image and box, as `shapes` defines. With `texts` it also has `text` and
  `text_mask`. With a `period` the first so many positions are repeated, with the same crops.
  """
  source: Source
  transform: Transform
  visit: order.Visit
  shapes: Shapes
  seed: int
  batch_size: int
  shard: Shard
  texts: AnyTexts | None = None
  period: int = 0

  def __call__(self, number: int, allocate: shared.Allocate = shared.new) -> Batch:
    positions = number * self.batch_size + self.shard.rows(self.batch_size)
    positions = positions % self.period if self.period else positions
    indexes = self.visit(positions)
    batch = _empty(len(indexes), self.shapes, allocate, zero=False) | {'index': indexes}
    rngs, source, transform = order.ExampleRngs(self.seed), self.source, self.transform
    numbers, places = positions.tolist(), indexes.tolist()
    for row in ahead.rows(source, places):
      within = self.visit.shard(places[row]) if isinstance(self.visit, order.HostShards) else None

      def make(index: int, position: int = numbers[row]) -> Example:
        example = transform(source[index], rngs.at(position))
        return self.texts.add(example, index, position) if self.texts else example

      _write(batch, row, decode_or_next(source, places[row], make, within))
    return batch


@dataclasses.dataclass(frozen=True)
class NativeBatches:
  """Maps a number to a training batch of images at their own aspect, whose number of tokens is drawn for each batch.

  kinds: of each number of tokens, what makes its batches; all have the same examples.
  seed: of the draw.
  """
  kinds: tuple[TrainBatches, ...]
  seed: int

  def __call__(self, number: int, allocate: shared.Allocate = shared.new) -> Batch:
    return self.kinds[order.draw_length(self.seed, number, len(self.kinds))](number, allocate)


@dataclasses.dataclass(frozen=True)
class EvalBatches:
  """Maps a number to an evaluation batch; rows beyond the end have mask 0, as do bad images."""
  source: Source
  transform: EvalTransform
  batch_size: int
  shard: Shard

  def __call__(self, number: int, allocate: shared.Allocate = shared.new) -> Batch:
    positions = number * self.batch_size + self.shard.rows(self.batch_size)
    batch = _empty(len(positions), _shapes(self.transform), allocate)
    batch['index'], batch['mask'] = _eval_rows(positions, num_examples=len(self.source))
    valid = np.flatnonzero(batch['mask'])
    places = batch['index'][valid].tolist()
    for number in ahead.rows(self.source, places):
      row, index = int(valid[number]), places[number]
      try:
        example = retrying.retried(lambda: self.transform(self.source[index]),  # noqa: B023
                                   lambda: f'reading {self.source.describe(index)}')  # noqa: B023
        _write(batch, row, DecodedExample(example, False))
      except BadImage:
        batch['mask'][row], batch['bad'][row] = 0., True
        with contextlib.suppress(BadImage):  # of a damaged record the class is not known
          batch['label'][row] = self.source.label(index)
      except (OSError, MemoryError) as error:
        raise access.unreadable(error, self.source.describe(index)) from error
    return batch


class MemoryTrainBatches:
  """Maps a number to a training batch gathered from memory; the device augments it.

  The order is computed for several batches at a time, as most of its time does not depend on their number.
  """

  def __init__(self, decoded: DecodedSource, visit: order.Visit, batch_size: int, shard: Shard) -> None:
    self._decoded, self._visit, self._batch_size, self._rows = decoded, visit, batch_size, shard.rows(batch_size)
    self._num_ahead = max(1, _POSITIONS // max(1, len(self._rows)))
    self._first, self._indexes = -1, np.zeros((0, 0), np.int64)

  def __call__(self, number: int) -> Batch:
    first = number // self._num_ahead * self._num_ahead
    if first != self._first:
      positions = np.arange(first, first + self._num_ahead)[:, None] * self._batch_size + self._rows
      self._first, self._indexes = first, self._visit(positions.ravel()).reshape(positions.shape)
    indexes = self._indexes[number - first]
    return self._decoded.rows(indexes) | {'index': indexes}


@dataclasses.dataclass(frozen=True)
class MemoryEvalBatches:
  """Maps a number to an evaluation batch gathered from memory."""
  decoded: DecodedSource
  batch_size: int
  shard: Shard

  def __call__(self, number: int) -> Batch:
    positions = number * self.batch_size + self.shard.rows(self.batch_size)
    index, mask = _eval_rows(positions, num_examples=len(self.decoded.label))
    batch = self.decoded.rows(index)
    batch['bad'] = batch['bad'] & (mask > 0)
    batch['image'][(mask == 0) | batch['bad']] = 0
    return batch | {'index': index, 'mask': mask * ~batch['bad']}


def decode_all(source: Source, transform: EvalTransform, *, threads: int) -> DecodedSource:
  """Decodes a complete source once. A bad image is replaced by the next good one, and marked in `bad`."""
  batch = _empty(len(source), _shapes(transform))

  def fill(start: int) -> None:
    numbers = range(start, min(start + _CHUNK, len(source)))
    for place in ahead.rows(source, numbers):
      _write(batch, numbers[place], decode_or_next(source, numbers[place], lambda i: transform(source[i])))
  with futures.ThreadPoolExecutor(threads) as pool:
    for done in [pool.submit(fill, start) for start in range(0, len(source), _CHUNK)]:
      done.result()
  return DecodedSource(batch['image'], batch['label'], batch['box'], batch['bad'], batch.get('label_list'))


def _eval_rows(positions: HostArray, *, num_examples: int) -> tuple[HostArray, HostArray]:
  """Returns `index [B] i32`, 0 for padding, and `mask [B] f32`."""
  inside = positions < num_examples
  return np.where(inside, positions, 0).astype(np.int32), inside.astype(np.float32)


def _shapes(transform: EvalTransform) -> Shapes:
  return eval_shapes(transform.image_px, max_labels=transform.max_labels, num_channels=transform.recipe.channels,
                     has_grid=transform.recipe.eval_native_patch > 0)


def _empty(num: int, shapes: Shapes, allocate: shared.Allocate = shared.new, *, zero: bool = True) -> Batch:
  """Returns the arrays of a batch of `num` examples, and `bad [num] bool`; they are 0 if `zero`."""
  specs = {name: ((num, *shape), dtype) for name, (shape, dtype) in shapes.items()}
  return allocate(specs | {'bad': ((num,), bool)}, zero=zero)


def _write(batch: Batch, row: int, decoded: DecodedExample) -> None:
  for name, value in decoded.example.items():
    batch[name][row] = value
  batch['bad'][row] = decoded.bad
