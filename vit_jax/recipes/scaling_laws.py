"""Scaling laws: how the error falls with the compute of pre-training, and where that ends.

E(C) = c + a C^-b, as in arXiv 2106.04560, section 2.2, without its shift of C. C is the compute in exaFLOPs, E the
error in %, c the saturation that no compute gets below. Fitted by least squares of E: given b, a and c are a linear
problem of two unknowns that may not be negative, so that one number is searched for.
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

LEAST_POINTS = 3
_EXPONENTS = np.concatenate([[0.], np.geomspace(.005, 5., 400)])
_REFINED = 60  # halvings of the interval of exponents around the best of the grid


class Law(NamedTuple):
  """Error in % at a compute of C exaFLOPs: `floor + factor * C ** -exponent`."""
  factor: float
  exponent: float
  floor: float

  def error(self, compute: float) -> float:
    """E(C), %."""
    return self.floor + self.factor * compute ** -self.exponent

  def compute(self, error: float) -> float:
    """The exaFLOPs that an error takes; infinite at the floor and below."""
    if error <= self.floor or not self.exponent or not self.factor:
      return math.inf
    return ((error - self.floor) / self.factor) ** (-1. / self.exponent)


def fit(compute: Sequence[float], error: Sequence[float]) -> Law | None:
  """The law of some runs; None of fewer than three different computes, which say nothing about a saturation.

  Args:
    compute: exaFLOPs of each, > 0.
    error: %, of each.
  """
  if len(set(compute)) < LEAST_POINTS:
    return None
  x, y = np.asarray(compute, np.float64), np.asarray(error, np.float64)
  scale = math.exp(np.log(x).mean())  # so that the two columns are of a size
  losses = [_solve(x / scale, y, exponent)[0] for exponent in _EXPONENTS]
  best = int(np.argmin(losses))
  low, high = _EXPONENTS[max(0, best - 1)], _EXPONENTS[min(len(_EXPONENTS) - 1, best + 1)]
  for _ in range(_REFINED):
    a, b = low + (high - low) / 3, high - (high - low) / 3
    low, high = (low, b) if _solve(x / scale, y, a)[0] < _solve(x / scale, y, b)[0] else (a, high)
  exponent = float(low + high) / 2
  _, factor, floor = _solve(x / scale, y, exponent)
  return Law(factor * scale ** exponent, exponent, floor)


def _solve(x: np.ndarray, y: np.ndarray, exponent: float) -> tuple[float, float, float]:
  """Sum of squares, factor and floor of the best law of an exponent, neither negative."""
  powers = x ** -exponent
  candidates = [(max(0., float(powers @ y / (powers @ powers))), 0.), (0., max(0., float(y.mean())))]
  if exponent:
    factor, floor = np.linalg.lstsq(np.stack([powers, np.ones_like(x)], 1), y, rcond=None)[0]
    candidates += [(float(factor), float(floor))] * bool(factor >= 0. and floor >= 0.)
  return min((float(((factor * powers + floor - y) ** 2).sum()), factor, floor) for factor, floor in candidates)


def frontier(points: Iterable[tuple[str, float, float]]) -> list[str]:
  """Of points (name, compute, accuracy), those that no point of the same compute or less reaches; by compute."""
  found: list[str] = []
  best = -math.inf
  for name, _, accuracy in sorted(points, key=lambda point: (point[1], -point[2])):
    if accuracy > best:
      best, found = accuracy, [*found, name]
  return found
