"""Decides which rows of a table of positions are those of patches, and on which grid of patches they lie.

A program gives its class token a row or not, whatever the number of rows is: 225 rows are a class token and 14 x 16
patches in one network, and 15 x 15 patches in another. What the program does not decide, the size of images does: from
`--model=image`, a config beside the file, or its published name. Without it a square is assumed, and said.
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.weights.hints import MOST_PX
from vit_jax.weights.network import Line

Leaves = dict[str, HostArray]
TOKENS, NONE, ALL = 'tokens', 'none', 'all'
"""Rows before those of the patches: one for each class and distillation token, none, or registers have rows, too."""
_POSITIONS, _REGISTERS = 'backbone/positions', 'backbone/registers'


class Sizes(NamedTuple):
  """Sizes of images, (height, width) in px, for which positions may be.

  given: by `--model=image`; they must be for it.
  known: from configs and names, the first one that fits counts.
  """
  given: tuple[int, int] | None = None
  known: tuple[tuple[int, int], ...] = ()


class Placed(NamedTuple):
  """Leaves with positions in our form, what was changed, the size of the images, and a sentence on what was assumed."""
  leaves: Leaves
  lines: tuple[Line, ...] = ()
  image_px: tuple[int, int] | None = None
  note: str = ''


def place(leaves: Leaves, model: schema.Model, sizes: Sizes, first: Sequence[str]) -> Placed:
  """Returns leaves with one row of positions for each class and distillation token, and none for registers.

  Args:
    leaves: with positions as in the file.
    model: settings of the network.
    sizes: of images.
    first: rows before those of the patches that networks of this program have; several where its networks differ.

  Raises:
    UserError: nothing decides where patches lie, or they cannot be for the given size.
  """
  if isinstance(model, schema.Mixer):
    tokens = leaves['backbone/blocks/tokens/up/kernel'].shape[1]
    _, grid, note = _find(tokens, {NONE: 0}, model.patch, sizes)
    return Placed(leaves, (), (grid[0] * model.patch, grid[1] * model.patch), note)
  if not isinstance(model, schema.ViT) or not model.positions.has_rows or _POSITIONS not in leaves:
    return Placed(leaves)
  own = model.num_first
  counts = {TOKENS: own, NONE: 0, ALL: own + model.registers}
  usual = {kind: counts[kind] for kind in first}
  count, grid, note = _find(leaves[_POSITIONS].shape[1], usual, model.patch, sizes, also=counts.values())
  image_px = grid[0] * model.patch, grid[1] * model.patch
  if count == own:
    return Placed(leaves, (), image_px, note)
  table = leaves[_POSITIONS]
  if not count:
    padded = np.concatenate([np.zeros((1, own, table.shape[2]), table.dtype), table], axis=1)
    line = Line(_POSITIONS, 'folded', f'the file has none for the first {own}: zeros')
    return Placed({**leaves, _POSITIONS: padded}, (line,), image_px, note)
  if leaves[_REGISTERS].shape[1:] != (count - own, table.shape[2]):
    return Placed(leaves, (), image_px, note)  # of two networks: the difference of their widths is reported
  kept = np.concatenate([table[:, :own], table[:, count:]], axis=1)
  added = {_POSITIONS: kept, _REGISTERS: leaves[_REGISTERS] + table[:, own:count]}
  return Placed({**leaves, **added}, (Line(_REGISTERS, 'folded', 'their positions are added to them'),), image_px, note)


def _find(rows: int, counts: dict[str, int], patch: int, sizes: Sizes, also: Iterable[int] = ()
          ) -> tuple[int, tuple[int, int], str]:
  """Returns the number of rows before those of patches, the grid (h, w) of patches, and what was assumed.

  Args:
    rows: of the table.
    counts: of rows before those of patches that are usual, by their kind.
    patch: side of a patch, px.
    sizes: of images.
    also: other counts, which a known size can show.
  """
  numbers = {count: rows - count for count in counts.values() if rows > count}
  for px in (*([sizes.given] if sizes.given else []), *sizes.known):
    grid = px[0] // patch, px[1] // patch
    if fits := [count for count in (*numbers, *also) if rows - count == grid[0] * grid[1] > 0]:
      return fits[0], grid, ''
    if px == sizes.given:
      raise UserError(f'--model=image: expected the size of images for its {_described(rows, numbers)}, got '
                      f'{px[0]}x{px[1]}, which has {grid[0]} x {grid[1]} patches of {patch} px. Correct it.')
  squares = [count for count, number in numbers.items() if math.isqrt(number)**2 == number]
  usual = counts.get(TOKENS)
  if len(squares) > 1 and usual in squares:
    squares = [usual]
  if len(squares) != 1 or usual not in (None, squares[0]):
    raise UserError(f'--model=image: expected the size of images for its {_described(rows, numbers)}, got none: '
                    'neither a config nor a name that fits. Set --model=image=HEIGHTxWIDTH, px; patches have '
                    f'{patch} px.')
  side = math.isqrt(numbers[squares[0]])
  if side * patch > MOST_PX:
    raise UserError(f'--model=image: expected images of at most {MOST_PX:,} px, got {side * patch:,} px for its '
                    f'{_described(rows, numbers)}. Use other weights.')
  note = (f'Positions: {numbers[squares[0]]:,} patches are assumed to be a square, {side} x {side}. If they are not, '
          'set --model=image=HEIGHTxWIDTH.')
  return squares[0], (side, side), note


def _described(rows: int, numbers: dict[int, int]) -> str:
  """Returns how many rows are those of patches, for each way to read them."""
  ways = [f'{count} + {number:,}' if count else f'{number:,}' for count, number in numbers.items()]
  return f'{rows:,} rows of positions ({" or ".join(ways)} patches)'
