"""Logistic regression and the choice of settings on held-out examples: against scikit-learn, on any batch and mesh."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.evaluate import rows
from vit_jax.core.errors import UserError
from vit_jax.evaluate import linear, logistic

CLASSES, WIDTH = 5, 6
TRAIN = rows.clusters(101, classes=CLASSES, width=WIDTH, seed=1)
TEST = rows.clusters(37, classes=CLASSES, width=WIDTH, seed=2)
PENALTIES = (1e-4, 1e-3, 1e-2, 1.)


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
  """In all tests, so that they share the programs of two solvers, for one penalty and for four."""
  monkeypatch.setattr(linear, 'LOGITS_A_BLOCK', 300)


def standard(x: np.ndarray) -> np.ndarray:
  mean, std = TRAIN[0].astype(np.float64).mean(0), TRAIN[0].astype(np.float64).std(0) + 1e-5
  return (x - mean) / std


def sklearn_fit(penalty: float, keep: np.ndarray) -> Any:
  from sklearn.linear_model import LogisticRegression  # a second, which every worker would wait

  return LogisticRegression(C=1 / (penalty * keep.sum()), tol=1e-9, max_iter=10_000).fit(
      standard(TRAIN[0])[keep], TRAIN[1][keep])


def splits(size: int, mesh: str, bad: tuple[int, ...] = ()) -> dict[str, object]:
  return {'train': rows.split(rows.Loader(*TRAIN, size, bad=bad), mesh, name='train'),
          'test': rows.split(rows.Loader(*TEST, size), mesh, name='test'), 'num_classes': CLASSES}


def logistic_probe(size: int, mesh: str, penalties: tuple[float, ...] = PENALTIES) -> linear.Evaluator:
  return logistic.evaluator(**splits(size, mesh), penalties=penalties, holdout=.2, max_steps=200)


def test_the_optimum_is_that_of_scikit_learn() -> None:
  keep = np.ones(101, bool)
  data, _ = linear.place(*(splits(16, 'data=2')[name] for name in ('train', 'test')), rows.weights())
  found = logistic.fit(data.features, data.label, data.weight, np.array(PENALTIES, np.float32), num_classes=CLASSES,
                       max_steps=200)
  for i, penalty in enumerate(PENALTIES):
    want = sklearn_fit(penalty, keep)
    np.testing.assert_allclose(found.linear.kernel[i], want.coef_.T, atol=2e-3 * np.abs(want.coef_).max())
    bias = np.asarray(found.linear.bias[i])
    np.testing.assert_allclose(bias - bias.mean(), want.intercept_ - want.intercept_.mean(), atol=5e-3)
  assert (found.steps > 3).all() and (found.gradient < 1e-3).all()


def held_out_nll(penalty: float, held: np.ndarray) -> float:
  log_p = sklearn_fit(penalty, ~held).predict_log_proba(standard(TRAIN[0])[held])
  return -log_p[np.arange(held.sum()), TRAIN[1][held]].mean()


@pytest.mark.slow(reason='4 s: solves for each penalty')
def test_the_penalty_with_the_smallest_held_out_nll_is_chosen() -> None:
  """Beyond the grid too, since its largest wins at first."""
  grid = (1e-6, 1e-5, 1e-4, 1e-3)  # as many as are added at a time, which compiles one program for both
  result = logistic_probe(16, 'data=2', grid).measure(rows.weights())
  held = linear.hold_out(TRAIN[1], np.ones(101, bool), part=.2)
  nll = {p: held_out_nll(p, held) for p in (*grid, 1e-2, 1e-1, 1., 10.)}
  best = min(nll, key=lambda p: nll[p])
  assert 1e-3 < best < 10.  # beyond the grid, and not at the edge of the extended one
  right = (sklearn_fit(best, ~held).predict(standard(TRAIN[0])[held]) == TRAIN[1][held]).mean()
  final = sklearn_fit(best, np.ones(101, bool))
  scores = np.argsort(-final.decision_function(standard(TEST[0])), axis=1)
  assert result.metrics == pytest.approx({
      'l2': best, 'held_out': right, 'held_out_nll': nll[best], 'top1': (scores[:, 0] == TEST[1]).mean(), 'top5': 1.},
      rel=1e-3)  # of NLL: what an L-BFGS gradient of at most 1e-6 leaves; the others are exact
  assert result.num_examples == 37 and held.sum() == 20


def test_a_grid_is_extended_on_the_side_that_wins_and_not_for_ever() -> None:
  def score(some: Sequence[float]) -> linear.Scores:
    return linear.Scores(np.zeros(len(some)), np.array(some))  # the smaller, the better

  grid, scores = linear._search(score, (1., .1), rank=linear.by_nll, extend=True, name='train')
  assert len(grid) == 2 + linear.EXTENSION * linear.MOST_EXTENSIONS and grid == sorted(grid)
  assert grid[0] == pytest.approx(10.**-17) and scores.nll.tolist() == grid
  assert linear._search(score, (1., .1), rank=linear.by_nll, extend=False, name='train')[0] == [.1, 1.]


def test_tied_settings() -> None:
  """Accuracies tie: their smallest setting wins. Likelihoods decide between penalties, and nan never wins."""
  scores = linear.Scores(np.array([5, 7, 7, 7]), np.array([.2, .4, .3, np.nan]))
  assert linear.by_accuracy([1., 2., 3., 4.], scores) == 1
  assert linear.by_nll([1., 2., 3., 4.], scores) == 0
  assert linear.by_nll([2., 3., 4.], linear.Scores(scores.right[1:], scores.nll[1:])) == 1


@pytest.mark.parametrize('part', [.1, .2, .5])
def test_the_same_part_of_every_class_is_held_out(part: float) -> None:
  label = np.repeat(np.arange(4), (40, 40, 21, 1)).astype(np.int32)
  counts = np.ones(102, bool)
  counts[[0, 50]] = False
  held = linear.hold_out(label, counts, part=part)
  assert not held[[0, 50]].any() and held.sum() == round(part * 100)
  for c, number in enumerate((39, 39, 21, 1)):
    # One example of each class stays, so that the others are held out a little more often.
    assert abs(held[label == c].sum() - part * 100 / 96 * (number - 1)) < 1, c
  assert not (held & linear.hold_out(label[::-1], counts, part=part)[::-1]).all()


def test_classes_of_one_example_cannot_be_held_out() -> None:
  with pytest.raises(UserError, match='expected a class with at least two examples'):
    linear.hold_out(np.arange(5), np.ones(5, bool), part=.1)


@pytest.mark.slow(reason='5 s: solves in two ways')
def test_penalties_that_do_not_fit_at_once_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(logistic, 'SOLVER_BYTES', 1)
  probe = logistic_probe(16, 'data=2')
  data, _ = linear.place(probe.train, probe.test, rows.weights())
  found = probe.fit(data, PENALTIES)
  assert found.kernel.shape == (4, WIDTH, CLASSES)
  for i, penalty in enumerate(PENALTIES):
    want = sklearn_fit(penalty, np.ones(101, bool))
    np.testing.assert_allclose(found.kernel[i], want.coef_.T, atol=2e-3 * np.abs(want.coef_).max())


@pytest.mark.slow(reason='3 s: solves again')
def test_one_penalty_holds_nothing_out() -> None:
  result = logistic_probe(16, 'data=2', (1e-2,)).measure(rows.weights())
  assert set(result.metrics) == {'top1', 'top5', 'l2'}
  want = (sklearn_fit(1e-2, np.ones(101, bool)).predict(standard(TEST[0])) == TEST[1]).mean()
  assert result.metrics['top1'] == pytest.approx(want)
