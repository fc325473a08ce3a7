"""The scaling study of the ViT paper (arXiv 2010.11929, section 4.4, Figure 5, Table 6): rows, fits, what comes next.

A point is a pre-training run. Its compute is that of pre-training. Its accuracy is the mean on ImageNet over the runs
that fine-tune it, or its own where there are none. One scaling law is fitted to all runs of a family (ViT, hybrid,
ResNet): E(C) = c + a C^-b, as in arXiv 2106.04560, section 2.2, without its shift of C. C is the compute in exaFLOPs, E
the error in %, and c the error that no compute can reduce. The fit minimizes the squares of E: for a given b, a and c
are a linear problem of two unknowns that may not be negative, so only b is searched for.
"""
from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.config import schema as s
from vit_jax.core.errors import UserError
from vit_jax.recipes import published, studies, transfer

COMPUTE, ACCURACY, ERROR, FAMILY = 'exaFLOPs', 'top-1 %', 'error %', 'family'
FRONTIER = 'frontier'
FIGURES = (s.Figure(COMPUTE, ACCURACY, series=FAMILY, log_x=True),
           s.Figure(COMPUTE, ERROR, series=FAMILY, log_x=True, log_y=True))
_DRAWN = 40  # points of a curve
LEAST_POINTS = 3
_EXPONENTS = np.concatenate([[0.], np.geomspace(.005, 5., 400)])
_REFINED = 60  # steps that shorten the interval of exponents around the best of the grid


class Run(NamedTuple):
  """A network, and the length of its pre-training in epochs of JFT-300M."""
  model: str
  epochs: int

  @property
  def name(self) -> str:
    return f'{self.model.replace("/", "_")}_{self.epochs}ep'

  @property
  def prefix(self) -> str:
    """What the names of the runs that fine-tune it begin with."""
    return f'{self.name}_'


class Next(NamedTuple):
  """A network that was not trained, and what it would cost."""
  model: str
  epochs: int
  exaflops: float


def family(model: str) -> str:
  """Returns the family of a network by its name."""
  if model.startswith('BiT'):
    return 'ResNet'
  return 'hybrid' if model.startswith(('R', 'hybrid')) else 'ViT'


def choose(runs: Sequence[Run], text: str) -> list[Run]:
  """Returns the runs of the networks or families that `B/32+R50+B/16+ResNet` names, or all for ''.

  Raises:
    UserError: a name is unknown.
  """
  known = sorted({run.model for run in runs}, key=len, reverse=True)
  families = list(dict.fromkeys(family(run.model) for run in runs))
  rest, wanted = text, []
  while rest:  # some names hold a + themselves, so the longest name at the beginning is taken
    name = next((name for name in (*known, *families) if f'{rest}+'.startswith(f'{name}+')), None)
    if name is None:
      raise UserError(f'models: expected some of {", ".join([*families, *dict.fromkeys(run.model for run in runs)])}, '
                      f'got {rest!r}. Put + between names.')
    wanted.append(name)
    rest = rest[len(name) + 1:]
  return [run for run in runs if not wanted or run.model in wanted or family(run.model) in wanted]


def points(results: s.Results, runs: Sequence[Run]) -> dict[Run, tuple[float, float]]:
  """Returns compute in exaFLOPs and accuracy in % of each run that has both."""
  measured = {}
  for run in runs:
    if result := results.get(run.name):
      accuracies = list(studies.scores(results, 'imagenet2012', run.prefix).values())
      if not accuracies and result.headline is not None:
        accuracies = [100 * result.headline]
      if accuracies:
        measured[run] = result.exaflops, statistics.fmean(accuracies)
  return measured


def laws(measured: Mapping[Run, tuple[float, float]]) -> dict[str, Law]:
  """Returns the fit of each family that has enough points."""
  groups: dict[str, list[tuple[float, float]]] = {}
  for run, point in measured.items():
    groups.setdefault(family(run.model), []).append(point)
  fitted = {name: fit([compute for compute, _ in group], [100 - accuracy for _, accuracy in group])
            for name, group in groups.items()}
  return {name: law for name, law in fitted.items() if law}


def rows(results: s.Results, runs: Sequence[Run], following: Sequence[Next]) -> list[s.Row]:
  """Returns a row for each pre-training run, with the numbers of the paper.

  They are followed by a row for each of `following`, with the accuracy that the law of its family predicts.
  """
  measured = points(results, runs)
  fitted = laws(measured)
  best = frontier((run.name, *point) for run, point in measured.items())
  table_6 = {(scaled.model, scaled.epochs): scaled for scaled in published.TABLE_6}
  rows: list[s.Row] = []
  for run in runs:
    if run.name in results:
      in_paper = table_6.get((run.model, run.epochs))
      accuracy = measured[run][1] if run in measured else None
      row = _row(run.model, run.epochs, results[run.name].exaflops, fitted, status='measured')
      rows.append(row | {
          ACCURACY: accuracy, ERROR: None if accuracy is None else 100 - accuracy,
          'on the frontier': 'yes' if run.name in best else 'no',
          'published exaFLOPs': in_paper.exaflops if in_paper else None,
          'published %': in_paper.imagenet if in_paper else None, **_transferred(results, run, in_paper)})
  return rows + [_row(*network, fitted, status='predicted') for network in following]


def _transferred(results: s.Results, run: Run, in_paper: published.Scaled | None) -> s.Row:
  """Returns the columns of Table 6 beside ImageNet, ours and the published ones; {} for a network that is not there."""
  if in_paper is None:
    return {}
  ours = transfer.accuracies(results, tuple(transfer.ROWS), prefix=run.prefix)
  columns: s.Row = {}
  for name, value in list(zip(published.TRANSFER_SETS, in_paper.accuracies, strict=True))[1:]:
    columns |= {f'{name} %': round(ours[name], 2) if name in ours else None, f'{name} published %': value}
  return columns


def _row(model: str, epochs: int, compute: float, laws: Mapping[str, Law], *, status: str) -> s.Row:
  """Returns the columns that networks have whether they were trained or not."""
  law = laws.get(family(model))
  return {'model': model, FAMILY: family(model), 'epochs': epochs, COMPUTE: float(f'{compute:.4g}'), ACCURACY: None,
          ERROR: None, 'law %': round(100 - law.error(compute), 2) if law else None,
          'at most %': round(100 - law.floor, 2) if law else None, 'status': status}


def curves(results: s.Results, runs: Sequence[Run], following: Sequence[Next]) -> list[s.Row]:
  """Returns points of lines: the law of each family up to its next network, and the frontier of all runs."""
  measured = points(results, runs)
  ends = {family(network.model): network.exaflops for network in following}
  rows: list[s.Row] = []
  for name, law in laws(measured).items():
    computes = [compute for run, (compute, _) in measured.items() if family(run.model) == name]
    for compute in np.geomspace(min(computes), max(*computes, ends.get(name, 0.)), _DRAWN).tolist():
      rows.append({FAMILY: name, COMPUTE: compute, ERROR: law.error(compute), ACCURACY: 100 - law.error(compute)})
  best = frontier((run.name, *point) for run, point in measured.items())
  point_by_name = {run.name: point for run, point in measured.items()}
  for compute, accuracy in map(point_by_name.__getitem__, best):
    rows.append({FAMILY: FRONTIER, COMPUTE: compute, ERROR: 100 - accuracy, ACCURACY: accuracy})
  return rows


class Law(NamedTuple):
  """Error in % at a compute of C exaFLOPs: `floor + factor * C ** -exponent`."""
  factor: float
  exponent: float
  floor: float

  def error(self, compute: float) -> float:
    """Returns the error E(C) in %."""
    return self.floor + self.factor * compute ** -self.exponent

  def compute(self, error: float) -> float:
    """Returns the exaFLOPs that an error takes; infinite at the floor and below."""
    if error <= self.floor or not self.exponent or not self.factor:
      return math.inf
    return ((error - self.floor) / self.factor) ** (-1. / self.exponent)


def fit(compute: Sequence[float], error: Sequence[float]) -> Law | None:
  """Returns the law of some runs; None if fewer than three amounts of compute differ, which do not determine it.

  Args:
    compute: exaFLOPs of each, > 0.
    error: %, of each.
  """
  if len(set(compute)) < LEAST_POINTS:
    return None
  x, y = np.asarray(compute, np.float64), np.asarray(error, np.float64)
  scale = math.exp(np.log(x).mean())  # so that the two columns of the linear problem are of a size
  x = x / scale
  best = int(np.argmin([_solve(x, y, exponent).loss for exponent in _EXPONENTS]))
  low, high = _EXPONENTS[max(0, best - 1)], _EXPONENTS[min(len(_EXPONENTS) - 1, best + 1)]
  for _ in range(_REFINED):  # ternary search
    a, b = low + (high - low) / 3, high - (high - low) / 3
    if _solve(x, y, a).loss < _solve(x, y, b).loss:
      high = b
    else:
      low = a
  exponent = float(low + high) / 2
  solution = _solve(x, y, exponent)
  return Law(solution.factor * scale ** exponent, exponent, solution.floor)


class _Solution(NamedTuple):
  """The best factor a and floor c of a law with a given exponent, and the sum of squares that remains."""
  loss: float
  factor: float
  floor: float


def _solve(x: np.ndarray, y: np.ndarray, exponent: float) -> _Solution:
  """Minimizes the sum of squares of `factor * x ** -exponent + floor - y`, where neither may be negative."""
  powers = x ** -exponent
  candidates = [(max(0., float(powers @ y / (powers @ powers))), 0.), (0., max(0., float(y.mean())))]
  if exponent:
    factor, floor = np.linalg.lstsq(np.stack([powers, np.ones_like(x)], 1), y, rcond=None)[0]
    if factor >= 0. and floor >= 0.:
      candidates.append((float(factor), float(floor)))
  return min(_Solution(float(((factor * powers + floor - y) ** 2).sum()), factor, floor)
             for factor, floor in candidates)


def frontier(points: Iterable[tuple[str, float, float]]) -> list[str]:
  """Returns those points (name, compute, accuracy) that no point of the same compute or less reaches, by compute."""
  names: list[str] = []
  best = -math.inf
  for name, _, accuracy in sorted(points, key=lambda point: (point[1], -point[2])):
    if accuracy > best:
      best = accuracy
      names.append(name)
  return names
