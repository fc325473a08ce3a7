"""Labels of stored examples as arrays of an index: numbers or names of classes, one or several of each example.

Imports no jax, as processes that index files start with this module.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
  from vit_jax.core.types import HostArray

MISSING = -2**62
"""Label of an example whose label is missing or damaged."""
Labels = tuple[int | str, ...] | list[int | str]
"""Those of an example: a tuple of one, or a list if examples may have several."""


class Stored(Protocol):
  """What an index has of labels.

  labels: numbers, or places in `texts`, `[L] i64`; `MISSING` if there is none.
  label_ends: `[S] i64`; empty if each example has one label.
  texts, text_ends: names of classes, sorted, `[bytes] u8`, and their ends `[C] i64`; empty if labels are numbers.
  """
  @property
  def labels(self) -> HostArray:
    ...

  @property
  def label_ends(self) -> HostArray:
    ...

  @property
  def texts(self) -> HostArray:
    ...

  @property
  def text_ends(self) -> HostArray:
    ...


def join(found: Sequence[Labels | None]) -> dict[str, HostArray]:
  """Returns the arrays of `Stored` by name, for the labels of each example; None if they are missing or damaged."""
  values = {value for label in found for value in label or ()}
  texts = sorted({str(value) for value in values}) if any(isinstance(value, str) for value in values) else []
  places = {text: place for place, text in enumerate(texts)}
  is_single = not any(isinstance(label, list) for label in found)
  flat = [places[str(value)] if texts and value != MISSING else int(value)
          for label in found for value in ((MISSING,) if label is None else label)]
  encoded = [text.encode(errors='surrogatepass') for text in texts]
  has_labels = any(label is not None for label in found)
  return {'labels': np.array(flat if has_labels else [], np.int64),
          'label_ends': np.array([], np.int64) if is_single or not has_labels else
          np.cumsum([1 if label is None else len(label) for label in found]),
          'texts': np.frombuffer(b''.join(encoded), np.uint8),
          'text_ends': np.cumsum([len(text) for text in encoded], dtype=np.int64)}


def of(index: Stored, example: int) -> list[int]:
  """Returns the labels of an example; none if there are no labels at all."""
  if not len(index.label_ends):
    return index.labels[example:example + 1].tolist()
  start = int(index.label_ends[example - 1]) if example else 0
  return index.labels[start:int(index.label_ends[example])].tolist()


def class_texts(index: Stored) -> list[str]:
  """Returns the names of the classes; none if labels are numbers."""
  starts = [0, *index.text_ends.tolist()]
  return [index.texts[a:b].tobytes().decode(errors='surrogatepass') for a, b in zip(starts, starts[1:], strict=False)]


def are_valid(index: Stored, num: int) -> bool:
  """Returns whether arrays that were kept can be the labels of so many examples."""
  ends = ((index.text_ends, len(index.texts)), (index.label_ends, len(index.labels)))
  return (all(are_ends(one, last) for one, last in ends) and len(index.label_ends) in (0, num)
          and (len(index.label_ends) > 0 or len(index.labels) in (0, num)))


def are_ends(ends: HostArray, last: int) -> bool:
  """Returns whether an array can be the ends of parts that are `last` long together; it may be empty."""
  return not len(ends) or bool(ends[0] >= 0 and ends[-1] == last and (np.diff(ends) >= 0).all())
