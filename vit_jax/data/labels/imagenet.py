"""Names of the classes of ImageNet, for weights that do not name their outputs.

The names are lemmas of WordNet 3.0 (`LICENSE_WORDNET`); `tests/data/make_imagenet_names.py` made the lists. The number
of outputs is only a hint: weights with 1,000 outputs may have other classes. So callers of `by_count` state in their
output where the names come from. If the weights store names, `by_ids` also compares the set with the stored names.
"""
from __future__ import annotations

import functools
import importlib.resources
import re
from collections.abc import Sequence
from typing import NamedTuple

_WORDNET_ID = re.compile(r'n\d{8}')  # such as `n01440764`
_MIN_EQUAL = 0.9  # fraction of outputs with equal names: stored names may have other synonyms or another spelling
SETS = {1_000: ('ImageNet-1k', 'imagenet_1k.txt'), 21_843: ('ImageNet-21k', 'imagenet_21k.txt')}
"""Name and file of a set by its number of classes. The order of ImageNet-21k is that of BiT, ViT, AugReg and Mixer."""


class Names(NamedTuple):
  """The name of a set, and for each output in order the WordNet id and the name of its class; no names are equal."""
  title: str
  ids: tuple[str, ...]
  names: tuple[str, ...]

  def lines(self) -> tuple[str, ...]:
    """Returns the classes as lines of a class file, such as `n01440764 tench`."""
    return tuple(f'{wordnet_id} {name}' for wordnet_id, name in zip(self.ids, self.names, strict=True))


@functools.cache
def by_count(num_classes: int) -> Names | None:
  """Returns the set with this number of classes; None if no set has it."""
  if num_classes not in SETS:
    return None
  title, file = SETS[num_classes]
  text = (importlib.resources.files(__package__) / file).read_text(encoding='utf-8')
  rows = [line.split(' ', 1) for line in text.splitlines() if not line.startswith('#')]
  assert len(rows) == num_classes, f'{file}: {len(rows)} classes'
  return Names(title, tuple(row[0] for row in rows), tuple(row[1] for row in rows))


def by_ids(dataset_classes: Sequence[str], num_classes: int, stored_names: Sequence[str]) -> Names | None:
  """Returns the set that a network was probably trained on, for a dataset whose classes are WordNet ids.

  Args:
    dataset_classes: names of the classes of the dataset, such as `n01440764`.
    num_classes: the number of outputs of the network.
    stored_names: names that the weights store for the outputs, such as `tench, Tinca tinca`; () = none.

  Returns:
    The set; None if no class of the dataset is a WordNet id, no set has this number of classes, or fewer than 90 % of
    the stored names are names of the set.
  """
  candidate = by_count(num_classes)
  if candidate is None or not any(_WORDNET_ID.fullmatch(name) for name in dataset_classes):
    return None
  if not stored_names:
    return candidate
  num_equal = 0
  for name, stored_name in zip(candidate.names, stored_names, strict=True):
    synonyms = {synonym.strip().casefold().replace('_', ' ') for synonym in stored_name.split(',')}
    num_equal += name.partition(' (')[0].casefold() in synonyms  # a text in parentheses makes equal names different
  return candidate if num_equal >= _MIN_EQUAL * num_classes else None
