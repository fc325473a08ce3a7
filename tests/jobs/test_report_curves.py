"""Curves of a report: smoothing, units, and several runs in one chart."""
from __future__ import annotations

import math

import numpy as np

from vit_jax.inspect import charts
from vit_jax.jobs import report_curves

LOSS, ACCURACY = report_curves.KINDS[:2]


def rows(num: int) -> list[dict[str, float]]:
  found = [{'step': 10. * i, 'train/loss': float(i % 2)} for i in range(1, num + 1)]
  return [*found, {'step': 10. * num, 'test/nll': .5, 'test/top1': .98}]


def test_the_training_loss_is_smoothed_and_says_so_but_evaluations_are_not() -> None:
  chart = report_curves.draw(LOSS, [('a', rows(100))])
  assert chart is not None and 'train/loss, mean over 50 steps' in chart.svg and 'test/nll <b>0.5</b>' in chart.svg
  assert 'class="line raw"' in chart.svg and 'Evaluations are exact and not smoothed' in chart.note


def test_a_mean_covers_the_neighbors_of_each_value_and_leaves_out_what_is_not_finite() -> None:
  y = np.arange(100.)
  y[50] = math.nan
  found = report_curves.smooth(charts.Curve('loss', list(range(100)), y.tolist()))
  assert found.label == 'loss, mean over 5 steps' and found.raw[3] == 3.
  assert found.y[20] == 20. and found.y[0] == 1. and found.y[99] == 98.  # symmetric inside; three values at the ends
  assert found.y[50] == 50. and found.y[51] == (49 + 51 + 52 + 53) / 4


def test_a_short_curve_is_not_smoothed() -> None:
  chart = report_curves.draw(LOSS, [('a', rows(19))])
  assert chart is not None and 'mean over' not in chart.svg


def test_an_evaluation_is_not_smoothed_however_often_it_is_made() -> None:
  many = [{'step': float(i), 'test/nll': float(i % 2)} for i in range(100)]
  chart = report_curves.draw(LOSS, [('a', many)])
  assert chart is not None and '</i>test/nll <b>1</b>' in chart.svg and 'mean over' not in chart.svg and not chart.note


def test_several_runs_are_labeled_by_their_names_and_shown_without_single_batches() -> None:
  chart = report_curves.draw(LOSS, [('a', rows(100)[:-1]), ('b', rows(100)[:-1])])
  assert chart is not None and 'b, mean over 50 steps' in chart.svg and 'class="line raw"' not in chart.svg
  both = report_curves.draw(LOSS, [('a', rows(100)), ('b', rows(100))])
  assert both is not None and 'b: train/loss, mean over 50 steps' in both.svg


def test_accuracy_is_in_percent_and_a_kind_without_metrics_has_no_chart() -> None:
  chart = report_curves.draw(ACCURACY, [('a', rows(3))])
  assert chart is not None and 'test/top1 <b>98</b>' in chart.svg and '>%</text>' in chart.svg
  assert report_curves.draw(report_curves.KINDS[2], [('a', rows(3))]) is None
