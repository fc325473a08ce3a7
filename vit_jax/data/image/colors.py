"""Color operations on the host: each takes `image [H, W, 3] u8`, RGB, and returns an image of the same shape.

`transform.py` calls `jitter`, `three_augment` and, for views, single operations; `randaugment.py` calls the operations
of its tables.

Operations have the names and the results of Pillow's: values are clipped to 0..255 and truncated. Exceptions are `hue`,
and gray levels, which OpenCV may round to another level. Only functions with an argument `rng` are random.
"""
from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from vit_jax.config.schema import Jitter
from vit_jax.core.types import HostArray
from vit_jax.data.image.opencv import cv2

LEVELS = np.arange(256)  # all values of a channel, from which lookup tables are made
SMOOTH = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], np.float32) / 13  # Pillow's filter SMOOTH
SOLARIZE_FROM = 128  # the lowest value that is inverted
BLUR_SIGMA_PX = (0.1, 2.)  # range; DINO (arXiv 2104.14294, after BYOL) and DeiT III (arXiv 2204.07118)


def is_on(settings: Jitter) -> bool:
  """Returns whether a jitter can change anything."""
  ranges = (settings.brightness, settings.contrast, settings.saturation, settings.hue)
  return settings.probability > 0 and any(ranges)


def jitter(image: HostArray, settings: Jitter, rng: np.random.Generator) -> HostArray:
  """Changes brightness, contrast, saturation and hue in random order, as torchvision's `ColorJitter` does."""
  if not is_on(settings) or (settings.probability < 1 and rng.random() >= settings.probability):
    return image
  operations = (('brightness', brightness), ('contrast', contrast), ('saturation', saturation), ('hue', hue))
  for index in rng.permutation(4).tolist():
    name, operation = operations[index]
    spread = getattr(settings, name)
    if spread:
      low, high = (-spread, spread) if name == 'hue' else (max(0., 1. - spread), 1. + spread)
      image = operation(image, rng.uniform(low, high))
  return image


def three_augment(image: HostArray, rng: np.random.Generator) -> HostArray:
  """Applies grayscale, solarize or Gaussian blur, with equal probability (DeiT III, section 3)."""
  match int(rng.integers(3)):
    case 0:
      return grayscale(image)
    case 1:
      return solarize(image, SOLARIZE_FROM)
    case _:
      return random_blur(image, rng)


def random_blur(image: HostArray, rng: np.random.Generator) -> HostArray:
  """Applies a Gaussian blur with a sigma uniform in 0.1 to 2 px."""
  return blur(image, rng.uniform(*BLUR_SIGMA_PX))


def blend(first: HostArray, second: HostArray, factor: float) -> HostArray:
  """Returns `first + factor (second - first)` as u8, clipped and truncated; factors beyond 0 to 1 extrapolate."""
  first_f32 = first.astype(np.float32)
  mixed = second.astype(np.float32)  # the formula is computed in place
  mixed -= first_f32
  mixed *= np.float32(factor)
  mixed += first_f32
  return np.clip(mixed, 0, 255, out=mixed).astype(np.uint8)


def brightness(image: HostArray, factor: float) -> HostArray:
  """Blends black with the image. In this and the next three functions, a factor of 1 leaves the image unchanged."""
  return cv2.LUT(image, blend(np.zeros(256), LEVELS, factor))


def contrast(image: HostArray, factor: float) -> HostArray:
  """Blends the mean gray level with the image."""
  mean = int(cv2.mean(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY))[0] + 0.5)
  return cv2.LUT(image, blend(np.full(256, mean), LEVELS, factor))


def saturation(image: HostArray, factor: float) -> HostArray:
  """Blends the gray image with the image."""
  return blend(grayscale(image), image, factor)


def sharpness(image: HostArray, factor: float) -> HostArray:
  """Blends the smoothed image with the image; the outermost pixels do not change."""
  smooth = image.copy()
  # Adding 0.5 rounds to the nearest level, as the cast to u8 truncates.
  smooth[1:-1, 1:-1] = cv2.filter2D(image, cv2.CV_32F, SMOOTH)[1:-1, 1:-1] + 0.5
  return blend(smooth, image, factor)


def hue(image: HostArray, turns: float) -> HostArray:
  """Rotates the hue by `turns` of the color circle, in steps of 1/256 turn.

  Differs from torchvision, and so from DINO: OpenCV rounds hue, saturation and value to 8 bits. Pillow truncates these
  values, and takes 20 times as long. Values of photos differ by 0.15 gray levels on average, and by 6 at most.
  """
  hsv = cv2.cvtColor(image, cv2.COLOR_RGB2HSV_FULL)
  # 255 as in torchvision, although the circle has 256 levels; one less, since Pillow truncates hues. u8 wraps around.
  hsv[..., 0] += np.uint8((int(turns * 255) - 1) % 256)
  return cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB_FULL)


def grayscale(image: HostArray) -> HostArray:
  """Converts to gray, in three equal channels."""
  return cv2.cvtColor(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)


def invert(image: HostArray) -> HostArray:
  """Returns 255 minus each value."""
  return 255 - image


def solarize(image: HostArray, threshold: float) -> HostArray:
  """Inverts the values from `threshold` on."""
  return cv2.LUT(image, np.where(threshold > LEVELS, LEVELS, 255 - LEVELS).astype(np.uint8))


def solarize_add(image: HostArray, addition: int) -> HostArray:
  """Adds `addition` to the values below 128, up to 255."""
  lifted = np.minimum(LEVELS + addition, 255)
  return cv2.LUT(image, np.where(SOLARIZE_FROM > LEVELS, lifted, LEVELS).astype(np.uint8))


def posterize(image: HostArray, bits: int) -> HostArray:
  """Keeps the `bits` highest bits of each value, 0 to 8; sets the others to 0."""
  return image & np.uint8(256 - (1 << (8 - bits)))


def autocontrast(image: HostArray) -> HostArray:
  """Stretches each channel to 0..255; a channel of a single value does not change."""
  tables = []
  for channel in cv2.split(image):
    low, high, _, _ = cv2.minMaxLoc(channel)
    if high > low:
      scale = 255 / (high - low)
      tables.append(np.clip(LEVELS * scale - low * scale, 0, 255))
    else:
      tables.append(LEVELS)
  return apply_tables(image, tables)


def equalize(image: HostArray) -> HostArray:
  """Equalizes the histogram of each channel; a channel with too few pixels below its highest level does not change."""
  tables = []
  for channel in cv2.split(image):
    counts = np.bincount(channel.ravel(), minlength=256)  # number of pixels of each level
    num_highest = counts[np.flatnonzero(counts)[-1]]
    pixels_per_level = (channel.size - num_highest) // 255
    if not pixels_per_level:
      tables.append(LEVELS)
      continue
    num_below = np.cumsum(counts) - counts
    tables.append(np.minimum((num_below + pixels_per_level // 2) // pixels_per_level, 255))
  return apply_tables(image, tables)


def blur(image: HostArray, sigma_px: float) -> HostArray:
  """Applies a Gaussian blur as Pillow computes it: three box filters along the rows, then three along the columns.

  A box has the radius of Gwosdek et al. 2011, whose fraction decides the weight of the two outermost pixels. The result
  of each box is rounded to 8 bits. The border pixels are replicated.
  """
  radius = _box_radius(sigma_px)
  num_inner = 2 * int(radius) + 1
  inner_weight = int(2**24 / (2 * radius + 1))  # Pillow's weights are integers, in units of 2^-24
  outer_weight = (2**24 - num_inner * inner_weight) // 2
  box = np.array([outer_weight, *[inner_weight] * num_inner, outer_weight], np.float32) / np.float32(2**24)
  identity = np.ones(1, np.float32)
  for across, down in [(box, identity)] * 3 + [(identity, box)] * 3:
    image = cv2.convertScaleAbs(cv2.sepFilter2D(image, cv2.CV_32F, across, down, borderType=cv2.BORDER_REPLICATE))
  return image


def _box_radius(sigma_px: float) -> float:
  """Returns the radius, px, of a box filter of variance `sigma_px^2 / 3`; computed in float32, as in Pillow."""
  variance = np.float32(np.float32(sigma_px) ** 2 / np.float32(3))
  floor = np.floor((np.float32(math.sqrt(12. * float(variance) + 1.)) - 1) / 2)
  # Solves variance (2 floor + 1 + 2 fraction) = floor (floor + 1) (2 floor + 1) / 3 + 2 fraction (floor + 1)^2.
  fraction = (2 * floor + 1) * (floor * (floor + 1) - 3 * variance) / (6 * (variance - (floor + 1) ** 2))
  return float(floor + fraction)


def apply_tables(image: HostArray, tables: Sequence[HostArray]) -> HostArray:
  """Maps each channel through its table `[256]`."""
  return cv2.LUT(image, np.stack(tables, -1).astype(np.uint8)[None])
