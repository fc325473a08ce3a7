"""How far the accuracies of a claim may differ in a replay that is `CLOSE`: `Tolerance.values` of the records.

A tolerance that reaches chance, or the next row of a table, would call an untrained network or another method close. So
it stays below a third of both distances. Rows with the same settings and other seeds are the same method: they do not
count. `python -m benchmarks.record_pages` writes the tolerance into the records.
"""
from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from vit_jax.replay.records import Record, claimed

SHARE = 1 / 3
_ACCURACY = re.compile(r'top(\d+)')
_SEED = re.compile(r'_?seed\d+|median|lowest|highest')


def limits(record: Record, tables: Sequence[Sequence[Record]]) -> dict[str, float]:
  """Returns the most by which each accuracy of a claim may differ, rounded down to two digits.

  Args:
    record: a result.
    tables: the records of each table of the pages.
  """
  found = {}
  for name in claimed(record.claim):
    if distances := list(_distances(record, name, tables)):
      most = SHARE * min(distances)
      unit = 10. ** (math.floor(math.log10(most)) - 1)
      found[name] = float(f'{math.floor(most / unit * (1 + 1e-9)) * unit:.1e}')
  return found


def _distances(record: Record, name: str, tables: Sequence[Sequence[Record]]) -> Iterator[float]:
  """Yields the distances of an accuracy to chance, and to other accuracies of this metric that stand beside it."""
  value, metric = record.values[name], _metric(name)
  if not (accuracy := _ACCURACY.search(metric)):
    return
  for content in record.data.values():
    if classes := content.classes.split():
      yield abs(value - int(accuracy[1]) / len(classes))
  others = [(record, other) for other in claimed(record.claim) if _run(other) != _run(name)]
  others += [(row, other) for table in tables if record in table for row in table if _method(row) != _method(record)
             for other in claimed(row.claim)]
  for row, other in others:
    if _metric(other) == metric and row.values[other] != value:
      yield abs(row.values[other] - value)


def _method(record: Record) -> tuple[str, dict[str, Any]]:
  """Returns what is equal for records that differ only by their seeds."""
  settings = {name: value for name, value in record.settings.items() if name != 'seed'}
  return ('' if settings else record.id), settings


def _metric(name: str) -> str:
  """Returns the metric of a value: without its run, its step and its view."""
  return re.sub(r'^best | at \d+$|@\w+', '', name).rpartition(' ')[2]


def _run(name: str) -> str:
  """Returns the run of a value, without its seed."""
  return _SEED.sub('', name.rpartition(' ')[0]).strip()
