"""What a job writes to standard error beside its results: messages and stages.

The switch `-q` shows only warnings, errors and results; `-v` adds messages of libraries and tracebacks. The command
line (`main.py`) splits off the switches (`split_switches`), and sets `VIT_JAX_LOG` (`verbosity_set`), which processes
that a job starts inherit. Messages begin with the seconds since the start of the command (`Handler`).

A stage is a part of a job before the first results, such as importing, opening the data or compiling. A job calls
`begin_stage(TEXT)` for each stage, and `end_stage()` before it prints results. The command line enters `stages_shown`:
inside, a stage is shown as a line with the seconds since the start, or on a terminal as one live line below all other
output. Jobs that are called from Python show no stages.
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
_host = ''  # the beginning of messages in a run of several hosts, such as 'host 3: '
_MIN_WIDTH = 80  # columns to which messages are wrapped on a narrower terminal


def level() -> int:
  """Returns the lowest level of messages that are shown."""
  return {QUIET: logging.WARNING, VERBOSE: logging.DEBUG}.get(os.environ.get(VARIABLE, ''), logging.INFO)


def split_switches(words: Sequence[str]) -> tuple[list[str], str]:
  """Returns the words of a command line without `SWITCHES`, and `QUIET`, `VERBOSE` or '' by the switch among them.

  Raises UserError if there are both `-q` and `-v`.
  """
  values = {SWITCHES[word] for word in words if word in SWITCHES}
  if len(values) > 1:
    raise UserError('-q, -v: expected one of them, got both. Remove one.')
  return [word for word in words if word not in SWITCHES], ''.join(values)


@contextlib.contextmanager
def verbosity_set(verbosity: str) -> Iterator[None]:
  """Sets the environment variables of `QUIET` or `VERBOSE` for the time inside; '' changes nothing."""
  variables = {VARIABLE: verbosity} if verbosity else {}
  if verbosity == VERBOSE:
    variables[failures.SHOW] = '1'
  before = {name: os.environ[name] for name in variables if name in os.environ}
  os.environ.update(variables)
  try:
    yield
  finally:
    for name in variables:
      os.environ.pop(name, None)
    os.environ.update(before)


def is_talking() -> bool:
  """Returns whether progress and stages are shown."""
  return level() < logging.WARNING


def name_host(host: int) -> None:
  """Adds the index of this host to the beginning of all messages of this process; for runs of several hosts."""
  global _host
  _host = f'host {host}: '


def message_form() -> tuple[float, str]:
  """Returns the start of the command and the name of the host: the argument of `follow_parent` in a child process."""
  return began_s(), _host


def follow_parent(parent: tuple[float, str]) -> None:
  """Shows the messages of a loader process in the form of its parent, in which `message_form` returned `parent`."""
  global _host
  parent_began_s, _host = parent
  logger = logging.getLogger('vit_jax')
  logger.handlers, logger.propagate = [Handler(parent_began_s)], False


def elapsed(seconds: float) -> str:
  """Returns a duration in a column of seven characters: `  9.4 s`, and from 1,000 s on `0:16:40`."""
  if seconds < 1000:
    return f'{seconds:5.1f} s'
  minutes, whole_seconds = divmod(int(seconds), 60)
  return f'{minutes // 60}:{minutes % 60:02d}:{whole_seconds:02d}'


class Handler(logging.Handler):
  """Writes messages to standard error, with the time and, for warnings and errors, the level.

  The handler looks up `sys.stderr` at each message, because `rich` replaces the stream while a line is live.

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
    except Exception:  # wrong arguments of a message, or a closed stream; the handlers of `logging` do the same
      self.handleError(record)

  def format(self, record: logging.LogRecord) -> str:
    """Returns a message with its time; lines after the first are indented. On a terminal, long lines are wrapped."""
    level_name = f'{record.levelname.lower()}: ' if record.levelno >= logging.WARNING else ''
    text = redacted(f'{_host}{level_name}{super().format(record)}')
    time_column = f'{elapsed(self._now() - self._began_s)}  '
    indent = ' ' * len(time_column)
    lines = (time_column + text.replace('\n', f'\n{indent}')).split('\n')
    if not sys.stderr.isatty():
      return '\n'.join(lines)
    width = max(_MIN_WIDTH, shutil.get_terminal_size((_MIN_WIDTH, 24)).columns) - 1
    wrapper = textwrap.TextWrapper(width, subsequent_indent=f'{indent}  ', break_long_words=False,
                                   break_on_hyphens=False)
    return '\n'.join(part for line in lines for part in wrapper.wrap(line) or [''])


@contextlib.contextmanager
def live(render: Callable[[], consoles.RenderableType], stream: TextIO, *, is_kept: bool) -> Iterator[None]:
  """Shows a display below everything that is printed and logged inside, and renews it four times a second.

  Args:
    render: returns the display.
    stream: a terminal for which `is_live` is true.
    is_kept: whether the last state stays on the terminal at the end.
  """
  terminal = consoles.Console(file=stream, force_terminal=True)
  display = lives.Live(console=terminal, get_renderable=render, transient=not is_kept,
                       redirect_stdout=sys.stdout.isatty(), redirect_stderr=sys.stderr.isatty())
  with display:
    terminal.show_cursor(True)  # else the cursor would stay hidden if this process is killed
    display.refresh()
    yield


def is_live(stream: TextIO) -> bool:
  """Returns whether lines on a stream can be overwritten: the stream is a terminal with control sequences."""
  return stream.isatty() and os.environ.get('TERM', '').lower() not in ('dumb', 'unknown')


def begin_stage(text: str) -> None:
  """Ends the previous stage, and shows a new stage, such as 'opening the data'."""
  if stages := _STAGES.get():
    stages.show(text)


def end_stage() -> None:
  """Ends the last stage, and clears its live line."""
  begin_stage('')


def began_s() -> float:
  """Returns the start of the command on the clock `time.monotonic`; outside of `stages_shown` the time now."""
  stages = _STAGES.get()
  return stages.began_s if stages else time.monotonic()


def hide_stages() -> None:
  """Shows no more stages; for processes of a run other than process 0."""
  end_stage()
  _STAGES.set(None)


@contextlib.contextmanager
def stages_shown(stream: TextIO | None = None, *, now: Callable[[], float] = time.monotonic) -> Iterator[None]:
  """Shows the stages that this thread begins inside on `stream`; None = standard error. With -q it shows none."""
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
    """Ends the previous stage and shows a new one; '' = none."""
    self.end()
    self._text = text
    if text and is_live(self._stream):
      self._display.enter_context(live(lambda: texts.Text(self._line()), self._stream, is_kept=False))
    elif text:
      with contextlib.suppress(OSError, ValueError):  # the reader has gone, or the stream is closed
        print(self._line(), file=self._stream, flush=True)

  def end(self) -> None:
    """Clears the live line, if there is one."""
    with contextlib.suppress(OSError, ValueError):
      self._display.close()

  def _line(self) -> str:
    return f'{elapsed(self._now() - self.began_s)}  {self._text} …'


_STAGES: contextvars.ContextVar[_Stages | None] = contextvars.ContextVar('stages', default=None)
