"""Precision, recall and F1 by class, against scikit-learn."""
from __future__ import annotations

import csv
import io

import numpy as np
import pytest

from vit_jax.evaluate import by_class, results
from vit_jax.evaluate.results import Guesses

NAMES = ['a', 'b, "c"', 'd', 'e', 'f', 'g', 'h', 'never']


def predictions() -> tuple[np.ndarray, np.ndarray]:
  """Classes 5 and 6 are only predicted, class 1 is never predicted, and class 7 does not occur at all."""
  rng = np.random.default_rng(0)
  label = rng.integers(0, 5, 200)
  predicted = np.where(rng.random(200) < .6, label, rng.integers(2, 7, 200))
  return label, np.where(predicted == 1, 0, predicted)


def test_the_scores_are_those_of_scikit_learn() -> None:
  metrics = pytest.importorskip('sklearn.metrics', reason='compared with scikit-learn')
  label, predicted = predictions()
  want = metrics.classification_report(label, predicted, output_dict=True, zero_division=0)
  found = by_class.measure(label, predicted)
  assert found.label.tolist() == [0, 1, 2, 3, 4, 5, 6]
  for row, number in enumerate(found.label):
    got = {'precision': found.precision[row], 'recall': found.recall[row], 'f1-score': found.f1[row],
           'support': found.num_images[row]}
    assert got == pytest.approx(want[str(number)], abs=1e-12)
  for means, name in (found.mean(), 'macro avg'), (found.weighted_mean(), 'weighted avg'):
    assert [*means.values()] == pytest.approx([want[name][of] for of in ('precision', 'recall', 'f1-score')])
  assert found.num_predicted.sum() == 200 and found.num_predicted[1] == 0


def test_a_quotient_of_nothing_is_zero() -> None:
  found = by_class.measure(np.array([0, 0, 1]), np.array([0, 2, 2]))
  assert found.precision.tolist() == [1., 0., 0.] and found.recall.tolist() == [.5, 0., 0.]
  assert found.f1.tolist() == [2 / 3, 0., 0.] and found.mean()['recall'] == pytest.approx(1 / 6)


def test_the_table_has_a_line_for_each_class_and_both_means() -> None:
  lines = by_class.text(by_class.measure(np.array([0, 0, 1]), np.array([0, 2, 2])), ['cat', 'dog']).splitlines()
  assert lines == [
      'class          precision   recall       F1  images  predicted',
      'cat             100.00 %  50.00 %  66.67 %       2          1',
      'dog               0.00 %   0.00 %   0.00 %       1          0',
      'class 2           0.00 %   0.00 %   0.00 %       0          2',
      'macro mean       33.33 %  16.67 %  22.22 %       3          3',
      'weighted mean    66.67 %  33.33 %  44.44 %       3          3']


def test_the_csv_file_has_every_number_exactly() -> None:
  found = by_class.measure(*predictions())
  rows = list(csv.DictReader(io.StringIO(by_class.to_csv(found, NAMES))))
  assert [row['class'] for row in rows] == NAMES[:7] and tuple(rows[0]) == by_class.COLUMNS
  for name in ('precision', 'recall', 'f1'):
    assert [float(row[name]) for row in rows] == getattr(found, name).tolist()
  assert [int(row['images']) for row in rows] == found.num_images.tolist()


def test_the_saved_mistakes_are_the_most_confident_ones_of_each_class_in_a_bounded_number(
    monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(results, 'NUM_WRONG_OF_CLASS', 2)
  label, predicted = np.array([0, 0, 0, 0, 1, 1, 2]), np.array([1, 1, 2, 0, 1, 0, 0])
  probability = np.array([.5, .9, .7, .99, .9, .3, .6])
  guesses = Guesses(np.arange(7), label, predicted[:, None], probability[:, None])
  assert results.choose_mistakes(guesses) == [1, 6, 5, 2]  # the first of each class, then the second of class 0
  monkeypatch.setattr(results, 'NUM_WRONG', 2)
  assert results.choose_mistakes(guesses) == [1, 6]


def test_saved_images_are_small() -> None:
  assert results._thumbnail(np.zeros((200, 400, 3), np.uint8)).shape == (80, 160, 3)
  assert results._thumbnail(np.ones((16, 16, 3), np.uint8)).shape == (16, 16, 3)


@pytest.mark.parametrize(('metric', 'value', 'shown'), [
    ('top1_k20', .98765, '98.77 %'), ('nll', 1.23456, '1.2346'), ('l2', 1e-6, '1e-06'), ('l2', 3.1623e-4, '0.000316'),
    ('l2', 0., '0.0000')])
def test_small_numbers_are_not_shown_as_zero(metric: str, value: float, shown: str) -> None:
  assert results.format_number(metric, value) == shown
