"""Parts that studies are made of: points of a grid, choosing by results, and summaries of results."""
from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from vit_jax.config import schema
from vit_jax.core.errors import UserError


class Point(NamedTuple):
  """A choice of a grid: learning rate, length and warm-up in steps."""
  rate: float
  steps: int
  warmup: int

  @property
  def name(self) -> str:
    """Part of the name of a run."""
    return f'lr{self.rate:g}_steps{self.steps}'

  def apply(self, config: schema.Config) -> schema.Config:
    """Returns the config with this learning rate, length and warm-up."""
    schedule = dataclasses.replace(config.optimizer.schedule, warmup=f'{self.warmup} steps')
    return dataclasses.replace(config, length=f'{self.steps} steps', optimizer=dataclasses.replace(
        config.optimizer, lr=self.rate, schedule=schedule))


def number(name: str, text: str) -> int:
  """Parses a whole number from the text of an argument; '' is 0.

  Raises:
    UserError: it is not a whole number.
  """
  if text and not text.isdecimal():
    raise UserError(f'{name}: expected a whole number, got {text!r}. Correct the number.')
  return int(text or 0)


def choose(name: str, text: str, known: Iterable[str]) -> tuple[str, ...]:
  """Returns the names that an argument such as `cifar10+pets` lists, or all known ones for ''.

  Raises:
    UserError: a name is unknown.
  """
  known, names = tuple(known), tuple(filter(None, text.split('+')))
  if unknown := [one for one in names if one not in known]:
    raise UserError(f'{name}: expected some of {", ".join(known)}, got {", ".join(unknown)}. Put + between names.')
  return names or known


def best(results: schema.Results, names: Iterable[str]) -> str:
  """Returns the finished run with the highest headline among the named ones; the first of equals.

  Raises:
    UserError: none of them is done.
  """
  wanted = list(names)
  scores = {name: results[name].headline for name in wanted if name in results}
  known = {name: score for name, score in scores.items() if score is not None and math.isfinite(score)}
  if not known:
    raise UserError(f'results: expected at least one finished run with an evaluation among {", ".join(wanted)}, got '
                    'none. Start the study again, to repeat the runs that failed.')
  return max(known, key=lambda name: known[name])


class Grid(NamedTuple):
  """What is tried for each task before its final runs; a task with one point has nothing to try.

  Runs are named `{prefix}{task}_{point}` and `{prefix}{task}_seed{seed}`, with `-` for `/` in the task.
  """
  # Makes the run of a task, a point and a phase: `final`, or `tune`, which evaluates on held-out examples.
  build: Callable[[str, Point | None, str], schema.Config]
  points: Mapping[str, Mapping[str, Point | None]]  # by task and name; a point of None has its numbers from elsewhere
  prefix: str = ''

  def tunings(self) -> dict[str, schema.Config]:
    """Returns the runs that choose, by name."""
    return {f'{self.prefix}{key(task)}_{name}': self.build(task, point, 'tune')
            for task, points in self.points.items() for name, point in points.items()}

  def finals(self, results: schema.Results, seeds: int) -> dict[str, schema.Config]:
    """Returns the final runs of each task that has one point, or a result to choose the best point by."""
    runs: dict[str, schema.Config] = {}
    for task, points in self.points.items():
      tried = {f'{self.prefix}{key(task)}_{name}': point for name, point in points.items()}
      if len(tried) == 1:
        [point] = tried.values()
      elif tried.keys() & results.keys():
        point = tried[best(results, tried)]
      else:
        continue
      config = self.build(task, point, 'final')
      runs |= {f'{self.prefix}{key(task)}_seed{seed}': dataclasses.replace(config, seed=seed) for seed in range(seeds)}
    return runs


def percent(share: float | None) -> float | None:
  """Returns a share in percent, with two decimals; None stays."""
  return None if share is None else round(100 * share, 2)


def few_shot(metrics: Mapping[str, float]) -> float | None:
  """Returns the first few-shot accuracy among metrics such as `fewshot/5shot`; None if there is none."""
  return next((value for name, value in metrics.items() if re.fullmatch('fewshot/.*shot', name)), None)


def key(task: str) -> str:
  """Returns the task as it stands in names of runs, which are names of directories."""
  return task.replace('/', '-')


def scores(results: schema.Results, task: str, prefix: str = '') -> dict[str, float]:
  """Returns the accuracies in % of the final runs of a task by seed."""
  start = f'{prefix}{key(task)}_seed'
  return {name.removeprefix(start): 100 * result.headline for name, result in results.items()
          if name.startswith(start) and result.headline is not None}


def seeds(default: int, most: int = 20) -> tuple[str, ...]:
  """Returns the known values of an argument for the number of seeds, the default first."""
  return tuple(dict.fromkeys(map(str, (default, *range(1, most + 1)))))


class Spread(NamedTuple):
  """Mean and standard deviation (of a sample: n - 1) of `num` values; nan where there are too few."""
  mean: float
  std: float
  num: int


def spread(results: schema.Results, names: Iterable[str]) -> Spread:
  """Returns the spread of the headlines of the named runs that are finished."""
  values = [score for name in names if name in results and (score := results[name].headline) is not None]
  mean = statistics.fmean(values) if values else math.nan
  return Spread(mean, statistics.stdev(values) if len(values) > 1 else math.nan, len(values))
