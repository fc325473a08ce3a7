"""Random crop windows with the distributions of published programs: TensorFlow's, torchvision's and MAE's samplers.

`transform.py` calls `draw` with a recipe, or `sample` for each of several views. Both return a `Window` in px and need
only the size of the image; `geometry.resize_crop` then resizes the crop. `fractions` converts a window into a box.

All samplers draw a rectangle whose area and aspect ratio (width / height) lie in given ranges. A 5-100 % crop of a 375
x 500 image has a mean area of 0.34 with TensorFlow's sampler, and of 0.42 with torchvision's. Sizes are height, width.
"""
from __future__ import annotations

import math
from typing import assert_never

import numpy as np

from vit_jax.config import schema
from vit_jax.config.schema import CropSampler
from vit_jax.core.types import HostArray
from vit_jax.data.image.decode import Window

NUM_TRIES = 10  # of torchvision's `RandomResizedCrop`
_f32 = np.float32


def draw(recipe: schema.Recipe, size: tuple[int, int], rng: np.random.Generator, *, is_scaled: bool = False) -> Window:
  """Returns a random crop, as a recipe describes it, of an image of `size`.

  With `is_scaled`, the range `recipe.crop_aspect` is multiplied by the aspect ratio of the image.
  """
  if recipe.crop is schema.Crop.INCEPTION:
    low, high = recipe.crop_aspect
    factor = size[1] / size[0] if is_scaled else 1.
    return sample(recipe.crop_sampler, size, rng=rng, area=recipe.crop_area, aspect=(low * factor, high * factor),
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

  The area is uniform in `area`, the aspect ratio is log-uniform in `aspect`, the position is uniform. At most ten
  rectangles are drawn until one fits into the image. If none fits, the result is the largest central rectangle with an
  allowed aspect ratio. Arguments are those of `sample`.
  """
  height, width = size
  for _ in range(NUM_TRIES):
    crop_h, crop_w = _draw_sides(size, rng, area, aspect)
    if crop_w <= width and crop_h <= height:
      return _draw_position(size, (crop_h, crop_w), rng)
  ratio = min(max(width / height, aspect[0]), aspect[1])
  crop = min(height, max(1, round(width / ratio))), min(width, max(1, round(height * ratio)))
  return center(size, crop)


def clipped_crop(size: tuple[int, int], *, rng: np.random.Generator, area: tuple[float, float],
                 aspect: tuple[float, float]) -> Window:
  """Returns a rectangle that is drawn once: area uniform, aspect ratio log-uniform, each side clipped to the image's.

  This is `RandomResizedCrop` of MAE's linear probe (`util/crop.py`), after BYOL. Crops of elongated images are often
  clipped, so that their area or aspect ratio is outside of its range. Arguments are those of `sample`.
  """
  crop_h, crop_w = _draw_sides(size, rng, area, aspect)
  return _draw_position(size, (min(crop_h, size[0]), min(crop_w, size[1])), rng)


def tensorflow_crop(size: tuple[int, int], *, rng: np.random.Generator, area: tuple[float, float],
                    aspect: tuple[float, float], tries: int, covered: float) -> Window:
  """Returns a rectangle with the distribution of TensorFlow's `sample_distorted_bounding_box`.

  The operation has the image as its only box, `max_attempts=tries` (100 if a program does not state it) and
  `min_object_covered=covered`: 0 in vision_transformer and big_vision, 0.1 with 10 tries in Noisy Student. The aspect
  ratio is uniform in `aspect` (not log-uniform). The height is a uniform integer; its bounds are the heights at which a
  rectangle of this ratio has the smallest area, and the largest area that fits into the image. The position is uniform,
  but never the last row or column that would fit: TensorFlow draws from `range(H - h)`. At most `tries` rectangles are
  drawn until one fits and covers the part `covered` of the image. If none does, the crop is the complete image. Sizes
  are computed in float32 and rounded half to even, as in TensorFlow. Arguments are those of `sample`.
  """
  height, width = size
  min_area, max_area = (_f32(part) * _f32(width) * _f32(height) for part in area)  # px
  low, high = _f32(aspect[0]), _f32(aspect[1])
  for _ in range(tries):
    ratio = rng.random(dtype=_f32) * (high - low) + low
    crop_h = _draw_height(size, ratio, min_area, max_area, rng)
    if crop_h * _width(crop_h, ratio) < min_area:  # because of rounding
      crop_h += 1
    if crop_h * _width(crop_h, ratio) > max_area:
      crop_h -= 1
    crop_w = _width(crop_h, ratio)
    if min_area <= crop_h * crop_w <= max_area and 0 < crop_w <= width and 0 < crop_h <= height:
      top = int(rng.integers(height - crop_h)) if crop_h < height else 0
      left = int(rng.integers(width - crop_w)) if crop_w < width else 0
      if _f32(crop_h * crop_w) / _f32(height * width) >= _f32(covered):
        return Window(top, left, crop_h, crop_w)
  return Window(0, 0, height, width)


def window_crop(size: tuple[int, int], *, rng: np.random.Generator, area: tuple[float, float]) -> Window:
  """Returns a rectangle with the aspect ratio of an image of `size` at a random position.

  The area is uniform in `area` (fractions of the image). Up to fractions of a pixel, the crop resized to P px equals a
  random crop of P px from the complete image resized to P / sqrt(area) px, as in BiT (128 px of 160, 480 px of 512).
  """
  factor = math.sqrt(rng.uniform(*area))
  return _draw_position(size, (max(1, round(size[0] * factor)), max(1, round(size[1] * factor))), rng)


def center(size: tuple[int, int], crop: tuple[int, int]) -> Window:
  """Returns the central rectangle of size `crop` of an image of `size`."""
  return Window((size[0] - crop[0]) // 2, (size[1] - crop[1]) // 2, *crop)


def fractions(window: Window, size: tuple[int, int]) -> HostArray:
  """Returns `window` as a box `[4] f32`: top, left, bottom, right in fractions of the sides of an image of `size`."""
  height, width = size
  top, left, crop_h, crop_w = window
  return np.array([top / height, left / width, (top + crop_h) / height, (left + crop_w) / width], np.float32)


def _draw_sides(size: tuple[int, int], rng: np.random.Generator, area: tuple[float, float],
                aspect: tuple[float, float]) -> tuple[int, int]:
  """Returns the size of a rectangle with a uniform area and a log-uniform aspect ratio; the size may exceed `size`."""
  area_px = rng.uniform(*area) * size[0] * size[1]
  ratio = math.exp(rng.uniform(math.log(aspect[0]), math.log(aspect[1])))
  return max(1, round(math.sqrt(area_px / ratio))), max(1, round(math.sqrt(area_px * ratio)))


def _draw_position(size: tuple[int, int], crop: tuple[int, int], rng: np.random.Generator) -> Window:
  """Returns a rectangle of size `crop` at a uniform position inside an image of `size`."""
  top = int(rng.integers(0, size[0] - crop[0] + 1))
  left = int(rng.integers(0, size[1] - crop[1] + 1))
  return Window(top, left, *crop)


def _draw_height(size: tuple[int, int], ratio: np.float32, min_area: np.float32, max_area: np.float32,
                 rng: np.random.Generator) -> int:
  """Returns a random height, px, for an area from `min_area` to `max_area` and the aspect ratio `ratio`."""
  height, width = size
  low = round(float(np.sqrt(min_area / ratio)))
  high = round(float(np.sqrt(max_area / ratio)))
  if _width(high, ratio) > width:
    high = int((width + 0.5 - 1e-7) / float(ratio))
    if _width(high, ratio) > width:
      high -= 1
  high = min(high, height)
  return low + int(rng.integers(high - low + 1)) if low < high else high  # `high` is below `low` in small images


def _width(height: int, ratio: np.float32) -> int:
  """Returns the width, px, of a rectangle with this height, px, and aspect ratio."""
  return round(float(_f32(height) * ratio))
