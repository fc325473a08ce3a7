"""Interpolation matrices for a number of new tokens that is unknown while the network is traced.

Exports for images of any size need them: the number is then a symbol of `jax.export`. The matrices
equal those of `interpolate.py`. Sample positions are computed as exact integer fractions, weights in f32.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from vit_jax.config.schema import PositionResize
from vit_jax.core.types import Array

PLAIN, ANTIALIASED = -.75, -.5  # a of Keys' kernel (1981) in PyTorch, without and with antialiasing; Pillow has -1/2
OFFSET = .1  # DINO, vision_transformer.py: added to the number of new tokens, against rounding errors of its library
_PARTS = round(1 / OFFSET)  # the offset is one of so many parts of a token


def is_free(grid: tuple[Any, Any]) -> bool:
  """Whether a side of the token grid is a symbol."""
  return not all(isinstance(side, int) for side in grid)


def same(first: tuple[Any, Any], second: tuple[Any, Any]) -> Array:
  """1 where both grids are equal, else 0, i32; sides may be symbols."""
  rows, columns = (jnp.asarray(a == b if isinstance(a, int) and isinstance(b, int) else
                               jnp.asarray(a) == jnp.asarray(b)).astype(jnp.int32)
                   for a, b in zip(first, second, strict=True))
  return rows * columns


def sides(grid: tuple[Any, Any], how: PositionResize, *, is_own: Array) -> tuple[Any, Any]:
  """The grid that positions are resized to, of which `grid` is the top left part; `is_own` as of `weights`."""
  if how is not PositionResize.BICUBIC_ANTIALIAS_SQUARE:
    return grid
  rows, columns = (jnp.asarray(side) for side in grid)
  larger = jnp.maximum(rows, columns)
  return rows + (1 - is_own) * (larger - rows), columns + (1 - is_own) * (larger - columns)


def weights(index: Array, old: int, new: Any, how: PositionResize, *, is_own: Array) -> Array:
  """Rows `[n, old]` f32 of the matrix that resizes positions along one axis, as `interpolate.matrix`.

  Args:
    index: `[n]` i32, the new tokens whose rows are wanted.
    old: number of tokens that the positions were made for.
    new: number of tokens; a symbol, an integer, or traced.
    how: which program's interpolation.
    is_own: 1 where both sides of the grid are those of the positions, else 0; nothing is resized then.
  """
  match how:
    case PositionResize.ALIGNED:
      return _between(index * (old - 1), jnp.maximum(jnp.asarray(new) - 1, 1), old)
    case PositionResize.BICUBIC:
      return _plain_cubic(index, old, jnp.asarray(new), 1)
    case PositionResize.BICUBIC_OFFSET:
      return _plain_cubic(index, old, _PARTS * jnp.asarray(new) + 1 - is_own, _PARTS)
    case PositionResize.BILINEAR:
      last = 2 * (old - 1) * jnp.asarray(new)
      return _between(jnp.clip((2 * index + 1) * old - new, 0, last), 2 * jnp.asarray(new), old)
    case PositionResize.BICUBIC_ANTIALIAS | PositionResize.BICUBIC_ANTIALIAS_SQUARE:
      return _antialiased(index, old, new, lambda x: _cubic(x, ANTIALIASED))
    case PositionResize.BILINEAR_ANTIALIAS:
      return _antialiased(index, old, new, _triangle)


def _between(numerator: Array, denominator: Array, old: int) -> Array:
  """Linear interpolation at `numerator / denominator`, from 0 to `old - 1`."""
  whole, part = _divided(numerator, denominator)
  return jnp.maximum(0., 1. - jnp.abs(whole - jnp.arange(old, dtype=jnp.float32)[None] + part))


def _plain_cubic(index: Array, old: int, new: Array, parts: int) -> Array:
  """Cubic interpolation without antialiasing at `(i + 1/2) old parts / new - 1/2`; the ends are repeated."""
  whole, part = _divided((2 * index + 1) * old * parts - new + 2 * new, 2 * new)  # one more, so that it is not negative
  weights = jnp.zeros((1, old), jnp.float32)
  for step in range(-1, 3):
    place = jnp.clip(whole - 1. + step, 0., old - 1.)
    weights = weights + _cubic(part - step, PLAIN) * _is_zero(place - jnp.arange(old, dtype=jnp.float32)[None])
  return weights


def _antialiased(index: Array, old: int, new: Any, kernel: Callable[[Array], Array]) -> Array:
  """A kernel that is as wide as a new sample where that is the wider one; rows sum to 1."""
  whole, part = _divided((2 * index + 1) * old + jnp.asarray(new), 2 * jnp.asarray(new))
  step = jnp.maximum(old / jnp.asarray(new).astype(jnp.float32), 1.)
  weights = kernel((whole - 1. - jnp.arange(old, dtype=jnp.float32)[None] + part) / step)
  return weights / weights.sum(1, keepdims=True)


def _divided(numerator: Array, denominator: Array) -> tuple[Array, Array]:
  """Whole and fractional part `[new, 1]` f32 of a quotient that is not negative."""
  denominator = jnp.broadcast_to(denominator, numerator.shape)
  whole, rest = lax.div(numerator, denominator), lax.rem(numerator, denominator)
  return whole.astype(jnp.float32)[:, None], (rest.astype(jnp.float32) / denominator.astype(jnp.float32))[:, None]


def _cubic(distance: Array, a: float) -> Array:
  """Keys' kernel, as `interpolate.cubic`."""
  x = jnp.abs(distance)
  near = ((a + 2) * x - (a + 3)) * x * x + 1
  far = ((x - 5) * x + 8) * x * a - 4 * a
  is_near, is_far = (x < 1).astype(jnp.float32), (x < 2).astype(jnp.float32)
  return near * is_near + far * (is_far - is_near)


def _triangle(distance: Array) -> Array:
  return jnp.maximum(0., 1. - jnp.abs(distance))


def _is_zero(x: Array) -> Array:
  return (x == 0).astype(jnp.float32)
