"""The curves of a report, from the rows of a run's record.

Training metrics are those of single batches; where they are noisy, the curve is their moving mean, labeled as such,
with the single values behind it. Evaluations are never smoothed.
"""
from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from vit_jax.core.types import HostArray
from vit_jax.inspect import charts
from vit_jax.record.reader import Row

_PART = 25  # a mean covers 1 in so many rows of a curve
_LEAST = 20  # rows, below which nothing is smoothed


class Kind(NamedTuple):
  """A chart: its title, unit of y, names of its metrics, factor, a note, and how it is drawn."""
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
    Kind('Learning rate', 'learning rate', r'train/lr'),
    Kind('Gradient norm', 'L2 norm', r'train/grad_norm', is_log=True),
    Kind('Speed', 'images/s', r'train/images_per_s'),
    Kind('Model FLOPs utilization', '%', r'train/mfu', 100.))


class Chart(NamedTuple):
  """A chart with its title and a note, which may be empty."""
  title: str
  svg: Markup
  note: str


def draw(kind: Kind, runs: Sequence[tuple[str, Sequence[Row]]]) -> Chart | None:
  """Draws a chart of one or several runs; None if none of them has such metrics.

  Args:
    kind: the chart.
    runs: the name and the rows of each; if there are several, labels begin with the name.
  """
  series = [(run, rows, name) for run, rows in runs for name in _names(rows, kind.pattern)]
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
      smoothed = curve.label.removeprefix(name)
      curve = curve._replace(label=run + smoothed if is_one_metric else f'{run}: {curve.label}', raw=())
    curves.append(curve)
  note = kind.note if any(name == kind.smooths for _, _, name in series) else ''
  return Chart(kind.title, charts.draw_curves(curves, xlabel='step', ylabel=kind.unit, log=kind.is_log), note)


def smooth(curve: charts.Curve) -> charts.Curve:
  """Returns the moving mean of a curve, centered, with the curve itself behind it; a short curve stays as it is.

  The label says how many steps a mean covers. Values that are not finite are left out of it.
  """
  x, y = np.asarray(curve.x, np.float64), np.asarray(curve.y, np.float64)
  if len(y) < _LEAST:
    return curve
  width = max(3, len(y) // _PART) | 1  # odd
  steps = round(float(np.median(np.diff(x))) * width)
  good = np.isfinite(y)
  total, count = (_windows(values, width) for values in (np.where(good, y, 0.), good.astype(np.float64)))
  mean = np.where(count > 0, total / np.maximum(count, 1.), np.nan)
  return charts.Curve(f'{curve.label}, mean over {steps:,} steps', curve.x, mean.tolist(), curve.y)


def _windows(values: HostArray, width: int) -> HostArray:
  """Returns the sums `[n]` over windows of `width` values around each; fewer at the ends."""
  sums = np.concatenate([[0.], np.cumsum(values)])
  middle = np.arange(len(values))
  return sums[np.minimum(middle + width // 2 + 1, len(values))] - sums[np.maximum(middle - width // 2, 0)]


def _names(rows: Sequence[Row], pattern: str) -> list[str]:
  """Returns the metrics whose names match, those of training first."""
  names = {name for row in rows for name in row if re.fullmatch(pattern, name)}
  return sorted(names, key=lambda name: (not name.startswith('train/'), name))
