"""Simulated devices get threads enough not to wait for one another; messages have one form."""
from __future__ import annotations

import logging
import os
import pathlib
import re
import subprocess
import sys

import pytest

from vit_jax.jobs import startup
from vit_jax.parallel import hardware
from vit_jax.record import machine

COUNT = """
import os
import jax
from vit_jax.jobs import startup
from vit_jax.parallel import hardware
from vit_jax.record import machine
startup.start()
assert jax.device_count() == 3
names = [open(f'/proc/self/task/{task}/comm').read().strip() for task in os.listdir('/proc/self/task')]
print(names.count('tf_XLAEigen'))
"""


@pytest.mark.skipif(not pathlib.Path('/proc/self/task').exists(), reason='threads are counted as Linux lists them')
def test_each_simulated_device_has_threads_of_its_own() -> None:
  environ = {name: value for name, value in os.environ.items() if name != 'PJRT_NPROC'}
  flags = {'XLA_FLAGS': '--xla_force_host_platform_device_count=3', 'JAX_PLATFORMS': 'cpu'}
  done = subprocess.run([sys.executable, '-c', COUNT], env=environ | flags, capture_output=True, text=True, check=True)
  assert int(done.stdout) == 3 * startup.THREADS_PER_DEVICE


def test_programs_for_another_pool_are_in_another_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  monkeypatch.setattr(machine, 'running_threads', lambda: 0)
  monkeypatch.setenv('PJRT_NPROC', '3')
  assert startup.cache_folder() == tmp_path / 'vit_jax/xla/cpu_threads_3'
  monkeypatch.setattr(hardware, 'is_cpu_only', lambda: False)
  assert startup.cache_folder() == tmp_path / 'vit_jax/xla'


@pytest.mark.skipif(not pathlib.Path('/proc/self/task').exists(), reason='elsewhere a job sets its pool again')
def test_the_pool_of_these_tests_is_wide_and_not_handed_on() -> None:
  assert 'PJRT_NPROC' not in os.environ


def test_messages_have_one_form_whatever_configured_the_root_logger(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
  root, other = logging.getLogger(), logging.NullHandler()
  for name in ('', 'vit_jax', 'absl', 'asyncio'):
    monkeypatch.setattr(logging.getLogger(name), 'level', logging.getLogger(name).level)
  for before, after in (([], 1), ([logging.StreamHandler(), other], 2), ([other], 1)):
    monkeypatch.setattr(root, 'handlers', before)
    startup.start_logging()
    startup.start_logging()  # by a second job
    logging.getLogger('vit_jax.jobs').warning('odd')
    assert len(root.handlers) == after and (other in root.handlers) == (other in before)
    assert re.fullmatch(r' +[\d.]+ s  warning: odd\n' if before != [other] else '', capsys.readouterr().err)
