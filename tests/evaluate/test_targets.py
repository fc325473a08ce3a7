"""Targets of a network's classes in place of the source's own."""
from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import programs
import pytest

from tests.evaluate import rows
from vit_jax.core.types import Batch
from vit_jax.evaluate import classify

CLASSES = 5
LOGITS, LABEL = rows.clusters(23, classes=3, width=CLASSES, seed=0)
BY_CLASS = ((4,), (0, 2), ())  # the last class of the source is none of the network


def measure(loader: classify.Retargeted) -> classify.Result:
  return classify.TopK(rows.predict, rows.prepare, loader, mesh=programs.mesh(programs.MESHES['one']), metrics=(),
                       num_classes=CLASSES).measure(rows.weights())


@pytest.mark.parametrize('size', [6, 40])
def test_any_class_that_a_source_class_is_counts_as_right(size: int) -> None:
  loader = classify.Retargeted(rows.Loader(LOGITS, LABEL, size), by_class=BY_CLASS, num_classes=CLASSES)
  result = measure(loader)
  hits = [LOGITS[i].argmax() in BY_CLASS[LABEL[i]] for i in range(23) if BY_CLASS[LABEL[i]]]
  assert result.metrics['top1'] == pytest.approx(np.mean(hits)) and result.num_examples == len(hits) < 23
  label = dict(zip(result.guesses.index.tolist(), result.guesses.label.tolist(), strict=True))
  guess = LOGITS.argmax(-1).tolist()  # it is the label if it is right, so that the row counts as correct
  assert label == {i: guess[i] if guess[i] in BY_CLASS[LABEL[i]] else BY_CLASS[LABEL[i]][0]
                   for i in range(23) if BY_CLASS[LABEL[i]]}
  assert not result.guesses.is_single


def test_examples_can_have_classes_of_their_own() -> None:
  rng = np.random.default_rng(1)
  lists = [tuple(rng.permutation(CLASSES)[:rng.integers(0, 4)].tolist()) for _ in range(23)]
  loader = classify.Retargeted(rows.Loader(LOGITS, LABEL, 6, bad=(3,)), by_class=((0,), (1,), (2,)),
                               num_classes=CLASSES,
                               by_example=lists)
  hits = [LOGITS[i].argmax() in lists[i] for i in range(23) if lists[i] and i != 3]
  result = measure(loader)
  assert result.metrics['top1'] == pytest.approx(np.mean(hits)) and result.num_examples == len(hits)
  assert loader.num_examples == 23 and loader.describe(4) == 'row 4' and loader.num_bad == 0


def test_several_labels_become_the_classes_of_each() -> None:
  class Several(rows.Loader):
    def batches(self) -> Iterator[Batch]:
      for batch in super().batches():
        second = np.where(batch['label'] == 2, 0, -1).astype(np.int32)
        yield {**batch, 'label_list': np.stack([batch['label'], second], -1)}

  batch = next(classify.Retargeted(Several(LOGITS, LABEL, 23), by_class=BY_CLASS, num_classes=CLASSES).batches())
  expected = [set(BY_CLASS[c]) | (set(BY_CLASS[0]) if c == 2 else set()) for c in LABEL.tolist()]
  assert [set(np.flatnonzero(row).tolist()) for row in batch['labels']] == expected and 'label_list' not in batch


def test_classes_that_occur_are_those_of_labels_that_occur() -> None:
  assert classify.present(BY_CLASS, np.array([1, 1, 2]), CLASSES).tolist() == [True, False, True, False, False]
