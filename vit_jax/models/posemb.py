"""Position embeddings of patch tokens, and their resizing to another token grid.

Tokens of a grid `(h, w)` are in row-major order. Knows nothing of the class token.
"""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.config.schema import Positions
from vit_jax.core.types import Array, ArrayLike

TEMPERATURE = 10_000.  # MoCo v3, arXiv 2104.02057; MAE and big_vision use the same


def sincos2d(grid: tuple[int, int], width: int) -> np.ndarray:
  """Fixed 2-D sine-cosine embedding, `[h * w, width]` f32.

  `[sin(x w_j), cos(x w_j), sin(y w_j), cos(y w_j)]` with x the column, y the row and
  `w_j = 10000^(-j / (width / 4 - 1))`, `j = 0 .. width / 4 - 1`. `width` is a multiple of 4, at least 8.
  """
  return _sincos(grid, np.arange(width // 4) / (width // 4 - 1))


def sincos2d_mae(grid: tuple[int, int], width: int) -> np.ndarray:
  """As `sincos2d`, but `w_j = 10000^(-j / (width / 4))`: MAE's (and MoCo v3's), a little faster at each j > 0."""
  return _sincos(grid, np.arange(width // 4) / (width // 4))


def _sincos(grid: tuple[int, int], exponents: np.ndarray) -> np.ndarray:
  omega = TEMPERATURE ** -exponents
  y, x = np.meshgrid(np.arange(grid[0]), np.arange(grid[1]), indexing='ij')
  angle_x, angle_y = x.reshape(-1, 1) * omega[None], y.reshape(-1, 1) * omega[None]
  parts = [np.sin(angle_x), np.cos(angle_x), np.sin(angle_y), np.cos(angle_y)]
  return np.concatenate(parts, axis=1).astype(np.float32)


FIXED = {Positions.SINCOS2D: sincos2d, Positions.SINCOS2D_MAE: sincos2d_mae}


def interpolation(old: int, new: int) -> np.ndarray:
  """Matrix `[new, old]` f32 of linear interpolation with aligned corners.

  Sample `i` lies at `i (old - 1) / (new - 1)`, split exactly into whole part and remainder. In floating
  point the last one can land beyond the last entry: a library zoom with zero padding then returns zeros
  for the last row, as happens to published loaders for 28 -> 48, 32 -> 16 and 16 -> 30.
  """
  whole, rest = np.divmod(np.arange(new) * (old - 1), max(new - 1, 1))
  fraction = rest / max(new - 1, 1)
  matrix = np.zeros((new, old))
  matrix[np.arange(new), whole] = 1. - fraction
  matrix[np.arange(new), np.minimum(whole + 1, old - 1)] += fraction
  return matrix.astype(np.float32)


def resize(positions: ArrayLike, old_grid: tuple[int, int], new_grid: tuple[int, int]) -> Array:
  """Bilinear interpolation with aligned corners, without antialiasing.

  The convention of the published JAX loaders, so that their fine-tuning results can be had again; timm
  and torch align pixel borders instead.

  Args:
    positions: `[h * w, D]` f32 of `old_grid`, patch tokens only.
    old_grid: `(h, w)`, any.
    new_grid: `(h, w)`, any; equal to `old_grid` returns `positions`.

  Returns:
    `[h * w, D]` f32 of `new_grid`.
  """
  positions = jnp.asarray(positions)
  assert positions.shape[0] == old_grid[0] * old_grid[1], (positions.shape, old_grid)
  if old_grid == new_grid:
    return positions
  rows, columns = (jnp.asarray(interpolation(o, n)) for o, n in zip(old_grid, new_grid, strict=True))
  grid_hwD = positions.reshape(*old_grid, -1)
  resized_hwD = jnp.einsum('ih,jw,hwd->ijd', rows, columns, grid_hwD, precision=jax.lax.Precision.HIGHEST)
  return resized_hwD.reshape(-1, positions.shape[-1])


def joined(row: Array, column: Array, grid: tuple[int, int]) -> Array:
  """Column and row embedding of each token, concatenated (ViT paper, Appendix D.4, "2-D").

  Args:
    row: `[h, D / 2]` f32, the Y-embedding.
    column: `[w, D / 2]` f32, the X-embedding.
    grid: `(h, w)`; if it is another one, each is resized along its axis as `resize` does.

  Returns:
    `[h * w, D]` f32, the column's half first.
  """
  row, column = (resize(a, (a.shape[0], 1), (new, 1)) for a, new in zip((row, column), grid, strict=True))
  halves = (jnp.broadcast_to(column[None], (*grid, column.shape[1])),
            jnp.broadcast_to(row[:, None], (*grid, row.shape[1])))
  return jnp.concatenate(halves, axis=-1).reshape(grid[0] * grid[1], -1)
