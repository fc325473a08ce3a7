"""Names of the classes of ImageNet, for weights that do not name their outputs.

The names are lemmas of WordNet 3.0 (`LICENSE_WORDNET`); `tests/data/make_imagenet_names.py` made the lists. The number
of outputs is only a hint: weights with 1,000 outputs may have other classes. So callers of `by_count` state in their
output where the names come from. `by_ids` also compares them with the names that the weights store, if they do.
"""
from __future__ import annotations

import functools
import importlib.resources
import re
from collections.abc import Sequence
from typing import NamedTuple

_WORDNET_ID = re.compile(r'n\d{8}')  # such as `n01440764`
_MIN_EQUAL = 0.9  # fraction of outputs with equal names; some names differ in synonyms and spelling
SETS = {1_000: ('ImageNet-1k', 'imagenet_1k.txt'), 21_843: ('ImageNet-21k', 'imagenet_21k.txt')}
"""Name and file of a set by its number of classes. The order of ImageNet-21k is that of BiT, ViT, AugReg and Mixer."""


class Names(NamedTuple):
  """The name of a set, and its classes in the order of the outputs: WordNet ids and names; no two are equal."""
  title: str
  ids: tuple[str, ...]
  names: tuple[str, ...]

  def lines(self) -> tuple[str, ...]:
    """Returns the classes as lines of a class file, such as `n01440764 tench`."""
    return tuple(f'{wordnet_id} {name}' for wordnet_id, name in zip(self.ids, self.names, strict=True))


@functools.cache
def by_count(num_classes: int) -> Names | None:
  """Returns the set with this number of classes; None if there is none."""
  if num_classes not in SETS:
    return None
  title, file = SETS[num_classes]
  text = (importlib.resources.files(__package__) / file).read_text(encoding='utf-8')
  rows = [line.split(' ', 1) for line in text.splitlines() if not line.startswith('#')]
  assert len(rows) == num_classes, f'{file}: {len(rows)} classes'
  return Names(title, tuple(row[0] for row in rows), tuple(row[1] for row in rows))


def by_ids(own: Sequence[str], num_classes: int, class_names: Sequence[str]) -> Names | None:
  """Returns the set that a network was probably trained on, for a dataset whose classes are WordNet ids.

  Args:
    own: classes of the dataset, such as `n01440764`.
    num_classes: outputs of the network.
    class_names: names that the weights store for the outputs, such as `tench, Tinca tinca`; () = none.

  Returns:
    The set; None if no class of the dataset is a WordNet id, no set has this number of classes, or fewer than 90 % of
    the stored names are names of the set.
  """
  names = by_count(num_classes)
  if names is None or not any(_WORDNET_ID.fullmatch(name) for name in own):
    return None
  if not class_names:
    return names
  num_equal = 0
  for name, class_name in zip(names.names, class_names, strict=True):
    synonyms = {synonym.strip().casefold().replace('_', ' ') for synonym in class_name.split(',')}
    num_equal += name.partition(' (')[0].casefold() in synonyms  # names are unique by a text in parentheses
  return names if num_equal >= _MIN_EQUAL * num_classes else None
