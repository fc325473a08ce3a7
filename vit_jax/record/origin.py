"""Where a result is from: the command, the commit of the code and the machine; and what it cost."""
from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from typing import Any

from vit_jax.record import machine

ROOT = pathlib.Path(__file__).resolve().parents[2]


def describe() -> dict[str, Any]:
  """Returns command, commit and machine of this process, as JSON values. Initializes the devices."""
  return {'command': sys.argv, 'commit': commit(), 'machine': machine.describe()}


def commit() -> str:
  """Returns the commit of the checkout that this package is in; '' where it is installed without one.

  A `+` after it says that tracked files of the package or of the configs differ from that commit.
  """
  if not (ROOT / '.git').exists():
    return ''
  head = _git('rev-parse', 'HEAD')
  is_changed = head and _git('status', '--porcelain', '--untracked-files=no', '--', 'vit_jax', 'configs')
  return head + '+' * bool(is_changed)


def _git(*words: str) -> str:
  """Returns what git prints; '' if it is not installed or refuses."""
  try:
    done = subprocess.run(['git', '-C', str(ROOT), *words], capture_output=True, text=True, check=False, timeout=20)
  except (OSError, subprocess.TimeoutExpired):
    return ''
  return done.stdout.strip() if not done.returncode else ''


def processor_s() -> float:
  """Returns the processor seconds of this process and of those that it has started and that have ended."""
  return round(sum(os.times()[:4]), 2)
