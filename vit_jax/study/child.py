"""`python -m vit_jax.study.child PARENT_PID ARGUMENTS`: runs `vit-jax ARGUMENTS` until the parent process ends.

`runs.begin` starts each run of a study with this command, so that no run continues after the study was killed."""
from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1  # prctl.h of Linux


def end_with_parent(parent_pid: int) -> None:
  """Makes Linux send SIGTERM to this process when the parent process ends in any way."""
  prctl = getattr(ctypes.CDLL(None), 'prctl', None) if sys.platform == 'linux' else None
  if prctl:
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
  if os.getppid() != parent_pid:  # the parent ended before the call above
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == '__main__':
  end_with_parent(int(sys.argv[1]))
  sys.argv = ['vit-jax', *sys.argv[2:]]
  runpy.run_module('vit_jax.main', run_name='__main__')
