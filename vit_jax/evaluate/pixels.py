"""Masks of classes that are predicted for an image: scores at its pixels, the confusion with true masks, a picture.

`spans` and `upsample` interpolate the scores of windows over an image bilinearly at the pixels of a mask. A mask of
height H_m belongs to an image that was resized to height H; windows of height P begin at rows t. The center of mask row
i is y = (i + 1/2) H / H_m there, and inside the window if t <= y < t + P. Its scores are interpolated between the
centers of the tokens, (j + 1/2) P / h, and are constant beyond the first and the last one: the convention of half-pixel
centers (`align_corners=False`). Where windows overlap, their scores are added: the class is that of their mean.

`count` and `scores` compare masks. With n_ij the number of pixels of class i that are predicted as j, the intersection
over union (IoU) of class c is n_cc / (sum_j n_cj + sum_i n_ic - n_cc) (Everingham et al. 2010, section 4.3). A class
that is neither in the masks nor predicted has no IoU, and mIoU is the mean over the others.

`draw` shows an image beside its masks.
"""
from __future__ import annotations

import colorsys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jax.experimental import multihost_utils
from PIL import Image, ImageDraw

from vit_jax.core.types import HostArray
from vit_jax.data.image.masks import starts

OPACITY = .6
MIN_PX = 160  # of the short side; smaller images are enlarged
_LINE_PX, _MARGIN_PX = 16, 4
_TURN = .618033988749895  # of the hue between two classes, the golden ratio, so that few are alike
_BLOCK_ELEMENTS = 2**24  # scores that are interpolated at a time
_RESOLUTION = 2**16      # of scores, steps of 1


class Span(NamedTuple):
  """The rows `start` to `stop` of a mask inside a window, and their weights of the token rows, `[stop - start, h]`."""
  start: int
  stop: int
  weights: HostArray


def spans(mask_size: int, size: int, window: int, stride: int, num_tokens: int) -> list[Span]:
  """Returns the interpolation along one axis, for each window.

  Args:
    mask_size: of the mask, px.
    size: of the resized image, px.
    window: of a window, px.
    stride: between windows, px.
    num_tokens: of a window.
  """
  center = (np.arange(mask_size) + .5) * size / mask_size
  windows = []
  for first in starts(size, window, stride):
    inside = np.flatnonzero((center >= first) & (center < first + window))
    position = np.clip((center[inside] - first) * num_tokens / window - .5, 0, num_tokens - 1)
    low = np.minimum(position.astype(np.int64), max(num_tokens - 2, 0))
    weights = np.zeros((len(inside), num_tokens), np.float32)
    weights[np.arange(len(inside)), low] = 1 - (position - low)
    weights[np.arange(len(inside)), np.minimum(low + 1, num_tokens - 1)] += position - low
    begin = int(inside[0]) if len(inside) else 0
    windows.append(Span(begin, begin + len(inside), weights))
  return windows


def upsample(scores: HostArray, rows: list[Span], columns: list[Span], mask_size: tuple[int, int]) -> HostArray:
  """Returns the class with the highest score of each pixel of a mask, `[H, W]` i32.

  Scores are compared in steps of 2^-16, and the lowest class is chosen among equal ones: halfway between two tokens,
  the votes of few neighbors are often equal but for rounding, which depends on the devices.

  Args:
    scores: `[n, h, w, C]` f32 of the windows, row by row.
    rows, columns: interpolation along both axes.
    mask_size: height and width, px.
  """
  height, width = mask_size
  grid = scores.reshape(len(rows), len(columns), *scores.shape[1:])
  classes = np.empty((height, width), np.int32)
  step = max(1, _BLOCK_ELEMENTS // (width * scores.shape[-1]))
  for top in range(0, height, step):
    bottom = min(top + step, height)
    total = np.zeros((bottom - top, width, scores.shape[-1]), np.float32)
    for row, line in zip(rows, grid, strict=True):
      start, stop = max(row.start, top), min(row.stop, bottom)
      if start >= stop:
        continue
      weights = row.weights[start - row.start:stop - row.start]
      for column, window in zip(columns, line, strict=True):
        total[start - top:stop - top, column.start:column.stop] += column.weights @ np.tensordot(weights, window, 1)
    classes[top:bottom] = np.round(total * _RESOLUTION).argmax(-1)
  return classes


class Scores(NamedTuple):
  """Fractions: the mean IoU of classes, the accuracy over all pixels, and IoU by class `[C]`, nan without pixels."""
  miou: float
  accuracy: float
  iou: HostArray


def count(true: HostArray, predicted: HostArray, num_classes: int) -> HostArray:
  """Returns the number of pixels of each class by predicted class, `[C, C]` i64, without those of true class -1.

  Args:
    true: `[H, W]`, -1 to C - 1.
    predicted: `[H, W]`, 0 to C - 1.
    num_classes: C.
  """
  counts = true >= 0
  cells = true[counts].astype(np.int64) * num_classes + predicted[counts]
  return np.bincount(cells, minlength=num_classes**2).reshape(num_classes, num_classes)


def scores(matrix: HostArray) -> Scores:
  """Returns the scores of a confusion matrix `[C, C]`, true class before predicted class."""
  hit = np.diag(matrix).astype(np.float64)
  union = matrix.sum(0) + matrix.sum(1) - hit
  iou = np.divide(hit, union, out=np.full(len(hit), np.nan), where=union > 0)
  return Scores(float(np.nanmean(iou)), float(hit.sum() / matrix.sum()), iou)


def total(matrix: HostArray) -> HostArray:
  """Returns the sum of the matrices `[…]` i64 of all processes. Every process must call it."""
  as_bytes = np.ascontiguousarray(matrix, np.int64).view(np.uint8)  # jax has no 64-bit integers by default
  return np.asarray(multihost_utils.process_allgather(as_bytes)).view(np.int64).sum(0)


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
  for number, label in enumerate(legend):
    left, top = number % columns * 120, height + _LINE_PX + _MARGIN_PX + number // columns * _LINE_PX
    pen.rectangle((left, top + 2, left + 10, top + 12), fill=color(label))
    pen.text((left + 14, top + 1), class_names[label][:16], fill='black')
  return np.asarray(page)


def _covered(image: HostArray, mask: HostArray) -> HostArray:
  """Returns the image under the colors of a mask."""
  palette = np.array([color(number) for number in range(int(mask.max(initial=0)) + 1)], np.float64)
  painted = (1 - OPACITY) * image + OPACITY * palette[np.maximum(mask, 0)]
  return np.where((mask >= 0)[..., None], np.round(painted), image).astype(np.uint8)
