"""`mix:0.7*folder:A,0.3*tfds:B`: several sources as one, in given shares.

The training order is a pure function of the seed: it gives each position a source and a row. Positions are grouped
into rounds of 1,000. In each round, source k has exactly its share of the positions, in a random order of this round.
So the number of examples of source k before a position follows without computing earlier rounds. Each source is visited
in its own permutations, each example once per pass. An epoch has as many examples as all sources together.

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
"""The number of positions in a round."""
_COMMA = re.compile(r',(?=\s*[\d.]+\s*\*)')  # a comma before a weight, such as `,0.3*`
_TERM = re.compile(r'\s*(?P<weight>\d*\.?\d+)\s*\*\s*(?P<source>\S.*?)\s*')
FORM = 'mix:WEIGHT*SOURCE,WEIGHT*SOURCE such as mix:0.7*folder:A,0.3*tfds:B'


class Weighted(NamedTuple):
  """A term `WEIGHT*SOURCE`; `source` is text such as `folder:A`."""
  weight: float
  source: str


def parse(text: str) -> list[Weighted]:
  """Returns the terms of `0.7*folder:A,0.3*tfds:B`; weights may have any sum. Raises UserError if one is wrong."""
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
  """The training order of a mixture, with the interface of `order.Visit`.

  For each source, `visits` has the training order, `sizes` the number of examples, `shares` the positions in a round.
  """
  visits: tuple[order.Visit, ...]
  sizes: tuple[int, ...]
  shares: tuple[int, ...]
  seed: int

  def __call__(self, positions: HostArray) -> HostArray:
    """Returns the rows of the mixture at positions `[N]` of the order, `[N] i64`."""
    rounds_N, offsets_N = np.divmod(np.asarray(positions, np.int64), ROUND)
    sources_N, source_positions_N, rows_N = (np.empty_like(rounds_N) for _ in range(3))
    for round_index in np.unique(rounds_N):
      in_round_N = rounds_N == round_index
      round_sources, round_positions = self._draw_round(int(round_index))
      sources_N[in_round_N] = round_sources[offsets_N[in_round_N]]
      source_positions_N[in_round_N] = round_positions[offsets_N[in_round_N]]
    for k, visit in enumerate(self.visits):
      of_source_N = sources_N == k
      rows_N[of_source_N] = visit(source_positions_N[of_source_N]) + sum(self.sizes[:k])
    return rows_N

  def _draw_round(self, round_index: int) -> tuple[HostArray, HostArray]:
    """Returns the source of each position of a round, and the position in the order of that source: `[ROUND] i64`."""
    keys = streams.words(Stream.MIXTURE, self.seed, round_index, num=order.ROUNDS)
    permuted = order.permute(np.arange(ROUND), size=ROUND, keys=keys)
    sources = np.repeat(np.arange(len(self.shares)), self.shares)[permuted]
    positions = np.empty_like(sources)
    for k, share in enumerate(self.shares):
      positions[sources == k] = round_index * share + np.arange(share)
    return sources, positions


class Mixture(Parts):
  """Sources one after the other, with a training order that gives each source its share."""

  def __init__(self, sources: Sequence[Source], weights: Sequence[float], *, name: str,
               class_names: tuple[str, ...], labels: Sequence[Sequence[int]]) -> None:
    """Takes for each source a weight, and `labels [C]`: the numbers of the source's C classes in the mixture."""
    super().__init__([Part(source, labels=tuple(numbers)) for source, numbers in zip(sources, labels, strict=True)],
                     name=name, class_names=class_names)
    self.shares = shares(weights)
    self._sizes = tuple(map(len, sources))
    self.digest = hashlib.sha256(f'{self.digest} {self.shares} {class_names}'.encode()).hexdigest()

  def visit(self, seed: int, batch_size: int) -> Visit:
    """Returns the training order by a seed, for batches of `batch_size` examples."""
    seeds = streams.seeds(Stream.MIXTURE, seed, num=len(self.parts))
    visits = tuple(windows.visit(part.source, source_seed, max(1, batch_size * share // ROUND))
                   for part, source_seed, share in zip(self.parts, seeds, self.shares, strict=True))
    return Visit(visits, self._sizes, self.shares, seed)


def mix(sources: Sequence[Source], weights: Sequence[float], *, name: str, separate: bool) -> Mixture:
  """Returns a mixture; raises UserError as `join_classes`, or if masks are mixed with labels, or with other classes."""
  class_names, labels = join_classes(sources, separate=separate)
  masked = [source for source in sources if has_masks(source)]
  is_renumbered = any(numbers != list(range(len(class_names))) for numbers in labels)
  if masked and (len(masked) < len(sources) or is_renumbered):
    others = [source for source in sources if source is not masked[0]]
    raise UserError(f'data.source: expected images with masks of the same classes in each source of a mixture, or in '
                    f'none, got {masked[0].name}, whose images have masks, beside {others[0].name}. Use one of them '
                    'alone.')
  return Mixture(sources, weights, name=name, class_names=class_names, labels=labels)


def shares(weights: Sequence[float]) -> tuple[int, ...]:
  """Returns the positions of each source in a round, `ROUND` in total: weights, rounded by the largest remainders."""
  exact = np.array(weights, np.float64) / sum(weights) * ROUND
  counts = np.maximum(1, np.floor(exact)).astype(np.int64)
  for k in np.argsort(counts - exact, kind='stable')[:ROUND - counts.sum()]:
    counts[k] += 1
  counts[np.argmax(counts)] += ROUND - counts.sum()  # negative if fractions below 1 were raised to 1
  return tuple(counts.tolist())


def join_classes(sources: Sequence[Source], *, separate: bool) -> tuple[tuple[str, ...], list[list[int]]]:
  """Returns the class names of a mixture, and for each source the new numbers `[C]` of its classes.

  Args:
    sources: the sources of the mixture.
    separate: True = the classes of each source follow those of the sources before it, and a name that several have gets
      the number of its source, `cat (2)`. False = all have the same names, and the order of the first source is used.

  Raises UserError if the names differ without `separate`.
  """
  first = sources[0].class_names
  if not separate:
    for source in sources[1:]:
      if different := set(first) ^ set(source.class_names):
        raise UserError(f'classes of {source.name}: expected those of {sources[0].name}, got {len(different)} that '
                        f'only one of them has, such as {", ".join(sorted(different)[:5])}. Use sources with equal '
                        'classes, or set data.mix_classes=separate, which numbers the classes of each source after '
                        'the others.')
    index_by_name = {name: index for index, name in enumerate(first)}
    return first, [[index_by_name[name] for name in source.class_names] for source in sources]
  sources_and_names = [(k, name) for k, source in enumerate(sources) for name in source.class_names]
  counts = collections.Counter(name for _, name in sources_and_names)
  joined = tuple(f'{name} ({k + 1})' if counts[name] > 1 else name for k, name in sources_and_names)
  bounds = np.cumsum([0] + [len(source.class_names) for source in sources]).tolist()
  return joined, [list(range(start, stop)) for start, stop in itertools.pairwise(bounds)]
