"""Writes the record of a run, `metrics.jsonl`, and passes the rows to the trackers and to the progress display.

The train job makes one `Writer` for each start, inside `run_directory.hold`. The hooks call `write` and `event`, and
the job calls `close`. Reports, summaries and plots are made from the record alone (`reader.py`). The record has one
JSON object per line:

  {"step": 50, "time_s": 12.3, "train/loss": 1.5, …}      a row of metrics
  {"event": "start", "time_s": 0.0, "resumed_from": 40}   an event

`step` is the number of steps done. `time_s` is the number of seconds for which the run has been active: 0 at the first
start; after a resume it continues from the last line. Numbers that are not finite are the strings 'nan', 'inf' and
'-inf', because JSON does not support such numbers. The first line is a `start` event, also if no caller writes one.

In buckets of object storage and their mounts, where nothing can be appended, the file is a copy of a local file,
updated every 30 s (`growing.Mirror`). All lines up to a checkpoint are durable (copied, or synced to disk) before the
checkpoint is written. A kill can lose only later lines, and the resumed run repeats the steps of these lines.
"""
from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from vit_jax.core import failures
from vit_jax.core.errors import UserError, redacted
from vit_jax.record import growing, machine, reader, run_directory, storage
from vit_jax.record.progress import Progress
from vit_jax.record.trackers import Guarded, Status, Tracker, tensorboard

FILE = reader.FILE
_DURABLE = ('checkpoint', 'stop')
"""Events from which a run can resume: the event and all lines before it are made durable at once."""
T = TypeVar('T')


class Writer:
  """Writes the record of a run; on all processes except 0, every method does nothing.

  Args:
    workdir: the run directory, local or in object storage; created if missing.
    process_index: of this process.
    resumed_from: step of the checkpoint from which this run resumes; None for a new run.
    progress_total: number of steps of the run.
    progress: whether to show progress.
    trackers: returns the trackers for a local folder, in which they may write files; None = TensorBoard alone.
  """

  def __init__(self, workdir: str | os.PathLike[str], *, process_index: int, resumed_from: int | None,
               progress_total: int, progress: bool,
               trackers: Callable[[str], Sequence[Guarded]] | None = None) -> None:
    self._is_active = process_index == 0
    self._resumed_from = resumed_from
    self._last_step = resumed_from or 0
    self._is_started = False  # whether the event `start` was written
    if not self._is_active:
      return
    self._owner = run_directory.owner_of(workdir)
    self._mirror = None if storage.can_append(workdir) else growing.Mirror(
        workdir, growing=FILE, check=self._owner.check_once if self._owner else lambda: None)
    folder = os.fspath(self._mirror.folder if self._mirror else workdir)
    self._path = os.path.join(folder, FILE)
    self._file = self._stored(self._open_record)
    self._time_offset_s = reader.last_time_s(self._path) - time.monotonic()
    self._trackers = trackers(folder) if trackers else [tensorboard(folder, resumed_from)]
    self._status: Status = 'done'
    self._progress = Progress(progress_total, start=self._last_step, shown=progress,
                              memory=machine.used_memory_gib)

  def _open_record(self) -> growing.Appender:
    """Opens the record with the lines of earlier starts; ends the last line if a kill has left a part of it."""
    if self._mirror:
      self._mirror.fetch()
    else:
      growing.join(self._path)  # a person may have copied the directory from object storage
    os.makedirs(os.path.dirname(self._path), exist_ok=True)
    appender = growing.Appender(self._path)
    with open(self._path, 'rb') as file:
      size = file.seek(0, os.SEEK_END)
      file.seek(max(0, size - 1))
      if size and file.read() != b'\n':
        appender.write(b'\n')
    return appender

  def __enter__(self) -> Writer:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Adds a row of metrics after `step` steps.

    Raises:
      ValueError: the step is smaller than that of an earlier row.
      UserError: the record cannot be written, for example on a full disk, or because another run has taken over the
        run directory (`run_directory.Replaced`); every other method can raise this error too.
    """
    if not self._is_active:
      return
    if step < self._last_step:
      raise ValueError(f'metrics of step {step} after those of step {self._last_step}: '
                       'steps must not go backwards')
    numbers = {name: float(value) for name, value in values.items()}
    self._append({'step': int(step)}, numbers)
    for tracker in self._trackers:
      tracker.do(lambda opened: opened.write(int(step), numbers))
    self._last_step = int(step)
    self._progress.update(step, numbers)

  def event(self, name: str, **fields: object) -> None:
    """Adds an event: `start`, `checkpoint`, `goodput`, …

    Arrays become lists. `resumed_from` is added to `start`. After a `checkpoint` or `stop`, all lines are durable.

    Raises TemporaryError if the storage of the record still fails after a time.
    """
    if not self._is_active:
      return
    is_durable = name in _DURABLE
    if is_durable and self._owner:
      self._owner.check()
    if name == 'start':
      self._is_started = True
      fields = {'resumed_from': self._resumed_from, **fields}
    self._append({'event': name}, fields)
    if name == 'stop':
      self._status = 'stopped'
    if is_durable and self._mirror:
      self._mirror.settle()
    elif is_durable:
      self._stored(self._file.settle)

  def show(self, call: Callable[[Tracker], None]) -> None:
    """Calls a function with each tracker, to show images or histograms, which are not in the record."""
    for tracker in self._trackers if self._is_active else ():
      tracker.do(call)

  def advance(self, step: int) -> None:
    """Updates the progress display at a step that has no row."""
    if self._is_active:
      self._progress.update(step, {})

  def check_not_moved(self) -> None:
    """Raises UserError if the run directory was moved: the open record is not the file at its path any more."""
    if not self._is_active or self._mirror:
      return
    def stat_at_path() -> os.stat_result | None:
      with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return os.stat(self._path)
      return None

    opened = os.fstat(self._file.fileno())
    at_path = self._stored(stat_at_path)
    if at_path is None or (not os.path.samestat(opened, at_path) and opened.st_size != at_path.st_size):
      folder = os.path.dirname(self._path)
      raise UserError(
          f'--workdir={folder}: expected the directory in which the run began, got {"another" if at_path else "none"}: '
          'it was moved or removed while the run was writing to it. Run the same command again with --workdir=DIR, '
          'where it is now, to resume from its last checkpoint. What is at the old place is incomplete.')

  def close(self) -> None:
    """Ends the progress display, closes the record and the trackers; may be called twice, also during an exception."""
    if not self._is_active:
      return
    self._is_active = False
    self._progress.close()
    try:
      self._stored(self._file.close)
    finally:
      for tracker in self._trackers:
        tracker.close('failed' if sys.exc_info()[0] else self._status)
      if self._mirror:
        self._mirror.close()

  def _append(self, head: Mapping[str, object], fields: Mapping[str, object]) -> None:
    """Appends a line with the fields of `head` (`step` or `event`), the time, and `fields`, in this order."""
    if not self._is_started:
      self.event('start')
    if self._owner and (self._owner.is_replaced or not self._mirror):  # a mirror checks before each copy
      self._owner.check()
    line = {**head, 'time_s': round(self._time_offset_s + time.monotonic(), 3), **fields}
    text = redacted(json.dumps(_to_json(line), allow_nan=False, ensure_ascii=False))
    self._stored(lambda: self._file.write(storage.encode(f'{text}\n')))  # names of files need not be UTF-8

  def _stored(self, action: Callable[[], T]) -> T:
    """Returns the result of an action on the record; converts errors, but repeats nothing, as `Appender` does that."""
    return failures.stored(action, self._path, patience_s=0.)


def _to_json(value: object) -> object:
  """Returns a JSON value: arrays become lists, keys become text, and floats that are not finite become text, too."""
  if hasattr(value, 'tolist'):  # arrays of NumPy and jax; first, as most values are norms
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
