"""Ridge regression to targets of -1 and 1, solved in closed form with one eigendecomposition for all penalties.

With standardized features and a constant as rows of X [N, D + 1] and targets Y [N, C],

  W(l) = argmin |X W - Y|^2 + l |W|^2 = (X^T X + l)^-1 X^T Y = X^T (X X^T + l)^-1 Y,

the first form for N >= D + 1, the second otherwise. As in big_vision's few-shot evaluator, the weights of the constant,
100, are penalized too. Computed in float64 on the host.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.core.types import HostArray

BIAS = 100.           # the constant feature (big_vision, fewshot_lsr)
STD_FLOOR = 1e-5      # added to the deviation (big_vision, fewshot_lsr)


class Fit(NamedTuple):
  """Linear classifiers of one set of shots, one for each penalty.

  mean, std: `[D]`, for standardizing features.
  weights: `[l, D + 1, C]`; the last row is multiplied by the constant.
  left_out: `[l]`, leave-one-out accuracy on the shots.
  """
  mean: HostArray
  std: HostArray
  weights: HostArray
  left_out: HostArray


def fit(features: HostArray, label: HostArray, *, num_classes: int, penalties: Sequence[float]) -> Fit:
  """Fits classifiers for all penalties.

  Leave-one-out predictions need no other fits: with h the diagonal of the hat matrix X (X^T X + l)^-1 X^T, the
  prediction for example i is y_i - (y_i - f_i) / (1 - h_i). Mean and deviation are those of all shots.

  Args:
    features: `[N, D]`.
    label: `[N]`.
    num_classes: C.
    penalties: l, each positive.
  """
  features = np.asarray(features, np.float64)
  mean, std = features.mean(0), features.std(0) + STD_FLOOR
  x = extend((features - mean) / std)
  y = np.where(np.arange(num_classes) == np.asarray(label)[:, None], 1., -1.)
  strengths = np.asarray(penalties, np.float64)
  weights, hat = _primal(x, y, strengths) if x.shape[0] >= x.shape[1] else _dual(x, y, strengths)
  left_out = [_left_out(x @ w, y, h) for w, h in zip(weights, hat, strict=True)]
  return Fit(mean, std, weights, np.array(left_out))


def extend(standardized: HostArray) -> HostArray:
  """Appends the constant to features, `[N, D + 1]`."""
  return np.concatenate([standardized, np.full((len(standardized), 1), BIAS)], 1)


def _primal(x: HostArray, y: HostArray, strengths: HostArray) -> tuple[HostArray, HostArray]:
  """Returns weights `[l, D, C]` and diagonals of the hat matrices `[l, N]`, from X^T X = V S V^T."""
  values, vectors = np.linalg.eigh(x.T @ x)
  values = np.maximum(values, 0.)
  rotated, targets = x @ vectors, vectors.T @ (x.T @ y)
  inverse = 1. / (values + strengths[:, None])
  return np.stack([vectors @ (i[:, None] * targets) for i in inverse]), inverse @ (rotated**2).T


def _dual(x: HostArray, y: HostArray, strengths: HostArray) -> tuple[HostArray, HostArray]:
  """Returns the same as `_primal`, from X X^T = U S U^T."""
  values, vectors = np.linalg.eigh(x @ x.T)
  values = np.maximum(values, 0.)
  back, targets = x.T @ vectors, vectors.T @ y
  inverse = 1. / (values + strengths[:, None])
  return np.stack([back @ (i[:, None] * targets) for i in inverse]), (values * inverse) @ (vectors**2).T


def _left_out(predicted: HostArray, y: HostArray, hat: HostArray) -> float:
  left = y - (y - predicted) / np.maximum(1. - hat, 1e-12)[:, None]
  return float((left.argmax(1) == y.argmax(1)).mean())
