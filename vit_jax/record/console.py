"""What a job writes beside its results: how much, and in which form.

`-q` shows warnings, errors and results alone; `-v` adds messages of libraries and tracebacks. They set `VIT_JAX_LOG`,
which processes that a job starts inherit. Messages begin with the seconds since the start of the command.

Stages are what a job waits for before its first results: importing, opening the data, compiling. A job calls
`begin_stage(TEXT)` for each, and `end_stage()` before it prints results. The command line shows them on standard error
with the seconds since its start: a line for each, or on a terminal one live line. Without the command line, as in the
Python API, nothing is shown.
"""
from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from vit_jax.core import failures
from vit_jax.core.errors import UserError
from vit_jax.core.redaction import redacted

VARIABLE = 'VIT_JAX_LOG'
QUIET, VERBOSE = 'quiet', 'verbose'
SWITCHES = {'-q': QUIET, '--quiet': QUIET, '-v': VERBOSE, '--verbose': VERBOSE}
_REFRESH_S = 0.25
_CLEAR = '\r\x1b[K'
_host = ''
_WIDTH = 80  # the narrowest terminal whose lines are not cut


def level() -> int:
  """Returns the lowest level of messages that are shown."""
  return {QUIET: logging.WARNING, VERBOSE: logging.DEBUG}.get(os.environ.get(VARIABLE, ''), logging.INFO)


def take(words: Sequence[str]) -> tuple[list[str], str]:
  """Returns the words of a command line without `-q` and `-v`, and the one that was among them; '' = none.

  Raises:
    UserError: both were.
  """
  found = {SWITCHES[word] for word in words if word in SWITCHES}
  if len(found) > 1:
    raise UserError('-q, -v: expected one of them, got both. Remove one.')
  return [word for word in words if word not in SWITCHES], next(iter(found), '')


@contextlib.contextmanager
def chosen(how: str) -> Iterator[None]:
  """Sets the environment for `QUIET` or `VERBOSE`; '' changes nothing."""
  wanted = {VARIABLE: how} if how else {}
  wanted |= {failures.SHOW: '1'} if how == VERBOSE else {}
  before = {name: os.environ.get(name) for name in wanted}
  os.environ.update(wanted)
  try:
    yield
  finally:
    for name, value in before.items():
      os.environ.pop(name) if value is None else os.environ.update({name: value})


def is_talking() -> bool:
  """Returns whether progress and stages are shown."""
  return level() < logging.WARNING


def name_host(host: int) -> None:
  """Adds the index of this host to the messages of this process, which is one of several in a run."""
  global _host
  _host = f'host {host}: '


def messages() -> tuple[float, str]:
  """Returns what `follow` needs in a process that this one starts."""
  return began_s(), _host


def follow(begun: tuple[float, str]) -> None:
  """Shows the warnings of this process, a loader process, in the form of the process that started it."""
  global _host
  start_s, _host = begun
  handler = logging.StreamHandler()
  handler.setFormatter(Formatter(handler.stream, began_s=start_s))
  own = logging.getLogger('vit_jax')
  own.handlers, own.propagate = [handler], False


def elapsed(seconds: float) -> str:
  """Returns a duration in a column of seven characters: `  9.4 s`, and from 1,000 s on `0:16:40`."""
  if seconds < 1000:
    return f'{seconds:5.1f} s'
  whole = int(seconds)
  return f'{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}'


class Formatter(logging.Formatter):
  """Formats a message with the time and, for warnings and errors, its level; on a terminal within its width.

  Args:
    stream: where messages go.
    began_s: the start of the command on the clock `now`.
    now: a monotonic clock, in seconds.
  """

  def __init__(self, stream: TextIO, *, began_s: float, now: Callable[[], float] = time.monotonic) -> None:
    super().__init__()
    self._is_terminal, self._began_s, self._now = stream.isatty(), began_s, now

  def format(self, record: logging.LogRecord) -> str:
    """Returns the lines of a message; those after the first are indented."""
    name = f'{record.levelname.lower()}: ' if record.levelno >= logging.WARNING else ''
    first, *rest = redacted(f'{_host}{name}{super().format(record)}').split('\n')
    start = f'{elapsed(self._now() - self._began_s)}  '
    lines = [f'{start}{first}', *(f'{" " * len(start)}{line}' for line in rest)]
    return '\n'.join(line for one in lines for line in self._wrapped(one, indent=len(start) + 2))

  def _wrapped(self, line: str, *, indent: int) -> list[str]:
    width = max(_WIDTH, _columns()) if self._is_terminal else 0
    if not self._is_terminal or len(line) < width:
      return [line]
    return textwrap.wrap(line, width - 1, subsequent_indent=' ' * indent, break_long_words=False,
                         break_on_hyphens=False, drop_whitespace=True)


def _columns() -> int:
  try:
    return os.get_terminal_size(sys.stderr.fileno()).columns
  except (OSError, ValueError):  # no terminal, or a stream without a file
    return _WIDTH


def begin_stage(text: str) -> None:
  """Shows that the job now waits for this; it ends the stage before."""
  if display := _DISPLAY.get():
    display.show(text)


def end_stage() -> None:
  """Ends the last stage, and clears its live line."""
  begin_stage('')


def began_s() -> float:
  """Returns the start of the command on the clock `time.monotonic`; now, without the command line."""
  display = _DISPLAY.get()
  return display.began_s if display else time.monotonic()


def hide_stages() -> None:
  """Shows no more stages, as in processes of a run other than process 0."""
  end_stage()
  _DISPLAY.set(None)


@contextlib.contextmanager
def stages_shown(stream: TextIO | None = None, *, now: Callable[[], float] = time.monotonic) -> Iterator[None]:
  """Shows the stages that begin inside, in this thread, on `stream`; None = standard error. With -q it shows none."""
  if not is_talking():
    yield
    return
  display = StageDisplay(stream or sys.stderr, now=now)
  token = _DISPLAY.set(display)
  try:
    yield
  finally:
    _DISPLAY.reset(token)
    display.close()


class StageDisplay:
  """Writes stages to a stream; on a terminal, a thread keeps the seconds of the live line up to date."""

  def __init__(self, stream: TextIO, *, now: Callable[[], float]) -> None:
    self._stream, self._now, self.began_s = stream, now, now()
    self._is_live, self._text = stream.isatty(), ''
    self._lock, self._closing = threading.Lock(), threading.Event()
    self._thread: threading.Thread | None = None

  def show(self, text: str) -> None:
    """Shows a stage; '' ends the last one."""
    if not self._is_live:
      self._write(f'{self._describe(text)}\n' if text else '')
      return
    with self._lock:
      was, self._text = self._text, text
      self._write(f'{_CLEAR}{self._describe(text)}' if text else _CLEAR if was else '')
    if text and self._thread is None:
      self._thread = threading.Thread(target=self._refresh, name='stage', daemon=True)
      self._thread.start()
    for other in logging.getLogger().handlers:
      other.addFilter(self._make_room)

  def close(self) -> None:
    """Clears the live line, and ends its thread."""
    if self._is_live:
      self.show('')
    self._closing.set()
    if self._thread is not None:
      self._thread.join()
    for other in logging.getLogger().handlers:
      other.removeFilter(self._make_room)

  def _describe(self, text: str) -> str:
    return f'{elapsed(self._now() - self.began_s)}  {text} …'

  def _write(self, text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the reader has gone, or the stream is closed
      self._stream.write(text)
      self._stream.flush()

  def _refresh(self) -> None:
    while not self._closing.wait(_REFRESH_S):
      with self._lock:
        if self._text:
          self._write(f'{_CLEAR}{self._describe(self._text)}')

  def _make_room(self, record: logging.LogRecord) -> bool:
    """Clears the live line before another message; the thread writes it again below."""
    del record
    if self._text:
      self._write(_CLEAR)
    return True


_DISPLAY: contextvars.ContextVar[StageDisplay | None] = contextvars.ContextVar('stages', default=None)
