"""Metrics of images with several labels: mean average precision, AUROC and F1, each a mean over classes (macro).

Each class is a decision of its own, as in training with `objective.loss=sigmoid` or `bce`. With the logit z_c of an
image, in the order of decreasing z_c and with equal logits at once:

  map    the mean over classes of `sum_n (R_n - R_(n-1)) P_n`, precision P and recall R after the n-th logit
  auroc  the mean over classes of the share of pairs of an image with the class and one without, of which the first has
         the larger logit; a pair of equal logits counts half
  f1     the mean over classes of `2 TP / (2 TP + FP + FN)`, where a class is predicted if its probability
         `sigmoid(z_c)` is above 0.5, so if z_c is above 0

They are those of scikit-learn with `average='macro'`: `average_precision_score` and `roc_auc_score` of the classes that
have an image with and one without (auroc), and `f1_score(zero_division=nan)`. Without an image, a class has no average
precision and no AUROC, and no F1 either if it is not predicted: such classes are left out of the mean. All images that
can be decoded count, those without a label as well.
"""
from __future__ import annotations

import numpy as np

from vit_jax.core.types import HostArray

MOST_BYTES = 2**31
"""The most memory on a host for the scores of a split; they are needed all at once, to be sorted."""


def num_bytes(num_examples: int, num_classes: int) -> int:
  """Returns the memory for scores and targets of so many examples."""
  return num_examples * num_classes * 5


def measure(score_SC: HostArray, target_SC: HostArray) -> dict[str, float]:
  """Returns `map`, `auroc` and `f1` of logits `[S, C]` f32 and targets `[S, C]` bool, those that a class has."""
  found = np.array([_of_class(score_S, target_S) for score_S, target_S in zip(score_SC.T, target_SC.T, strict=True)])
  return {name: float(np.nanmean(values)) for name, values in zip(('map', 'auroc', 'f1'), found.T, strict=True)
          if not np.isnan(values).all()}


def _of_class(score_S: HostArray, target_S: HostArray) -> tuple[float, float, float]:
  """Returns average precision, area under the ROC curve and F1 of a class; nan where it has none."""
  order = np.argsort(-score_S, kind='stable')
  score_S, target_S = score_S[order], target_S[order]
  last = np.append(np.flatnonzero(np.diff(score_S)), len(score_S) - 1)  # of equal scores
  true = np.cumsum(target_S, dtype=np.float64)[last]
  false = last + 1 - true
  total, rest = true[-1], false[-1]
  precision = float((np.diff(true, prepend=0.) * true / (true + false)).sum() / total) if total else np.nan
  between = (true + np.append(0., true[:-1])) / 2  # equal scores count half
  area = float((np.diff(false, prepend=0.) * between).sum() / (total * rest)) if total and rest else np.nan
  predicted, hits = int((score_S > 0).sum()), int(target_S[score_S > 0].sum())
  return precision, area, 2 * hits / (predicted + total) if predicted + total else np.nan
