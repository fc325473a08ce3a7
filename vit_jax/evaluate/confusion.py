"""The confusion matrix of semantic segmentation, and what is computed from it.

With n_ij the number of pixels of class i that are predicted as j, the intersection over union (IoU) of class c is
n_cc / (sum_j n_cj + sum_i n_ic - n_cc) (Everingham et al. 2010, section 4.3). A class that is neither in the masks nor
predicted has no IoU, and mIoU is the mean over the others.
"""
from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from vit_jax.core.types import HostArray


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
  if jax.process_count() == 1:
    return matrix
  as_bytes = np.ascontiguousarray(matrix, np.int64).view(np.uint8)  # jax has no 64-bit integers by default
  return np.asarray(multihost_utils.process_allgather(as_bytes)).view(np.int64).sum(0)
