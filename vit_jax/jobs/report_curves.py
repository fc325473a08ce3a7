"""The charts of `report.html`: metrics by step, of one run or of several in the same chart, and norms by layer.

`report.py` calls `draw` for each of `KINDS`. Training metrics are measured on single batches. For the noisy ones, the
curve is a moving mean, which the label says, with the single values behind it. Evaluations are never smoothed.

For a single run that recorded norms, `report.py` also calls `summarize_norms`, for the norms of gradients, parameters
and updates: over time, as heat maps by layer, and as a table. In healthy training an update is about a thousandth of
its parameter; a layer that deviates deserves a look. Where the learning rate is close to 0, at the end of most
schedules, updates say nothing about a network, so that the heat maps show an earlier step.
"""
from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from vit_jax.core.types import HostArray
from vit_jax.inspect import charts
from vit_jax.inspect.html_pages import to_float
from vit_jax.record.reader import Row

_WINDOWS_PER_CURVE = 25  # a moving mean covers 1/25 of the rows of a curve
_MIN_ROWS_TO_SMOOTH = 20
_MAX_NORM_STEPS = 150  # events in the chart of norms over time
_MAX_BLOCKS = 4  # blocks with a line in it
_MIN_RATE_SHARE = .1  # of the highest learning rate, for the step of the heat maps

NormEvent = Mapping[str, object]
"""An event of a record: `step`, and `grad`, `param` and `update`, each L2 norms by parameter path.

The norm of a stacked parameter such as `'backbone/blocks/attn/query/kernel'` is a list with one number per layer.
"""
Norms = Mapping[str, HostArray]
"""L2 norms, or their ratios, by parameter path: `[L]` for a stacked parameter, `[]` for another one."""


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


class NormSummary(NamedTuple):
  """The norms in a report: a chart over time, heat maps of the stacked parameters by title, a table of the others.

  note: which step the heat maps and the table show.
  """
  note: str
  over_time: Markup | None
  charts: list[tuple[str, Markup]]
  head: list[str]
  rows: list[list[object]]


def summarize_norms(events: Sequence[NormEvent], rates: Mapping[int, float]) -> NormSummary:
  """Returns what a report shows of the norms of a run.

  Args:
    events: at least one, in order.
    rates: learning rates by step.
  """
  event, note = _choose_event(events, rates)
  kinds = {'Gradient': _read_norms(event, 'grad'), 'Parameter': _read_norms(event, 'param'),
           'Update / parameter': _update_ratios(event)}
  heat_maps = [(title, chart) for title, norms in kinds.items() if (chart := _draw_heat_map(title, norms))]
  rows: list[list[object]] = []
  for path in dict.fromkeys(path for norms in kinds.values() for path in norms):
    values = [norms.get(path) for norms in kinds.values()]
    if not any(value is not None and value.ndim for value in values):
      rows.append([path, *('–' if value is None else float(value) for value in values)])
  return NormSummary(note, _draw_ratios_over_time(events), heat_maps, ['other parameters', *kinds], rows)


def _choose_event(events: Sequence[NormEvent], rates: Mapping[int, float]) -> tuple[NormEvent, str]:
  """Returns the last event at which the learning rate is not close to 0, and a note about it."""
  highest = max((rate for rate in rates.values() if math.isfinite(rate)), default=0.)
  for event in reversed(events):
    step = to_float(event.get('step'))
    if math.isfinite(step) and rates.get(int(step), math.inf) >= _MIN_RATE_SHARE * highest:
      if event is events[-1]:
        return event, f'Step {int(step):,}.'
      return event, (f'Step {int(step):,}, the last one logged with a learning rate of at least {_MIN_RATE_SHARE:.0%} '
                     'of the highest. Where the rate is close to 0, so are updates.')
  return events[-1], f'Step {events[-1].get("step", "?")}.'


def _read_norms(event: NormEvent, key: str) -> Norms:
  """Returns the norms of an event; nan for what is not a number, {} if there are none."""
  norms = event.get(key)
  if not isinstance(norms, dict):
    return {}
  return {path: np.array(list(map(to_float, norm)) if isinstance(norm, list) else to_float(norm))
          for path, norm in norms.items()}


def _update_ratios(event: NormEvent) -> Norms:
  """Returns the norm of the update over that of the parameter; nan for a parameter of norm 0."""
  param = _read_norms(event, 'param')
  return {path: np.divide(norm, param[path], out=np.full(norm.shape, np.nan), where=param[path] != 0)
          for path, norm in _read_norms(event, 'update').items() if path in param and param[path].shape == norm.shape}


def _draw_ratios_over_time(events: Sequence[NormEvent]) -> Markup | None:
  """Draws the median ratio of update and parameter in some blocks, and in all other parameters; None without any."""
  chosen = np.unique(np.linspace(0, len(events) - 1, min(len(events), _MAX_NORM_STEPS)).astype(int))
  shown = [events[i] for i in chosen if math.isfinite(to_float(events[i].get('step')))]
  medians_by_event = [_block_medians(_update_ratios(event)) for event in shown]
  all_blocks = {block for medians in medians_by_event for block in medians}
  if not all_blocks:
    return None
  depth = max(all_blocks) + 1
  some_blocks = np.unique(np.linspace(0, max(depth - 1, 0), min(depth, _MAX_BLOCKS)).round()).astype(int).tolist()
  curves = [charts.Curve('other parameters' if block < 0 else f'block {block + 1}',
                         [to_float(event['step']) for event in shown],
                         [medians.get(block, math.nan) for medians in medians_by_event])
            for block in [*some_blocks, -1] if block in all_blocks]
  return charts.draw_curves(curves, xlabel='step', ylabel='norm of the update / norm of the parameter', log=True)


def _block_medians(ratios: Norms) -> dict[int, float]:
  """Returns the median of the positive ratios in each block, from 0, and under -1 that of all other parameters."""
  by_block: dict[int, list[float]] = {}
  for values in ratios.values():
    blocks = range(len(values)) if values.ndim else [-1]
    for block, ratio in zip(blocks, values.reshape(-1).tolist(), strict=True):
      if math.isfinite(ratio) and ratio > 0:
        by_block.setdefault(block, []).append(ratio)
  return {block: float(np.median(numbers)) for block, numbers in by_block.items()}


def _draw_heat_map(title: str, norms: Norms) -> Markup | None:
  """Draws stacked parameters in rows and layers in columns; shorter stacks are padded with nan. None without any."""
  stacked = {path: norm for path, norm in norms.items() if norm.ndim}
  depth = max(map(len, stacked.values()), default=0)
  if not depth:
    return None
  values = np.array([np.pad(norm, (0, depth - len(norm)), constant_values=np.nan) for norm in stacked.values()])
  rows = [path.rpartition('blocks/')[2] for path in stacked]
  return charts.draw_heat_map(values, rows=rows, xlabel='layer', unit='ratio' if '/' in title else 'L2 norm')
