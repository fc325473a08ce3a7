"""Dataloaders for training and evaluation: each batch is a pure function of its number.

Batch n of size B has the examples at positions n * B ... (n + 1) * B - 1 of the stream that `order.py` defines, for any
number of threads, loader processes and hosts. Each host reads and decodes only the rows of its shard of the batch. A
run resumes from the step number alone.

`jobs/build.py` calls `fits_in_memory`, then `train_loader`; `evaluate/` calls `eval_loader`. Both loaders have the
methods `batches` and `close`. `Train` and `Eval` make a batch from a source; `workers.batches` calls them ahead of the
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

MAX_TRIES = 1_000               # bad images in a row before the run stops
MEMORY_LIMIT_BYTES = 2 * 2**30  # decoded images that are held in memory with `schema.InMemory.AUTO`
_CHUNK_EXAMPLES = 64            # examples that a thread decodes at a time in `decode_all`
_NUM_POSITIONS = 4096           # positions whose indexes `MemoryTrain` computes together
_LAST_STEP = 2**62              # the loader of training batches has no end
_MAX_EVALUATED = 2**31 - 1      # examples of an evaluation, whose indexes are i32, also on devices
_MAX_NAMED = 5                  # bad images that the error message names

StartBatches = Callable[[range], Iterator[Batch]]
"""Returns an iterator over the batches with the numbers in a range."""
MakeExample = Callable[[int, Record], Example]
"""Makes an example from an index in the source and the stored record. Raises BadImage if the image cannot be used."""
ReadResult = Record | BadImage | None
"""A record; the reason why the record is bad; or None after a system error: the record must be read again."""


class BatchKind(NamedTuple):
  """How the examples of a batch are made. Images at their own aspect ratio have one kind for each number of tokens."""
  transform: Transform
  shapes: Shapes


@dataclasses.dataclass(frozen=True)
class Train:
  """Maps a step to the training batch `image label index box bad`, decoded and augmented on the host.

  With a recipe of several views, the batch has the views in place of `image` and `box`. With `texts` the batch also has
  `text` and `text_mask`. The kind of each batch is drawn from `kinds`; the examples of a batch do not depend on its
  kind. A bad image is replaced by the next good image, and the row is marked in `bad`.
  """
  source: Source
  kinds: tuple[BatchKind, ...]
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
    rngs, results = order.ExampleRngs(self.seed), _read(self.source, indexes.tolist())
    for row, (index, position, result) in enumerate(zip(indexes.tolist(), positions.tolist(), results, strict=True)):
      # The image that replaces a bad image has another index, but the same position.
      make = functools.partial(self._make_example, transform, rngs, position)
      try:
        _write(batch, row, _make_or_retry(self.source, index, result, make), is_bad=False)
      except BadImage as error:
        _write(batch, row, _make_next(self.source, index, error, make), is_bad=True)
    return batch

  def _make_example(self, transform: Transform, rngs: order.ExampleRngs, position: int, index: int,
                    record: Record) -> Example:
    example = transform(record, rngs.at(position))
    return self.texts.add(example, index, position) if self.texts else example


@dataclasses.dataclass(frozen=True)
class Eval:
  """Maps the number of a batch to the evaluation batch `image label index box mask bad`.

  Rows beyond the end of the source and rows with a bad image have mask 0, and their images are 0.
  """
  source: Source
  transform: EvalTransform
  batch_size: int
  shard: Shard

  def __call__(self, number: int) -> Batch:
    index, mask = _eval_rows(number * self.batch_size + self.shard.rows(self.batch_size), len(self.source))
    batch = shared.allocate_private(_specs(len(index), self.transform.shapes)) | {'index': index, 'mask': mask}
    rows = np.flatnonzero(mask).tolist()
    source_indexes = index[rows].tolist()
    for row, source_index, result in zip(rows, source_indexes, _read(self.source, source_indexes), strict=True):
      try:
        example = _make_or_retry(self.source, source_index, result, lambda _, record: self.transform(record))
        _write(batch, row, example, is_bad=False)
      except BadImage:
        mask[row] = 0.
        batch['bad'][row] = True
        with contextlib.suppress(BadImage):  # the class of a damaged record is not known
          batch['label'][row] = first_label(self.source, source_index)
    return batch


class MemoryTrain:
  """Maps a step to a training batch, taken from `decoded`, the result of `decode_all`. The device augments the batch.

  The order of `_num_steps` batches is computed at once, which takes hardly longer than the order of one batch.
  `_first_step` is the first of these steps, and `_indexes [num_steps, B]` are the indexes. Not safe for threads.
  """

  def __init__(self, decoded: Batch, visit: order.Visit, batch_size: int, shard: Shard) -> None:
    self._decoded, self._visit, self._batch_size, self._rows = decoded, visit, batch_size, shard.rows(batch_size)
    self._num_steps = max(1, _NUM_POSITIONS // max(1, len(self._rows)))
    self._first_step, self._indexes = -1, np.zeros((0, 0), np.int64)

  def __call__(self, step: int) -> Batch:
    first_step = step // self._num_steps * self._num_steps
    if first_step != self._first_step:
      positions = np.arange(first_step, first_step + self._num_steps)[:, None] * self._batch_size + self._rows
      self._first_step, self._indexes = first_step, self._visit(positions.ravel()).reshape(positions.shape)
    indexes = self._indexes[step - first_step]
    return {name: array[indexes] for name, array in self._decoded.items()} | {'index': indexes}


@dataclasses.dataclass(frozen=True)
class MemoryEval:
  """Maps the number of a batch to the evaluation batch, taken from `decoded`, the result of `decode_all`."""
  decoded: Batch
  batch_size: int
  shard: Shard

  def __call__(self, number: int) -> Batch:
    index, mask = _eval_rows(number * self.batch_size + self.shard.rows(self.batch_size), len(self.decoded['label']))
    batch = {name: array[index] for name, array in self.decoded.items()}
    batch['bad'] = batch['bad'] & (mask > 0)
    batch['image'][(mask == 0) | batch['bad']] = 0
    return batch | {'index': index, 'mask': mask * ~batch['bad']}


def decode_all(source: Source, transform: EvalTransform, *, threads: int) -> Batch:
  """Decodes a complete source once: `image [S, H, W, 3] u8, label [S] i32, box [S, 4] f32, bad [S] bool`.

  If images may have several classes, there is also `label_list [S, T] i32`. A bad image is replaced by the next good
  image, and the row is marked in `bad`.
  """
  num_examples, shapes = len(source), transform.shapes
  size = max(1, min(_CHUNK_EXAMPLES, num_examples))  # a split may be empty
  kind = BatchKind(lambda record, rng: transform(record), shapes)
  make_chunk = Train(source, (kind,), lambda positions: positions % num_examples, seed=0, batch_size=size,
                     shard=Shard((0,), 1))
  decoded = shared.allocate_private(_specs(num_examples, shapes))
  with futures.ThreadPoolExecutor(open_files.num_threads(threads)) as pool:
    chunks = pool.map(make_chunk, range(-(-num_examples // size)))
    for start, chunk in zip(range(0, num_examples, size), chunks, strict=True):
      for name, array in decoded.items():
        array[start:start + size] = chunk[name][:num_examples - start]  # leaves out the excess of the last chunk
  return decoded


def reason_bad(source: Source, index: int, transform: EvalTransform, texts: Texts | None = None) -> str:
  """Returns the reason why an example, or its text if `texts` are given, cannot be used; '' if it can be used."""
  def make(index: int, record: Record) -> Example:
    example = transform(record)
    return texts.add(example, index, 0) if texts else example

  try:
    _make_or_retry(source, index, None, make)
  except BadImage as error:
    return str(error)
  return ''


def _read(source: Source, indexes: Sequence[int]) -> Iterator[ReadResult]:
  """Yields one result for each index. After an error, `source.read` is called again for the remaining indexes."""
  start = 0
  while start < len(indexes):
    try:
      for record in source.read(indexes[start:]):
        start += 1
        yield record
    except BadImage as error:
      start += 1
      yield error
    except (OSError, MemoryError):
      start += 1
      yield None


def _make_or_retry(source: Source, index: int, result: ReadResult, make: MakeExample) -> Example:
  """Returns the example made from a result of `_read`; after a system error, reads the record again for a while.

  Raises:
    BadImage: the example cannot be used.
    UserError, TemporaryError: the record cannot be read.
  """
  if isinstance(result, BadImage):
    raise result
  if result is not None:
    with contextlib.suppress(OSError, MemoryError):
      return make(index, result)
  try:
    return failures.retried(lambda: make(index, read_one(source, index)), lambda: f'reading {source.describe(index)}')
  except (OSError, MemoryError) as error:
    raise failures.unreadable(error, source.describe(index)) from error


def _make_next(source: Source, index: int, reason: BadImage, make: MakeExample) -> Example:
  """Returns the first good example after the example at `index`; `reason` says why the example at `index` is bad.

  Raises:
    UserError, TemporaryError: `MAX_TRIES` examples in a row, or all, are bad; or the data cannot be read.
  """
  num_tries = min(len(source), MAX_TRIES)
  for offset in range(1, num_tries):
    try:
      return _make_or_retry(source, (index + offset) % len(source), None, make)
    except BadImage as error:
      reason = error
  raise UserError(f'{title(source)}: expected images that can be decoded, got {num_tries} bad images in a row, '
                  f'starting at {source.describe(index)}. The last reason: {reason}')


def _eval_rows(positions: HostArray, num_examples: int) -> tuple[HostArray, HostArray]:
  """Returns `index [B] i32`, 0 for padding, and `mask [B] f32`."""
  inside = positions < num_examples
  return np.where(inside, positions, 0).astype(np.int32), inside.astype(np.float32)


def _specs(size: int, shapes: Shapes) -> shared.Specs:
  """Returns shape and dtype of the arrays of a batch of `size` examples, including `bad [size] bool`."""
  return {name: ((size, *shape), dtype) for name, (shape, dtype) in shapes.items()} | {'bad': ((size,), bool)}


def _write(batch: Batch, row: int, example: Example, *, is_bad: bool) -> None:
  for name, value in example.items():
    batch[name][row] = value
  batch['bad'][row] = is_bad


class BadImages:
  """Collects the bad images of the batches taken so far. `add` is called for each batch, and in training `check`."""

  def __init__(self, source: Source, transform: EvalTransform, texts: Texts | None = None) -> None:
    self.indexes: set[int] = set()  # indexes of the bad images in the source
    self._source, self._transform, self._texts = source, transform, texts

  def add(self, batch: Batch) -> None:
    """Adds the images that `batch` marks in `bad`, and logs each image once."""
    for index in np.unique(batch['index'][batch['bad']]).tolist():
      if index not in self.indexes:
        self.indexes.add(index)
        log.warning('bad image: %s: %s', self._source.describe(index),
                    reason_bad(self._source, index, self._transform, self._texts))

  def check(self, limit: int) -> None:
    """Raises a UserError if there are more than `limit` bad images."""
    if len(self.indexes) > limit:
      named = ', '.join(self._source.describe(index) for index in sorted(self.indexes)[:_MAX_NAMED])
      num_unnamed = len(self.indexes) - _MAX_NAMED
      raise UserError(f'{title(self._source)}: expected at most data.max_bad_images={limit} images that cannot be '
                      f'decoded, got {len(self.indexes)}: {named}'
                      f'{f" and {num_unnamed} more" if num_unnamed > 0 else ""}.')


class _Loader:
  """Starts iterators over batches; `close` closes the iterators that have not ended."""

  def __init__(self, source: Source, start: StartBatches, bad: BadImages) -> None:
    self.bad, self.describe, self._start_batches = bad, source.describe, start
    self._running: list[Iterator[Batch]] = []
    self._closing = threading.RLock()  # garbage collection may close an iterator in the thread that holds the lock

  def _run(self, numbers: range) -> Iterator[Batch]:
    """Yields the batches with these numbers, and records their bad images."""
    iterator = self._start_batches(numbers)
    self._running.append(iterator)
    try:
      for batch in iterator:
        self.bad.add(batch)
        yield batch
    finally:
      self._close([iterator])

  def close(self) -> None:
    """Stops workers and frees their resources."""
    self._close(self._running[::-1])

  def _close(self, iterators: Sequence[Iterator[Batch]]) -> None:
    """Closes each iterator once, and waits while another thread closes one.

    The thread that takes the batches closes its iterator at the end. At the same time the owner may close the loader,
    or the program may exit, and two threads must not close an iterator of Grain at once.
    """
    with self._closing:
      for iterator in iterators:
        if iterator in self._running:
          self._running.remove(iterator)
          if hasattr(iterator, 'close'):
            iterator.close()


class TrainLoader(_Loader):
  """A loader of endless training batches, made by `train_loader`; implements `core.contracts.Loader`.

  texts: the texts of the images; None if the batches have no text.
  workers: the threads and processes that make the batches; None if the images are in memory.
  """

  def __init__(self, source: Source, start: StartBatches, *, visit: order.Visit, info: LoaderInfo,
               bad: BadImages, max_bad_images: int, rows: HostArray, extra: AddAnswers | None, texts: Texts | None,
               workers: Workers | None) -> None:
    super().__init__(source, start, bad)
    self.info, self.texts, self.workers = info, texts, workers
    self._visit, self._max_bad_images, self._extra, self._rows = visit, max_bad_images, extra, rows

  def batches(self, start: int) -> Iterator[Batch]:
    """Yields this process's rows of the global batches from step `start` on.

    Raises UserError if more than `max_bad_images` images could not be decoded in the batches taken.
    """
    for step, batch in enumerate(self._run(range(start, _LAST_STEP)), start):
      self.bad.check(self._max_bad_images)
      yield self._extra(batch, step * self.info.batch_size + self._rows) if self._extra else batch

  def indexes(self, step: int) -> HostArray:
    """Returns the indexes `[B] i64` of all examples of the global batch of a step, also of other processes."""
    return self._visit(step * self.info.batch_size + np.arange(self.info.batch_size))


class EvalLoader(_Loader):
  """A loader for passes over a split, one pass per call of `batches`; implements `core.contracts.EvalLoader`."""

  def __init__(self, source: Source, start: StartBatches, bad: BadImages, batch_size: int) -> None:
    super().__init__(source, start, bad)
    self.num_examples, self._batch_size = len(source), batch_size

  @property
  def num_bad(self) -> int:
    """Number of images of this process that could not be decoded, in the batches taken so far."""
    return len(self.bad.indexes)

  def batches(self) -> Iterator[Batch]:
    """Yields this process's rows of `ceil(S / B)` global batches: `image label index box mask`."""
    for batch in self._run(range(-(-self.num_examples // self._batch_size))):
      yield {name: array for name, array in batch.items() if name != 'bad'}


def train_loader(source: Source, *, recipe: schema.Recipe, image_px: tuple[int, int], batch_size: int,
                 seed: int, shard: Shard, workers: int, threads: int, in_memory: bool,
                 max_bad_images: int, decode: schema.Decode = schema.Decode.FULL, max_labels: int = 0,
                 extra: AddAnswers | None = None, texts: Texts | None = None) -> TrainLoader:
  """Returns the loader of training batches `image label index box bad`; see `Train`.

  Args:
    source: the training data.
    recipe: with `in_memory`, the loader only resizes, and `prepare_train(on_device_geometry=True)` does the rest.
    image_px: height and width of the images, px.
    batch_size: examples of a global batch.
    seed: seed of the order and of the host augmentation.
    shard: the rows of the batch that this process makes.
    workers: number of loader processes; 0 = threads of this process; `schema.AUTO_WORKERS` = chosen for the machine.
    threads: number of threads; 0 = one per core, at most 16 in a process.
    in_memory: whether to decode the source once and to keep the images in memory; see `fits_in_memory`.
    max_bad_images: number of distinct bad images on this host above which the run stops.
    decode: whether a JPEG is decoded completely, or only inside its crop.
    max_labels: T of `label_list [B, T]`, an additional array of the batches; 0 = images have one class.
    extra: adds the answers of a teacher to the batches; None = no answers.
    texts: adds the texts of the source to the batches; None = no texts. Not possible with `in_memory`.

  Raises UserError if the sizes do not fit together, or a decoder is not installed.
  """
  if not len(source):
    raise UserError(f'{title(source)}: expected at least one example, got none. Choose another split or source.')
  check_batch_size(batch_size, len(source), title(source))
  if seed < 0:
    raise UserError(f'seed: expected 0 or more, got {seed}. Set another seed.')
  assert not (in_memory and texts)
  lengths = recipe.native_lengths or (0,)  # numbers of tokens per image, one kind of batch for each
  shapes = [transforms.train_shapes(recipe, image_px, max_labels=max_labels, num_tokens=num_tokens)
            | (texts.shapes if texts else {}) for num_tokens in lengths]
  batch_bytes = max(check_memory('batch_size', batch_size, shard, kind_shapes) for kind_shapes in shapes)
  rows = shard.rows(batch_size)
  visit, order_text = _training_order(source, recipe, batch_size=batch_size, seed=seed)
  resize = transforms.eval_transform(transforms.at_one_size(recipe), image_px, max_labels=max_labels)
  start: StartBatches
  if in_memory:
    _check_in_memory(recipe)
    chosen_workers = None
    start = functools.partial(map, MemoryTrain(decode_all(source, resize, threads=threads), visit, batch_size, shard))
  else:
    kinds = tuple(BatchKind(transforms.train_transform(
        recipe, image_px, decode=decode, max_labels=max_labels, num_tokens=num_tokens), kind_shapes)
        for num_tokens, kind_shapes in zip(lengths, shapes, strict=True))
    make = Train(source, kinds, visit, seed, batch_size, shard, texts)
    chosen_workers = choose_processes(Workers(threads, workers, batch_bytes), num_examples=len(source), here=machine())
    start = functools.partial(batches, make, workers=chosen_workers)
  digest = ''.join((source.digest, order_text, f' lengths={recipe.native_lengths}' if recipe.native_lengths else '',
                    extra.digest if extra else '', texts.digest if texts else ''))
  return TrainLoader(source, start, visit=visit, info=LoaderInfo(source.name, len(source), batch_size, seed, digest),
                     bad=BadImages(source, resize, texts), max_bad_images=max_bad_images, rows=rows,
                     extra=extra, texts=texts, workers=chosen_workers)


def check_batch_size(batch_size: int, num_examples: int, source_title: str) -> None:
  """Raises UserError if a training batch has more examples than the source."""
  if batch_size > num_examples:
    raise UserError(f'batch_size: expected at most {num_examples:,}, the number of examples of {source_title}, got '
                    f'{batch_size:,}. Set --config.batch_size={1 << num_examples.bit_length() - 1}.')


def _training_order(source: Source, recipe: schema.Recipe, *, batch_size: int, seed: int) -> tuple[order.Visit, str]:
  """Returns the order of training, and a description of the order for the digest of the data."""
  repeats, groups = recipe.repeats, schema.num_groups(batch_size, recipe.mix_group)
  num_distinct = -(-batch_size // repeats)  # examples of a batch, without their copies
  visit: order.Visit = (source.visit(seed, num_distinct) if isinstance(source, Mixture) else
                        windows.visit(source, seed, num_distinct))
  description = windows.describe(visit)
  if repeats == 1:
    return visit, description
  if batch_size < 2 * repeats:
    raise UserError(f'batch_size: expected at least {2 * repeats}, two different examples with data.recipe.repeats='
                    f'{repeats}, got {batch_size}. Set a larger batch_size, or data.recipe.repeats=1.')
  return (order.Repeated(visit, repeats, batch_size, groups),
          f' repeats={repeats}' + (f' groups={groups}' if groups > 1 else '') + description)


def eval_loader(source: Source, *, recipe: schema.Recipe, image_px: tuple[int, int], batch_size: int,
                shard: Shard, threads: int, in_memory: bool = False, max_labels: int = 0) -> EvalLoader:
  """Returns the loader of evaluation batches `image label index box mask`, which have every example of `source` once.

  The arguments are those of `train_loader`. With `in_memory`, images are decoded once for all passes; the batches are
  the same. Images at their own aspect ratio are never held in memory. The batches are made in threads.

  Raises UserError if there are too many examples, or a batch does not fit into memory.
  """
  if len(source) > _MAX_EVALUATED:
    raise UserError(f'{title(source)}: expected at most {_MAX_EVALUATED:,} examples to evaluate, got {len(source):,}. '
                    'Evaluate a part of it, such as data.eval_split=test[:1000000].')
  transform = transforms.eval_transform(recipe, image_px, max_labels=max_labels)
  batch_bytes = check_memory('batch_size of an evaluation', batch_size, shard, transform.shapes)
  shard.rows(batch_size)  # raises an error if the batch size does not fit the shard
  start: StartBatches
  if in_memory and not recipe.eval_native_patch:
    start = functools.partial(map, MemoryEval(decode_all(source, transform, threads=threads), batch_size, shard))
  else:
    make = Eval(source, transform, batch_size, shard)
    start = functools.partial(batches, make, workers=Workers(threads, 0, batch_bytes))
  return EvalLoader(source, start, BadImages(source, transform), batch_size)


def fits_in_memory(source: Source, *, recipe: schema.Recipe, image_px: tuple[int, int],
                   choice: schema.InMemory) -> bool:
  """Returns whether to hold the decoded source in memory and to augment on the device.

  Raises UserError if `choice` is YES, but the recipe needs the stored image.
  """
  if choice is schema.InMemory.YES:
    _check_in_memory(recipe)
    return True
  shape, dtype = transforms.eval_shapes(image_px, num_channels=recipe.channels)['image']
  is_small = len(source) * math.prod(shape) * np.dtype(dtype).itemsize < MEMORY_LIMIT_BYTES
  return choice is schema.InMemory.AUTO and not transforms.host_only(recipe) and is_small


def _check_in_memory(recipe: schema.Recipe) -> None:
  if settings := transforms.host_only(recipe):
    raise UserError(f'data.in_memory: expected auto or no with {settings}, which need the stored image on the host '
                    'at every step, got yes. Set in_memory=auto, or data.recipe.crop=resize without such settings.')
