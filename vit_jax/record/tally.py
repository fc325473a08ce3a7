"""Progress of one task inside a job: a bar on a terminal, otherwise log lines at intervals.

During training, which has its own bar, it is always lines, because two bars cannot share a terminal. Each line names
the task; for a bar, one line above it does.
"""
from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from types import TracebackType

from vit_jax.record.progress import Progress, format_duration

log = logging.getLogger('vit_jax.record')

LINE_EVERY_S = 10.


class Tally:
  """Counts up to `total` and shows the progress; use it in a `with` statement.

  Args:
    name: of the task, for lines.
    total: number of units.
    unit: what is counted, such as `images`.
    bar: whether a bar may be shown. Only one process shows progress.
    active: False = show nothing.
    now: a monotonic clock, in seconds.
  """

  def __init__(self, name: str, total: int, *, unit: str, bar: bool, active: bool,
               now: Callable[[], float] = time.monotonic) -> None:
    self._name, self._total, self._unit, self._now = name, total, unit, now
    self._active, self._began_s = active, now()
    self._said_s = self._began_s
    self._bar: Progress | None = None
    if bar and active and sys.stdout.isatty():
      log.info('%s: %s %s', name, f'{total:,}', unit)
      self._bar = Progress(total, start=0, shown=True, unit=unit, now=now)

  def __enter__(self) -> Tally:
    return self

  def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
               trace: TracebackType | None) -> None:
    if self._bar is not None:
      self._bar.close()

  def update(self, done: int) -> None:
    """Advances to `done` of the total."""
    done, passed_s = min(done, self._total), self._now() - self._began_s
    rate = done / passed_s if passed_s > 0 else 0.
    if self._bar is not None:
      self._bar.update(done, {'train/images_per_s': rate} if self._unit == 'images' else {})
    elif self._active and self._now() - self._said_s >= LINE_EVERY_S:
      self._said_s = self._now()
      left = f', {format_duration((self._total - done) / rate)} left' if rate else ''
      log.info('%s: %s of %s %s%s', self._name, f'{done:,}', f'{self._total:,}', self._unit, left)
