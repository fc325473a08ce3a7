"""A quick plan: a deep network of unrolled blocks from two shallow ones, on the line through their figures.

A program of unrolled blocks takes as long to compile as it has blocks, and each block adds the same time, memory and
collectives. So the figures of `DEPTHS` blocks give those of any number: `a + b depth`. What is not proportional is what
the compiler does once for all blocks, such as joining small collectives. A scanned network compiles as fast with any
depth, and is compiled as it is. A text tower that is as deep as the network of images has as many blocks in both
programs; one of another depth keeps all of its blocks.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vit_jax.config import schema
from vit_jax.parallel import layout
from vit_jax.plan import compile

DEPTHS = (2, 4)
"""Blocks of the programs that are compiled."""
Ask = Callable[[compile.Request], compile.Answer]


def is_shorter(config: schema.Config) -> bool:
  """Returns whether a quick plan of a config differs from a complete one: its blocks are unrolled, and many."""
  model = config.model
  is_unrolled = getattr(model, 'execution', None) is schema.Execution.UNROLLED and not getattr(model, 'full_remat', 0)
  return is_unrolled and getattr(model, 'depth', 0) > DEPTHS[-1]


def ask(request: compile.Request, *, by: Ask | None = None) -> compile.Answer:
  """Returns the answer for a request by its two shallow programs; one that does not fit is compiled as it is."""
  by = by or compile.ask
  if not is_shorter(request.config):
    return by(request)
  depth: int = request.config.model.depth  # type: ignore[union-attr]
  low, high = (by(request._replace(config=_shallow(request.config, few))) for few in DEPTHS)
  if low.overflow or high.overflow:
    return by(request)
  return extend(depth, low, high)


def _shallow(config: schema.Config, few: int) -> schema.Config:
  changes = {'model.depth': few}
  objective = config.objective
  if isinstance(objective, schema.Contrastive) and objective.text.depth == getattr(config.model, 'depth', 0):
    changes['objective.text.depth'] = few
  return layout.put(config, changes)


def extend(depth: int, low: compile.Answer, high: compile.Answer) -> compile.Answer:
  """Returns the figures at a depth, on the line through the answers for `DEPTHS` blocks."""
  share = (depth - DEPTHS[0]) / (DEPTHS[1] - DEPTHS[0])

  def line(a: Any, b: Any) -> Any:
    """Returns the named tuple `b` with each whole number on the line through `a` and `b`; None counts as 0 in `a`."""
    return b._make(max(0, round((x or 0) + (y - (x or 0)) * share)) if isinstance(y, int) else y
                   for x, y in zip(a, b, strict=True))

  def lines(before: Sequence[Any], after: Sequence[Any]) -> list[Any]:
    """Returns the rows of `after`, each on the line through the row of `before` with the same names, or 0."""
    known = {_names(one): one for one in before}
    return [line(known.get(_names(one), [0] * len(one)), one) for one in after]

  costs = line(low.costs, high.costs)._replace(collectives=lines(low.costs.collectives, high.costs.collectives),
                                               kernels=lines(low.costs.kernels, high.costs.kernels))
  return line(low, high)._replace(
      costs=costs, lower_s=low.lower_s + high.lower_s, compile_s=low.compile_s + high.compile_s,
      kinds=tuple(sorted(lines(low.kinds, high.kinds), key=lambda one: -one.ns)),
      operations=sorted(lines(low.operations, high.operations), key=lambda one: -one.cycles),
      waits=None if high.waits is None else lines(low.waits or (), high.waits),
      schedule=line(low.schedule, high.schedule) if low.schedule and high.schedule else None)


def _names(row: Sequence[Any]) -> tuple[str, ...]:
  """Returns the texts of a row, which identify it: the kind of a collective, phase and place of an operation."""
  return tuple(one for one in row if isinstance(one, str))
