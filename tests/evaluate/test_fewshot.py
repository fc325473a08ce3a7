"""Few-shot accuracy against NumPy, over any batch size and mesh; shots that are drawn by seed alone."""
from __future__ import annotations

import numpy as np
import pytest

from tests.evaluate import rows
from tests.evaluate.test_ridge import brute
from vit_jax.core.errors import UserError
from vit_jax.evaluate import fewshot, ridge
from vit_jax.evaluate.features import Split

CLASSES, WIDTH, SHOTS = 4, 9, (1, 3)
TRAIN = rows.clusters(61, classes=CLASSES, width=WIDTH, seed=1)
TEST = rows.clusters(37, classes=CLASSES, width=WIDTH, seed=2)
NAMES = [f'class {c}' for c in range(CLASSES)]
DRAWS = fewshot.draw(TRAIN[1], NAMES, shots=SHOTS, num_seeds=3, name='train')
EXAMPLES = np.unique(np.concatenate([one.examples for one in DRAWS]))


def evaluator(size: int, mesh: str, *, sweep: tuple[float, ...] = (), bad: tuple[int, ...] = (),
              whole: Split | None = None) -> fewshot.FewShot:
  train = rows.Loader(TRAIN[0][EXAMPLES], TRAIN[1][EXAMPLES], size, bad=bad)
  return fewshot.FewShot(
      rows.split(train, mesh, name='train'), rows.split(rows.Loader(*TEST, size), mesh, name='test'),
      whole=whole or rows.split(rows.Loader(*TRAIN, size), mesh, name='all of train'), examples=EXAMPLES,
      draws=DRAWS, num_classes=CLASSES, penalty=64., sweep=sweep)


def accuracy(one: fewshot.Draw, penalty: float, *, without: tuple[int, ...] = ()) -> float:
  shots = np.setdiff1d(one.examples, without)
  weights = brute(TRAIN[0][shots], TRAIN[1][shots], penalty, classes=CLASSES)
  seen = TRAIN[0][shots].astype(np.float64)
  x = ridge.extend((TEST[0] - seen.mean(0)) / (seen.std(0) + 1e-5))
  return (x @ weights).argmax(1).__eq__(TEST[1]).mean()


@pytest.mark.parametrize(('size', 'mesh'), [(6, 'one'), (16, 'data=2,tensor=4')])
def test_it_equals_numpy_for_any_batch_and_mesh(size: int, mesh: str) -> None:
  result = evaluator(size, mesh).measure(rows.weights())
  want = {}
  for num in SHOTS:
    each = [accuracy(one, 64.) for one in DRAWS if one.num == num]
    want |= {f'{num}shot': np.mean(each), f'{num}shot_std': np.std(each, ddof=1)}
    want |= {f'{num}shot_seed{seed}': value for seed, value in enumerate(each)}
  assert result.metrics == pytest.approx(want) and result.num_examples == 37 and result.headline == '3shot'


@pytest.mark.parametrize(('size', 'mesh'), [(6, 'one'), (16, 'data=2,tensor=4')])
def test_shots_are_taken_from_stored_features_of_the_whole_split(size: int, mesh: str) -> None:
  """With one undecodable shot; the results are those of reading the shots, which are not read."""
  bad = 2
  want = evaluator(size, mesh, bad=(bad,)).measure(rows.weights()).metrics
  loader = rows.Loader(*TRAIN, size, bad=(int(EXAMPLES[bad]),))
  whole = rows.split(loader, mesh, name='all of train')
  whole.table(rows.weights())
  found = evaluator(size, mesh, whole=whole)
  result = found.measure(rows.weights())
  assert result.metrics == want
  assert loader.passes == 1 and found._train._loader.passes == 0  # type: ignore[attr-defined]
  again = found.measure(rows.weights(2.)).metrics  # features of other weights are not stored
  assert found._train._loader.passes == 1 and set(again) == set(want)  # type: ignore[attr-defined]


def test_of_further_penalties_the_shots_choose() -> None:
  sweep = (1., 4096.)
  metrics = evaluator(40, 'one', sweep=sweep).run(rows.weights(), 0)
  three = [one for one in DRAWS if one.num == 3]
  for penalty in (64., *sweep):
    assert metrics[f'3shot_l2_{penalty:g}'] == pytest.approx(np.mean([accuracy(one, penalty) for one in three]))
  chosen = []
  for one in three:
    left = ridge.fit(TRAIN[0][one.examples], TRAIN[1][one.examples], num_classes=CLASSES, penalties=(64., *sweep))
    best = max(zip(left.left_out, (64., *sweep), strict=True))[1]
    chosen.append(accuracy(one, best))
  assert metrics['3shot_tuned'] == pytest.approx(np.mean(chosen))


def test_logits_are_those_of_numpy() -> None:
  one = DRAWS[1]
  fitted = ridge.fit(TRAIN[0][one.examples], TRAIN[1][one.examples], num_classes=CLASSES, penalties=(64.,))
  got = fewshot.score(TEST[0][None], *(x.astype(np.float32) for x in (fitted.mean, fitted.std, fitted.weights[0])))
  want = ridge.extend((TEST[0] - fitted.mean) / fitted.std) @ fitted.weights[0]
  np.testing.assert_allclose(got[0], want, atol=1e-5)


def test_an_undecodable_shot_is_left_out() -> None:
  bad = 2
  result = evaluator(6, 'one', bad=(bad,)).run(rows.weights(), 0)
  each = [accuracy(one, 64., without=(EXAMPLES[bad],)) for one in DRAWS if one.num == 3]
  assert result['3shot'] == pytest.approx(np.mean(each))


def test_shots_are_balanced_nested_and_of_their_class() -> None:
  by_name = {(one.num, one.seed): set(one.examples.tolist()) for one in DRAWS}
  for seed in range(3):
    assert by_name[1, seed] < by_name[3, seed] and len(by_name[3, seed]) == 3 * CLASSES
    assert np.bincount(TRAIN[1][list(by_name[3, seed])]).tolist() == [3] * CLASSES
  assert by_name[3, 0] != by_name[3, 1]
  again = fewshot.draw(TRAIN[1], NAMES, shots=SHOTS, num_seeds=3, name='train')
  assert all((a.examples == b.examples).all() for a, b in zip(DRAWS, again, strict=True))


def test_a_class_with_too_few_examples_is_named() -> None:
  label = np.array([0, 0, 1, 2, 2, 2, 3, 3])
  with pytest.raises(UserError, match='train: expected 2 examples of each class, got fewer: class 1 has 1. Set'):
    fewshot.draw(label, NAMES, shots=(1, 2), num_seeds=1, name='train')
