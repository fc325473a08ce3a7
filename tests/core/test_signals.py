"""Ctrl-C is answered at once, also while a library does not return to Python, and SIGUSR1 is SIGTERM."""
from __future__ import annotations

import pathlib
import signal
import subprocess
import sys

import pytest

from vit_jax.core import signals

BUSY = """
import contextlib, hashlib, signal, sys, threading
from vit_jax.core import signals
signals.watch()
signal.signal(signal.SIGTERM, lambda *_: (print('SIGTERM', flush=True), sys.exit(3)))
with signals.answering(signals.STOPPING) if sys.argv[1:] else contextlib.nullcontext():
  threading.Timer(.2, lambda: print('begun', flush=True)).start()  # while it computes
  hashlib.pbkdf2_hmac('sha256', b'', b'', 10 ** int('9' if 'USR1' not in sys.argv else '5'))
  while True:
    signal.pause()
"""


def begin(*words: str) -> subprocess.Popen[str]:
  """A program that computes for minutes without returning to Python, as a compiler does."""
  process = subprocess.Popen([sys.executable, '-c', BUSY, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             text=True, cwd=pathlib.Path(signals.__file__).parents[2])
  assert process.stdout is not None and process.stdout.readline() == 'begun\n'
  return process


@pytest.mark.parametrize(('words', 'first', 'then'), [
    ((), 'Interrupted.', ''), (('training',), signals.STOPPING, 'Interrupted.\n')])
def test_ctrl_c_is_answered_at_once_and_a_second_one_ends_the_program(words: tuple[str, ...], first: str,
                                                                      then: str) -> None:
  process = begin(*words)
  process.send_signal(signal.SIGINT)
  assert process.stderr is not None and process.stderr.readline() == f'{first}\n'
  assert process.poll() is None
  process.send_signal(signal.SIGINT)
  assert (process.communicate(timeout=30)[1], process.returncode) == (then, 130)


def test_sigusr1_is_sent_on_as_sigterm() -> None:
  process = begin('USR1')
  process.send_signal(signal.SIGUSR1)
  assert (*process.communicate(timeout=30), process.returncode) == ('SIGTERM\n', '', 3)
