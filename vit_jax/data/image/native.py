"""Images at their own aspect ratio, as the patches of a grid that fits into a number of tokens (SigLIP 2 "NaFlex").

An image is resized so that both sides are multiples of the patch, to the largest grid along its diagonal that has no
more patches than allowed (arXiv 2502.14786, section 2.4.2). Each side changes
by less than one patch against the aspect ratio.
"""
from __future__ import annotations

import math

import numpy as np

from vit_jax.config import schema
from vit_jax.core.types import HostArray
from vit_jax.data.image import geometry

_MOST_SCALE, _PRECISION = 100., 1e-5  # of the search in big_vision and transformers


def choose_grid(size: tuple[int, int], patch: int, num_tokens: int) -> tuple[int, int]:
  """Returns rows and columns of patches for an image of `size` (height, width), at most `num_tokens` together.

  It is the grid of the largest scale for which `ceil(height * scale / patch) * ceil(width * scale / patch)` is within
  the budget, found by the bisection of SigLIP 2, whose scale has a precision of 1e-5. An image that is more than
  `num_tokens` times as long as it is wide gets one row or column of them.
  """
  def at(scale: float) -> tuple[int, int]:
    rows, columns = (max(1, math.ceil(side * scale / patch)) for side in size)
    return rows, columns

  low, high = _PRECISION / 10, _MOST_SCALE
  while high - low >= _PRECISION:
    middle = (low + high) / 2
    low, high = (middle, high) if math.prod(at(middle)) <= num_tokens else (low, middle)
  rows, columns = at(low)
  return min(rows, num_tokens), min(columns, num_tokens)


def fit(image: HostArray, *, recipe: schema.Recipe, image_px: tuple[int, int]) -> tuple[HostArray, HostArray]:
  """Returns the patches of `image [H, W, 3] u8` at its own aspect, and their grid `[2] i32`, for evaluation.

  There are as many patches as in an image of `image_px`. They are returned as an array `[*image_px, 3] u8`, so that
  batches have the same shape for either kind of image.
  """
  side = recipe.eval_native_patch
  num_tokens = image_px[0] * image_px[1] // side ** 2
  interpolation, antialias = geometry.eval_resampling(recipe)
  resized = geometry.resize(image, size((image.shape[0], image.shape[1]), side, num_tokens), antialias=antialias,
                            interpolation=interpolation, truncate=recipe.truncate)
  patches, grid = cut(resized, side, num_tokens)
  return patches.reshape(*image_px, 3), grid


def size(image: tuple[int, int], patch: int, num_tokens: int) -> tuple[int, int]:
  """Returns height and width, px, to which an image of this height and width is resized."""
  rows, columns = choose_grid(image, patch, num_tokens)
  return rows * patch, columns * patch


def cut(image: HostArray, patch: int, num_tokens: int) -> tuple[HostArray, HostArray]:
  """Returns the patches of an image `[h P, w P, 3] u8`, and their grid `[2] i32`.

  The patches, `[num_tokens * P, P, 3] u8`, are in raster order, below each other; zeros follow the last one.
  """
  rows, columns = image.shape[0] // patch, image.shape[1] // patch
  patches = image.reshape(rows, patch, columns, patch, 3).swapaxes(1, 2)
  padded = np.zeros((num_tokens * patch, patch, 3), np.uint8)
  padded[:rows * columns * patch] = patches.reshape(-1, patch, 3)
  return padded, np.array([rows, columns], np.int32)
