"""Random crop windows with the distributions of published programs: TensorFlow's, torchvision's and MAE's samplers.

`transform.py` calls `draw` with a recipe, or `sample` for each of several views. Both return a `Window` in px, given
only the size of the image; `geometry.resize_crop` then resizes the crop. `fractions` converts a window into a box.

All samplers draw a rectangle whose area and aspect ratio lie in given ranges; their distributions differ. A 5-100 %
crop of a 375 x 500 image has a mean area of 0.34 with TensorFlow's sampler, and of 0.42 with torchvision's.
"""
from __future__ import annotations

import math
from typing import assert_never

import numpy as np

from vit_jax.config import schema
from vit_jax.config.schema import CropSampler
from vit_jax.core.types import HostArray
from vit_jax.data.image.decode import Window

CROP_TRIES = 10  # of torchvision
_f32 = np.float32


def draw(recipe: schema.Recipe, size: tuple[int, int], rng: np.random.Generator, *, relative: bool = False) -> Window:
  """Returns the random crop of a recipe for an image of `size` (height, width).

  With `relative`, `crop_aspect` is relative to the aspect ratio of the image.
  """
  if recipe.crop is schema.Crop.INCEPTION:
    low, high = recipe.crop_aspect
    unit = size[1] / size[0] if relative else 1.  # aspect ratios are width / height
    return sample(recipe.crop_sampler, size, rng=rng, area=recipe.crop_area, aspect=(low * unit, high * unit),
                  tries=recipe.crop_tries, covered=recipe.crop_covered)
  return window_crop(size, rng=rng, area=recipe.crop_area)


def sample(sampler: CropSampler, size: tuple[int, int], *, rng: np.random.Generator, area: tuple[float, float],
           aspect: tuple[float, float], tries: int, covered: float) -> Window:
  """Returns a random rectangle of an image.

  Args:
    sampler: selects the distribution.
    size: height and width of the image, px.
    rng: the only source of randomness.
    area: smallest and largest area, as fractions of the image's area.
    aspect: smallest and largest width / height.
    tries, covered: used only by TensorFlow's sampler; see `tensorflow_crop`.
  """
  match sampler:
    case CropSampler.TENSORFLOW:
      return tensorflow_crop(size, rng=rng, area=area, aspect=aspect, tries=tries, covered=covered)
    case CropSampler.TORCHVISION:
      return inception_crop(size, rng=rng, area=area, aspect=aspect)
    case CropSampler.CLIPPED:
      return clipped_crop(size, rng=rng, area=area, aspect=aspect)
    case _:
      assert_never(sampler)


def inception_crop(size: tuple[int, int], *, rng: np.random.Generator, area: tuple[float, float],
                   aspect: tuple[float, float]) -> Window:
  """Returns a random rectangle after arXiv 1409.4842, section 6, as torchvision's `RandomResizedCrop` draws it.

  The area is uniform in `area`, the aspect ratio is log-uniform in `aspect`, the position is uniform. A rectangle that
  does not fit is drawn again, ten times in total; then the largest central rectangle with an allowed aspect ratio is
  taken. Arguments are those of `sample`.
  """
  height, width = size
  for _ in range(CROP_TRIES):
    crop_h, crop_w = _draw_sides(size, rng, area, aspect)
    if crop_w <= width and crop_h <= height:
      return _draw_position(size, (crop_h, crop_w), rng)
  ratio = min(max(width / height, aspect[0]), aspect[1])
  return center(size, (min(height, max(1, round(width / ratio))), min(width, max(1, round(height * ratio)))))


def clipped_crop(size: tuple[int, int], *, rng: np.random.Generator, area: tuple[float, float],
                 aspect: tuple[float, float]) -> Window:
  """Returns a rectangle that is drawn once: area uniform, aspect ratio log-uniform, each side clipped to the image's.

  This is `RandomResizedCrop` of MAE's linear probe (`util/crop.py`), after BYOL. Crops of elongated images are clipped
  more often than torchvision's, which draws again, so ratio and area may leave their ranges. Arguments are those of
  `sample`.
  """
  crop_h, crop_w = _draw_sides(size, rng, area, aspect)
  return _draw_position(size, (min(crop_h, size[0]), min(crop_w, size[1])), rng)


def tensorflow_crop(size: tuple[int, int], *, rng: np.random.Generator, area: tuple[float, float],
                    aspect: tuple[float, float], tries: int, covered: float) -> Window:
  """Returns a rectangle with the distribution of TensorFlow's `sample_distorted_bounding_box`.

  This is that operation with the image as the only box, `max_attempts=tries` (100 if a program does not state it) and
  `min_object_covered=covered`: 0 in vision_transformer and big_vision, 0.1 with 10 tries in Noisy Student. The aspect
  ratio is uniform in `aspect` (not log-uniform). The height is a uniform integer between those at which a rectangle
  of this ratio has the smallest and the largest area, or fills the image. The position is uniform, but never the last
  row or column that would fit: TensorFlow draws from `range(H - h)`. A rectangle that does not fit, or covers less than
  `covered` of the image, is drawn again, `tries` times in total; then the crop is the complete image. Sizes are
  computed in float32 and rounded half to even, as in TensorFlow. Arguments are those of `sample`.
  """
  height, width = size
  smallest, largest = (_f32(part) * _f32(width) * _f32(height) for part in area)
  low, high = _f32(aspect[0]), _f32(aspect[1])
  for _ in range(tries):
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
      if _f32(crop_h * crop_w) / _f32(height * width) >= _f32(covered):
        return Window(top, left, crop_h, crop_w)
  return Window(0, 0, height, width)


def window_crop(size: tuple[int, int], *, rng: np.random.Generator, area: tuple[float, float]) -> Window:
  """Returns a rectangle with the shape of an image of `size` (height, width) at a random position.

  Its area is uniform in `area` (fractions of the image). Resized to P px, it equals resizing the complete image to
  P / sqrt(area) and cropping P at random, up to fractions of a pixel (BiT: 128 of 160, 480 of 512).
  """
  factor = math.sqrt(rng.uniform(*area))
  return _draw_position(size, (max(1, round(size[0] * factor)), max(1, round(size[1] * factor))), rng)


def center(size: tuple[int, int], crop: tuple[int, int]) -> Window:
  """Returns the central `crop` (height, width) of an image of `size`."""
  return Window((size[0] - crop[0]) // 2, (size[1] - crop[1]) // 2, *crop)


def fractions(window: Window, size: tuple[int, int]) -> HostArray:
  """Returns `window` as a box `[4] f32`: top, left, bottom, right in fractions of `size` (height, width)."""
  (height, width), (top, left, crop_h, crop_w) = size, window
  return np.array([top / height, left / width, (top + crop_h) / height, (left + crop_w) / width], np.float32)


def _draw_sides(size: tuple[int, int], rng: np.random.Generator, area: tuple[float, float],
                aspect: tuple[float, float]) -> tuple[int, int]:
  """Returns height and width, px, of a rectangle with a uniform area and a log-uniform aspect ratio."""
  area_px = rng.uniform(*area) * size[0] * size[1]
  ratio = math.exp(rng.uniform(math.log(aspect[0]), math.log(aspect[1])))
  return max(1, round(math.sqrt(area_px / ratio))), max(1, round(math.sqrt(area_px * ratio)))


def _draw_position(size: tuple[int, int], crop: tuple[int, int], rng: np.random.Generator) -> Window:
  """Returns a rectangle of height and width `crop` at a uniform position inside an image of `size`."""
  top = int(rng.integers(0, size[0] - crop[0] + 1))
  return Window(top, int(rng.integers(0, size[1] - crop[1] + 1)), *crop)


def _draw_height(size: tuple[int, int], ratio: np.float32, smallest: np.float32, largest: np.float32,
                 rng: np.random.Generator) -> int:
  """Returns a random height, px, for an area from `smallest` to `largest`; the upper bound if it is below the lower."""
  height, width = size
  low, high = round(float(np.sqrt(smallest / ratio))), round(float(np.sqrt(largest / ratio)))
  if _width(high, ratio) > width:
    high = int((width + 0.5 - 1e-7) / float(ratio))
    high -= _width(high, ratio) > width
  high = min(high, height)
  return low + int(rng.integers(high - low + 1)) if low < high else high


def _width(height: int, ratio: np.float32) -> int:
  """Returns the width of a rectangle of this height and aspect ratio, px."""
  return round(float(_f32(height) * ratio))
