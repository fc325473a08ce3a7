"""What a job writes beside its results: messages and stages, how much of them, and in which form.

The command line takes the switches first (`take`, `chosen`), and shows stages around the job (`stages_shown`).
`-q` shows warnings, errors and results alone; `-v` adds messages of libraries and tracebacks. They set `VIT_JAX_LOG`,
which processes that a job starts inherit. Messages begin with the seconds since the start of the command.

Stages are what a job waits for before its first results: importing, opening the data, compiling. A job calls
`begin_stage(TEXT)` for each, and `end_stage()` before it prints results. The command line shows them on standard error
with the seconds since its start: a line for each, or on a terminal one live line below all other output. Without the
command line, as in the Python API, nothing is shown.
"""
from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

from vit_jax.core import failures, lazy
from vit_jax.core.errors import UserError, redacted

if TYPE_CHECKING:
  from rich import console as consoles
  from rich import live as lives
  from rich import text as texts
else:
  consoles, lives, texts = (lazy.Module(f'rich.{name}') for name in ('console', 'live', 'text'))

VARIABLE = 'VIT_JAX_LOG'
QUIET, VERBOSE = 'quiet', 'verbose'
SWITCHES = {'-q': QUIET, '--quiet': QUIET, '-v': VERBOSE, '--verbose': VERBOSE}
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
  logger = logging.getLogger('vit_jax')
  logger.handlers, logger.propagate = [Handler(start_s)], False


def elapsed(seconds: float) -> str:
  """Returns a duration in a column of seven characters: `  9.4 s`, and from 1,000 s on `0:16:40`."""
  if seconds < 1000:
    return f'{seconds:5.1f} s'
  whole = int(seconds)
  return f'{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}'


class Handler(logging.Handler):
  """Writes messages to standard error, with the time and, for warnings and errors, the level.

  It asks for the stream at each message, because `rich` replaces it while a line is live.

  Args:
    began_s: the start of the command on the clock `now`.
    now: a monotonic clock, in seconds.
  """

  def __init__(self, began_s: float, *, now: Callable[[], float] = time.monotonic) -> None:
    super().__init__()
    self._began_s, self._now = began_s, now

  def emit(self, record: logging.LogRecord) -> None:
    """Writes a message; one that cannot be written is lost."""
    try:
      print(self.format(record), file=sys.stderr, flush=True)
    except Exception:  # as the handlers of `logging` do: wrong arguments of a message, or a closed stream
      self.handleError(record)

  def format(self, record: logging.LogRecord) -> str:
    """Returns the lines of a message, on a terminal within its width; those after the first are indented."""
    name = f'{record.levelname.lower()}: ' if record.levelno >= logging.WARNING else ''
    first, *rest = redacted(f'{_host}{name}{super().format(record)}').split('\n')
    start = f'{elapsed(self._now() - self._began_s)}  '
    lines = [f'{start}{first}', *(f'{" " * len(start)}{line}' for line in rest)]
    if not sys.stderr.isatty():
      return '\n'.join(lines)
    width = max(_WIDTH, shutil.get_terminal_size((_WIDTH, 24)).columns) - 1
    return '\n'.join(part for line in lines for part in textwrap.wrap(
        line, width, subsequent_indent=' ' * (len(start) + 2), break_long_words=False, break_on_hyphens=False) or [''])


@contextlib.contextmanager
def live(render: Callable[[], consoles.RenderableType], stream: TextIO, *, is_kept: bool) -> Iterator[None]:
  """Keeps what `render` returns below what is printed and logged inside, four times a second.

  Args:
    render: returns what is shown.
    stream: a terminal, as `is_live` knows them.
    is_kept: whether the last state stays at the end.
  """
  terminal = consoles.Console(file=stream, force_terminal=True)
  display = lives.Live(console=terminal, get_renderable=render, transient=not is_kept,
                       redirect_stdout=sys.stdout.isatty(), redirect_stderr=sys.stderr.isatty())
  with display:
    terminal.show_cursor(True)  # else it would stay hidden if this process is killed
    display.refresh()
    yield


def is_live(stream: TextIO) -> bool:
  """Returns whether a line on this stream can be written again."""
  return stream.isatty() and os.environ.get('TERM', '').lower() not in ('dumb', 'unknown')


def begin_stage(text: str) -> None:
  """Shows that the job now waits for this; it ends the stage before."""
  if stages := _STAGES.get():
    stages.show(text)


def end_stage() -> None:
  """Ends the last stage, and clears its live line."""
  begin_stage('')


def began_s() -> float:
  """Returns the start of the command on the clock `time.monotonic`; now, without the command line."""
  stages = _STAGES.get()
  return stages.began_s if stages else time.monotonic()


def hide_stages() -> None:
  """Shows no more stages, as in processes of a run other than process 0."""
  end_stage()
  _STAGES.set(None)


@contextlib.contextmanager
def stages_shown(stream: TextIO | None = None, *, now: Callable[[], float] = time.monotonic) -> Iterator[None]:
  """Shows the stages that begin inside, in this thread, on `stream`; None = standard error. With -q it shows none."""
  if not is_talking():
    yield
    return
  stages = _Stages(stream or sys.stderr, now)
  token = _STAGES.set(stages)
  try:
    yield
  finally:
    _STAGES.reset(token)
    stages.end()


class _Stages:
  """The stages of a command, as lines or as one live line."""

  def __init__(self, stream: TextIO, now: Callable[[], float]) -> None:
    self._stream, self._now, self.began_s = stream, now, now()
    self._text, self._display = '', contextlib.ExitStack()

  def show(self, text: str) -> None:
    self.end()
    self._text = text
    if text and is_live(self._stream):
      self._display.enter_context(live(lambda: texts.Text(self._line()), self._stream, is_kept=False))
    elif text:
      with contextlib.suppress(OSError, ValueError):  # the reader has gone, or the stream is closed
        print(self._line(), file=self._stream, flush=True)

  def end(self) -> None:
    with contextlib.suppress(OSError, ValueError):
      self._display.close()

  def _line(self) -> str:
    return f'{elapsed(self._now() - self.began_s)}  {self._text} …'


_STAGES: contextvars.ContextVar[_Stages | None] = contextvars.ContextVar('stages', default=None)
