"""RankMe, deviation, uniformity and alignment against their definitions, their values after a collapse, the alarm."""
from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.evaluate import rows
from vit_jax.config import schema
from vit_jax.core.types import Array, Features, Outputs, PyTree
from vit_jax.data import opening
from vit_jax.data.source import find_origin
from vit_jax.evaluate import health

WIDTH = 6
FEATURES, LABEL = rows.clusters(40, classes=5, width=2 * WIDTH, seed=0)


def evaluator(features: np.ndarray, mesh: str = 'one', size: int = 8, *, min_rank: float = 2.,
              bad: tuple[int, ...] = ()) -> health.Health:
  loader = rows.Loader(features.astype(np.float32), np.zeros(len(features), np.int32), size, bad=bad)
  return health.Health(rows.split(loader, mesh), min_rank=min_rank, setting='evals.health.min_rank')


def want(x: np.ndarray, other: np.ndarray) -> dict[str, float]:
  """From the definitions, by loops."""
  share = np.sqrt(np.linalg.eigvalsh(x.T @ x)) / np.sqrt(np.linalg.eigvalsh(x.T @ x)).sum()
  u, v = (one / np.sqrt((one ** 2).sum(1, keepdims=True)) for one in (x, other))
  pairs = [np.exp(-2 * ((u[i] - u[j]) ** 2).sum()) for i, j in itertools.combinations(range(len(u)), 2)]
  return {'rank_me': float(np.exp(-(share * np.log(share)).sum())),
          'deviation': float(np.std(u, 0).mean() * WIDTH ** .5), 'uniformity': float(np.log(np.mean(pairs))),
          'alignment': float(((u - v) ** 2).sum(1).mean())}


@pytest.mark.parametrize('mesh', ['one', 'data=2'])
def test_metrics_are_those_of_their_definitions(mesh: str) -> None:
  result = evaluator(FEATURES, mesh).measure(rows.weights())
  x, other = np.split(np.float64(np.float32(FEATURES)), 2, axis=1)
  assert result.metrics == pytest.approx(want(x, other), rel=1e-5)  # the rest of RankMe's 1e-7 is of that size
  assert result.num_examples == 40 and not result.alarms and result.headline == ''


def test_blocks_of_pairs_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
  units = health.unit(np.float64(FEATURES))
  whole = health.uniformity(units)
  monkeypatch.setattr(health, 'BLOCK', 7)
  assert health.uniformity(units) == pytest.approx(whole, rel=1e-12)
  assert health.uniformity(units[:1]) == 0.


def test_an_image_that_cannot_be_decoded_does_not_count() -> None:
  found = evaluator(FEATURES, bad=(3, 20)).measure(rows.weights())
  rest = evaluator(np.delete(FEATURES, [3, 20], 0)).measure(rows.weights())
  assert found.num_examples == 38 and found.metrics == pytest.approx(rest.metrics)


def test_features_that_are_all_the_same_raise_an_alarm() -> None:
  result = evaluator(np.tile(FEATURES[:1], (40, 1))).measure(rows.weights())
  same = {name: value for name, value in result.metrics.items() if name != 'alignment'}
  assert same == pytest.approx({'rank_me': 1., 'deviation': 0., 'uniformity': 0.}, abs=1e-4)
  [low] = result.alarms
  assert (low.metric, low.below, low.setting) == ('rank_me', 2., 'evals.health.min_rank') and low.value < 1.001
  assert not evaluator(np.tile(FEATURES[:1], (40, 1)), min_rank=0.).measure(rows.weights()).alarms


def test_isotropic_features_have_the_rank_of_their_space_and_deviation_one() -> None:
  x = np.random.default_rng(0).normal(size=(4000, 2 * WIDTH))
  found = evaluator(x, size=400).measure(rows.weights()).metrics
  assert found['rank_me'] == pytest.approx(WIDTH, rel=.01) and found['deviation'] == pytest.approx(1., rel=.01)


class Mean:
  """A view whose features are the mean of the left half of the image, and of the right half."""

  def select(self, params: PyTree, extra: PyTree) -> PyTree:
    return params

  def predict(self, selected: PyTree, image: Array) -> Outputs:
    half = image.shape[2] // 2
    pooled = jnp.stack([image[:, :, :half].mean((1, 2, 3)), image[:, :, half:].mean((1, 2, 3))], -1)
    return Outputs(None, Features(pooled[:, None], pooled, (1, 1)))


def test_the_other_image_is_the_mirrored_middle() -> None:
  image = np.zeros((1, 8, 8, 3), np.float32)
  image[:, :, 1:4] = 1.  # columns 1 to 3 of the middle, 1 to 6: after the mirror in the right half
  found = np.asarray(jax.jit(functools.partial(health.pairs, Mean()))({}, image))[0]
  assert found[:2] == pytest.approx([.75, 0.]) and found[2] < .05 and found[3] > .95


def test_images_are_taken_at_equal_distances() -> None:
  digits = opening.open_split(schema.Data(source='digits'), 'test', image_px=(8, 8))
  few = health.spread(digits, 4)
  assert [find_origin(few, i)[1] for i in range(4)] == [len(digits) * i // 4 for i in range(4)]
  assert health.spread(digits, len(digits)) is digits


def test_features_that_are_all_zeros_are_the_least_uniform() -> None:
  assert health.uniformity(np.zeros((5, 4))) == 0.
  mixed = np.concatenate([np.zeros((1, 4)), np.eye(4)[:1]])
  assert health.uniformity(mixed) == pytest.approx(-2.)  # log exp(-2 |0 - e|^2)
