"""Several sources as one, in given shares: `mix:0.7*folder:A,0.3*tfds:B`.

Which source comes when is a pure function of (seed, position), as everything about the order is. Positions are
taken in rounds of 1,000; in each round source k has its share of the places, exactly, and the places are in a
random order of the round's own. So the count of source k at any position follows without the rounds before it, and
each source is visited in permutations of its own, each of its examples once a pass, however the sizes compare.
An epoch of a mixture is as many examples as its sources hold.
"""
from __future__ import annotations

import collections
import dataclasses
import hashlib
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.data.pipeline import order
from vit_jax.data.source import Part, Parts, Record, Source, most_labels

ROUND = 1_000
_MIX = 3  # keeps this stream apart from the others of a seed (`order`)
_COMMA = re.compile(r',(?=\s*[\d.]+\s*\*)')
_TERM = re.compile(r'\s*(?P<weight>\d*\.?\d+)\s*\*\s*(?P<source>\S.*?)\s*')
FORM = 'mix:WEIGHT*SOURCE,WEIGHT*SOURCE such as mix:0.7*folder:A,0.3*tfds:B'


class Weighted(NamedTuple):
  """A source by name, and its share."""
  weight: float
  source: str


def parse(text: str) -> list[Weighted]:
  """The terms of `0.7*folder:A,0.3*tfds:B`; weights need not add up to 1.

  Raises:
    UserError: not of that form, or a share that is no share.
  """
  matches = [_TERM.fullmatch(term) for term in _COMMA.split(text)]
  if len(matches) < 2 or not all(matches):
    raise UserError(f'the data source mix:{text} is not understood; right would be {FORM}')
  terms = [Weighted(float(m['weight']), m['source']) for m in matches if m]
  total = sum(t.weight for t in terms)
  for term in terms:
    if term.source.startswith('mix:'):
      raise UserError(f'{term.source!r} is a mixture inside of one; right would be all sources in one list')
    if not total or term.weight / total < 1 / ROUND:
      raise UserError(f'the weight {term.weight:g} of {term.source} is less than a thousandth of all; right would '
                      'be a larger one, or to leave the source out')
  return terms


@dataclasses.dataclass(frozen=True)
class Visit:
  """The order of a mixture: an `order.Visit` over the sources one after the other."""
  sizes: tuple[int, ...]
  shares: tuple[int, ...]
  seed: int

  def __call__(self, positions: HostArray) -> HostArray:
    rounds, places = np.divmod(np.asarray(positions, np.int64), ROUND)
    chosen, nth, indexes = np.empty_like(places), np.empty_like(places), np.empty_like(places)
    for number in np.unique(rounds):
      here = rounds == number
      sources, counts = self._round(int(number))
      chosen[here], nth[here] = sources[places[here]], counts[places[here]]
    seeds = np.random.SeedSequence([_MIX, self.seed]).generate_state(len(self.sizes)).tolist()
    for k, size in enumerate(self.sizes):
      own = chosen == k
      indexes[own] = order.shuffled(nth[own], num_examples=size, seed=seeds[k]) + sum(self.sizes[:k])
    return indexes

  def _round(self, number: int) -> tuple[HostArray, HostArray]:
    """For each place of a round, its source, and how many examples of that source came before: `[ROUND] i64`."""
    keys = np.random.SeedSequence([_MIX, self.seed, number]).generate_state(order.ROUNDS, np.uint64)
    slots = order.permute(np.arange(ROUND), size=ROUND, keys=keys)
    sources = np.repeat(np.arange(len(self.shares)), self.shares)[slots]
    counts = np.empty_like(sources)
    for k, share in enumerate(self.shares):
      counts[sources == k] = number * share + np.arange(share)
    return sources, counts


class Mixture:
  """Sources one after the other, with an order that gives each its share."""

  def __init__(self, sources: Sequence[Source], weights: Sequence[float], *, name: str,
               class_names: tuple[str, ...], labels: Sequence[HostArray]) -> None:
    """Takes for each source its weight, and `labels [C] i32`: what its classes are called here."""
    self.name, self.class_names = name, class_names
    self._sources = Relabelled.all(sources, labels, class_names)
    self._rows = Parts([Part(s, 0, len(s)) for s in self._sources], name=name)
    self.shares = shares(weights)
    self.digest = hashlib.sha256(f'{self._rows.digest} {self.shares} {class_names}'.encode()).hexdigest()

  def __len__(self) -> int:
    return len(self._rows)

  def __getitem__(self, index: int) -> Record:
    return self._rows[index]

  def label(self, index: int) -> int:
    return self._rows.label(index)

  def describe(self, index: int) -> str:
    return self._rows.describe(index)

  @property
  def most_labels(self) -> int:
    return self._rows.most_labels

  def visit(self, seed: int) -> Visit:
    """The order of training."""
    return Visit(tuple(len(s) for s in self._sources), self.shares, seed)


class Relabelled:
  """A source whose classes are numbered otherwise."""

  def __init__(self, source: Source, labels: HostArray, class_names: tuple[str, ...]) -> None:
    self.name, self.class_names = source.name, class_names
    self.inner, self._labels = source, labels
    self.digest = hashlib.sha256(f'{source.digest} {labels.tolist()}'.encode()).hexdigest()

  @classmethod
  def all(cls, sources: Sequence[Source], labels: Sequence[HostArray],
          class_names: tuple[str, ...]) -> list[Relabelled]:
    return [cls(s, x, class_names) for s, x in zip(sources, labels, strict=True)]

  def __len__(self) -> int:
    return len(self.inner)

  def __getitem__(self, index: int) -> Record:
    record = self.inner[index]
    if record.labels is not None:
      return Record.multilabel(record.image, [int(self._labels[c]) for c in record.labels])
    return record._replace(label=int(self._labels[record.label]))

  def label(self, index: int) -> int:
    label = self.inner.label(index)
    return int(self._labels[label]) if label >= 0 else label

  @property
  def most_labels(self) -> int:
    return most_labels(self.inner)

  def describe(self, index: int) -> str:
    return self.inner.describe(index)


def shares(weights: Sequence[float]) -> tuple[int, ...]:
  """Places of each source in a round: whole numbers nearest to the weights, `ROUND` in all."""
  exact = np.array(weights, np.float64) / sum(weights) * ROUND
  found = np.maximum(1, np.floor(exact)).astype(np.int64)
  for place in np.argsort(found - exact, kind='stable')[:ROUND - found.sum()]:
    found[place] += 1
  found[np.argmax(found)] += ROUND - found.sum()
  return tuple(found.tolist())


def join_classes(sources: Sequence[Source], *, apart: bool) -> tuple[tuple[str, ...], list[HostArray]]:
  """Names of the classes of a mixture, and for each source the new numbers `[C] i32` of its classes.

  Args:
    sources: to be mixed.
    apart: the classes of each source follow those of the sources before it, and equal names get the number of
      their source; otherwise all must have the same names, in any order, and go by the first.

  Raises:
    UserError: the names differ.
  """
  first = sources[0].class_names
  if not apart:
    for source in sources[1:]:
      if odd := set(first) ^ set(source.class_names):
        raise UserError(f'{sources[0].name} and {source.name} do not have the same classes: {len(odd)} are in one '
                        f'only, such as {", ".join(sorted(odd)[:5])}; right would be sources that agree, or '
                        'data.mix_classes=separate, which numbers the classes of each source after the others')
    numbers = {name: i for i, name in enumerate(first)}
    return first, [np.array([numbers[n] for n in s.class_names], np.int32) for s in sources]
  names = [(k, n) for k, s in enumerate(sources) for n in s.class_names]
  often = collections.Counter(n for _, n in names)
  joined = tuple(f'{n} ({k + 1})' if often[n] > 1 else n for k, n in names)
  starts = np.cumsum([0] + [len(s.class_names) for s in sources])
  return joined, [np.arange(len(s.class_names), dtype=np.int32) + start
                  for s, start in zip(sources, starts.astype(np.int32), strict=False)]
