"""A run on two hosts of which each has only its own shards."""
from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import pytest
import runs

from tests.data import prepared_sets
from tests.test_processes import environment

SETTINGS = ('--config=digits', '--config.length=30 steps', '--config.checkpoints.every=5 steps',
            '--config.train.log_every=1 steps', '--config.evals.test.every=30 steps',
            '--config.evals.test.batch_size=80',
            '--config.data.source=array_record:set', '--config.data.placement=host_shards', '--config.data.workers=0')


def start(workdir: pathlib.Path, hosts: list[pathlib.Path]) -> list[subprocess.Popen[bytes]]:
  """A process for each host, in the folder with its part of the dataset."""
  port = int(subprocess.run([sys.executable, '-c', 'import socket; s = socket.create_server(("", 0)); '
                             'print(s.getsockname()[1])'], capture_output=True, text=True, check=True).stdout)
  started = []
  for number, folder in enumerate(hosts):
    own = {} if len(hosts) == 1 else {'VIT_JAX_COORDINATOR': f'127.0.0.1:{port}',
                                      'VIT_JAX_NUM_PROCESSES': str(len(hosts)), 'VIT_JAX_PROCESS_ID': str(number)}
    told = environment(XLA_FLAGS='--xla_backend_optimization_level=0 --xla_force_host_platform_device_count='
                       f'{4 // len(hosts)}', JAX_PLATFORMS='cpu', JAX_CPU_COLLECTIVES_IMPLEMENTATION='gloo', **own)
    with open(folder / 'log', 'wb') as log:
      started.append(subprocess.Popen([sys.executable, '-m', 'vit_jax.main', f'--workdir={workdir}', *SETTINGS],
                                      env=told, stdout=log, stderr=subprocess.STDOUT, cwd=folder))
  return started


def finish(started: list[subprocess.Popen[bytes]], hosts: list[pathlib.Path]) -> None:
  for process, folder in zip(started, hosts, strict=True):
    assert process.wait(timeout=200) == 0, (folder / 'log').read_text()[-3000:]


@pytest.mark.slow(reason='2 min: five processes')
def test_hosts_with_parts_of_a_dataset_train_and_resume_bit_for_bit_on_as_many_hosts(tmp_path: pathlib.Path) -> None:
  hosts = [tmp_path / 'host0', tmp_path / 'host1']
  for number, folder in enumerate(hosts):
    folder.mkdir()
    prepared_sets.write(folder / 'set', num_shards=6)
    for other in range(1 - number, 6, 2):
      (folder / 'set' / f'train-{other:05d}-of-00006.array_record').unlink()
  finish(start(tmp_path / 'whole', hosts), hosts)
  started = start(tmp_path / 'split', hosts)
  runs.wait_for_checkpoint(started[0], tmp_path / 'split', number=2)
  for process in started:
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
  complete = tmp_path / 'alone'
  complete.mkdir()
  prepared_sets.write(complete / 'set', num_shards=6)
  [alone] = start(tmp_path / 'split', [complete])
  assert alone.wait(timeout=200) == 2
  said = (complete / 'log').read_text()
  assert 'host_shards=2 -> ' in said and 'host_shards=1\n' in said and 'on as many hosts' in said, said[-2000:]
  finish(start(tmp_path / 'split', hosts), hosts)
  assert runs.losses(tmp_path / 'whole') == runs.losses(tmp_path / 'split')
  whole, split = (runs.final(tmp_path / name) for name in ('whole', 'split'))
  assert whole['params_digest'] == split['params_digest'] and whole['num_examples'] == {'test': 360}
