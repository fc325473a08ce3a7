"""Which checkpoint of a run stands for it: the best one by `checkpoints.keep_best`, else the newest one.

Every job that uses or describes a finished run takes the step from here: evaluate, predict, convert, export, push,
serve, report, the summary at the end. What is chosen follows from the disk alone: from the checkpoints that are there,
and from their metrics, which are in their descriptions, and in the record (`metrics.jsonl`).
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vit_jax.core.errors import UserError
from vit_jax.core.failures import Damaged
from vit_jax.record import checkpoint_files, reader, storage

MOST = 1e300  # of a metric; integers in JSON may be larger than any float


class Chosen(NamedTuple):
  """The step that stands for a run, and the newest one; `metric` and its `value` if it is the best one, else '' and 0.
  """
  step: int
  newest: int
  metric: str = ''
  value: float = 0.

  @property
  def is_newest(self) -> bool:
    return self.step == self.newest

  @property
  def reason(self) -> str:
    """Returns why it is this one, such as `the best test/top1 (0.98)`."""
    return f'the best {self.metric} ({self.value:.4g})' if self.metric else 'the newest one'


def choose(workdir: storage.Path, metric: str, steps: Sequence[int] | None = None) -> Chosen | None:
  """Returns the step of a run; None without a checkpoint. Checkpoints without a finite metric are never the best.

  Args:
    workdir: the run directory.
    metric: `checkpoints.keep_best`; '' = the newest checkpoint.
    steps: the checkpoints to choose from; None = all complete ones.
  """
  steps = checkpoint_files.steps(workdir / 'checkpoints') if steps is None else steps
  if not steps:
    return None
  found = values(workdir, metric, steps) if metric else {}
  step = best(found, metric)
  return Chosen(max(steps), max(steps)) if step is None else Chosen(step, max(steps), metric, found[step])


def best(found: Mapping[int, float], metric: str) -> int | None:
  """Returns the step with the best finite value of a metric, the last one of equal ones; None without any."""
  sign = -1. if reader.is_lower_better(metric) else 1.
  return max((step for step in found if math.isfinite(found[step])), key=lambda step: (sign * found[step], step),
             default=None)


def values(workdir: storage.Path, metric: str, steps: Sequence[int]) -> dict[int, float]:
  """Returns the values of a metric by step, of the checkpoints that have one."""
  described = {step: _described(workdir, step) for step in steps}
  if all(metric in one for one in described.values()):
    return {step: one[metric] for step, one in described.items()}
  rows = _rows(workdir)  # of a run of an older version, whose checkpoints do not have their metrics
  found = {step: {**rows.get(step, {}), **one} for step, one in described.items()}
  return {step: one[metric] for step, one in found.items() if metric in one}


def measured(workdir: storage.Path, step: int) -> dict[str, float]:
  """Returns the finite metrics of all evaluations of a checkpoint."""
  return {**_rows(workdir).get(step, {}), **_described(workdir, step)}


def _described(workdir: storage.Path, step: int) -> dict[str, float]:
  """Returns the metrics in the description of a checkpoint; {} if it is damaged or has none."""
  try:
    return _finite(checkpoint_files.read_meta(workdir / 'checkpoints' / str(step)).get('metrics'))
  except (Damaged, UserError):
    return {}


def _rows(workdir: storage.Path) -> dict[int, dict[str, float]]:
  """Returns the finite metrics of evaluations by step; {} if there is no record."""
  found: dict[int, dict[str, float]] = {}
  try:
    for row in reader.read(workdir, most_rows=1).rows:
      found.setdefault(int(row['step']), {}).update(_finite(row))
  except (FileNotFoundError, UserError):
    return {}
  return found


def _finite(metrics: object) -> dict[str, float]:
  """Returns those of a mapping that are finite metrics of evaluations, such as `test/top1`."""
  numbers = {name: float(value) for name, value in metrics.items() if '/' in name and not name.startswith('train/')
             and isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MOST
             } if isinstance(metrics, Mapping) else {}
  return {name: number for name, number in numbers.items() if math.isfinite(number)}
