"""Handles SIGTERM and SIGINT: they end the run after the current step, which is the same on all processes."""
from __future__ import annotations

import os
import signal
from types import FrameType

import jax
from jax.experimental import multihost_utils

from vit_jax.core import failures


class StopRequest:
  """Context manager that records SIGTERM and SIGINT; a second SIGINT ends the process at once.

  With several processes, jax handles SIGTERM on each host and synchronizes the step at which all stop. Its handler is
  kept, and SIGINT is forwarded to it.
  """

  def __init__(self) -> None:
    self._name = ''
    self._before: dict[signal.Signals, object] = {}
    self._is_alone = jax.process_count() == 1

  def __enter__(self) -> StopRequest:
    for one in (signal.SIGTERM, signal.SIGINT) if self._is_alone else (signal.SIGINT,):
      self._before[one] = signal.signal(one, self._note)
    return self

  def __exit__(self, *_: object) -> None:
    for one, handler in self._before.items():
      signal.signal(one, handler)  # type: ignore[arg-type]

  def _note(self, number: int, frame: FrameType | None) -> None:
    del frame
    if self._name and number == signal.SIGINT:
      failures.interrupt_at_once()  # unwinding would wait for loaders and for saves under way
    self._name = signal.Signals(number).name
    if not self._is_alone:
      os.kill(os.getpid(), signal.SIGTERM)

  def reason(self, step: int) -> str:
    """Returns the name of the signal, or ''. With several processes, all get it at the same step."""
    if not self._is_alone:
      return 'SIGTERM on one of the hosts' if multihost_utils.reached_preemption_sync_point(step) else ''
    return self._name
