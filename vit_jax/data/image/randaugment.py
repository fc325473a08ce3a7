"""RandAugment on the host (Cubuk et al., arXiv 1909.13719): some operations per image, drawn from a table.

`transform.py` calls `make_style` and then `randaugment` for each image. `randaugment` draws operations uniformly with
replacement. For each operation, `to_strength` converts the magnitude to degrees, px or a factor, and `apply` changes
the image. The geometric operations do not change the box of an example.

There are two published tables of operations. M is the magnitude, s a random sign.

                   AUGREG: AugReg (arXiv 2106.10270), Mixer,     TIMM (`inc1`): DeiT, MAE, LV-ViT
                   plain ViT baselines, Noisy Student
  M                any number                                    clipped to 0..10 after its noise is added
  rotate           s 30 M/10 degrees                             as AUGREG
  shear            s 0.3 M/10                                    as AUGREG
  translate        s 100 M/10 px                                 s 0.45 M/10 of the side
  posterize        to int(4 M/10) bits                           to 4 - int(4 M/10) bits
  solarize         from int(256 M/10)                            from 256 - int(256 M/10)
  solarize_add     int(110 M/10)                                 as AUGREG
  enhancements     1.8 M/10 + 0.1                                1 + s 0.9 M/10, at least 0.1
  cutout           half side int(40 M/10) px                     not in the table
  new pixels       nearest neighbor, filled with 128             the recipe's interpolation, filled with its mean

The enhancements are color, contrast, brightness and sharpness. With M = 0, most operations of TIMM change nothing, but
AUGREG's posterize keeps one bit, solarize inverts every value, and color removes 90 % of the color.

TIMM's geometric operations are those of Pillow's `rotate` and `Image.transform` (here `pillow_shift`). An output pixel
whose center lies outside of the image gets the fill color. Inside, the interpolation is bilinear or cubic with a = -1,
the outermost pixels are repeated, and values are truncated to integers. TIMM's color operations are in `colors.py`.

AUGREG's operations are the `tensorflow_*` functions below, which follow google-research/big_vision
pp/archive/autoaugment.py. Their results differ from Pillow's, often by one gray level and sometimes completely:

- contrast blends with a gray of `H W / 256`, at most 255, for any image: 196 at 224 px (big_vision averages the counts
  of the histogram, not the pixels);
- solarize takes the threshold modulo 256, as a uint8, so M = 10 and M = 20 invert every value;
- posterize keeps at least one bit: shifts of 8 bits or more are replaced by 7, and negative shifts wrap around;
- values are computed in float32 and truncated; gray is `0.2989 R + 0.587 G + 0.114 B`;
- geometric operations take the nearest pixel, halves rounded away from zero, at positions in float32.

Differs from Pillow, and so from timm: shears and translations are computed along one axis in float32, in a third of
the time that Pillow needs for two axes in float64. About 1 value in 100,000 differs by one gray level.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

from vit_jax.config.schema import Interpolation, OpTable, RandAugment
from vit_jax.config.schema.recipe import MAX_TIMM
from vit_jax.core.types import HostArray
from vit_jax.data.image import colors, geometry
from vit_jax.data.image.opencv import cv2
from vit_jax.data.image.resample import buffer

_TIMM_OPERATIONS = ('autocontrast', 'equalize', 'invert', 'rotate', 'posterize', 'solarize', 'solarize_add', 'color',
                    'contrast', 'brightness', 'sharpness', 'shear_x', 'shear_y', 'translate_x', 'translate_y')
OPERATIONS = {OpTable.AUGREG: (*_TIMM_OPERATIONS, 'cutout'), OpTable.TIMM: _TIMM_OPERATIONS}
_GEOMETRIC = ('rotate', 'shear_x', 'shear_y', 'translate_x', 'translate_y')
_MAGNITUDE_UNIT = 10.  # strengths are given as multiples of M / 10
_AUGREG_FILL = (128, 128, 128)
_MAX_SHIFT = 7  # bits; TensorFlow's bitwise operations shift a uint8 by at most this number
_GRAY_WEIGHTS = np.array([0.2989, 0.5870, 0.1140], np.float32)  # of R, G, B; from TensorFlow's `rgb_to_grayscale`
_GRAY_TERMS = (np.arange(256, dtype=np.float32) * np.float32(1 / 255))[None, :, None] * _GRAY_WEIGHTS
"""Lookup table `[1, 256, 3]`: the term that a level of R, G or B adds to gray, which is from 0 to 1."""
_TO_LEVELS = np.float32(255.5)  # TensorFlow's factor to convert a float image to uint8
_SMOOTH_TERMS = [np.arange(256, dtype=np.float32) * weight for weight in colors.SMOOTH.ravel()]
"""For each of the 9 weights of the smoothing filter, a lookup table `[256]`: each level times the weight."""
_MAX_COORDINATE = 2**15 - 1  # of the int16 maps of `cv2.remap`
_NO_FRACTIONS = np.empty(0, np.uint16)  # the second map of `cv2.remap` is empty if coordinates are integers
_BELOW_HALF = np.nextafter(np.float32(0.5), np.float32(0))


class Style(NamedTuple):
  """How new pixels are computed.

  interpolation: the interpolation of TIMM's geometric operations.
  fill: the color, R, G and B in 0..255, of cutouts and of pixels from outside of the image.
  """
  interpolation: Interpolation
  fill: tuple[int, ...]


def make_style(settings: RandAugment, *, interpolation: Interpolation, mean: Sequence[float]) -> Style:
  """Returns the style of a table; `mean` is the recipe's mean of R, G and B in [0, 1]."""
  if settings.table is OpTable.AUGREG:
    return Style(interpolation, _AUGREG_FILL)
  return Style(interpolation, tuple(min(255, round(255 * value)) for value in mean))


def randaugment(image: HostArray, settings: RandAugment, rng: np.random.Generator, *, style: Style) -> HostArray:
  """Applies `settings.layers` random operations to `image [H, W, 3] u8`."""
  names = OPERATIONS[settings.table]
  for _ in range(settings.layers):
    name = names[int(rng.integers(len(names)))]
    if settings.probability < 1 and rng.random() >= settings.probability:
      continue
    magnitude = settings.magnitude
    if settings.table is OpTable.TIMM:
      if settings.magnitude_std:
        magnitude = rng.normal(magnitude, settings.magnitude_std)
      magnitude = min(max(magnitude, 0.), MAX_TIMM)
    sign = 1. if rng.random() < 0.5 else -1.  # drawn even if the operation does not use it
    strength = to_strength(name, magnitude, sign=sign, table=settings.table, size=(image.shape[0], image.shape[1]))
    image = apply(image, name, strength=strength, table=settings.table, style=style, rng=rng)
  return image


def to_strength(name: str, magnitude: float, *, sign: float, table: OpTable, size: tuple[int, int]) -> float:
  """Returns the strength of an operation on an image of `size` (height, width).

  The strength is an angle in degrees, the tangent of a shear, px, bits, a threshold, an addition or a factor; it is 0
  for operations without a strength. `sign` is 1 or -1.
  """
  part = magnitude / _MAGNITUDE_UNIT
  is_timm = table is OpTable.TIMM
  match name:
    case 'rotate':
      return sign * 30. * part
    case 'shear_x' | 'shear_y':
      return sign * 0.3 * part
    case 'translate_x' | 'translate_y':
      side_px = size[1] if name == 'translate_x' else size[0]
      return sign * (0.45 * side_px if is_timm else 100.) * part
    case 'posterize':
      return 4 - int(4 * part) if is_timm else int(4 * part)
    case 'solarize':
      return 256 - int(256 * part) if is_timm else int(256 * part)
    case 'solarize_add':
      return int(110 * part)
    case 'color' | 'contrast' | 'brightness' | 'sharpness':
      return max(0.1, 1. + sign * 0.9 * part) if is_timm else 1.8 * part + 0.1
    case 'cutout':
      return int(40 * part)
  assert name in ('autocontrast', 'equalize', 'invert'), name
  return 0.


def apply(image: HostArray, name: str, *, strength: float, table: OpTable, style: Style,
          rng: np.random.Generator) -> HostArray:
  """Applies an operation of a table with its strength; `rng` chooses the center of a cutout."""
  if name in _GEOMETRIC:
    return _MOVES[table](image, name, strength, style)
  if name == 'cutout':
    height, width = image.shape[:2]
    center = (int(rng.integers(height)), int(rng.integers(width)))
    return cutout(image, center, half_px=int(strength), fill=style.fill)
  return _COLOR_OPERATIONS[table][name](image, strength)


def cutout(image: HostArray, center: tuple[int, int], *, half_px: int, fill: Sequence[int]) -> HostArray:
  """Fills a square of side `2 half_px` around `center` (row, column); the square may extend beyond the image."""
  assert half_px >= 0, half_px
  covered = image.copy()
  row, column = center
  covered[max(0, row - half_px):row + half_px, max(0, column - half_px):column + half_px] = fill
  return covered


def _move_as_pillow(image: HostArray, name: str, strength: float, style: Style) -> HostArray:
  """Rotates counterclockwise, shears or translates as Pillow does."""
  if name == 'rotate':
    resample = geometry.pillow_filter(style.interpolation)
    return np.asarray(Image.fromarray(image).rotate(strength, resample, fillcolor=style.fill))
  shear, offset = (strength, 0.) if name.startswith('shear') else (0., strength)
  return pillow_shift(image, 1 if name.endswith('_x') else 0, shear=shear, offset=offset, style=style)


def pillow_shift(image: HostArray, axis: int, *, shear: float, offset: float, style: Style) -> HostArray:
  """Moves each line of an image along itself: each row (axis 1) or each column (axis 0).

  An output pixel with its center at c, in a line with its center at d, is the input at `c + shear d + offset`, px.
  """
  length, num_lines = image.shape[axis], image.shape[1 - axis]  # the axis L below counts the lines
  shift_L = shear * (np.arange(num_lines) + 0.5) + offset  # px
  floor_L = np.floor(shift_L)
  fraction_L = (shift_L - floor_L).astype(np.float32)
  # `[H, 1]` or `[1, W 3]`: `_interpolate` has the 3 channels of a column side by side.
  fraction = fraction_L[:, None] if axis == 1 else np.repeat(fraction_L, 3)[None]
  neighbors = _take_lines(image, floor_L.astype(np.int32), axis=axis)
  moved = _interpolate(neighbors, fraction, axis=axis, is_cubic=style.interpolation is Interpolation.BICUBIC)
  # The output pixels from `start` to `stop` have their centers inside of the input, in [0, length).
  start_L1 = np.ceil(-shift_L - 0.5).astype(np.int32)[:, None]
  stop_L1 = np.ceil(length - 0.5 - shift_L).astype(np.int32)[:, None]
  pixels = np.arange(length, dtype=np.int32)
  is_outside = (pixels < start_L1) | (pixels >= stop_L1)
  mask_HW = np.ascontiguousarray(is_outside if axis == 1 else is_outside.T).view(np.uint8)
  color = np.empty_like(image)
  color[...] = style.fill
  return cv2.copyTo(color, mask_HW, moved)  # writes the color into `moved` where the mask is 1


def _take_lines(image: HostArray, shift_L: HostArray, *, axis: int) -> HostArray:
  """Returns each row (axis 1) or column (axis 0) from its pixel `shift - 1` on, 3 pixels longer than in the image.

  Pixels n to n + 3 of a returned line are the four neighbors of output pixel n.
  """
  size = list(image.shape[:2])
  size[axis] += 3
  maps = buffer('maps', (*size, 2), np.int16)  # the column and the row of each pixel to take
  pixels, lines = (maps[..., 0], maps[..., 1]) if axis == 1 else (maps[..., 1].T, maps[..., 0].T)  # both [L, length]
  pixels[...] = shift_L[:, None] + np.arange(-1, size[axis] - 1, dtype=np.int32)
  lines[...] = np.arange(size[1 - axis])[:, None]
  return cv2.remap(image, maps, _NO_FRACTIONS, cv2.INTER_NEAREST, buffer('moved', (*size, 3), np.uint8),
                   borderMode=cv2.BORDER_REPLICATE)


def _interpolate(neighbors: HostArray, t: HostArray, *, axis: int, is_cubic: bool) -> HostArray:
  """Returns the image `[H, W, 3] u8` interpolated between four neighbors along the axis; values are truncated.

  `neighbors` is the result of `_take_lines`, and t, `[H, 1]` or `[1, W 3]`, the part of the way from the second to the
  third neighbor. The linear weights are 0, 1 - t, t, 0. The cubic weights, with a = -1, are -t (1 - t)^2, 1 minus the
  sum of the others, t (1 + t - t^2) and t^2 (t - 1).
  """
  length = neighbors.shape[axis] - 3
  first, second, third, fourth = (
      neighbors[:, start:start + length] if axis == 1 else neighbors[start:start + length] for start in range(4))
  flat_shape = second.shape[0], second.shape[1] * 3

  # Sums of weighted differences from the second neighbor keep the color of a uniform area exactly.
  def weighted(neighbor: HostArray, weight: HostArray, buffer_name: str) -> HostArray:
    difference: HostArray = cv2.subtract(neighbor, second, buffer(buffer_name, second.shape), dtype=cv2.CV_32F)
    difference = difference.reshape(flat_shape)
    difference *= weight
    return difference

  if not is_cubic:
    total = weighted(third, t, 'total')
  else:
    total = weighted(third, t * (1 + t - t * t), 'total')
    total += weighted(fourth, t * t * (t - 1), 'term')
    total += weighted(first, -t * (1 - t) ** 2, 'term')
  total = total.reshape(second.shape)
  values: HostArray = cv2.add(total, second, total, dtype=cv2.CV_32F)
  if is_cubic:
    np.clip(values, 0, 255, out=values)
  return values.astype(np.uint8)


def tensorflow_contrast(image: HostArray, factor: float) -> HostArray:
  """Blends the gray `min(255, H W / 256)`, rounded down, with the image; see the module's docstring."""
  gray = min(255, image.shape[0] * image.shape[1] // 256)
  return cv2.LUT(image, colors.blend(np.full(256, gray), colors.LEVELS, factor))


def tensorflow_saturation(image: HostArray, factor: float) -> HostArray:
  """Blends the gray image with the image."""
  terms = cv2.LUT(image, _GRAY_TERMS)
  gray_HW = (terms[..., 0] + terms[..., 1] + terms[..., 2]) * _TO_LEVELS
  return colors.blend(cv2.merge([gray_HW.astype(np.uint8)] * 3), image, factor)


def tensorflow_sharpness(image: HostArray, factor: float) -> HostArray:
  """Blends the smoothed image, whose values are truncated, with the image; the outermost pixels do not change."""
  height, width = image.shape[:2]
  # Each pixel times the weight of the center of the filter (index 4), and times the weight of the others (index 0).
  center_terms = cv2.LUT(image, _SMOOTH_TERMS[4])
  border_terms = cv2.LUT(image, _SMOOTH_TERMS[0])
  total = np.zeros((height - 2, width - 2, 3), np.float32)
  for tap in range(9):  # in the order of TensorFlow's kernel, since the sum is rounded at each step
    row, column = divmod(tap, 3)
    terms = center_terms if tap == 4 else border_terms
    total += terms[row:row + height - 2, column:column + width - 2]
  smooth = image.copy()
  smooth[1:-1, 1:-1] = total.astype(np.uint8)
  return colors.blend(smooth, image, factor)


def tensorflow_autocontrast(image: HostArray) -> HostArray:
  """Stretches each channel to 0..255 in float32, truncated; a channel of a single value does not change."""
  tables = []
  for channel in cv2.split(image):
    low, high = (np.float32(level) for level in cv2.minMaxLoc(channel)[:2])
    if high > low:
      scale = np.float32(255) / (high - low)
      tables.append(np.clip(colors.LEVELS.astype(np.float32) * scale - low * scale, 0, 255))
    else:
      tables.append(colors.LEVELS)
  return colors.apply_tables(image, tables)


def tensorflow_posterize(image: HostArray, bits: int) -> HostArray:
  """Keeps the `bits` highest bits of each value if `bits` is 1 to 8, else one bit."""
  shift = min((8 - bits) % 256, _MAX_SHIFT)  # a negative shift wraps around to a large one
  return image & np.uint8(255 >> shift << shift)


def _move_as_tensorflow(image: HostArray, name: str, strength: float, style: Style) -> HostArray:
  """Rotates counterclockwise, shears or translates to the nearest pixels."""
  height, width = image.shape[:2]
  columns, rows = np.arange(width, dtype=np.float32)[None], np.arange(height, dtype=np.float32)[:, None]
  maps = np.empty((height, width, 2), np.int16)
  for axis, (per_column, per_row, offset) in enumerate(_tensorflow_matrix(name, strength, size=(height, width))):
    # Factors of 0 are left out, so that a position that depends on one axis is computed once for each line.
    terms = [np.float32(factor) * index for factor, index in ((per_column, columns), (per_row, rows)) if factor]
    position = sum(terms[1:], start=terms[0]) + np.float32(offset)
    position += np.copysign(_BELOW_HALF, position)  # with the cast below, rounds halves away from zero, as C's `round`
    maps[..., axis] = np.clip(position, -1, _MAX_COORDINATE)
  return cv2.remap(image, maps, _NO_FRACTIONS, cv2.INTER_NEAREST, borderMode=cv2.BORDER_CONSTANT,
                   borderValue=[float(level) for level in style.fill])


def _tensorflow_matrix(name: str, strength: float, *, size: tuple[int, int]) -> list[list[float]]:
  """Returns the matrix `[2, 3]` from output to input pixels (column, row, 1); rotations are computed in float32."""
  moves = {'shear_x': [[1., strength, 0.], [0., 1., 0.]], 'shear_y': [[1., 0., 0.], [strength, 1., 0.]],
           'translate_x': [[1., 0., strength], [0., 1., 0.]], 'translate_y': [[1., 0., 0.], [0., 1., strength]]}
  if name in moves:
    return moves[name]
  assert name == 'rotate', name
  radians = np.float32(strength) * np.float32(math.pi / 180)
  cos, sin = np.cos(radians), np.sin(radians)
  last_row, last_column = np.float32(size[0] - 1), np.float32(size[1] - 1)
  return [[float(cos), float(-sin), float((last_column - (cos * last_column - sin * last_row)) / 2)],
          [float(sin), float(cos), float((last_row - (sin * last_column + cos * last_row)) / 2)]]


_PILLOW_COLORS: dict[str, Callable[[HostArray, float], HostArray]] = {
    'color': colors.saturation, 'contrast': colors.contrast, 'brightness': colors.brightness,
    'sharpness': colors.sharpness, 'autocontrast': lambda image, _: colors.autocontrast(image),
    'equalize': lambda image, _: colors.equalize(image), 'invert': lambda image, _: colors.invert(image),
    'posterize': lambda image, bits: colors.posterize(image, int(bits)), 'solarize': colors.solarize,
    'solarize_add': lambda image, addition: colors.solarize_add(image, int(addition))}
_TENSORFLOW_COLORS = _PILLOW_COLORS | {
    'color': tensorflow_saturation, 'contrast': tensorflow_contrast, 'sharpness': tensorflow_sharpness,
    'autocontrast': lambda image, _: tensorflow_autocontrast(image),
    'posterize': lambda image, bits: tensorflow_posterize(image, int(bits)),
    'solarize': lambda image, threshold: colors.solarize(image, int(threshold) % 256)}
_COLOR_OPERATIONS = {OpTable.AUGREG: _TENSORFLOW_COLORS, OpTable.TIMM: _PILLOW_COLORS}
"""Color operations `(image, strength)` by table and name."""
_MOVES = {OpTable.AUGREG: _move_as_tensorflow, OpTable.TIMM: _move_as_pillow}
"""Geometric operations `(image, name, strength, style)` by table."""
