"""Learned position embeddings as parameters: one vector a token, or one a row and one a column.

A table holds what the ViT paper's Appendix D.4 calls 1-D (`[1, M, D]`, first the rows of class and
distillation token if there are any) or 2-D (`column [w, D / 2]` and `row [h, D / 2]`, its X- and Y-embedding, which are
concatenated in this order; these tokens have none). Fixed and relative positions have no table.
"""
from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.nn import initializers

from vit_jax.config.schema import PositionResize, Positions
from vit_jax.core.types import Array, Key, PyTree
from vit_jax.models.vit import posemb

STDDEV = .02  # vision_transformer, models_vit.py; the paper does not say


@dataclasses.dataclass(frozen=True)
class Table:
  """How to make and read a table for a token grid `(h, w)`."""
  kind: Positions
  grid: tuple[int, int]
  width: int
  num_first: int
  how: PositionResize

  @property
  def exists(self) -> bool:
    """Whether these positions are learned at all."""
    return self.kind in (Positions.LEARNED, Positions.LEARNED2D)

  def init(self, key: Key) -> PyTree:
    """A new table."""
    normal = initializers.normal(STDDEV)
    h, w = self.grid
    if self.kind is Positions.LEARNED:
      return normal(key, (1, h * w + self.num_first, self.width))
    row_key, column_key = jax.random.split(key)
    return {'row': normal(row_key, (h, self.width // 2)), 'column': normal(column_key, (w, self.width // 2))}

  def of_first(self, table: PyTree | None) -> Array:
    """Positions of class and distillation token, `[num_first, D]` f32; zeros without a 1-D table."""
    if table is None or self.kind is not Positions.LEARNED:
      return jnp.zeros((self.num_first, self.width))
    return table[0, :self.num_first]

  def of_patches(self, table: PyTree, grid: tuple[int, int]) -> Array:
    """Positions `[N, D]` f32 of the patch tokens of `grid`, resized if it is another one."""
    if self.kind is Positions.LEARNED:
      return posemb.resize(table[0, self.num_first:], self.grid, grid, self.how)
    return posemb.joined(table['row'], table['column'], grid, self.how)

  def extended(self, table: PyTree | None, positions: Array, *, num_registers: int) -> Array:
    """Positions of the whole sequence: class token, registers, then the patch tokens'.

    Class and distillation token take theirs from a 1-D table and else have none, that is zeros, as registers have.

    Args:
      table: None if there is none.
      positions: `[n, D]` or `[B, n, D]` f32, of patch tokens.
      num_registers: R.

    Returns:
      `[1, M, D]` or `[B, M, D]` f32.
    """
    positions = positions[None] if positions.ndim == 2 else positions
    extra = jnp.concatenate([self.of_first(table), jnp.zeros((num_registers, self.width))])[None]
    return jnp.concatenate([jnp.broadcast_to(extra, (positions.shape[0], *extra.shape[1:])), positions], axis=1)
