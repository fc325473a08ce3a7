"""Targets from stored labels: label maps become targets of patch tokens, a teacher's probabilities become soft labels.

`device/prepare.py` calls `add` for token labeling and `soften` for Noisy Student, inside the jitted step. The loader
adds label maps to batches as they are stored: the highest logits of a classifier at each position. The recipe's
geometry never crops, flips or shifts a map, but writes the box of each example, the part of the image that is visible.
RoIAlign then pools the part of the map inside the box, and a softmax over all classes makes the result a target.

As in the authors' program (zihangJiang/TokenLabeling@9dbfd59, tlt/data/mixup.py: get_featuremaps, get_label), a class
that is not stored has the logit 0.

Differs from TokenLabeling: the program passes the box to RoIAlign with rows and columns exchanged; here each token gets
the part of the map at the position of the token. The program also moves maps with the rotations, shears and
translations of RandAugment; here maps follow only crops, flips and shifts.
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
  classes: whether the target of the class token is the map pooled over the complete box, or else the image's label.
  """
  stored: tuple[int, int]
  grid: tuple[int, int]
  classes: bool


def add(batch: Batch, targets: Targets, *, num_classes: int) -> Batch:
  """Replaces `token_labels`, `token_scores [B, S, k]` by `token_targets [B, N, C]`; may add `labels [B, C]`."""
  batch = dict(batch)
  map_BSC = dense(batch.pop('token_labels'), batch.pop('token_scores'), num_classes)
  logits_BNC = roi_align(map_BSC, batch['box'], stored=targets.stored, grid=targets.grid)
  visible_BN1 = visible(batch['box'], targets.grid)[..., None]
  batch['token_targets'] = jax.nn.softmax(logits_BNC) * visible_BN1
  if targets.classes:
    box_logits_B1C = roi_align(map_BSC, batch['box'], stored=targets.stored, grid=(1, 1))
    batch['labels'] = jax.nn.softmax(box_logits_B1C[:, 0])
  return batch


def soften(batch: Batch, num_classes: int) -> Batch:
  """Replaces `token_labels` and `token_scores [B, 1, k]`, probabilities, by `labels [B, C] f32` with a sum of 1."""
  batch = dict(batch)
  labels_BC = dense(batch.pop('token_labels'), batch.pop('token_scores'), num_classes)[:, 0]
  return batch | {'labels': labels_BC / labels_BC.sum(-1, keepdims=True)}


def dense(labels_BSk: Array, scores_BSk: Array, num_classes: int) -> Array:
  """Returns the score of every class, `[B, S, C] f32`, given k stored classes and their scores; 0 for the others."""
  return (jax.nn.one_hot(labels_BSk, num_classes, dtype=jnp.float32) * scores_BSk[..., None]).sum(2)


def roi_align(map_BSC: Array, box_B4: Array, *, stored: tuple[int, int], grid: tuple[int, int]) -> Array:
  """Returns the mean of each map in each cell of a box, `[B, h w, C]` f32 (RoIAlign, arXiv 1703.06870, section 3).

  Equals `torchvision.ops.roi_align` with a box in units of positions minus 1/2, `sampling_ratio=-1` and
  `aligned=False`: along each axis a cell takes ceil(box / cells) samples in equal steps, interpolated linearly between
  the centers of the positions (outside of them: the nearest), and a box shorter than one position gets that length.

  Args:
    map_BSC: maps of complete images, S = rows x columns.
    box_B4: top, left, bottom, right in fractions of the image; left > right if the box is mirrored.
    stored: rows and columns of the maps.
    grid: rows and columns of cells.
  """
  rows_Bhy = _axis_weights(box_B4[:, 0], box_B4[:, 2], stored[0], grid[0])
  columns_Bwx = _axis_weights(box_B4[:, 1], box_B4[:, 3], stored[1], grid[1])
  map_ByxC = map_BSC.reshape(map_BSC.shape[0], *stored, -1)
  exact = jax.lax.Precision.HIGHEST  # as the softmax amplifies errors of logits
  pooled_rows_BhxC = jnp.einsum('bhy,byxc->bhxc', rows_Bhy, map_ByxC, precision=exact)
  cells_BhwC = jnp.einsum('bwx,bhxc->bhwc', columns_Bwx, pooled_rows_BhxC, precision=exact)
  return cells_BhwC.reshape(cells_BhwC.shape[0], -1, cells_BhwC.shape[-1])


def _axis_weights(start_B: Array, stop_B: Array, num_stored: int, num_cells: int) -> Array:
  """Returns the weight of each position in each cell along one axis, `[B, num_cells, num_stored]` f32; rows sum to 1.

  `start` and `stop` are fractions of the image; a mirrored axis has start > stop. Each cell takes as many samples as
  the length of the box requires, at most `max_samples`; samples beyond that number have the weight 0.

  Letters of axes, in this function: n cells, i samples of a cell, s stored positions.
  """
  max_samples = max(1, math.ceil(num_stored / num_cells))
  length_B = jnp.maximum(jnp.abs(stop_B - start_B) * num_stored, 1.)  # all lengths are in units of positions
  num_samples_B = jnp.clip(jnp.ceil(length_B / num_cells - 1e-4), 1, max_samples)  # - 1e-4: against rounding up
  num_samples_B11 = num_samples_B[:, None, None]
  cell_length_B11 = (length_B / num_cells)[:, None, None]
  cell_1n1 = jnp.arange(num_cells, dtype=jnp.float32)[None, :, None]
  sample_11i = jnp.arange(max_samples, dtype=jnp.float32)[None, None, :]
  distance_Bni = (cell_1n1 + (sample_11i + 0.5) / num_samples_B11) * cell_length_B11  # of a sample from the start
  sign_B = jnp.where(stop_B < start_B, -1., 1.)
  location_Bni = (start_B * num_stored - 0.5)[:, None, None] + sign_B[:, None, None] * distance_Bni
  location_Bni1 = jnp.clip(location_Bni, 0., num_stored - 1.)[..., None]
  position_111s = jnp.arange(num_stored, dtype=jnp.float32)[None, None, None, :]
  linear_weight_Bnis = jnp.maximum(1. - jnp.abs(location_Bni1 - position_111s), 0.)
  sample_weight_B1i = jnp.where(sample_11i < num_samples_B11, 1. / num_samples_B11, 0.)
  return (linear_weight_Bnis * sample_weight_B1i[..., None]).sum(2)


def visible(box_B4: Array, grid: tuple[int, int]) -> Array:
  """Returns `[B, N] f32`: 1 if the center of a token lies in the image, 0 if a shift has moved it out."""
  def inside(start_B: Array, stop_B: Array, num_tokens: int) -> Array:
    """Returns `[B, num_tokens] f32`: 1 if the center of a token along one axis lies in the image."""
    center_in_box_1n = (jnp.arange(num_tokens, dtype=jnp.float32)[None] + 0.5) / num_tokens
    center_Bn = start_B[:, None] + center_in_box_1n * (stop_B - start_B)[:, None]
    return ((center_Bn >= 0.) & (center_Bn <= 1.)).astype(jnp.float32)

  rows_Bh = inside(box_B4[:, 0], box_B4[:, 2], grid[0])
  columns_Bw = inside(box_B4[:, 1], box_B4[:, 3], grid[1])
  return (rows_Bh[:, :, None] * columns_Bw[:, None, :]).reshape(box_B4.shape[0], -1)
