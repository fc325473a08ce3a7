"""`python -m vit_jax.study.child PARENT_PID ARGUMENTS`: the command `vit-jax ARGUMENTS`, which ends with its parent.

`runs.begin` starts each run of a study by it, so that no run continues when the process of the study is killed."""
from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1  # prctl.h of Linux


def end_with_parent(parent: int) -> None:
  """Makes Linux send SIGTERM to this process when its parent, the process `parent`, ends in any way."""
  prctl = getattr(ctypes.CDLL(None), 'prctl', None) if sys.platform == 'linux' else None
  if prctl:
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
  if os.getppid() != parent:  # the parent ended before the call above
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == '__main__':
  end_with_parent(int(sys.argv[1]))
  sys.argv = ['vit-jax', *sys.argv[2:]]
  runpy.run_module('vit_jax.main', run_name='__main__')
