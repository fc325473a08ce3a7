"""Tokens of a network on images with masks: each image is read once, and only one batch of tokens is on the devices.

Every process reads its own images. Their windows are put into batches of one size, and all processes take part in each
batch until every process has run out of windows, so images may have any number of windows.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vit_jax.core.contracts import Prepare, View
from vit_jax.core.errors import UserError
from vit_jax.core.numerics import BATCH_AXES
from vit_jax.core.types import Array, Batch, HostArray, PyTree
from vit_jax.data import workers
from vit_jax.data.image.masks import MaskedImages
from vit_jax.evaluate import features
from vit_jax.evaluate.linear import Data
from vit_jax.evaluate.results import check_finite, check_size
from vit_jax.models import intermediates
from vit_jax.parallel import mesh as meshes
from vit_jax.record.progress import TaskProgress

MEMORY_SHARE = 4
"""The training tokens may take one part in so many of the memory: they are copied for the devices and standardized."""
Heads = Callable[[Array], Array]
"""Maps tokens `[B, N, D]` to what is fetched for each of them, `[B, N, c]`."""


@dataclasses.dataclass(frozen=True, eq=False)
class Grids:
  """Reads patch tokens of a view, `[B, h * w * D]` f32: after the chosen blocks, or the last ones of the network."""
  view: View
  backbone: intermediates.LayeredBackbone | None
  blocks: tuple[int, ...]
  grid: tuple[int, int]
  norm: bool

  def __call__(self, selected: PyTree, image: Array) -> Array:
    if self.backbone is None:
      tokens = self.view.predict(selected, image).features.tokens
    else:
      tokens = intermediates.grids(self.backbone, selected['backbone'], image, self.blocks, grid=self.grid,
                                  norm=self.norm, state=selected['state'])
    return tokens.reshape(len(image), -1)


class Draw(NamedTuple):
  """Which tokens of a training image are taken: at most `number` (0 = all) of those with a class, by a seed."""
  number: int
  seed: int

  def rows(self, classes: HostArray, index: int) -> HostArray:
    """Returns the chosen rows of tokens with these classes `[N]`, ascending; of image `index` of the source."""
    rows = np.flatnonzero(classes >= 0)
    if not 0 < self.number < len(rows):
      return rows
    rng = np.random.Generator(np.random.Philox(key=[self.seed, index]))
    return np.sort(rng.choice(rows, self.number, replace=False))


class Tokens:
  """The tokens of a view on the images of a source.

  Args:
    reader: of the tokens.
    prepare: of the images.
    images: of the source.
    batch_size: of windows, global.
    mesh: of the parameters.
    threads: that decode images; 0 = one per core.
    name: for messages.
    bar: whether progress may be shown as a bar.
  """

  def __init__(self, reader: Grids, prepare: Prepare, images: MaskedImages, *, batch_size: int, mesh: Mesh,
               threads: int, name: str, bar: bool) -> None:
    check_size(name, len(images.source))
    self.images, self.mesh, self.name, self.num_examples = images, mesh, name, len(images.source)
    self._reader, self._prepare, self._threads, self._bar = reader, prepare, threads, bar
    self.shard = meshes.local_shard(mesh)
    self._num_windows = len(self.shard.rows(batch_size))

  def stream(self, selected: PyTree, heads: Heads) -> Iterator[tuple[Batch, HostArray]]:
    """Yields this process's images with what `heads` returns for their windows, `[n, h, w, c]`.

    Every process must call it, and consume all of it.
    """
    mine = range(jax.process_index(), self.num_examples, jax.process_count())
    examples = workers.batches(self.images, mine, workers.Workers(self._threads))
    pending: list[Batch] = []
    windows: list[HostArray] = []
    ready: list[HostArray] = []
    done = 0
    with TaskProgress(self.name, len(mine), unit='images', bar=self._bar, active=jax.process_index() == 0) as progress:
      while True:
        while len(windows) < self._num_windows and (example := next(examples, None)) is not None:
          pending.append(example)
          windows += list(example['windows'])
        if not multihost_utils.process_allgather(np.array(bool(windows))).any():
          return
        ready += list(self._apply(selected, windows[:self._num_windows], heads))
        windows = windows[self._num_windows:]
        while pending and len(ready) >= len(pending[0]['windows']):
          example = pending.pop(0)
          num = len(example['windows'])
          yield example, np.stack(ready[:num]).reshape(num, *self.images.grid, -1)
          ready, done = ready[num:], done + 1
          progress.update(done)

  def _apply(self, selected: PyTree, windows: list[HostArray], heads: Heads) -> HostArray:
    """Returns what the heads give for at most one batch of windows, `[n, N, c]`."""
    batch = np.zeros((self._num_windows, *self.images.window_px, 3), np.uint8)
    mask = np.zeros(self._num_windows, np.float32)
    if windows:
      batch[:len(windows)], mask[:len(windows)] = np.stack(windows), 1.
    placed = meshes.put_batch({'image': batch, 'mask': mask}, self.mesh, self.shard)
    try:
      flat, counts = features.read(self._reader, self._prepare, self.mesh, selected, placed)
    except UserError as error:  # raised while tracing, from shapes
      raise UserError(f'{self.name}: {error}') from None
    check_finite(self.name, int(jax.device_get(counts)[0]), selected)
    h, w = self.images.grid
    parts = features.local_parts(heads(flat.reshape(len(flat), h * w, -1)))
    return parts.reshape(-1, *parts.shape[2:])[:len(windows)]

  def table(self, selected: PyTree, draw: Draw) -> Data:
    """Returns the drawn tokens of all images on the devices; `example` is the position of their image.

    Raises:
      UserError: they do not fit into memory, or none has a class.
    """
    limit = workers.memory_bytes() // MEMORY_SHARE
    num_images = -(-self.num_examples // jax.process_count())
    rows: list[tuple[HostArray, HostArray, int]] = []
    num_tokens = 0
    for example, tokens in self.stream(selected, lambda tokens: tokens):
      flat, label = tokens.reshape(-1, tokens.shape[-1]), example['tokens'].ravel()
      chosen = draw.rows(label, int(example['index']))
      rows.append((flat[chosen], label[chosen], int(example['index'])))
      num_tokens += len(chosen)
      token_bytes = flat.shape[1] * flat.itemsize
      if (expected := num_tokens / len(rows) * token_bytes * num_images) > limit:
        raise UserError(
            f'{self.name}: expected training tokens that fit into {limit / 2**30:,.1f} GiB, one part in '
            f'{MEMORY_SHARE} of the memory, got about {expected / 2**30:,.1f} GiB of {num_images:,} images. '
            f'Set tokens_per_image of the evaluation to at most {limit // token_bytes // num_images:,}.')
    return self._place(rows)

  def _place(self, rows: list[tuple[HostArray, HostArray, int]]) -> Data:
    """Places this process's tokens, and those of the others, as `[G, R, …]`."""
    parts = len(self.shard.parts)
    total = sum(len(label) for _, label, _ in rows)
    num_rows = int(multihost_utils.process_allgather(np.array(-(-total // parts), np.int32)).max())
    if not num_rows:
      raise UserError(f'{self.name}: expected a training image with a pixel that counts, got none. '
                      'Choose another split, or another class to ignore.')
    width = rows[0][0].shape[1]
    local = [np.zeros((num_rows * parts, *shape), kind) for shape, kind in (
        ((width,), np.float32), ((), np.int32), ((), np.float32), ((), np.int32))]
    start = 0
    for tokens, label, index in rows:
      for array, value in zip(local, (tokens, label, 1., index), strict=True):
        array[start:start + len(label)] = value
      start += len(label)
    sharding = NamedSharding(self.mesh, PartitionSpec(BATCH_AXES))
    return Data(*(jax.make_array_from_process_local_data(
        sharding, x.reshape(parts, num_rows, *x.shape[1:]), (self.shard.count, num_rows, *x.shape[1:]))
        for x in local))
