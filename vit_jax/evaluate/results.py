"""What an evaluator gives: numbers by name, over how many examples, and the guesses behind them.

A result over a part of a split carries that in the name of each number, `top1.partial500`, so that no file, table or
picture made of it can leave it out.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np

from vit_jax.core.types import PyTree

PARTIAL = '.partial'


@dataclasses.dataclass(frozen=True)
class Guesses:
  """Of each example: position in the source, label, most likely classes `[S, k]`, their probabilities."""
  index: np.ndarray
  label: np.ndarray
  top: np.ndarray
  probability: np.ndarray


class Result(NamedTuple):
  """What was measured.

  metrics: by name; fractions, NLL in nats.
  num_examples: that count; undecodable ones do not.
  guesses: row by row, of evaluators that give them.
  headline: the metric that a single number is quoted from; '' = none is a fraction of examples that are right.
  features_s: seconds that taking features took; 0 = none were needed, or they were there.
  """
  metrics: dict[str, float]
  num_examples: int
  guesses: Guesses | None
  headline: str
  features_s: float = 0.

  @property
  def score(self) -> float:
    """The headline's value."""
    return self.metrics[self.headline]

  @property
  def is_partial(self) -> bool:
    """Whether a limit left examples out."""
    return any(PARTIAL in name for name in self.metrics)


class Measuring(Protocol):
  """A `core.api.Evaluator` that also gives what is behind the numbers."""

  def run(self, selected: PyTree, step: int) -> dict[str, float]:
    """The numbers by name. Every process calls it."""
    ...

  def measure(self, selected: PyTree) -> Result:
    """The same, with all that is known."""
    ...


def named(metrics: Mapping[str, float], limit: int) -> dict[str, float]:
  """The numbers under names that say it if they are over at most `limit` examples of a split; 0 = over all."""
  return {mark(name, limit): value for name, value in metrics.items()}


def mark(name: str, limit: int) -> str:
  """The name of a number over at most `limit` examples; 0 = over all."""
  return f'{name}{PARTIAL}{limit}' if limit else name
