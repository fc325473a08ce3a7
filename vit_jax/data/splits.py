"""The examples of a split: the slice syntax of TFDS, and hold-outs.

Slices are `train[:98%]`, `train[-100:]` or `train[:800]+val[:200]`. Their bounds are numbers of examples, or
percentages of the split rounded to the nearest example. Examples are counted in the fixed order of the source.

`data/opening.py` calls `select`, which calls a function of the format to open each complete split by its name. A format
whose data have splits calls `resolve` with that name. A format without splits calls `resolve_part`, puts the images in
the random order that `scattered` returns for their paths, and calls `hold_out`, which takes the same fraction of each
class.
"""
from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from vit_jax.core import documents, globs
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.data.source import Part, Parts, Source, title, warn_once

SYNONYMS = ('val', 'valid', 'validation')
NAMES = ('train', *SYNONYMS, 'test')
"""Names of subfolders that are splits, in a folder of images."""
ALL = 'all'
"""The split with every image, of a source without splits; training holds out a part of the images."""
SETTINGS = 'data.train_split, data.eval_split, or the split of the evaluation'
"""The settings that name splits, for messages. A job with a flag for the split replaces this text in messages."""
_BOUND = r'-?\d[\d_]{0,30}%?'  # such as 100, -1_000 or 98%
_TERM = re.compile(rf'\s*(?P<name>[\w.-]+)\s*(\[\s*(?P<lower>{_BOUND})?\s*:\s*(?P<upper>{_BOUND})?\s*\])?\s*')


class NoSplit(UserError):
  """A source has no split of this name. `known` has the splits of the source; () = not known."""
  known: tuple[str, ...] = ()


class Term(NamedTuple):
  """One term `name[lower:upper]` of a split; a bound is '' if it is not written."""
  name: str
  lower: str
  upper: str


def parse(text: str) -> list[Term]:
  """Returns the terms of a split such as `train[:98%]+val`. Raises UserError if the text has another form."""
  matches = [_TERM.fullmatch(term) for term in text.split('+')]
  if not all(matches):
    raise UserError(f'split: expected a name or a slice such as train, train[:98%], train[-100:] or '
                    f'train[:800]+val[:200], got {text!r}. Write the split in one of these forms.')
  return [Term(match['name'], match['lower'] or '', match['upper'] or '') for match in matches if match]


def bounds(term: Term, num_examples: int) -> tuple[int, int]:
  """Returns the first and one-past-last example of `term` in a split of `num_examples`.

  Raises UserError if the term has no examples or extends beyond the split.
  """
  start = _position(term.lower, num_examples, default=0)
  stop = _position(term.upper, num_examples, default=num_examples)
  if not 0 <= start < stop <= num_examples:
    raise UserError(f'split {term.name}[{term.lower}:{term.upper}]: expected at least one of {num_examples:,} '
                    f'examples, got {start} to {stop}. Choose another part.')
  return start, stop


def _position(bound: str, num_examples: int, *, default: int) -> int:
  if not bound:
    return default
  number = int(bound.rstrip('%').replace('_', ''))
  if bound.endswith('%'):
    number = math.floor(number * num_examples / 100 + .5)
  return number + num_examples if bound.startswith('-') else number


def resolve(name: str, known: Iterable[str], *, source: str) -> str:
  """Returns the split in `known` with this name or a synonym; in place of `test` also validation, with a warning.

  Raises NoSplit if there is no such split.
  """
  names = sorted(known)
  synonyms = [synonym for synonym in SYNONYMS if synonym in names]
  if name in names:
    return name
  if name in SYNONYMS and synonyms:
    return synonyms[0]
  if name == 'test' and synonyms:
    unread = f'; not read: {documents.listed(synonyms[1:], 3)}' if synonyms[1:] else ''
    warn_once(f'{source} has no split test; using {synonyms[0]} instead{unread}.')
    return synonyms[0]
  error = NoSplit(f'split of {source}: expected one of {documents.listed(names, 20)}, got {name!r}.'
                  f'{globs.nearest(name, names)} Change {SETTINGS}.')
  error.known = tuple(names)
  raise error


def resolve_part(name: str, *, source: str) -> str:
  """Returns `train`, `test` (the held-out part) or `all` for the name of a split of a source without splits.

  Raises NoSplit if there is no such split.
  """
  return ALL if name == ALL else resolve('test' if name in SYNONYMS else name, ('train', 'test'), source=source)


def select(open_named: Callable[[str], Source], split: str) -> Source:
  """Opens a split such as `train[:800]+val[:200]`; `open_named` opens a complete split by the name of the split."""
  terms = parse(split)
  parts = list[Part]()
  for term in terms:
    source = open_named(term.name)
    parts.append(Part(source, range(*bounds(term, len(source)))))
  if len(parts) == 1 and not (terms[0].lower or terms[0].upper):
    return parts[0].source
  first = parts[0].source
  where = first.name.rpartition('/')[0]  # the name of a source is WHERE/SPLIT
  is_held_out = title(first) != first.name  # a source without splits has a title for each held-out part
  return Parts(parts, name=f'{where}/{split}', title=f'{where}, split {split}' if is_held_out else '')


def part_title(where: str, split: str, holdout: float) -> str:
  """Returns the title of `train`, `test` or `all` of a source; `holdout` is the fraction of the images in `test`."""
  if split == ALL:
    return where
  return f'{where}, {"all but the" if split == "train" else "the"} {100 * holdout:.3g} % held out'


def scattered(paths: Iterable[bytes], count: int, *, seed: int) -> HostArray:
  """Returns the positions of `count` paths, `[count] i64`, in the fixed random order of the digests of `SEED/PATH`."""
  start = f'{seed}/'.encode()
  keys = (int.from_bytes(hashlib.blake2b(start + path, digest_size=8).digest(), 'big') for path in paths)
  return np.argsort(np.fromiter(keys, np.uint64, count), kind='stable')


def check_holdout(fraction: float) -> None:
  """Raises UserError unless `data.holdout` is between 0 and 1."""
  if not 0 < fraction < 1:
    raise UserError(f'data.holdout: expected a fraction between 0 and 1, such as 0.1, got {fraction}. '
                    'Set such a fraction.')


def hold_out(labels: HostArray, fraction: float) -> tuple[HostArray, HostArray]:
  """Divides the positions in `labels` into kept and held-out positions, the same fraction of every class.

  Args:
    labels: `[S] i32`, in a random order: the first positions of each class are held out.
    fraction: fraction of the examples to hold out, in (0, 1). The total number is rounded up. The number for each class
      is rounded down, then the classes with the largest remainders get one more. Each class keeps at least one example.

  Returns:
    Positions kept and positions held out, i64, each in ascending order.
  """
  classes, counts = np.unique(labels, return_counts=True)
  num_held_out = np.minimum(np.floor(counts * fraction).astype(np.int64), counts - 1)
  num_missing = min(math.ceil(round(len(labels) * fraction, 6)) - num_held_out.sum(), np.sum(counts - 1 - num_held_out))
  by_remainder = np.argsort(-(counts * fraction - num_held_out), kind='stable')
  with_spare = [number for number in by_remainder if num_held_out[number] < counts[number] - 1]
  num_held_out[with_spare[:max(0, num_missing)]] += 1
  is_held_out = np.zeros(len(labels), bool)
  for label, num in zip(classes, num_held_out, strict=True):
    is_held_out[np.flatnonzero(labels == label)[:num]] = True
  return np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)
