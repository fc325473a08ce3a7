"""`mix:0.7*folder:A,0.3*tfds:B`: several sources as one, in given shares.

The source at each position is a pure function of (seed, position), like all of the order. Positions are grouped into
rounds of 1,000; in each round source k has exactly its share of the positions, in a random order of this round. So the
count of source k at any position is known without the rounds before it, and each source is visited in its own
permutations, each of its examples once per pass, for any sizes. An epoch of a mixture has as many examples as its
sources together.

`data/opening.py` calls `parse`, opens each source, and calls `mix`. The loader calls `Mixture.visit` for the order.
"""
from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.core import streams
from vit_jax.core.errors import UserError
from vit_jax.core.streams import Stream
from vit_jax.core.types import HostArray
from vit_jax.data import order, windows
from vit_jax.data.source import Part, Parts, Source, has_masks

ROUND = 1_000
_COMMA = re.compile(r',(?=\s*[\d.]+\s*\*)')
_TERM = re.compile(r'\s*(?P<weight>\d*\.?\d+)\s*\*\s*(?P<source>\S.*?)\s*')
FORM = 'mix:WEIGHT*SOURCE,WEIGHT*SOURCE such as mix:0.7*folder:A,0.3*tfds:B'


class Weighted(NamedTuple):
  """The name of a source, and its share."""
  weight: float
  source: str


def parse(text: str) -> list[Weighted]:
  """Returns the terms of `0.7*folder:A,0.3*tfds:B`; weights need not sum to 1.

  Raises:
    UserError: the text has another form, or a weight is too small.
  """
  matches = [_TERM.fullmatch(term) for term in _COMMA.split(text)]
  if len(matches) < 2 or not all(matches):
    raise UserError(f'data.source: expected {FORM}, got mix:{text}. '
                    'Write each source as WEIGHT*SOURCE, with commas between them.')
  terms = [Weighted(float(match['weight']), match['source']) for match in matches if match]
  total = sum(term.weight for term in terms)
  for term in terms:
    if term.source.startswith('mix:'):
      raise UserError(f'data.source: expected all sources of a mixture in one list, got {term.source!r} inside of it. '
                      'Write its sources into the outer list.')
    if not total or term.weight / total < 1 / ROUND:
      raise UserError(f'data.source: expected weights of at least 0.001 of their sum, got {term.weight:g} for '
                      f'{term.source}. Set a larger weight, or remove the source.')
  return terms


@dataclasses.dataclass(frozen=True)
class Visit:
  """The order of a mixture: an `order.Visit` over the concatenated sources, made of that of each source."""
  visits: tuple[order.Visit, ...]
  sizes: tuple[int, ...]
  shares: tuple[int, ...]
  seed: int

  def __call__(self, positions: HostArray) -> HostArray:
    """Returns the rows of the mixture at positions of the order, `[N] i64`."""
    rounds, in_round = np.divmod(np.asarray(positions, np.int64), ROUND)
    source, count, rows = np.empty_like(in_round), np.empty_like(in_round), np.empty_like(in_round)
    for number in np.unique(rounds):
      is_here = rounds == number
      sources, counts = self._round(int(number))
      source[is_here], count[is_here] = sources[in_round[is_here]], counts[in_round[is_here]]
    for k, visit in enumerate(self.visits):
      is_of_k = source == k
      rows[is_of_k] = visit(count[is_of_k]) + sum(self.sizes[:k])
    return rows

  def _round(self, number: int) -> tuple[HostArray, HostArray]:
    """Returns for each position of a round its source, and how many examples of it were before: `[ROUND] i64`."""
    keys = streams.words(Stream.MIXTURE, self.seed, number, num=order.ROUNDS)
    permuted = order.permute(np.arange(ROUND), size=ROUND, keys=keys)
    sources = np.repeat(np.arange(len(self.shares)), self.shares)[permuted]
    counts = np.empty_like(sources)
    for k, share in enumerate(self.shares):
      counts[sources == k] = number * share + np.arange(share)
    return sources, counts


class Mixture(Parts):
  """Sources one after the other, with an order that gives each its share."""

  def __init__(self, sources: Sequence[Source], weights: Sequence[float], *, name: str,
               class_names: tuple[str, ...], labels: Sequence[Sequence[int]]) -> None:
    """Takes for each source its weight, and `labels [C]`: the numbers of its classes here."""
    super().__init__([Part(source, labels=tuple(numbers)) for source, numbers in zip(sources, labels, strict=True)],
                     name=name, class_names=class_names)
    self.shares, self._sizes = shares(weights), tuple(map(len, sources))
    self.digest = hashlib.sha256(f'{self.digest} {self.shares} {class_names}'.encode()).hexdigest()

  def visit(self, seed: int, batch_size: int) -> Visit:
    """Returns the order of training."""
    seeds = streams.seeds(Stream.MIXTURE, seed, num=len(self.parts))
    visits = tuple(windows.visit(part.source, source_seed, max(1, batch_size * share // ROUND))
                   for part, source_seed, share in zip(self.parts, seeds, self.shares, strict=True))
    return Visit(visits, self._sizes, self.shares, seed)


def mix(sources: Sequence[Source], weights: Sequence[float], *, name: str, separate: bool) -> Mixture:
  """Returns a mixture; see `join_classes` for `separate`.

  Raises:
    UserError: the classes differ, or the images of some sources have masks.
  """
  class_names, labels = join_classes(sources, separate=separate)
  masked = [source for source in sources if has_masks(source)]
  if masked and (len(masked) < len(sources) or labels != [list(range(len(class_names)))] * len(sources)):
    others = [source for source in sources if source is not masked[0]]
    raise UserError(f'data.source: expected images with masks of the same classes in each source of a mixture, or in '
                    f'none, got {masked[0].name}, whose images have masks, beside {others[0].name}. Use one of them '
                    'alone.')
  return Mixture(sources, weights, name=name, class_names=class_names, labels=labels)


def shares(weights: Sequence[float]) -> tuple[int, ...]:
  """Returns the examples of each source in a round: integers nearest to the weights, with the sum `ROUND`."""
  exact = np.array(weights, np.float64) / sum(weights) * ROUND
  counts = np.maximum(1, np.floor(exact)).astype(np.int64)
  for k in np.argsort(counts - exact, kind='stable')[:ROUND - counts.sum()]:
    counts[k] += 1
  counts[np.argmax(counts)] += ROUND - counts.sum()
  return tuple(counts.tolist())


def join_classes(sources: Sequence[Source], *, separate: bool) -> tuple[tuple[str, ...], list[list[int]]]:
  """Returns the class names of a mixture, and for each source the new numbers `[C]` of its classes.

  Args:
    sources: to be mixed.
    separate: the classes of each source follow those of the sources before it, and repeated names get the number of
      their source; otherwise all must have the same names, in any order, and the order of the first source is used.

  Raises:
    UserError: the names differ.
  """
  first = sources[0].class_names
  if not separate:
    for source in sources[1:]:
      if odd := set(first) ^ set(source.class_names):
        raise UserError(f'classes of {source.name}: expected those of {sources[0].name}, got {len(odd)} that only one '
                        f'of them has, such as {", ".join(sorted(odd)[:5])}. Use sources with equal classes, or set '
                        'data.mix_classes=separate, which numbers the classes of each source after the others.')
    numbers = {name: number for number, name in enumerate(first)}
    return first, [[numbers[name] for name in source.class_names] for source in sources]
  names = [(k, name) for k, source in enumerate(sources) for name in source.class_names]
  counts = collections.Counter(name for _, name in names)
  joined = tuple(f'{name} ({k + 1})' if counts[name] > 1 else name for k, name in names)
  starts = np.cumsum([0] + [len(source.class_names) for source in sources]).tolist()
  return joined, [list(range(start, stop)) for start, stop in itertools.pairwise(starts)]
