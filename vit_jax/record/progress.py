"""Progress of a run: a bar on a terminal, otherwise a line at intervals.

Other output appears above the bar while it is shown.
"""
from __future__ import annotations

import atexit
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from vit_jax.core import lazy
from vit_jax.record import stage

if TYPE_CHECKING:
  from rich import console as consoles
  from rich import progress as bars
else:
  consoles, bars = lazy.Module('rich.console'), lazy.Module('rich.progress')

_LINE_EVERY_S = 10.


class Progress:
  """A progress bar, or lines; use it in a `with` statement, or call `close()`.

  Args:
    total: number of steps of the run.
    start: number of steps done before.
    shown: False = print nothing.
    stream: stream to print to; None = standard output.
    now: a monotonic clock, in seconds.
  """

  def __init__(self, total: int, *, start: int, shown: bool, stream: TextIO | None = None,
               now: Callable[[], float] = time.monotonic) -> None:
    self._total, self._start, self._step = total, start, start
    self._shown, self._now = shown, now
    self._first: tuple[int, float] | None = None  # step and time of the first update; time before it is mostly startup
    self._stream = sys.stdout if stream is None else stream
    self._values: dict[str, float] = {}
    self._line_at_s: float | None = None
    self._line = ''
    self._bar: bars.Progress | None = None
    self._task: bars.TaskID
    self._handlers: list[logging.StreamHandler[TextIO]] = []
    self._before: tuple[TextIO, TextIO] = (sys.stdout, sys.stderr)
    if shown and self._stream.isatty():
      self._open_bar()

  def __enter__(self) -> Progress:
    return self

  def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
               trace: TracebackType | None) -> None:
    self.close()

  def update(self, step: int, values: Mapping[str, float]) -> None:
    """Advances to `step` (number of updates) and shows the newest loss, images/s, time left and epoch."""
    self._step, self._first = step, self._first or (step, self._now())
    self._values.update(values)
    if self._bar is not None:
      self._bar.update(self._task, completed=step, text=self._describe())
    elif self._shown and values and self._is_line_due():
      self._print_line()

  def close(self) -> None:
    """Restores the terminal; without a bar, prints the last line. It may be called twice."""
    if self._bar is not None:
      self._restore_logging()
      self._bar.stop()
      self._bar = None
      atexit.unregister(self.close)
    elif self._shown and self._values:
      self._print_line()
    self._shown = False

  def _open_bar(self) -> None:
    stage.end()
    before = self._before = (sys.stdout, sys.stderr)
    console = consoles.Console(file=self._stream)
    self._bar = bars.Progress(
      bars.TextColumn('{task.completed:,.0f}/{task.total:,.0f}'), bars.BarColumn(None),
      bars.TaskProgressColumn(), bars.TextColumn('{task.fields[text]}', markup=False),
      console=console, refresh_per_second=4, expand=True)
    self._task = self._bar.add_task('', total=max(self._total, 1), completed=self._start, text='starting')
    self._bar.start()
    atexit.register(self.close)
    # Log handlers keep the stream that they were created with, and would write into the bar.
    for handler in _stream_handlers():
      if handler.stream in before:
        redirected = sys.stdout if handler.stream is before[0] else sys.stderr
        handler.setStream(redirected)
        self._handlers.append(handler)

  def _restore_logging(self) -> None:
    for handler in self._handlers:
      handler.setStream(self._before[0] if handler.stream is sys.stdout else self._before[1])
    self._handlers = []

  def _is_line_due(self) -> bool:
    return self._line_at_s is None or self._now() - self._line_at_s >= _LINE_EVERY_S

  def _print_line(self) -> None:
    line = f'step {self._step:,}/{self._total:,}  {self._describe()}'
    if line != self._line:
      print(line, file=self._stream, flush=True)
    self._line, self._line_at_s = line, self._now()

  def _describe(self) -> str:
    shown = [(name, _FORMATS[name](self._values[name])) for name in _FORMATS if name in self._values]
    left_s = self._values.get('train/time_left_s', self._estimate_left_s())
    words = [text for _, text in shown]
    if left_s is not None and self._step < self._total:
      words.append(f'{format_duration(left_s)} left')
    return '  '.join(words)

  def _estimate_left_s(self) -> float | None:
    first_step, first_s = self._first or (self._step, 0.)
    done = self._step - first_step
    return (self._now() - first_s) / done * (self._total - self._step) if done > 0 else None


_FORMATS: dict[str, Callable[[float], str]] = {
  'train/epoch': lambda x: f'epoch {x:.1f}',
  'train/loss': lambda x: f'loss {x:.4g}',
  'train/images_per_s': lambda x: f'{x:,.0f} images/s',
}


def format_duration(seconds: float) -> str:
  """Returns text such as `42 s`, `3 min 20 s`, `5 h 02 min` or `2 d 4 h`; `?` for an invalid duration."""
  if not 0 <= seconds < float('inf'):
    return '?'
  whole = round(seconds)
  if whole < 60:
    return f'{whole} s'
  if whole < 3600:
    return f'{whole // 60} min {whole % 60:02d} s'
  if whole < 24 * 3600:
    return f'{whole // 3600} h {whole % 3600 // 60:02d} min'
  return f'{whole // 86400} d {whole % 86400 // 3600} h'


def _stream_handlers() -> Iterator[logging.StreamHandler[TextIO]]:
  for handler in logging.getLogger().handlers:
    inner = getattr(handler, 'python_handler', handler)  # absl wraps its stream handler
    if isinstance(inner, logging.StreamHandler) and not isinstance(inner, logging.FileHandler):
      yield inner
