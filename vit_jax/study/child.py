"""The process of one run of a study: the train job, which is asked to stop when the study's process is gone."""
from __future__ import annotations

import ctypes
import os
import signal
import sys

from vit_jax import main

_PR_SET_PDEATHSIG = 1  # prctl.h of Linux


def end_with_parent(parent: int) -> None:
  """Asks the system to send SIGTERM to this process when `parent` ends, however it ends (Linux only)."""
  prctl = getattr(ctypes.CDLL(None), 'prctl', None) if sys.platform == 'linux' else None
  if prctl:
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
  if os.getppid() != parent:  # it ended before it was asked for
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == '__main__':
  end_with_parent(int(sys.argv[1]))
  sys.exit(main.run(sys.argv[2:]))
