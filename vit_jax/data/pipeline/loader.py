"""Training batches as a pure function of (seed, step), and evaluation in one exact pass.

The global batch is the same for any number of threads, loader processes and hosts: `order.py` says which
example comes when, `blocks.py` which of them belong to one process. To resume, the step number is enough.
"""
from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator

import numpy as np

from vit_jax.config import schema
from vit_jax.core.contracts import LoaderInfo
from vit_jax.core.errors import UserError
from vit_jax.core.types import Batch, Shard
from vit_jax.data.pipeline import blocks, capacity, order, prefetch, transforms
from vit_jax.data.source import Source
from vit_jax.data.sources.mixture import Mixture

log = logging.getLogger('vit_jax.data')

MEMORY_LIMIT_BYTES = 2 * 2**30  # schema.InMemory.AUTO
_LAST_BATCH = 2**62             # training does not end
_NUM_NAMED = 5                  # bad images in the error message

Start = Callable[[range], Iterator[Batch]]


class BadImages:
  """The bad images seen so far, each logged once."""

  def __init__(self, source: Source, transform: transforms.EvalTransform) -> None:
    self.found: set[int] = set()
    self._source, self._transform = source, transform

  def see(self, batch: Batch) -> None:
    """Notes the rows of `batch` that are marked in `bad`."""
    for index in np.unique(batch['index'][batch['bad']]).tolist():
      if index not in self.found:
        self.found.add(index)
        log.warning('bad image: %s: %s', self._source.describe(index),
                    blocks.reason_bad(self._source, index, self._transform))

  def check(self, limit: int) -> None:
    """Raises a UserError if there are more than `limit`."""
    if len(self.found) > limit:
      named = ', '.join(self._source.describe(i) for i in sorted(self.found)[:_NUM_NAMED])
      rest = len(self.found) - _NUM_NAMED
      raise UserError(f'{len(self.found)} images of {self._source.name} cannot be decoded: {named}'
                      f'{f" and {rest} more" if rest > 0 else ""}; right would be at most '
                      f'data.max_bad_images={limit}')


class TrainLoader:
  """Endless training batches; a `core.api.Loader`."""

  def __init__(self, source: Source, start: Start, *, info: LoaderInfo, bad: BadImages, max_bad_images: int) -> None:
    self.info, self.bad, self.describe = info, bad, source.describe
    self._start, self._max_bad_images = start, max_bad_images
    self._running: list[Iterator[Batch]] = []

  def batches(self, start: int) -> Iterator[Batch]:
    """This process's rows of the global batches from step `start` on.

    Raises:
      UserError: more than `max_bad_images` images could not be decoded in the batches taken.
    """
    for batch in _running(self._start, range(start, _LAST_BATCH), self._running):
      self.bad.see(batch)
      self.bad.check(self._max_bad_images)
      yield batch

  def close(self) -> None:
    """Stops workers and frees what they held."""
    _stop(self._running)


class EvalLoader:
  """One pass over a split; a `core.api.EvalLoader`."""

  def __init__(self, source: Source, start: Start, *, batch_size: int, bad: BadImages) -> None:
    self.num_examples, self.describe, self.bad = len(source), source.describe, bad
    self._start, self._batch_size = start, batch_size
    self._running: list[Iterator[Batch]] = []

  @property
  def num_bad(self) -> int:
    """Images of this process that could not be decoded, in the batches taken so far."""
    return len(self.bad.found)

  def batches(self) -> Iterator[Batch]:
    """This process's rows of `ceil(S / B)` global batches: `image label index box mask`."""
    for batch in _running(self._start, range(-(-self.num_examples // self._batch_size)), self._running):
      self.bad.see(batch)
      yield {k: v for k, v in batch.items() if k != 'bad'}

  def close(self) -> None:
    """Stops workers and frees what they held."""
    _stop(self._running)


def train_loader(source: Source, *, recipe: schema.Recipe, image_px: tuple[int, int], batch_size: int,
                 seed: int, shard: Shard, workers: int, threads: int, in_memory: bool,
                 max_bad_images: int, decode: schema.Decode = schema.Decode.FULL, max_labels: int = 0) -> TrainLoader:
  """Batches of `image label index box bad` for training; with views, those instead of image and box.

  Args:
    source: to read.
    recipe: in memory, its resizing is applied here and the rest by `prepare_train(on_device_geometry=True)`.
    image_px: height, width.
    batch_size: global.
    seed: of order and host augmentation.
    shard: the rows of it that this process makes.
    workers: loader processes; 0 = threads.
    threads: 0 = one a core, at most 16.
    in_memory: see `fits_in_memory`.
    max_bad_images: distinct ones, on this host, after which the run stops.
    decode: how much of a JPEG that is cropped.
    max_labels: T of `label_list [B, T]`, which batches then have too; 0 = images have one class.

  Raises:
    UserError: sizes that do not fit together, or a decoder that is not installed.
  """
  _check_source(source, batch_size=batch_size, seed=seed)
  shapes = transforms.train_shapes(recipe, image_px, max_labels=max_labels)
  capacity.check_batch('batch_size', batch_size, shard, shapes)
  shard.rows(batch_size)  # refuses a size that does not fit
  fit = transforms.eval_transform(recipe, image_px, max_labels=max_labels)
  visit = _visit(source, seed=seed, repeats=recipe.repeats, batch_size=batch_size)
  start: Start
  if in_memory:
    _check_crop(recipe)
    decoded = blocks.decode_all(source, fit, threads=prefetch.num_threads(threads))
    start = functools.partial(map, blocks.MemoryTrainBlocks(decoded, visit, batch_size, shard))
  else:
    transform = transforms.train_transform(recipe, image_px, decode=decode, max_labels=max_labels)
    make = blocks.TrainBlocks(source, transform, visit, shapes, seed, batch_size, shard)
    start = functools.partial(prefetch.prefetched, make, threads=threads, workers=workers)
  digest = source.digest if recipe.repeats == 1 else f'{source.digest} repeats={recipe.repeats}'
  info = LoaderInfo(source.name, len(source), batch_size, seed, digest)
  return TrainLoader(source, start, info=info, bad=BadImages(source, fit), max_bad_images=max_bad_images)


def _check_source(source: Source, *, batch_size: int, seed: int) -> None:
  if batch_size > len(source):
    raise UserError(f'batch_size={batch_size} is larger than {source.name} with {len(source)} examples; '
                    f'right would be at most {len(source)}')
  if seed < 0:
    raise UserError(f'seed={seed} is negative; right would be 0 or more')


def eval_loader(source: Source, *, recipe: schema.Recipe, image_px: tuple[int, int], batch_size: int,
                shard: Shard, threads: int, workers: int, in_memory: bool = False, max_labels: int = 0) -> EvalLoader:
  """Every example of `source` once: batches of `image label index box mask`.

  Args are as for `train_loader`; `in_memory` decodes once for all passes and changes no result.
  """
  capacity.check_batch('batch_size of an evaluation', batch_size, shard, {'image': ((*image_px, 3), np.uint8)})
  shard.rows(batch_size)
  fit = transforms.eval_transform(recipe, image_px, max_labels=max_labels)
  start: Start
  if in_memory:
    decoded = blocks.decode_all(source, fit, threads=prefetch.num_threads(threads))
    start = functools.partial(map, blocks.MemoryEvalBlocks(decoded, batch_size, shard))
  else:
    start = functools.partial(prefetch.prefetched, blocks.EvalBlocks(source, fit, batch_size, shard), threads=threads,
                              workers=workers)
  return EvalLoader(source, start, batch_size=batch_size, bad=BadImages(source, fit))


def fits_in_memory(source: Source, *, recipe: schema.Recipe, image_px: tuple[int, int],
                   choice: schema.InMemory) -> bool:
  """Whether to hold the decoded source in memory and to augment on the device.

  Raises:
    UserError: asked for, but the recipe crops from the stored image.
  """
  if choice is schema.InMemory.YES:
    _check_crop(recipe)
    return True
  small = len(source) * image_px[0] * image_px[1] * 3 < MEMORY_LIMIT_BYTES
  return choice is schema.InMemory.AUTO and not transforms.host_only(recipe) and small


def _check_crop(recipe: schema.Recipe) -> None:
  if needs_host := transforms.host_only(recipe):
    raise UserError(f'data.in_memory=yes does not go with {needs_host}, which needs the stored picture on the host at '
                    'every step; right would be crop=resize without such settings, or in_memory=auto')


def _visit(source: Source, *, seed: int, repeats: int, batch_size: int) -> order.Visit:
  """Which example comes at a global position."""
  visit: order.Visit = source.visit(seed) if isinstance(source, Mixture) else order.Shuffled(len(source), seed)
  if repeats == 1:
    return visit
  if batch_size < 2 * repeats:
    raise UserError(f'batch_size={batch_size} has not two different examples with data.recipe.repeats={repeats}; right '
                    f'would be at least {2 * repeats}')
  return order.Repeated(visit, repeats, batch_size)


def _running(start: Start, numbers: range, running: list[Iterator[Batch]]) -> Iterator[Batch]:
  """Yields from a started iterator, which stays in `running` until it ends or is closed."""
  iterator = start(numbers)
  running.append(iterator)
  try:
    yield from iterator
  finally:
    if iterator in running:
      running.remove(iterator)
      _stop([iterator])


def _stop(running: list[Iterator[Batch]]) -> None:
  """Empties `running`, closing what holds threads or processes."""
  while running:
    iterator = running.pop()
    if hasattr(iterator, 'close'):
      iterator.close()
