"""Rotation, shear and translation of `[H, W, 3] u8` as Pillow's `Image.transform` and `rotate`, which timm uses.

An output pixel whose center lies outside of the image gets the fill color. Inside, the interpolation is bilinear or
cubic with a = -1, the outermost pixels are repeated, and the result is truncated to integers.

Differs from Pillow, and so from timm: shears and translations are computed along their one axis in float32, in a third
of the time of its two axes in float64. About 1 value in 100,000 differs by one gray level.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from vit_jax.config.schema import Interpolation
from vit_jax.core import lazy
from vit_jax.core.types import HostArray
from vit_jax.data.image.resample import buffer

if TYPE_CHECKING:
  import cv2
else:
  cv2 = lazy.Module('cv2')

_NO_FRACTIONS = np.empty(0, np.uint16)


def rotate(image: HostArray, degrees: float, *, interpolation: Interpolation, fill: Sequence[int]) -> HostArray:
  """Rotates counterclockwise about the center."""
  how = Image.Resampling.BICUBIC if interpolation is Interpolation.BICUBIC else Image.Resampling.BILINEAR
  return np.asarray(Image.fromarray(image).rotate(degrees, how, fillcolor=tuple(fill)))


def shift_along(image: HostArray, axis: int, *, shear: float, offset: float, interpolation: Interpolation,
                fill: Sequence[int]) -> HostArray:
  """Moves each row (axis 1) or column (axis 0) along itself.

  The center c of an output pixel, along the axis, is sampled at c + shear o + offset, where o is the center of its row
  or column along the other axis.
  """
  num, others = image.shape[axis], image.shape[1 - axis]
  shift = shear * (np.arange(others) + 0.5) + offset
  whole = np.floor(shift)
  is_cubic = interpolation is Interpolation.BICUBIC
  part = (shift - whole).astype(np.float32)
  part = part[:, None] if axis == 1 else np.repeat(part, 3)[None]
  moved = _between(_moved(image, whole.astype(np.int32), axis), axis, part, is_cubic=is_cubic)
  own = np.arange(num, dtype=np.int32)
  first, end = np.ceil(-shift - 0.5).astype(np.int32)[:, None], np.ceil(num - 0.5 - shift).astype(np.int32)[:, None]
  outside = (own < first) | (own >= end)
  color = np.empty_like(image)
  color[...] = fill
  return cv2.copyTo(color, np.ascontiguousarray(outside if axis == 1 else outside.T).view(np.uint8), moved)


def _moved(image: HostArray, whole: HostArray, axis: int) -> HostArray:
  """Returns each row (axis 1) or column (axis 0) from pixel `whole - 1` on, with 3 pixels more than the image has."""
  size = list(image.shape[:2])
  size[axis] += 3
  maps = buffer('maps', (*size, 2), np.int16)  # column, row
  places, lines = (maps[..., 0], maps[..., 1]) if axis == 1 else (maps[..., 1].T, maps[..., 0].T)
  places[...] = whole[:, None] + np.arange(-1, size[axis] - 1, dtype=np.int32)
  lines[...] = np.arange(size[1 - axis])[:, None]
  return cv2.remap(image, maps, _NO_FRACTIONS, cv2.INTER_NEAREST, buffer('moved', (*size, 3), np.uint8),
                   borderMode=cv2.BORDER_REPLICATE)


def _between(pixels: HostArray, axis: int, part: HostArray, *, is_cubic: bool) -> HostArray:
  """Interpolates along the axis at `part [H, 1]` or `[1, W 3]` behind the second of four `pixels`; truncated."""
  num = pixels.shape[axis] - 3
  before, here, there, after = (pixels[:, n:n + num] if axis == 1 else pixels[n:n + num] for n in range(4))
  flat = here.shape[0], here.shape[1] * 3

  def weighted(one: HostArray, weight: HostArray, name: str) -> HostArray:
    """The difference from the second pixel, so that areas of one color keep it exactly."""
    difference: HostArray = cv2.subtract(one, here, buffer(name, here.shape), dtype=cv2.CV_32F).reshape(flat)
    difference *= weight
    return difference

  if not is_cubic:
    total = weighted(there, part, 'total')
  else:
    total = weighted(there, part * (1 + part - part * part), 'total')
    total += weighted(after, part * part * (part - 1), 'term')
    total += weighted(before, -part * (1 - part) ** 2, 'term')
  total = total.reshape(here.shape)
  summed: HostArray = cv2.add(total, here, total, dtype=cv2.CV_32F)
  if is_cubic:
    np.clip(summed, 0, 255, out=summed)
  return summed.astype(np.uint8)
