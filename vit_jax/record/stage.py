"""What a job waits for before its first results: importing, opening the data, compiling.

A job calls `begin(TEXT)` for each stage, and `end()` before it prints results. The command line shows them on standard
error with the seconds since its start: a line for each, or on a terminal one live line. Without the command line, as in
the Python API, nothing is shown.
"""
from __future__ import annotations

import contextlib
import contextvars
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from vit_jax.record import console

REFRESH_S = 0.25
_CLEAR = '\r\x1b[K'


def begin(text: str) -> None:
  """Shows that the job now waits for this; it ends the stage before."""
  if display := _DISPLAY.get():
    display.show(text)


def end() -> None:
  """Ends the last stage, and clears its live line."""
  begin('')


def began_s() -> float:
  """Returns the start of the command on the clock `time.monotonic`; now, without the command line."""
  display = _DISPLAY.get()
  return display.began_s if display else time.monotonic()


def hide() -> None:
  """Shows no more stages, as in processes of a run other than process 0."""
  end()
  _DISPLAY.set(None)


@contextlib.contextmanager
def shown(stream: TextIO | None = None, *, now: Callable[[], float] = time.monotonic) -> Iterator[None]:
  """Shows the stages that begin inside, in this thread, on `stream`; None = standard error. With -q it shows none."""
  if not console.is_talking():
    yield
    return
  display = Display(stream or sys.stderr, now=now)
  token = _DISPLAY.set(display)
  try:
    yield
  finally:
    _DISPLAY.reset(token)
    display.close()


class Display:
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
    return f'{console.elapsed(self._now() - self.began_s)}  {text} …'

  def _write(self, text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the reader has gone, or the stream is closed
      self._stream.write(text)
      self._stream.flush()

  def _refresh(self) -> None:
    while not self._closing.wait(REFRESH_S):
      with self._lock:
        if self._text:
          self._write(f'{_CLEAR}{self._describe(self._text)}')

  def _make_room(self, record: logging.LogRecord) -> bool:
    """Clears the live line before another message; the thread writes it again below."""
    del record
    if self._text:
      self._write(_CLEAR)
    return True


_DISPLAY: contextvars.ContextVar[Display | None] = contextvars.ContextVar('stages', default=None)
