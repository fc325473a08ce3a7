"""Simulated devices get threads enough not to wait for one another."""
from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from vit_jax.jobs import runtime

COUNT = """
import os
import jax
from vit_jax.jobs import runtime
runtime.start()
assert jax.device_count() == 3
names = [open(f'/proc/self/task/{task}/comm').read().strip() for task in os.listdir('/proc/self/task')]
print(names.count('tf_XLAEigen'))
"""


@pytest.mark.skipif(not pathlib.Path('/proc/self/task').exists(), reason='threads are counted as Linux lists them')
def test_each_simulated_device_has_threads_of_its_own() -> None:
  environ = {name: value for name, value in os.environ.items() if name != 'PJRT_NPROC'}
  flags = {'XLA_FLAGS': '--xla_force_host_platform_device_count=3', 'JAX_PLATFORMS': 'cpu'}
  done = subprocess.run([sys.executable, '-c', COUNT], env=environ | flags, capture_output=True, text=True, check=True)
  assert int(done.stdout) == 3 * runtime.THREADS_PER_DEVICE


def test_the_pool_of_these_tests_is_wide_and_not_handed_on() -> None:
  assert 'PJRT_NPROC' not in os.environ
