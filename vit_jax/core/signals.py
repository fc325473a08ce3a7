"""Answers Ctrl-C at once, with one line, and treats SIGUSR1 as SIGTERM.

`main.program` calls `watch` once. From then on, Ctrl-C writes `ENDING` and raises KeyboardInterrupt. A job that handles
Ctrl-C itself does so in `with answering(line)`: a training run saves first, and a second Ctrl-C ends the run at once.

Python calls signal handlers in the main thread, between two of Python's instructions. While a library compiles or
computes, a handler waits, for up to a minute. The C code of Python, however, writes the number of each signal into a
pipe at once (`signal.set_wakeup_fd`). The thread `signals` reads this pipe, writes the line, and ends the process at
the second Ctrl-C.

Schedulers send SIGUSR1 as a warning before the end of a job (`sbatch --signal=USR1@90`). The handler sends SIGTERM to
the same process, so SIGUSR1 has the effect of SIGTERM in every job and with any number of processes.
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

  is_last: whether a second Ctrl-C ends the process at once; otherwise the handler of the job decides.
  """

  def __init__(self, text: str, *, is_last: bool = True) -> None:
    self._line = f'{text}\n'.encode()
    self.is_last = is_last
    self._claimed = threading.Lock()  # acquired by the first `claim`, and never released

  def claim(self) -> bool:
    """Returns True at the first call, whose caller should write the line, and False afterwards."""
    return self._claimed.acquire(blocking=False)

  def write(self) -> None:
    """Writes the line, unless it has been written."""
    if self.claim():
      with contextlib.suppress(OSError):
        start = b'\n' if os.isatty(2) else b''  # a terminal shows ^C, and perhaps the progress, in its current line
        os.write(2, start + self._line)


_ending: list[Answer] = []  # the answer to Ctrl-C outside of `answering`: one entry after `watch`, none before
_answers: list[Answer] = []  # the answers of all active `answering` statements, the innermost last


def watch() -> None:
  """Starts to answer the signals of this process. The program calls this once, in its main thread."""
  read_end, write_end = os.pipe()
  os.set_blocking(write_end, False)
  signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
  _ending.append(Answer(ENDING))
  threading.Thread(target=_answer_signals, args=(read_end,), name='signals', daemon=True).start()
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
  """Answers Ctrl-C with the line `text` inside the `with` statement, and yields the answer.

  The handler of the job also calls `write` of the answer: without `watch` there is no thread that writes the line.
  """
  answer = Answer(text, is_last=is_last)
  _answers.append(answer)
  try:
    yield answer
  finally:
    _answers.remove(answer)


def ending() -> Answer:
  """Returns the answer with the line `ENDING`, of a process that ends because of Ctrl-C."""
  return _ending[0] if _ending else Answer(ENDING)


def interrupt_at_once() -> None:
  """Ends this process and its loader processes at once, with a line; an unfinished save leaves the last checkpoint."""
  ending().write()
  if 'multiprocessing' in sys.modules:
    for child in sys.modules['multiprocessing'].active_children():
      child.kill()  # a child that is still starting would print a traceback
  os._exit(INTERRUPTED)


def _answer_signals(read_end: int) -> None:
  """Answers each Ctrl-C whose number arrives at the pipe's end `read_end`. The thread `signals` runs this function."""
  is_first = True
  while numbers := os.read(read_end, 64):
    for _ in range(numbers.count(signal.SIGINT)):
      answer = (_ending + _answers)[-1]
      if not is_first and answer.is_last:
        interrupt_at_once()
      answer.write()
      is_first = False


def _interrupt(number: int, frame: FrameType | None) -> None:
  """Raises KeyboardInterrupt at the first Ctrl-C. A second Ctrl-C, while the job ends, ends the process at once."""
  del frame
  signal.signal(number, lambda *_: interrupt_at_once())
  raise KeyboardInterrupt
