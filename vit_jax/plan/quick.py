"""A quick plan: a deep network of unrolled blocks from two shallow ones, on the line through their figures.

A program of unrolled blocks takes as long to compile as it has blocks, and each block adds the same time, memory and
collectives. So the figures of `DEPTHS` blocks give those of any number: `a + b depth`. What is not proportional is what
the compiler does once for all blocks, such as joining small collectives. A scanned network compiles as fast with any
depth, and is compiled as it is.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

from vit_jax.config import layout, schema
from vit_jax.plan import compile, compiled, schedule

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
  low, high = (by(request._replace(config=layout.put(request.config, {'model.depth': few}))) for few in DEPTHS)
  if low.overflow or high.overflow:
    return by(request)
  return _at(depth, low, high)


def _at(depth: int, low: compile.Answer, high: compile.Answer) -> compile.Answer:
  """Returns the figures at another depth, on the line through two answers."""
  share = (depth - DEPTHS[0]) / (DEPTHS[1] - DEPTHS[0])

  def line(a: float, b: float) -> int:
    return max(0, round(a + (b - a) * share))

  costs = high.costs._replace(cycles=line(low.costs.cycles, high.costs.cycles),
                              collectives=_collectives(low.costs.collectives, high.costs.collectives, line),
                              kernels=_kernels(low.costs.kernels, high.costs.kernels, line))
  return high._replace(
      argument_bytes=line(low.argument_bytes, high.argument_bytes), temp_bytes=line(low.temp_bytes, high.temp_bytes),
      alias_bytes=line(low.alias_bytes, high.alias_bytes), peak_bytes=line(low.peak_bytes, high.peak_bytes),
      costs=costs, lower_s=low.lower_s + high.lower_s, compile_s=low.compile_s + high.compile_s,
      operations=_operations(low.operations, high.operations, line), schedule=_schedule(low, high, line))


def _collectives(low: Sequence[compiled.Collective], high: Sequence[compiled.Collective],
                 line: Callable[[float, float], int]) -> list[compiled.Collective]:
  before = {one.kind: one for one in low}
  return [compiled.Collective(one.kind, *(line(a, b) for a, b in zip(
      before.get(one.kind, compiled.Collective(one.kind, 0, 0, 0))[1:], one[1:], strict=True))) for one in high]


def _kernels(low: Sequence[compiled.Kernel], high: Sequence[compiled.Kernel],
             line: Callable[[float, float], int]) -> list[compiled.Kernel]:
  before = {one.name: one.calls for one in low}
  return [compiled.Kernel(one.name, line(before.get(one.name, 0), one.calls)) for one in high]


def _operations(low: Sequence[compiled.Operation], high: Sequence[compiled.Operation],
                line: Callable[[float, float], int]) -> list[compiled.Operation]:
  before = {(one.phase, one.place): one for one in low}
  found = []
  for one in high:
    first = before.get((one.phase, one.place), one._replace(calls=0, cycles=0, scheduled=0))
    scheduled = None if one.scheduled is None else line(first.scheduled or 0, one.scheduled)
    found.append(one._replace(calls=line(first.calls, one.calls), cycles=line(first.cycles, one.cycles),
                              scheduled=scheduled))
  return sorted(found, key=lambda one: -one.cycles)


def _schedule(low: compile.Answer, high: compile.Answer,
              line: Callable[[float, float], int]) -> schedule.Schedule | None:
  a, b = low.schedule, high.schedule
  if a is None or b is None:
    return None
  return schedule.Schedule(line(a.cycles, b.cycles), line(a.memory_cycles, b.memory_cycles),
                           line(a.uncounted, b.uncounted), line(a.uncounted_cycles, b.uncounted_cycles),
                           line(a.unknown_loops, b.unknown_loops), b.kernels)
