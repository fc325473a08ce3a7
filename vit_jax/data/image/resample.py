"""Resampling filters: TensorFlow's, bit by bit, for `[H, W, 3] u8`, and filters in float32 for `[H, W, C] f32`.

`geometry.py` calls `resize` and `resize_float`. `resize` is `tf.image.resize` without antialias, bilinear and area.
big_vision, vision_transformer and BiT resize with it. The result is float32 there, and all of it is float32 here: the
positions, the weights and the order of the sums, so that truncation gives the same integers. Rows of the result are
`n` output pixels; i is an output pixel, s = stored / resized the step, as float32:

- bilinear: position p = (i + 1/2) s - 1/2, value a + (b - a) (p - floor(p)) of the two pixels around it, along the
  width, then along the height; the outermost pixels are repeated.
- area: the mean over the interval from i s to (i + 1) s, each pixel weighted by the part of it inside, along the width,
  then along the height. An image is enlarged in this way too.

big_vision casts the result to uint8, which truncates it (`truncate`); vision_transformer and BiT pass it on as float32.

Differs from vision_transformer and BiT: resized values are rounded to uint8, since images leave the host in 8 bits;
there they stay float32. The difference is at most half a gray level, and 0 on average.
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
_MAX_KEPT = 2**20  # elements of a buffer that a thread keeps
_thread = threading.local()


class Between(NamedTuple):
  """Of each output pixel the two stored pixels around it `[n] i64` and the part of the way to the second `[n] f32`."""
  taps: HostArray  # [2, n]
  weights: HostArray  # [1, n]


class Cover(NamedTuple):
  """Of each output pixel the stored pixels that it covers `[K, n] i64` and their weights `[K, n] f32`."""
  taps: HostArray
  weights: HostArray


def resize(image: HostArray, size: tuple[int, int], window: Window, *, area: bool, truncate: bool) -> HostArray:
  """Returns the part inside `window` of `image [H, W, 3] u8` resized to `size` (height, width): `[*window, 3] u8`.

  Only the pixels of the window are computed, and they do not depend on it.

  Args:
    image: the stored image.
    size: height and width of the complete resized image, px.
    window: the part to return.
    area: mean over the covered area; else bilinear.
    truncate: cast to integers as big_vision does; else round half to even.
  """
  find = cover if area else between
  rows = find(image.shape[0], size[0], window.top, window.height)
  columns = find(image.shape[1], size[1], window.left, window.width)
  used, places = np.unique(rows.taps, return_inverse=True)
  stored = np.take(image, used, axis=0, out=buffer('rows', (len(used), *image.shape[1:]), np.uint8), mode='clip')
  across = _along(_swap(stored, 'columns'), columns, 'across')
  across = _swap(across.reshape(window.width, len(used), 3), 'down')
  values = _along(across, rows._replace(taps=places.reshape(rows.taps.shape)), 'values')
  if area:
    values *= _f32(1) / (_step(image.shape[0], size[0]) * _step(image.shape[1], size[1]))
  if not truncate:
    np.rint(values, out=values)
  return values.astype(np.uint8).reshape(window.height, window.width, 3)


def between(stored: int, resized: int, start: int, num: int) -> Between:
  """Returns the bilinear filter of the `num` output pixels from `start` on, of a side of `stored` px."""
  place = (np.arange(start, start + num, dtype=_f32) + _f32(0.5)) * _step(stored, resized) - _f32(0.5)
  low = np.floor(place)
  taps = np.stack([np.maximum(low, 0), np.minimum(np.ceil(place), stored - 1)]).astype(np.int64)
  return Between(taps, (place - low)[None])


def cover(stored: int, resized: int, start: int, num: int) -> Cover:
  """Returns the area filter of the `num` output pixels from `start` on, of a side of `stored` px."""
  step = _step(stored, resized)
  number = np.arange(start, start + num, dtype=_f32)
  low, high = number * step, (number + _f32(1)) * step
  first, last = np.floor(low), np.ceil(high)
  pixels = first + np.arange(int((last - first).max()), dtype=_f32)[:, None]
  end = np.where(pixels + 1 > high, high, pixels + 1)
  weights = np.where(pixels < low, np.where(pixels + 1 > high, step, pixels + 1 - low), end - pixels)
  return Cover(np.clip(pixels, 0, stored - 1).astype(np.int64), np.where(pixels < last, weights, 0).astype(_f32))


def buffer(name: str, shape: tuple[int, ...], dtype: Any = _f32) -> HostArray:
  """Returns uninitialized memory that this thread keeps: new memory of this size costs more than the arithmetic."""
  size = math.prod(shape)
  if size > _MAX_KEPT:
    return np.empty(shape, dtype)
  kept = _thread.__dict__.setdefault('kept', {})
  key = name, np.dtype(dtype)
  if key not in kept or kept[key].size < size:
    kept[key] = np.empty(size, dtype)
  found: HostArray = kept[key][:size].reshape(shape)
  return found


def resize_float(image: HostArray, size: tuple[int, int], window: Window, *, interpolation: Interpolation,
                 antialias: bool) -> HostArray:
  """Returns the part inside `window` of `image [H, W, C] f32` resized to `size` (height, width); values are unrounded.

  With antialias, the filters are Pillow's: a triangle or a cubic (a = -0.5) that grows with the scale, normalized.
  Without, they are bilinear, the mean over the covered area, or cubic (a = -0.75, as in OpenCV).
  """
  for axis, (start, num) in enumerate(((window.top, window.height), (window.left, window.width))):
    taps, weights = filters(image.shape[axis], size[axis], start, num, interpolation=interpolation, antialias=antialias)
    shape = (-1, *(1,) * (image.ndim - 1 - axis))
    total = np.zeros((*image.shape[:axis], num, *image.shape[axis + 1:]), np.float32)
    for one, weight in zip(taps, weights, strict=True):
      total += np.take(image, one, axis=axis) * weight.reshape(shape)
    image = total
  return image


def filters(stored: int, resized: int, start: int, num: int, *, interpolation: Interpolation,
            antialias: bool) -> tuple[HostArray, HostArray]:
  """Returns the stored pixels `[K, num]` of the `num` output pixels from `start` on, and their weights, f32."""
  if interpolation is Interpolation.AREA:
    found = cover(stored, resized, start, num)
    return found.taps, (found.weights / found.weights.sum(0)).astype(np.float32)
  is_cubic, step = interpolation is Interpolation.BICUBIC, stored / resized
  scale, half = max(1., step) if antialias else 1., 2. if is_cubic else 1.
  center = (np.arange(start, start + num) + .5) * step
  first = np.floor(center - half * scale - .5).astype(np.int64)
  taps = first + np.arange(math.ceil(2 * half * scale) + 2)[:, None]
  distance = np.abs(taps + .5 - center) / scale
  weights = _cubic(distance, -.5 if antialias else -.75) if is_cubic else np.maximum(0., 1. - distance)
  if antialias:  # Pillow leaves out what is beyond the image; the others repeat the outermost pixels
    weights *= (taps >= 0) & (taps < stored)
  return np.clip(taps, 0, stored - 1), (weights / weights.sum(0)).astype(np.float32)


def _cubic(x: HostArray, a: float) -> HostArray:
  """Returns the weights of the cubic convolution (Keys 1981) at distances x >= 0."""
  near, far = ((a + 2) * x - (a + 3)) * x * x + 1, ((x - 5) * x + 8) * x * a - 4 * a
  return np.where(x < 1, near, np.where(x < 2, far, 0.))


def _step(stored: int, resized: int) -> np.float32:
  return _f32(stored) / _f32(resized)


def _along(values: HostArray, chosen: Between | Cover, name: str) -> HostArray:
  """Filters `values [N, M]` along its first axis: `[n, M] f32`, in the buffer `name`."""
  shape = chosen.taps.shape[1], values.shape[1]
  total, other = buffer(name, shape), buffer('other', shape)
  _take(values, chosen.taps[0], total)
  if isinstance(chosen, Between):
    _take(values, chosen.taps[1], other)
    other -= total
    other *= chosen.weights[0][:, None]
    total += other
    return total
  total *= chosen.weights[0][:, None]
  for taps, weights in zip(chosen.taps[1:], chosen.weights[1:], strict=True):
    _take(values, taps, other)
    other *= weights[:, None]
    total += other
  return total


def _take(values: HostArray, taps: HostArray, out: HostArray) -> None:
  """Writes the rows `taps` of `values [N, M]` to `out [n, M] f32`."""
  if values.dtype == _f32:
    np.take(values, taps, axis=0, out=out, mode='clip')
  else:
    np.copyto(out, np.take(values, taps, axis=0, out=buffer('bytes', out.shape, np.uint8), mode='clip'))


def _swap(values: HostArray, name: str) -> HostArray:
  """Returns `values [A, B, 3]` as `[B, A 3]`, in the buffer `name`."""
  rows, columns = values.shape[:2]
  swapped: HostArray = cv2.transpose(values, buffer(name, (columns, rows, 3), values.dtype))
  return swapped.reshape(columns, rows * 3)
