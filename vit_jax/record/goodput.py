"""Where the time of a whole run went, over all its starts, and what each kill cost; read off the record.

While it runs, each start notes its seconds by phase (`clock.Goodput`) with every row of training metrics and with
every checkpoint, as events `goodput`. What a start did after the step that a later one went on from is lost work.
Not in the record, and so in no sum: what came after the last event before a kill, and the time between starts.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vit_jax.record.clock import LOST, ONCE, STEP, Goodput
from vit_jax.record.writer import Event


class Lost(NamedTuple):
  """Updates that have to be done again, and the seconds that went into them."""
  steps: int
  seconds: float


def sum_starts(events: Sequence[Event]) -> Goodput:
  """Seconds by phase over all starts of a run. Preparations are never lost: they are no work, and stay what they are.

  Args:
    events: of a record, in order; `start` with `resumed_from`, `goodput` with `step` and `seconds`.
  """
  total: dict[str, float] = {}
  until = math.inf  # no step after it survived
  for start, noted in reversed(_split(events)):
    for name, seconds in _share(noted, until).items():
      total[name] = total.get(name, 0.) + seconds
    until = min(until, _number(start.get('resumed_from')))
  total_s = sum(total.values())
  return Goodput(total, total_s, total.get(STEP, 0.) / total_s if total_s > 0 else 0.)


def find_lost(events: Sequence[Event], *, resumed_from: int) -> Lost:
  """What a start from a step loses of the start before it, whose record this is."""
  starts = _split(events)
  if not starts:
    return Lost(0, 0.)
  _, noted = starts[-1]
  steps = max((int(_number(event.get('step'))) for event in noted), default=0) - resumed_from
  return Lost(max(steps, 0), _share(noted, resumed_from).get(LOST, 0.))


def _split(events: Sequence[Event]) -> list[tuple[Event, list[Event]]]:
  """Each start with the events `goodput` that follow it."""
  found: list[tuple[Event, list[Event]]] = []
  for event in events:
    if event['event'] == 'start':
      found.append((event, []))
    elif event['event'] == 'goodput' and found:
      found[-1][1].append(event)
  return found


def _share(noted: Sequence[Event], until: float) -> dict[str, float]:
  """Seconds of one start by phase, those of work after step `until` as lost."""
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
  """A finite number as it is, anything else as 0."""
  is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
  return float(value) if is_number else 0.  # type: ignore[arg-type]
