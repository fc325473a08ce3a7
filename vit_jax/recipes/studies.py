"""Pieces that studies are made of: choosing by results, and summing results up."""
from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import NamedTuple

from vit_jax.config import schema
from vit_jax.core.errors import UserError


def best(results: schema.Results, names: Iterable[str]) -> str:
  """Of the named runs that are done, the one with the highest headline; the first of equals.

  Raises:
    UserError: none of them is done.
  """
  wanted = list(names)
  scores = {name: results[name].headline for name in wanted if name in results}
  known = {name: score for name, score in scores.items() if score is not None and math.isfinite(score)}
  if not known:
    raise UserError(f'there is no result to choose by: none of the runs {", ".join(wanted)} is done with an evaluation')
  return max(known, key=lambda name: known[name])


class Spread(NamedTuple):
  """Mean and standard deviation (of a sample: n - 1) of `num` values; nan where there are too few."""
  mean: float
  std: float
  num: int


def spread(results: schema.Results, names: Iterable[str]) -> Spread:
  """Of the headlines of the named runs that are done."""
  values = [score for name in names if name in results and (score := results[name].headline) is not None]
  mean = statistics.fmean(values) if values else math.nan
  return Spread(mean, statistics.stdev(values) if len(values) > 1 else math.nan, len(values))
