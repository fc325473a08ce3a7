"""Linear probes: the optimum against scikit-learn, SGD and LARS against NumPy, over any batch size and mesh."""
from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np
import programs
import pytest
from sklearn.linear_model import LogisticRegression

from tests.evaluate import rows
from vit_jax.core.errors import UserError
from vit_jax.evaluate import linear, logistic, stochastic

CLASSES, WIDTH = 5, 6
TRAIN = rows.clusters(101, classes=CLASSES, width=WIDTH, seed=1)
TEST = rows.clusters(37, classes=CLASSES, width=WIDTH, seed=2)
PENALTIES = (1e-4, 1e-2, 1.)


def standard(x: np.ndarray) -> np.ndarray:
  mean, std = TRAIN[0].astype(np.float64).mean(0), TRAIN[0].astype(np.float64).std(0) + 1e-5
  return (x - mean) / std


def sklearn_fit(penalty: float, keep: np.ndarray) -> LogisticRegression:
  return LogisticRegression(C=1 / (penalty * keep.sum()), tol=1e-9, max_iter=10_000).fit(
      standard(TRAIN[0])[keep], TRAIN[1][keep])


def splits(size: int, mesh: str, bad: tuple[int, ...] = ()) -> dict[str, object]:
  return {'train': rows.split(rows.Loader(*TRAIN, size, bad=bad), mesh, name='train'),
          'test': rows.split(rows.Loader(*TEST, size), mesh, name='test'), 'num_classes': CLASSES}


def logistic_probe(size: int, mesh: str, penalties: tuple[float, ...] = PENALTIES) -> linear.Logistic:
  return linear.Logistic(**splits(size, mesh), penalties=penalties, holdout=.2, max_steps=200, tolerance=1e-6)


def test_the_optimum_is_that_of_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(logistic, 'LOGITS_A_BLOCK', 300)  # several blocks
  keep = np.ones(101, bool)
  found = logistic.fit(standard(TRAIN[0]).astype(np.float32)[None], TRAIN[1][None], np.ones((1, 101), np.float32),
                       np.array(PENALTIES, np.float32), num_classes=CLASSES, max_steps=200, tolerance=1e-6)
  for i, penalty in enumerate(PENALTIES):
    want = sklearn_fit(penalty, keep)
    np.testing.assert_allclose(found.linear.kernel[i], want.coef_.T, atol=2e-3 * np.abs(want.coef_).max())
    bias = np.asarray(found.linear.bias[i])
    np.testing.assert_allclose(bias - bias.mean(), want.intercept_ - want.intercept_.mean(), atol=5e-3)
  assert (found.steps > 3).all() and (found.gradient < 1e-3).all()


def held_out_nll(penalty: float, held: np.ndarray) -> float:
  log_p = sklearn_fit(penalty, ~held).predict_log_proba(standard(TRAIN[0])[held])
  return -log_p[np.arange(held.sum()), TRAIN[1][held]].mean()


def test_the_penalty_with_the_smallest_held_out_nll_is_chosen() -> None:
  """Beyond the grid too, since its largest wins at first."""
  grid = (1e-5, 1e-4, 1e-3)
  result = logistic_probe(16, 'data=2,tensor=4', grid).measure(rows.weights())
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

  grid, scores = linear._search(score, (1., .1), rank=linear._by_nll, extend=True, name='train')
  assert len(grid) == 2 + linear.EXTENSION * linear.MOST_EXTENSIONS and grid == sorted(grid)
  assert grid[0] == pytest.approx(10.**-17) and scores.nll.tolist() == grid
  assert linear._search(score, (1., .1), rank=linear._by_nll, extend=False, name='train')[0] == [.1, 1.]


def test_tied_settings() -> None:
  """Accuracies tie: their smallest setting wins. Likelihoods decide between penalties, and nan never wins."""
  scores = linear.Scores(np.array([5, 7, 7, 7]), np.array([.2, .4, .3, np.nan]))
  assert linear._by_accuracy([1., 2., 3., 4.], scores) == 1
  assert linear._by_nll([1., 2., 3., 4.], scores) == 0
  assert linear._by_nll([2., 3., 4.], linear.Scores(scores.right[1:], scores.nll[1:])) == 1


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


def test_penalties_that_do_not_fit_at_once_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(linear, 'SOLVER_BYTES', 1)
  probe = logistic_probe(40, 'one')
  data, _ = linear._place(probe._train, probe._test, rows.weights())
  found = probe._fit(data, PENALTIES)
  assert found.kernel.shape == (3, WIDTH, CLASSES)
  for i, penalty in enumerate(PENALTIES):
    want = sklearn_fit(penalty, np.ones(101, bool))
    np.testing.assert_allclose(found.kernel[i], want.coef_.T, atol=2e-3 * np.abs(want.coef_).max())


def test_one_penalty_holds_nothing_out() -> None:
  result = logistic_probe(40, 'one', (1e-2,)).measure(rows.weights())
  assert set(result.metrics) == {'top1', 'top5', 'l2'}
  want = (sklearn_fit(1e-2, np.ones(101, bool)).predict(standard(TEST[0])) == TEST[1]).mean()
  assert result.metrics['top1'] == pytest.approx(want)


def by_hand(recipe: stochastic.Recipe, rate: float, keep: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Kernel and bias after the same training in float64, from the same start."""
  x, y = TRAIN[0].astype(np.float64), TRAIN[1]
  kernel = .01 * np.asarray(jax.random.normal(jax.random.key(0), (WIDTH, CLASSES)), np.float64)
  bias, velocity, step = np.zeros(CLASSES), [np.zeros((WIDTH, CLASSES)), np.zeros(CLASSES)], 0
  mean, variance = np.zeros(WIDTH), np.ones(WIDTH)
  places = np.flatnonzero(keep)
  size = min(recipe.batch_size, len(places))
  total = recipe.epochs * (len(places) // size)
  warmup = recipe.warmup_epochs * total // recipe.epochs
  for epoch in range(recipe.epochs):
    order = np.random.Generator(np.random.Philox(key=epoch)).permutation(places)
    for at in range(0, len(places) // size * size, size):
      batch, true = x[order[at:at + size]], y[order[at:at + size]]
      if recipe.normalize:
        mean, variance = .9 * mean + .1 * batch.mean(0), .9 * variance + .1 * batch.var(0, ddof=1)
        batch = (batch - batch.mean(0)) / np.sqrt(batch.var(0) + 1e-6)
      logits = batch @ kernel + bias
      p = np.exp(logits - logits.max(1, keepdims=True))
      error = (p / p.sum(1, keepdims=True) - np.eye(CLASSES)[true]) / size
      grads = [batch.T @ error, error.sum(0)]
      if recipe.trust_coefficient:
        grads[0] *= recipe.trust * np.linalg.norm(kernel) / np.linalg.norm(grads[0])
      velocity = [recipe.momentum * v + g for v, g in zip(velocity, grads, strict=True)]
      now = (step + 1) / (warmup + 1) if step < warmup else (
          (1 + math.cos(math.pi * (step - warmup) / (total - warmup))) / 2)
      kernel, bias = kernel - rate * now * velocity[0], bias - rate * now * velocity[1]
      step += 1
  if recipe.normalize:
    kernel = kernel / np.sqrt(variance + 1e-6)[:, None]
    bias = bias - mean @ kernel
  return kernel, bias


DINO = stochastic.Recipe(epochs=3, batch_size=16, momentum=.9, warmup_epochs=0, trust_coefficient=0., normalize=False)
MAE = stochastic.Recipe(epochs=4, batch_size=20, momentum=.9, warmup_epochs=1, trust_coefficient=.001, normalize=True)


@pytest.mark.parametrize(('recipe', 'rates', 'size', 'mesh'), [
    (DINO, (.01, .1), 6, 'one'), (DINO, (.01, .1), 16, 'data=2,tensor=4'), (MAE, (1., 4.), 8, 'data=8')])
def test_training_is_that_of_numpy(recipe: stochastic.Recipe, rates: tuple[float, ...], size: int, mesh: str) -> None:
  bad = (3, 60)
  keep = np.ones(101, bool)
  keep[list(bad)] = False
  split = splits(size, mesh, bad)['train']
  placed = split.place(split.table(rows.weights()))
  steps: list[int] = []
  found = stochastic.train(placed['features'], placed['label'], placed['mask'], placed['example'],
                           np.array(rates, np.float32), recipe, num_classes=CLASSES,
                           mesh=programs.mesh(programs.MESHES[mesh]), on_step=steps.append)
  for i, rate in enumerate(rates):
    kernel, bias = by_hand(recipe, rate, keep)
    np.testing.assert_allclose(found.kernel[i], kernel, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(found.bias[i], bias, rtol=1e-3, atol=1e-4)
  assert steps[-1] == recipe.num_steps(keep.sum()) and len(steps) == recipe.epochs


def test_a_probe_chooses_its_rate_and_learns() -> None:
  probe = linear.Probe(**splits(16, 'one'), recipe=DINO, rates=(1e-6, .1), holdout=.2)
  result = probe.measure(rows.weights())
  assert result.metrics['lr'] == .1 and result.metrics['top1'] > .35 and result.metrics['held_out'] > .35
