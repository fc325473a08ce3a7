"""Ridge regression in closed form against one linear system for each penalty."""
from __future__ import annotations

import numpy as np
import pytest

from vit_jax.evaluate import fewshot

PENALTIES = (.5, 64., 1024.)
RNG = np.random.default_rng(0)


def brute(features: np.ndarray, label: np.ndarray, penalty: float, *, classes: int) -> np.ndarray:
  """Weights `[D + 1, C]`, by the normal equations."""
  features = features.astype(np.float64)
  x = (features - features.mean(0)) / (features.std(0) + 1e-5)
  x = np.concatenate([x, np.full((len(x), 1), 100.)], 1)
  y = 2. * np.eye(classes)[label] - 1.
  return np.linalg.solve(x.T @ x + penalty * np.eye(x.shape[1]), x.T @ y)


@pytest.mark.parametrize(('num', 'width'), [(40, 7), (9, 30), (8, 7)], ids=['primal', 'dual', 'as many'])
def test_both_forms_solve_the_normal_equations(num: int, width: int) -> None:
  features, label = RNG.normal(size=(num, width)).astype(np.float32) * 3 + 5, RNG.integers(0, 4, num)
  found = fewshot.fit(features, label, num_classes=4, penalties=PENALTIES)
  for weights, penalty in zip(found.weights, PENALTIES, strict=True):
    np.testing.assert_allclose(weights, brute(features, label, penalty, classes=4), rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize(('num', 'width'), [(40, 7), (9, 30)], ids=['primal', 'dual'])
def test_leaving_one_out_is_fitting_without_it(num: int, width: int) -> None:
  features, label = RNG.normal(size=(num, width)), RNG.integers(0, 4, num)
  features += np.eye(4)[label] @ RNG.normal(size=(4, width))
  found = fewshot.fit(features, label, num_classes=4, penalties=PENALTIES)
  x = fewshot.extend((features - found.mean) / found.std)
  y = 2. * np.eye(4)[label] - 1.
  for part, penalty in zip(found.left_out, PENALTIES, strict=True):
    hits = []
    for i in range(num):
      rest = np.delete(np.arange(num), i)
      w = np.linalg.solve(x[rest].T @ x[rest] + penalty * np.eye(x.shape[1]), x[rest].T @ y[rest])
      hits.append((x[i] @ w).argmax() == label[i])
    assert part == pytest.approx(np.mean(hits))


def test_a_feature_that_is_the_same_everywhere_does_no_harm() -> None:
  features = np.concatenate([RNG.normal(size=(20, 3)), np.full((20, 1), 7.)], 1)
  assert np.isfinite(fewshot.fit(features, RNG.integers(0, 3, 20), num_classes=3, penalties=(1.,)).weights).all()
