"""Runs code that reads weight files in a process of its own, which may take only so much memory beside its imports."""
from __future__ import annotations

import pathlib
import subprocess
import sys

from tests.fuzzing import ROOT

_START = """
import pathlib, sys
from tests import fuzzing
from vit_jax.core.errors import UserError
from vit_jax.weights import files
assert 'jax' not in sys.modules
fuzzing.limit_memory(MEBIBYTES * 2**20)
"""
_READ = """
for path in sys.argv[1:]:
  try:
    found = files.read(pathlib.Path(path))
    print('read', {name: x.shape for name, x in found.items()})
  except UserError as error:
    print(error)
"""


def read(*paths: pathlib.Path, mebibytes: int = 200, timeout_s: float = 20.) -> list[str]:
  """What `files.read` gives or says of each file, in at most so much memory and time."""
  code = _START.replace('MEBIBYTES', str(mebibytes)) + _READ
  done = subprocess.run([sys.executable, '-c', code, *map(str, paths)], capture_output=True, text=True, cwd=ROOT,
                        timeout=timeout_s)
  assert done.returncode == 0, done.stderr[-2000:]
  return done.stdout.splitlines()
