"""Decides which rows of a table of positions are those of patches, and on which grid of patches they lie.

A program gives its class token a row or not, whatever the number of rows is: 225 rows are a class token and 14 x 16
patches in one network, and 15 x 15 patches in another. What the program does not decide, the size of images does: from
`--model=image`, a config beside the file, or its published name. Without it a square is assumed, and the report says
so.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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


class Placed(NamedTuple):
  """Leaves with positions in our form.

  lines: what was changed.
  image_px: (height, width) of the images that the positions are for; None = the network has no table of positions.
  note: a sentence on what was assumed; '' = nothing.
  """
  leaves: Leaves
  lines: tuple[Line, ...] = ()
  image_px: tuple[int, int] | None = None
  note: str = ''


def place(leaves: Leaves, model: schema.Model, first_rows: Sequence[str], *, given_px: tuple[int, int] | None,
          known_px: Sequence[tuple[int, int]]) -> Placed:
  """Returns leaves with one row of positions for each class and distillation token, and none for registers.

  Args:
    leaves: with positions as in the file.
    model: settings of the network.
    first_rows: rows before those of the patches that networks of this program have, such as `TOKENS`; several where
      its networks differ.
    given_px: of `--model=image`; positions that are for another size are an error.
    known_px: from configs and names; the first one that fits counts.

  Raises:
    UserError: nothing decides where patches lie, or they cannot be for the given size.
  """
  if isinstance(model, schema.Mixer):
    num_tokens = leaves['backbone/blocks/tokens/up/kernel'].shape[1]
    grid = _find(num_tokens, {NONE: 0}, {NONE: 0}, model.patch, given_px, known_px)
    return Placed(leaves, image_px=grid.image_px, note=grid.note)
  if not isinstance(model, schema.ViT) or not model.positions.has_rows or _POSITIONS not in leaves:
    return Placed(leaves)
  counts = {TOKENS: model.num_first, NONE: 0, ALL: model.num_first + model.registers}
  positions = leaves[_POSITIONS]
  usual = {rows: counts[rows] for rows in first_rows}
  grid = _find(positions.shape[1], usual, counts, model.patch, given_px, known_px)
  changed = leaves
  lines: tuple[Line, ...] = ()
  if model.num_first and not grid.num_first:
    zeros = np.zeros((1, model.num_first, positions.shape[2]), positions.dtype)
    changed = {**leaves, _POSITIONS: np.concatenate([zeros, positions], axis=1)}
    lines = (Line(_POSITIONS, 'folded', f'the file has none for the first {model.num_first}: zeros'),)
  elif grid.num_first != model.num_first:
    tokens, registers, patches = np.split(positions, [model.num_first, grid.num_first], axis=1)
    if registers.shape[1:] == leaves[_REGISTERS].shape[1:]:  # else of two networks, and their widths are reported
      changed = {**leaves, _POSITIONS: np.concatenate([tokens, patches], axis=1),
                 _REGISTERS: leaves[_REGISTERS] + registers}
      lines = (Line(_REGISTERS, 'folded', 'their positions are added to them'),)
  return Placed(changed, lines, grid.image_px, grid.note)


class _Grid(NamedTuple):
  """Where the patches of a table lie: after `num_first` other rows, for images of `image_px`; `note` as in `Placed`."""
  num_first: int
  image_px: tuple[int, int]
  note: str = ''


def _find(num_rows: int, usual: Mapping[str, int], possible: Mapping[str, int], patch: int,
          given_px: tuple[int, int] | None, known_px: Sequence[tuple[int, int]]) -> _Grid:
  """Returns where the patches of a table lie.

  Args:
    num_rows: of the table.
    usual: numbers of rows before those of patches in networks of the program, by their kind (`TOKENS` …).
    possible: those and others, which only a known size of images can show.
    patch: side of a patch, px.
    given_px, known_px: see `place`.
  """
  num_patches = {num_first: num_rows - num_first for num_first in usual.values() if num_rows > num_first}
  for height, width in (*([given_px] if given_px else []), *known_px):
    rows, columns = height // patch, width // patch
    for num_first in (*num_patches, *possible.values()):
      if num_rows - num_first == rows * columns > 0:
        return _Grid(num_first, (rows * patch, columns * patch))
    if (height, width) == given_px:
      raise UserError(f'--model=image: expected the size of images for its {_described(num_rows, num_patches)}, got '
                      f'{height}x{width}, which has {rows} x {columns} patches of {patch} px. Correct it.')
  squares = [num_first for num_first, number in num_patches.items() if math.isqrt(number)**2 == number]
  if usual.get(TOKENS) in squares:
    squares = [usual[TOKENS]]
  if len(squares) != 1 or usual.get(TOKENS, squares[0]) != squares[0]:
    raise UserError(f'--model=image: expected the size of images for its {_described(num_rows, num_patches)}, got '
                    'none: neither a config nor a name that fits. Set --model=image=HEIGHTxWIDTH, px; patches have '
                    f'{patch} px.')
  side = math.isqrt(num_patches[squares[0]])
  if side * patch > MOST_PX:
    raise UserError(f'--model=image: expected images of at most {MOST_PX:,} px, got {side * patch:,} px for its '
                    f'{_described(num_rows, num_patches)}. Use other weights.')
  return _Grid(squares[0], (side * patch, side * patch), (
      f'Positions: {side * side:,} patches are assumed to be a square, {side} x {side}. If they are not, set '
      '--model=image=HEIGHTxWIDTH.'))


def _described(num_rows: int, num_patches: Mapping[int, int]) -> str:
  """Returns how many rows are those of patches, such as `197 rows of positions (1 + 196 patches)`."""
  ways = [f'{num_first} + {number:,}' if num_first else f'{number:,}' for num_first, number in num_patches.items()]
  return f'{num_rows:,} rows of positions ({" or ".join(ways)} patches)'
