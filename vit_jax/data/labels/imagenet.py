"""Names of the classes of ImageNet, for weights that do not name their outputs.

The names are lemmas of WordNet 3.0 (`LICENSE_WORDNET`); `tests/data/make_imagenet_names.py` made the lists. A number of
outputs is only a hint: weights with 1,000 outputs may have other classes, so whoever uses these names says so.
"""
from __future__ import annotations

import functools
import importlib.resources
from typing import NamedTuple

SETS = {1_000: ('ImageNet-1k', 'imagenet_1k.txt'), 21_843: ('ImageNet-21k', 'imagenet_21k.txt')}
"""Name and list of a set by its number of classes. 21,843 outputs in this order: BiT, ViT, AugReg and Mixer."""


class Names(NamedTuple):
  """The name of a set, and its classes in the order of the outputs: WordNet ids and names, no two alike."""
  title: str
  ids: tuple[str, ...]
  names: tuple[str, ...]


@functools.cache
def by_count(num_classes: int) -> Names | None:
  """The set with this number of classes; None if there is none."""
  if num_classes not in SETS:
    return None
  title, file = SETS[num_classes]
  text = (importlib.resources.files(__package__) / file).read_text(encoding='utf-8')
  rows = [line.split(' ', 1) for line in text.splitlines() if not line.startswith('#')]
  assert len(rows) == num_classes, f'{file}: {len(rows)} classes'
  return Names(title, tuple(row[0] for row in rows), tuple(row[1] for row in rows))
