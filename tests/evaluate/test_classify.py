"""Evaluation metrics against NumPy, over batches of any size, with padding and several devices."""
from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

from vit_jax.config import schema
from vit_jax.config.schema import evals
from vit_jax.core.errors import UserError
from vit_jax.core.types import Batch, Features, Outputs
from vit_jax.evaluate import classify
from vit_jax.evaluate.results import Truncated

SIZE, CLASSES = 37, 7
RNG = np.random.default_rng(0)
LOGITS = (RNG.normal(size=(SIZE, CLASSES)) * 3).astype(np.float32)
LABEL = RNG.integers(0, CLASSES - 1, SIZE).astype(np.int32)  # the last class does not occur
MORE = ('ece', 'class_mean')
count = jax.jit(classify.count, static_argnames='metrics')


class Loader:
  """The logits as images `[B, 1, 1, C]`, padded with rows that are not finite."""
  num_examples, num_bad = SIZE, 0

  def __init__(self, size: int, labels: np.ndarray | None = None) -> None:
    self.size, self.labels = size, labels

  def batches(self) -> Iterator[Batch]:
    for at in range(0, SIZE, self.size):
      rows = np.arange(at, at + self.size)
      real = rows < SIZE
      rows = np.minimum(rows, SIZE - 1)
      image = np.where(real[:, None], LOGITS[rows], np.nan)
      targets = {'label': LABEL[rows]} if self.labels is None else {'labels': self.labels[rows]}
      yield {'image': image[:, None, None], 'mask': real.astype(np.float32), 'index': rows.astype(np.int32), **targets}


def predict(selected: object, image: jax.Array) -> Outputs:
  return Outputs(image[:, 0, 0], Features(image[:, 0], image[:, 0, 0], (1, 1)))


def prepare(batch: Batch, key: jax.Array, step: jax.Array) -> Batch:
  return batch


def evaluator(loader: Loader, mesh: str | schema.Mesh = 'one', **more: object) -> classify.TopK:
  settings = programs.MESHES[mesh] if isinstance(mesh, str) else mesh
  return classify.TopK(predict, prepare, loader, mesh=programs.mesh(settings),
                       **{'metrics': MORE, 'num_classes': CLASSES, **more})


def measure(size: int, settings: schema.Mesh, labels: np.ndarray | None = None) -> dict[str, float]:
  result = evaluator(Loader(size, labels), settings).measure({})
  assert result.num_examples == SIZE and result.headline == 'top1' and not result.is_partial
  return result.metrics


def probabilities() -> np.ndarray:
  z = LOGITS.astype(np.float64)
  p = np.exp(z - z.max(-1, keepdims=True))
  return p / p.sum(-1, keepdims=True)


def want() -> dict[str, float]:
  p, guess = probabilities(), LOGITS.argmax(-1)
  sure, hit = p.max(-1), guess == LABEL
  which = np.minimum(np.ceil(sure * 15).astype(int) - 1, 14)
  error = sum(abs(hit[which == b].mean() - sure[which == b].mean()) * (which == b).mean() for b in set(which))
  recall = [hit[c == LABEL].mean() for c in set(LABEL)]
  top5 = (np.argsort(-p, -1)[:, :5] == LABEL[:, None]).any(-1)
  return {'top1': hit.mean(), 'top5': top5.mean(), 'nll': -np.log(p[np.arange(SIZE), LABEL]).mean(), 'ece': error,
          'class_mean': np.mean(recall)}


@pytest.mark.parametrize(('size', 'mesh'), [
    (1, 'one'), (6, 'one'), (37, 'one'), (8, 'data=8'), (16, 'data=2,tensor=4')])
def test_metrics_are_exact_for_any_batch_and_mesh(size: int, mesh: str) -> None:
  assert measure(size, programs.MESHES[mesh]) == pytest.approx(want(), rel=1e-5)


def test_an_example_of_several_classes_counts_to_each_in_equal_parts() -> None:
  labels = np.eye(CLASSES, dtype=np.float32)[LABEL]
  labels[np.arange(0, SIZE, 2), (LABEL[::2] + 1) % CLASSES] = 1.  # the others have one class
  hit = labels[np.arange(SIZE), LOGITS.argmax(-1)]
  share = labels / labels.sum(-1, keepdims=True)
  recall = (share * hit[:, None]).sum(0) / share.sum(0)
  got = measure(6, programs.MESHES['one'], labels)
  assert got['class_mean'] == pytest.approx(recall.mean(), rel=1e-5) and got['top1'] == pytest.approx(hit.mean())
  assert got['nll'] == pytest.approx(-(share * np.log(probabilities())).sum(-1).mean(), rel=1e-5)


def test_any_of_the_listed_labels_is_right_and_is_shown_as_the_label() -> None:
  guess = LOGITS.argmax(-1)
  listed = np.stack([LABEL, np.where(np.arange(SIZE) % 2 == 0, guess, -1)], -1).astype(np.int32)
  listed[::5] = -1
  counts = count(jnp.asarray(LOGITS), {
      'label': jnp.asarray(listed[:, 0]), 'label_list': jnp.asarray(listed), 'mask': jnp.ones(SIZE),
      'index': jnp.arange(SIZE)})
  counted, hit = listed[:, 0] >= 0, (listed == guess[:, None]).any(-1)
  assert float(counts[0]['top1'].sum) == hit[counted].sum() and float(counts[0]['top1'].weight) == counted.sum()
  np.testing.assert_array_equal(counts[1]['label'], np.where(hit, guess, listed[:, 0]))


def test_a_network_that_is_sure_and_right_is_calibrated_and_a_boastful_one_is_not() -> None:
  def error(p: list[float], hit: list[int]) -> float:
    sums = jax.jit(classify._count_bins)(np.float32(p), np.float32(hit), np.ones(len(p), np.float32))
    return classify.MORE_METRICS['ece'](np.asarray(sums, np.float64))

  assert error([1., 1.], [1, 1]) == 0.
  assert error([.9, .9], [1, 0]) == pytest.approx(.4)
  assert error([.5, .5], [1, 0]) == 0.
  assert error([.99, .51], [0, 1]) == pytest.approx((.99 + .49) / 2, rel=1e-6)


def test_bins_of_calibration_hold_their_upper_end() -> None:
  p = jnp.array([0., .06, .07, .99, 1.])  # the ends are at 1/15 = .067, ..., 14/15 = .933, 1
  examples, *_ = classify._count_bins(p, jnp.zeros(5), jnp.ones(5))
  assert examples.tolist() == [2., 1., *[0.] * 12, 2.]


def test_only_allowed_classes_are_guessed() -> None:
  allowed = np.array([True, False, True, False, False, False, False])
  result = evaluator(Loader(6), allowed=allowed).measure({})
  p = probabilities() * allowed
  p /= p.sum(-1, keepdims=True)
  assert result.metrics['top1'] == pytest.approx((p.argmax(-1) == LABEL).mean())
  assert set(result.guesses.top[:, 0].tolist()) <= {0, 2}
  np.testing.assert_allclose(result.guesses.probability[:, 0], p.max(-1), rtol=1e-5)


def test_an_example_without_any_right_class_does_not_count() -> None:
  labels = np.eye(CLASSES, dtype=np.float32)[LABEL]
  labels[::3] = 0.
  result = evaluator(Loader(16, labels), 'data=8').measure({})
  keep = np.arange(SIZE) % 3 > 0
  assert result.num_examples == keep.sum()
  assert result.metrics['top1'] == pytest.approx((LOGITS.argmax(-1) == LABEL)[keep].mean())
  assert sorted(result.guesses.index.tolist()) == np.flatnonzero(keep).tolist() and result.guesses.is_single
  labels[0, :2] = 1.
  result = evaluator(Loader(16, labels), 'data=8').measure({})
  assert not result.guesses.is_single


def test_a_quick_look_says_so_in_every_number() -> None:
  result = Truncated(evaluator(Loader(40)), SIZE).measure({})
  assert result.is_partial and set(result.metrics) == {
      f'{name}.partial37' for name in ('top1', 'top5', 'nll', *MORE)} and result.headline == 'top1.partial37'


def test_weights_of_other_classes_are_refused() -> None:
  with pytest.raises(UserError, match='evals.test: expected weights that predict the 9 classes of the data, got a head '
                                      'of 7. Use weights with a head for these classes'):
    evaluator(Loader(6), num_classes=9, name='evals.test').measure({})


def test_weights_without_a_head_are_refused() -> None:
  def headless(selected: object, image: jax.Array) -> Outputs:
    return predict(selected, image)._replace(logits=None)
  one = classify.TopK(headless, prepare, Loader(6), mesh=programs.mesh(programs.MESHES['one']), metrics=(),
                      num_classes=CLASSES, name='evals.test')
  with pytest.raises(UserError, match='evals.test: expected weights with a head, got a backbone'):
    one.measure({})


def test_weights_that_are_not_finite_are_named() -> None:
  def scaled(selected: dict[str, jax.Array], image: jax.Array) -> Outputs:
    return predict(selected, image * selected['head'])
  one = classify.TopK(scaled, prepare, Loader(6), mesh=programs.mesh(programs.MESHES['one']), metrics=(),
                      num_classes=CLASSES, name='evals.test')
  with pytest.raises(UserError, match='evals.test: expected finite outputs, got others for 6 images of a batch: these '
                                      'weights hold nan or inf: head. Use others'):
    one.measure({'head': jnp.float32(np.nan), 'other': jnp.ones(3)})
  assert one.measure({'head': jnp.float32(1.)}).num_examples == SIZE


def test_nothing_to_count_is_refused() -> None:
  class Empty(Loader):
    num_examples = 0
  with pytest.raises(UserError, match='evals.test: expected a split with at least one example'):
    evaluator(Empty(6), name='evals.test')
  with pytest.raises(UserError, match='can be decoded and has a label or a caption, got none among '
                                      '37'):
    evaluator(Loader(6, np.zeros((SIZE, CLASSES), np.float32))).measure({})


def test_a_config_may_name_what_there_is() -> None:
  assert set(evals.MORE_METRICS) == classify.MORE_METRICS.keys()


def test_an_excluded_class_is_never_right() -> None:
  """Of two classes that are allowed, five cannot be predicted; two images are of an excluded class."""
  allowed = np.array([False, False, False, False, True, True, False])
  logits = np.where(allowed[None], LOGITS[:3], classify._EXCLUDED)
  batch = {'label': np.array([0, 4, 1]), 'mask': np.ones(3, np.float32), 'index': np.arange(3)}
  means, _ = count(logits, batch)
  assert float(means['top5'].value) == pytest.approx(1 / 3)
