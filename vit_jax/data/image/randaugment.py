"""RandAugment on the host (Cubuk et al., arXiv 1909.13719): some operations per image, drawn from a table.

`transform.py` calls `make_style` and then `randaugment` for each image. For each drawn operation, `randaugment` calls
`to_strength`, which turns the magnitude into degrees, px or a factor, and then `apply`. Operations are drawn uniformly
with replacement. Their geometry does not change the box of an example.

There are two published tables of operations. M is the magnitude, s a random sign.

  AUGREG (AugReg, arXiv 2106.10270; Mixer; plain ViT baselines; Noisy Student), 16 operations, any M:
    rotate s 30 M/10 degrees; shear s 0.3 M/10; translate s 100 M/10 px; posterize to int(4 M/10) bits; solarize from
    int(256 M/10); solarize_add int(110 M/10); color, contrast, brightness, sharpness by 1.8 M/10 + 0.1; cutout with
    half side int(40 M/10) px. Nearest neighbor, filled with 128. M = 0 is not the identity: one bit is kept, everything
    is inverted, 90 % of the color is removed.
  TIMM (`inc1`; DeiT, MAE, LV-ViT), the same without cutout, M clipped to 0..10 after its noise:
    posterize to 4 - int(4 M/10) bits; solarize from 256 - int(256 M/10); the four enhancements by 1 + s 0.9 M/10, at
    least 0.1; translate s 0.45 M/10 of the side. M = 0 leaves most operations without effect; the recipe's
    interpolation, filled with the mean color of the recipe.

TIMM's geometric operations are those of Pillow's `rotate` and `Image.transform` (here `pillow_shift`). An output pixel
whose center lies outside of the image gets the fill color. Inside, the interpolation is bilinear or cubic with a = -1,
the outermost pixels are repeated, and the result is truncated to integers. TIMM's color operations are those of
`colors.py`.

AUGREG's operations are the `tensorflow_*` functions below, which follow google-research/big_vision
pp/archive/autoaugment.py. Their results differ from Pillow's, often by one gray level and sometimes completely:

- contrast blends with a gray of `H W / 256`, at most 255, for any image: 196 at 224 px (big_vision averages the counts
  of the histogram, not the pixels);
- solarize compares with a threshold modulo 256, since it is converted to uint8: M = 10 and M = 20 invert every value;
- posterize keeps at least one bit: a shift of 8 or more counts as one of 7, and a negative one wraps around;
- values are computed in float32 and truncated; gray is `0.2989 R + 0.587 G + 0.114 B`;
- geometric operations take the nearest pixel, halves rounded away from zero, at positions in float32.

Differs from Pillow, and so from timm: shears and translations are computed along their one axis in float32, in a third
of the time of its two axes in float64. About 1 value in 100,000 differs by one gray level.
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
_MAX_SHIFT = 7  # bits; TensorFlow's bitwise operations shift a uint8 by at most so many
_GRAY_WEIGHTS = np.array([0.2989, 0.5870, 0.1140], np.float32)  # of R, G, B; from TensorFlow's `rgb_to_grayscale`
_GRAY_TERMS = (np.arange(256, dtype=np.float32) * np.float32(1 / 255))[None, :, None] * _GRAY_WEIGHTS
"""Table `[1, 256, 3]` of the term of each level of R, G and B in gray from 0 to 1."""
_TO_LEVELS = np.float32(255.5)  # TensorFlow's factor to convert a float image to uint8
_SMOOTH_TERMS = [np.arange(256, dtype=np.float32) * weight for weight in colors.SMOOTH.ravel()]
"""Of each of the 9 weights of the smoothing filter, the table `[256]` of each level times the weight."""
_MAX_COORDINATE = 2**15 - 1  # of the int16 maps of `cv2.remap`
_NO_FRACTIONS = np.empty(0, np.uint16)  # second map of `cv2.remap`: coordinates are integers
_BELOW_HALF = np.nextafter(np.float32(0.5), np.float32(0))


class Style(NamedTuple):
  """How new pixels are computed.

  interpolation: of TIMM's geometric operations.
  fill: color outside of the image, for all geometric operations, and of cutouts.
  """
  interpolation: Interpolation
  fill: tuple[int, ...]


def make_style(settings: RandAugment, *, interpolation: Interpolation, mean: Sequence[float]) -> Style:
  """Returns the style of a table; `mean` is that of the recipe, of R, G and B in [0, 1]."""
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
    sign = 1. if rng.random() < 0.5 else -1.  # drawn for all operations, so that all draw as many random numbers
    strength = to_strength(name, magnitude, sign=sign, table=settings.table, size=(image.shape[0], image.shape[1]))
    image = apply(image, name, strength=strength, table=settings.table, style=style, rng=rng)
  return image


def to_strength(name: str, magnitude: float, *, sign: float, table: OpTable, size: tuple[int, int]) -> float:
  """Returns the strength of an operation on an image of `size` (height, width).

  It is an angle in degrees, the tangent of a shear, px, bits, a threshold, an addition or a factor; 0 for operations
  without one. `sign` is 1 or -1.
  """
  part, is_timm, (height, width) = magnitude / _MAGNITUDE_UNIT, table is OpTable.TIMM, size
  match name:
    case 'rotate':
      return sign * 30. * part
    case 'shear_x' | 'shear_y':
      return sign * 0.3 * part
    case 'translate_x' | 'translate_y':
      side_px = width if name == 'translate_x' else height
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
    return _GEOMETRY[table](image, name, strength, style)
  if name == 'cutout':
    height, width = image.shape[:2]
    center = (int(rng.integers(height)), int(rng.integers(width)))
    return cutout(image, center, half_px=int(strength), fill=style.fill)
  return COLORS[table][name](image, strength)


def cutout(image: HostArray, center: tuple[int, int], *, half_px: int, fill: Sequence[int]) -> HostArray:
  """Fills the part inside the image of the square of side `2 half_px` around `center` (row, column)."""
  assert half_px >= 0, half_px
  covered, (row, column) = image.copy(), center
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
  """Moves each row (axis 1) or column (axis 0) along itself.

  The center c of an output pixel, along the axis, is sampled at c + shear o + offset, where o is the center of its row
  or column along the other axis.
  """
  length, num_lines = image.shape[axis], image.shape[1 - axis]  # L is the axis of the lines: rows or columns
  shift_L = shear * (np.arange(num_lines) + 0.5) + offset  # of each line, px
  whole_L = np.floor(shift_L)
  fraction_L = (shift_L - whole_L).astype(np.float32)
  # `[H, 1]` or `[1, W 3]`: columns have their 3 channels side by side, as in `_interpolate`.
  fraction = fraction_L[:, None] if axis == 1 else np.repeat(fraction_L, 3)[None]
  is_cubic = style.interpolation is Interpolation.BICUBIC
  neighbors = _take_lines(image, whole_L.astype(np.int32), axis=axis)
  moved = _interpolate(neighbors, fraction, axis=axis, is_cubic=is_cubic)
  # An output pixel is outside if its center is sampled outside of [0, length).
  start_L1 = np.ceil(-shift_L - 0.5).astype(np.int32)[:, None]
  stop_L1 = np.ceil(length - 0.5 - shift_L).astype(np.int32)[:, None]
  pixels = np.arange(length, dtype=np.int32)
  is_outside = (pixels < start_L1) | (pixels >= stop_L1)
  mask_HW = np.ascontiguousarray(is_outside if axis == 1 else is_outside.T).view(np.uint8)
  color = np.empty_like(image)
  color[...] = style.fill
  return cv2.copyTo(color, mask_HW, moved)  # writes the color into `moved` where the mask is 1


def _take_lines(image: HostArray, whole_L: HostArray, *, axis: int) -> HostArray:
  """Returns each row (axis 1) or column (axis 0) from pixel `whole - 1` on, with 3 pixels more than the image has.

  Pixels n to n + 3 of a returned line are the four neighbors of output pixel n.
  """
  size = list(image.shape[:2])
  size[axis] += 3
  maps = buffer('maps', (*size, 2), np.int16)  # the column and the row of each pixel to take
  along, lines = (maps[..., 0], maps[..., 1]) if axis == 1 else (maps[..., 1].T, maps[..., 0].T)
  along[...] = whole_L[:, None] + np.arange(-1, size[axis] - 1, dtype=np.int32)
  lines[...] = np.arange(size[1 - axis])[:, None]
  return cv2.remap(image, maps, _NO_FRACTIONS, cv2.INTER_NEAREST, buffer('moved', (*size, 3), np.uint8),
                   borderMode=cv2.BORDER_REPLICATE)


def _interpolate(neighbors: HostArray, t: HostArray, *, axis: int, is_cubic: bool) -> HostArray:
  """Interpolates along the axis between the second and the third of four neighbors; values are truncated.

  `neighbors` is the result of `_take_lines`, and t, `[H, 1]` or `[1, W 3]`, the way from the second to the third one.
  The weights of the four are 0, 1 - t, t, 0 if linear. If cubic, with a = -1, those of the first, third and fourth are
  -t (1 - t)^2, t (1 + t - t^2) and t^2 (t - 1); the second has 1 minus their sum.
  """
  length = neighbors.shape[axis] - 3
  first, second, third, fourth = (
      neighbors[:, start:start + length] if axis == 1 else neighbors[start:start + length] for start in range(4))
  flat_shape = second.shape[0], second.shape[1] * 3

  def weighted(neighbor: HostArray, weight: HostArray, name: str) -> HostArray:
    """Returns the weighted difference from the second neighbor, so that areas of one color keep it exactly."""
    difference: HostArray = cv2.subtract(neighbor, second, buffer(name, second.shape), dtype=cv2.CV_32F)
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
  """Blends with the gray `min(255, H W / 256)`, rounded down: big_vision averages the counts of the histogram."""
  gray = min(255, image.shape[0] * image.shape[1] // 256)
  return cv2.LUT(image, colors.blend(np.full(256, gray), colors.LEVELS, factor))


def tensorflow_saturation(image: HostArray, factor: float) -> HostArray:
  """Blends with the gray image."""
  terms = cv2.LUT(image, _GRAY_TERMS)
  gray_HW = (terms[..., 0] + terms[..., 1] + terms[..., 2]) * _TO_LEVELS
  return colors.blend(cv2.merge([gray_HW.astype(np.uint8)] * 3), image, factor)


def tensorflow_sharpness(image: HostArray, factor: float) -> HostArray:
  """Blends with the smoothed image, whose values are truncated; the outermost pixels stay."""
  height, width, depth = image.shape
  # Each pixel times the weight of the border of the filter (index 0), and times the weight of its center (index 4).
  border_terms, center_terms = (cv2.LUT(image, _SMOOTH_TERMS[tap]).reshape(height, width * depth) for tap in (0, 4))
  span = (width - 2) * depth
  total = np.zeros((height - 2, span), np.float32)
  for tap in range(9):  # in the order of TensorFlow's kernel, since the sum is rounded at each step
    row, start = tap // 3, tap % 3 * depth
    terms = center_terms if tap == 4 else border_terms
    total += terms[row:row + height - 2, start:start + span]
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


def tensorflow_posterize(image: HostArray, bits: int) -> HostArray:
  """Keeps the highest `bits` bits if that is 1 to 8, else one bit."""
  shift = min((8 - bits) % 256, _MAX_SHIFT)  # a negative shift wraps around to a large one
  return image & np.uint8(255 >> shift << shift)


def _move_as_tensorflow(image: HostArray, name: str, strength: float, style: Style) -> HostArray:
  """Rotates counterclockwise, shears or translates to the nearest pixels."""
  height, width = image.shape[:2]
  columns, rows = np.arange(width, dtype=np.float32)[None], np.arange(height, dtype=np.float32)[:, None]
  maps = np.empty((height, width, 2), np.int16)
  for axis, (per_column, per_row, offset) in enumerate(_tensorflow_matrix(name, strength, size=(height, width))):
    terms = [np.float32(factor) * index for factor, index in ((per_column, columns), (per_row, rows)) if factor]
    position = (terms[0] + terms[1] if len(terms) == 2 else terms[0]) + np.float32(offset)
    position += np.copysign(_BELOW_HALF, position)  # with the cast below, rounds halves away from zero, as C's `round`
    maps[..., axis] = np.clip(position, -1, _MAX_COORDINATE)
  return cv2.remap(image, maps, _NO_FRACTIONS, cv2.INTER_NEAREST, borderMode=cv2.BORDER_CONSTANT,
                   borderValue=[float(level) for level in style.fill])


def _tensorflow_matrix(name: str, strength: float, *, size: tuple[int, int]) -> list[list[float]]:
  """Returns the matrix `[2, 3]` from output to input pixels; rotations about the center are computed in float32."""
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


_PILLOW: dict[str, Callable[[HostArray, float], HostArray]] = {
    'color': colors.saturation, 'contrast': colors.contrast, 'brightness': colors.brightness,
    'sharpness': colors.sharpness, 'autocontrast': lambda image, _: colors.autocontrast(image),
    'equalize': lambda image, _: colors.equalize(image), 'invert': lambda image, _: colors.invert(image),
    'posterize': lambda image, bits: colors.posterize(image, int(bits)), 'solarize': colors.solarize,
    'solarize_add': lambda image, addition: colors.solarize_add(image, int(addition))}
_TENSORFLOW = _PILLOW | {
    'color': tensorflow_saturation, 'contrast': tensorflow_contrast, 'sharpness': tensorflow_sharpness,
    'autocontrast': lambda image, _: tensorflow_autocontrast(image),
    'posterize': lambda image, bits: tensorflow_posterize(image, int(bits)),
    'solarize': lambda image, threshold: colors.solarize(image, int(threshold) % 256)}
COLORS = {OpTable.AUGREG: _TENSORFLOW, OpTable.TIMM: _PILLOW}
"""Color operations `(image, strength)` by table and name."""
_GEOMETRY = {OpTable.AUGREG: _move_as_tensorflow, OpTable.TIMM: _move_as_pillow}
"""Geometric operations `(image, name, strength, style)` by table."""
