"""Random crops in the forms that published programs use: TensorFlow's and torchvision's samplers, and MAE's.

All draw a rectangle whose area and aspect ratio lie in given ranges, and they differ in its distribution. A 5-100 %
crop of a 375 x 500 image has a mean area of 0.34 with TensorFlow's sampler, and of 0.42 with torchvision's.
"""
from __future__ import annotations

import math
from typing import assert_never

import numpy as np

from vit_jax.config.schema import CropSampler
from vit_jax.data.image.image_ops import Window, inception_crop

TENSORFLOW_TRIES = 100  # default of `max_attempts`
_f32 = np.float32


def sample(sampler: CropSampler, size: tuple[int, int], *, rng: np.random.Generator, area: tuple[float, float],
           aspect: tuple[float, float]) -> Window:
  """A random rectangle of an image.

  Args:
    sampler: whose distribution.
    size: height and width of the image, px.
    rng: the only source of randomness.
    area: smallest and largest area, as fractions of the image's.
    aspect: smallest and largest width / height.
  """
  match sampler:
    case CropSampler.TENSORFLOW:
      return tensorflow_crop(size, rng=rng, area=area, aspect=aspect)
    case CropSampler.TORCHVISION:
      return inception_crop(size, rng=rng, area=area, aspect=aspect)
    case CropSampler.CLIPPED:
      return clipped_crop(size, rng=rng, area=area, aspect=aspect)
    case _:
      assert_never(sampler)


def clipped_crop(size: tuple[int, int], *, rng: np.random.Generator, area: tuple[float, float],
                 aspect: tuple[float, float]) -> Window:
  """A rectangle that is drawn once: area uniform, aspect ratio log-uniform, each side cut to the image's.

  This is `RandomResizedCrop` of MAE's linear probe (`util/crop.py`), after BYOL. Where the image is long, crops are
  more often cut than with torchvision's sampler, which draws again, so ratio and area may leave their ranges. Arguments
  are those of `sample`.
  """
  height, width = size
  pixels = rng.uniform(*area) * height * width
  ratio = math.exp(rng.uniform(math.log(aspect[0]), math.log(aspect[1])))
  crop_w = min(max(1, round(math.sqrt(pixels * ratio))), width)
  crop_h = min(max(1, round(math.sqrt(pixels / ratio))), height)
  top = int(rng.integers(0, height - crop_h + 1))
  return Window(top, int(rng.integers(0, width - crop_w + 1)), crop_h, crop_w)


def tensorflow_crop(size: tuple[int, int], *, rng: np.random.Generator, area: tuple[float, float],
                    aspect: tuple[float, float]) -> Window:
  """A rectangle with the distribution of TensorFlow's `sample_distorted_bounding_box`.

  This is that operation with `min_object_covered=0` and no boxes, as vision_transformer and big_vision call it. The
  aspect ratio is uniform in `aspect` (not log-uniform). The height is a uniform integer between those at which a
  rectangle of this ratio has the smallest and the largest area, or fills the image. The place is uniform, but never
  the last row or column that would fit: TensorFlow draws from `range(H - h)`. Where no rectangle fits, it is drawn
  again, 100 times in all; then the crop is the whole image. Sizes are computed in float32 and rounded half to even,
  as there. Arguments are those of `sample`.
  """
  height, width = size
  smallest, largest = (_f32(part) * _f32(width) * _f32(height) for part in area)
  low, high = _f32(aspect[0]), _f32(aspect[1])
  for _ in range(TENSORFLOW_TRIES):
    ratio = rng.random(dtype=_f32) * (high - low) + low
    crop_h = _draw_height(size, ratio, smallest, largest, rng)
    crop_w = _width(crop_h, ratio)
    if crop_h * crop_w < smallest:
      crop_h, crop_w = crop_h + 1, _width(crop_h + 1, ratio)
    if crop_h * crop_w > largest:
      crop_h, crop_w = crop_h - 1, _width(crop_h - 1, ratio)
    if smallest <= crop_h * crop_w <= largest and 0 < crop_w <= width and 0 < crop_h <= height:
      top = int(rng.integers(height - crop_h)) if crop_h < height else 0
      left = int(rng.integers(width - crop_w)) if crop_w < width else 0
      return Window(top, left, crop_h, crop_w)
  return Window(0, 0, height, width)


def _draw_height(size: tuple[int, int], ratio: np.float32, smallest: np.float32, largest: np.float32,
                 rng: np.random.Generator) -> int:
  """A height between those of the smallest and the largest area, px; the largest one if they cross."""
  height, width = size
  low, high = round(float(np.sqrt(smallest / ratio))), round(float(np.sqrt(largest / ratio)))
  if _width(high, ratio) > width:
    high = int((width + 0.5 - 1e-7) / float(ratio))
    high -= _width(high, ratio) > width
  high = min(high, height)
  return low + int(rng.integers(high - low + 1)) if low < high else high


def _width(height: int, ratio: np.float32) -> int:
  """The width of a rectangle of this height and ratio, px."""
  return round(float(_f32(height) * ratio))
