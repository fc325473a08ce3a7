"""A host is lost with its disk and replaced: the run resumes from copies on the other hosts, bit for bit."""
from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest
import runs

pytestmark = pytest.mark.slow(reason='6 min on two busy cores: six runs of four processes')
LOST = 2
EVERY = 25
RUN = ('train', '--config=digits', *runs.TINY, '--config.evals.test.every=1000 steps',
       '--config.train.log_every=1 steps', '--config.length=60 steps', f'--config.checkpoints.every={EVERY} steps')


def train(workdir: pathlib.Path, disks: pathlib.Path, *extra: str) -> subprocess.Popen[str]:
  """Four processes of one device, each with a local disk of its own."""
  return subprocess.Popen(
      ['bash', str(runs.ROOT / 'launch' / 'local_processes.sh'), '4', '1', '--', sys.executable,
       str(runs.ROOT / 'tests' / 'lost_host.py'), *RUN, f'--workdir={workdir}', *extra],
      env=runs.environment() | {'NO_CHECK': '1', 'LOCAL': str(disks)}, stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT, text=True, start_new_session=True)


def lose(process: subprocess.Popen[str], workdir: pathlib.Path, disks: pathlib.Path, *hosts: int) -> None:
  """Kills a process after a copy that is newer than the checkpoint, and removes the disks of these hosts."""
  while not any(one['step'] > EVERY + 8 for one in runs.events(workdir, 'local_checkpoint')):
    assert process.poll() is None, (process.communicate()[0] or '')[-3000:]
    time.sleep(.02)
  listed = subprocess.run(['ps', '-ewwo', 'pid,args'], capture_output=True, text=True, check=True).stdout
  own = sorted(int(line.split()[0]) for line in listed.splitlines() if line.split(None, 1)[1].startswith(sys.executable)
               and f'--workdir={workdir} ' in line)
  os.kill(own[LOST], signal.SIGKILL)
  process.communicate(timeout=200)
  assert max(int(path.name) for path in (workdir / 'checkpoints').iterdir() if path.name.isdigit()) == EVERY
  for host in hosts:
    shutil.rmtree(disks / str(host))


@pytest.mark.parametrize('mesh', ['data=1,fsdp=4', 'data=4,fsdp=1'])
def test_a_run_resumes_bit_for_bit_after_the_loss_of_a_host_and_its_disk(mesh: str, tmp_path: pathlib.Path) -> None:
  layout = [f'--config.mesh.{part}' for part in mesh.split(',')]
  runs.finish(train(tmp_path / 'whole', tmp_path / 'none', *layout), timeout_s=400)
  run, disks = tmp_path / 'run', tmp_path / 'disks'
  local = '--config.checkpoints.local=4 steps'
  lose(train(run, disks, *layout, local), run, disks, LOST)
  out = runs.finish(train(run, disks, *layout, local), timeout_s=400)
  start = runs.events(run, 'start')[-1]['resumed_from']
  assert start > EVERY and start % 4 == 0
  assert f'Resuming at step {start} of 60 in {run}, from the copies on the local disks of the hosts.' in out
  assert runs.final(run)['params_digest'] == runs.final(tmp_path / 'whole')['params_digest']
  assert {step: loss for step, loss in runs.losses(run).items() if step > start} == {
      step: loss for step, loss in runs.losses(tmp_path / 'whole').items() if step > start}
  seconds = runs.events(run, 'goodput')[-1]['seconds']
  assert seconds['local_restore'] > 0 and seconds['local_checkpoint'] > 0 and 'restore' not in seconds
  assert 'restoring local copies' in (run / 'report.html').read_text()
  assert not list(disks.rglob('*.own'))  # the end of the run removes its copies


def test_without_all_pieces_the_run_resumes_from_its_checkpoint(tmp_path: pathlib.Path) -> None:
  run, disks = tmp_path / 'run', tmp_path / 'disks'
  extra = ['--config.mesh.data=1', '--config.mesh.fsdp=4', '--config.checkpoints.local=4 steps']
  lose(train(run, disks, *extra), run, disks, LOST, LOST + 1)  # the pieces of a host are on its own disk and the next
  runs.finish(train(run, disks, *extra), timeout_s=400)
  assert runs.events(run, 'start')[-1]['resumed_from'] == EVERY
  assert json.loads((run / 'final.json').read_text())['step'] == 60
