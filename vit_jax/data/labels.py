"""Targets of patch tokens: label maps of whole pictures join the batch on the host, and are cut on the device.

The loader attaches the maps as they are stored; after the recipe's geometry has written the box of each example, its
part of the map is sampled at the centres of the tokens. So a crop, flip or shift, on host or device, needs no more
than its box. What RandAugment moves is not followed, as in LV-ViT.
"""
from __future__ import annotations

import hashlib
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from vit_jax.core.api import Loader, Prepare
from vit_jax.core.types import Array, Batch, Key
from vit_jax.data.label_maps import LabelMaps


class LabelledLoader:
  """A loader whose batches also have `token_labels [B, h * w, k]` and `token_scores [B, h * w, k]` of whole pictures.

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
      labels[replaced], scores[replaced] = batch['label'][replaced, None, None], 1.
      yield {**batch, 'token_labels': labels, 'token_scores': scores}

  def close(self) -> None:
    """Stops workers and frees what they held."""
    self._inner.close()


def cutting(inner: Prepare, *, stored: tuple[int, int], grid: tuple[int, int]) -> Prepare:
  """A recipe's device part, and then the cut: maps on the grid `stored` become targets of the tokens of `grid`."""
  def prepare(batch: Batch, key: Key, step: Array) -> Batch:
    return cut(inner(batch, key, step), stored=stored, grid=grid)
  return prepare


def cut(batch: Batch, *, stored: tuple[int, int], grid: tuple[int, int]) -> Batch:
  """The part of each map that its example's box shows: `token_labels`, `token_scores` `[B, h * w, 4 k]`.

  Each token takes the four positions around its centre, with weights of bilinear interpolation (beyond the outermost
  centres: the nearest); a class may come several times. This is RoIAlign with one sample a bin, exact for the full
  class vector. A token whose centre lies outside of the picture gets scores of 0.

  Args:
    batch: `box [B, 4]`, `token_labels [B, N', k]` and `token_scores [B, N', k]` with N' the positions of `stored`.
    stored: rows and columns of the maps.
    grid: `(h, w)` of the tokens.
  """
  box_B4 = batch['box']
  rows_B2h, row_weights_B2h, in_rows_Bh = _sample(box_B4[:, 0], box_B4[:, 2], stored[0], grid[0])
  columns_B2w, column_weights_B2w, in_columns_Bw = _sample(box_B4[:, 1], box_B4[:, 3], stored[1], grid[1])
  found_labels, found_scores = [], []
  for r in (0, 1):
    for c in (0, 1):
      at_Bhw = rows_B2h[:, r, :, None] * stored[1] + columns_B2w[:, c, None, :]
      weight_Bhw = row_weights_B2h[:, r, :, None] * column_weights_B2w[:, c, None, :]
      weight_Bhw = weight_Bhw * in_rows_Bh[:, :, None] * in_columns_Bw[:, None, :]
      at_BN1, weight_BN1 = (x.reshape(x.shape[0], -1, 1) for x in (at_Bhw, weight_Bhw))
      found_labels.append(jnp.take_along_axis(batch['token_labels'], at_BN1, axis=1))
      found_scores.append(jnp.take_along_axis(batch['token_scores'], at_BN1, axis=1) * weight_BN1)
  return batch | {'token_labels': jnp.concatenate(found_labels, -1), 'token_scores': jnp.concatenate(found_scores, -1)}


def _sample(start_B: Array, stop_B: Array, num_stored: int, num: int) -> tuple[Array, Array, Array]:
  """Along one axis: the two positions about each token's centre `[B, 2, num]`, their weights, and whether it is inside.

  `start` and `stop` are fractions of the picture; a mirrored axis has start > stop.
  """
  middle_1n = (jnp.arange(num, dtype=jnp.float32)[None] + .5) / num
  centre_Bn = start_B[:, None] + middle_1n * (stop_B - start_B)[:, None]
  inside_Bn = ((centre_Bn >= 0.) & (centre_Bn <= 1.)).astype(jnp.float32)
  place_Bn = jnp.clip(centre_Bn * num_stored - .5, 0., num_stored - 1.)
  low_Bn = jnp.floor(place_Bn)
  rest_Bn = place_Bn - low_Bn
  high_Bn = jnp.minimum(low_Bn + 1, num_stored - 1)
  return (jnp.stack([low_Bn, high_Bn], 1).astype(jnp.int32), jnp.stack([1. - rest_Bn, rest_Bn], 1), inside_Bn)
