"""Colours of pictures on the host: operations on `image [H, W, 3] u8`, RGB, that return a new one.

Pure functions; whatever is random comes in as numbers. Values are cut off to 0..255 and rounded down, as Pillow
does, whose operations of the same names these are (a grey level may differ by 1: OpenCV's weights have fewer bits).
"""
from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np

from vit_jax.core.types import HostArray

LEVELS = np.arange(256)
SMOOTH = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], np.float32) / 13  # Pillow's filter of that name
SOLARIZE_FROM = 128


def blend(one: HostArray, two: HostArray, factor: float) -> HostArray:
  """`one + factor (two - one)` as u8: 0 gives the first, 1 the second, beyond leads away from the first."""
  start = one.astype(np.float32)
  mixed = two.astype(np.float32)
  mixed -= start
  mixed *= np.float32(factor)
  mixed += start
  return np.clip(mixed, 0, 255, out=mixed).astype(np.uint8)


def brightness(image: HostArray, factor: float) -> HostArray:
  """Blends from black."""
  return cv2.LUT(image, blend(np.zeros(256), LEVELS, factor))


def contrast(image: HostArray, factor: float) -> HostArray:
  """Blends from the mean grey level, as one even grey."""
  mean = int(cv2.mean(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY))[0] + .5)
  return cv2.LUT(image, blend(np.full(256, mean), LEVELS, factor))


def saturation(image: HostArray, factor: float) -> HostArray:
  """Blends from the grey picture."""
  return blend(grayscale(image), image, factor)


def sharpness(image: HostArray, factor: float) -> HostArray:
  """Blends from the smoothed picture; the outermost pixels stay."""
  smooth = image.copy()
  # Rounded to the nearest, by the half and the cast.
  smooth[1:-1, 1:-1] = cv2.filter2D(image, cv2.CV_32F, SMOOTH)[1:-1, 1:-1] + .5
  return blend(smooth, image, factor)


def hue(image: HostArray, turns: float) -> HostArray:
  """The colour circle turned by `turns`."""
  hsv = cv2.cvtColor(image, cv2.COLOR_RGB2HSV_FULL)
  hsv[..., 0] += np.uint8(round(turns * 256) % 256)  # wraps round
  return cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB_FULL)


def grayscale(image: HostArray) -> HostArray:
  """Three equal channels."""
  return cv2.cvtColor(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)


def invert(image: HostArray) -> HostArray:
  """255 minus each value."""
  return 255 - image


def solarize(image: HostArray, threshold: float) -> HostArray:
  """Inverts the values from `threshold` on."""
  return cv2.LUT(image, np.where(threshold > LEVELS, LEVELS, 255 - LEVELS).astype(np.uint8))


def solarize_add(image: HostArray, addition: int) -> HostArray:
  """Adds to the values below 128."""
  lifted = np.minimum(LEVELS + addition, 255)
  return cv2.LUT(image, np.where(LEVELS < SOLARIZE_FROM, lifted, LEVELS).astype(np.uint8))


def posterize(image: HostArray, bits: int) -> HostArray:
  """Keeps the `bits` highest bits, 0 to 8."""
  return image & np.uint8(256 - (1 << 8 - bits))


def autocontrast(image: HostArray) -> HostArray:
  """Stretches each channel to 0..255; one of a single value stays."""
  tables = []
  for channel in cv2.split(image):
    low, high, _, _ = cv2.minMaxLoc(channel)
    scale = 255 / (high - low) if high > low else 1.
    tables.append(np.clip(LEVELS * scale - (low * scale if high > low else 0.), 0, 255))
  return _lut(image, tables)


def equalize(image: HostArray) -> HostArray:
  """Makes the values of each channel about equally frequent."""
  tables = []
  for channel in cv2.split(image):
    counts = np.bincount(channel.ravel(), minlength=256)
    step = (channel.size - counts[np.flatnonzero(counts)[-1]]) // 255
    before = np.concatenate([[0], np.cumsum(counts)[:-1]])
    tables.append(np.minimum((before + step // 2) // step, 255) if step else LEVELS)
  return _lut(image, tables)


def cutout(image: HostArray, center: tuple[int, int], half_px: int, *, fill: Sequence[int]) -> HostArray:
  """Fills the square of side `2 half_px` about `center` (row, column), as far as it lies inside."""
  covered, (row, column) = image.copy(), center
  covered[max(0, row - half_px):row + half_px, max(0, column - half_px):column + half_px] = fill
  return covered


def blur(image: HostArray, sigma_px: float) -> HostArray:
  """Gaussian blur; the border is continued."""
  return cv2.GaussianBlur(image, (0, 0), sigma_px, borderType=cv2.BORDER_REPLICATE)


def warp(image: HostArray, matrix: Sequence[Sequence[float]], *, how: int, fill: Sequence[int]) -> HostArray:
  """`image` sampled at `matrix [2, 3] @ (column, row, 1)` by an OpenCV interpolation, `fill` outside."""
  height, width = image.shape[:2]
  return cv2.warpAffine(image, np.asarray(matrix, np.float64), (width, height), flags=how | cv2.WARP_INVERSE_MAP,
                        borderMode=cv2.BORDER_CONSTANT, borderValue=[float(f) for f in fill])


def _lut(image: HostArray, tables: Sequence[HostArray]) -> HostArray:
  """A table `[256]` for each channel."""
  return cv2.LUT(image, np.stack(tables, -1).astype(np.uint8)[None])
