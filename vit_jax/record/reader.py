"""Reads the record of a run, `metrics.jsonl`; `writer.py` describes its format.

An entry is a row of metrics or an event. `read` returns all entries, for reports, summaries and replays. A record can
have millions of lines, so callers may limit the number of rows: of the rows of training metrics, of the events
`goodput` and of the events `hosts`, only 1 in 2, 4, 8, … is then kept. Rows of evaluations and all other events are
always complete. A run that starts again reads only the end of its record: `read_end` returns the events of the previous
start, and `last_time_s` the time of the last line.
"""
from __future__ import annotations

import collections
import math
import os
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from vit_jax.core import documents, failures
from vit_jax.record import growing, storage

FILE = 'metrics.jsonl'
_LOWER_IS_BETTER = re.compile(r'(\w+_)?(nll|loss|ece)|alignment|uniformity')  # the last two: Wang and Isola 2020
_NEVER_LOST = ('start', 'goodput')  # events about time, which stay valid when their steps are lost
_TRAINING_ROW = 'row'  # the kind of the rows of training metrics; the kind of an event is its name
_BLOCK_BYTES = 2**18  # read at once from the end of a file
_MAX_LINE_BYTES = 2**22  # a longer line counts as broken

Row = dict[str, float]
Event = dict[str, object]


def is_lower_better(metric: str) -> bool:
  """Returns whether lower values of a metric, such as `test/nll@ema`, are better."""
  return _LOWER_IS_BETTER.fullmatch(re.split(r'[@.]', metric.split('/')[-1])[0]) is not None


class Run(NamedTuple):
  """The contents of `metrics.jsonl`, without steps that were lost and repeated.

  rows: metrics by name, with `step` and `time_s`, in order.
  events: with `event` and `time_s`, in order.
  lost_steps: number of steps that were lost, over all resumes.
  num_broken: number of lines that could not be read.
  stride: 1 in `stride` rows of training metrics was kept; 1 = all were.
  """
  rows: list[Row]
  events: list[Event]
  lost_steps: int
  num_broken: int
  stride: int = 1


NOTHING = Run([], [], 0, 0)
"""A record without a line."""


def read(path: storage.PathLike, *, most_rows: int = 0) -> Run:
  """Reads the record of a run: a run directory or its `metrics.jsonl`.

  Lines that cannot be read are counted and skipped. Metrics that are not numbers are skipped. A start with
  `resumed_from` N repeats the steps after N: earlier rows and events of these steps were lost and are skipped too.

  Args:
    path: of the directory or the file.
    most_rows: of longer records, keep between one and two times as many rows of training metrics; 0 = keep all.

  Raises:
    FileNotFoundError: the file does not exist.
    UserError: the file cannot be read.
  """
  path = os.fspath(path)
  path = path if path.endswith('.jsonl') else os.path.join(path, FILE)
  try:
    with growing.open_file(path) as lines:
      return _collect(iter(lambda: lines.readline(_MAX_LINE_BYTES), b''), most_rows)
  except FileNotFoundError:
    raise
  except OSError as error:
    raise failures.unreadable(error, path) from error


def read_end(path: storage.PathLike, *, since: int) -> list[Event]:
  """Returns the last events of a record, back to the last `goodput` whose step is not after `since`, or to a `start`.

  The list begins with a `start`: without fields, if the last one is further back. Raises the same errors as `read`.
  """
  events: list[Event] = []  # the last event first
  for entry in _entries_backwards(os.path.join(os.fspath(path), FILE)):
    if 'event' in entry:
      events.append(entry)
    step = _to_step(entry.get('step'))
    if entry.get('event') == 'start':
      return events[::-1]
    if entry.get('event') == 'goodput' and step is not None and step <= since:
      break
  return [{'event': 'start'}, *events[::-1]]


def last_time_s(path: str) -> float:
  """Returns the time of the last line of a record that has a time, in seconds; 0 if no line has one."""
  for entry in _entries_backwards(path):
    time_s = _to_row(entry).get('time_s', math.nan)
    if math.isfinite(time_s):
      return time_s
  return 0.


def _entries_backwards(path: str) -> Iterator[Event]:
  """Yields the entries of a record, the last one first, without broken lines."""
  with growing.open_file(path) as file:
    end, first_line = file.seek(0, os.SEEK_END), b''
    while end:
      start = max(0, end - _BLOCK_BYTES)
      file.seek(start)
      end_of_line = first_line if len(first_line) < _MAX_LINE_BYTES else b''  # of a line that begins in this block
      first_line, *lines = (file.read(end - start) + end_of_line).split(b'\n')
      yield from filter(None, map(_parse, reversed(lines)))
      end = start
    if entry := _parse(first_line):
      yield entry


class _Kept(NamedTuple):
  """An entry that is kept; `number` counts the entries of its kind, and is -1 if this entry is never left out."""
  entry: Event
  number: int


def _collect(lines: Iterable[bytes], most_rows: int) -> Run:
  """Returns the entries of a record: of a `_thinned_kind` only each `stride`-th one, and the last one of each start."""
  kept: list[_Kept] = []
  num_by_kind = collections.Counter[str]()
  left_out: dict[str, Event] = {}  # by kind: the last entry, if it was left out
  num_broken, lost_steps, stride = 0, 0, 1
  for line in filter(bytes.strip, lines):  # not empty
    entry = _parse(line)
    if entry is None:
      num_broken += 1
      continue
    if entry.get('event') == 'start':
      kept += [_Kept(last, -1) for last in left_out.values()]
      left_out.clear()
      kept, num_lost = _drop_lost(kept, _to_step(entry.get('resumed_from')))
      lost_steps += num_lost
    kind = _thinned_kind(entry) if most_rows else ''
    if 'event' not in entry:
      entry = dict(_to_row(entry))
    if not kind:
      kept.append(_Kept(entry, -1))
      continue
    number = num_by_kind[kind]
    num_by_kind[kind] += 1
    if number % stride:
      left_out[kind] = entry
      continue
    left_out.pop(kind, None)
    kept.append(_Kept(entry, number))
    if kind == _TRAINING_ROW and number >= 2 * most_rows * stride:
      stride *= 2
      kept = [earlier for earlier in kept if earlier.number < 0 or earlier.number % stride == 0]
  entries = [entry for entry, _ in kept] + list(left_out.values())
  rows: list[Row] = [entry for entry in entries if 'event' not in entry]  # type: ignore[misc]
  return Run(rows, [entry for entry in entries if 'event' in entry], lost_steps, num_broken, stride)


def _drop_lost(kept: list[_Kept], resumed_from: int | None) -> tuple[list[_Kept], int]:
  """Returns the entries that a start from step `resumed_from` does not lose, and the number of lost steps."""
  first = resumed_from or 0
  lost = [_to_step(entry['step']) or 0 for entry, _ in kept if _is_lost(entry, resumed_from)]
  return [each for each in kept if not _is_lost(each.entry, resumed_from)], max(lost, default=first) - first


def _thinned_kind(entry: Event) -> str:
  """Returns the kind of an entry if such entries may be left out: `goodput`, `hosts` or `_TRAINING_ROW`; else ''."""
  if 'event' in entry:
    return str(entry['event']) if entry['event'] in ('goodput', 'hosts') else ''
  is_training = all(name.startswith('train/') or name in ('step', 'time_s') for name in entry)
  return _TRAINING_ROW if is_training else ''


def _parse(line: bytes) -> Event | None:
  """Returns the row or event of a line; None if the line is broken, or is neither a row nor an event."""
  try:
    entry = documents.parse(line.decode('utf-8', errors='replace'), nan=True)
  except ValueError:
    return None
  is_entry = isinstance(entry, dict) and ('event' in entry or _to_step(entry.get('step')) is not None)
  return entry if is_entry else None


def _to_step(value: object) -> int | None:
  """Returns a finite number as an integer; None for anything else."""
  is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
  return int(value) if is_number else None  # type: ignore[call-overload]


def _is_lost(entry: Event, resumed_from: int | None) -> bool:
  """Returns whether a start from step `resumed_from` (None = from the beginning) loses an earlier entry."""
  if entry.get('event') in _NEVER_LOST:
    return False
  step = _to_step(entry.get('step'))
  return step is not None and (resumed_from is None or step > resumed_from)


def _to_row(entry: Event) -> Row:
  """Returns the fields of an entry that are numbers, or texts such as 'nan'."""
  row = {}
  for name, value in entry.items():
    try:
      row[name] = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
      continue
  return row
