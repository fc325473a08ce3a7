"""The runs of a search: points of a scrambled Sobol sequence, applied to a config as overrides.

The first points of a longer search are those of a shorter one, so that more points can be added later.
"""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vit_jax.config import engine, overrides, schema
from vit_jax.config.schema import checks, ranges
from vit_jax.core.errors import UserError

if TYPE_CHECKING:
  import numpy as np

METHODS = 'sobol:POINTS or halving:POINTS,factor=F,rungs=R'
_BITS = 30  # of a coordinate
_KINDS: dict[str, type[schema.Sobol] | type[schema.Halving]] = {'sobol': schema.Sobol, 'halving': schema.Halving}


def parse(text: str) -> schema.SearchMethod:
  """Returns the method of a text such as `sobol:16` or `halving:16,factor=4,rungs=3`.

  Raises:
    ValueError: another text, a setting that is unknown or given twice, or a number out of range.
  """
  name, colon, rest = text.partition(':')
  if name not in _KINDS:
    raise ValueError(text)
  method = _KINDS[name]()
  unset = set(vars(method))
  for word in f'points={rest}'.split(',') if colon else ():
    setting, _, value = word.partition('=')
    if setting not in unset:  # unknown, or given twice
      raise ValueError(text)
    unset.remove(setting)
    setattr(method, setting, int(value))
  if any(ranges.problems(method)):
    raise ValueError(text)
  return method


def expanded(study: schema.Study, changes: Sequence[str] = (), *, method: schema.SearchMethod | None = None,
             models: engine.Models | None = None) -> schema.Study:
  """Returns a study with the runs of its search, if it has one.

  Args:
    study: the study.
    changes: overrides for all runs, `NAME=VALUE` each.
    method: in place of that of the study.
    models: sizes of models by name.

  Raises:
    UserError: lists all problems of the search, or of overrides.
  """
  search = study.search
  if search is None:
    if method is not None:
      raise UserError('--search: expected a study with ranges of settings, got one without. Set search=Search(base, '
                      'ranges) in its Study; configs/digits_search.py is an example.')
    return study
  search = dataclasses.replace(search, method=method or search.method)
  _check(study, search, changes)
  runs = {}
  for number, point in enumerate(draw(search)):
    of_point = [f'{setting}={text}' for setting, text in point.items()]
    runs[f'point{number:03}'] = overrides.changed({'': search.base}, [*changes, *of_point], models=models)['']
  return dataclasses.replace(study, runs=runs, search=search)


def _check(study: schema.Study, search: schema.Search, changes: Sequence[str]) -> None:
  """Raises UserError with all problems of the settings of a search, and of overrides of what the search chooses."""
  parts = [(prefix, part) for prefix, part in ranges.walk(search, 'search.') if not prefix.startswith('search.base.')]
  problems = [str(problem) for prefix, part in parts for problem in ranges.problems(part, prefix)]
  if not problems:
    problems = [problem for prefix, part in parts
                for problem in checks.combinations(part, search.base, prefix.rstrip('.'))]
  for name in (change.partition('=')[0] for change in changes):
    if name in search.ranges:
      problems.append(f'--config.{name}: expected a setting that the search does not choose, got {name}. Remove it '
                      'from the command, or from the ranges.')
  if problems:
    raise UserError('\n'.join([f'{study.name}: expected a search that can be run, got problems:',
                               *(f'  {problem}' for problem in problems)]))


def draw(search: schema.Search) -> list[dict[str, str]]:
  """Returns the points of a search, each as texts of values by setting: `{'optimizer.lr': '0.001234'}`."""
  points = []
  for shares in sobol(search.method.points, len(search.ranges), search.seed).tolist():
    values = map(_value, search.ranges.values(), shares)
    texts = [str(value).lower() if isinstance(value, bool) else str(value) for value in values]
    points.append(dict(zip(search.ranges, texts, strict=True)))
  return points


def sobol(num: int, dimensions: int, seed: int) -> np.ndarray:
  """Returns points of a Sobol sequence `[num, dimensions]`, inside of (0, 1), scrambled.

  Each coordinate is scrambled by a random linear map of its bits and a random shift (Matoušek 1998), which keeps the
  sequence equally distributed. The random bits are those of PCG64, which are the same with every version of NumPy.
  """
  import numpy as np  # not for every start of the program, whose flags this module parses
  from scipy.stats import qmc
  points = qmc.Sobol(dimensions, scramble=False, bits=_BITS).random_base2(math.ceil(math.log2(max(2, num))))[:num]
  places = np.arange(_BITS)[::-1]  # of the bits, the most significant one first
  bits = (points * 2**_BITS).astype(np.int64)[..., None] >> places & 1  # [num, dimensions, _BITS]
  random_bits = np.random.PCG64(seed).random_raw((dimensions, _BITS, _BITS + 1)) >> np.uint64(63)
  maps = np.tril(random_bits[..., :-1].astype(np.int64), -1) + np.eye(_BITS, dtype=np.int64)
  shifts = random_bits[..., -1].astype(np.int64)
  scrambled = np.einsum('dij,ndj->ndi', maps, bits) + shifts & 1
  return ((scrambled << places).sum(-1) + .5) / 2**_BITS


def _value(distribution: schema.Distribution, share: float) -> Any:
  """Returns the value of a distribution below which there is this share of it, from 0 to 1."""
  match distribution:
    case schema.LogUniform(low, high):
      return min(max(float(f'{low * (high / low)**share:.4g}'), low), high)
    case schema.Uniform(low, high):
      value = round(low + (high - low) * share, 4 - math.floor(math.log10(high - low)))
      return min(max(value, low), high)
    case schema.Integers(low, high):
      return low + math.floor(share * (high - low + 1))
    case schema.Choices(values):
      return values[math.floor(share * len(values))]
