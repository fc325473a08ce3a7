"""What is timed: parts of a run, and of further programs beside it. Imports no jax."""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from vit_jax.config import schema


class Spent(NamedTuple):
  """Seconds until the last of some calls is done: elapsed, and of the processors (this process, all threads)."""
  clock_s: float
  processor_s: float


Part = Callable[[int], Spent]
"""Runs a part this many times in sequence."""


class Others:
  """Further programs to time in the same turns; none, unless a subclass has some."""

  def check(self, config: schema.Config) -> None:
    """Raises UserError if they do not have the network of this config."""

  @contextlib.contextmanager
  def opened(self, config: schema.Config, num_classes: int) -> Iterator[dict[str, Part]]:
    """Yields their parts by the names `PART of PROGRAM`, where PART is one of `own.PARTS`."""
    yield {}
