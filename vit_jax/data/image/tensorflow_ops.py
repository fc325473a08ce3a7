"""The operations of RandAugment as the TensorFlow programs compute them: AugReg, MLP-Mixer, plain ViT baselines.

The operations of `pixels` are Pillow's. Those here follow google-research/big_vision pp/archive/autoaugment.py, whose
results differ from Pillow's, often by one grey level and sometimes completely:

- contrast blends from an even grey of `H W / 256`, at most 255, whatever the image shows: 196 at 224 px;
- solarize compares with a threshold modulo 256, since it becomes a uint8: M = 10 and M = 20 invert every value;
- posterize keeps at least one bit: a shift of 8 or more counts as one of 7, and a negative one wraps around;
- values are computed in float32 and truncated; grey is `0.2989 R + 0.587 G + 0.114 B`;
- geometric operations take the nearest pixel, halves away from zero, at positions in float32.

All take and return `image [H, W, 3] u8`.
"""
from __future__ import annotations

import math
from collections.abc import Sequence

import cv2
import numpy as np

from vit_jax.core.types import HostArray
from vit_jax.data.image import photometric

FILL = (128, 128, 128)
MAX_SHIFT = 7  # of a uint8 in TensorFlow's bitwise operations
_WEIGHTS = np.array([0.2989, 0.5870, 0.1140], np.float32)  # of R, G, B in grey
_GREY = (np.arange(256, dtype=np.float32) * np.float32(1 / 255))[None, :, None] * _WEIGHTS
_TO_LEVELS = np.float32(255.5)  # TensorFlow's conversion of a float image to uint8
_SMOOTH = [np.arange(256, dtype=np.float32) * weight for weight in photometric.SMOOTH.ravel()]
_FARTHEST = 2**15 - 1  # of OpenCV's maps
_NO_FRACTIONS = np.empty(0, np.uint16)
_BELOW_HALF = np.nextafter(np.float32(0.5), np.float32(0))


def contrast(image: HostArray, factor: float) -> HostArray:
  """Blends from the even grey `min(255, H W / 256)`, rounded down: the program averages the counts of a histogram."""
  grey = min(255, image.shape[0] * image.shape[1] // 256)
  return cv2.LUT(image, photometric.blend(np.full(256, grey), photometric.LEVELS, factor))


def saturation(image: HostArray, factor: float) -> HostArray:
  """Blends from the grey image."""
  parts = cv2.LUT(image, _GREY)
  grey_HW = (parts[..., 0] + parts[..., 1] + parts[..., 2]) * _TO_LEVELS
  return photometric.blend(cv2.merge([grey_HW.astype(np.uint8)] * 3), image, factor)


def sharpness(image: HostArray, factor: float) -> HostArray:
  """Blends from the smoothed image, whose values are truncated; the outermost pixels stay."""
  height, width, depth = image.shape
  edge, middle = (cv2.LUT(image, _SMOOTH[tap]).reshape(height, width * depth) for tap in (0, 4))
  span = (width - 2) * depth
  total = np.zeros((height - 2, span), np.float32)
  for tap in range(9):  # in the order of TensorFlow's kernel, since the sum is truncated
    row, start = tap // 3, tap % 3 * depth
    total += (middle if tap == 4 else edge)[row:row + height - 2, start:start + span]
  smooth = image.copy()
  smooth[1:-1, 1:-1] = total.astype(np.uint8).reshape(height - 2, width - 2, depth)
  return photometric.blend(smooth, image, factor)


def autocontrast(image: HostArray) -> HostArray:
  """Stretches each channel to 0..255 in float32, truncated; a channel of a single value stays."""
  tables = []
  for channel in cv2.split(image):
    low, high = (np.float32(level) for level in cv2.minMaxLoc(channel)[:2])
    if high > low:
      scale = np.float32(255) / (high - low)
      tables.append(np.clip(photometric.LEVELS.astype(np.float32) * scale - low * scale, 0, 255))
    else:
      tables.append(photometric.LEVELS)
  return cv2.LUT(image, np.stack(tables, -1).astype(np.uint8)[None])


def solarize(image: HostArray, threshold: int) -> HostArray:
  """Inverts the values from `threshold % 256` on."""
  return photometric.solarize(image, threshold % 256)


def posterize(image: HostArray, bits: int) -> HostArray:
  """Keeps the highest bits: `bits` of them if that is 1 to 8, else one."""
  shift = min((8 - bits) % 256, MAX_SHIFT)
  return image & np.uint8(255 >> shift << shift)


def warp(image: HostArray, matrix: Sequence[Sequence[float]], *, fill: Sequence[int] = FILL) -> HostArray:
  """`image` sampled at `matrix [2, 3] @ (column, row, 1)` by the nearest pixel, `fill` outside."""
  height, width = image.shape[:2]
  columns, rows = np.arange(width, dtype=np.float32)[None], np.arange(height, dtype=np.float32)[:, None]
  maps = np.empty((height, width, 2), np.int16)
  for axis, (per_column, per_row, offset) in enumerate(matrix):
    terms = [np.float32(scale) * at for scale, at in ((per_column, columns), (per_row, rows)) if scale]
    place = sum(terms[1:], terms[0]) + np.float32(offset)
    place += np.copysign(_BELOW_HALF, place)  # and truncation: halves away from zero, as C's `round`
    maps[..., axis] = np.clip(place, -1, _FARTHEST)
  return cv2.remap(image, maps, _NO_FRACTIONS, cv2.INTER_NEAREST, borderMode=cv2.BORDER_CONSTANT,
                   borderValue=[float(level) for level in fill])


def rotation(degrees: float, *, size: tuple[int, int]) -> list[list[float]]:
  """The matrix of `warp` that turns an image of `size` (height, width) about its centre, in float32."""
  radians = np.float32(degrees) * np.float32(math.pi / 180)
  cos, sin = np.cos(radians), np.sin(radians)
  down, right = np.float32(size[0] - 1), np.float32(size[1] - 1)
  return [[float(cos), float(-sin), float((right - (cos * right - sin * down)) / 2)],
          [float(sin), float(cos), float((down - (sin * right + cos * down)) / 2)]]
