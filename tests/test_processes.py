"""Runs of several processes on this machine: the same run as in one, and what happens when one of them ends."""
from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import runs

pytestmark = pytest.mark.slow(reason='about 30 s a run: every process compiles')
# Behind a head of zeros the first gradients are rounding noise, which Adam would blow up to full steps: hence eps.
EXTRA = ('--config.length=40 steps', '--config.checkpoints.every=10 steps', '--config.train.log_every=1 steps',
         '--config.optimizer.eps=1e-4')


def start(workdir: pathlib.Path, processes: int, devices: int, *extra: str) -> subprocess.Popen[str]:
  """A tiny digits run on `processes` x `devices` simulated devices."""
  environment = {k: v for k, v in os.environ.items() if k not in ('XLA_FLAGS', 'JAX_PLATFORMS')}
  environment |= {'PYTHONPATH': str(runs.ROOT), 'VIT_JAX_HEARTBEAT_TIMEOUT_S': '10',
                  'VIT_JAX_SHUTDOWN_TIMEOUT_S': '20', 'GRACE_S': '30',
                  'XLA_FLAGS': '--xla_backend_optimization_level=0'}
  command = ['bash', str(runs.ROOT / 'launch' / 'local_processes.sh'), str(processes), str(devices), '--',
             sys.executable, '-m', 'vit_jax.main', '--config=digits', f'--workdir={workdir}', *runs.TINY, *EXTRA,
             *extra]
  return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          start_new_session=True)


@pytest.fixture(scope='module')
def alone(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  workdir = tmp_path_factory.mktemp('alone') / 'run'
  runs.finish(start(workdir, 1, 8))
  return workdir


def assert_same_losses(workdir: pathlib.Path, other: pathlib.Path, *, first: int = 20) -> None:
  got, want = runs.losses(workdir), runs.losses(other)
  assert len(got) == len(want) == 40
  for step in range(1, first + 1):
    assert got[step] == pytest.approx(want[step], abs=1e-5), step


@pytest.mark.parametrize(('processes', 'devices'), [(2, 4), (4, 2)])
def test_several_processes_train_as_one(
    processes: int, devices: int, alone: pathlib.Path, tmp_path: pathlib.Path) -> None:
  runs.finish(start(tmp_path, processes, devices), timeout_s=400)
  assert_same_losses(tmp_path, alone)
  got, want = runs.final(tmp_path), runs.final(alone)
  assert got['num_examples'] == want['num_examples'] == {'test': 360}
  assert abs(got['metrics']['test/top1@ema'] - want['metrics']['test/top1@ema']) < .01


def test_sigterm_on_one_process_saves_on_all_and_other_process_counts_go_on(
    alone: pathlib.Path, tmp_path: pathlib.Path) -> None:
  process = start(tmp_path, 2, 4)
  runs.wait_for_checkpoint(process, tmp_path)
  os.kill(workers(tmp_path)[1], signal.SIGTERM)
  out = runs.finish(process, status=75, timeout_s=200)
  assert 'Stopped by SIGTERM on one of the hosts after step' in out
  runs.finish(start(tmp_path, 1, 8), timeout_s=200)
  stopped = runs.events(tmp_path, 'stop')[0]['step']
  assert runs.events(tmp_path, 'start')[-1]['resumed_from'] == stopped
  got, want = runs.losses(tmp_path), runs.losses(alone)
  assert got[stopped + 1] == pytest.approx(want[stopped + 1], abs=1e-5)


def test_a_killed_process_ends_the_others_in_bounded_time_and_the_run_goes_on_bit_for_bit(
    tmp_path: pathlib.Path) -> None:
  whole, killed = tmp_path / 'whole', tmp_path / 'killed'
  runs.finish(start(whole, 2, 4), timeout_s=200)
  process = start(killed, 2, 4)
  runs.wait_for_checkpoint(process, killed)
  began = time.monotonic()
  os.kill(workers(killed)[1], signal.SIGKILL)
  process.communicate(timeout=120)
  assert process.returncode not in (0, 75) and time.monotonic() - began < 90
  runs.finish(start(killed, 2, 4), timeout_s=200)
  assert runs.losses(killed) == runs.losses(whole)
  assert runs.final(killed)['params_digest'] == runs.final(whole)['params_digest']


def workers(workdir: pathlib.Path) -> list[int]:
  """Process ids of the Python processes of a run, in order."""
  listed = subprocess.run(['ps', '-eo', 'pid,args'], capture_output=True, text=True, check=True).stdout
  rows = [line.split(None, 1) for line in listed.splitlines()[1:]]
  return sorted(int(pid) for pid, args in rows if args.startswith(sys.executable) and f'--workdir={workdir} ' in args)
