"""Resizing of position embeddings to another token grid, as the programs do it that weights come from.

Each axis of a grid is resized by a matrix `[new, old]`, and tokens of a grid `(h, w)` are in row-major order. There are
two forms of each matrix:

  matrix         NumPy f64, where the numbers of tokens are known.
  traced_matrix  f32 of JAX, where the new number is not known while the network is traced: a symbol of `jax.export`, in
                 exports for images of any size, or a value of the batch, of images at their own aspect. Positions of
                 samples are computed as exact fractions of integers, so that both forms are equal.

A grid is *free* if one of its sides is not a known integer.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from vit_jax.config.schema import PositionResize
from vit_jax.core.types import Array, ArrayLike

PLAIN, ANTIALIASED = -.75, -.5  # a of Keys' kernel (1981) in PyTorch, without and with antialiasing; Pillow has -1/2
OFFSET = .1  # DINO, vision_transformer.py: added to the number of new tokens, against rounding errors of its library
OFFSET_PARTS = round(1 / OFFSET)  # the offset is one of so many parts of a token
CUBIC_STEPS = range(-1, 3)  # the samples that a cubic kernel reads, counted from the one before its center


def resize(positions: ArrayLike, old_grid: tuple[int, int], new_grid: tuple[int, int], how: PositionResize) -> Array:
  """Resizes positions to another grid, by a matrix for each axis.

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
  resized_hwD = jnp.einsum('ih,jw,hwd->ijd', rows, columns, grid_hwD, precision=lax.Precision.HIGHEST)
  return resized_hwD.reshape(-1, positions.shape[-1])


def joined(row: Array, column: Array, grid: tuple[int, int], how: PositionResize) -> Array:
  """Returns column and row embedding of each token, concatenated (ViT paper, Appendix D.4, "2-D").

  Args:
    row: `[h, D / 2]` f32, the Y-embedding.
    column: `[w, D / 2]` f32, the X-embedding.
    grid: `(h, w)`; if it is another one, each is resized along its axis as `resize` does.
    how: as of `resize`.

  Returns:
    `[h * w, D]` f32, the column's half first.
  """
  old_grid = (row.shape[0], column.shape[0])
  if grid != old_grid:
    rows, columns = matrices(old_grid, grid, how)
    row = jnp.matmul(rows, row, precision=lax.Precision.HIGHEST)
    column = jnp.matmul(columns, column, precision=lax.Precision.HIGHEST)
  halves = (jnp.broadcast_to(column[None], (*grid, column.shape[1])),
            jnp.broadcast_to(row[:, None], (*grid, row.shape[1])))
  return jnp.concatenate(halves, axis=-1).reshape(grid[0] * grid[1], -1)


def matrices(old: tuple[int, int], new: tuple[int, int], how: PositionResize) -> tuple[Array, Array]:
  """Returns matrices `[h', h]` and `[w', w]` f32 for both sides of a grid; the new grid may be free."""
  if not is_free(new):
    known_rows, known_columns = both(old, new, how)
    return jnp.asarray(known_rows, jnp.float32), jnp.asarray(known_columns, jnp.float32)
  is_same = is_same_grid(old, new)
  sides = traced_sides(new, how, is_same=is_same)
  rows, columns = (traced_matrix(jnp.arange(new[axis]), old[axis], sides[axis], how, is_same=is_same)
                   for axis in (0, 1))
  return rows, columns


def both(old: tuple[int, int], new: tuple[int, int], how: PositionResize) -> tuple[np.ndarray, np.ndarray]:
  """Returns matrices `[h', h]` and `[w', w]` f64 for both sides of a known grid."""
  sides = (max(new),) * 2 if how is PositionResize.BICUBIC_ANTIALIAS_SQUARE else new
  rows, columns = (matrix(old[axis], sides[axis], how)[:new[axis]] for axis in (0, 1))
  return rows, columns


def matrix(old: int, new: int, how: PositionResize) -> np.ndarray:
  """Returns the matrix `[new, old]` f64 that resizes positions along one axis; of a square if `how` says so."""
  match how:
    case PositionResize.ALIGNED:
      return interpolation(old, new).astype(np.float64)
    case PositionResize.BICUBIC:
      return _bicubic(old, new, offset=0.)
    case PositionResize.BICUBIC_OFFSET:
      return _bicubic(old, new, offset=OFFSET)
    case PositionResize.BILINEAR:
      return bilinear(old, new)
    case PositionResize.BICUBIC_ANTIALIAS | PositionResize.BICUBIC_ANTIALIAS_SQUARE:
      return _antialiased(old, new, functools.partial(_cubic, a=ANTIALIASED))
    case PositionResize.BILINEAR_ANTIALIAS:
      return _antialiased(old, new, _triangle)


def interpolation(old: int, new: int) -> np.ndarray:
  """Returns the matrix `[new, old]` f32 of linear interpolation with aligned corners.

  Sample `i` lies at `i (old - 1) / (new - 1)`, split exactly into whole part and remainder. In floating
  point the last one can land beyond the last entry: a library zoom with zero padding then returns zeros
  for the last row, as happens to published loaders for 28 -> 48, 32 -> 16 and 16 -> 30.
  """
  whole, rest = np.divmod(np.arange(new) * (old - 1), max(new - 1, 1))
  fraction = rest / max(new - 1, 1)
  weights = np.zeros((new, old))
  weights[np.arange(new), whole] = 1. - fraction
  weights[np.arange(new), np.minimum(whole + 1, old - 1)] += fraction
  return weights.astype(np.float32)


def bilinear(old: int, new: int) -> np.ndarray:
  """Returns the matrix `[new, old]` f64 of PyTorch's linear interpolation, `align_corners=False`, not antialiased.

  Sample i lies at `(i + 1/2) old / new - 1/2`; the first and last entry are repeated beyond the ends.
  """
  centers = np.clip((np.arange(new) + .5) * old / new - .5, 0, old - 1)
  return _triangle(np.arange(old)[None] - centers[:, None])


def _bicubic(old: int, new: int, *, offset: float) -> np.ndarray:
  """Returns the matrix `[new, old]` f64 of PyTorch's cubic interpolation, `align_corners=False`, not antialiased.

  Sample i lies at `(i + 1/2) old / (new + offset) - 1/2`; the first and last entry are repeated beyond the ends.
  """
  centers = (np.arange(new) + .5) * old / (new + offset) - .5
  first = np.floor(centers).astype(int)
  weights = np.zeros((new, old))
  for step in CUBIC_STEPS:
    places = np.clip(first + step, 0, old - 1)
    np.add.at(weights, (np.arange(new), places), _cubic(centers - (first + step), PLAIN))
  return weights


def _antialiased(old: int, new: int, kernel: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
  """Returns the matrix `[new, old]` f64 of an antialiased interpolation, as in PyTorch, Pillow and `jax.image.resize`.

  Sample i lies at `(i + 1/2) old / new - 1/2`; the kernel is as wide as a new sample where that is the wider one.
  Weights beyond the ends are left out, and the others made to sum to 1.
  """
  centers = (np.arange(new) + .5) * old / new - .5
  weights = kernel((np.arange(old)[None] - centers[:, None]) / max(old / new, 1.))
  return weights / weights.sum(1, keepdims=True)


def _cubic(distance: Any, a: float) -> Any:
  """Returns Keys' cubic kernel at distances in samples, an array of NumPy or JAX."""
  x = abs(distance)
  near = ((a + 2) * x - (a + 3)) * x * x + 1
  far = ((x - 5) * x + 8) * x * a - 4 * a
  is_near, is_far = (x < 1).astype(x.dtype), (x < 2).astype(x.dtype)
  return near * is_near + far * (is_far - is_near)


def _triangle(distance: Any) -> Any:
  """Returns the kernel of linear interpolation at distances in samples, an array of NumPy or JAX."""
  xp = jnp if isinstance(distance, jax.Array) else np
  return xp.maximum(0., 1. - abs(distance))


def is_free(grid: tuple[Any, Any]) -> bool:
  """Returns whether a side of the token grid is no known integer."""
  return not all(isinstance(side, int) for side in grid)


def is_same_grid(first: tuple[Any, Any], second: tuple[Any, Any]) -> Array:
  """Returns 1 where both grids are equal, else 0, i32; they may be free."""
  def is_same(a: Any, b: Any) -> Array:
    are_known = isinstance(a, int) and isinstance(b, int)
    return jnp.asarray(a == b if are_known else jnp.asarray(a) == jnp.asarray(b)).astype(jnp.int32)

  return is_same(first[0], second[0]) * is_same(first[1], second[1])


def traced_sides(grid: tuple[Any, Any], how: PositionResize, *, is_same: Array) -> tuple[Any, Any]:
  """Returns the grid that positions are resized to, of which a free `grid` is the top left part.

  `is_same` is that of `traced_matrix`.
  """
  if how is not PositionResize.BICUBIC_ANTIALIAS_SQUARE:
    return grid
  rows, columns = (jnp.asarray(side) for side in grid)
  larger = jnp.maximum(rows, columns)
  return rows + (1 - is_same) * (larger - rows), columns + (1 - is_same) * (larger - columns)


def traced_matrix(index: Array, old: int, new: Any, how: PositionResize, *, is_same: Array) -> Array:
  """Returns rows `[n, old]` f32 of the matrix that resizes positions along one axis, as `matrix` does.

  Args:
    index: `[n]` i32, the new tokens whose rows are returned.
    old: number of tokens that the positions were made for.
    new: number of tokens; a symbol, an integer, or traced.
    how: which program's interpolation.
    is_same: 1 where both sides of the grid are those of the positions, else 0; nothing is resized then.
  """
  match how:
    case PositionResize.ALIGNED:
      return _traced_linear(index * (old - 1), jnp.maximum(jnp.asarray(new) - 1, 1), old)
    case PositionResize.BICUBIC:
      return _traced_cubic(index, old, jnp.asarray(new), 1)
    case PositionResize.BICUBIC_OFFSET:
      return _traced_cubic(index, old, OFFSET_PARTS * jnp.asarray(new) + 1 - is_same, OFFSET_PARTS)
    case PositionResize.BILINEAR:
      last = 2 * (old - 1) * jnp.asarray(new)
      return _traced_linear(jnp.clip((2 * index + 1) * old - new, 0, last), 2 * jnp.asarray(new), old)
    case PositionResize.BICUBIC_ANTIALIAS | PositionResize.BICUBIC_ANTIALIAS_SQUARE:
      return _traced_antialiased(index, old, new, functools.partial(_cubic, a=ANTIALIASED))
    case PositionResize.BILINEAR_ANTIALIAS:
      return _traced_antialiased(index, old, new, _triangle)


def _traced_linear(numerator: Array, denominator: Array, old: int) -> Array:
  """Returns weights of linear interpolation at `numerator / denominator`, from 0 to `old - 1`."""
  whole, part = _divided(numerator, denominator)
  return _triangle(whole - jnp.arange(old, dtype=jnp.float32)[None] + part)


def _traced_cubic(index: Array, old: int, new: Array, parts: int) -> Array:
  """Returns weights of plain cubic interpolation at `(i + 1/2) old parts / new - 1/2`; the ends are repeated."""
  whole, part = _divided((2 * index + 1) * old * parts - new + 2 * new, 2 * new)  # one more, so that it is not negative
  weights = jnp.zeros((1, old), jnp.float32)
  for step in CUBIC_STEPS:
    place = jnp.clip(whole - 1. + step, 0., old - 1.)
    weight = _cubic(part - step, PLAIN)
    is_place = (place - jnp.arange(old, dtype=jnp.float32)[None] == 0).astype(jnp.float32)
    weights = weights + weight * is_place
  return weights


def _traced_antialiased(index: Array, old: int, new: Any, kernel: Callable[[Array], Array]) -> Array:
  """Returns weights of a kernel that is as wide as a new sample where that is the wider one; rows sum to 1."""
  whole, part = _divided((2 * index + 1) * old + jnp.asarray(new), 2 * jnp.asarray(new))
  step = jnp.maximum(old / jnp.asarray(new).astype(jnp.float32), 1.)
  weights = kernel((whole - 1. - jnp.arange(old, dtype=jnp.float32)[None] + part) / step)
  return weights / weights.sum(1, keepdims=True)


def _divided(numerator: Array, denominator: Array) -> tuple[Array, Array]:
  """Returns whole and fractional part `[new, 1]` f32 of a quotient that is not negative."""
  denominator = jnp.broadcast_to(denominator, numerator.shape)
  whole, rest = lax.div(numerator, denominator), lax.rem(numerator, denominator)
  return whole.astype(jnp.float32)[:, None], (rest.astype(jnp.float32) / denominator.astype(jnp.float32))[:, None]
