"""Targets of patch tokens: label maps of whole images join the batch on the host, and become targets on the device.

The loader attaches the maps as they are stored: the highest logits of a classifier at each position. After the recipe's
geometry has written the box of each example, RoIAlign pools the part of its map that the box shows, and the softmax
over all classes makes it a target. So a crop, flip or shift, on host or device, needs no more than its box.

As in the authors' program (zihangJiang/TokenLabeling@9dbfd59, tlt/data/mixup.py: get_featuremaps, get_label), a class
that is not among the stored ones has the logit 0. Where this differs: the program passes the box to RoIAlign with rows
and columns exchanged, here each token gets the part of the map that it shows; and the program moves maps with the
rotations, shears and translations of RandAugment, here only crops, flips and shifts are followed.
"""
from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.core.contracts import Loader, Prepare
from vit_jax.core.types import Array, Batch, Key
from vit_jax.data.sources.label_maps import LabelMaps

CERTAIN = 30.  # logit of a class that is certain: among 1,000 with logit 0 its probability is 1 - 1e-10


class LabelledLoader:
  """A loader whose batches also have `token_labels [B, h * w, k]` and `token_scores [B, h * w, k]` of whole images.

  Where a bad image was replaced by another one, every position has that one's class.
  """

  def __init__(self, inner: Loader, maps: LabelMaps):
    self._inner, self._maps = inner, maps
    of_maps = hashlib.sha256(str(maps.info).encode()).hexdigest()
    self.info = inner.info._replace(digest=f'{inner.info.digest} maps={of_maps}')
    self.describe = inner.describe

  def batches(self, start: int) -> Iterator[Batch]:
    """This process's rows of the global batches from step `start` on."""
    for batch in self._inner.batches(start):
      labels, scores = self._maps.read(batch['index'])
      replaced = np.flatnonzero(batch['bad'])
      labels[replaced], scores[replaced] = batch['label'][replaced, None, None], 0.
      scores[replaced, :, 0] = CERTAIN
      yield {**batch, 'token_labels': labels, 'token_scores': scores}

  def close(self) -> None:
    """Stops workers and frees what they held."""
    self._inner.close()


def targeting(inner: Prepare, *, stored: tuple[int, int], grid: tuple[int, int], num_classes: int,
              classes: bool) -> Prepare:
  """A recipe's device part, and then the targets: `token_targets [B, N, C]`, and with `classes` `labels [B, C]`.

  Args:
    inner: the recipe's device part; it writes the box of each example.
    stored: rows and columns of the maps.
    grid: `(h, w)` of the tokens, N = h w.
    num_classes: C.
    classes: whether the target of the class token is that of the whole box, in place of the image's label.
  """
  def prepare(batch: Batch, key: Key, step: Array) -> Batch:
    batch = dict(inner(batch, key, step))
    map_BSC = dense(batch.pop('token_labels'), batch.pop('token_scores'), num_classes)
    raw_BNC = roi_align(map_BSC, batch['box'], stored=stored, grid=grid)
    shown_BN1 = shown(batch['box'], grid)[..., None]
    found = batch | {'token_targets': jax.nn.softmax(raw_BNC) * shown_BN1}
    if classes:
      whole_B1C = roi_align(map_BSC, batch['box'], stored=stored, grid=(1, 1))
      found |= {'labels': jax.nn.softmax(whole_B1C[:, 0])}
    return found
  return prepare


def dense(labels_BSk: Array, scores_BSk: Array, num_classes: int) -> Array:
  """Class vectors `[B, S, C]` f32 of stored classes and scores; 0 for classes that are not stored."""
  return (jax.nn.one_hot(labels_BSk, num_classes, dtype=jnp.float32) * scores_BSk[..., None]).sum(2)


def roi_align(map_BSC: Array, box_B4: Array, *, stored: tuple[int, int], grid: tuple[int, int]) -> Array:
  """The mean of each map over each cell of its box, `[B, h w, C]` f32 (RoIAlign, arXiv 1703.06870, section 3).

  As `torchvision.ops.roi_align` has it with a box in units of positions minus 1/2, `sampling_ratio=-1` and
  `aligned=False`: along each axis a cell takes ceil(box / cells) samples in equal steps, interpolated linearly between
  the positions' centres (beyond the outermost: the nearest), and a box shorter than one position is made that long.

  Args:
    map_BSC: of whole images, S = rows x columns.
    box_B4: top, left, bottom, right in fractions of the image; left > right where it is mirrored.
    stored: rows and columns of the maps.
    grid: rows and columns of cells.
  """
  rows_Bhy = _axis_weights(box_B4[:, 0], box_B4[:, 2], stored[0], grid[0])
  columns_Bwx = _axis_weights(box_B4[:, 1], box_B4[:, 3], stored[1], grid[1])
  map_ByxC = map_BSC.reshape(map_BSC.shape[0], *stored, -1)
  exact = jax.lax.Precision.HIGHEST  # logits, of which exponentials are taken
  by_row = jnp.einsum('bhy,byxc->bhxc', rows_Bhy, map_ByxC, precision=exact)
  found = jnp.einsum('bwx,bhxc->bhwc', columns_Bwx, by_row, precision=exact)
  return found.reshape(found.shape[0], -1, found.shape[-1])


def _axis_weights(start_B: Array, stop_B: Array, num_stored: int, num: int) -> Array:
  """Along one axis: how much each position counts in each cell, `[B, num, num_stored]` f32; rows add up to 1.

  `start` and `stop` are fractions of the image; a mirrored axis has start > stop. The number of samples of a cell goes
  by the box, so it is an array; a box is at most the whole image.
  """
  most = max(1, math.ceil(num_stored / num))
  length_B = jnp.maximum(jnp.abs(stop_B - start_B) * num_stored, 1.)
  samples_B = jnp.clip(jnp.ceil(length_B / num - 1e-4), 1, most)  # 1e-4: rounding of f32 makes no further sample
  samples_B11, cell_B11 = samples_B[:, None, None], (length_B / num)[:, None, None]
  number_1n1 = jnp.arange(num, dtype=jnp.float32)[None, :, None]
  sample_11i = jnp.arange(most, dtype=jnp.float32)[None, None, :]
  along_Bni = (number_1n1 + (sample_11i + .5) / samples_B11) * cell_B11
  sign_B = jnp.where(stop_B < start_B, -1., 1.)
  place_Bni = (start_B * num_stored - .5)[:, None, None] + sign_B[:, None, None] * along_Bni
  place_Bni1 = jnp.clip(place_Bni, 0., num_stored - 1.)[..., None]
  position_111s = jnp.arange(num_stored, dtype=jnp.float32)[None, None, None, :]
  near_Bnis = jnp.maximum(1. - jnp.abs(place_Bni1 - position_111s), 0.)
  taken_B1i = jnp.where(sample_11i < samples_B11, 1. / samples_B11, 0.)
  return (near_Bnis * taken_B1i[..., None]).sum(2)


def shown(box_B4: Array, grid: tuple[int, int]) -> Array:
  """`[B, N] f32`: 1 where the centre of a token lies in the image, 0 where a shift has moved it out."""
  def inside(start_B: Array, stop_B: Array, num: int) -> Array:
    middle_1n = (jnp.arange(num, dtype=jnp.float32)[None] + .5) / num
    centre_Bn = start_B[:, None] + middle_1n * (stop_B - start_B)[:, None]
    return ((centre_Bn >= 0.) & (centre_Bn <= 1.)).astype(jnp.float32)

  rows_Bh, columns_Bw = (inside(box_B4[:, i], box_B4[:, i + 2], grid[i]) for i in (0, 1))
  return (rows_Bh[:, :, None] * columns_Bw[:, None, :]).reshape(box_B4.shape[0], -1)
