"""Norms of gradients, parameters and updates in a report: heat maps by layer, and a table of the other parameters.

In healthy training an update is about a thousandth of its parameter; a layer that deviates deserves a look.
"""
from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from vit_jax.inspect import charts
from vit_jax.inspect.html_pages import to_float


class Norms(NamedTuple):
  """The section of a report: heat maps of the stacked parameters by title, and a table of the others."""
  step: object
  charts: list[tuple[str, Markup]]
  head: list[str]
  rows: list[list[object]]


def summarize(step: object, grad: Mapping[str, object], param: Mapping[str, object],
              update: Mapping[str, object]) -> Norms:
  """Returns what a report shows of the norms at a step.

  Args:
    step: its number.
    grad: L2 norm by parameter path; a list has one norm for each layer.
    param: likewise.
    update: likewise; shown as a ratio to `param`.
  """
  ratio = {path: _divide(value, param[path]) for path, value in update.items() if path in param}
  kinds = {'Gradient': grad, 'Parameter': param, 'Update / parameter': ratio}
  paths = dict.fromkeys(path for kind in kinds.values() for path in kind)
  rows = [[path, *(_cell(kind.get(path)) for kind in kinds.values())] for path in paths
          if not any(isinstance(kind.get(path), list) for kind in kinds.values())]
  maps = [(title, chart) for title, leaves in kinds.items() if (chart := _heat_map(title, leaves))]
  return Norms(step, maps, ['other parameters', *kinds], rows)


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


def _cell(value: object) -> object:
  return '–' if value is None else value if isinstance(value, int | float) else str(value)
