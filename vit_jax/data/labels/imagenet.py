"""Names of the classes of ImageNet, for weights that do not name their outputs.

The names are lemmas of WordNet 3.0 (`LICENSE_WORDNET`); `tests/data/make_imagenet_names.py` made the lists. The number
of outputs is only a hint: weights with 1,000 outputs may have other classes. So callers of `by_count` say in their
output where the names come from; `by_ids` compares the names of the weights, if they have some.
"""
from __future__ import annotations

import functools
import importlib.resources
import re
from collections.abc import Sequence
from typing import NamedTuple

_ID = re.compile(r'n\d{8}')
_ENOUGH = 0.9  # of the outputs; the names of others differ by synonyms and spelling
SETS = {1_000: ('ImageNet-1k', 'imagenet_1k.txt'), 21_843: ('ImageNet-21k', 'imagenet_21k.txt')}
"""Name and list of a set by its number of classes. 21,843 outputs in this order: BiT, ViT, AugReg and Mixer."""


class Names(NamedTuple):
  """The name of a set, and its classes in the order of the outputs: WordNet ids and names; no two are equal."""
  title: str
  ids: tuple[str, ...]
  names: tuple[str, ...]

  def lines(self) -> tuple[str, ...]:
    """Returns the classes as lines of a class file, such as `n01440764 tench`."""
    return tuple(f'{one} {name}' for one, name in zip(self.ids, self.names, strict=True))


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
  """Returns the set of the outputs of a network that is used with a dataset with WordNet ids such as `n01440764`.

  Args:
    own: classes of the dataset.
    num_classes: outputs of the network.
    class_names: its own names of its outputs; () = none.

  Returns:
    None if no class of the dataset is a WordNet id, no set has this number of classes, or the network names its outputs
    otherwise or by WordNet ids of its own.
  """
  found = by_count(num_classes)
  if found is None or not any(_ID.fullmatch(name) for name in own):
    return None
  if not class_names:
    return found
  synonyms = [{one.strip().casefold().replace('_', ' ') for one in name.split(',')} for name in class_names]
  alike = sum(name.partition(' (')[0].casefold() in own for name, own in zip(found.names, synonyms, strict=True))
  return found if alike >= _ENOUGH * num_classes else None
