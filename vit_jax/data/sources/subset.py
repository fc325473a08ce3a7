"""Some examples of a source, in any order, and what an example was before it became part of something else."""
from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from vit_jax.core.errors import UserError
from vit_jax.data.image.headers import BadImage
from vit_jax.data.source import Parts, Record, Source, most_labels
from vit_jax.data.sources import system_errors
from vit_jax.data.sources.mixture import Relabelled


class Subset:
  """The examples `rows` of a source."""

  def __init__(self, source: Source, rows: Sequence[int] | np.ndarray, *, name: str) -> None:
    self.name, self.class_names, self._source = name, source.class_names, source
    self._rows = np.asarray(rows, np.int64)
    self.digest = hashlib.sha256(source.digest.encode() + self._rows.tobytes()).hexdigest()

  def __len__(self) -> int:
    return len(self._rows)

  def __getitem__(self, index: int) -> Record:
    return self._source[int(self._rows[index])]

  def label(self, index: int) -> int:
    return self._source.label(int(self._rows[index]))

  def describe(self, index: int) -> str:
    return self._source.describe(int(self._rows[index]))

  @property
  def most_labels(self) -> int:
    return most_labels(self._source)

  def origin(self, index: int) -> tuple[Source, int]:
    """The source that the example comes from, and its place there."""
    return self._source, int(self._rows[index])


def first(source: Source, num: int) -> Source:
  """The first examples of a source, at most `num`; 0 = all of it."""
  if not 0 < num < len(source):
    return source
  return Subset(source, np.arange(num), name=f'{source.name}[:{num}]')


def labels(source: Source) -> np.ndarray:
  """The class of each example, `[S] i32`; a source of records reads them all.

  Raises:
    UserError: a record is damaged, so that its class is not known, or the system does not let it be read.
  """
  found = np.empty(len(source), np.int32)
  for index in range(len(source)):
    try:
      found[index] = source.label(index)
    except BadImage as error:
      raise UserError(f'{source.describe(index)}: expected its class, got a damaged record ({error}). Copy or prepare '
                      'the set again') from error
    except OSError as error:
      raise system_errors.stop(error, source.describe(index)) from error
  return found


def origin(source: Source, index: int) -> tuple[Source, int]:
  """The stored source that an example comes from, and its place there, behind all parts and subsets."""
  while isinstance(source, Parts | Subset | Relabelled):
    if isinstance(source, Relabelled):
      source = source.inner
    else:
      source, index = source.origin(index)
  return source, index
