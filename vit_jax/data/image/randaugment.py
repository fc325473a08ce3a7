"""RandAugment on the host (Cubuk et al., arXiv 1909.13719): some operations per image, drawn from a table.

The two published tables differ in more than their numbers. M is the magnitude, s a random sign.

  AUGREG (AugReg, arXiv 2106.10270; Mixer; plain ViT baselines; Noisy Student), 16 operations, any M:
    rotate s 30 M/10 degrees; shear s 0.3 M/10; translate s 100 M/10 px; posterize to int(4 M/10) bits; solarize from
    int(256 M/10); solarize_add int(110 M/10); color, contrast, brightness, sharpness by 1.8 M/10 + 0.1; cutout with
    half side int(40 M/10) px. Nearest neighbor, filled with 128. M = 0 is not the identity: one bit is kept, everything
    is inverted, 90 % of the color is removed.
  TIMM (`inc1`; DeiT, MAE, LV-ViT), the same without cutout, M clipped to 0..10 after its noise:
    posterize to 4 - int(4 M/10) bits; solarize from 256 - int(256 M/10); the four enhancements by 1 + s 0.9 M/10, at
    least 0.1; translate s 0.45 M/10 of the side. M = 0 leaves most operations without effect; the recipe's
    interpolation, filled with the mean color of the recipe.

Operations are drawn uniformly with replacement.

TIMM's geometric operations are Pillow's (`affine.py`), its color operations those of `colors.py`. AUGREG's are the
`tensorflow_*` functions below, which follow google-research/big_vision pp/archive/autoaugment.py. Their results differ
from Pillow's, often by one gray level and sometimes completely:

- contrast blends with a gray of `H W / 256`, at most 255, for any image: 196 at 224 px;
- solarize compares with a threshold modulo 256, since it is converted to uint8: M = 10 and M = 20 invert every value;
- posterize keeps at least one bit: a shift of 8 or more counts as one of 7, and a negative one wraps around;
- values are computed in float32 and truncated; gray is `0.2989 R + 0.587 G + 0.114 B`;
- geometric operations take the nearest pixel, halves rounded away from zero, at positions in float32.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vit_jax.config.schema import Interpolation, OpTable, RandAugment
from vit_jax.core import lazy
from vit_jax.core.types import HostArray
from vit_jax.data.image import affine, colors, geometry

if TYPE_CHECKING:
  import cv2
else:
  cv2 = lazy.Module('cv2')

TIMM = ('autocontrast', 'equalize', 'invert', 'rotate', 'posterize', 'solarize', 'solarize_add', 'color', 'contrast',
        'brightness', 'sharpness', 'shear_x', 'shear_y', 'translate_x', 'translate_y')
OPERATIONS = {OpTable.AUGREG: (*TIMM, 'cutout'), OpTable.TIMM: TIMM}
MAX_LEVEL = 10
FILL = (128, 128, 128)  # of AUGREG
MAX_SHIFT = 7  # of a uint8 in TensorFlow's bitwise operations
_WEIGHTS = np.array([0.2989, 0.5870, 0.1140], np.float32)  # of R, G, B in gray
_GRAY = (np.arange(256, dtype=np.float32) * np.float32(1 / 255))[None, :, None] * _WEIGHTS
_TO_LEVELS = np.float32(255.5)  # TensorFlow's conversion of a float image to uint8
_SMOOTH = [np.arange(256, dtype=np.float32) * weight for weight in colors.SMOOTH.ravel()]
_FARTHEST = 2**15 - 1  # of OpenCV's maps
_NO_FRACTIONS = np.empty(0, np.uint16)
_BELOW_HALF = np.nextafter(np.float32(0.5), np.float32(0))


class Style(NamedTuple):
  """Interpolation of TIMM's and fill color of all geometric operations."""
  interpolation: Interpolation
  fill: tuple[int, ...]


def style(settings: RandAugment, *, interpolation: Interpolation, mean: Sequence[float]) -> Style:
  """Returns the style of a table; `mean` of RGB in [0, 1]."""
  if settings.table is OpTable.AUGREG:
    return Style(interpolation, FILL)
  return Style(interpolation, tuple(min(255, round(255 * m)) for m in mean))


def randaugment(image: HostArray, settings: RandAugment, rng: np.random.Generator, *, style: Style) -> HostArray:
  """Applies `settings.layers` random operations to `image [H, W, 3] u8`."""
  names = OPERATIONS[settings.table]
  for _ in range(settings.layers):
    name = names[int(rng.integers(len(names)))]
    if settings.probability < 1 and rng.random() >= settings.probability:
      continue
    level = settings.magnitude
    if settings.magnitude_std:
      level = rng.normal(level, settings.magnitude_std)
    if settings.table is OpTable.TIMM:
      level = min(max(level, 0.), MAX_LEVEL)
    sign = 1. if rng.random() < 0.5 else -1.
    value = strength(name, level, sign, table=settings.table, size=(image.shape[0], image.shape[1]))
    image = apply(image, name, value, table=settings.table, style=style, rng=rng)
  return image


def strength(name: str, level: float, sign: float, *, table: OpTable, size: tuple[int, int]) -> float:
  """Returns an operation's strength at `level` on an image of `size`: degrees, bits, a factor or px; `sign` 1 or -1."""
  part = level / MAX_LEVEL
  grows = table is OpTable.TIMM
  match name:
    case 'rotate':
      return sign * 30. * part
    case 'shear_x' | 'shear_y':
      return sign * 0.3 * part
    case 'translate_x' | 'translate_y':
      side_px = size[name == 'translate_x']
      return sign * (0.45 * side_px if grows else 100.) * part
    case 'posterize':
      return 4 - int(4 * part) if grows else int(4 * part)
    case 'solarize':
      return 256 - int(256 * part) if grows else int(256 * part)
    case 'solarize_add':
      return int(110 * part)
    case 'color' | 'contrast' | 'brightness' | 'sharpness':
      return max(0.1, 1. + sign * 0.9 * part) if grows else 1.8 * part + 0.1
    case 'cutout':
      return int(40 * part)
    case _:
      return 0.


def apply(image: HostArray, name: str, value: float, *, table: OpTable, style: Style,
          rng: np.random.Generator) -> HostArray:
  """Applies an operation of a table with its strength; `rng` chooses the position of a cutout."""
  height, width = image.shape[:2]
  if name in COLORS[table]:
    return COLORS[table][name](image, value)
  if name == 'cutout':
    place = (int(rng.integers(height)), int(rng.integers(width)))
    return cutout(image, place, int(value), fill=style.fill)
  if table is OpTable.TIMM:
    if name == 'rotate':
      return affine.rotate(image, value, interpolation=style.interpolation, fill=style.fill)
    kind, _, axis = name.partition('_')
    shear, offset = (value, 0.) if kind == 'shear' else (0., value)
    return affine.shift_along(image, int(axis == 'x'), shear=shear, offset=offset, interpolation=style.interpolation,
                              fill=style.fill)
  rotation = tensorflow_rotation(value, size=(height, width)) if name == 'rotate' else None
  return warp_nearest(image, rotation or matrix(name, value, size=(height, width)), fill=style.fill)


def matrix(name: str, value: float, *, size: tuple[int, int]) -> list[list[float]]:
  """Returns the matrix `[2, 3]` from output to input pixels."""
  match name:
    case 'rotate':
      angle = math.radians(value)
      return geometry.inverse_affine(math.cos(angle), math.sin(angle), 1., 0., size=size)
    case 'shear_x':
      return [[1., value, 0.], [0., 1., 0.]]
    case 'shear_y':
      return [[1., 0., 0.], [value, 1., 0.]]
    case 'translate_x':
      return [[1., 0., value], [0., 1., 0.]]
    case 'translate_y':
      return [[1., 0., 0.], [0., 1., value]]
  raise AssertionError(name)


def cutout(image: HostArray, center: tuple[int, int], half_px: int, *, fill: Sequence[int]) -> HostArray:
  """Fills the part inside the image of the square of side `2 half_px` around `center` (row, column)."""
  covered, (row, column) = image.copy(), center
  covered[max(0, row - half_px):row + half_px, max(0, column - half_px):column + half_px] = fill
  return covered


def tensorflow_contrast(image: HostArray, factor: float) -> HostArray:
  """Blends with the gray `min(255, H W / 256)`, rounded down: the program averages the counts of a histogram."""
  gray = min(255, image.shape[0] * image.shape[1] // 256)
  return cv2.LUT(image, colors.blend(np.full(256, gray), colors.LEVELS, factor))


def tensorflow_saturation(image: HostArray, factor: float) -> HostArray:
  """Blends with the gray image."""
  parts = cv2.LUT(image, _GRAY)
  gray_HW = (parts[..., 0] + parts[..., 1] + parts[..., 2]) * _TO_LEVELS
  return colors.blend(cv2.merge([gray_HW.astype(np.uint8)] * 3), image, factor)


def tensorflow_sharpness(image: HostArray, factor: float) -> HostArray:
  """Blends with the smoothed image, whose values are truncated; the outermost pixels stay."""
  height, width, depth = image.shape
  edge, middle = (cv2.LUT(image, _SMOOTH[tap]).reshape(height, width * depth) for tap in (0, 4))
  span = (width - 2) * depth
  total = np.zeros((height - 2, span), np.float32)
  for tap in range(9):  # in the order of TensorFlow's kernel, since the sum is truncated
    row, start = tap // 3, tap % 3 * depth
    total += (middle if tap == 4 else edge)[row:row + height - 2, start:start + span]
  smooth = image.copy()
  smooth[1:-1, 1:-1] = total.astype(np.uint8).reshape(height - 2, width - 2, depth)
  return colors.blend(smooth, image, factor)


def tensorflow_autocontrast(image: HostArray) -> HostArray:
  """Stretches each channel to 0..255 in float32, truncated; a channel of a single value stays."""
  tables = []
  for channel in cv2.split(image):
    low, high = (np.float32(level) for level in cv2.minMaxLoc(channel)[:2])
    if high > low:
      scale = np.float32(255) / (high - low)
      tables.append(np.clip(colors.LEVELS.astype(np.float32) * scale - low * scale, 0, 255))
    else:
      tables.append(colors.LEVELS)
  return colors.apply_tables(image, tables)


def tensorflow_solarize(image: HostArray, threshold: int) -> HostArray:
  """Inverts the values from `threshold % 256` on."""
  return colors.solarize(image, threshold % 256)


def tensorflow_posterize(image: HostArray, bits: int) -> HostArray:
  """Keeps the highest `bits` bits if that is 1 to 8, else one bit."""
  shift = min((8 - bits) % 256, MAX_SHIFT)
  return image & np.uint8(255 >> shift << shift)


def warp_nearest(image: HostArray, matrix: Sequence[Sequence[float]], *, fill: Sequence[int] = FILL) -> HostArray:
  """Samples `image` at `matrix [2, 3] @ (column, row, 1)` by the nearest pixel; `fill` outside."""
  height, width = image.shape[:2]
  columns, rows = np.arange(width, dtype=np.float32)[None], np.arange(height, dtype=np.float32)[:, None]
  maps = np.empty((height, width, 2), np.int16)
  for axis, (per_column, per_row, offset) in enumerate(matrix):
    terms = [np.float32(scale) * at for scale, at in ((per_column, columns), (per_row, rows)) if scale]
    place = sum(terms[1:], terms[0]) + np.float32(offset)
    place += np.copysign(_BELOW_HALF, place)  # with the cast: halves away from zero, as C's `round`
    maps[..., axis] = np.clip(place, -1, _FARTHEST)
  return cv2.remap(image, maps, _NO_FRACTIONS, cv2.INTER_NEAREST, borderMode=cv2.BORDER_CONSTANT,
                   borderValue=[float(level) for level in fill])


def tensorflow_rotation(degrees: float, *, size: tuple[int, int]) -> list[list[float]]:
  """Returns the matrix that rotates an image of `size` (height, width) about its center, computed in float32."""
  radians = np.float32(degrees) * np.float32(math.pi / 180)
  cos, sin = np.cos(radians), np.sin(radians)
  down, right = np.float32(size[0] - 1), np.float32(size[1] - 1)
  return [[float(cos), float(-sin), float((right - (cos * right - sin * down)) / 2)],
          [float(sin), float(cos), float((down - (sin * right + cos * down)) / 2)]]


_PILLOW: dict[str, Callable[[HostArray, float], HostArray]] = {
    'color': colors.saturation, 'contrast': colors.contrast, 'brightness': colors.brightness,
    'sharpness': colors.sharpness, 'autocontrast': lambda image, _: colors.autocontrast(image),
    'equalize': lambda image, _: colors.equalize(image), 'invert': lambda image, _: colors.invert(image),
    'posterize': lambda image, bits: colors.posterize(image, int(bits)), 'solarize': colors.solarize,
    'solarize_add': lambda image, addition: colors.solarize_add(image, int(addition))}
_TENSORFLOW = _PILLOW | {
    'color': tensorflow_saturation, 'contrast': tensorflow_contrast,
    'sharpness': tensorflow_sharpness, 'autocontrast': lambda image, _: tensorflow_autocontrast(image),
    'posterize': lambda image, bits: tensorflow_posterize(image, int(bits)),
    'solarize': lambda image, threshold: tensorflow_solarize(image, int(threshold))}
COLORS = {OpTable.AUGREG: _TENSORFLOW, OpTable.TIMM: _PILLOW}
"""Color operations `(image, strength)` by table and name."""
