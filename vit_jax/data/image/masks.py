"""Masks for semantic segmentation: a class for each pixel of an image.

A mask is stored without loss as one channel, whose values are class indices, or as indices into a palette. It follows
the geometry of its image by nearest-neighbor resampling, so that no class is made up between two others.
"""
from __future__ import annotations

import io

import numpy as np
from PIL import Image

from vit_jax.core.types import HostArray
from vit_jax.data.image.decode import DAMAGE
from vit_jax.data.image.headers import MAX_PIXELS

IGNORED = -1
"""The class of pixels that are not counted."""
FORMATS = ('PNG', 'TIFF', 'BMP', 'GIF')  # without loss
_MODES = {'1', 'L', 'P', 'I', *('I;16', 'I;16L', 'I;16B', 'I;16N')}


class BadMask(ValueError):
  """A mask cannot be used; the message begins with what was expected."""


class WrongSize(BadMask):
  """A mask has another size than its image: `size`, height and width in px."""

  def __init__(self, size: tuple[int, int]) -> None:
    super().__init__(f'{size[0]} x {size[1]} px')
    self.size = size


def decode(encoded: bytes, *, size: tuple[int, int] | None = None) -> HostArray:
  """Returns the values of a mask, `[H, W]` i32: gray levels as they are stored, or indices into the palette.

  Args:
    encoded: the content of the file.
    size: height and width of its image, px; a mask of another size is not decoded.

  Raises:
    BadMask: the file is not an image, is stored with loss, or has several channels.
    WrongSize: it has another size.
  """
  try:
    with Image.open(io.BytesIO(encoded)) as image:
      kind, mode, (width, height) = image.format, image.mode, image.size
      if kind not in FORMATS:
        raise BadMask(f'expected a mask stored without loss ({", ".join(FORMATS)}), got {kind}')
      if mode not in _MODES:
        raise BadMask(f'expected a mask with one channel of class indices, or with a palette, got the mode {mode}')
      if height * width > MAX_PIXELS:
        raise BadMask(f'expected at most {MAX_PIXELS:,} pixels, got {height * width:,}')
      if size not in (None, (height, width)):
        raise WrongSize((height, width))
      return np.asarray(image).astype(np.int32)
  except BadMask:
    raise
  except Image.DecompressionBombError as error:
    raise BadMask(f'expected at most {MAX_PIXELS:,} pixels, got more') from error
  except DAMAGE as error:
    raise BadMask('expected a mask, got a file that cannot be decoded') from error


def classes(values: HostArray, *, first: int, ignore: int, num_classes: int) -> HostArray:
  """Returns the class of each pixel, `[H, W]` i32: `values - first`, and `IGNORED` for `ignore` and values below first.

  Raises:
    BadMask: a value is out of range.
  """
  found = np.where((values == ignore) | (values < first), IGNORED, values - first).astype(np.int32)
  if found.size and found.max() >= num_classes:
    wrong = np.unique(values[found >= num_classes])
    raise BadMask(f'expected class indices from {first} to {first + num_classes - 1}, or {ignore} for pixels to '
                  f'ignore, got {", ".join(map(str, wrong[:5].tolist()))}{" …" * (len(wrong) > 5)}')
  return found


def resize(mask: HostArray, size: tuple[int, int]) -> HostArray:
  """Returns `mask [H, W]` at `size` (height, width): each pixel is the one whose area has its center.

  Output pixel i is input pixel `floor((i + 1/2) H / size)`.
  """
  rows, columns = (((2 * np.arange(new) + 1) * old) // (2 * new) for old, new in zip(mask.shape, size, strict=True))
  return mask[rows[:, None], columns[None]]


def majority(mask: HostArray, grid: tuple[int, int]) -> HostArray:
  """Returns the most frequent class of the pixels of each token, `[h, w]` i32.

  The lowest class is chosen among equally frequent ones; a token whose pixels are all ignored is `IGNORED`.

  Args:
    mask: `[H, W]` i32 of classes; its sides are multiples of those of the grid.
    grid: (h, w) of the tokens.
  """
  h, w = grid
  height, width = mask.shape[0] // h, mask.shape[1] // w
  assert mask.shape == (h * height, w * width), (mask.shape, grid)
  pixels = mask.reshape(h, height, w, width).swapaxes(1, 2).reshape(h * w, height * width)
  num = int(pixels.max(initial=0)) + 1
  rows = np.repeat(np.arange(h * w), pixels.shape[1])
  counts = pixels.ravel() >= 0
  votes = np.bincount(rows[counts] * num + pixels.ravel()[counts], minlength=h * w * num).reshape(h * w, num)
  return np.where(votes.any(1), votes.argmax(1), IGNORED).astype(np.int32).reshape(h, w)
