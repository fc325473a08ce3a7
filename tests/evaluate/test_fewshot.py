"""Few-shot accuracy against NumPy, over any batch size and mesh; shots that are drawn by seed alone."""
from __future__ import annotations

import functools
import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from tests.evaluate import make_golden_fewshot as made
from tests.evaluate import rows
from tests.evaluate.test_ridge import brute
from vit_jax.config import check, files, schema
from vit_jax.core.errors import UserError
from vit_jax.core.types import Features, Outputs
from vit_jax.data.image import geometry
from vit_jax.evaluate import fewshot, linear, resources, results
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
      draws=DRAWS, num_classes=CLASSES, penalties=(64., *sweep))


def accuracy(one: fewshot.Draw, penalty: float, *, without: tuple[int, ...] = ()) -> float:
  shots = np.setdiff1d(one.examples, without)
  weights = brute(TRAIN[0][shots], TRAIN[1][shots], penalty, classes=CLASSES)
  seen = TRAIN[0][shots].astype(np.float64)
  x = fewshot.extend((TEST[0] - seen.mean(0)) / (seen.std(0) + 1e-5))
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
  assert loader.passes == 1 and found.train._loader.passes == 0  # type: ignore[attr-defined]
  again = found.measure(rows.weights(2.)).metrics  # features of other weights are not stored
  assert found.train._loader.passes == 1 and set(again) == set(want)  # type: ignore[attr-defined]


def test_of_further_penalties_the_shots_choose() -> None:
  sweep = (1., 4096.)
  metrics = evaluator(40, 'one', sweep=sweep).measure(rows.weights()).metrics
  three = [one for one in DRAWS if one.num == 3]
  for penalty in (64., *sweep):
    assert metrics[f'3shot_l2_{penalty:g}'] == pytest.approx(np.mean([accuracy(one, penalty) for one in three]))
  chosen = []
  for one in three:
    left = fewshot.fit(TRAIN[0][one.examples], TRAIN[1][one.examples], num_classes=CLASSES, penalties=(64., *sweep))
    best = max(zip(left.left_out, (64., *sweep), strict=True))[1]
    chosen.append(accuracy(one, best))
  assert metrics['3shot_tuned'] == pytest.approx(np.mean(chosen))


def test_logits_are_those_of_numpy() -> None:
  one = DRAWS[1]
  fitted = fewshot.fit(TRAIN[0][one.examples], TRAIN[1][one.examples], num_classes=CLASSES, penalties=(64.,))
  mean, std, weights = (x.astype(np.float32) for x in (fitted.mean, fitted.std, fitted.weights[0]))
  got = linear.predict(linear.Linear(weights[:-1], fewshot.BIAS * weights[-1]),
                       linear.standardize(TEST[0][None], mean, std))
  want = fewshot.extend((TEST[0] - fitted.mean) / fitted.std) @ fitted.weights[0]
  np.testing.assert_allclose(got[0], want, atol=1e-5)


def test_an_undecodable_shot_is_left_out() -> None:
  bad = 2
  result = evaluator(6, 'one', bad=(bad,)).measure(rows.weights()).metrics
  each = [accuracy(one, 64., without=(EXAMPLES[bad],)) for one in DRAWS if one.num == 3]
  assert result['3shot'] == pytest.approx(np.mean(each))


def test_a_draw_without_a_decodable_shot_is_refused() -> None:
  (one,) = [one for one in DRAWS if one[:2] == (1, 0)]
  bad = tuple(np.searchsorted(EXAMPLES, one.examples).tolist())
  with pytest.raises(UserError, match='train: expected an example that can be decoded .*, got none among 4'):
    evaluator(6, 'one', bad=bad).measure(rows.weights())


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


GOLDEN = json.loads(pathlib.Path(__file__).with_name('golden_fewshot.json').read_text())
THEIRS = schema.FewShotProtocol.BIG_VISION


@pytest.mark.parametrize('width', made.WIDTH)
def test_big_vision_s_protocol_has_the_accuracies_of_its_program(width: int) -> None:
  """Of every seed: its shots, with a class of fewer examples, its regression with more and with fewer than features."""
  train, test = made.split(0, width), made.split(1, width)
  assert np.bincount(train[1])[-1] < max(made.SHOTS)
  draws = fewshot.draw(train[1], NAMES, shots=made.SHOTS, num_seeds=made.SEEDS, name='train', protocol=THEIRS)
  examples = np.unique(np.concatenate([one.examples for one in draws]))
  found = fewshot.FewShot(
      rows.split(rows.Loader(train[0][examples], train[1][examples], 8), name='train'),
      rows.split(rows.Loader(*test, 8), name='test'), whole=rows.split(rows.Loader(*train, 8), name='all of train'),
      examples=examples, draws=draws, num_classes=made.CLASSES,
      penalties=(made.PENALTY,)).measure(rows.weights()).metrics
  for shots, each in GOLDEN['accuracy'][str(width)].items():
    np.testing.assert_array_equal([found[f'{shots}shot_seed{seed}'] for seed in range(made.SEEDS)], each)


@pytest.mark.parametrize('number', range(len(made.SIZES)))
def test_big_vision_s_protocol_squashes_and_crops_images(number: int) -> None:
  config = files.load('deit_b16_i1k', ['image_px=28,28'])  # whose own images are resized otherwise
  image, _ = geometry.fit(made.image(number), recipe=resources.squashed_crop(config), image_px=(28, 28))
  want = np.reshape(GOLDEN['pixels'][number], (28, 28, 3))
  np.testing.assert_array_equal(image, want)


def test_big_vision_s_protocol_reads_after_the_hidden_layer() -> None:
  rng = np.random.default_rng(0)
  pooled, kernel, bias = rng.normal(size=(5, 3)), rng.normal(size=(3, 4)), rng.normal(size=4)
  params = {'kernel': np.zeros((4, 2)), 'pre_logits': {'kernel': jnp.float32(kernel), 'bias': jnp.float32(bias)}}

  class View:
    def predict(self, selected: object, image: np.ndarray) -> Outputs:
      return Outputs(None, Features(image[:, None], image, (1, 1)))

  read = functools.partial(resources.hidden, View())
  np.testing.assert_allclose(read({'head': params}, jnp.float32(pooled)), np.tanh(pooled @ kernel + bias), atol=1e-6)
  np.testing.assert_array_equal(read({'head': {'kernel': kernel}}, jnp.float32(pooled)), np.float32(pooled))
  np.testing.assert_array_equal(read({}, jnp.float32(pooled)), np.float32(pooled))  # of a network without a head


def test_big_vision_s_protocol_refuses_other_features() -> None:
  config = files.load('axial_jft', [])
  few = config.evals['imagenet']
  assert isinstance(few, schema.FewShot) and few.protocol is THEIRS
  few.features = schema.FeatureLayers((-1,))
  assert any('evals.imagenet.features: expected' in text for text in check.problems(config))


def test_few_shot_runs_after_the_evaluations_that_store_features() -> None:
  both = {'few': {'student': evaluator(6, 'one')}, 'test': {'student': object()}}
  assert results.in_order(both) == ['test', 'few']
