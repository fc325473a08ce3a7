"""Windows over an image, and the bilinear interpolation of their scores at the pixels of a mask.

A mask of height H_m belongs to an image that was resized to height H; windows of height P begin at rows t. The center
of mask row i is y = (i + 1/2) H / H_m there, and inside the window if t <= y < t + P. Its scores are interpolated
between the centers of the tokens, (j + 1/2) P / h, and are constant beyond the first and the last one: the convention
of half-pixel centers (`align_corners=False`). Where windows overlap, their scores are added: the class is that of their
mean.
"""
from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vit_jax.core.types import HostArray
from vit_jax.data.image.masks import starts

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
  found = []
  for first in starts(size, window, stride):
    inside = np.flatnonzero((center >= first) & (center < first + window))
    place = np.clip((center[inside] - first) * num_tokens / window - .5, 0, num_tokens - 1)
    low = np.minimum(place.astype(np.int64), max(num_tokens - 2, 0))
    weights = np.zeros((len(inside), num_tokens), np.float32)
    weights[np.arange(len(inside)), low] = 1 - (place - low)
    weights[np.arange(len(inside)), np.minimum(low + 1, num_tokens - 1)] += place - low
    begin = int(inside[0]) if len(inside) else 0
    found.append(Span(begin, begin + len(inside), weights))
  return found


def predict(scores: HostArray, rows: list[Span], columns: list[Span], mask_size: tuple[int, int]) -> HostArray:
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
  found = np.empty((height, width), np.int32)
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
        place = slice(start - top, stop - top), slice(column.start, column.stop)
        total[place] += column.weights @ np.tensordot(weights, window, 1)
    found[top:bottom] = np.round(total * _RESOLUTION).argmax(-1)
  return found
