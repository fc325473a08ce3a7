"""Replaces the targets of batches with classes of a network; any of several targets can be correct."""
from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from vit_jax.core.contracts import EvalLoader
from vit_jax.core.types import Batch

Lists = Sequence[Sequence[int]]
"""A list of correct classes for each class or example; an example without a correct class does not count."""


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
    self._first = np.array([one[0] if one else 0 for one in by_class], np.int32)

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
        labels[row, [c for one in which if one >= 0 for c in lists[one]]] = 1.
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
  found = np.zeros(num_classes, bool)
  for one in np.unique(label).tolist():
    found[list(by_class[one])] = True
  return found
