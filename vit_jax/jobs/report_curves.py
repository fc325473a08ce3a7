"""The curves of `report.html`: metrics by step, of one run or of several in the same chart.

`report.py` calls `draw` for each of `KINDS`. Training metrics are measured on single batches. For the noisy ones, the
curve is a moving mean, which the label says, with the single values behind it. Evaluations are never smoothed.
"""
from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from vit_jax.inspect import charts
from vit_jax.record.reader import Row

_WINDOWS_PER_CURVE = 25  # a moving mean covers 1/25 of the rows of a curve
_MIN_ROWS_TO_SMOOTH = 20


class Kind(NamedTuple):
  """The settings of a chart of the report.

  unit: the label of the y axis.
  pattern: a regular expression for the complete names of the metrics that are curves of the chart.
  factor: values are multiplied by this number, such as 100 for percent.
  note: a text below the chart; shown only if `smoothed_metric` has a curve.
  is_log: whether the y axis is logarithmic.
  smoothed_metric: the metric whose curve is a moving mean; '' = none.
  """
  title: str
  unit: str
  pattern: str
  factor: float = 1.
  note: str = ''
  is_log: bool = False
  smoothed_metric: str = ''


KINDS = (
    Kind('Loss', 'nats', r'train/loss|[^/]+/(nll|loss)(@.*)?', smoothed_metric='train/loss', note=(
        'train/loss is the objective, with augmentation and label smoothing if the run has them; single batches are '
        'drawn faintly. Evaluations are exact and not smoothed.')),
    Kind('Accuracy', '%', r'train/accuracy|.+/(top1(_k20)?|10shot)([.]partial\d+)?(@.*)?', 100.,
         smoothed_metric='train/accuracy', note='train/accuracy is measured on augmented batches; single batches are '
         'drawn faintly. Evaluations are not smoothed.'),
    Kind('RankMe of features', 'dimensions', r'.+/rank_me([.]partial\d+)?(@.*)?'),
    Kind('Spread of features', 'standard deviation',
         r'train/(deviation|spread)|.+/deviation([.]partial\d+)?(@.*)?'),
    Kind('Alignment and uniformity', '', r'.+/(alignment|uniformity)([.]partial\d+)?(@.*)?'),
    Kind('Teacher', 'nats', r'train/(teacher_entropy|information|patch_entropy|patch_information)'),
    Kind('Prototypes in use', '%', r'train/(patch_)?used_prototypes', 100.),
    Kind('Learning rate', 'learning rate', r'train/lr'),
    Kind('Gradient norm', 'L2 norm', r'train/grad_norm', is_log=True),
    Kind('Speed', 'images/s', r'train/images_per_s'),
    Kind('Model FLOPs utilization', '%', r'train/mfu', 100.))


class Chart(NamedTuple):
  """A drawn chart with its title and a note, which may be empty."""
  title: str
  svg: Markup
  note: str


def draw(kind: Kind, runs: Sequence[tuple[str, Sequence[Row]]]) -> Chart | None:
  """Draws a chart of one or several runs; returns None if no run has a metric of the chart.

  Args:
    kind: the settings of the chart.
    runs: the name and the rows of each run; if there are several runs, labels of curves begin with the name.
  """
  series: list[tuple[str, Sequence[Row], str]] = []  # the name of the run, the rows of the run, the metric
  for run, rows in runs:
    metrics = {name for row in rows for name in row if re.fullmatch(kind.pattern, name)}
    series += [(run, rows, name) for name in sorted(metrics, key=lambda name: (not name.startswith('train/'), name))]
  if not series:
    return None
  all_metrics = {metric for _, _, metric in series}
  curves = []
  for run, rows, metric in series:
    points = [(row['step'], kind.factor * row[metric]) for row in rows if metric in row and 'step' in row]
    curve = charts.Curve(metric, *zip(*points, strict=True))
    if metric == kind.smoothed_metric:
      curve = smooth(curve)
    if len(runs) > 1:
      mean_note = curve.label.removeprefix(metric)  # such as ', mean over 40 steps'
      label = f'{run}{mean_note}' if len(all_metrics) == 1 else f'{run}: {curve.label}'
      curve = curve._replace(label=label, raw=())
    curves.append(curve)
  note = kind.note if kind.smoothed_metric in all_metrics else ''
  return Chart(kind.title, charts.draw_curves(curves, xlabel='step', ylabel=kind.unit, log=kind.is_log), note)


def smooth(curve: charts.Curve) -> charts.Curve:
  """Returns the centered moving mean of a curve, with the single values behind it; a short curve stays unchanged.

  The label says how many steps a mean covers. Values that are not finite are left out of the mean. At both ends of the
  curve the window is cut, so that the mean covers fewer rows.
  """
  x, y = np.asarray(curve.x, np.float64), np.asarray(curve.y, np.float64)
  if len(y) < _MIN_ROWS_TO_SMOOTH:
    return curve
  width = max(3, len(y) // _WINDOWS_PER_CURVE) | 1  # rows of the window, an odd number
  num_steps = round(float(np.median(np.diff(x))) * width)
  is_finite = np.isfinite(y)
  rows = np.arange(len(y))
  starts = np.maximum(rows - width // 2, 0)
  ends = np.minimum(rows + width // 2 + 1, len(y))
  # The sum of a window is the difference of two cumulative sums, `[0, y0, y0 + y1, …]`.
  sums = np.concatenate([[0.], np.cumsum(np.where(is_finite, y, 0.))])
  counts = np.concatenate([[0.], np.cumsum(is_finite.astype(float))])
  num_finite = counts[ends] - counts[starts]
  mean = np.where(num_finite > 0, (sums[ends] - sums[starts]) / np.maximum(num_finite, 1.), np.nan)
  return charts.Curve(f'{curve.label}, mean over {num_steps:,} steps', curve.x, mean.tolist(), curve.y)
