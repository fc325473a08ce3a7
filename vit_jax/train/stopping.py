"""Handles SIGTERM, SIGINT and SIGUSR1: a signal ends the run after the current step, which all processes agree on.

A job enters a `StopRequest`, and calls `reason` after each step or unit of work. The job stops if the text is not ''.
"""
from __future__ import annotations

import contextlib
import signal
from types import FrameType

import jax
from jax.experimental import multihost_utils

from vit_jax.core import signals


class StopRequest:
  """Context manager that records SIGTERM, SIGUSR1 and SIGINT; a second SIGINT ends the process at once.

  With several processes, jax handles SIGTERM on each host and synchronizes the step at which all processes stop. The
  handler of jax is kept, and the other signals are forwarded to it.
  """

  def __init__(self) -> None:
    self._signal_name, self._is_interrupted = '', False
    self._handler_before: dict[signal.Signals, object] = {}  # by signal, to be restored at the end
    self._is_single_process = jax.process_count() == 1
    self._until_exit = contextlib.ExitStack()

  def __enter__(self) -> StopRequest:
    self._message = self._until_exit.enter_context(signals.answering(signals.STOPPING))
    for number in (signal.SIGINT, signal.SIGUSR1, *([signal.SIGTERM] if self._is_single_process else [])):
      self._handler_before[number] = signal.signal(number, self._handle)
    return self

  def __exit__(self, *_: object) -> None:
    for number, handler in self._handler_before.items():
      signal.signal(number, handler)  # type: ignore[arg-type]
    self._until_exit.close()

  def _handle(self, number: int, frame: FrameType | None) -> None:
    if number == signal.SIGINT:
      if self._is_interrupted:
        signals.interrupt_at_once()  # unwinding would wait for loaders and for saves under way
      self._is_interrupted = True
      self._message.write()
    self._signal_name = signal.Signals(number).name
    if not self._is_single_process:
      signals.as_sigterm(number, frame)

  def reason(self, step: int) -> str:
    """Returns why to stop after this step; '' = continue.

    With one process, the text is the name of the signal. With several, it is a fixed text, which all processes get at
    the same step; each process must call `reason` once for every step.
    """
    if not self._is_single_process:
      return 'SIGTERM on one of the hosts' if multihost_utils.reached_preemption_sync_point(step) else ''
    return self._signal_name
