"""Computes from the record how a run used its time over all its starts, and the time lost by each interruption.

Each start writes its seconds by phase (`clock.Goodput`) with every row of training metrics and with every checkpoint,
as events `goodput`. Work after the step from which a later start resumed is lost. The sums do not contain the time
between the last event and a kill, nor the time between starts, because these are not in the record.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vit_jax.record.clock import LOST, ONCE, STEP, Goodput
from vit_jax.record.reader import Event


class Lost(NamedTuple):
  """Number of updates that have to be repeated, and the seconds spent on them."""
  steps: int
  seconds: float


def sum_starts(events: Sequence[Event]) -> Goodput:
  """Returns the seconds by phase over all starts of a run. Startup phases are never counted as lost work.

  Args:
    events: of a record, in order; `start` with `resumed_from`, `goodput` with `step` and `seconds`.
  """
  total: dict[str, float] = {}
  until = math.inf  # steps after it were lost
  for start, noted in reversed(_split(events)):
    for name, seconds in _share(noted, until).items():
      total[name] = total.get(name, 0.) + seconds
    until = min(until, _number(start.get('resumed_from')))
  total_s = sum(total.values())
  return Goodput(total, total_s, total.get(STEP, 0.) / total_s if total_s > 0 else 0.)


def find_lost(events: Sequence[Event], *, resumed_from: int) -> Lost:
  """Returns the work of the previous start (the end of `events`) that a start from this step loses."""
  starts = _split(events)
  if not starts:
    return Lost(0, 0.)
  _, noted = starts[-1]
  steps = max((int(_number(event.get('step'))) for event in noted), default=0) - resumed_from
  return Lost(max(steps, 0), _share(noted, resumed_from).get(LOST, 0.))


def _split(events: Sequence[Event]) -> list[tuple[Event, list[Event]]]:
  """Returns each start with the events `goodput` that follow it."""
  found: list[tuple[Event, list[Event]]] = []
  for event in events:
    if event['event'] == 'start':
      found.append((event, []))
    elif event['event'] == 'goodput' and found:
      found[-1][1].append(event)
  return found


def _share(noted: Sequence[Event], until: float) -> dict[str, float]:
  """Returns the seconds of one start by phase; work after step `until` is in the phase of lost work."""
  whole = _seconds(noted[-1]) if noted else {}
  kept = next((_seconds(event) for event in reversed(noted) if _number(event.get('step')) <= until), {})
  found, lost = {}, 0.
  for name, seconds in whole.items():
    found[name] = seconds if name in ONCE else kept.get(name, 0.)
    lost += seconds - found[name]
  return {**found, LOST: lost} if lost > 0 else found


def _seconds(event: Event) -> dict[str, float]:
  by_phase = event.get('seconds')
  return {str(name): _number(value) for name, value in by_phase.items()} if isinstance(by_phase, Mapping) else {}


def _number(value: object) -> float:
  """Returns a finite number unchanged, and 0 for anything else."""
  is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
  return float(value) if is_number else 0.  # type: ignore[arg-type]
