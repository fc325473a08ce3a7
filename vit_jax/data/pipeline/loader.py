"""Training batches as a pure function of (seed, step), and evaluation in one exact pass.

The global batch is the same for any number of threads, loader processes and hosts: `order.py` defines the order of
examples, `batches.py` makes the rows of one process. The step number is enough to resume.
"""
from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from vit_jax.config import schema
from vit_jax.core.contracts import LoaderInfo
from vit_jax.core.errors import UserError
from vit_jax.core.types import Batch, HostArray, Shard
from vit_jax.data.files import open_files
from vit_jax.data.image import transform as transforms
from vit_jax.data.labels import label_maps
from vit_jax.data.labels.stored_features import StoredFeatures
from vit_jax.data.pipeline import batches, capacity, group_order, order, prefetch, verifying
from vit_jax.data.source import Source, find_origin, shard_sizes, title
from vit_jax.data.sources.mixture import Mixture
from vit_jax.data.sources.pseudo import PseudoLabeled, TeacherLabels
from vit_jax.data.text.captions import AnyTexts

log = logging.getLogger('vit_jax.data')

MEMORY_LIMIT_BYTES = 2 * 2**30  # schema.InMemory.AUTO
_LAST_BATCH = 2**62             # training has no end
_MOST_EVALUATED = 2**31 - 1     # examples of an evaluation: their indexes are i32, also on devices
_NUM_NAMED = 5                  # bad images in the error message

Start = Callable[[range], Iterator[Batch]]


class Labels(Protocol):
  """Labels that are stored beside the images, and added to batches by the index of their examples."""
  digest: str
  """Appended to the digest of the source."""

  def add(self, batch: Batch, positions: HostArray) -> Batch:
    """Returns the batch with its labels, of the rows at `positions [B]` of the stream."""
    ...


class BadImages:
  """The bad images found so far, each logged once."""

  def __init__(self, source: Source, transform: transforms.EvalTransform, texts: AnyTexts | None = None) -> None:
    self.found: set[int] = set()
    self._source, self._transform, self._texts = source, transform, texts

  def record(self, batch: Batch) -> None:
    """Logs the rows of `batch` that are marked in `bad`."""
    for index in np.unique(batch['index'][batch['bad']]).tolist():
      if index not in self.found:
        self.found.add(index)
        log.warning('bad image: %s: %s', self._source.describe(index),
                    batches.reason_bad(self._source, index, self._transform, self._texts))

  def check(self, limit: int) -> None:
    """Raises a UserError if there are more than `limit`."""
    if len(self.found) > limit:
      named = ', '.join(self._source.describe(i) for i in sorted(self.found)[:_NUM_NAMED])
      rest = len(self.found) - _NUM_NAMED
      raise UserError(f'{title(self._source)}: expected at most data.max_bad_images={limit} images that cannot be '
                      f'decoded, got {len(self.found)}: {named}{f" and {rest} more" if rest > 0 else ""}.')


class _Loader:
  """Starts iterators of batches; keeps those that run, to close them.

  Args:
    start: returns the batches of a range of numbers.
    bad: takes the bad images.
    use: returns what verifies the files of the batches from a number on.
  """

  def __init__(self, start: Start, bad: BadImages, use: Callable[[int], verifying.Used]) -> None:
    self.bad, self._start, self._use = bad, start, use
    self._running: list[Iterator[Batch] | verifying.Used] = []

  def _run(self, numbers: range) -> Iterator[Batch]:
    """Yields the batches of these numbers, and records their bad images; ends when their files are verified."""
    iterator, used = self._start(numbers), self._use(numbers.start)
    own: list[Iterator[Batch] | verifying.Used] = [iterator, used]
    self._running += own
    try:
      for number, batch in zip(numbers, iterator, strict=False):
        used.check(number)
        self.bad.record(batch)
        yield batch
      used.finish()
    finally:
      for one in own:
        if one in self._running:
          self._running.remove(one)
          _close(one)

  def close(self) -> None:
    """Stops workers and frees their resources."""
    while self._running:
      _close(self._running.pop())


def _close(iterator: Iterator[Batch] | verifying.Used) -> None:
  """Closes an iterator that has threads or processes."""
  if hasattr(iterator, 'close'):
    iterator.close()


class TrainLoader(_Loader):
  """Endless training batches; a `core.contracts.Loader`."""

  def __init__(self, source: Source, start: Start, *, visit: order.Visit, info: LoaderInfo, bad: BadImages,
               use: Callable[[int], verifying.Used], max_bad_images: int, rows: HostArray,
               labels: Labels | None = None, texts: AnyTexts | None = None, supply: Supply | None = None) -> None:
    super().__init__(start, bad, use)
    self.texts = texts
    self.info, self.supply, self.describe, self._visit = info, supply, source.describe, visit
    self._max_bad_images, self._labels, self._rows = max_bad_images, labels, rows

  def batches(self, start: int) -> Iterator[Batch]:
    """Yields this process's rows of the global batches from step `start` on.

    Raises:
      UserError: more than `max_bad_images` images could not be decoded in the batches taken.
      UserError: a file has another checksum than it should.
    """
    for number, batch in enumerate(self._run(range(start, _LAST_BATCH)), start):
      self.bad.check(self._max_bad_images)
      yield self._labels.add(batch, number * self.info.batch_size + self._rows) if self._labels else batch

  def indexes(self, step: int) -> HostArray:
    """Returns the indexes `[B] i64` of the examples of the global batch of a step, all rows."""
    return self._visit(step * self.info.batch_size + np.arange(self.info.batch_size))


@dataclasses.dataclass
class Supply:
  """Starts threads or processes. `workers`, the number of processes, may be changed while they run: the batches of
  another number of them follow, and are the same. `batch_bytes` are those of this host's part of a batch."""
  make: batches.TrainBatches | batches.NativeBatches
  threads: int
  workers: int
  batch_bytes: int

  def __call__(self, numbers: range) -> Iterator[Batch]:
    def start(left: range, workers: int) -> prefetch.ClosableIterator:
      return prefetch.prefetched(self.make, left, threads=self.threads, workers=workers, batch_bytes=self.batch_bytes)
    return prefetch.AdjustingIterator(start, numbers, lambda: self.workers)


class EvalLoader(_Loader):
  """One pass over a split; a `core.contracts.EvalLoader`."""

  def __init__(self, source: Source, start: Start, *, batch_size: int, bad: BadImages,
               use: Callable[[int], verifying.Used]) -> None:
    super().__init__(start, bad, use)
    self.num_examples, self.describe, self._batch_size = len(source), source.describe, batch_size

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
                 maps: label_maps.LabelMaps | None = None, texts: AnyTexts | None = None,
                 features: StoredFeatures | None = None,
                 placement: schema.Placement = schema.Placement.ANYWHERE) -> TrainLoader:
  """Returns batches of `image label index box bad` for training; with views, those in place of image and box.

  Args:
    source: the training data; images that a teacher has labeled also have `token_labels` and `token_scores`.
    recipe: if in memory, only its resizing is applied here, the rest by `prepare_train(on_device_geometry=True)`.
    image_px, batch_size: height and width; examples of a global batch.
    seed: of order and host augmentation.
    shard: the rows of the batch that this process makes.
    workers: loader processes; 0 = threads; `schema.AUTO_WORKERS` = by the machine.
    threads: 0 = one per core, at most 16 in a process.
    in_memory: see `fits_in_memory`.
    max_bad_images: number of distinct bad images, on this host, above which the run stops.
    decode: which part of a JPEG that is cropped.
    max_labels: T of `label_list [B, T]`, which batches then also have; 0 = images have one class.
    maps: label maps of the source, which batches then also have.
    texts: of the source, which batches then also have; not with images in memory.
    features: of a teacher, which batches then also have; their crops are repeated. Not with images in memory.
    placement: which shards each host reads; not with images in memory, repeats or several sources.

  Raises:
    UserError: sizes that do not fit together, or a decoder that is not installed.
  """
  _check_sizes(source, batch_size=batch_size, seed=seed)
  assert not (in_memory and (texts or features))
  kinds = [transforms.train_shapes(recipe, image_px, max_labels=max_labels, num_tokens=num_tokens)
           | (texts.shapes if texts else {}) for num_tokens in recipe.native_lengths or (0,)]
  shapes = max(kinds, key=capacity.example_bytes)
  capacity.check_batch('batch_size', batch_size, shard, shapes)
  shard.rows(batch_size)  # raises if the size does not fit
  fit = transforms.eval_transform(transforms.at_one_size(recipe), image_px, max_labels=max_labels)
  period = features.info.num_rows if features else 0
  visit, grouped = _order(source, shard, recipe, placement, batch_size=batch_size, seed=seed, period=period)
  start: Start
  supply = None
  if in_memory:
    _check_crop(recipe)
    decoded = batches.decode_all(source, fit, threads=open_files.num_threads(threads))
    start = functools.partial(map, batches.MemoryTrainBatches(decoded, visit, batch_size, shard))
  else:
    made = tuple(batches.TrainBatches(source, transforms.train_transform(
        recipe, image_px, decode=decode, max_labels=max_labels, num_tokens=num_tokens), visit, own, seed, batch_size,
        shard, texts, period) for num_tokens, own in zip(recipe.native_lengths or (0,), kinds, strict=True))
    make = batches.NativeBatches(made, seed) if recipe.native_lengths else made[0]
    size = capacity.batch_bytes(batch_size, shard, shapes)
    workers = capacity.workers_at_start(workers, num_examples=len(source), batch_bytes=size, here=capacity.machine())
    start = supply = Supply(make, threads, workers, size)
  labels: Labels | None = (label_maps.MapLabels(maps) if maps else features or (
      TeacherLabels(source) if isinstance(source, PseudoLabeled) else None))
  digest = ''.join((source.digest, grouped, f' lengths={recipe.native_lengths}' if recipe.native_lengths else '',
                    labels.digest if labels else '', texts.digest if texts else ''))
  rows = shard.rows(batch_size)
  return TrainLoader(source, start, visit=visit, info=LoaderInfo(source.name, len(source), batch_size, seed, digest),
                     bad=BadImages(source, fit, texts), use=functools.partial(_used, source, visit, batch_size, rows),
                     max_bad_images=max_bad_images, rows=rows, labels=labels, texts=texts, supply=supply)


def _used(source: Source, visit: order.Visit, batch_size: int, rows: HostArray, first: int) -> verifying.Used:
  """Returns what batches from number `first` on use of a source."""
  return verifying.Used(source, lambda number: visit(number * batch_size + rows), start=first,
                        ahead=-(-len(source) // batch_size))


def _check_sizes(source: Source, *, batch_size: int, seed: int) -> None:
  if not len(source):
    raise UserError(f'{title(source)}: expected at least one example, got none. Choose another split or source.')
  check_batch_size(batch_size, len(source), title(source))
  if seed < 0:
    raise UserError(f'seed: expected 0 or more, got {seed}. Set another seed.')


def check_batch_size(batch_size: int, num_examples: int, where: str) -> None:
  """Raises UserError if a training batch has more examples than the source, whose title is `where`."""
  if batch_size > num_examples:
    raise UserError(f'batch_size: expected at most {num_examples:,}, the number of examples of {where}, got '
                    f'{batch_size:,}. Set --config.batch_size={1 << num_examples.bit_length() - 1}.')


def _order(source: Source, shard: Shard, recipe: schema.Recipe, placement: schema.Placement, *, batch_size: int,
           seed: int, period: int) -> tuple[order.Visit, str]:
  """Returns the order of the examples, of which the first `period` are repeated if it is set, and its description."""
  groups = schema.num_groups(batch_size, recipe.mix_group)
  is_placed = placement is not schema.Placement.ANYWHERE
  if period and is_placed:
    raise UserError(f'data.placement: expected anywhere with objective.features, got {placement.value}. '
                    'Set data.placement=anywhere.')
  visit = (_place(source, shard, placement, batch_size=batch_size, seed=seed) if is_placed else
           _visit(source, seed=seed, repeats=recipe.repeats, batch_size=batch_size, groups=groups))
  text = '' if recipe.repeats == 1 else f' repeats={recipe.repeats}' + (f' groups={groups}' if groups > 1 else '')
  text += f' {placement.value}={visit.num_hosts}' if isinstance(visit, order.HostShards) else ''
  text += group_order.describe(visit)
  return (order.Cycled(visit, period) if period else visit), text


def eval_loader(source: Source, *, recipe: schema.Recipe, image_px: tuple[int, int], batch_size: int,
                shard: Shard, threads: int, workers: int, in_memory: bool = False, max_labels: int = 0) -> EvalLoader:
  """Returns batches of `image label index box mask` with every example of `source` once.

  Arguments are those of `train_loader`; `in_memory` decodes once for all passes and does not change results; images
  at their own aspect are not held in memory.
  """
  if len(source) > _MOST_EVALUATED:
    raise UserError(f'{title(source)}: expected at most {_MOST_EVALUATED:,} examples to evaluate, got {len(source):,}. '
                    'Evaluate a part of it, such as data.eval_split=test[:1000000].')
  fit_shapes = transforms.eval_shapes(image_px, max_labels=max_labels, num_channels=recipe.channels,
                                      has_grid=recipe.eval_native_patch > 0)
  capacity.check_batch('batch_size of an evaluation', batch_size, shard, {'image': fit_shapes['image']})
  shard.rows(batch_size)
  fit = transforms.eval_transform(recipe, image_px, max_labels=max_labels)
  start: Start
  if in_memory and not recipe.eval_native_patch:
    decoded = batches.decode_all(source, fit, threads=open_files.num_threads(threads))
    start = functools.partial(map, batches.MemoryEvalBatches(decoded, batch_size, shard))
  else:
    start = functools.partial(prefetch.prefetched, batches.EvalBatches(source, fit, batch_size, shard), threads=threads,
                              workers=workers, batch_bytes=capacity.batch_bytes(batch_size, shard, fit_shapes))
  rows = shard.rows(batch_size)

  def use(first: int) -> verifying.Used:
    def indexes(number: int) -> HostArray:
      positions = number * batch_size + rows
      return positions[positions < len(source)]
    return verifying.Used(source, indexes, start=first, ahead=-(-len(source) // batch_size))
  return EvalLoader(source, start, batch_size=batch_size, bad=BadImages(source, fit), use=use)


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


def _place(source: Source, shard: Shard, placement: schema.Placement, *, batch_size: int,
           seed: int) -> order.HostShards:
  """Returns the order of training in which each host reads its own shards.

  Raises:
    UserError: the source has no shards, or too few, or those of this host are not there.
  """
  sizes, hosts = shard_sizes(source), shard.hosts or (0,) * shard.count
  num_hosts = max(hosts) + 1
  if sizes is None:
    raise UserError(f'data.placement: expected anywhere with {title(source)}, which does not consist of shards, got '
                    f'{placement.value}. Prepare it with vit-jax prepare.')
  if len(sizes) < num_hosts or len({hosts.count(host) for host in hosts}) > 1:
    raise UserError(f'data.placement: expected at least one shard for each of {num_hosts} hosts that load equal parts '
                    f'of a batch, got {len(sizes)} shards and parts of hosts {hosts}. Prepare the dataset with '
                    f'--shards={8 * num_hosts}, or set data.placement=anywhere.')
  visit = order.HostShards(np.array(sizes, np.int64), hosts, batch_size, seed,
                           placement is schema.Placement.HOST_SHARDS_ANEW)
  if placement is schema.Placement.HOST_SHARDS:
    nums = [int(visit.sizes[visit.shards(host, 0)].sum()) for host in range(num_hosts)]
    if max(nums) > 1.01 * min(nums):
      log.warning('data.placement=host_shards: hosts have %s to %s images, and those of a host that has fewer are used '
                  'more often. Prepare the dataset with a multiple of %s shards.', f'{min(nums):,}', f'{max(nums):,}',
                  num_hosts)
    starts = np.cumsum(visit.sizes) - visit.sizes
    for start in starts[visit.shards(hosts[shard.parts[0]], 0)].tolist():
      origin, place = find_origin(source, start)
      if hasattr(origin, 'check_file'):
        origin.check_file(place)
  return visit


def _visit(source: Source, *, seed: int, repeats: int, batch_size: int, groups: int) -> order.Visit:
  """Returns the order of training."""
  new = -(-batch_size // repeats)  # examples of a batch that the batch before does not have
  visit: order.Visit = (source.visit(seed, new) if isinstance(source, Mixture) else
                        group_order.visit(source, seed, new))
  if repeats == 1:
    return visit
  if batch_size < 2 * repeats:
    raise UserError(f'batch_size: expected at least {2 * repeats}, two different examples with data.recipe.repeats='
                    f'{repeats}, got {batch_size}. Set a larger batch_size, or data.recipe.repeats=1.')
  return order.Repeated(visit, repeats, batch_size, groups)
