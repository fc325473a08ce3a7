"""Progress of a run or of a task inside a job: a live display on a terminal, otherwise a line at intervals.

`writer.py` shows the progress of a run (`Progress`), with the metrics that it records; evaluations and jobs show that
of their tasks (`TaskProgress`). The display begins with the first step; before it, the job shows its stages
(`console.begin_stage`). It is a bar with the time left, and below it epoch, loss, speed, the newest accuracy and
memory. Other output appears above it. The loss is that of the last logged step, which is named if it is not the newest.
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

_LINE_EVERY_S = 10.
_MEASURED_S = 1.
LONG_S = 120.
_ACCURACY = re.compile(r'(?!train/)[^/]+/(top1|\d+shot)[^/]*')


class Progress:
  """A live display, or lines; use it in a `with` statement, or call `close()`.

  Args:
    total: number of steps of the run, or of other units.
    start: number of steps done before.
    shown: False = print nothing.
    unit: what is counted.
    stream: stream to print to; None = standard output.
    now: a monotonic clock, in seconds.
    memory: returns the GiB in use, for the display; None = not shown.
  """

  def __init__(self, total: int, *, start: int, shown: bool, unit: str = 'steps', stream: TextIO | None = None,
               now: Callable[[], float] = time.monotonic, memory: Callable[[], float | None] | None = None) -> None:
    self._total, self._start, self._step, self._unit = total, start, start, unit
    self._shown, self._now, self._memory = shown and console.is_talking(), now, memory
    self._first: tuple[int, float] | None = None  # step and time of the first update; time before it is mostly startup
    self._stream = sys.stdout if stream is None else stream
    self._values: dict[str, tuple[int, float]] = {}  # the newest of each name, with its step
    self._line_at_s: float | None = None
    self._line = ''
    self._bar: bars.Progress | None = None
    self._display = contextlib.ExitStack()

  def __enter__(self) -> Progress:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def update(self, step: int, values: Mapping[str, float]) -> None:
    """Advances to `step` (number of updates) with the newest values by name; values of earlier steps stay."""
    self._step, self._first = step, self._first or (step, self._now())
    self._values.update({name: (step, value) for name, value in values.items()})
    if self._shown and self._bar is None and console.is_live(self._stream):
      console.end_stage()
      self._bar = bars.Progress(
        bars.TextColumn('{task.completed:,.0f}/{task.total:,.0f}'), bars.BarColumn(None),
        bars.TaskProgressColumn(), bars.TextColumn('{task.fields[left]}', markup=False), expand=True)
      self._bar.add_task('', total=max(self._total, 1), completed=self._start, left='')
      self._display.enter_context(console.live(self._render, self._stream, is_kept=True))
    if self._bar is not None:
      self._bar.update(self._bar.task_ids[0], completed=step, left=self._describe_left())
    elif self._shown and self._values and (
        self._line_at_s is None or self._now() - self._line_at_s >= _LINE_EVERY_S):
      self._print_line()

  def close(self) -> None:
    """Ends the display, whose last state stays; without one, prints the last line. It may be called twice."""
    self._display.close()
    if self._shown and self._bar is None and self._values:
      self._print_line()
    self._shown = False

  def _render(self) -> consoles.RenderableType:
    """Returns the bar, and below it the newest values if there are any."""
    words = self._describe(is_live=True)
    lines = [texts.Text('  '.join(words), overflow='ellipsis', no_wrap=True)] if words else []
    return consoles.Group(*([self._bar] if self._bar else []), *lines)

  def _print_line(self) -> None:
    counted = (f'step {self._step:,}/{self._total:,}' if self._unit == 'steps' else
               f'{self._step:,} of {self._total:,} {self._unit}')
    line = '  '.join(filter(None, [counted, *self._describe(is_live=False), self._describe_left()]))
    if line != self._line:
      print(line, file=self._stream, flush=True)
    self._line, self._line_at_s = line, self._now()

  def _describe(self, *, is_live: bool) -> list[str]:
    """Returns the newest values as words; the accuracy and the memory only for the live display."""
    words = []
    if 'train/epoch' in self._values:
      at, epoch = self._values['train/epoch']
      words.append(f'epoch {epoch * self._step / max(1, at):.1f}')
    if 'train/loss' in self._values:
      at, loss = self._values['train/loss']
      words.append(f'loss {loss:.4g}' + (f' (step {at:,})' if at != self._step else ''))
    if 'train/images_per_s' in self._values:
      words.append(f'{self._values["train/images_per_s"][1]:,.0f} images/s')
    if is_live:
      names = [name for name in self._values if _ACCURACY.fullmatch(name)]
      newest = max(names, key=lambda name: (self._values[name][0], '@ema' in name), default='')
      words += [f'{newest} {self._values[newest][1]:.1%}'] if newest else []
      used_gib = self._memory() if self._memory and words else None
      words += [f'{used_gib:.1f} GiB'] if used_gib else []
    return words

  def _describe_left(self) -> str:
    """Returns the time left, '' at the end or if it is not known yet."""
    first_step, first_s = self._first or (self._step, 0.)
    done, left = self._step - first_step, self._total - self._step
    estimate_s = (self._now() - first_s) / done * left if done > 0 else None
    _, left_s = self._values.get('train/time_left_s', (0, estimate_s))
    return f'{format_duration(left_s)} left' if left_s is not None and left > 0 else ''


class TaskProgress:
  """Progress of one task inside a job: a bar on a terminal, otherwise log lines; use it in a `with` statement.

  During training, which has its own bar, it is always lines, because two bars cannot share a terminal. Each line names
  the task; for a bar, one line above it does. A task of more than `LONG_S` seconds says so once its speed is known,
  `_MEASURED_S` seconds after its second update: before it, programs are compiled for the first batch and for what the
  program itself returns.

  Args:
    name: of the task, for lines.
    total: number of units.
    unit: what is counted, such as `images`.
    bar: whether a bar may be shown. Only one process shows progress.
    active: False = show nothing.
    repeats: number of such tasks that follow one another, with this one.
    now: a monotonic clock, in seconds.
  """

  def __init__(self, name: str, total: int, *, unit: str, bar: bool, active: bool, repeats: int = 1,
               now: Callable[[], float] = time.monotonic) -> None:
    self._name, self._total, self._unit, self._now = name, total, unit, now
    self._repeats, self._has_speed = repeats, False
    self._times: list[tuple[int, float]] = []  # what was done at the first two updates, and when
    self._active, self._began_s = active, now()
    self._line_at_s = self._began_s
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
    """Advances to `done` of the total."""
    done, passed_s = min(done, self._total), self._now() - self._began_s
    rate = done / passed_s if passed_s > 0 else 0.
    self._warn_if_long(done)
    if self._bar is not None:
      self._bar.update(done, {'train/images_per_s': rate} if self._unit == 'images' else {})
    elif self._active and self._now() - self._line_at_s >= _LINE_EVERY_S:
      self._line_at_s = self._now()
      left = f', {format_duration((self._total - done) / rate)} left' if rate else ''
      log.info('%s: %s of %s %s%s', self._name, f'{done:,}', f'{self._total:,}', self._unit, left)

  def _warn_if_long(self, done: int) -> None:
    """Logs once how long a long task takes, from the units after the second update."""
    if len(self._times) < 2:
      self._times.append((done, self._now()))
      return
    first, began_s = self._times[1]
    passed_s = self._now() - began_s
    if self._has_speed or not self._active or done == first or passed_s < _MEASURED_S:
      return
    self._has_speed = True
    total = self._total * self._repeats
    seconds = passed_s / (done - first) * total
    if seconds > LONG_S:
      log.info('%s: takes about %s, as %s %s take %s each.', self._name, format_duration(seconds), f'{total:,}',
               self._unit, f'{passed_s / (done - first):.2g} s')


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
