"""Which examples make up a split: the slice syntax of TFDS, hold-outs, and parts of sources.

`train[:98%]`, `train[-100:]`, `train[:800]+val[:200]`: bounds are examples, or per cent of the split rounded
to the nearest example, counted in the source's fixed order.
"""
from __future__ import annotations

import difflib
import hashlib
import logging
import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray

log = logging.getLogger('vit_jax.data')

SYNONYMS = ('val', 'valid', 'validation')
_BOUND = r'-?\d[\d_]*%?'
_TERM = re.compile(rf'\s*(?P<name>[\w.-]+)\s*(\[\s*(?P<lower>{_BOUND})?\s*:\s*(?P<upper>{_BOUND})?\s*\])?\s*')


class Term(NamedTuple):
  """One `name[lower:upper]`; bounds as written, '' for none."""
  name: str
  lower: str
  upper: str


def parse(text: str) -> list[Term]:
  """The terms of a split such as `train[:98%]+val`.

  Raises:
    UserError: not of that form.
  """
  matches = [_TERM.fullmatch(term) for term in text.split('+')]
  if not all(matches):
    raise UserError(f'the split {text!r} is not understood; right are: train, train[:98%], train[-100:], '
                    'train[:800]+val[:200]')
  return [Term(m['name'], m['lower'] or '', m['upper'] or '') for m in matches if m]


def bounds(term: Term, num_examples: int) -> tuple[int, int]:
  """First and one-past-last example of `term` in a split of `num_examples`.

  Raises:
    UserError: the term is empty or reaches outside of the split.
  """
  start = _position(term.lower, num_examples, default=0)
  stop = _position(term.upper, num_examples, default=num_examples)
  if not 0 <= start < stop <= num_examples:
    raise UserError(f'the split {term.name}[{term.lower}:{term.upper}] is examples {start} to {stop} of '
                    f'{num_examples:,}; it must hold at least one, and lie inside')
  return start, stop


def _position(bound: str, num_examples: int, *, default: int) -> int:
  if not bound:
    return default
  number = int(bound.rstrip('%').replace('_', ''))
  if bound.endswith('%'):
    number = math.floor(number * num_examples / 100 + .5)
  return number + num_examples if bound.startswith('-') else number


def resolve(name: str, known: Iterable[str], *, source: str) -> str:
  """The split of `known` that `name` stands for: itself, a synonym, or validation where `test` lacks.

  Raises:
    UserError: there is none.
  """
  names = sorted(known)
  for other in (name, *(SYNONYMS if name in SYNONYMS else ())):
    if other in names:
      return other
  if name == 'test' and (validation := [n for n in SYNONYMS if n in names]):
    log.warning('%s has no split test; taking %s for it', source, validation[0])
    return validation[0]
  near = difflib.get_close_matches(name, names, n=1)
  hint = f'; did you mean {near[0]}?' if near else ''
  raise UserError(f'{source} has no split {name!r}, only: {", ".join(names)}{hint}')


def scattered(names: Sequence[str], *, seed: int) -> list[int]:
  """Positions of `names` in an order that follows from the names and `seed` alone, classes well mixed."""
  return sorted(range(len(names)), key=lambda i: hashlib.blake2b(
      f'{seed}/{names[i]}'.encode(errors='surrogateescape'), digest_size=8).digest())


def hold_out(labels: HostArray, part: float) -> tuple[HostArray, HostArray]:
  """Splits positions so that every class keeps its share: the first ones of each class are held out.

  Args:
    labels: `[S] i32`, in an order that is already random.
    part: of the examples to hold out, in (0, 1); rounded up in all, by largest remainder in each class. A
      class never gives its only example.

  Returns:
    Positions kept and held out, i64, each in ascending order.
  """
  classes, counts = np.unique(labels, return_counts=True)
  quota = np.minimum(np.floor(counts * part).astype(np.int64), counts - 1)
  missing = min(math.ceil(round(len(labels) * part, 6)) - quota.sum(), np.sum(counts - 1 - quota))
  by_remainder = np.argsort(-(counts * part - quota), kind='stable')
  for place in [c for c in by_remainder if quota[c] < counts[c] - 1][:max(0, missing)]:
    quota[place] += 1
  held = np.zeros(len(labels), bool)
  for name, num in zip(classes, quota, strict=True):
    held[np.flatnonzero(labels == name)[:num]] = True
  return np.flatnonzero(~held), np.flatnonzero(held)
