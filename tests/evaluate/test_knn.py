"""k nearest neighbors against NumPy in float64, over any batch size and mesh."""
from __future__ import annotations

import json
import pathlib

import jax
import numpy as np
import pytest

from tests.evaluate import make_golden_knn as made
from tests.evaluate import rows
from vit_jax.evaluate import knn
from vit_jax.evaluate.results import Truncated

CLASSES, KS = 7, (1, 3, 20)
TRAIN = rows.clusters(101, classes=CLASSES, width=12, seed=1)
TEST = rows.clusters(37, classes=CLASSES, width=12, seed=2)


def brute(ks: tuple[int, ...] = KS, *,
          keep: np.ndarray | None = None) -> tuple[dict[str, float], np.ndarray, np.ndarray]:
  """Metrics, sorted similarities and votes for the last k, in float64."""
  keep = np.arange(len(TRAIN[1])) if keep is None else keep
  x, y = TRAIN[0][keep].astype(np.float64), TEST[0].astype(np.float64)
  x, y = x / np.linalg.norm(x, axis=1, keepdims=True), y / np.linalg.norm(y, axis=1, keepdims=True)
  similarity = y @ x.T
  order = np.argsort(-similarity, axis=1, kind='stable')
  metrics = {}
  for k in ks:
    votes = np.zeros((len(y), CLASSES))
    for i, nearest in enumerate(order[:, :k]):
      np.add.at(votes[i], TRAIN[1][keep][nearest], np.exp(similarity[i, nearest] / .07))
    ranked = np.argsort(-votes, axis=1, kind='stable')
    ranked = np.where(np.take_along_axis(votes, ranked, 1) > 0, ranked, -1)
    metrics |= {f'top1_k{k}': (ranked[:, 0] == TEST[1]).mean(),
                f'top5_k{k}': (ranked[:, :5] == TEST[1][:, None]).any(1).mean()}
  return metrics, np.take_along_axis(similarity, order, 1), votes


def evaluator(size: int, mesh: str, *, bad: tuple[int, ...] = (), ks: tuple[int, ...] = KS) -> knn.Knn:
  train = rows.split(rows.Loader(*TRAIN, size, bad=bad), mesh, name='train')
  return knn.Knn(train, rows.split(rows.Loader(*TEST, size), mesh, name='test'), num_classes=CLASSES, neighbors=ks,
                 temperature=.07, headline=ks[-1])


@pytest.mark.quick('8-data=2', reason='1 s: a program for each mesh')
@pytest.mark.parametrize(('size', 'mesh'), [(6, 'one'), (8, 'data=2'), (16, 'data=2,tensor=4')])
def test_it_equals_numpy_for_any_batch_and_mesh(size: int, mesh: str, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(knn, 'BLOCK', 48)  # several blocks, and several of the test split
  monkeypatch.setattr(knn, 'TEST_ROWS', 16)
  result = evaluator(size, mesh).measure(rows.weights())
  assert result.metrics == pytest.approx(brute()[0]) and result.num_examples == len(TEST[1])
  assert result.headline == 'top1_k20' and result.score == result.metrics['top1_k20']


def test_bad_examples_and_padding_are_nobodys_neighbors() -> None:
  one = evaluator(6, 'one', bad=(3, 50), ks=(101,))
  test = one.test.place(one.test.table(rows.weights()))
  similarity, _ = knn.nearest(one.train, rows.weights(), test['features'], max(one.neighbors))
  finite = np.isfinite(similarity[0, :len(TEST[1])])
  assert finite[:, :99].all() and not finite[:, 99:].any()


def test_similarities_and_votes_are_those_of_numpy() -> None:
  one = evaluator(6, 'one')
  test = one.test.place(one.test.table(rows.weights()))
  similarity, label = map(np.asarray, knn.nearest(one.train, rows.weights(), test['features'], max(one.neighbors)))
  votes = np.exp(jax.jit(knn.log_votes, static_argnums=(2, 3))(similarity, label, CLASSES, .07))[0, :len(TEST[1])]
  _, want, want_votes = brute()
  np.testing.assert_allclose(similarity[0, :len(TEST[1])], want[:, :20], atol=1e-6)
  np.testing.assert_allclose(votes / votes.sum(-1, keepdims=True), want_votes / want_votes.sum(-1, keepdims=True),
                             atol=1e-5)


def test_an_undecodable_training_picture_is_nobodys_neighbor() -> None:
  bad = (0, 17, 50)
  keep = np.setdiff1d(np.arange(len(TRAIN[1])), bad)
  assert evaluator(8, 'data=2', bad=bad).measure(rows.weights()).metrics == pytest.approx(brute(keep=keep)[0])


def test_of_equal_neighbors_the_first_counts(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(knn, 'BLOCK', 16)
  same = np.ones((64, 3), np.float32)
  label = np.arange(64, dtype=np.int32) % CLASSES
  train = rows.split(rows.Loader(same, label, 8), 'data=8', name='train')
  test = rows.split(rows.Loader(same[:3], np.array([0, 1, 2], np.int32), 8), 'data=8', name='test')
  one = knn.Knn(train, test, num_classes=CLASSES, neighbors=(1, 2), temperature=.07, headline=1)
  placed = test.place(test.table(rows.weights()))
  _, labels = knn.nearest(one.train, rows.weights(), placed['features'], max(one.neighbors))
  np.testing.assert_array_equal(np.asarray(labels)[:3, 0], [[0, 1]] * 3)


def test_more_neighbors_than_examples_are_all_of_them() -> None:
  assert evaluator(40, 'one', ks=(500,)).measure(rows.weights()).metrics == pytest.approx(brute((500,))[0])


def test_a_part_says_so_in_every_name() -> None:
  result = Truncated(evaluator(40, 'one'), 50).measure(rows.weights())
  assert set(result.metrics) == {f'{name}.partial50' for name in brute()[0]} and result.is_partial
  assert result.headline == 'top1_k20.partial50' and result.score == result.metrics[result.headline]


def test_accuracies_are_those_of_dinos_program() -> None:
  train, test = (rows.Loader(*made.split(which), 50) for which in (0, 1))
  one = knn.Knn(rows.split(train, name='train'), rows.split(test, name='test'), num_classes=made.CLASSES,
                neighbors=made.NEIGHBORS, temperature=made.TEMPERATURE, headline=20)
  golden = json.loads(pathlib.Path(__file__).with_name('golden_knn.json').read_text())
  found = one.measure(rows.weights()).metrics
  assert found['top5_k5'] < golden.pop('top5_k5')  # there, classes without a vote fill the five places
  np.testing.assert_allclose([found[name] for name in golden], list(golden.values()), rtol=1e-6)  # k / 200 in f32


@pytest.mark.parametrize(('nearest', 'temperature', 'top1', 'top5'), [
    pytest.param([2], .07, [2], [2], id='one neighbor'),
    pytest.param([8, 8, 2, 8], .07, [8], [2, 8], id='two classes among four neighbors'),
    pytest.param([3, 5, 7, 9, 4, 6], .07, [3], [3, 5, 7, 9, 4], id='six classes'),
    pytest.param([9, 5], .001, [9], [5, 9], id='a vote too small for float32 beside the other'),
    pytest.param([9, 5], .01, [9], [5, 9], id='a vote too large for float32')])
def test_a_class_without_a_vote_is_never_right(
    nearest: list[int], temperature: float, top1: list[int], top5: list[int]) -> None:
  """Each of ten classes is asked with the same neighbors, each farther than the one before."""
  angle = np.linspace(0, 1., len(nearest))
  train = np.stack([np.cos(angle), np.sin(angle)], 1).astype(np.float32)
  test = np.tile(np.float32([[1, 0]]), (10, 1))
  split = [rows.split(rows.Loader(x, np.asarray(y, np.int32), 10), name=name)
           for name, x, y in (('train', train, nearest), ('test', test, range(10)))]
  found = knn.Knn(*split, num_classes=10, neighbors=(len(nearest),), temperature=temperature,
                  headline=len(nearest)).measure(rows.weights()).metrics
  assert list(found.values()) == pytest.approx([len(top1) / 10, len(top5) / 10])
