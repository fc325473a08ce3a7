"""The record of a run: `metrics.jsonl`, `norms.f32`, the trackers that show it elsewhere, and the progress.

`metrics.jsonl` is the record (`reader.py` reads it), and `norms.f32` (`norms_file.py`) has the norms of all parameters;
everything else can be derived from them. The record has one JSON object per line:

  {"step": 50, "time_s": 12.3, "train/loss": 1.5, …}      a row of metrics
  {"event": "start", "time_s": 0.0, "resumed_from": 40}   any other event

`step` is the number of updates, `time_s` the seconds for which the run has been active: it is 0 at the first start, and
continues from the last line after a resume. Numbers that are not finite are the strings 'nan', 'inf' and '-inf',
because JSON does not support them.

In object storage and on mounts of it, where nothing can be appended, these files are copies of local files, updated
every 30 s (`storage.Mirror`). Everything up to a checkpoint is durable before the checkpoint is written: copied, or
synced to disk. A kill loses at most later lines, whose steps the resumed run writes again, so that readers find every
step once.

Arrays are only accessed through `float()` and `tolist()`.
"""
from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType

from vit_jax.core import os_errors
from vit_jax.core.redaction import redacted
from vit_jax.record import appending, lease, machine, norms_file, reader, storage
from vit_jax.record import progress as progress_lib
from vit_jax.record.trackers import tensorboard
from vit_jax.record.trackers.tracker import Guarded, Status

FILE = reader.FILE
_KEPT_AT_ONCE = ('checkpoint', 'local_checkpoint', 'stop')
"""Events that a run can resume from; neither they nor earlier lines may be lost."""


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
    growing = (FILE, norms_file.FILE)
    self._lease = lease.find(workdir)
    self._mirror = None if storage.can_append(workdir) else storage.Mirror(
        workdir, growing=growing, check=self._lease.look if self._lease else lambda: None)
    folder = os.fspath(self._mirror.folder if self._mirror else workdir)
    self._path = os.path.join(folder, FILE)
    with self._writing():
      if self._mirror:
        self._mirror.fetch(*growing[:1 if resumed_from is None else None])
      else:
        for name in growing:  # of a directory that was copied from object storage
          storage.join_growing(os.path.join(folder, name))
      os.makedirs(folder, exist_ok=True)
      self._time_offset_s = (
          reader.last_time_s(self._path) if os.path.exists(self._path) else 0.) - time.monotonic()
      _end_last_line(self._path)
      self._file = appending.Appender(self._path, os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666))
    self._trackers = trackers(folder) if trackers else [tensorboard.opened(folder, resumed_from)]
    self._status: Status = 'done'
    self._norms = norms_file.NormsFile(os.path.join(folder, norms_file.FILE), is_new=resumed_from is None)
    self._progress = progress_lib.Progress(progress_total, start=self._last_step, shown=progress,
                                           memory=machine.used_memory_gib)

  def __enter__(self) -> Writer:
    return self

  def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
               trace: TracebackType | None) -> None:
    self.close()

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Adds a row of metrics after `step` updates.

    Raises:
      ValueError: the step is smaller than one that was written.
      UserError: the record cannot be written, for example on a full disk, or because another run has taken over the
        run directory (`lease.Replaced`); every other method can raise it too.
    """
    if not self._active:
      return
    if step < self._last_step:
      raise ValueError(f'metrics of step {step} after those of step {self._last_step}: '
                       'steps must not go backwards')
    numbers = {name: float(value) for name, value in values.items()}
    self._check_lease()
    self._ensure_started()
    self._append({'step': int(step), 'time_s': self._time_s(), **numbers})
    for tracker in self._trackers:
      tracker.write(int(step), numbers)
    self._last_step = int(step)
    self._progress.update(step, numbers)

  def event(self, name: str, **fields: object) -> None:
    """Adds an event: `start`, `checkpoint`, `goodput`, …

    Arrays become lists. `resumed_from` is added to `start`. After a `checkpoint` or `stop`, everything so far is
    durable.

    Raises:
      TemporaryError: the storage of the record still fails after a time.
    """
    if not self._active:
      return
    self._check_lease()
    is_kept = name in _KEPT_AT_ONCE
    if is_kept and self._lease:
      self._lease.check()
    if name == 'start':
      self._is_started = True
      fields = {'resumed_from': self._resumed_from, **fields}
    self._ensure_started()
    self._append({'event': name, 'time_s': self._time_s(), **fields})
    self._status = 'stopped' if name == 'stop' else self._status
    if is_kept:
      self._settle()

  def _settle(self) -> None:
    """Makes everything that was written so far durable."""
    for tracker in self._trackers:
      tracker.settle()
    if self._mirror:
      self._mirror.settle()
      return
    with self._writing():
      self._file.settle()
      self._norms.settle()

  def show(self, step: int, call: Callable[[Guarded, int], None]) -> None:
    """Calls a function with each tracker, for images or histograms, which are not in the record."""
    for tracker in self._trackers if self._active else ():
      call(tracker, step)

  def norms(self, step: int, norms: norms_file.Norms) -> None:
    """Adds the norms of all parameters after `step` updates, by kind and path, to `norms.f32`."""
    if self._active:
      with self._writing():
        self._norms.write(step, norms)

  def advance(self, step: int) -> None:
    """Updates the progress between rows."""
    if self._active:
      self._check_lease()
      self._progress.update(step, {})

  def check_place(self) -> None:
    """Checks that the record is still where the run writes everything else, before a checkpoint is saved.

    Raises:
      UserError: the run directory was moved, removed or replaced.
    """
    if not self._active or self._mirror:
      return
    own = os.fstat(self._file.fileno())
    try:
      found: os.stat_result | None = os.stat(self._path)
    except OSError as error:
      if error.errno not in (errno.ENOENT, errno.ENOTDIR):
        raise os_errors.writing(self._path, error) from error
      found = None
    if found is None or not os.path.samestat(own, found) and own.st_size != found.st_size:
      folder = os.path.dirname(self._path)
      raise os_errors.Obstacle(
          f'--workdir={folder}: expected the directory in which the run began, got {"another" if found else "none"}: '
          'it was moved or removed while the run was writing to it. Run the same command again with --workdir=DIR, '
          'where it is now, to resume from its last checkpoint. What is at the old place is incomplete.')

  def close(self) -> None:
    """Ends the progress bar and closes the files and trackers; it may be called twice, also while an error passes."""
    if not self._active:
      return
    self._active = False
    self._progress.close()
    try:
      with self._writing():
        self._file.close()
        self._norms.close()
    finally:
      for tracker in self._trackers:
        tracker.close('failed' if sys.exc_info()[0] else self._status)
      if self._mirror:
        self._mirror.close()

  def _check_lease(self) -> None:
    """Raises Replaced if another run has taken over; reads the lease only where a line is written at once."""
    if self._lease and self._mirror:
      self._lease.raise_if_replaced()
    elif self._lease:
      self._lease.ensure()

  def _ensure_started(self) -> None:
    if not self._is_started:
      self.event('start')

  def _time_s(self) -> float:
    return round(self._time_offset_s + time.monotonic(), 3)

  def _append(self, row: Mapping[str, object]) -> None:
    with self._writing():
      text = redacted(json.dumps(_to_json(row), allow_nan=False, ensure_ascii=False)) + '\n'
      self._file.write(storage.encode(text))  # names of files need not be UTF-8

  @contextlib.contextmanager
  def _writing(self) -> Iterator[None]:
    try:
      yield
    except OSError as error:
      raise os_errors.writing(self._path, error) from error


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


def _end_last_line(path: str) -> None:
  """Ends a line that was left incomplete by a kill, so that the next row starts on a new line."""
  if not os.path.exists(path) or not os.path.getsize(path):
    return
  with open(path, 'rb+') as file:
    file.seek(-1, os.SEEK_END)
    if file.read() != b'\n':
      file.write(b'\n')
