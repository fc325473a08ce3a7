"""Whether the settings of a ViT fit together, and fit an image."""
from __future__ import annotations

from vit_jax.config import schema, vit_options
from vit_jax.config.schema import Positions, PositionsAt, ranges


def faults(s: schema.ViT, image_px: tuple[int, int]) -> list[str]:
  """What is wrong with a model for images of `image_px` (height, width), a sentence each."""
  return ranges.all_problems(s, lambda sound: _together(sound, image_px), 'model.')


def _together(s: schema.ViT, image_px: tuple[int, int]) -> list[str]:
  wrong = [text for text in [untiled(image_px, s.patch)] if text]
  if s.width % s.heads:
    wrong.append(f'model.width={s.width} is not a multiple of model.heads={s.heads}.')
  if s.positions in vit_options.FIXED and (s.width % 4 or s.width < 8):
    wrong.append(f'model.width={s.width} does not fit {s.positions.value} positions: want a multiple of 4, at least 8.')
  return wrong + [f'{fault}.' for fault in vit_options.faults(s)]


def untiled(image_px: tuple[int, int], patch: int) -> str:
  """What is wrong with cutting such an image into patches, or ''."""
  h, w = image_px
  if h % patch or w % patch or min(h, w) < patch:
    nearest = ' x '.join(str(max(1, round(side / patch)) * patch) for side in image_px)
    return (f'image_px={h} x {w} cannot be cut into patches of {patch} px: '
            f'want multiples of {patch}, such as {nearest}.')
  return ''


def misplaced(s: schema.ViT, num_tokens: int, *, grid: tuple[int, int], own_grid: tuple[int, int]) -> str:
  """What is wrong with these patch tokens if the blocks know the places of tokens themselves, or ''.

  Args:
    s: of the model.
    num_tokens: patch tokens that are there.
    grid: of the image.
    own_grid: that the model was built for.
  """
  knowing = {'model.positions=relative': s.positions is Positions.RELATIVE, 'model.axial=True': s.axial,
             'model.positions_at=layers': s.positions_at is PositionsAt.LAYERS}
  named = [name for name, is_so in knowing.items() if is_so]
  if named and num_tokens != grid[0] * grid[1]:
    return f'{named[0]} needs all {grid[0]} x {grid[1]} patch tokens of an image, but there are {num_tokens}.'
  if s.positions is Positions.RELATIVE and grid != own_grid:
    return (f'model.positions=relative was built for {own_grid[0]} x {own_grid[1]} tokens and cannot be resized to '
            f'{grid[0]} x {grid[1]}; want images of {own_grid[0] * s.patch} x {own_grid[1] * s.patch} px.')
  return ''
