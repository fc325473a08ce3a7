"""Reads the record of a run (`writer.py`), also one of millions of lines, and the end of it.

`read` returns the rows and events of all starts. Who draws a run passes a number of rows: of the rows of training
metrics, of the events `goodput` and of the events `hosts`, 1 in 2, 4, 8, … is then kept, so that memory and time are
bounded. Rows of evaluations and all other events are always complete. A start needs less: `read_end` returns the events
of the start before it, and `last_time_s` the time at which the record ends.
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
_RECORDS_OF_TIME = ('start', 'goodput')  # events that stay valid when their steps are lost
_ROW = 'row'  # of training metrics
_BLOCK_BYTES = 2**18
_MOST_LINE = 2**22  # bytes; a longer line is broken

Row = dict[str, float]
Event = dict[str, object]


def is_lower_better(metric: str) -> bool:
  """Returns whether lower values of a metric, such as `test/nll@ema`, are better."""
  return _LOWER_IS_BETTER.fullmatch(re.split(r'[@.]', metric.split('/')[-1])[0]) is not None


class Run(NamedTuple):
  """The contents of `metrics.jsonl`, without steps that were lost and repeated.

  rows: metrics by name, with `step` and `time_s`, in order.
  events: with `event` and `time_s`, in order.
  lost_steps: number of updates that were lost, over all resumes.
  num_broken: number of lines that could not be read.
  stride: 1 in so many rows of training metrics was read.
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

  Lines that cannot be read are counted and skipped, and so are metrics that are not numbers. Rows and events of
  steps after N that precede a start with `resumed_from` N were lost and are skipped too.

  Args:
    path: of the directory or the file.
    most_rows: the number of rows of training metrics that are read, about; 0 = all.

  Raises:
    FileNotFoundError: the file does not exist.
    UserError: the file cannot be read.
  """
  path = os.fspath(path)
  path = path if path.endswith('.jsonl') else os.path.join(path, FILE)
  try:
    with growing.open_file(path) as lines:
      return _collect(iter(lambda: lines.readline(_MOST_LINE), b''), most_rows)
  except FileNotFoundError:
    raise
  except OSError as error:
    raise failures.unreadable(error, path) from error


def read_end(path: storage.PathLike, *, since: int) -> list[Event]:
  """Returns the events at the end of a record: at least those of the last start after step `since`, and one before.

  The first one is a start, even if the real one was not read.

  Raises:
    FileNotFoundError: the file does not exist.
    UserError: the file cannot be read.
  """
  events: list[Event] = []  # the last one first
  for entry in filter(None, map(_parse, _lines_backwards(os.path.join(os.fspath(path), FILE)))):
    if 'event' in entry:
      events.append(entry)
    step = _to_step(entry.get('step'))
    if entry.get('event') == 'start':
      return events[::-1]
    if entry.get('event') == 'goodput' and step is not None and step <= since:
      break
  return [{'event': 'start'}, *events[::-1]]


def last_time_s(path: str) -> float:
  """Returns the time of the last line of a record that has one, in seconds; 0 without any."""
  for entry in filter(None, map(_parse, _lines_backwards(path))):
    if math.isfinite(time_s := _to_row(entry).get('time_s', math.nan)):
      return time_s
  return 0.


def _lines_backwards(path: str) -> Iterator[bytes]:
  """Yields the lines of a file, the last one first."""
  with growing.open_file(path) as file:
    end, rest = file.seek(0, os.SEEK_END), b''
    while end:
      start = max(0, end - _BLOCK_BYTES)
      file.seek(start)
      rest, *lines = (file.read(end - start) + (rest if len(rest) < _MOST_LINE else b'')).split(b'\n')
      yield from reversed(lines)
      end = start
    yield rest


def _collect(lines: Iterable[bytes], most_rows: int) -> Run:
  """Returns the record in these lines: of entries of a kind, 1 in `stride`, and the last one before each start."""
  entries: list[tuple[Event, int]] = []  # each with its number among those of its kind; -1 = never left out
  counts, last = collections.Counter[str](), dict[str, Event]()  # by kind: entries so far, and the last one if left out
  num_broken, lost_steps, stride = 0, 0, 1
  for line in filter(bytes.strip, lines):
    if (entry := _parse(line)) is None:
      num_broken += 1
      continue
    if entry.get('event') == 'start':
      entries += [(left_out, -1) for left_out in last.values()]
      last.clear()
      resumed_from = _to_step(entry.get('resumed_from'))
      lost = [_to_step(before['step']) or 0 for before, _ in entries if _is_lost(before, resumed_from)]
      lost_steps += max(lost, default=resumed_from or 0) - (resumed_from or 0)
      entries = [(before, number) for before, number in entries if not _is_lost(before, resumed_from)]
    kind = _kind(entry) if most_rows else ''
    entry = entry if 'event' in entry else dict(_to_row(entry))
    number = counts[kind] if kind else -1
    counts[kind] += 1
    if kind and number % stride:
      last[kind] = entry
      continue
    last.pop(kind, None)
    entries.append((entry, number))
    if kind == _ROW and number >= 2 * most_rows * stride:
      stride *= 2
      entries = [(kept, number) for kept, number in entries if number < 0 or number % stride == 0]
  every = [kept for kept, _ in entries] + list(last.values())
  rows: list[Row] = [entry for entry in every if 'event' not in entry]  # type: ignore[misc]
  return Run(rows, [entry for entry in every if 'event' in entry], lost_steps, num_broken, stride)


def _kind(entry: Event) -> str:
  """Returns what an entry is if entries like it may be left out, else ''."""
  if 'event' in entry:
    return str(entry['event']) if entry['event'] in ('goodput', 'hosts') else ''
  return _ROW if all(name.startswith('train/') or name in ('step', 'time_s') for name in entry) else ''


def _parse(line: bytes) -> Event | None:
  try:
    entry = documents.parse(line.decode('utf-8', errors='replace'), nan=True)
  except ValueError:
    return None
  is_entry = isinstance(entry, dict) and ('event' in entry or _to_step(entry.get('step')) is not None)
  return entry if is_entry else None


def _to_step(value: object) -> int | None:
  is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
  return int(value) if is_number else None  # type: ignore[call-overload]


def _is_lost(entry: Event, resumed_from: int | None) -> bool:
  """Whether a start from step `resumed_from` (None = a new run) makes the entry invalid."""
  if entry.get('event') in _RECORDS_OF_TIME:
    return False
  step = _to_step(entry.get('step'))
  return step is not None and (resumed_from is None or step > resumed_from)


def _to_row(entry: Event) -> Row:
  row = {}
  for name, value in entry.items():
    try:
      row[name] = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
      continue
  return row
