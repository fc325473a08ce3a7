"""RandAugment on the host (Cubuk et al., arXiv 1909.13719): a few operations an image, drawn from a table.

Two published tables, which differ in more than their numbers. M is the magnitude, s a random sign.

  AUGREG (AugReg, arXiv 2106.10270; Mixer; plain ViT baselines; Noisy Student), 16 operations, any M:
    rotate s 30 M/10 degrees; shear s .3 M/10; translate s 100 M/10 px; posterize to int(4 M/10) bits; solarize from
    int(256 M/10); solarize_add int(110 M/10); color, contrast, brightness, sharpness by 1.8 M/10 + .1; cutout of
    half side int(40 M/10) px. Nearest neighbour, filled with 128. The pixels are those of the authors' program, with
    its surprises, which `tensorflow_pixels` lists: solarize at M = 10 and 20 inverts everything, contrast blends from
    an even grey that is the same for every image. M = 0 is not the identity: one bit is kept, everything is inverted,
    nine tenths of the colour are gone.
  TIMM (`inc1`; DeiT, MAE, LV-ViT), the same without cutout, M cut off to 0..10 after its noise:
    posterize to 4 - int(4 M/10) bits; solarize from 256 - int(256 M/10); the four enhancements by 1 + s .9 M/10, at
    least .1; translate s .45 M/10 of the side. M = 0 leaves most operations without effect; the recipe's
    interpolation, filled with the mean colour of the recipe.

Operations are drawn uniformly and with replacement. Of the geometric ones, the coordinates are those of pixel
centres, and shear keeps the first row or column in its place.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import cv2
import numpy as np

from vit_jax.config.schema import Interpolation, OpTable, RandAugment
from vit_jax.core.types import HostArray
from vit_jax.data.device import augment
from vit_jax.data.image import photometric, tensorflow_ops

TIMM = ('autocontrast', 'equalize', 'invert', 'rotate', 'posterize', 'solarize', 'solarize_add', 'color', 'contrast',
        'brightness', 'sharpness', 'shear_x', 'shear_y', 'translate_x', 'translate_y')
OPERATIONS = {OpTable.AUGREG: (*TIMM, 'cutout'), OpTable.TIMM: TIMM}
MAX_LEVEL = 10
_PILLOW: dict[str, Callable[[HostArray, float], HostArray]] = {
    'color': photometric.saturation, 'contrast': photometric.contrast, 'brightness': photometric.brightness,
    'sharpness': photometric.sharpness, 'autocontrast': lambda image, _: photometric.autocontrast(image),
    'equalize': lambda image, _: photometric.equalize(image), 'invert': lambda image, _: photometric.invert(image),
    'posterize': lambda image, bits: photometric.posterize(image, int(bits)), 'solarize': photometric.solarize,
    'solarize_add': lambda image, addition: photometric.solarize_add(image, int(addition))}
_TENSORFLOW = _PILLOW | {
    'color': tensorflow_ops.saturation, 'contrast': tensorflow_ops.contrast,
    'sharpness': tensorflow_ops.sharpness, 'autocontrast': lambda image, _: tensorflow_ops.autocontrast(image),
    'posterize': lambda image, bits: tensorflow_ops.posterize(image, int(bits)),
    'solarize': lambda image, threshold: tensorflow_ops.solarize(image, int(threshold))}
COLORS = {OpTable.AUGREG: _TENSORFLOW, OpTable.TIMM: _PILLOW}
"""Operations on colours with their strength, by table and name."""
_HOW = {Interpolation.BILINEAR: cv2.INTER_LINEAR, Interpolation.AREA: cv2.INTER_LINEAR,
        Interpolation.BICUBIC: cv2.INTER_CUBIC}


class Style(NamedTuple):
  """How geometric operations sample, and what they fill with."""
  how: int
  fill: tuple[int, ...]


def style(settings: RandAugment, *, interpolation: Interpolation, mean: Sequence[float]) -> Style:
  """That of a table; `mean` of RGB in [0, 1]."""
  if settings.table is OpTable.AUGREG:
    return Style(cv2.INTER_NEAREST, tensorflow_ops.FILL)
  return Style(_HOW[interpolation], tuple(min(255, round(255 * m)) for m in mean))


def randaugment(image: HostArray, settings: RandAugment, rng: np.random.Generator, *, style: Style) -> HostArray:
  """`settings.layers` random operations on `image [H, W, 3] u8`."""
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
    sign = 1. if rng.random() < .5 else -1.
    value = strength(name, level, sign, table=settings.table, size=(image.shape[0], image.shape[1]))
    image = apply(image, name, value, table=settings.table, style=style, rng=rng)
  return image


def strength(name: str, level: float, sign: float, *, table: OpTable, size: tuple[int, int]) -> float:
  """What `level` means for an operation on a picture of `size`: degrees, bits, a factor or px; `sign` 1 or -1."""
  part = level / MAX_LEVEL
  grows = table is OpTable.TIMM
  match name:
    case 'rotate':
      return sign * 30. * part
    case 'shear_x' | 'shear_y':
      return sign * .3 * part
    case 'translate_x' | 'translate_y':
      side_px = size[name == 'translate_x']
      return sign * (.45 * side_px if grows else 100.) * part
    case 'posterize':
      return 4 - int(4 * part) if grows else int(4 * part)
    case 'solarize':
      return 256 - int(256 * part) if grows else int(256 * part)
    case 'solarize_add':
      return int(110 * part)
    case 'color' | 'contrast' | 'brightness' | 'sharpness':
      return max(.1, 1. + sign * .9 * part) if grows else 1.8 * part + .1
    case 'cutout':
      return int(40 * part)
    case _:
      return 0.


def apply(image: HostArray, name: str, value: float, *, table: OpTable, style: Style,
          rng: np.random.Generator) -> HostArray:
  """An operation of a table with its strength; `rng` chooses the place of a cutout."""
  height, width = image.shape[:2]
  if name in COLORS[table]:
    return COLORS[table][name](image, value)
  if name == 'cutout':
    place = (int(rng.integers(height)), int(rng.integers(width)))
    return photometric.cutout(image, place, int(value), fill=style.fill)
  if table is OpTable.TIMM:
    return photometric.warp(image, matrix(name, value, size=(height, width)), how=style.how, fill=style.fill)
  turned = tensorflow_ops.rotation(value, size=(height, width)) if name == 'rotate' else None
  return tensorflow_ops.warp(image, turned or matrix(name, value, size=(height, width)), fill=style.fill)


def matrix(name: str, value: float, *, size: tuple[int, int]) -> list[list[float]]:
  """Rows of the matrix from output to input pixels."""
  match name:
    case 'rotate':
      angle = math.radians(value)
      return augment.inverse_affine(math.cos(angle), math.sin(angle), 1., 0., size=size)
    case 'shear_x':
      return [[1., value, 0.], [0., 1., 0.]]
    case 'shear_y':
      return [[1., 0., 0.], [value, 1., 0.]]
    case 'translate_x':
      return [[1., 0., value], [0., 1., 0.]]
    case 'translate_y':
      return [[1., 0., 0.], [0., 1., value]]
  raise AssertionError(name)
