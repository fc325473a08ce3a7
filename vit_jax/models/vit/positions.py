"""Positions of tokens: fixed and learned embeddings, relative positions, and rotations of queries and keys.

Tokens of a grid `(h, w)` are in row-major order. A table of learned positions holds what the ViT paper's Appendix D.4
calls 1-D (`[1, M, D]`, first the rows of class and distillation token if there are any) or 2-D (`column [w, D / 2]` and
`row [h, D / 2]`, its X- and Y-embedding, which are concatenated in this order). This file is the only one that knows
what each kind of position does: to tokens before a block (`PositionEmbedding`) and inside attention (`in_attention`).
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.config import schema
from vit_jax.config.schema import Positions, PositionsAt, RotaryPlaces
from vit_jax.core.axes import labelled
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, Key, PyTree
from vit_jax.models import initialization
from vit_jax.models.initialization import Initializer
from vit_jax.models.vit import free_sizes
from vit_jax.models.vit.interpolate import joined, resize

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
  xp = _library(grid)
  omega = TEMPERATURE ** -exponents
  y, x = xp.meshgrid(*(xp.arange(side, dtype=float) for side in grid), indexing='ij')
  angle_x, angle_y = x.reshape(-1, 1) * omega[None], y.reshape(-1, 1) * omega[None]
  parts = [xp.sin(angle_x), xp.cos(angle_x), xp.sin(angle_y), xp.cos(angle_y)]
  return xp.concatenate(parts, axis=1).astype(np.float32)


def _library(grid: tuple[int, int]) -> Any:
  """NumPy, or where sides are symbols `jax.numpy`."""
  return jnp if free_sizes.is_free(grid) else np


FIXED = {Positions.SINCOS2D: sincos2d, Positions.SINCOS2D_MAE: sincos2d_mae}


def rotation(grid: tuple[int, int], settings: schema.ViT) -> np.ndarray:
  """Cosines and sines of 2-D rotary positions, `[h * w, K]` f32: first `K / 2` cosines, then as many sines.

  The axial form of RoPE-ViT (arXiv 2403.13298, section 3.2, eq. 6 to 8): the angles of the token in column x and row y
  are `x theta_t`, then `y theta_t`, with `theta_t = base^(-t / (K / 4))`, `t = 0 .. K / 4 - 1`. What x and y are is
  `places` below. With `rotary_mixed` x and y themselves, `[h * w, 2]`, as each block has frequencies of its own.
  """
  xp = _library(grid)
  if settings.rotary_mixed:
    y, x = xp.meshgrid(*(places(side, settings) for side in grid), indexing='ij')
    return xp.concatenate([x.reshape(-1, 1), y.reshape(-1, 1)], axis=1).astype(np.float32)
  head_width = settings.width // settings.heads
  theta = settings.rotary_base ** -(np.arange(head_width // 4) / (head_width // 4))
  y, x = xp.meshgrid(*(places(side, settings) for side in grid), indexing='ij')
  angles = xp.concatenate([x.reshape(-1, 1) * theta[None], y.reshape(-1, 1) * theta[None]], axis=1)
  return xp.concatenate([xp.cos(angles), xp.sin(angles)], axis=1).astype(np.float32)


def places(side: int, settings: schema.ViT) -> np.ndarray:
  """Angles `[side]` f64 of the rows or columns of a grid, in radians at frequency 1.

  By index `(i + offset) g / side`, or without `rotary_grid` g `i + offset`: neighbors then have the same angle between
  them in images of any size, and otherwise the same share of the image has. In the unit interval (DINOv3, arXiv
  2508.10104, section 3.2) `2 pi c` with `c = 2 (i + 1/2) / side - 1`.
  """
  number = _library((side, side)).arange(side, dtype=float)
  if settings.rotary_places is RotaryPlaces.UNIT:
    return 2 * np.pi * (2 * (number + .5) / side - 1)
  return (number + settings.rotary_offset) * (settings.rotary_grid / side if settings.rotary_grid else 1.)


def turns(places: Array, frequencies: Array) -> Array:
  """Cosines and sines `[.., M, A, K]` f32 of the angles `x f_x + y f_y` (RoPE-ViT, arXiv 2403.13298, eq. 9, mixed).

  Args:
    places: `[.., M, 2]` f32, column and row of each token; zeros for tokens without a place.
    frequencies: `[2, A, K / 2]`, those of the columns first.
  """
  f32 = frequencies.astype(jnp.float32)
  x_M11, y_M11 = (part[..., None] for part in jnp.split(places, 2, axis=-1))
  lead = (1,) * (places.ndim - 1)
  angles_MAk = x_M11 * f32[0].reshape(*lead, *f32.shape[1:]) + y_M11 * f32[1].reshape(*lead, *f32.shape[1:])
  return jnp.concatenate([jnp.cos(angles_MAk), jnp.sin(angles_MAk)], axis=-1)


def mixed_frequencies(base: float) -> Callable[..., Array]:
  """An initializer of frequencies `[2, A, K / 2]`: those of the axial form, in each head turned by a random angle.

  `f = base^(-t / (K / 4)) (cos a, sin a)` for the first half, with a the angle of the head, and at a right angle to it
  for the second half, so that all directions of the image occur (RoPE-ViT, section 3.2, and its program).
  """
  def init(key: Key, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
    _, heads, half = shape
    sizes_k = base ** -(jnp.arange(half // 2, dtype=dtype) / (half // 2))
    angles_A1 = jax.random.uniform(key, (heads, 1), dtype, 0., 2 * np.pi)
    parts = [[sizes_k[None] * f(angles_A1 + turn) for turn in (0., np.pi / 2)] for f in (jnp.cos, jnp.sin)]
    return jnp.stack([jnp.concatenate(one, axis=-1) for one in parts])
  return init


def rotated(x: Array, positions: Array) -> Array:
  """Rotates pairs of channels: `(a, b)` becomes `(a cos - b sin, b cos + a sin)`.

  Channel j is paired with channel `j + K / 2`, and not with its neighbor as in the paper: the same model with channels
  in another order, whose halves need no strided access.

  Args:
    x: `[B, M, A, K]`, any float dtype; computed in f32 and rounded to it.
    positions: `[1, M, K]` or `[B, M, K]` f32, rows of `rotation`; with `[.., M, A, K]` each head has its own.
  """
  cos_BMAk, sin_BMAk = jnp.split(positions if positions.ndim == 4 else positions[:, :, None], 2, axis=-1)
  a_BMAk, b_BMAk = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  parts = [a_BMAk * cos_BMAk - b_BMAk * sin_BMAk, b_BMAk * cos_BMAk + a_BMAk * sin_BMAk]
  return jnp.concatenate(parts, axis=-1).astype(x.dtype)


def relative_logits(query: Array, table: Array) -> Array:
  """`R_ij = q_i . r(p_i - p_j)`: queries meet learned keys that know the offset alone (Appendix D.4).

  `p` is the place in raster order, so that offsets are one-dimensional. Class token and registers have
  no place: their rows and columns are zero.

  Args:
    query: `[B, M, A, K]`, any float dtype; the last N are patch tokens.
    table: `[2 N - 1, A, K]`, same dtype; row `t` is the key of the offset `N - 1 - t`.

  Returns:
    `[B, A, M, M]` f32, before the division by `sqrt(K)`.
  """
  num_patches = (table.shape[0] + 1) // 2
  extra = query.shape[1] - num_patches
  assert extra >= 0, (query.shape, table.shape)
  scores = jnp.einsum('bqak,tak->baqt', query[:, extra:], table, preferred_element_type=jnp.float32)
  # Entry j of row i is to be score t = N - 1 + j - i. With one more column, rows of 2 N - 1 entries of the
  # flat array begin one entry earlier each: nothing is gathered, and nothing scattered in the gradient.
  flat = jnp.pad(scores, ((0, 0), (0, 0), (0, 0), (0, 1))).reshape(*scores.shape[:2], -1)
  skewed = flat[..., :num_patches * (2 * num_patches - 1)].reshape(scores.shape)
  return jnp.pad(skewed[..., num_patches - 1:], ((0, 0), (0, 0), (extra, 0), (extra, 0)))


@dataclasses.dataclass(frozen=True)
class PositionEmbedding:
  """The positions of a model that was built for images of a token grid `(h, w)`."""
  settings: schema.ViT
  grid: tuple[int, int]

  @property
  def num_first(self) -> int:
    """Tokens before the others that have rows in a 1-D table: class and distillation token."""
    return self.settings.pool.has_class_token + self.settings.distilled

  @property
  def is_at_stem(self) -> bool:
    """Whether they are added once, to the tokens of the stem."""
    return self.settings.positions_at is PositionsAt.STEM and self.settings.positions is not Positions.ROTARY2D

  @property
  def is_shared(self) -> bool:
    """Whether each block gets those of the stem, or the rotations of the tokens."""
    return self.settings.positions_at is PositionsAt.SHARED or self.settings.positions.is_rotary

  def init(self, key: Key) -> PyTree:
    """A new table of learned positions."""
    (h, w), laws = self.grid, initialization.laws(self.settings)
    if self.settings.positions.has_rows:
      table = laws.positions(key, (1, h * w + self.num_first, self.settings.width))
      table = table if laws.has_first_positions else table.at[:, :self.num_first].set(0.)
      return labelled(table, (None, 'tokens', None))
    row_key, column_key = jax.random.split(key)
    half = self.settings.width // 2
    return {'row': labelled(laws.positions(row_key, (h, half)), ('tokens', None)),
            'column': labelled(laws.positions(column_key, (w, half)), ('tokens', None))}

  def of_patches(self, table: PyTree | None, grid: tuple[int, int]) -> Array:
    """Positions `[N, D]` f32 of the patch tokens of `grid`; tables are resized if it is another one.

    Of rotary positions the rows of `rotation`, `[N, K]` or `[N, 2]`, after learned ones if there are some. Zeros for
    relative ones, which need none, and without a table.
    """
    if self.settings.positions.is_rotary:
      turns_NK = jnp.asarray(rotation(grid, self.settings))
      return turns_NK if table is None else jnp.concatenate([self._of_rows(table, grid), turns_NK], axis=-1)
    if self.settings.positions.is_fixed:
      return jnp.asarray(FIXED[self.settings.positions](grid, self.settings.width))
    if table is None:
      return jnp.zeros((grid[0] * grid[1], self.settings.width))
    if self.settings.positions.has_rows:
      return self._of_rows(table, grid)
    return joined(table['row'], table['column'], grid, self.settings.position_resize)

  def _of_rows(self, table: Array, grid: tuple[int, int]) -> Array:
    return resize(table[0, self.num_first:], self.grid, grid, self.settings.position_resize)

  def added(self, positions: Array) -> Array:
    """What is added to the tokens of the stem, `[1, n, D]` or `[B, n, D]` f32, of what `of_patches` returned."""
    positions = positions[None] if positions.ndim == 2 else positions
    return positions[..., :self.settings.width]

  def of_first(self, table: PyTree | None) -> Array:
    """Positions of class and distillation token, `[num_first, D]` f32; zeros without a 1-D table."""
    if table is None or not self.settings.positions.has_rows:
      return jnp.zeros((self.num_first, self.settings.width))
    return table[0, :self.num_first]

  def of_sequence(self, table: PyTree | None, positions: Array) -> Array:
    """Positions of class token, registers and patch tokens, `[1, M, D]` or `[B, M, D]` in the compute dtype.

    Args:
      table: of learned positions; None if there is none.
      positions: `[n, D]` or `[B, n, D]` f32, of the patch tokens, as `of_patches` returns them.
    """
    positions = positions[None] if positions.ndim == 2 else positions
    if self.settings.rotary_mixed:  # zeros: angles of 0
      return jnp.pad(positions[..., -2:], ((0, 0), (self.num_first + self.settings.registers, 0), (0, 0)))
    if self.settings.positions.is_rotary:  # cosine 1 and sine 0: tokens without a place are not rotated
      positions = positions[..., -(self.settings.width // self.settings.heads):]
      shape = positions.shape[0], self.num_first + self.settings.registers, positions.shape[2] // 2
      return jnp.concatenate([jnp.concatenate([jnp.ones(shape), jnp.zeros(shape)], axis=-1), positions], axis=1)
    extra = jnp.concatenate([self.of_first(table), jnp.zeros((self.settings.registers, self.settings.width))])[None]
    extra = jnp.broadcast_to(extra, (positions.shape[0], *extra.shape[1:]))
    return jnp.concatenate([extra, positions], axis=1).astype(self.settings.dtype.value)

  def check_complete(self, num_tokens: int, grid: tuple[int, int]) -> None:
    """Raises UserError if positions follow from the order of patch tokens, and these are not all of `grid`."""
    s, (h, w) = self.settings, self.grid
    ordered = {'model.positions=relative': s.positions is Positions.RELATIVE, 'model.axial=True': s.axial,
               'model.positions_at=layers': s.positions_at is PositionsAt.LAYERS}
    named = [name for name, is_so in ordered.items() if is_so]
    if named and num_tokens != grid[0] * grid[1]:
      raise UserError(f'{named[0]}: expected all {grid[0]} x {grid[1]} patch tokens of an image, got {num_tokens}.')
    if s.positions is Positions.RELATIVE and grid != self.grid:
      raise UserError(f'model.positions=relative: expected images of {h * s.patch} x {w * s.patch} px, got {grid[0]} x '
                      f'{grid[1]} patches of {s.patch} px. Relative positions cannot be resized.')

  def before_block(self, tokens: Array, positions: Array) -> Array:
    """Tokens `[B, M, D]` as a block gets them: with positions `[1, M, D]` or `[B, M, D]` added, unless they rotate."""
    if self.settings.positions.is_rotary:
      return tokens
    return tokens + jnp.broadcast_to(positions, tokens.shape)


def in_attention(kind: Positions, query: Array, key: Array, positions: Array | None, *, num_patches: int,
                 param: Callable[..., Array], law: Initializer,
                 mixed_base: float = 0.) -> tuple[Array, Array, Array | None]:
  """Applies positions inside attention.

  Args:
    kind: of positions.
    query: `[B, M, A, K]`, any float dtype.
    key: `[B, M, A, K]`, same dtype.
    positions: those of the tokens, as `PositionEmbedding.of_sequence` returns them, where blocks get some.
    num_patches: N that relative positions are made for.
    param: makes a parameter of the attention module from `(name, initializer, shape, axes)`.
    law: by which relative positions start.
    mixed_base: of learned frequencies, see `mixed_frequencies`; 0 = positions are rows of `rotation`.

  Returns:
    Query, key, and what is added to the logits before they are divided by `sqrt(K)`, `[B, A, M, M]` f32 or None.
  """
  if mixed_base:
    heads, width = query.shape[2:]
    frequencies = param('frequencies', mixed_frequencies(mixed_base), (2, heads, width // 2), (None, 'heads', 'head'))
    positions = None if positions is None else turns(positions, frequencies)
  match kind:
    case Positions.ROTARY2D | Positions.LEARNED_ROTARY2D if positions is not None:  # None: parameters are being made
      return rotated(query, positions), rotated(key, positions), None
    case Positions.RELATIVE:
      table = param('relative', law, (2 * num_patches - 1, *query.shape[2:]), ('tokens', 'heads', 'head'))
      return query, key, relative_logits(query, table.astype(query.dtype))
    case _:
      return query, key, None
