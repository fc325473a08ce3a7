"""Answers Ctrl-C at once, with one line, and treats SIGUSR1 as SIGTERM.

`main.program` calls `watch` once. Then Ctrl-C writes `ENDING` and raises KeyboardInterrupt. A job that handles Ctrl-C
itself does so inside of `with answering(line)`: a training run saves first, and a second Ctrl-C ends it at once.

Python calls handlers of signals in the main thread, between two of its own instructions. While a library compiles or
computes, a handler waits, for up to a minute. The C code of Python, however, writes the number of each signal into a
pipe at once (`signal.set_wakeup_fd`). The thread `signals` reads this pipe, writes the line, and ends the process at
the second Ctrl-C.

SIGUSR1 is what schedulers send as a warning before the end of a job (`sbatch --signal=USR1@90`). It is sent on to the
process as SIGTERM, so that it has the effect of SIGTERM in every job and on every number of processes.
"""
from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

INTERRUPTED = 130  # 128 + SIGINT, as shells report it
ENDING = 'Interrupted.'
STOPPING = ('Ctrl-C: stopping as soon as the current step is done and saved. Press Ctrl-C again to end at once, '
            'without saving.')


class Answer:
  """A line on standard error that is written at most once, by the main thread or the thread `signals`.

  is_last: whether a second Ctrl-C ends the process at once; else the handler of the job decides.
  """

  def __init__(self, text: str, *, is_last: bool = True) -> None:
    self._line, self.is_last = f'{text}\n'.encode(), is_last
    self._unwritten = threading.Lock()  # is locked by the first thread that writes, and never released

  def take(self) -> bool:
    """Returns whether the caller is the first to call this, and is to write the line."""
    return self._unwritten.acquire(blocking=False)

  def say(self) -> None:
    """Writes the line, unless it has been written."""
    if self.take():
      with contextlib.suppress(OSError):
        start = b'\n' if os.isatty(2) else b''  # the line of a terminal has ^C, and may have the progress
        os.write(2, start + self._line)


_ending: list[Answer] = []
"""The answer to Ctrl-C outside of `answering`; empty unless `watch` was called."""
_answers: list[Answer] = []
"""The answers of `answering`, the innermost last."""


def watch() -> None:
  """Starts to answer the signals of this process; called once, by the program, in its main thread."""
  reading, writing = os.pipe()
  os.set_blocking(writing, False)
  signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
  _ending.append(Answer(ENDING))
  threading.Thread(target=_answer_signals, args=(reading,), name='signals', daemon=True).start()
  if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
    signal.signal(signal.SIGUSR1, as_sigterm)
  if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _interrupt)


def as_sigterm(number: int, frame: FrameType | None) -> None:
  """Sends SIGTERM to this process."""
  del number, frame
  os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def answering(text: str, *, is_last: bool = True) -> Iterator[Answer]:
  """Answers Ctrl-C with this line inside of the `with` statement.

  The handler of the job calls `say` of the yielded answer too: without `watch` there is no thread that writes it.
  """
  answer = Answer(text, is_last=is_last)
  _answers.append(answer)
  try:
    yield answer
  finally:
    _answers.remove(answer)


def ending() -> Answer:
  """Returns the answer of a process that ends because of Ctrl-C."""
  return _ending[0] if _ending else Answer(ENDING)


def interrupt_at_once() -> None:
  """Ends this process at once with a message. Loaders end too; an unfinished save leaves the previous checkpoint."""
  ending().say()
  if 'multiprocessing' in sys.modules:
    for child in sys.modules['multiprocessing'].active_children():
      child.kill()  # a child that is still starting would print a traceback
  os._exit(INTERRUPTED)


def _answer_signals(reading: int) -> None:
  """Answers each Ctrl-C whose number is written into the pipe, whose end to read is `reading`; runs in the thread."""
  count = 0
  while numbers := os.read(reading, 64):
    for _ in range(numbers.count(signal.SIGINT)):
      count, answer = count + 1, (_ending + _answers)[-1]
      if count > 1 and answer.is_last:
        interrupt_at_once()
      answer.say()


def _interrupt(number: int, frame: FrameType | None) -> None:
  """Raises KeyboardInterrupt at the first Ctrl-C; a second one, while the job ends, ends the process at once."""
  del frame
  signal.signal(number, lambda *_: interrupt_at_once())
  raise KeyboardInterrupt
