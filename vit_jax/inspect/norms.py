"""Norms of gradient, parameter and update, leaf by leaf and layer by layer, as heat maps and a table.

Healthy training has updates of about a thousandth of the parameter; a layer that stands out is a lead.
"""
from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from vit_jax.inspect import render


def render_norms(grad: Mapping[str, object], param: Mapping[str, object],
                 update: Mapping[str, object]) -> str:
  """Heat maps of the stacked leaves, a table of the others.

  Args:
    grad: L2 norm by path; a list holds one for each layer.
    param: likewise.
    update: likewise; shown as a ratio to `param`.
  """
  ratio = {path: _divide(value, param[path]) for path, value in update.items() if path in param}
  kinds = {'Gradient': grad, 'Parameter': param, 'Update / parameter': ratio}
  figures = ''.join(_render_kind(title, leaves) for title, leaves in kinds.items())
  leaves = {path: value for kind in kinds.values() for path, value in kind.items()}
  rows = [[path, *(_shown(kind.get(path)) for kind in kinds.values())]
          for path, value in leaves.items() if not isinstance(value, list)]
  table = render.make_table(['other parameters', *kinds], rows) if rows else ''
  return f'<div class="figures">{figures}</div>{table}'


def _render_kind(title: str, leaves: Mapping[str, object]) -> str:
  """Stacked leaves in rows, layers in columns; shorter stacks are filled with nan."""
  stacked = {path: [render.to_float(x) for x in value] for path, value in leaves.items()
             if isinstance(value, list)}
  depth = max(map(len, stacked.values()), default=0)
  if not depth:
    return ''
  values = np.array([value + [math.nan] * (depth - len(value)) for value in stacked.values()])
  rows = [path.rpartition('blocks/')[2] for path in stacked]
  unit = 'ratio' if '/' in title else 'L2 norm'
  return f'<div><h3>{title}</h3>{render.draw_heat_map(values, rows=rows, xlabel="layer", unit=unit)}</div>'


def _divide(over: object, under: object) -> object:
  if isinstance(over, list) and isinstance(under, list):
    return [_divide(a, b) for a, b in zip(over, under, strict=False)]
  divisor = render.to_float(under)
  return render.to_float(over) / divisor if divisor else math.nan


def _shown(value: object) -> object:
  return '–' if value is None else value if isinstance(value, int | float) else str(value)
