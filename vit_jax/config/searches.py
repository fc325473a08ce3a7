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
    ValueError: it is another text, or a number is out of range.
  """
  name, _, rest = text.partition(':')
  words = [word.partition('=') for word in (f'points={rest}' if rest else '').split(',') if word]
  method = _KINDS[name](**{key: int(value) for key, _, value in words}) if name in _KINDS else None
  if method is None or any(ranges.problems(method)):
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
  points = {f'point{number:03}': point for number, point in enumerate(draw(search))}
  runs = {name: overrides.changed({'': search.base}, [*changes, *(f'{key}={text}' for key, text in point.items())],
                                models=models)[''] for name, point in points.items()}
  return dataclasses.replace(study, runs=runs, search=search)


def _check(study: schema.Study, search: schema.Search, changes: Sequence[str]) -> None:
  found = [str(problem) for prefix, part in ranges.walk(search, 'search.') if not prefix.startswith('search.base.')
           for problem in ranges.problems(part, prefix)]
  found = found or [text for prefix, part in ranges.walk(search, 'search.') if not prefix.startswith('search.base.')
                    for text in checks.combinations(part, search.base, prefix.rstrip('.'))]
  given = [one.partition('=')[0] for one in changes]
  found += [f'--config.{name}: expected a setting that the search does not choose, got {name}. Remove it from the '
            'command, or from the ranges.' for name in given if name in search.ranges]
  if found:
    raise UserError('\n'.join([f'{study.name}: expected a search that can be run, got problems:',
                               *(f'  {one}' for one in found)]))


def draw(search: schema.Search) -> list[dict[str, str]]:
  """Returns the points of a search: texts of values by setting."""
  shares = sobol(search.method.points, len(search.ranges), search.seed)
  points = [{name: _value(kind, float(share)) for (name, kind), share in zip(search.ranges.items(), row, strict=True)}
            for row in shares]
  return [{name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in point.items()}
          for point in points]


def sobol(num: int, dimensions: int, seed: int) -> np.ndarray:
  """Returns points of a Sobol sequence `[num, dimensions]`, inside of (0, 1), scrambled.

  Each coordinate is scrambled by a random linear map of its bits and a random shift (Matoušek 1998), which keeps the
  sequence equally distributed. The random bits are those of PCG64, which are the same with every version of NumPy.
  """
  import numpy as np  # not for every start of the program, whose flags this module parses
  from scipy.stats import qmc
  plain = qmc.Sobol(dimensions, scramble=False, bits=_BITS).random_base2(math.ceil(math.log2(max(2, num))))[:num]
  places = np.arange(_BITS)[::-1]
  bits = (plain * 2**_BITS).astype(np.int64)[..., None] >> places & 1
  raw = np.random.PCG64(seed).random_raw((dimensions, _BITS, _BITS + 1)) >> np.uint64(63)
  maps = np.tril(raw[..., :-1].astype(np.int64), -1) + np.eye(_BITS, dtype=np.int64)
  mixed = np.einsum('dij,ndj->ndi', maps, bits) + raw[..., -1].astype(np.int64) & 1
  return ((mixed << places).sum(-1) + .5) / 2**_BITS


def _value(kind: schema.Distribution, share: float) -> Any:
  """Returns the value of a distribution below which there is this share of it."""
  match kind:
    case schema.LogUniform(low, high):
      return min(max(float(f'{low * (high / low)**share:.4g}'), low), high)
    case schema.Uniform(low, high):
      value = round(low + (high - low) * share, 4 - math.floor(math.log10(high - low)))
      return min(max(value, low), high)
    case schema.Integers(low, high):
      return low + math.floor(share * (high - low + 1))
    case schema.Choices(values):
      return values[math.floor(share * len(values))]
