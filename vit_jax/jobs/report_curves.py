"""The curves of `report.html`: metrics by step, of one run or of several in the same chart.

`report.py` calls `draw` for each of `KINDS`. Training metrics are those of single batches; where they are noisy, the
curve is their moving mean, labeled as such, with the single values behind it. Evaluations are never smoothed.
"""
from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from vit_jax.inspect import charts
from vit_jax.record.reader import Row

_MEAN_PART = 25  # a mean covers 1/25 of the rows of a curve
_LEAST_TO_SMOOTH = 20  # rows; a shorter curve is not smoothed


class Kind(NamedTuple):
  """A chart of the report, and the metrics that are its curves.

  unit: of the axis y.
  pattern: a regular expression for the complete names of its metrics.
  factor: by which values are multiplied, such as 100 for percent.
  note: a text below the chart; it is only shown if the metric `smooths` has a curve.
  is_log: whether the axis y is logarithmic.
  smooths: the metric whose curve is a moving mean; '' = none.
  """
  title: str
  unit: str
  pattern: str
  factor: float = 1.
  note: str = ''
  is_log: bool = False
  smooths: str = ''


KINDS = (
    Kind('Loss', 'nats', r'train/loss|[^/]+/(nll|loss)(@.*)?', smooths='train/loss', note=(
        'train/loss is the objective, with augmentation and label smoothing if the run has them; single batches are '
        'drawn faintly. Evaluations are exact and not smoothed.')),
    Kind('Accuracy', '%', r'train/accuracy|.+/(top1(_k20)?|10shot)([.]partial\d+)?(@.*)?', 100.,
         smooths='train/accuracy', note='train/accuracy is that of batches, faintly each, with their augmentation. '
         'Evaluations are not smoothed.'),
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
  """Draws a chart of one or several runs; returns None if none of them has such metrics.

  Args:
    kind: the chart.
    runs: the name and the rows of each run; if there are several, labels of curves begin with the name.
  """
  series: list[tuple[str, Sequence[Row], str]] = []  # name of the run, its rows, metric
  for run, rows in runs:
    metrics = {name for row in rows for name in row if re.fullmatch(kind.pattern, name)}
    series += [(run, rows, name) for name in sorted(metrics, key=lambda name: (not name.startswith('train/'), name))]
  if not series:
    return None
  is_one_metric = len({name for _, _, name in series}) == 1
  curves = []
  for run, rows, name in series:
    points = [(row['step'], kind.factor * row[name]) for row in rows if name in row and 'step' in row]
    curve = charts.Curve(name, *zip(*points, strict=True))
    if name == kind.smooths:
      curve = smooth(curve)
    if len(runs) > 1:
      mean = curve.label.removeprefix(name)  # such as ', mean over 40 steps'
      curve = curve._replace(label=run + mean if is_one_metric else f'{run}: {curve.label}', raw=())
    curves.append(curve)
  note = kind.note if any(name == kind.smooths for _, _, name in series) else ''
  return Chart(kind.title, charts.draw_curves(curves, xlabel='step', ylabel=kind.unit, log=kind.is_log), note)


def smooth(curve: charts.Curve) -> charts.Curve:
  """Returns the moving mean of a curve, centered, with the curve itself behind it; a short curve stays as it is.

  The label says how many steps a mean covers. Values that are not finite are left out of it. At both ends of the curve
  the window is cut, so that a mean there covers fewer rows.
  """
  x, y = np.asarray(curve.x, np.float64), np.asarray(curve.y, np.float64)
  if len(y) < _LEAST_TO_SMOOTH:
    return curve
  width = max(3, len(y) // _MEAN_PART) | 1  # rows of the window, an odd number
  steps = round(float(np.median(np.diff(x))) * width)
  is_finite = np.isfinite(y)
  rows = np.arange(len(y))
  starts, ends = np.maximum(rows - width // 2, 0), np.minimum(rows + width // 2 + 1, len(y))
  # The sum of a window is the difference of two cumulative sums, `[0, y0, y0 + y1, …]`.
  sums = np.concatenate([[0.], np.cumsum(np.where(is_finite, y, 0.))])
  counts = np.concatenate([[0.], np.cumsum(is_finite.astype(float))])
  total, count = sums[ends] - sums[starts], counts[ends] - counts[starts]
  mean = np.where(count > 0, total / np.maximum(count, 1.), np.nan)
  return charts.Curve(f'{curve.label}, mean over {steps:,} steps', curve.x, mean.tolist(), curve.y)
