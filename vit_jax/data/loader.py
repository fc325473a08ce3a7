"""Dataloaders for training and evaluation: each batch is a pure function of its number.

Batch n of size B has the examples at positions n * B ... (n + 1) * B - 1 of the stream that `order.py` defines, for any
number of threads, loader processes and hosts. Each host reads and decodes only the rows of its shard. A run resumes
from the step number alone.

`jobs/build.py` calls `fits_in_memory`, then `train_loader`; `evaluate/` calls `eval_loader`. Both return an object with
`batches` and `close`. Inside, `Train` and `Eval` make a batch from a source; `workers.batches` calls them ahead of the
step, in threads or processes. `MemoryTrain` and `MemoryEval` take rows from images that `decode_all` has decoded once.
This module knows no network, no device and no objective.
"""
from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vit_jax.config import schema
from vit_jax.core import failures
from vit_jax.core.contracts import LoaderInfo
from vit_jax.core.errors import UserError
from vit_jax.core.types import Batch, HostArray, Shard
from vit_jax.data import open_files, order, shared, windows
from vit_jax.data.formats.mixture import Mixture
from vit_jax.data.image import transform as transforms
from vit_jax.data.image.headers import BadImage
from vit_jax.data.image.transform import EvalTransform, Example, Shapes, Transform
from vit_jax.data.source import Record, Source, first_label, read_one, title
from vit_jax.data.workers import Workers, batches, check_memory, choose_processes, machine

if TYPE_CHECKING:  # few runs add labels of a teacher or texts to their batches
  from vit_jax.data.answers import AddAnswers
  from vit_jax.data.text.captions import Texts

log = logging.getLogger('vit_jax.data')

MAX_TRIES = 1_000               # bad images in a row
MEMORY_LIMIT_BYTES = 2 * 2**30  # schema.InMemory.AUTO
_CHUNK = 64                     # examples that a thread decodes at a time for memory
_POSITIONS = 4096               # of the order that are computed together for memory
_LAST_STEP = 2**62              # training has no end
_MOST_EVALUATED = 2**31 - 1     # examples of an evaluation: their indexes are i32, also on devices
_NUM_NAMED = 5                  # bad images in the error message

StartBatches = Callable[[range], Iterator[Batch]]
"""Returns an iterator over the batches with these numbers."""
MakeExample = Callable[[int, Record], Example]
"""Makes an example from its index in the source and its stored record. Raises BadImage if it cannot be used."""


class Kind(NamedTuple):
  """How the examples of a batch are made. Images at their own aspect ratio have one kind for each number of tokens."""
  transform: Transform
  shapes: Shapes


@dataclasses.dataclass(frozen=True)
class Train:
  """Maps a step to the training batch `image label index box bad`, decoded and augmented on the host.

  With a recipe of several views, the batch has the views in place of `image` and `box`. With `texts` it also has `text`
  and `text_mask`. The kind of a batch is drawn from `kinds` for its step; all kinds have the same examples. A bad image
  is replaced by the next good one, and its row is marked in `bad`.
  """
  source: Source
  kinds: tuple[Kind, ...]
  visit: order.Visit
  seed: int
  batch_size: int
  shard: Shard
  texts: Texts | None = None

  def __call__(self, step: int, allocate: shared.Allocate = shared.allocate_private) -> Batch:
    positions = step * self.batch_size + self.shard.rows(self.batch_size)
    indexes = self.visit(positions)
    transform, shapes = self.kinds[order.draw_length_index(self.seed, step, len(self.kinds))]
    batch = allocate(_specs(len(indexes), shapes)) | {'index': indexes}
    rngs, texts, rows = order.ExampleRngs(self.seed), self.texts, indexes.tolist()
    for row, (index, position, stored) in enumerate(zip(
        rows, positions.tolist(), _read(self.source, rows), strict=True)):
      def make(index: int, record: Record, position: int = position) -> Example:
        example = transform(record, rngs.at(position))
        return texts.add(example, index, position) if texts else example

      try:
        _write(batch, row, _make(self.source, index, stored, make), bad=False)
      except BadImage as error:
        _write(batch, row, _make_next(self.source, index, error, make), bad=True)
    return batch


@dataclasses.dataclass(frozen=True)
class Eval:
  """Maps a number to an evaluation batch `image label index box mask bad`.

  Rows beyond the end of the source have mask 0, as do bad images; their arrays are 0.
  """
  source: Source
  transform: EvalTransform
  batch_size: int
  shard: Shard

  def __call__(self, number: int) -> Batch:
    index, mask = _eval_rows(number * self.batch_size + self.shard.rows(self.batch_size), len(self.source))
    batch = shared.allocate_private(_specs(len(index), self.transform.shapes)) | {'index': index, 'mask': mask}
    valid = np.flatnonzero(mask).tolist()
    for row, stored in zip(valid, _read(self.source, index[valid].tolist()), strict=True):
      place = int(index[row])
      try:
        _write(batch, row, _make(self.source, place, stored, lambda _, record: self.transform(record)), bad=False)
      except BadImage:
        mask[row], batch['bad'][row] = 0., True
        with contextlib.suppress(BadImage):  # the class of a damaged record is not known
          batch['label'][row] = first_label(self.source, place)
    return batch


class MemoryTrain:
  """Maps a step to a training batch gathered from memory; the device augments it.

  The order is computed for several batches at a time, as most of its time does not depend on their number.
  """

  def __init__(self, decoded: Batch, visit: order.Visit, batch_size: int, shard: Shard) -> None:
    self._decoded, self._visit, self._batch_size, self._rows = decoded, visit, batch_size, shard.rows(batch_size)
    self._num_ahead = max(1, _POSITIONS // max(1, len(self._rows)))
    self._first, self._indexes = -1, np.zeros((0, 0), np.int64)

  def __call__(self, step: int) -> Batch:
    first = step // self._num_ahead * self._num_ahead
    if first != self._first:
      positions = np.arange(first, first + self._num_ahead)[:, None] * self._batch_size + self._rows
      self._first, self._indexes = first, self._visit(positions.ravel()).reshape(positions.shape)
    indexes = self._indexes[step - first]
    return {name: x[indexes] for name, x in self._decoded.items()} | {'index': indexes}


@dataclasses.dataclass(frozen=True)
class MemoryEval:
  """Maps a number to an evaluation batch gathered from memory."""
  decoded: Batch
  batch_size: int
  shard: Shard

  def __call__(self, number: int) -> Batch:
    index, mask = _eval_rows(number * self.batch_size + self.shard.rows(self.batch_size), len(self.decoded['label']))
    batch = {name: x[index] for name, x in self.decoded.items()}
    batch['bad'] = batch['bad'] & (mask > 0)
    batch['image'][(mask == 0) | batch['bad']] = 0
    return batch | {'index': index, 'mask': mask * ~batch['bad']}


def decode_all(source: Source, transform: EvalTransform, *, threads: int) -> Batch:
  """Decodes a complete source once: `image [S, H, W, 3] u8, label [S] i32, box [S, 4] f32, bad [S] bool`.

  If images may have several classes, also `label_list [S, T] i32`. A bad image is replaced by the next good one, and
  marked in `bad`.
  """
  num, shapes = len(source), transform.shapes
  size = max(1, min(_CHUNK, num))  # a split may be empty
  make = Train(source, (Kind(lambda record, rng: transform(record), shapes),), lambda positions: positions % num,
               seed=0, batch_size=size, shard=Shard((0,), 1))
  whole = shared.allocate_private(_specs(num, shapes))
  with futures.ThreadPoolExecutor(open_files.num_threads(threads)) as pool:
    for start, batch in zip(range(0, num, size), pool.map(make, range(-(-num // size))), strict=True):
      for name, array in whole.items():
        array[start:start + size] = batch[name][:num - start]
  return whole


def reason_bad(source: Source, index: int, transform: EvalTransform, texts: Texts | None = None) -> str:
  """Returns why an example cannot be used, with its texts if there are some; '' if it can."""
  def make(index: int, record: Record) -> Example:
    example = transform(record)
    return texts.add(example, index, 0) if texts else example

  try:
    _make(source, index, None, make)
  except BadImage as error:
    return str(error)
  return ''


def _read(source: Source, rows: Sequence[int]) -> Iterator[Record | BadImage | None]:
  """Yields for each row its record, or the reason why it is bad; None after a system error, so that it is reread."""
  start = 0
  while start < len(rows):
    try:
      for record in source.read(rows[start:]):
        start += 1
        yield record
    except BadImage as error:
      start += 1
      yield error
    except (OSError, MemoryError):
      start += 1
      yield None


def _make(source: Source, index: int, stored: Record | BadImage | None, make: MakeExample) -> Example:
  """Returns the example made from what `_read` yields for it. After a system error, reading is retried for a while.

  Raises:
    BadImage: the example cannot be used.
    UserError, TemporaryError: it cannot be read.
  """
  if isinstance(stored, BadImage):
    raise stored
  if stored is not None:
    with contextlib.suppress(OSError, MemoryError):
      return make(index, stored)
  try:
    return failures.retried(lambda: make(index, read_one(source, index)), lambda: f'reading {source.describe(index)}')
  except (OSError, MemoryError) as error:
    raise failures.unreadable(error, source.describe(index)) from error


def _make_next(source: Source, index: int, reason: BadImage, make: MakeExample) -> Example:
  """Returns the first good example after the bad one at `index`, which is bad for this reason.

  Raises:
    UserError: `MAX_TRIES` examples in a row, or all, are bad; or the data cannot be read.
  """
  tries = min(len(source), MAX_TRIES)
  for more in range(1, tries):
    try:
      return _make(source, (index + more) % len(source), None, make)
    except BadImage as error:
      reason = error
  raise UserError(f'{title(source)}: expected images that can be decoded, got {tries} bad images in a row, starting at '
                  f'{source.describe(index)}. The last reason: {reason}')


def _eval_rows(positions: HostArray, num_examples: int) -> tuple[HostArray, HostArray]:
  """Returns `index [B] i32`, 0 for padding, and `mask [B] f32`."""
  inside = positions < num_examples
  return np.where(inside, positions, 0).astype(np.int32), inside.astype(np.float32)


def _specs(num: int, shapes: Shapes) -> shared.Specs:
  """Returns shape and dtype of the arrays of `num` examples, and of `bad [num] bool`."""
  return {name: ((num, *shape), dtype) for name, (shape, dtype) in shapes.items()} | {'bad': ((num,), bool)}


def _write(batch: Batch, row: int, example: Example, *, bad: bool) -> None:
  for name, value in example.items():
    batch[name][row] = value
  batch['bad'][row] = bad


class BadImages:
  """The bad images found so far, each logged once."""

  def __init__(self, source: Source, transform: EvalTransform, texts: Texts | None = None) -> None:
    self.found: set[int] = set()
    self._source, self._transform, self._texts = source, transform, texts

  def record(self, batch: Batch) -> None:
    """Logs the rows of `batch` that are marked in `bad`."""
    for index in np.unique(batch['index'][batch['bad']]).tolist():
      if index not in self.found:
        self.found.add(index)
        log.warning('bad image: %s: %s', self._source.describe(index),
                    reason_bad(self._source, index, self._transform, self._texts))

  def check(self, limit: int) -> None:
    """Raises a UserError if there are more than `limit`."""
    if len(self.found) > limit:
      named = ', '.join(self._source.describe(i) for i in sorted(self.found)[:_NUM_NAMED])
      rest = len(self.found) - _NUM_NAMED
      raise UserError(f'{title(self._source)}: expected at most data.max_bad_images={limit} images that cannot be '
                      f'decoded, got {len(self.found)}: {named}{f" and {rest} more" if rest > 0 else ""}.')


class _Loader:
  """Starts iterators over batches, and closes those that still run when the loader is closed."""

  def __init__(self, source: Source, start: StartBatches, bad: BadImages) -> None:
    self.bad, self.describe, self._start = bad, source.describe, start
    self._running: list[Iterator[Batch]] = []
    self._closing = threading.RLock()  # garbage collection may close an iterator in the thread that holds the lock

  def _run(self, numbers: range) -> Iterator[Batch]:
    """Yields the batches with these numbers, and records their bad images."""
    iterator = self._start(numbers)
    self._running.append(iterator)
    try:
      for batch in iterator:
        self.bad.record(batch)
        yield batch
    finally:
      self._close([iterator])

  def close(self) -> None:
    """Stops workers and frees their resources."""
    self._close(self._running[::-1])

  def _close(self, iterators: Sequence[Iterator[Batch]]) -> None:
    """Closes iterators, each of them once, and waits for those that another thread is closing.

    The thread that takes the batches closes its iterator when it ends. At the same time the owner may close the loader,
    or the program may exit, and Grain cannot be closed by two threads at once.
    """
    with self._closing:
      for iterator in iterators:
        if iterator in self._running:
          self._running.remove(iterator)
          if hasattr(iterator, 'close'):
            iterator.close()


class TrainLoader(_Loader):
  """Endless training batches; implements `core.contracts.Loader`.

  texts: of the images; None if the batches have no text.
  workers: that make the batches; None if the images are in memory.
  """

  def __init__(self, source: Source, start: StartBatches, *, visit: order.Visit, info: LoaderInfo,
               bad: BadImages, max_bad_images: int, rows: HostArray, extra: AddAnswers | None, texts: Texts | None,
               workers: Workers | None) -> None:
    super().__init__(source, start, bad)
    self.info, self.texts, self.workers = info, texts, workers
    self._visit, self._max_bad_images, self._extra, self._rows = visit, max_bad_images, extra, rows

  def batches(self, start: int) -> Iterator[Batch]:
    """Yields this process's rows of the global batches from step `start` on.

    Raises:
      UserError: more than `max_bad_images` images could not be decoded in the batches taken.
    """
    for step, batch in enumerate(self._run(range(start, _LAST_STEP)), start):
      self.bad.check(self._max_bad_images)
      yield self._extra(batch, step * self.info.batch_size + self._rows) if self._extra else batch

  def indexes(self, step: int) -> HostArray:
    """Returns the indexes `[B] i64` of the examples of the global batch of a step, all rows."""
    return self._visit(step * self.info.batch_size + np.arange(self.info.batch_size))


class EvalLoader(_Loader):
  """One pass over a split; implements `core.contracts.EvalLoader`."""

  def __init__(self, source: Source, start: StartBatches, bad: BadImages, batch_size: int) -> None:
    super().__init__(source, start, bad)
    self.num_examples, self._batch_size = len(source), batch_size

  @property
  def num_bad(self) -> int:
    """Number of images of this process that could not be decoded, in the batches taken so far."""
    return len(self.bad.found)

  def batches(self) -> Iterator[Batch]:
    """Yields this process's rows of `ceil(S / B)` global batches: `image label index box mask`."""
    for batch in self._run(range(-(-self.num_examples // self._batch_size))):
      yield {k: v for k, v in batch.items() if k != 'bad'}


def train_loader(source: Source, *, recipe: schema.Recipe, image_px: tuple[int, int], batch_size: int,
                 seed: int, shard: Shard, workers: int, threads: int, in_memory: bool,
                 max_bad_images: int, decode: schema.Decode = schema.Decode.FULL, max_labels: int = 0,
                 extra: AddAnswers | None = None, texts: Texts | None = None) -> TrainLoader:
  """Returns the loader of training batches `image label index box bad`; see `Train`.

  Args:
    source: the training data.
    recipe: if in memory, only its resizing is applied here, and `prepare_train(on_device_geometry=True)` does the rest.
    image_px: height and width of the images, px.
    batch_size: examples of a global batch.
    seed: of the order and of the host augmentation.
    shard: the rows of the batch that this process makes.
    workers: loader processes; 0 = threads; `schema.AUTO_WORKERS` = by the machine.
    threads: 0 = one per core, at most 16 in a process.
    in_memory: see `fits_in_memory`.
    max_bad_images: number of distinct bad images on this host above which the run stops.
    decode: whether a JPEG is decoded completely, or only inside its crop.
    max_labels: T of `label_list [B, T]`, which batches then also have; 0 = images have one class.
    extra: adds to batches the answers of a teacher.
    texts: of the source, which batches then also have; not with images in memory.

  Raises:
    UserError: sizes that do not fit together, or a decoder that is not installed.
  """
  if not len(source):
    raise UserError(f'{title(source)}: expected at least one example, got none. Choose another split or source.')
  check_batch_size(batch_size, len(source), title(source))
  if seed < 0:
    raise UserError(f'seed: expected 0 or more, got {seed}. Set another seed.')
  assert not (in_memory and texts)
  shapes = [transforms.train_shapes(recipe, image_px, max_labels=max_labels, num_tokens=num)
            | (texts.shapes if texts else {}) for num in recipe.native_lengths or (0,)]
  num_bytes = max(check_memory('batch_size', batch_size, shard, own) for own in shapes)
  rows = shard.rows(batch_size)
  visit, ordered = _order(source, recipe, batch_size=batch_size, seed=seed)
  fit = transforms.eval_transform(transforms.at_one_size(recipe), image_px, max_labels=max_labels)
  start: StartBatches
  if in_memory:
    _check_crop(recipe)
    chosen = None
    start = functools.partial(map, MemoryTrain(decode_all(source, fit, threads=threads), visit, batch_size, shard))
  else:
    kinds = tuple(Kind(transforms.train_transform(
        recipe, image_px, decode=decode, max_labels=max_labels, num_tokens=num), own)
        for num, own in zip(recipe.native_lengths or (0,), shapes, strict=True))
    make = Train(source, kinds, visit, seed, batch_size, shard, texts)
    chosen = choose_processes(Workers(threads, workers, num_bytes), num_examples=len(source), here=machine())
    start = functools.partial(batches, make, workers=chosen)
  digest = ''.join((source.digest, ordered, f' lengths={recipe.native_lengths}' if recipe.native_lengths else '',
                    extra.digest if extra else '', texts.digest if texts else ''))
  return TrainLoader(source, start, visit=visit, info=LoaderInfo(source.name, len(source), batch_size, seed, digest),
                     bad=BadImages(source, fit, texts), max_bad_images=max_bad_images, rows=rows,
                     extra=extra, texts=texts, workers=chosen)


def check_batch_size(batch_size: int, num_examples: int, where: str) -> None:
  """Raises UserError if a training batch has more examples than the source, whose title is `where`."""
  if batch_size > num_examples:
    raise UserError(f'batch_size: expected at most {num_examples:,}, the number of examples of {where}, got '
                    f'{batch_size:,}. Set --config.batch_size={1 << num_examples.bit_length() - 1}.')


def _order(source: Source, recipe: schema.Recipe, *, batch_size: int, seed: int) -> tuple[order.Visit, str]:
  """Returns the order of training, and its description for the digest of the data."""
  repeats, groups = recipe.repeats, schema.num_groups(batch_size, recipe.mix_group)
  num_new = -(-batch_size // repeats)  # examples of a batch that the batch before does not have
  visit: order.Visit = (source.visit(seed, num_new) if isinstance(source, Mixture) else
                        windows.visit(source, seed, num_new))
  text = windows.describe(visit)
  if repeats == 1:
    return visit, text
  if batch_size < 2 * repeats:
    raise UserError(f'batch_size: expected at least {2 * repeats}, two different examples with data.recipe.repeats='
                    f'{repeats}, got {batch_size}. Set a larger batch_size, or data.recipe.repeats=1.')
  return (order.Repeated(visit, repeats, batch_size, groups),
          f' repeats={repeats}' + (f' groups={groups}' if groups > 1 else '') + text)


def eval_loader(source: Source, *, recipe: schema.Recipe, image_px: tuple[int, int], batch_size: int,
                shard: Shard, threads: int, in_memory: bool = False, max_labels: int = 0) -> EvalLoader:
  """Returns the loader of evaluation batches `image label index box mask`, which have every example of `source` once.

  The arguments are those of `train_loader`. With `in_memory`, images are decoded once for all passes, which does not
  change results; images at their own aspect ratio are never held in memory. The batches are made in threads.

  Raises:
    UserError: there are too many examples, or a batch does not fit into memory.
  """
  if len(source) > _MOST_EVALUATED:
    raise UserError(f'{title(source)}: expected at most {_MOST_EVALUATED:,} examples to evaluate, got {len(source):,}. '
                    'Evaluate a part of it, such as data.eval_split=test[:1000000].')
  fit = transforms.eval_transform(recipe, image_px, max_labels=max_labels)
  num_bytes = check_memory('batch_size of an evaluation', batch_size, shard, fit.shapes)
  shard.rows(batch_size)  # raises if the size does not fit
  start: StartBatches
  if in_memory and not recipe.eval_native_patch:
    start = functools.partial(map, MemoryEval(decode_all(source, fit, threads=threads), batch_size, shard))
  else:
    start = functools.partial(batches, Eval(source, fit, batch_size, shard), workers=Workers(threads, 0, num_bytes))
  return EvalLoader(source, start, BadImages(source, fit), batch_size)


def fits_in_memory(source: Source, *, recipe: schema.Recipe, image_px: tuple[int, int],
                   choice: schema.InMemory) -> bool:
  """Returns whether to hold the decoded source in memory and to augment on the device.

  Raises:
    UserError: `choice` is YES, but the recipe needs the stored image.
  """
  if choice is schema.InMemory.YES:
    _check_crop(recipe)
    return True
  shape, dtype = transforms.eval_shapes(image_px, num_channels=recipe.channels)['image']
  small = len(source) * math.prod(shape) * np.dtype(dtype).itemsize < MEMORY_LIMIT_BYTES
  return choice is schema.InMemory.AUTO and not transforms.host_only(recipe) and small


def _check_crop(recipe: schema.Recipe) -> None:
  if needs_host := transforms.host_only(recipe):
    raise UserError(f'data.in_memory: expected auto or no with {needs_host}, which need the stored image on the host '
                    'at every step, got yes. Set in_memory=auto, or data.recipe.crop=resize without such settings.')
