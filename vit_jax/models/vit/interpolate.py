"""Resizing of position embeddings to another token grid, as the programs do it that weights come from.

Each axis is resized by a constant matrix. Tokens of a grid `(h, w)` are in row-major order.
"""
from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.config.schema import PositionResize
from vit_jax.core.types import Array, ArrayLike
from vit_jax.models.vit import free_sizes
from vit_jax.models.vit.free_sizes import ANTIALIASED, OFFSET, PLAIN


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


def cubic(distance: np.ndarray, a: float) -> np.ndarray:
  """Keys' cubic kernel at `distance` in pixels."""
  x = np.abs(distance)
  near = ((a + 2) * x - (a + 3)) * x * x + 1
  far = ((x - 5) * x + 8) * x * a - 4 * a
  return np.where(x < 1, near, np.where(x < 2, far, 0.))


def bicubic(old: int, new: int, *, offset: float = 0.) -> np.ndarray:
  """Matrix `[new, old]` f64 of PyTorch's cubic interpolation, `align_corners=False`, without antialiasing.

  Sample i lies at `(i + 1/2) old / (new + offset) - 1/2`; the first and last entry are repeated beyond the ends.
  """
  centers = (np.arange(new) + .5) * old / (new + offset) - .5
  first = np.floor(centers).astype(int)
  matrix = np.zeros((new, old))
  for step in range(-1, 3):
    places = np.clip(first + step, 0, old - 1)
    np.add.at(matrix, (np.arange(new), places), cubic(centers - (first + step), PLAIN))
  return matrix


def bicubic_antialias(old: int, new: int) -> np.ndarray:
  """Matrix `[new, old]` f64 of PyTorch's and Pillow's antialiased cubic interpolation.

  Sample i lies at `(i + 1/2) old / new - 1/2`; the kernel is as wide as a new pixel where that is the wider one.
  Weights beyond the ends are left out and the others made to sum to 1.
  """
  return _antialiased(old, new, functools.partial(cubic, a=ANTIALIASED))


def bilinear(old: int, new: int) -> np.ndarray:
  """Matrix `[new, old]` f64 of PyTorch's linear interpolation, `align_corners=False`, without antialiasing.

  Sample i lies at `(i + 1/2) old / new - 1/2`; the first and last entry are repeated beyond the ends.
  """
  centers = np.clip((np.arange(new) + .5) * old / new - .5, 0, old - 1)
  return _triangle(np.arange(old)[None] - centers[:, None])


def bilinear_antialias(old: int, new: int) -> np.ndarray:
  """Matrix `[new, old]` f64 of the antialiased linear interpolation of PyTorch, Pillow and `jax.image.resize`.

  As `bicubic_antialias`, with the triangle as kernel.
  """
  return _antialiased(old, new, _triangle)


def _triangle(distance: np.ndarray) -> np.ndarray:
  return np.maximum(0., 1. - np.abs(distance))


def _antialiased(old: int, new: int, kernel: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
  """Matrix `[new, old]` of a kernel that is as wide as a new sample where that is the wider one; rows sum to 1."""
  centers = (np.arange(new) + .5) * old / new - .5
  weights = kernel((np.arange(old)[None] - centers[:, None]) / max(old / new, 1.))
  return weights / weights.sum(1, keepdims=True)


def matrix(old: int, new: int, how: PositionResize) -> np.ndarray:
  """Matrix `[new, old]` f64 that resizes positions along one axis; of a square if `how` says so."""
  match how:
    case PositionResize.ALIGNED:
      return interpolation(old, new).astype(np.float64)
    case PositionResize.BICUBIC:
      return bicubic(old, new)
    case PositionResize.BICUBIC_OFFSET:
      return bicubic(old, new, offset=OFFSET)
    case PositionResize.BICUBIC_ANTIALIAS | PositionResize.BICUBIC_ANTIALIAS_SQUARE:
      return bicubic_antialias(old, new)
    case PositionResize.BILINEAR:
      return bilinear(old, new)
    case PositionResize.BILINEAR_ANTIALIAS:
      return bilinear_antialias(old, new)


def both(old: tuple[int, int], new: tuple[int, int], how: PositionResize) -> tuple[np.ndarray, np.ndarray]:
  """Matrices `[h', h]` and `[w', w]` f64 for both sides of a grid."""
  sides = (max(new),) * 2 if how is PositionResize.BICUBIC_ANTIALIAS_SQUARE else new
  rows, columns = (matrix(o, side, how)[:n] for o, side, n in zip(old, sides, new, strict=True))
  return rows, columns


def matrices(old: tuple[int, int], new: tuple[int, int], how: PositionResize) -> tuple[Array, Array]:
  """Matrices `[h', h]` and `[w', w]` f32 for both sides of a grid; new sides may be symbols of `jax.export`."""
  if not free_sizes.is_free(new):
    rows, columns = (jnp.asarray(one, jnp.float32) for one in both(old, new, how))
    return rows, columns
  is_own = free_sizes.same(old, new)
  rows, columns = (free_sizes.weights(jnp.arange(n), o, side, how, is_own=is_own)
                   for o, n, side in zip(old, new, free_sizes.sides(new, how, is_own=is_own), strict=True))
  return rows, columns


def resize(positions: ArrayLike, old_grid: tuple[int, int], new_grid: tuple[int, int], how: PositionResize) -> Array:
  """Resizes positions to another grid, by a constant matrix for each axis.

  Args:
    positions: `[h * w, D]` f32 of `old_grid`, patch tokens only.
    old_grid: `(h, w)`, any.
    new_grid: `(h, w)`, any; equal to `old_grid` returns `positions`. Where one side alone differs, the offset of DINO
      changes the other side too, as in its program.
    how: which program's interpolation.

  Returns:
    `[h * w, D]` f32 of `new_grid`.
  """
  positions = jnp.asarray(positions)
  assert positions.shape[0] == old_grid[0] * old_grid[1], (positions.shape, old_grid)
  if old_grid == new_grid:
    return positions
  rows, columns = matrices(old_grid, new_grid, how)
  grid_hwD = positions.reshape(*old_grid, -1)
  resized_hwD = jnp.einsum('ih,jw,hwd->ijd', rows, columns, grid_hwD, precision=jax.lax.Precision.HIGHEST)
  return resized_hwD.reshape(-1, positions.shape[-1])


def joined(row: Array, column: Array, grid: tuple[int, int], how: PositionResize) -> Array:
  """Column and row embedding of each token, concatenated (ViT paper, Appendix D.4, "2-D").

  Args:
    row: `[h, D / 2]` f32, the Y-embedding.
    column: `[w, D / 2]` f32, the X-embedding.
    grid: `(h, w)`; if it is another one, each is resized along its axis as `resize` does.
    how: as of `resize`.

  Returns:
    `[h * w, D]` f32, the column's half first.
  """
  if grid != (row.shape[0], column.shape[0]):
    resized = matrices((row.shape[0], column.shape[0]), grid, how)
    row, column = (jnp.matmul(one, a, precision=jax.lax.Precision.HIGHEST)
                   for one, a in zip(resized, (row, column), strict=True))
  halves = (jnp.broadcast_to(column[None], (*grid, column.shape[1])),
            jnp.broadcast_to(row[:, None], (*grid, row.shape[1])))
  return jnp.concatenate(halves, axis=-1).reshape(grid[0] * grid[1], -1)
