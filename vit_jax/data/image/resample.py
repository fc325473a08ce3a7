"""Resampling filters: `resize` for `[H, W, 3] u8`, bit by bit as in TensorFlow, and `resize_float` for `[H, W, C] f32`.

`geometry.py` calls `resize` for images of 8 bits and `resize_float` for others. `resize` is `tf.image.resize` without
antialias, with the methods bilinear and area, as big_vision, vision_transformer and BiT use it. Positions, weights and
sums are computed in float32 and in TensorFlow's order, so that truncated values are the same integers.

`resize` filters the width first, then the height. The value of output pixel i of a side, with the step
s = stored / resized, is:

- bilinear: a + (b - a) (p - floor(p)) at the position p = (i + 1/2) s - 1/2, for the two stored pixels a and b around
  p. Beyond the border, the outermost pixels are repeated.
- area: the mean over the interval from i s to (i + 1) s, in which the weight of a stored pixel is the length of its
  part inside the interval. This also holds for enlarged images.

big_vision casts the result to uint8, which truncates values (`truncate`); vision_transformer and BiT keep float32.

Differs from vision_transformer and BiT: resized values are rounded to uint8, since images leave the host in 8 bits.
The difference from float32 is at most half a gray level, and 0 on average.
"""
from __future__ import annotations

import math
import threading
from typing import Any, NamedTuple

import numpy as np

from vit_jax.config.schema import Interpolation
from vit_jax.core.types import HostArray
from vit_jax.data.image.decode import Window
from vit_jax.data.image.opencv import cv2

_f32 = np.float32
_MAX_BUFFER_SIZE = 2**20  # elements; a larger buffer is not kept
_thread = threading.local()  # holds the buffers of each thread


class BilinearFilter(NamedTuple):
  """The bilinear filter of n output pixels of one side.

  taps: `[2, n] i64`, indices of the two stored pixels around each output pixel.
  weights: `[1, n] f32`, weight of the second of these stored pixels.
  """
  taps: HostArray
  weights: HostArray


class AreaFilter(NamedTuple):
  """The area filter of n output pixels of one side, each of which covers up to K stored pixels.

  taps: `[K, n] i64`, indices of the stored pixels that each output pixel covers.
  weights: `[K, n] f32`, the covered lengths of these stored pixels, from 0 to 1.
  """
  taps: HostArray
  weights: HostArray


def resize(image: HostArray, size: tuple[int, int], window: Window, *, area: bool, truncate: bool) -> HostArray:
  """Returns the part inside `window` of `image [H, W, 3] u8` resized to `size` (height, width): `[*window, 3] u8`.

  Only the pixels of the window are computed. They equal those of the complete resized image.

  Args:
    image: the stored image.
    size: height and width of the complete resized image, px.
    window: the part to return.
    area: whether to compute the mean over the covered area; if False, the filter is bilinear.
    truncate: whether values are truncated to integers, as in big_vision; if False, they are rounded half to even.
  """
  make_filter = area_filter if area else bilinear_filter
  rows = make_filter(image.shape[0], size[0], window.top, window.height)
  columns = make_filter(image.shape[1], size[1], window.left, window.width)
  # Only the used rows are filtered along the width; `row_taps` are indices into `used_rows`.
  used_rows, row_taps = np.unique(rows.taps, return_inverse=True)
  rows_shape = len(used_rows), *image.shape[1:]
  stored = np.take(image, used_rows, axis=0, out=buffer('rows', rows_shape, np.uint8), mode='clip')
  filtered = _apply(_swap_axes(stored, 'columns'), columns, 'across')
  filtered = _swap_axes(filtered.reshape(window.width, len(used_rows), 3), 'down')
  values = _apply(filtered, rows._replace(taps=row_taps.reshape(rows.taps.shape)), 'values')
  if area:
    values *= _f32(1) / (_step(image.shape[0], size[0]) * _step(image.shape[1], size[1]))
  if not truncate:
    np.rint(values, out=values)
  return values.astype(np.uint8).reshape(window.height, window.width, 3)


def bilinear_filter(stored: int, resized: int, start: int, num: int) -> BilinearFilter:
  """Returns the filter of `num` output pixels from `start` on, for a side of `stored` px resized to `resized` px."""
  position = (np.arange(start, start + num, dtype=_f32) + _f32(0.5)) * _step(stored, resized) - _f32(0.5)
  low = np.floor(position)
  taps = np.stack([np.maximum(low, 0), np.minimum(np.ceil(position), stored - 1)]).astype(np.int64)
  return BilinearFilter(taps, (position - low)[None])


def area_filter(stored: int, resized: int, start: int, num: int) -> AreaFilter:
  """Returns the filter of `num` output pixels from `start` on, for a side of `stored` px resized to `resized` px."""
  step = _step(stored, resized)
  outputs = np.arange(start, start + num, dtype=_f32)
  low = outputs * step  # the interval of each output pixel, from `low` to `high`
  high = (outputs + _f32(1)) * step
  first, stop = np.floor(low), np.ceil(high)  # the stored pixels that the interval covers
  pixels = first + np.arange(int((stop - first).max()), dtype=_f32)[:, None]
  # min(pixels + 1, high) - max(pixels, low), computed with the roundings of TensorFlow
  end = np.where(pixels + 1 > high, high, pixels + 1)
  first_weights = np.where(pixels + 1 > high, step, pixels + 1 - low)
  weights = np.where(pixels < low, first_weights, end - pixels)
  return AreaFilter(np.clip(pixels, 0, stored - 1).astype(np.int64), np.where(pixels < stop, weights, 0).astype(_f32))


def buffer(name: str, shape: tuple[int, ...], dtype: Any = _f32) -> HostArray:
  """Returns uninitialized memory, which this thread keeps by `name` and returns again at the next call.

  The content is valid only until the next call with this name in the same thread. Allocating the memory anew would take
  longer than filtering an image.
  """
  size = math.prod(shape)
  if size > _MAX_BUFFER_SIZE:
    return np.empty(shape, dtype)
  buffers = _thread.__dict__.setdefault('buffers', {})
  key = name, np.dtype(dtype)
  if key not in buffers or buffers[key].size < size:
    buffers[key] = np.empty(size, dtype)
  memory: HostArray = buffers[key][:size].reshape(shape)
  return memory


def resize_float(image: HostArray, size: tuple[int, int], window: Window, *, interpolation: Interpolation,
                 antialias: bool) -> HostArray:
  """Returns the part inside `window` of `image [H, W, C] f32` resized to `size` (height, width): `[*window, C] f32`.

  With antialias, the filters are Pillow's: a triangle or a cubic (a = -0.5) that grows with the scale, normalized.
  Without antialias, they are bilinear, or cubic (a = -0.75, as in OpenCV). AREA is the mean over the covered area.
  """
  for axis, start, num in ((0, window.top, window.height), (1, window.left, window.width)):
    taps, weights = _make_filter(image.shape[axis], size[axis], start, num, interpolation, antialias)
    weight_shape = (-1, *(1,) * (image.ndim - 1 - axis))
    total = np.zeros((*image.shape[:axis], num, *image.shape[axis + 1:]), np.float32)
    for tap, weight in zip(taps, weights, strict=True):
      total += np.take(image, tap, axis=axis) * weight.reshape(weight_shape)
    image = total
  return image


def _make_filter(stored: int, resized: int, start: int, num: int, interpolation: Interpolation,
                 antialias: bool) -> tuple[HostArray, HostArray]:
  """Returns the filter of one side for `resize_float`: taps and weights as in `AreaFilter`; the sum of weights is 1."""
  if interpolation is Interpolation.AREA:
    area = area_filter(stored, resized, start, num)
    return area.taps, (area.weights / area.weights.sum(0)).astype(np.float32)
  is_cubic = interpolation is Interpolation.BICUBIC
  step = stored / resized
  scale = max(1., step) if antialias else 1.
  radius = 2. if is_cubic else 1.  # of the filter, in units of `scale` stored pixels
  center = (np.arange(start, start + num) + .5) * step
  first = np.floor(center - radius * scale - .5).astype(np.int64)
  taps = first + np.arange(math.ceil(2 * radius * scale) + 2)[:, None]
  distance = np.abs(taps + .5 - center) / scale
  cubic_a = -.5 if antialias else -.75
  weights = _cubic(distance, cubic_a) if is_cubic else np.maximum(0., 1. - distance)
  if antialias:  # Pillow leaves out pixels beyond the border; OpenCV repeats the outermost pixels
    weights *= (taps >= 0) & (taps < stored)
  return np.clip(taps, 0, stored - 1), (weights / weights.sum(0)).astype(np.float32)


def _cubic(x: HostArray, a: float) -> HostArray:
  """Returns the weights of the cubic convolution (Keys 1981) at distances x >= 0."""
  below_1, below_2 = ((a + 2) * x - (a + 3)) * x * x + 1, ((x - 5) * x + 8) * x * a - 4 * a
  return np.where(x < 1, below_1, np.where(x < 2, below_2, 0.))


def _step(stored: int, resized: int) -> np.float32:
  """Returns the number of stored pixels per output pixel along a side."""
  return _f32(stored) / _f32(resized)


def _apply(values: HostArray, side_filter: BilinearFilter | AreaFilter, name: str) -> HostArray:
  """Filters `values [N, M]` along the first axis; returns `[n, M] f32` in the buffer `name`."""
  shape = side_filter.taps.shape[1], values.shape[1]
  total, term = buffer(name, shape), buffer('product', shape)
  _take(values, side_filter.taps[0], total)
  if isinstance(side_filter, BilinearFilter):  # total = a + (b - a) weight
    _take(values, side_filter.taps[1], term)
    term -= total
    term *= side_filter.weights[0][:, None]
    total += term
    return total
  total *= side_filter.weights[0][:, None]
  for taps, weights in zip(side_filter.taps[1:], side_filter.weights[1:], strict=True):
    _take(values, taps, term)
    term *= weights[:, None]
    total += term
  return total


def _take(values: HostArray, taps: HostArray, out: HostArray) -> None:
  """Writes the rows `taps` of `values [N, M]` to `out [n, M] f32`."""
  if values.dtype == _f32:
    np.take(values, taps, axis=0, out=out, mode='clip')
  else:
    np.copyto(out, np.take(values, taps, axis=0, out=buffer('bytes', out.shape, np.uint8), mode='clip'))


def _swap_axes(values: HostArray, name: str) -> HostArray:
  """Returns `values [A, B, 3]` as `[B, A 3]`, in the buffer `name`."""
  rows, columns = values.shape[:2]
  swapped: HostArray = cv2.transpose(values, buffer(name, (columns, rows, 3), values.dtype))
  return swapped.reshape(columns, rows * 3)
