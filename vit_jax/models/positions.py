"""Learned position embeddings as parameters: one vector a token, or one a row and one a column.

A table holds what the ViT paper's Appendix D.4 calls 1-D (`[1, M, D]`, the class token's row first if
there is a class token) or 2-D (`column [w, D / 2]` and `row [h, D / 2]`, its X- and Y-embedding, which are
concatenated in this order; the class token has none). Fixed and relative positions have no table.
"""
from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.nn import initializers

from vit_jax.config.schema import Positions
from vit_jax.core.types import Array, Key, PyTree
from vit_jax.models import posemb

STDDEV = .02  # vision_transformer, models_vit.py; the paper does not say


@dataclasses.dataclass(frozen=True)
class Table:
  """How to make and read a table for a token grid `(h, w)`."""
  kind: Positions
  grid: tuple[int, int]
  width: int
  has_cls: bool

  @property
  def exists(self) -> bool:
    """Whether these positions are learned at all."""
    return self.kind in (Positions.LEARNED, Positions.LEARNED2D)

  def init(self, key: Key) -> PyTree:
    """A new table."""
    normal = initializers.normal(STDDEV)
    h, w = self.grid
    if self.kind is Positions.LEARNED:
      return normal(key, (1, h * w + self.has_cls, self.width))
    row_key, column_key = jax.random.split(key)
    return {'row': normal(row_key, (h, self.width // 2)), 'column': normal(column_key, (w, self.width // 2))}

  def of_cls(self, table: PyTree | None) -> Array:
    """The class token's position, `[1, 1, D]` f32; zeros without a 1-D table."""
    return table[:, :1] if table is not None and self.kind is Positions.LEARNED else jnp.zeros((1, 1, self.width))

  def of_patches(self, table: PyTree, grid: tuple[int, int]) -> Array:
    """Positions `[N, D]` f32 of the patch tokens of `grid`, resized if it is another one."""
    if self.kind is Positions.LEARNED:
      return posemb.resize(table[0, int(self.has_cls):], self.grid, grid)
    return posemb.joined(table['row'], table['column'], grid)

  def extended(self, table: PyTree | None, positions: Array, *, num_registers: int) -> Array:
    """Positions of the whole sequence: class token, registers, then the patch tokens'.

    The class token takes its row from a 1-D table and else has none, that is zeros, as registers have.

    Args:
      table: None if there is none.
      positions: `[n, D]` or `[B, n, D]` f32, of patch tokens.
      num_registers: R.

    Returns:
      `[1, M, D]` or `[B, M, D]` f32.
    """
    positions = positions[None] if positions.ndim == 2 else positions
    cls = self.of_cls(table)[:, :int(self.has_cls)]
    extra = jnp.concatenate([cls, jnp.zeros((1, num_registers, self.width))], axis=1)
    return jnp.concatenate([jnp.broadcast_to(extra, (positions.shape[0], *extra.shape[1:])), positions], axis=1)
