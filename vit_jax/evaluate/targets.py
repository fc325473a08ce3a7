"""Targets of images that have several: classes of a network in place of those of a source, and metrics by class.

An image of which any of several targets is correct counts as correct (`Retargeted`). Of images that have several labels
`measure` returns mean average precision, AUROC and F1, each a mean over classes (macro).

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

from collections.abc import Iterator, Sequence

import numpy as np

from vit_jax.core.contracts import EvalLoader
from vit_jax.core.types import Batch, HostArray

Lists = Sequence[Sequence[int]]
"""A list of correct classes for each class or example; an example without a correct class does not count."""
MOST_BYTES = 2**31
"""The most memory on a host for the scores of a split; they are needed all at once, to be sorted."""


class Retargeted:
  """An `EvalLoader` whose batches have `labels [B, C]`, 1 for each correct class, instead of the source's targets.

  Args:
    inner: the loader.
    by_class: classes of the network for each class of the source.
    by_example: classes of the network for each example, instead of `by_class`; None = use `by_class`.
    num_classes: C.
  """

  def __init__(self, inner: EvalLoader, *, by_class: Lists, num_classes: int, by_example: Lists | None = None) -> None:
    assert by_example is None or len(by_example) == inner.num_examples
    self.num_examples = inner.num_examples
    self._inner, self._by_example, self._num_classes = inner, by_example, num_classes
    self._by_class = by_class
    self._first = np.array([meant[0] if meant else 0 for meant in by_class], np.int32)

  @property
  def num_bad(self) -> int:
    """Number of images that could not be decoded so far."""
    return self._inner.num_bad

  def batches(self) -> Iterator[Batch]:
    """Yields the batches of the inner loader; `label` is the (first) class of the network for the example."""
    for batch in self._inner.batches():
      lists, rows = (self._by_class, batch['label']) if self._by_example is None else (self._by_example, batch['index'])
      labels = np.zeros((len(rows), self._num_classes), np.float32)
      several = 'label_list' in batch and self._by_example is None
      for row, which in enumerate((batch['label_list'] if several else rows[:, None]).tolist()):
        labels[row, [label for listed in which if listed >= 0 for label in lists[listed]]] = 1.
      kept = {name: x for name, x in batch.items() if name != 'label_list'}
      yield {**kept, 'label': self._first[batch['label']], 'labels': labels}

  def describe(self, index: int) -> str:
    """Returns a name by which a user can find the example."""
    return self._inner.describe(index)

  def close(self) -> None:
    """Stops workers and frees their resources."""
    self._inner.close()


def present(by_class: Lists, label: np.ndarray, num_classes: int) -> np.ndarray:
  """Returns which classes of the network occur for the examples with these labels, `[C]` bool."""
  return np.isin(np.arange(num_classes), [c for source in np.unique(label).tolist() for c in by_class[source]])


def num_bytes(num_examples: int, num_classes: int) -> int:
  """Returns the memory for scores and targets of so many examples."""
  return num_examples * num_classes * 5


def measure(score_SC: HostArray, target_SC: HostArray) -> dict[str, float]:
  """Returns `map`, `auroc` and `f1` of logits `[S, C]` f32 and targets `[S, C]` bool, those that a class has."""
  by_metric = np.array([_of_class(*columns) for columns in zip(score_SC.T, target_SC.T, strict=True)]).T
  return {name: float(np.nanmean(values)) for name, values in zip(('map', 'auroc', 'f1'), by_metric, strict=True)
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
