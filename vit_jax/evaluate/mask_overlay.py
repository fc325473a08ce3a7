"""An image beside its masks: colors by class over the image, and a line with the names of the classes."""
from __future__ import annotations

import colorsys
from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image, ImageDraw

from vit_jax.core.types import HostArray

OPACITY = .6
MIN_PX = 160  # of the short side; smaller images are enlarged
_LINE_PX, _MARGIN_PX = 16, 4
_TURN = .618033988749895  # of the hue between two classes, the golden ratio, so that few are alike


def color(number: int) -> tuple[int, int, int]:
  """Returns the color of a class, RGB."""
  red, green, blue = colorsys.hsv_to_rgb(number * _TURN % 1., .55 + .4 * (number % 2), 1. - .15 * (number % 3))
  return round(255 * red), round(255 * green), round(255 * blue)


def draw(image: HostArray, masks: Mapping[str, HostArray], class_names: Sequence[str], *,
         before: Mapping[str, HostArray] | None = None, after: Mapping[str, HostArray] | None = None) -> HostArray:
  """Returns the image and a copy under each mask in a row, with titles, and the classes that occur, u8.

  Args:
    image: `[H, W, 3]` u8.
    masks: `[H, W]` of classes by title; pixels of class -1 show the image.
    class_names: of all classes.
    before, after: other images of the same size by title, drawn before and after those with masks.
  """
  times = -(-MIN_PX // min(image.shape[:2]))
  height, width = (times * side for side in image.shape[:2])
  present = np.unique(np.concatenate([np.zeros(0, int), *(mask.ravel() for mask in masks.values())]))
  legend = [int(number) for number in present if number >= 0]
  panels = {'image': image, **(before or {}), **{title: _covered(image, mask) for title, mask in masks.items()},
            **(after or {})}
  total = (width + _MARGIN_PX) * len(panels) - _MARGIN_PX
  columns = max(1, total // 120)
  page = Image.new('RGB', (total, height + _LINE_PX * (1 + -(-len(legend) // columns)) + _MARGIN_PX), 'white')
  pen = ImageDraw.Draw(page)
  for number, (title, panel) in enumerate(panels.items()):
    left = number * (width + _MARGIN_PX)
    pen.text((left, 2), title, fill='black')
    page.paste(Image.fromarray(panel).resize((width, height), Image.Resampling.NEAREST), (left, _LINE_PX))
  for number, one in enumerate(legend):
    left, top = number % columns * 120, height + _LINE_PX + _MARGIN_PX + number // columns * _LINE_PX
    pen.rectangle((left, top + 2, left + 10, top + 12), fill=color(one))
    pen.text((left + 14, top + 1), class_names[one][:16], fill='black')
  return np.asarray(page)


def _covered(image: HostArray, mask: HostArray) -> HostArray:
  """Returns the image under the colors of a mask."""
  palette = np.array([color(number) for number in range(int(mask.max(initial=0)) + 1)], np.float64)
  painted = (1 - OPACITY) * image + OPACITY * palette[np.maximum(mask, 0)]
  return np.where((mask >= 0)[..., None], np.round(painted), image).astype(np.uint8)
