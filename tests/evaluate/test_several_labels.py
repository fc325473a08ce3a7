"""Mean average precision, AUROC and F1 against pairs counted one by one, and against scikit-learn's numbers."""
from __future__ import annotations

import numpy as np
import pytest

from tests.evaluate import test_classify
from vit_jax.evaluate import classify

SIZE, CLASSES = test_classify.SIZE, test_classify.CLASSES
RNG = np.random.default_rng(3)
TARGET = RNG.random((SIZE, CLASSES)) < np.linspace(.1, .6, CLASSES)
TARGET[:, 4] = False  # a class without an image
TARGET[5] = False     # an image without a class
SCORE = np.round(test_classify.LOGITS * 2) / 2  # many are equal


def by_hand(score: np.ndarray, target: np.ndarray) -> dict[str, float]:
  precision, area, f1 = [], [], []
  for z, y in zip(score.T, target.T, strict=True):
    hits, predicted = (y & (z > 0)).sum(), (z > 0).sum()
    if predicted + y.sum():
      f1.append(2 * hits / (predicted + y.sum()))
    if y.any():
      precision.append(np.mean([y[z >= one].mean() for one in z[y]]))
      pairs = z[y][:, None] - z[~y][None]
      area.append(((pairs > 0) + (pairs == 0) / 2).mean())
  return {'map': np.mean(precision), 'auroc': np.mean(area), 'f1': np.mean(f1)}


def test_metrics_are_those_of_pairs_counted_one_by_one() -> None:
  assert classify.measure_classes(SCORE, TARGET) == pytest.approx(by_hand(SCORE, TARGET), rel=1e-12)


def test_metrics_are_those_of_scikit_learn() -> None:
  """Of version 1.9.1: of columns 0 to 3, 5 and 6, and for F1 of all with zero_division=nan."""
  assert classify.measure_classes(SCORE, TARGET) == pytest.approx(
      {'map': 0.31276878727772406, 'auroc': 0.4299130009893195, 'f1': 0.23751941429929505}, rel=1e-12)


def test_a_metric_that_no_class_has_is_left_out() -> None:
  assert classify.measure_classes(-np.ones((3, 2)), np.zeros((3, 2), bool)) == {}
  assert classify.measure_classes(np.ones((3, 1)), np.ones((3, 1), bool)) == {'map': 1., 'f1': 1.}


@pytest.mark.parametrize(('size', 'mesh'), [(6, 'one'), (16, 'data=8')])
def test_an_evaluation_has_them_for_any_batch_and_mesh(
    size: int, mesh: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
  monkeypatch.setattr(test_classify, 'LOGITS', SCORE)
  loader = test_classify.Loader(size, TARGET.astype(np.float32))
  found = test_classify.evaluator(loader, mesh, metrics=(), several=True).measure({})
  want = by_hand(SCORE, TARGET)
  assert {name: found.metrics[name] for name in want} == pytest.approx(want, rel=1e-12)
  assert found.num_examples == TARGET.any(1).sum() and set(found.metrics) == {'top1', 'top5', 'nll', *want}
  monkeypatch.setattr(classify, 'MAX_SCORE_BYTES', 100)
  found = test_classify.evaluator(loader, mesh, metrics=(), several=True, name='evals.test').measure({})
  assert set(found.metrics) == {'top1', 'top5', 'nll'}
  assert 'evals.test: map, auroc and f1 are left out: the scores of 37 images and 7 classes take' in caplog.text
