"""The record of a run: `metrics.jsonl`, the trackers that show it elsewhere, and the progress that is shown.

`metrics.jsonl` is the record; everything else can be derived from it. It has one JSON object per line:

  {"step": 50, "time_s": 12.3, "train/loss": 1.5, …}      a row of metrics
  {"event": "start", "time_s": 0.0, "resumed_from": 40}   any other event

`step` is the number of updates, `time_s` the seconds for which the run has been active: it is 0 at the first start, and
continues from the last line after a resume. Numbers that are not finite are the strings 'nan', 'inf' and '-inf',
because JSON does not support them.

In object storage, which cannot append, the record and TensorBoard's events are copies of local files, updated
every 30 s and at checkpoints (`mirror`); a kill loses later lines.

Arrays are only accessed through `float()` and `tolist()`.
"""
from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import NamedTuple

from vit_jax.core import os_errors
from vit_jax.core.errors import UserError
from vit_jax.record import memory, mirror, storage
from vit_jax.record import progress as progress_lib
from vit_jax.record.trackers import tensorboard
from vit_jax.record.trackers.tracker import Guarded, Status

FILE = 'metrics.jsonl'
_KEPT_AT_ONCE = ('checkpoint', 'stop')  # events that a run can resume from; no earlier line may be lost
_RECORDS_OF_TIME = ('start', 'goodput')  # events that stay valid when their steps are lost

Row = dict[str, float]
Event = dict[str, object]


class Run(NamedTuple):
  """The contents of `metrics.jsonl`, without steps that were lost and repeated.

  rows: metrics by name, with `step` and `time_s`, in order.
  events: with `event` and `time_s`, in order.
  lost_steps: number of updates that were lost, over all resumes.
  num_broken: number of lines that could not be read.
  """
  rows: list[Row]
  events: list[Event]
  lost_steps: int
  num_broken: int


class Writer:
  """Writes the record of a run; on all processes except 0, every method does nothing.

  The record begins with a `start` event; if the caller does not write one, it is added before the first line.

  Args:
    workdir: the run directory, local or in object storage; created if missing.
    process_index: of this process.
    resumed_from: step of the checkpoint from which this run resumes; None for a new run.
    progress_total: number of steps of the run.
    progress: whether to show progress.
    trackers: returns the trackers for files in a local folder; None = TensorBoard alone.
  """

  def __init__(self, workdir: str | os.PathLike[str], *, process_index: int, resumed_from: int | None,
               progress_total: int, progress: bool,
               trackers: Callable[[str], Sequence[Guarded]] | None = None) -> None:
    self._active = process_index == 0
    self._resumed_from = resumed_from
    self._last_step = resumed_from or 0
    self._is_started = False
    if not self._active:
      return
    self._mirror = None if storage.is_local(workdir) else mirror.Mirror(workdir)
    folder = os.fspath(self._mirror.folder if self._mirror else workdir)
    if self._mirror:
      self._mirror.fetch(FILE)
    self._path = os.path.join(folder, FILE)
    with self._writing():
      os.makedirs(folder, exist_ok=True)
      self._time_offset_s = _last_time_s(self._path) - time.monotonic()
      _end_last_line(self._path)
      self._file = open(self._path, 'a', encoding='utf-8')
    self._trackers = trackers(folder) if trackers else [tensorboard.opened(folder, resumed_from)]
    self._status: Status = 'done'
    self._progress = progress_lib.Progress(progress_total, start=self._last_step, shown=progress,
                                           memory=memory.used_gib)

  def __enter__(self) -> Writer:
    return self

  def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
               trace: TracebackType | None) -> None:
    self.close()

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Adds a row of metrics after `step` updates.

    Raises:
      ValueError: the step is smaller than one that was written.
      UserError: the record cannot be written, for example on a full disk; every other method can raise it too.
    """
    if not self._active:
      return
    if step < self._last_step:
      raise ValueError(f'metrics of step {step} after those of step {self._last_step}: '
                       'steps must not go backwards')
    numbers = {name: float(value) for name, value in values.items()}
    self._ensure_started()
    self._append({'step': int(step), 'time_s': self._time_s(), **numbers})
    for tracker in self._trackers:
      tracker.write(int(step), numbers)
    self._last_step = int(step)
    self._progress.update(step, numbers)

  def event(self, name: str, **fields: object) -> None:
    """Adds an event: `start`, `checkpoint`, `norms`, `goodput`, …

    Arrays become lists. `resumed_from` is added to `start`.
    """
    if not self._active:
      return
    if name == 'start':
      self._is_started = True
      fields = {'resumed_from': self._resumed_from, **fields}
    self._ensure_started()
    self._append({'event': name, 'time_s': self._time_s(), **fields})
    self._status = 'stopped' if name == 'stop' else self._status
    if self._mirror and name in _KEPT_AT_ONCE:
      self._mirror.push()

  def show(self, step: int, call: Callable[[Guarded, int], None]) -> None:
    """Calls a function with each tracker, for images or histograms, which are not in the record."""
    for tracker in self._trackers if self._active else ():
      call(tracker, step)

  def advance(self, step: int) -> None:
    """Updates the progress between rows."""
    if self._active:
      self._progress.update(step, {})

  def close(self) -> None:
    """Ends the progress bar and closes the files and trackers; it may be called twice, also while an error passes."""
    if not self._active:
      return
    self._active = False
    self._progress.close()
    try:
      with self._writing():
        self._file.close()
    finally:
      for tracker in self._trackers:
        tracker.close('failed' if sys.exc_info()[0] else self._status)
      if self._mirror:
        self._mirror.close()

  def _ensure_started(self) -> None:
    if not self._is_started:
      self.event('start')

  def _time_s(self) -> float:
    return round(self._time_offset_s + time.monotonic(), 3)

  def _append(self, row: Mapping[str, object]) -> None:
    with self._writing():
      self._file.write(json.dumps(_to_json(row), allow_nan=False, ensure_ascii=False) + '\n')
      self._file.flush()

  @contextlib.contextmanager
  def _writing(self) -> Iterator[None]:
    try:
      yield
    except OSError as error:
      raise os_errors.writing(self._path, error) from error


def read(path: str | os.PathLike[str]) -> Run:
  """Reads the record of a run: a run directory or its `metrics.jsonl`.

  Lines that cannot be read are counted and skipped, and so are metrics that are not numbers. Rows and events of
  steps after N that precede a start with `resumed_from` N were lost and are skipped too.

  Raises:
    FileNotFoundError: the file does not exist.
    UserError: the file cannot be read.
  """
  path = os.fspath(path)
  path = path if path.endswith('.jsonl') else os.path.join(path, FILE)
  try:
    return _collect(path)
  except FileNotFoundError:
    raise
  except OSError as error:
    advice = os_errors.find(error) or 'Move away what is there.'
    raise UserError(f'{path}: expected the record of a run, got {error.strerror}. {advice} Then run the same command '
                    'again.') from error


def _collect(path: str) -> Run:
  entries: list[Event] = []
  num_broken = lost_steps = 0
  for entry in _parse_lines(path):
    if entry is None:
      num_broken += 1
      continue
    if entry.get('event') == 'start':
      resumed_from = _to_step(entry.get('resumed_from'))
      lost_steps += _count_lost(entries, resumed_from)
      entries = [e for e in entries if not _is_lost(e, resumed_from)]
    entries.append(entry)
  rows = [_to_row(e) for e in entries if 'event' not in e]
  return Run(rows, [e for e in entries if 'event' in e], lost_steps, num_broken)


def _parse_lines(path: str) -> Iterator[Event | None]:
  for line in storage.read_text(path).split('\n'):
    if not line.strip():
      continue
    try:
      entry = json.loads(line)
    except (ValueError, RecursionError):
      entry = None
    is_entry = isinstance(entry, dict) and ('event' in entry or _to_step(entry.get('step')) is not None)
    yield entry if is_entry else None


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


def _to_json(value: object) -> object:
  """Returns the value with arrays as lists, keys as text, and 'nan', 'inf' or '-inf' for such floats."""
  if hasattr(value, 'tolist'):  # first, as most values are norms
    value = value.tolist()
  match value:
    case None | bool() | str() | int():
      return value
    case float():
      return value if math.isfinite(value) else str(value)
    case dict() | Mapping():
      return {str(key): _to_json(item) for key, item in value.items()}
    case list() | tuple():
      return [_to_json(item) for item in value]
    case os.PathLike():
      return os.fspath(value)
  raise TypeError(f'a value of type {type(value).__name__} cannot be recorded: {value!r}; '
                  'numbers, text, arrays, lists and dicts can')


def _last_time_s(path: str) -> float:
  if not os.path.exists(path):
    return 0.
  times = [_to_row(entry).get('time_s', 0.) for entry in _parse_lines(path) if entry]
  return max((t for t in times if math.isfinite(t)), default=0.)


def _end_last_line(path: str) -> None:
  """Ends a line that was left incomplete by a kill, so that the next row starts on a new line."""
  if not os.path.exists(path) or not os.path.getsize(path):
    return
  with open(path, 'rb+') as file:
    file.seek(-1, os.SEEK_END)
    if file.read() != b'\n':
      file.write(b'\n')
