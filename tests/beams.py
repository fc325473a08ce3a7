"""A stand-in for Apache Beam: what pipelines of one `Create` and one `Map` need, with the habits of its runners.

Elements are processed in another order, in a function that was pickled, and some of them twice, as runners repeat
elements of workers that were lost.
"""
from __future__ import annotations

import pickle
import random
import types
from collections.abc import Callable, Iterable
from typing import Any

COUNTED: dict[str, int] = {}
OPTIONS: list[list[str]] = []


class Step:
  """A transform; `>>` after its name, and `|` after what it takes."""

  def __init__(self, apply: Callable[[list[Any]], list[Any]]) -> None:
    self.apply = apply

  def __rrshift__(self, name: str) -> Step:
    assert name
    return self


class Values:
  """A collection."""

  def __init__(self, pipeline: Pipeline, values: list[Any]) -> None:
    self.pipeline, self.values = pipeline, values

  def __or__(self, step: Step) -> Values:
    return Values(self.pipeline, step.apply(self.values))


class Pipeline:
  """Runs at once."""

  def __init__(self, options: Any = None) -> None:
    if options.flags == ['--runner=DataflowRunner']:
      raise ValueError('Pipeline has validations errors: \nMissing required option: project.')
    OPTIONS.append(options.flags)

  def __enter__(self) -> Pipeline:
    return self

  def __exit__(self, *_: object) -> None:
    pass

  def __or__(self, step: Step) -> Values:
    return Values(self, step.apply([]))


class Counter:
  """A metric."""

  def __init__(self, space: str, name: str) -> None:
    self.name = f'{space}/{name}'

  def inc(self, by: int = 1) -> None:
    COUNTED[self.name] = COUNTED.get(self.name, 0) + by


def create(values: Iterable[Any]) -> Step:
  return Step(lambda _: list(values))


def reshuffle() -> Step:
  return Step(lambda values: random.Random(0).sample(values, len(values)))


def apply_to_each(function: Callable[[Any], Any]) -> Step:
  def apply(values: list[Any]) -> list[Any]:
    there = pickle.loads(pickle.dumps(function))
    return [there(value) for value in [*values, *values[:2]]]
  return Step(apply)


def module() -> types.ModuleType:
  """Returns what `import apache_beam` gives."""
  found: Any = types.ModuleType('apache_beam')
  found.Pipeline, found.Create, found.Reshuffle, found.Map = Pipeline, create, reshuffle, apply_to_each
  found.metrics = types.SimpleNamespace(Metrics=types.SimpleNamespace(counter=Counter))
  found.options = types.SimpleNamespace(pipeline_options=types.SimpleNamespace(
      PipelineOptions=lambda flags: types.SimpleNamespace(flags=flags)))
  return found
