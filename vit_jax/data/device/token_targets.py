"""Targets from stored labels: label maps become targets of patch tokens, a teacher's probabilities become soft labels.

`device/prepare.py` calls `add` for token labeling and `soften` for Noisy Student, inside the jitted step. The loader
adds label maps to batches as they are stored: the highest logits of a classifier at each position. After the recipe's
geometry has written the box of each example, RoIAlign pools the part of its map inside the box, and the softmax over
all classes makes it a target. So maps are never cropped, flipped or shifted themselves: only the box changes.

As in the authors' program (zihangJiang/TokenLabeling@9dbfd59, tlt/data/mixup.py: get_featuremaps, get_label), a class
that is not stored has the logit 0.

Differs from TokenLabeling: the program passes the box to RoIAlign with rows and columns exchanged; here each token gets
the part of the map at its own place. The program also moves maps with the rotations, shears and translations of
RandAugment; here they follow only crops, flips and shifts.
"""
from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from vit_jax.core.types import Array, Batch


class Targets(NamedTuple):
  """How label maps become targets of tokens.

  stored: rows and columns of the maps.
  grid: rows and columns `(h, w)` of the tokens, N = h w.
  classes: whether the target of the class token is the map pooled over the complete box, not the image's label.
  """
  stored: tuple[int, int]
  grid: tuple[int, int]
  classes: bool


def add(batch: Batch, targets: Targets, *, num_classes: int) -> Batch:
  """Replaces `token_labels`, `token_scores [B, S, k]` by `token_targets [B, N, C]`; `classes` adds `labels [B, C]`."""
  batch = dict(batch)
  map_BSC = dense(batch.pop('token_labels'), batch.pop('token_scores'), num_classes)
  raw_BNC = roi_align(map_BSC, batch['box'], stored=targets.stored, grid=targets.grid)
  visible_BN1 = visible(batch['box'], targets.grid)[..., None]
  batch['token_targets'] = jax.nn.softmax(raw_BNC) * visible_BN1
  if targets.classes:
    box_B1C = roi_align(map_BSC, batch['box'], stored=targets.stored, grid=(1, 1))
    batch['labels'] = jax.nn.softmax(box_B1C[:, 0])
  return batch


def soften(batch: Batch, num_classes: int) -> Batch:
  """Replaces `token_labels` and `token_scores` (probabilities) `[B, 1, k]` by `labels [B, C] f32` with a sum of 1."""
  batch = dict(batch)
  labels_BC = dense(batch.pop('token_labels'), batch.pop('token_scores'), num_classes)[:, 0]
  return batch | {'labels': labels_BC / labels_BC.sum(-1, keepdims=True)}


def dense(labels_BSk: Array, scores_BSk: Array, num_classes: int) -> Array:
  """Returns the score of every class, `[B, S, C] f32`, given k stored classes and their scores; 0 for the others."""
  return (jax.nn.one_hot(labels_BSk, num_classes, dtype=jnp.float32) * scores_BSk[..., None]).sum(2)


def roi_align(map_BSC: Array, box_B4: Array, *, stored: tuple[int, int], grid: tuple[int, int]) -> Array:
  """Returns the mean of each map over each cell of its box, `[B, h w, C]` f32 (RoIAlign, arXiv 1703.06870, section 3).

  Equals `torchvision.ops.roi_align` with a box in units of positions minus 1/2, `sampling_ratio=-1` and
  `aligned=False`: along each axis a cell takes ceil(box / cells) samples in equal steps, interpolated linearly between
  the centers of the positions (outside of them: the nearest), and a box shorter than one position gets that length.

  Args:
    map_BSC: maps of complete images, S = rows x columns.
    box_B4: top, left, bottom, right in fractions of the image; left > right if it is mirrored.
    stored: rows and columns of the maps.
    grid: rows and columns of cells.
  """
  rows_Bhy = _axis_weights(box_B4[:, 0], box_B4[:, 2], stored[0], grid[0])
  columns_Bwx = _axis_weights(box_B4[:, 1], box_B4[:, 3], stored[1], grid[1])
  map_ByxC = map_BSC.reshape(map_BSC.shape[0], *stored, -1)
  exact = jax.lax.Precision.HIGHEST  # as the softmax amplifies errors of logits
  by_row = jnp.einsum('bhy,byxc->bhxc', rows_Bhy, map_ByxC, precision=exact)
  cells_BhwC = jnp.einsum('bwx,bhxc->bhwc', columns_Bwx, by_row, precision=exact)
  return cells_BhwC.reshape(cells_BhwC.shape[0], -1, cells_BhwC.shape[-1])


def _axis_weights(start_B: Array, stop_B: Array, num_stored: int, num_cells: int) -> Array:
  """Returns the weight of each position in each cell along one axis, `[B, num_cells, num_stored]` f32; rows sum to 1.

  `start` and `stop` are fractions of the image; a mirrored axis has start > stop. The number of samples of a cell
  depends on the box, which is at most the complete image: unused samples have the weight 0.

  Letters of axes, in this function: n cells, i samples of a cell, s stored positions.
  """
  most_samples = max(1, math.ceil(num_stored / num_cells))
  length_B = jnp.maximum(jnp.abs(stop_B - start_B) * num_stored, 1.)
  samples_B = jnp.clip(jnp.ceil(length_B / num_cells - 1e-4), 1, most_samples)  # - 1e-4: against rounding up
  samples_B11, cell_length_B11 = samples_B[:, None, None], (length_B / num_cells)[:, None, None]
  index_1n1 = jnp.arange(num_cells, dtype=jnp.float32)[None, :, None]
  sample_11i = jnp.arange(most_samples, dtype=jnp.float32)[None, None, :]
  along_Bni = (index_1n1 + (sample_11i + 0.5) / samples_B11) * cell_length_B11
  sign_B = jnp.where(stop_B < start_B, -1., 1.)
  located_Bni = (start_B * num_stored - 0.5)[:, None, None] + sign_B[:, None, None] * along_Bni
  located_Bni1 = jnp.clip(located_Bni, 0., num_stored - 1.)[..., None]  # where a sample lies, in units of positions
  position_111s = jnp.arange(num_stored, dtype=jnp.float32)[None, None, None, :]
  linear_weight_Bnis = jnp.maximum(1. - jnp.abs(located_Bni1 - position_111s), 0.)
  sample_weight_B1i = jnp.where(sample_11i < samples_B11, 1. / samples_B11, 0.)
  return (linear_weight_Bnis * sample_weight_B1i[..., None]).sum(2)


def visible(box_B4: Array, grid: tuple[int, int]) -> Array:
  """Returns `[B, N] f32`: 1 if the center of a token lies in the image, 0 if a shift has moved it out."""
  def inside(start_B: Array, stop_B: Array, num: int) -> Array:
    middle_1n = (jnp.arange(num, dtype=jnp.float32)[None] + 0.5) / num
    center_Bn = start_B[:, None] + middle_1n * (stop_B - start_B)[:, None]
    return ((center_Bn >= 0.) & (center_Bn <= 1.)).astype(jnp.float32)

  rows_Bh, columns_Bw = (inside(box_B4[:, i], box_B4[:, i + 2], grid[i]) for i in (0, 1))
  return (rows_Bh[:, :, None] * columns_Bw[:, None, :]).reshape(box_B4.shape[0], -1)
