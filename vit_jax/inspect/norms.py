"""Norms of gradients, parameters and updates in a report: over time, as heat maps by layer, and as a table.

In healthy training an update is about a thousandth of its parameter; a layer that deviates deserves a look. Where the
learning rate is close to 0, at the end of most schedules, updates say nothing about a network, so that the heat maps
show an earlier step.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from vit_jax.inspect import charts
from vit_jax.inspect.html_pages import to_float

Event = Mapping[str, object]
"""Of a record: `step`, and `grad`, `param` and `update`, each L2 norms by parameter path; a list has one per layer."""
_MAX_STEPS = 150  # of the chart over time
_MAX_BLOCKS = 4  # whose lines are in it
_SHARE = .1  # of the highest learning rate, for the step of the heat maps


class Norms(NamedTuple):
  """The section of a report: a chart over time, heat maps of the stacked parameters by title, a table of the others.

  note: which step the heat maps and the table show.
  """
  note: str
  over_time: Markup | None
  charts: list[tuple[str, Markup]]
  head: list[str]
  rows: list[list[object]]


def summarize(events: Sequence[Event], rates: Mapping[int, float]) -> Norms:
  """Returns what a report shows of the norms of a run.

  Args:
    events: at least one, in order.
    rates: learning rates by step.
  """
  event, note = _choose(events, rates)
  grad, param, update = (_leaves(event, key) for key in ('grad', 'param', 'update'))
  kinds = {'Gradient': grad, 'Parameter': param, 'Update / parameter': _ratios(param, update)}
  paths = dict.fromkeys(path for kind in kinds.values() for path in kind)
  rows = [[path, *(kind.get(path, '–') for kind in kinds.values())] for path in paths
          if not any(isinstance(kind.get(path), list) for kind in kinds.values())]
  maps = [(title, chart) for title, leaves in kinds.items() if (chart := _heat_map(title, leaves))]
  return Norms(note, _over_time(events), maps, ['other parameters', *kinds], rows)


def _choose(events: Sequence[Event], rates: Mapping[int, float]) -> tuple[Event, str]:
  """Returns the last event at which the learning rate is not close to 0, and a note about it."""
  highest = max((rate for rate in rates.values() if math.isfinite(rate)), default=0.)
  for event in reversed(events):
    step = to_float(event.get('step'))
    if math.isfinite(step) and rates.get(int(step), math.inf) >= _SHARE * highest:
      newest = event is events[-1]
      return event, f'Step {int(step):,}' + ('.' if newest else (
          f', the last one logged with a learning rate of at least {_SHARE:.0%} of the highest. Where the rate is '
          'close to 0, so are updates.'))
  return events[-1], f'Step {events[-1].get("step", "?")}.'


def _over_time(events: Sequence[Event]) -> Markup | None:
  """Draws the median ratio of update and parameter in some blocks, and in all other parameters; None without any."""
  shown = [events[i] for i in np.unique(np.linspace(0, len(events) - 1, min(len(events), _MAX_STEPS)).astype(int))]
  shown = [event for event in shown if math.isfinite(to_float(event.get('step')))]
  found = [_medians(_ratios(_leaves(event, 'param'), _leaves(event, 'update'))) for event in shown]
  depth = max((key for medians in found for key in medians), default=-1) + 1
  if not found or not any(found):
    return None
  blocks = [int(i) for i in np.unique(np.linspace(0, depth - 1, min(depth, _MAX_BLOCKS)).round())] if depth else []
  steps = [to_float(event['step']) for event in shown]
  curves = [charts.Curve('other parameters' if key < 0 else f'block {key + 1}', steps,
                         [medians.get(key, math.nan) for medians in found])
            for key in [*blocks, -1] if any(key in medians for medians in found)]
  return charts.draw_curves(curves, xlabel='step', ylabel='norm of the update / norm of the parameter', log=True)


def _medians(ratios: Mapping[str, object]) -> dict[int, float]:
  """Returns the median of the positive ratios in each block, and under -1 that of all other parameters."""
  groups: dict[int, list[float]] = {}
  for value in ratios.values():
    for key, item in enumerate(value) if isinstance(value, list) else [(-1, value)]:
      number = to_float(item)
      if math.isfinite(number) and number > 0:
        groups.setdefault(key, []).append(number)
  return {key: float(np.median(numbers)) for key, numbers in groups.items()}


def _leaves(event: Event, key: str) -> Mapping[str, object]:
  found = event.get(key)
  return found if isinstance(found, dict) else {}


def _ratios(param: Mapping[str, object], update: Mapping[str, object]) -> dict[str, object]:
  return {path: _divide(value, param[path]) for path, value in update.items() if path in param}


def _heat_map(title: str, leaves: Mapping[str, object]) -> Markup | None:
  """Stacked leaves in rows, layers in columns; shorter stacks are padded with nan."""
  stacked = {path: [to_float(x) for x in value] for path, value in leaves.items() if isinstance(value, list)}
  depth = max(map(len, stacked.values()), default=0)
  if not depth:
    return None
  values = np.array([value + [math.nan] * (depth - len(value)) for value in stacked.values()])
  rows = [path.rpartition('blocks/')[2] for path in stacked]
  return charts.draw_heat_map(values, rows=rows, xlabel='layer', unit='ratio' if '/' in title else 'L2 norm')


def _divide(over: object, under: object) -> object:
  if isinstance(over, list) and isinstance(under, list):
    return [_divide(a, b) for a, b in zip(over, under, strict=False)]
  divisor = to_float(under)
  return to_float(over) / divisor if divisor else math.nan
