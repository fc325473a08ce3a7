"""`vit-jax embed` in two processes, one of which is killed with SIGKILL: the files are those of one process."""
from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import runs

pytestmark = pytest.mark.slow(reason='about a minute on two idle cores: a run of two steps and three starts of embed')
TINY = ('--config.length=2 steps', '--config.checkpoints.every=2 steps', '--config.evals.test.every=2 steps',
        '--config.model.depth=1', '--config.model.width=16', '--config.model.heads=2', '--config.model.mlp.hidden=16')
PROGRAM = (sys.executable, '-m', 'vit_jax.main')
LAUNCH = ('bash', str(runs.ROOT / 'launch' / 'local_processes.sh'), '2', '1', '--')
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'} | {
    'NO_CHECK': '1', 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(runs.ROOT), 'VIT_JAX_HEARTBEAT_TIMEOUT_S': '40'}


def is_process(number: int, to: pathlib.Path, index: int) -> bool:
  """Whether a process of this machine is one of the embedding, by its arguments and its rank."""
  try:
    words = pathlib.Path(f'/proc/{number}/cmdline').read_bytes()
    variables = pathlib.Path(f'/proc/{number}/environ').read_bytes().split(b'\0')
  except OSError:
    return False
  return f'--to={to}'.encode() in words and b'local_processes' not in words and (
      f'VIT_JAX_PROCESS_ID={index}'.encode() in variables)


def test_a_killed_process_and_a_restart_give_the_files_of_one_process(tmp_path: pathlib.Path) -> None:
  subprocess.run([*PROGRAM, '--config=digits', f'--workdir={tmp_path / "run"}', *TINY], env=ENVIRONMENT, check=True,
                 capture_output=True, timeout=300)
  words = ['embed', f'--weights={tmp_path / "run"}', '--data=digits', '--config.batch_size=8']
  whole, to = tmp_path / 'whole', tmp_path / 'two'
  subprocess.run([*PROGRAM, *words, f'--to={whole}'], env=ENVIRONMENT, check=True, capture_output=True, timeout=300)
  process = subprocess.Popen([*LAUNCH, *PROGRAM, *words, f'--to={to}'], env=ENVIRONMENT, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, text=True, start_new_session=True)
  until = time.monotonic() + 300
  while not list(tmp_path.glob('two.*.part/*.done')) and time.monotonic() < until:
    time.sleep(.01)
  found = [int(path.name) for path in pathlib.Path('/proc').glob('[0-9]*') if is_process(int(path.name), to, 1)]
  os.kill(found[0], signal.SIGKILL)
  assert process.wait(timeout=120), process.communicate()[0]
  kept = {path.name: path.read_bytes() for path in tmp_path.glob('two.*.part/*.parquet')}
  assert kept and not to.exists()
  done = subprocess.run([*LAUNCH, *PROGRAM, *words, f'--to={to}'], env=ENVIRONMENT, capture_output=True, text=True,
                        timeout=300)
  assert done.returncode == 0, done.stdout
  assert {path.name: path.read_bytes() for path in to.iterdir()} == {
      path.name: path.read_bytes() for path in whole.iterdir()}
  assert all((to / name).read_bytes() == content for name, content in kept.items())
