"""Progress of a run or of a task inside a job: a live display on a terminal, otherwise a line at intervals.

`writer.py` shows the progress of a run (`Progress`) with the metrics that it records. Evaluations and jobs show the
progress of their tasks (`TaskProgress`). Before the first update, the job shows its stages (`console.begin_stage`). The
display has a bar with the time left, and below the bar epoch, loss, speed, the newest accuracy and memory. The loss is
that of the last logged step; the number of this step follows unless it is the newest step.
"""
from __future__ import annotations

import contextlib
import logging
import re
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TextIO

from vit_jax.core import lazy
from vit_jax.record import console

if TYPE_CHECKING:
  from rich import console as consoles
  from rich import progress as bars
  from rich import text as texts
else:
  consoles, bars, texts = (lazy.Module(f'rich.{name}') for name in ('console', 'progress', 'text'))

log = logging.getLogger('vit_jax.record')

_LINE_EVERY_S = 10.    # between two lines
_MIN_MEASURED_S = 1.   # for which the speed of a task is measured
LONG_S = 120.          # the duration of a longer task is logged
_ACCURACY = re.compile(r'(?!train/)[^/]+/(top1|\d+shot)[^/]*')  # such as 'test/top1@ema' and 'few/5shot'


class Progress:
  """A live display, or lines; use it in a `with` statement, or call `close()`.

  Args:
    total: number of units of the run.
    start: number of units done before this process.
    shown: False = print nothing.
    unit: name of the units: `steps`, `images`.
    stream: to print to; None = standard output.
    now: a monotonic clock, in seconds.
    memory: returns the GiB in use, for the live display; None = not shown.
  """

  def __init__(self, total: int, *, start: int, shown: bool, unit: str = 'steps', stream: TextIO | None = None,
               now: Callable[[], float] = time.monotonic, memory: Callable[[], float | None] | None = None) -> None:
    self._total, self._start, self._step, self._unit = total, start, start, unit
    self._is_shown, self._now, self._memory = shown and console.is_talking(), now, memory
    self._first: tuple[int, float] | None = None  # step and time of the first update; time before it is mostly startup
    self._stream = sys.stdout if stream is None else stream
    self._values: dict[str, tuple[int, float]] = {}  # by name: the step of the newest value, and the value
    self._line, self._line_at_s = '', 0.  # the last line and its time; '' = none yet
    self._bar: bars.Progress | None = None
    self._display = contextlib.ExitStack()

  def __enter__(self) -> Progress:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def update(self, step: int, values: Mapping[str, float]) -> None:
    """Advances to `step`, with the metrics of this step. Newest values of other metrics stay on the display."""
    now_s = self._now()
    self._step, self._first = step, self._first or (step, now_s)
    self._values.update({name: (step, value) for name, value in values.items()})
    if self._is_shown and self._bar is None and console.is_live(self._stream):
      self._begin_display()
    if self._bar is not None:
      self._bar.update(self._bar.task_ids[0], completed=step, left=self._describe_left())
      return
    is_first_line = not self._line
    since_s = self._first[1] if is_first_line else self._line_at_s
    if self._is_shown and (now_s - since_s >= _LINE_EVERY_S or (is_first_line and self._values)):
      self._print_line()

  def close(self) -> None:
    """Ends the live display, whose last state stays; without one, prints a last line. It may be called twice."""
    self._display.close()
    if self._is_shown and self._bar is None and self._values:
      self._print_line()
    self._is_shown = False

  def _begin_display(self) -> None:
    """Ends the stage of the job, and shows the live display with the bar."""
    console.end_stage()
    self._bar = bars.Progress(
        bars.TextColumn('{task.completed:,.0f}/{task.total:,.0f}'), bars.BarColumn(None),
        bars.TaskProgressColumn(), bars.TextColumn('{task.fields[left]}', markup=False), expand=True)
    self._bar.add_task('', total=max(self._total, 1), completed=self._start, left='')
    self._display.enter_context(console.live(self._render, self._stream, is_kept=True))

  def _render(self) -> consoles.RenderableType:
    """Returns the bar, and below the bar the newest values if there are any."""
    words = self._describe(is_live=True)
    lines = [texts.Text('  '.join(words), overflow='ellipsis', no_wrap=True)] if words else []
    return consoles.Group(*([self._bar] if self._bar else []), *lines)

  def _print_line(self) -> None:
    position = (f'step {self._step:,}/{self._total:,}' if self._unit == 'steps' else
                f'{self._step:,} of {self._total:,} {self._unit}')
    line = '  '.join(filter(None, [position, *self._describe(is_live=False), self._describe_left()]))
    if line != self._line:
      print(line, file=self._stream, flush=True)
    self._line, self._line_at_s = line, self._now()

  def _describe(self, *, is_live: bool) -> list[str]:
    """Returns the newest values as words; accuracy and memory only for the live display."""
    words = []
    if 'train/epoch' in self._values:
      step, epoch = self._values['train/epoch']
      words.append(f'epoch {epoch * self._step / max(1, step):.1f}')
    if 'train/loss' in self._values:
      step, loss = self._values['train/loss']
      words.append(f'loss {loss:.4g}' + (f' (step {step:,})' if step != self._step else ''))
    if 'train/images_per_s' in self._values:
      words.append(f'{self._values["train/images_per_s"][1]:,.0f} images/s')
    if is_live:
      names = [name for name in self._values if _ACCURACY.fullmatch(name)]
      if names:
        newest = max(names, key=lambda name: (self._values[name][0], '@ema' in name))
        words.append(f'{newest} {self._values[newest][1]:.1%}')
      used_gib = self._memory() if self._memory and words else None
      if used_gib:
        words.append(f'{used_gib:.1f} GiB')
    return words

  def _describe_left(self) -> str:
    """Returns text such as '3 min 20 s left'; '' at the end, or if the time is not known yet."""
    first_step, first_s = self._first or (self._step, 0.)
    num_done, num_left = self._step - first_step, self._total - self._step
    estimate_s = (self._now() - first_s) / num_done * num_left if num_done > 0 else None
    _, left_s = self._values.get('train/time_left_s', (0, estimate_s))
    return f'{format_duration(left_s)} left' if left_s is not None and num_left > 0 else ''


class TaskProgress:
  """Progress of one task inside a job: a bar on a terminal, otherwise log lines; use it in a `with` statement.

  Log lines name the task; a log line above a bar does so too. If the task and its repeats take more than `LONG_S`
  seconds, a log line has the expected duration. The speed is measured from the second update on, for at least
  `_MIN_MEASURED_S`: until then, programs are compiled for the first batch and for the arrays that a program returns.

  Args:
    name: of the task, for log lines.
    total: number of units.
    unit: name of the units, such as `images`.
    bar: whether a bar may be shown. False during training, which has its own bar: two cannot share a terminal.
    active: False = show nothing; only one process shows progress.
    repeats: number of such tasks that follow one another, including this one.
    now: a monotonic clock, in seconds.
  """

  def __init__(self, name: str, total: int, *, unit: str, bar: bool, active: bool, repeats: int = 1,
               now: Callable[[], float] = time.monotonic) -> None:
    self._name, self._total, self._unit, self._now = name, total, unit, now
    self._repeats, self._has_speed = repeats, False
    self._first_updates: list[tuple[int, float]] = []  # at most two: the number of units done, and the time
    self._is_active = active
    self._began_s = self._line_at_s = now()
    self._bar: Progress | None = None
    if bar and active and console.is_live(sys.stdout):
      log.info('%s: %s %s', name, f'{total:,}', unit)
      self._bar = Progress(total, start=0, shown=True, unit=unit, now=now)

  def __enter__(self) -> TaskProgress:
    return self

  def __exit__(self, *_: object) -> None:
    if self._bar is not None:
      self._bar.close()

  def update(self, done: int) -> None:
    """Advances to `done` units of the total."""
    done = min(done, self._total)
    passed_s = self._now() - self._began_s
    rate = done / passed_s if passed_s > 0 else 0.  # units per second
    self._log_if_long(done)
    if self._bar is not None:
      self._bar.update(done, {'train/images_per_s': rate} if self._unit == 'images' else {})
    elif self._is_active and self._now() - self._line_at_s >= _LINE_EVERY_S:
      self._line_at_s = self._now()
      left = f', {format_duration((self._total - done) / rate)} left' if rate else ''
      log.info('%s: %s of %s %s%s', self._name, f'{done:,}', f'{self._total:,}', self._unit, left)

  def _log_if_long(self, done: int) -> None:
    """Logs once how long a long task takes, computed from the speed since the second update."""
    if len(self._first_updates) < 2:
      self._first_updates.append((done, self._now()))
      return
    done_before, began_s = self._first_updates[1]
    passed_s = self._now() - began_s
    if self._has_speed or not self._is_active or done == done_before or passed_s < _MIN_MEASURED_S:
      return
    self._has_speed = True
    unit_s, total = passed_s / (done - done_before), self._total * self._repeats
    if unit_s * total > LONG_S:
      log.info('%s: takes about %s, as %s %s take %s each.', self._name, format_duration(unit_s * total), f'{total:,}',
               self._unit, f'{unit_s:.2g} s')


def format_duration(seconds: float) -> str:
  """Returns text such as `42 s`, `3 min 20 s`, `5 h 02 min` or `2 d 4 h`; `?` for an invalid duration."""
  if not 0 <= seconds < float('inf'):
    return '?'
  whole_s = round(seconds)
  if whole_s < 60:
    return f'{whole_s} s'
  if whole_s < 3600:
    return f'{whole_s // 60} min {whole_s % 60:02d} s'
  if whole_s < 24 * 3600:
    return f'{whole_s // 3600} h {whole_s % 3600 // 60:02d} min'
  return f'{whole_s // 86400} d {whole_s % 86400 // 3600} h'
