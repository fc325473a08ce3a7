"""The confusion matrix and its scores against plain loops."""
from __future__ import annotations

import numpy as np
import pytest

from vit_jax.evaluate import confusion

RNG = np.random.default_rng(0)


def test_every_counted_pixel_is_in_one_cell() -> None:
  true, predicted = RNG.integers(-1, 5, (13, 17)), RNG.integers(0, 5, (13, 17))
  want = np.zeros((5, 5), int)
  for t, p in zip(true.ravel(), predicted.ravel(), strict=True):
    if t >= 0:
      want[t, p] += 1
  np.testing.assert_array_equal(confusion.count(true, predicted, 5), want)
  assert want.sum() == (true >= 0).sum()


def test_scores_are_those_of_sets_of_pixels() -> None:
  true, predicted = RNG.integers(0, 4, 500), RNG.integers(0, 4, 500)
  found = confusion.scores(confusion.count(true, predicted, 6))  # two classes have no pixels
  want = [((true == c) & (predicted == c)).sum() / ((true == c) | (predicted == c)).sum() for c in range(4)]
  np.testing.assert_allclose(found.iou[:4], want, rtol=1e-12)
  assert np.isnan(found.iou[4:]).all()
  assert found.miou == pytest.approx(np.mean(want)) and found.accuracy == pytest.approx((true == predicted).mean())


def test_a_class_that_is_only_predicted_counts_with_zero() -> None:
  assert confusion.scores(np.array([[3, 1], [0, 0]])).miou == pytest.approx(3 / 8)
  np.testing.assert_array_equal(confusion.total(np.eye(2, dtype=np.int64)), np.eye(2))
