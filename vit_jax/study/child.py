"""The process of one run of a study: the train job, which the system stops when the process of the study ends."""
from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1  # prctl.h of Linux


def end_with_parent(parent: int) -> None:
  """Makes the system send SIGTERM to this process when `parent` ends, even after a kill (Linux only)."""
  prctl = getattr(ctypes.CDLL(None), 'prctl', None) if sys.platform == 'linux' else None
  if prctl:
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
  if os.getppid() != parent:  # the parent ended before the call above
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == '__main__':
  end_with_parent(int(sys.argv[1]))
  sys.argv = ['vit-jax', *sys.argv[2:]]
  runpy.run_module('vit_jax.main', run_name='__main__')
