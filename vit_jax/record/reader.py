"""Reads the record of a run (`writer.py`), also one of millions of lines, and the end of it.

Readers that draw a run ask for a number of rows: of the rows of training metrics, of the accounts of time and of the
times of hosts, 1 in 2, 4, 8, … is then kept, and the others are not even parsed. Rows of evaluations and all other
events are always complete.
"""
from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from vit_jax.core import os_errors
from vit_jax.record import storage

FILE = 'metrics.jsonl'
_LOWER_IS_BETTER = ('nll', 'loss', 'ece')
_RECORDS_OF_TIME = ('start', 'goodput')  # events that stay valid when their steps are lost
_BLOCK_BYTES = 2**18

Row = dict[str, float]
Event = dict[str, object]


def is_lower_better(metric: str) -> bool:
  """Returns whether lower values of a metric, such as `test/nll@ema`, are better."""
  return metric.split('/')[-1].split('@')[0] in _LOWER_IS_BETTER


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
    with storage.open_growing(path) as lines:
      return _collect(_Thinned(lines, most_rows))
  except FileNotFoundError:
    raise
  except OSError as error:
    advice = os_errors.find(error) or 'Move away what is there.'
    raise os_errors.kind(error)(f'{path}: expected the record of a run, got {error.strerror}. {advice} Then run the '
                                'same command again.') from error


def read_end(path: storage.PathLike, *, since: int) -> list[Event]:
  """Returns the events at the end of a record: at least those of the last start after step `since`, and one before.

  The first one is a start, even if the real one was not read.

  Raises:
    FileNotFoundError: the file does not exist.
    UserError: the file cannot be read.
  """
  found: list[Event] = []
  for entry in filter(None, map(_parse, _lines_backwards(os.path.join(os.fspath(path), FILE)))):
    if 'event' in entry:
      found.append(entry)
    step = _to_step(entry.get('step'))
    if entry.get('event') == 'start':
      return found[::-1]
    if entry.get('event') == 'goodput' and step is not None and step <= since:
      break
  return [{'event': 'start'}, *found[::-1]]


def last_time_s(path: str) -> float:
  """Returns the time of the last line of a record that has one, in seconds; 0 without any."""
  for entry in filter(None, map(_parse, _lines_backwards(path))):
    if math.isfinite(time_s := _to_row(entry).get('time_s', math.nan)):
      return time_s
  return 0.


def _lines_backwards(path: str) -> Iterator[bytes]:
  """Yields the lines of a file, the last one first."""
  with storage.open_growing(path) as file:
    end, rest = file.seek(0, os.SEEK_END), b''
    while end:
      start = max(0, end - _BLOCK_BYTES)
      file.seek(start)
      rest, *lines = (file.read(end - start) + rest).split(b'\n')
      yield from reversed(lines)
      end = start
    yield rest


class _Thinned:
  """The lines of a record, some of them left out; for each kind that may be, the last one before a start is kept."""

  def __init__(self, lines: Iterable[bytes], most: int) -> None:
    self._lines, self._most = lines, most
    self._counts = {kind: 0 for kind in (b'row', b'goodput', b'hosts')}
    self._last: dict[bytes, bytes] = {}
    self.stride, self.count = 1, 0

  def __iter__(self) -> Iterator[tuple[bytes, int]]:
    """Yields lines, each with its number among those of its kind; -1 if it is never left out."""
    for line in self._lines:
      kind = _kind(line) if self._most else b''
      if kind:
        number = self._counts[kind]
        self._counts[kind] += 1
        if number % self.stride:
          self._last[kind] = line
          continue
        self._last.pop(kind, None)
        yield line, number
        if kind == b'row' and number >= 2 * self._most * self.stride:
          self.stride *= 2
      else:
        if line.startswith(b'{"event": "start"'):
          yield from self._take_last()
        yield line, -1
    yield from self._take_last()

  def _take_last(self) -> Iterator[tuple[bytes, int]]:
    yield from ((line, -1) for line in self._last.values())
    self._last.clear()


def _kind(line: bytes) -> bytes:
  """Returns what a line is if lines like it can be left out; '' for any other, as for an incomplete one."""
  if not line.endswith(b'}\n'):
    return b''
  if line.startswith(b'{"step": ') and line.count(b'": ') - line.count(b'"train/') == 2:  # also step and time_s
    return b'row'
  return next((kind for kind in (b'goodput', b'hosts') if line.startswith(b'{"event": "%s"' % kind)), b'')


class _Entry(NamedTuple):
  content: Event
  number: int


def _collect(lines: _Thinned) -> Run:
  entries: list[_Entry] = []
  num_broken = lost_steps = 0
  stride = 1
  for line, number in lines:
    if lines.stride != stride:
      stride = lines.stride
      entries = [e for e in entries if e.number < 0 or e.number % stride == 0]
    if not line.strip():
      continue
    entry = _parse(line)
    if entry is None:
      num_broken += 1
      continue
    if entry.get('event') == 'start':
      resumed_from = _to_step(entry.get('resumed_from'))
      lost_steps += _count_lost([e.content for e in entries], resumed_from)
      entries = [e for e in entries if not _is_lost(e.content, resumed_from)]
    entries.append(_Entry(entry if 'event' in entry else dict(_to_row(entry)), number))
  found = [e.content for e in entries]
  rows: list[Row] = [e for e in found if 'event' not in e]  # type: ignore[misc]
  return Run(rows, [e for e in found if 'event' in e], lost_steps, num_broken, stride)


def _parse(line: bytes) -> Event | None:
  try:
    entry = json.loads(line.decode('utf-8', errors='replace'))
  except (ValueError, RecursionError):
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


def _count_lost(entries: Iterable[Event], resumed_from: int | None) -> int:
  steps = [_to_step(e['step']) or 0 for e in entries if _is_lost(e, resumed_from)]
  return max(steps, default=resumed_from or 0) - (resumed_from or 0)


def _to_row(entry: Event) -> Row:
  row = {}
  for name, value in entry.items():
    try:
      row[name] = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
      continue
  return row
