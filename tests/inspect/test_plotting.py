"""Figures do not depend on the backend that the environment names."""
from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os
from vit_jax.inspect import figures
assert figures.lines({}, xlabel='x', ylabel='y', title='').startswith(b'\\x89PNG')
assert os.environ['MPLBACKEND'] == 'no-such-backend'
"""


@pytest.mark.slow  # 3 s: a process that imports matplotlib
def test_a_backend_that_is_not_installed_does_not_stop_a_figure() -> None:
  subprocess.run([sys.executable, '-c', PROGRAM], check=True, env={**os.environ, 'MPLBACKEND': 'no-such-backend'})
