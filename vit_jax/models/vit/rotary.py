"""Rotary positions rotate queries and keys of patch tokens by their row and column (RoPE-ViT, arXiv 2403.13298)."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.config import schema
from vit_jax.config.schema import PositionResize, UnitInterval
from vit_jax.core.types import Array, Key, PyTree
from vit_jax.models.layers import param
from vit_jax.models.vit.positions import Learned, NoPositions, batched, library


def coordinates(side: int, settings: schema.ByIndex | schema.UnitInterval) -> np.ndarray:
  """Returns the angles `[side]` f64 of the rows or columns of a grid, in radians at frequency 1.

  By index `(i + offset) g / side`, or without `grid` g `i + offset`: neighbors then have the same angle between them in
  images of any size, and otherwise the same share of the image has. In the unit interval (DINOv3, arXiv 2508.10104,
  section 3.2) `2 pi c` with `c = 2 (i + 1/2) / side - 1`.
  """
  number = library((side, side)).arange(side, dtype=float)
  if isinstance(settings, UnitInterval):
    return 2 * np.pi * (2 * (number + .5) / side - 1)
  return (number + settings.offset) * (settings.grid / side if settings.grid else 1.)


def angles_of(coordinates: Array, frequencies: Array) -> Array:
  """Returns cosines and sines `[.., M, A, K]` f32 of the angles `x f_x + y f_y` (RoPE-ViT, eq. 9, mixed).

  Args:
    coordinates: `[.., M, 2]` f32, column and row of each token; zeros for tokens without a place.
    frequencies: `[2, A, K / 2]`, those of the columns first.
  """
  f32 = frequencies.astype(jnp.float32)
  x_M11, y_M11 = (part[..., None] for part in jnp.split(coordinates, 2, axis=-1))
  lead = (1,) * (coordinates.ndim - 1)
  angles_MAk = x_M11 * f32[0].reshape(*lead, *f32.shape[1:]) + y_M11 * f32[1].reshape(*lead, *f32.shape[1:])
  return jnp.concatenate([jnp.cos(angles_MAk), jnp.sin(angles_MAk)], axis=-1)


def mixed_frequencies(base: float) -> Callable[..., Array]:
  """Returns an initializer of frequencies `[2, A, K / 2]`: those of the axial form, turned by a random angle per head.

  `f = base^(-t / (K / 4)) (cos a, sin a)` for the first half, with a the angle of the head, and at a right angle to it
  for the second half, so that all directions of the image occur (RoPE-ViT, section 3.2, and its program).
  """
  def init(key: Key, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
    _, heads, half = shape
    sizes_k = base ** -(jnp.arange(half // 2, dtype=dtype) / (half // 2))
    angles_A1 = jax.random.uniform(key, (heads, 1), dtype, 0., 2 * np.pi)
    of_axes = []
    for f in (jnp.cos, jnp.sin):  # of columns, of rows
      halves = [sizes_k[None] * f(angles_A1 + turn) for turn in (0., np.pi / 2)]
      of_axes.append(halves)
    return jnp.stack([jnp.concatenate(halves, axis=-1) for halves in of_axes])
  return init


def rotated(x: Array, positions: Array) -> Array:
  """Returns `x` with rotated pairs of channels: `(a, b)` becomes `(a cos - b sin, b cos + a sin)`.

  Channel j is paired with channel `j + K / 2`, and not with its neighbor as in the paper: the same model with channels
  in another order, whose halves need no strided access.

  Args:
    x: `[B, M, A, K]`, any float dtype; computed in f32 and rounded to it.
    positions: `[1, M, K]` or `[B, M, K]` f32, cosines and sines; with `[.., M, A, K]` each head has its own.
  """
  cos_BMAk, sin_BMAk = jnp.split(positions if positions.ndim == 4 else positions[:, :, None], 2, axis=-1)
  a_BMAk, b_BMAk = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  parts = [a_BMAk * cos_BMAk - b_BMAk * sin_BMAk, b_BMAk * cos_BMAk + a_BMAk * sin_BMAk]
  return jnp.concatenate(parts, axis=-1).astype(x.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rotary(NoPositions):
  """2-D rotary positions; learned frequencies with `mixed`."""
  base: float
  mixed: bool
  coordinates: schema.ByIndex | schema.UnitInterval
  acts_in_attention = True

  def of_patches(self, table: PyTree | None, grid: tuple[int, int]) -> Array:
    """Returns cosines and sines of 2-D rotary positions, `[h * w, K]` f32: `K / 2` cosines, then as many sines.

    The axial form of RoPE-ViT (arXiv 2403.13298, section 3.2, eq. 6 to 8): the angles of the token in column x and row
    y are `x theta_t`, then `y theta_t`, with `theta_t = base^(-t / (K / 4))`, `t = 0 .. K / 4 - 1`.

    With `mixed`, where each block has frequencies of its own, and where training changes positions, the result is
    `[h * w, 2]`, x and y themselves.
    """
    xp = library(grid)
    y, x = xp.meshgrid(*(coordinates(side, self.coordinates) for side in grid), indexing='ij')
    if self.mixed or self.is_drawn:
      return jnp.asarray(xp.concatenate([x.reshape(-1, 1), y.reshape(-1, 1)], axis=1).astype(np.float32))
    angles = xp.concatenate([x.reshape(-1, 1) * self._theta[None], y.reshape(-1, 1) * self._theta[None]], axis=1)
    return jnp.asarray(xp.concatenate([xp.cos(angles), xp.sin(angles)], axis=1).astype(np.float32))

  @property
  def is_drawn(self) -> bool:
    return isinstance(self.coordinates, UnitInterval) and self.coordinates.is_drawn

  def drawn(self, positions: Array, key: Key) -> Array:
    """Returns positions whose coordinates, the last two entries, are shifted and scaled (`schema.UnitInterval`)."""
    c, keys = self.coordinates, jax.random.split(key, 5)
    assert isinstance(c, UnitInterval), c
    # Shifts of columns and rows, logarithms of their factors, and that of a factor of both.
    bounds = [2 * np.pi * c.shift] * 2 + [np.log(c.jitter)] * 2 + [np.log(c.rescale)]
    draws = jnp.stack([bound * jax.random.uniform(own_key, (), jnp.float32, -1., 1.)
                       for own_key, bound in zip(keys, bounds, strict=True)])
    over_last_axis = (1,) * (positions.ndim - 1) + (2,)
    moved = positions[..., -2:] + draws[:2].reshape(over_last_axis)
    moved = moved * jnp.exp(draws[2:4] + draws[4:]).reshape(over_last_axis)
    return jnp.concatenate([positions[..., :-2], moved], axis=-1)

  def at_stem(self, positions: Array) -> Array | None:
    return None

  def in_blocks(self, table: PyTree | None, positions: Array) -> Array:
    """Returns rotations of all tokens; those without a place are not rotated."""
    positions = batched(positions)
    if self.mixed:  # zeros: angles of 0
      return jnp.pad(positions[..., -2:], ((0, 0), (self.model.num_extra, 0), (0, 0)))
    if self.is_drawn:
      theta = jnp.asarray(self._theta, jnp.float32)[None, None]
      angles = jnp.concatenate([positions[..., -2:-1] * theta, positions[..., -1:] * theta], axis=-1)
      positions = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)
    positions = positions[..., -self._head:]
    shape = positions.shape[0], self.model.num_extra, positions.shape[2] // 2  # cosine 1 and sine 0
    return jnp.concatenate([jnp.concatenate([jnp.ones(shape), jnp.zeros(shape)], axis=-1), positions], axis=1)

  def before_block(self, tokens: Array, positions: Array) -> Array:
    return tokens

  def in_attention(self, module: nn.Module, query: Array, key: Array,
                   positions: Array | None) -> tuple[Array, Array, Array | None]:
    if self.mixed:
      heads, width = query.shape[2:]
      shape = (2, heads, width // 2)
      frequencies = param(module, 'frequencies', mixed_frequencies(self.base), shape, (None, 'heads', 'head'))
      positions = None if positions is None else angles_of(positions, frequencies)
    if positions is None:
      return query, key, None
    return rotated(query, positions), rotated(key, positions), None

  @property
  def _theta(self) -> np.ndarray:
    """The frequencies `theta_t` of each axis, `[K / 4]` f64."""
    return self.base ** -(np.arange(self._head // 4) / (self._head // 4))

  @property
  def _head(self) -> int:
    """K, channels of a head."""
    return self.model.width // self.model.heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnedRotary(Rotary):
  """One learned vector for each token, and rotations: `of_patches` returns `[N, D + K]` or `[N, D + 2]`."""
  resize: PositionResize

  def init(self, key: Key) -> PyTree:
    return self._learned.init(key)

  def of_patches(self, table: PyTree | None, grid: tuple[int, int]) -> Array:
    rotations = super().of_patches(None, grid)
    return rotations if table is None else jnp.concatenate([self._learned.of_patches(table, grid), rotations], axis=-1)

  def of_first(self, table: PyTree | None) -> Array:
    return self._learned.of_first(table)

  def at_stem(self, positions: Array) -> Array:
    return batched(positions)[..., :self.model.width]

  @property
  def _learned(self) -> Learned:
    return Learned(model=self.model, grid=self.grid, resize=self.resize)
