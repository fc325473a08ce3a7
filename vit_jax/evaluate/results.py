"""Results of evaluators: metrics by name, the number of examples, and the predictions.

For a truncated split the name of each metric contains the limit, `top1.partial500`, so that every file, table or figure
with the metric shows it.
"""
from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from vit_jax.core.types import PyTree

PARTIAL = '.partial'


def is_share(name: str) -> bool:
  """Returns whether a metric is a share, such as an accuracy: `test/top1@ema`, `few/10shot_std`, `train/accuracy`."""
  known = (r'(.+/)?(top\d+|recall\d+|\d+shot|(\w+_)?accuracy|m?iou|held_out(?!_nll)|class_mean|ece|mfu|map|auroc|f1)'
           r'([._].*)?(@.*)?')
  return re.fullmatch(known, name) is not None


@dataclasses.dataclass(frozen=True)
class Guesses:
  """Predictions for each example: position in the source, label, most likely classes `[S, k]`, their probabilities.

  The label of an example with several is the predicted class if that is one of them; `is_single`: none has several.
  """
  index: np.ndarray
  label: np.ndarray
  top: np.ndarray
  probability: np.ndarray
  is_single: bool = True


class Low(NamedTuple):
  """A metric that is too low for a network of use: its value, the limit, the limit's setting, and what to do."""
  metric: str
  value: float
  below: float
  setting: str
  advice: str


class Result(NamedTuple):
  """The result of an evaluator.

  metrics: by name; fractions, NLL in nats.
  num_examples: number of valid examples; images that could not be decoded are not valid.
  guesses: predictions by row, of evaluators that return them.
  headline: name of the main metric; '' = no metric is an accuracy.
  features_s: seconds spent on computing features; 0 = no features were needed, or they were stored.
  figures: images to save, `[H, W, 3]` u8 by name.
  arrays: a classifier that can be applied to other images, to save; {} = none.
  alarms: metrics that are too low, of which a run warns.
  """
  metrics: dict[str, float]
  num_examples: int
  guesses: Guesses | None
  headline: str
  features_s: float = 0.
  figures: Mapping[str, np.ndarray] = {}
  arrays: Mapping[str, np.ndarray] = {}
  alarms: Sequence[Low] = ()

  @property
  def score(self) -> float:
    """The value of the headline metric."""
    return self.metrics[self.headline]

  @property
  def is_partial(self) -> bool:
    """Whether the split was truncated by a limit."""
    return any(PARTIAL in name for name in self.metrics)


class Measuring(Protocol):
  """Evaluates one view. The result does not depend on the batch size or the number of workers, devices or hosts."""

  def run(self, selected: PyTree, step: int) -> dict[str, float]:
    """Returns the metrics by name. Every process must call it."""
    ...

  def measure(self, selected: PyTree) -> Result:
    """Returns the complete result. Every process must call it."""
    ...


def named(metrics: Mapping[str, float], limit: int) -> dict[str, float]:
  """Returns the metrics with `limit` in their names, the number of examples of a truncated split; 0 = not truncated."""
  return {mark(name, limit): value for name, value in metrics.items()}


def mark(name: str, limit: int) -> str:
  """Returns the name of a metric over at most `limit` examples; 0 = all."""
  return f'{name}{PARTIAL}{limit}' if limit else name
