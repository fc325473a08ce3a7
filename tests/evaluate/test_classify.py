"""Evaluation metrics against NumPy, over batches of any size, with padding and several devices."""
from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

from vit_jax.config import schema, training_options
from vit_jax.core.types import Batch, Features, Outputs
from vit_jax.evaluate import classify

SIZE, CLASSES = 37, 7
RNG = np.random.default_rng(0)
LOGITS = (RNG.normal(size=(SIZE, CLASSES)) * 3).astype(np.float32)
LABEL = RNG.integers(0, CLASSES - 1, SIZE).astype(np.int32)  # the last class does not occur
MORE = ('ece', 'class_mean')


class Loader:
  """The logits as images `[B, 1, 1, C]`, padded with rows that are not finite."""
  num_examples, num_bad = SIZE, 0

  def __init__(self, size: int, labels: np.ndarray | None = None):
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


def measure(size: int, settings: schema.Mesh, labels: np.ndarray | None = None) -> dict[str, float]:
  prepare = lambda batch, key, step: batch
  one = classify.TopK(predict, prepare, Loader(size, labels), mesh=programs.mesh(settings), metrics=MORE)
  result = one.measure({})
  assert result.num_examples == SIZE
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
  labels[np.arange(SIZE), (LABEL + 1) % CLASSES] = 1.
  hit = labels[np.arange(SIZE), LOGITS.argmax(-1)]
  share = labels / 2
  recall = (share * hit[:, None]).sum(0) / share.sum(0)
  got = measure(6, programs.MESHES['one'], labels)
  assert got['class_mean'] == pytest.approx(recall.mean(), rel=1e-5) and got['top1'] == pytest.approx(hit.mean())


def test_a_network_that_is_sure_and_right_is_calibrated_and_a_boastful_one_is_not() -> None:
  def error(p: list[float], hit: list[int]) -> float:
    bins = classify.FURTHER['ece']
    sums = bins.collect(jnp.asarray(p), jnp.asarray(hit, jnp.float32), jnp.zeros((len(p), 1)), jnp.ones(len(p)))
    return bins.finish(np.asarray(sums, np.float64))

  assert error([1., 1.], [1, 1]) == 0.
  assert error([.9, .9], [1, 0]) == pytest.approx(.4)
  assert error([.5, .5], [1, 0]) == 0.
  assert error([.99, .51], [0, 1]) == pytest.approx((.99 + .49) / 2, rel=1e-6)


def test_a_config_may_name_what_there_is() -> None:
  assert set(training_options.METRICS) == classify.FURTHER.keys()
