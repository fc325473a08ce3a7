"""Plans a deep network of unrolled blocks quickly: from two shallow networks, on the line through their figures.

A program of unrolled blocks takes as long to compile as it has blocks, and each block adds the same time, memory and
collectives. So the figures of `DEPTHS` blocks give those of any number: `a + b depth`. Only what the compiler does once
for all blocks, such as joining small collectives, is not proportional. A scanned network compiles as fast with any
depth, and is compiled as it is. A text tower that is as deep as the network of images has as many blocks in both
programs; one of another depth keeps all of its blocks.

`plan.make` calls `ask` in place of `compile.ask`.
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
  low, high = (by(request._replace(config=_with_depth(request.config, depth))) for depth in DEPTHS)
  if low.overflow or high.overflow:
    return by(request)
  return extend(getattr(request.config.model, 'depth', 0), low, high)


def _with_depth(config: schema.Config, depth: int) -> schema.Config:
  """Returns a config with so many blocks, also in a text tower that is as deep as the network of images."""
  changes = {'model.depth': depth}
  objective = config.objective
  if isinstance(objective, schema.Contrastive) and objective.text.depth == getattr(config.model, 'depth', 0):
    changes['objective.text.depth'] = depth
  return layout.put(config, changes)


def extend(depth: int, low: compile.Answer, high: compile.Answer) -> compile.Answer:
  """Returns the figures at a depth, on the line through the answers for `DEPTHS` blocks."""
  costs = _extend_row(depth, low.costs, high.costs)._replace(
      collectives=_extend_rows(depth, low.costs.collectives, high.costs.collectives),
      kernels=_extend_rows(depth, low.costs.kernels, high.costs.kernels))
  operations = _extend_rows(depth, low.operations, high.operations)
  kinds = _extend_rows(depth, low.kinds, high.kinds)
  return _extend_row(depth, low, high)._replace(
      costs=costs, lower_s=low.lower_s + high.lower_s, compile_s=low.compile_s + high.compile_s,
      kinds=tuple(sorted(kinds, key=lambda kind: -kind.ns)),
      operations=sorted(operations, key=lambda operation: -operation.cycles),
      waits=None if high.waits is None else _extend_rows(depth, low.waits or (), high.waits),
      schedule=_extend_row(depth, low.schedule, high.schedule) if low.schedule and high.schedule else None)


def _extend_row(depth: int, low: Any, high: Any) -> Any:
  """Returns the named tuple `high` with each whole number at `depth` on the line; None counts as 0 in `low`."""
  share = (depth - DEPTHS[0]) / (DEPTHS[1] - DEPTHS[0])
  values = []
  for before, after in zip(low, high, strict=True):
    if isinstance(after, int):
      before = before or 0
      after = max(0, round(before + (after - before) * share))
    values.append(after)
  return high._make(values)


def _extend_rows(depth: int, low: Sequence[Any], high: Sequence[Any]) -> list[Any]:
  """Returns the rows of `high` extended, each from the row of `low` with the same texts; zeros if there is none.

  The texts of a row identify it: the kind of a collective, the phase and place of an operation.
  """
  low_by_texts = {_texts(row): row for row in low}
  return [_extend_row(depth, low_by_texts.get(_texts(row), [0] * len(row)), row) for row in high]


def _texts(row: Sequence[Any]) -> tuple[str, ...]:
  return tuple(value for value in row if isinstance(value, str))
