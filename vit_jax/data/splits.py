"""The examples of a split: the slice syntax of TFDS, and hold-outs.

Slices are `train[:98%]`, `train[-100:]` or `train[:800]+val[:200]`. Their bounds are numbers of examples, or
percentages of the split rounded to the nearest example. Examples are counted in the fixed order of the source.

`data/opening.py` calls `select`, the main entry point, which has the format open each complete split by its name. A
format whose data have splits calls `resolve` for the name. A format without splits calls `resolve_part`, puts the
images in the random order that `scattered` returns for their paths, and calls `hold_out`, which takes the same fraction
of each class.
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
"""Every image of a source without splits, a part of which is held out in training."""
SETTINGS = 'data.train_split, data.eval_split, or the split of the evaluation'
"""The settings that name splits; a job with a flag for it replaces this in messages."""
_BOUND = r'-?\d[\d_]{0,30}%?'  # such as 100, -1_000 or 98%
_TERM = re.compile(rf'\s*(?P<name>[\w.-]+)\s*(\[\s*(?P<lower>{_BOUND})?\s*:\s*(?P<upper>{_BOUND})?\s*\])?\s*')


class NoSplit(UserError):
  """A source has no split of this name; `known` has its splits, () if they are not known."""
  known: tuple[str, ...] = ()


class Term(NamedTuple):
  """One `name[lower:upper]`; the bounds are the text between the brackets, '' if not given."""
  name: str
  lower: str
  upper: str


def parse(text: str) -> list[Term]:
  """Returns the terms of a split such as `train[:98%]+val`.

  Raises:
    UserError: the text has another form.
  """
  matches = [_TERM.fullmatch(term) for term in text.split('+')]
  if not all(matches):
    raise UserError(f'split: expected a name or a slice such as train, train[:98%], train[-100:] or '
                    f'train[:800]+val[:200], got {text!r}. Write the split in one of these forms.')
  return [Term(match['name'], match['lower'] or '', match['upper'] or '') for match in matches if match]


def bounds(term: Term, num_examples: int) -> tuple[int, int]:
  """Returns the first and one-past-last example of `term` in a split of `num_examples`.

  Raises:
    UserError: the term is empty or extends beyond the split.
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
  """Returns the split of `known` for `name`: itself, or a synonym, or (with a warning) validation in place of `test`.

  Raises:
    NoSplit: there is no such split.
  """
  names = sorted(known)
  for other in (name, *(SYNONYMS if name in SYNONYMS else ())):
    if other in names:
      return other
  if name == 'test' and (validation := [other for other in SYNONYMS if other in names]):
    unread = f'; not read: {documents.listed(validation[1:], 3)}' if validation[1:] else ''
    warn_once(f'{source} has no split test; using {validation[0]} instead{unread}.')
    return validation[0]
  error = NoSplit(f'split of {source}: expected one of {documents.listed(names, 20)}, got {name!r}.'
                  f'{globs.nearest(name, names)} Change {SETTINGS}.')
  error.known = tuple(names)
  raise error


def resolve_part(name: str, *, source: str) -> str:
  """Returns `train`, `test` or `all` for the name of a split of a source without splits, of which `test` is held out.

  Raises:
    NoSplit: there is no such split.
  """
  return ALL if name == ALL else resolve('test' if name in SYNONYMS else name, ('train', 'test'), source=source)


def select(open_named: Callable[[str], Source], split: str) -> Source:
  """Opens a split such as `train[:800]+val[:200]`; `open_named` opens a complete split by its name."""
  terms = parse(split)
  parts = list[Part]()
  for term in terms:
    source = open_named(term.name)
    parts.append(Part(source, range(*bounds(term, len(source)))))
  if len(parts) == 1 and not (terms[0].lower or terms[0].upper):
    return parts[0].source
  first = parts[0].source
  where = first.name.rpartition('/')[0]  # the name of a source is WHERE/SPLIT
  is_held_out = title(first) != first.name  # such a source has a title of its own, as `where` has no folders for splits
  return Parts(parts, name=f'{where}/{split}', title=f'{where}, split {split}' if is_held_out else '')


def part_title(where: str, split: str, holdout: float) -> str:
  """Returns the title of `train`, `test` or `all` of a source whose fraction `holdout` of the images is `test`."""
  if split == ALL:
    return where
  return f'{where}, {"all but the" if split == "train" else "the"} {100 * holdout:.3g} % held out'


def scattered(paths: Iterable[bytes], count: int, *, seed: int) -> HostArray:
  """Returns the positions of `count` paths, `[count] i64`, in the fixed random order of the digests of `SEED/PATH`."""
  start = f'{seed}/'.encode()
  keys = (int.from_bytes(hashlib.blake2b(start + path, digest_size=8).digest(), 'big') for path in paths)
  return np.argsort(np.fromiter(keys, np.uint64, count), kind='stable')


def check_holdout(fraction: float) -> None:
  """Raises UserError if `data.holdout` is no fraction of the images that can be held out."""
  if not 0 < fraction < 1:
    raise UserError(f'data.holdout: expected a fraction between 0 and 1, such as 0.1, got {fraction}. '
                    'Set such a fraction.')


def hold_out(labels: HostArray, part: float) -> tuple[HostArray, HostArray]:
  """Divides the positions in `labels`: of each class, the first ones are held out, the same fraction of every class.

  Args:
    labels: `[S] i32`, in an order that is already random.
    part: fraction of the examples to hold out, in (0, 1). Their total number is rounded up. The numbers of the classes
      are rounded down, and the classes with the largest remainders have one more. A class keeps at least one example.

  Returns:
    Positions kept and held out, i64, each in ascending order.
  """
  classes, counts = np.unique(labels, return_counts=True)
  quota = np.minimum(np.floor(counts * part).astype(np.int64), counts - 1)
  missing = min(math.ceil(round(len(labels) * part, 6)) - quota.sum(), np.sum(counts - 1 - quota))
  by_remainder = np.argsort(-(counts * part - quota), kind='stable')
  with_spare = [number for number in by_remainder if quota[number] < counts[number] - 1]
  quota[with_spare[:max(0, missing)]] += 1
  is_held_out = np.zeros(len(labels), bool)
  for label, num in zip(classes, quota, strict=True):
    is_held_out[np.flatnonzero(labels == label)[:num]] = True
  return np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)
