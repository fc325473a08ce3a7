"""Types that all other modules use: arrays, batches, means, and the outputs of networks and objectives.

Arrays end in axis letters inside functions (`tokens_BND`). The letters, used everywhere in the project:

  B  batch                     V  views (crops) of one image
  H  W  pixels                 h  w  token grid
  N  h * w patch tokens        M  all tokens, with class token and registers
  P  patch side, px            D  width
  A  attention heads           K  width of one head, D / A
  Q  query tokens, where they are not the key tokens
  F  MLP width                 C  classes
  L  depth                     S  size of a dataset
  T  the largest number of labels of one image
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.core.errors import UserError

Array = jax.Array
Key = jax.Array
HostArray = np.ndarray
ArrayLike = jax.Array | np.ndarray
PyTree = Any
"""Any nested containers with arrays as leaves."""
Params = dict[str, Any]
"""Nested dict of f32 arrays. Path names are a public format."""
Extra = dict[str, Any]
"""State of an objective without gradients: teacher, center, EMA copy, BatchNorm state."""
Batch = dict[str, Any]
"""One batch: NumPy arrays on the host, jax arrays on devices. All possible keys:

  image         [B, H, W, 3] uint8 on the host, f32 after `Prepare`
  label         [B] i32, the class (the first class of an image with several); -1 without a class
  label_list    [B, T] i32, all classes of an image, padded with -1; precedes `label`
  labels        [B, C] f32, soft or multi-hot targets; precedes `label_list` and `label`
  mask          [B] f32, 0 where the row is padding
  grid          [B, 2] i32, rows and columns of patches of images at their own aspect; `image` then has the patches
  index         [B] i32 (i64 on the host), position in the source, which determines ids and file names
  box           [B, 4] f32, the crop as (top, left, bottom, right), fractions of the stored image; left > right
                if the crop is flipped, and outside [0, 1] if the crop is shifted
  bad           [B] bool, whether the image could not be decoded and was replaced
  views_global  [B, 2, H, W, 3]      views_local    [B, V, H, W, 3]
  views_gram    [B, 2, H, W, 3], larger copies of views_global
  token_labels  [B, N, k] i32        token_scores   [B, N, k] f32
  token_targets [B, N, C] f32, made by `Prepare`
  teacher_pooled [B, D] f16          teacher_patches [B, N, D] f16, stored features of a teacher
  text          [B, N] i32, tokens         text_mask     [B, N] bool, False for padding
"""


class NativeImages(NamedTuple):
  """Images at their own aspect ratios, cut into patches; a network takes them in place of `[B, H, W, 3]`.

  patches: `[B, N, P * P * 3]` f32, normalized, in raster order, the pixels of a patch row by row. The first
    `grid[:, 0] * grid[:, 1]` patches of each image count; the other patches are padding, with any finite values.
  grid: `[B, 2]` i32, the number of rows and of columns of patches.
  """
  patches: Array
  grid: Array

  @property
  def mask(self) -> Array:
    """Whether each patch belongs to the image, and is not padding: `[B, N]` bool."""
    return jnp.arange(self.patches.shape[1])[None] < (self.grid[:, 0] * self.grid[:, 1])[:, None]


Schedule = Callable[[Array | int], Array]
"""Maps a step, the number of updates that are done before it, to a value."""


@dataclasses.dataclass(frozen=True)
class Shard:
  """The rows of each global batch that one process loads. The batch is cut into `count` equal, contiguous parts.

  parts: numbers of this process's parts, ascending. The parts need not be adjacent: the chips of a TPU host are a
    square in the grid of the slice, so chips of other hosts can stand between these chips in the order of the mesh.
  """
  parts: tuple[int, ...]
  count: int

  def rows(self, batch_size: int) -> HostArray:
    """Returns row numbers `[b] i64` of a global batch, ascending.

    Raises:
      UserError: the batch size is not a multiple of `count`.
    """
    if batch_size < 1 or batch_size % self.count:
      raise UserError(f'batch_size: expected a positive multiple of {self.count}, the parts into which the mesh cuts a '
                      f'batch, got {batch_size}. Set such a number.')
    rows_per_part = batch_size // self.count
    return (np.array(self.parts, np.int64)[:, None] * rows_per_part + np.arange(rows_per_part)).ravel()


class Mean(NamedTuple):
  """Numerator and denominator of a mean, which can be added over batches and processes.

  `sum` and `weight` are f32 scalars; the value is `sum / weight`.
  """
  sum: Array
  weight: Array

  def __add__(self, other: Mean) -> Mean:  # type: ignore[override]
    return Mean(self.sum + other.sum, self.weight + other.weight)

  @property
  def value(self) -> Array:
    return self.sum / jnp.maximum(self.weight, 1e-12)


class Features(NamedTuple):
  """The output of a backbone: patch tokens `[B, N, D]`, pooled features `[B, D]`, and the token grid `(h, w)`.

  `distilled [B, D]` are the features of the distillation token, if the backbone has one. `losses` are scalars f32 that
  its blocks compute, such as a loss that balances experts, by name; None = there are none.
  """
  tokens: Array
  pooled: Array
  grid: tuple[int, int]
  distilled: Array | None = None
  losses: dict[str, Array] | None = None

  def maps(self) -> Array:
    """Returns the tokens as maps `[B, h, w, D]`. Raises UserError if there is not one token for each patch."""
    height, width = map(int, self.grid)
    if self.tokens.shape[1] != height * width:
      raise UserError(f'features: expected a token for each patch of the {height} × {width} grid, got '
                      f'{self.tokens.shape[1]}. Use a network that keeps all tokens for features of patches.')
    return self.tokens.reshape(len(self.tokens), height, width, -1)


class Outputs(NamedTuple):
  """The outputs of a view: `logits [B, C]` (None without a head), and the features from which logits are computed."""
  logits: Array | None
  features: Features


class LossOut(NamedTuple):
  """The value of an objective on one batch.

  loss: the mean over the valid examples; in nats for probabilities, in the squared unit of the targets for pixels.
  metrics: other means to log, by name.
  stats: arrays that are *summed* over microbatches and devices, and then passed to `after_update` once.
  """
  loss: Mean
  metrics: Mapping[str, Mean]
  stats: PyTree
