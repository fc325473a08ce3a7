"""Positions of tokens: none, fixed and learned vectors, and relative ones; `rotary.py` has rotations.

Tokens of a grid `(h, w)` are in row-major order. A table of learned positions holds what the ViT paper's Appendix D.4
calls 1-D (`[1, M, D]`, first the rows of class and distillation token if there are any) or 2-D (`column [w, D / 2]` and
`row [h, D / 2]`, its X- and Y-embedding, which are concatenated in this order).

Contract of a kind of positions: `(…fields of its settings…, model=…, grid=…)` with the methods of `NoPositions`, which
is also the base of the kinds: each overrides what it does. Only these classes know what a kind of position does, to
tokens before a block and inside attention.
"""
from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.config import schema
from vit_jax.config.schema import Frequencies, PositionResize, PositionsAt
from vit_jax.core.axes import labelled
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, Key, PyTree
from vit_jax.models import initialization
from vit_jax.models.layers import param
from vit_jax.models.vit.interpolate import is_free, is_same_grid, joined, resize, traced_matrix, traced_sides

TEMPERATURE = 10_000.  # MoCo v3, arXiv 2104.02057; MAE and big_vision use the same


def sincos2d(grid: tuple[int, int], width: int) -> np.ndarray:
  """Returns a fixed 2-D sine-cosine embedding, `[h * w, width]` f32.

  `[sin(x w_j), cos(x w_j), sin(y w_j), cos(y w_j)]` with x the column, y the row and
  `w_j = 10000^(-j / (width / 4 - 1))`, `j = 0 .. width / 4 - 1`. `width` is a multiple of 4, at least 8.
  """
  return _sincos(grid, np.arange(width // 4) / (width // 4 - 1))


def sincos2d_mae(grid: tuple[int, int], width: int) -> np.ndarray:
  """Returns `sincos2d` with `w_j = 10000^(-j / (width / 4))`, which is a little higher at j > 0, as in MAE.

  MoCo v3 has the same values, but those of the row y in the first half of the channels.
  """
  return _sincos(grid, np.arange(width // 4) / (width // 4))


def _sincos(grid: tuple[int, int], exponents: np.ndarray) -> np.ndarray:
  """Returns `sincos2d` with the frequencies `10000^-exponents`."""
  xp = library(grid)
  omega = TEMPERATURE ** -exponents
  y, x = xp.meshgrid(*(xp.arange(side, dtype=float) for side in grid), indexing='ij')
  angle_x, angle_y = x.reshape(-1, 1) * omega[None], y.reshape(-1, 1) * omega[None]
  parts = [xp.sin(angle_x), xp.cos(angle_x), xp.sin(angle_y), xp.cos(angle_y)]
  return xp.concatenate(parts, axis=1).astype(np.float32)


def library(grid: tuple[int, int]) -> Any:
  """Returns NumPy, or `jax.numpy` for a free grid (`interpolate.py`)."""
  return jnp if is_free(grid) else np


def relative_logits(query: Array, table: Array) -> Array:
  """Returns `R_ij = q_i . r(p_i - p_j)`: products of queries with learned keys of the offsets (Appendix D.4).

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoPositions:
  """No positions; and the base of all kinds of positions.

  model: settings of the network.
  grid: token grid `(h, w)` of the images that the network is built for.
  at: where positions are added: to the tokens of the stem, or in each block.
  """
  model: schema.ViT
  grid: tuple[int, int]
  at: PositionsAt = PositionsAt.STEM
  acts_in_attention = False

  @property
  def is_drawn(self) -> bool:
    """Whether training changes positions at random, by `drawn`."""
    return False

  def init(self, key: Key) -> PyTree:
    """Returns a new table of learned positions; None if there is none."""
    del key
    return None

  def of_patches(self, table: PyTree | None, grid: tuple[int, int]) -> Array:
    """Returns what each patch token of `grid` carries, `[N, C]` f32: a vector, C = D, and what rotations need.

    A table is resized if it is of another grid.
    """
    del table
    return jnp.zeros((grid[0] * grid[1], self.model.width))

  def of_grids(self, table: PyTree | None, grid_B2: Array, num_tokens: int) -> Array:
    """Returns positions `[B, N, D]` of images with grids `[B, 2]` of their own; those of padding have no meaning.

    Raises:
      UserError: for kinds that have no such positions yet.
    """
    del table
    if type(self) is not NoPositions:
      raise UserError('model.positions: expected learned or nopositions for images at their own aspect, got '
                      f'{schema.checks.kind(self.model.positions)}. Set it, or data.recipe.eval_native_patch=0 and '
                      'data.recipe.native_lengths=() for images of one size.')
    return jnp.zeros((grid_B2.shape[0], num_tokens, self.model.width))

  def of_first(self, table: PyTree | None) -> Array:
    """Returns the vectors of class and distillation token, `[num_first, D]` f32; zeros if they have none."""
    del table
    return jnp.zeros((self.model.num_first, self.model.width))

  def drawn(self, positions: Array, key: Key) -> Array:
    """Returns the positions of patch tokens for one pass of training, changed at random."""
    raise NotImplementedError

  def at_stem(self, positions: Array) -> Array | None:
    """Returns what is added to the tokens of the stem, `[1, n, D]` or `[B, n, D]`; None if nothing is.

    `positions [n, C]` or `[B, n, C]` are those of the patch tokens, as `of_patches` returns them.
    """
    return batched(positions) if self.at is PositionsAt.STEM else None

  def in_blocks(self, table: PyTree | None, positions: Array) -> Array | None:
    """Returns what each block gets, `[1, M, C]` or `[B, M, C]`; None if nothing. `positions` are as in `at_stem`."""
    return self.of_sequence(table, positions) if self.at is PositionsAt.SHARED else None

  def of_sequence(self, table: PyTree | None, positions: Array) -> Array:
    """Returns the vectors of all tokens, `[1, M, D]` or `[B, M, D]` in the compute dtype; registers have zeros."""
    positions = batched(positions)
    extra = jnp.concatenate([self.of_first(table), jnp.zeros((self.model.registers, self.model.width))])[None]
    extra = jnp.broadcast_to(extra, (positions.shape[0], *extra.shape[1:]))
    return jnp.concatenate([extra, positions], axis=1).astype(self.model.dtype.value)

  def before_block(self, tokens: Array, positions: Array) -> Array:
    """Returns tokens `[B, M, D]` as a block gets them, from what `in_blocks` returned or a table of the block."""
    return tokens + jnp.broadcast_to(positions, tokens.shape)

  def in_attention(self, module: nn.Module, query: Array, key: Array,
                   positions: Array | None) -> tuple[Array, Array, Array | None]:
    """Applies positions inside attention; called if `acts_in_attention`.

    Args:
      module: attention, which may make parameters for it.
      query: `[B, M, A, K]`, any float dtype.
      key: `[B, M, A, K]`, same dtype.
      positions: what the block gets; None while parameters are made.

    Returns:
      Query, key, and what is added to the logits before they are divided by `sqrt(K)`, `[B, A, M, M]` f32 or None.
    """
    del module, positions
    return query, key, None

  def check_complete(self, num_tokens: int, grid: tuple[int, int]) -> None:
    """Raises UserError if positions follow from the order of patch tokens, and these are not all of `grid`."""
    if self.at is PositionsAt.LAYERS:
      check_all('model.positions.at=layers', num_tokens, grid)


def batched(positions: Array) -> Array:
  """Returns positions `[n, C]` or `[B, n, C]` with an axis of images."""
  return positions[None] if positions.ndim == 2 else positions


def check_all(setting: str, num_tokens: int, grid: tuple[int, int]) -> None:
  """Raises UserError, which names a setting, if `num_tokens` is not the number of patch tokens of `grid`."""
  if num_tokens != grid[0] * grid[1]:
    raise UserError(f'{setting}: expected all {grid[0]} x {grid[1]} patch tokens of an image, got {num_tokens}. '
                    'Leave no token out.')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learned(NoPositions):
  """One learned vector for each token but registers (eq. 1)."""
  resize: PositionResize = PositionResize.ALIGNED

  def init(self, key: Key) -> PyTree:
    (h, w), laws = self.grid, initialization.laws(self.model)
    table = laws.positions(key, (1, h * w + self.model.num_first, self.model.width))
    table = table if laws.has_first_positions else table.at[:, :self.model.num_first].set(0.)
    return labelled(table, (None, 'tokens', None))

  def of_patches(self, table: PyTree | None, grid: tuple[int, int]) -> Array:
    if table is None:
      return super().of_patches(table, grid)
    return resize(table[0, self.model.num_first:], self.grid, grid, self.resize)

  def of_grids(self, table: PyTree | None, grid_B2: Array, num_tokens: int) -> Array:
    if table is None or self.at is PositionsAt.LAYERS:
      raise UserError('model.positions.at: expected stem or shared for images at their own aspect, got layers. Set it, '
                      'or data.recipe.eval_native_patch=0 and data.recipe.native_lengths=() for images of one size.')
    (h, w), number = self.grid, jnp.arange(num_tokens)

    def mixed(grid: Array) -> Array:
      """Returns the weight of each learned vector in that of each token, `[N, h * w]`."""
      is_same = is_same_grid(self.grid, (grid[0], grid[1]))
      rows, columns = grid
      row = jnp.minimum(number // columns, rows - 1)  # padding repeats the last row, so that its values are finite
      height, width = traced_sides((rows, columns), self.resize, is_same=is_same)
      along_h = traced_matrix(row, h, height, self.resize, is_same=is_same)
      along_w = traced_matrix(number % columns, w, width, self.resize, is_same=is_same)
      return (along_h[:, :, None] * along_w[:, None]).reshape(num_tokens, h * w)

    return jnp.einsum('bnm,md->bnd', jax.vmap(mixed)(grid_B2), table[0, self.model.num_first:],
                      precision=jax.lax.Precision.HIGHEST)

  def of_first(self, table: PyTree | None) -> Array:
    return super().of_first(table) if table is None else table[0, :self.model.num_first]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learned2d(NoPositions):
  """Half of a learned vector for each column, half for each row, concatenated (Appendix D.4)."""
  resize: PositionResize = PositionResize.ALIGNED

  def init(self, key: Key) -> PyTree:
    (h, w), laws = self.grid, initialization.laws(self.model)
    row_key, column_key = jax.random.split(key)
    half = self.model.width // 2
    return {'row': labelled(laws.positions(row_key, (h, half)), ('tokens', None)),
            'column': labelled(laws.positions(column_key, (w, half)), ('tokens', None))}

  def of_patches(self, table: PyTree | None, grid: tuple[int, int]) -> Array:
    if table is None:
      return super().of_patches(table, grid)
    return joined(table['row'], table['column'], grid, self.resize)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SinCos(NoPositions):
  """Fixed 2-D sine-cosine vectors."""
  frequencies: Frequencies

  def of_patches(self, table: PyTree | None, grid: tuple[int, int]) -> Array:
    make = sincos2d if self.frequencies is Frequencies.BIG_VISION else sincos2d_mae
    return jnp.asarray(make(grid, self.model.width))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Relative(NoPositions):
  """Learned keys for 1-D offsets add to the attention logits of every block (Appendix D.4)."""
  acts_in_attention = True

  def in_attention(self, module: nn.Module, query: Array, key: Array,
                   positions: Array | None) -> tuple[Array, Array, Array | None]:
    num_patches, law = self.grid[0] * self.grid[1], initialization.laws(self.model).positions
    shape = (2 * num_patches - 1, *query.shape[2:])
    table = param(module, 'relative', law, shape, ('tokens', 'heads', 'head'))
    return query, key, relative_logits(query, table.astype(query.dtype))

  def check_complete(self, num_tokens: int, grid: tuple[int, int]) -> None:
    check_all('model.positions=relative', num_tokens, grid)
    if grid != self.grid:
      (h, w), patch = self.grid, self.model.patch
      raise UserError(f'model.positions=relative: expected images of {h * patch} x {w * patch} px, got {grid[0]} x '
                      f'{grid[1]} patches of {patch} px. Relative positions cannot be resized.')
