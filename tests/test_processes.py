"""Runs of several processes on this machine: the same run as in one, and what happens when one of them ends."""
from __future__ import annotations

import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import pytest
import runs
import saved
from PIL import Image

pytestmark = pytest.mark.slow(reason='about 6 min on two idle cores: ten runs, most of several processes')

# The digits as they are but shorter, with a batch of evaluation that leaves some hosts nothing at the end (360 of 80).
# A smaller network would differ more from its runs on one process: most of its gradients are near zero, where Adam
# enlarges rounding.
STEPS = 40
DIGITS = ('--config=digits', f'--config.length={STEPS} steps', '--config.checkpoints.every=10 steps',
          '--config.train.log_every=1 steps', '--config.evals.test.every=20 steps', '--config.evals.test.batch_size=80')
HEARTBEAT_S = 40
LAUNCH = ('bash', str(runs.ROOT / 'launch' / 'local_processes.sh'))
PROGRAM = ('-m', 'vit_jax.main')


def environment(**more: str) -> dict[str, str]:
  found = {k: v for k, v in os.environ.items() if k not in ('XLA_FLAGS', 'JAX_PLATFORMS')} | {'NO_CHECK': '1'}
  # A busy machine keeps a process from its heartbeat for many seconds.
  return found | {'PYTHONPATH': str(runs.ROOT), 'VIT_JAX_HEARTBEAT_TIMEOUT_S': str(HEARTBEAT_S),
                  'VIT_JAX_SHUTDOWN_TIMEOUT_S': '60', 'GRACE_S': '90',
                  'XLA_FLAGS': '--xla_backend_optimization_level=0'} | more


def launch(processes: int, devices: int, *command: str, **more: str) -> subprocess.Popen[str]:
  """Python on `processes` x `devices` simulated devices."""
  return subprocess.Popen([*LAUNCH, str(processes), str(devices), '--', sys.executable, *command],
                          env=environment(**more), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          start_new_session=True)


def train(workdir: pathlib.Path, processes: int, *extra: str) -> subprocess.Popen[str]:
  """The digits on eight devices of so many processes."""
  return launch(processes, 8 // processes, *PROGRAM, f'--workdir={workdir}', *DIGITS, *extra)


Whole = Callable[[int], pathlib.Path]


@pytest.fixture(scope='module')
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
  """The digits by so many processes, uninterrupted; each once."""
  made: dict[int, pathlib.Path] = {}

  def run(processes: int) -> pathlib.Path:
    if processes not in made:
      workdir = tmp_path_factory.mktemp('whole') / str(processes)
      runs.finish(train(workdir, processes), timeout_s=500)
      made[processes] = workdir
    return made[processes]
  return run


@pytest.mark.parametrize('processes', [2, 4])
def test_several_processes_train_as_one(processes: int, whole: Whole) -> None:
  workdir, alone = whole(processes), whole(1)
  got, want = runs.losses(workdir), runs.losses(alone)
  assert len(got) == len(want) == STEPS
  for step in range(1, 21):
    assert got[step] == pytest.approx(want[step], abs=1e-5), step
  got, want = runs.final(workdir), runs.final(alone)
  assert got['num_examples'] == want['num_examples'] == {'test': 360}
  assert abs(got['metrics']['test/top1@ema'] - want['metrics']['test/top1@ema']) < .01
  with np.load(workdir / 'predictions.npz') as saved:
    assert sorted(saved['index'].tolist()) == list(range(360))


def test_sigterm_on_one_host_saves_on_all_at_one_step_and_other_meshes_and_process_counts_go_on(
    whole: Whole, tmp_path: pathlib.Path) -> None:
  process = train(tmp_path, 4, '--config.mesh.data=2', '--config.mesh.fsdp=4')
  runs.wait_for_checkpoint(process, tmp_path, timeout_s=300)
  os.kill(workers(tmp_path)[2], signal.SIGTERM)
  out = runs.finish(process, status=75, timeout_s=400)
  stopped = runs.events(tmp_path, 'stop')[0]['step']
  for host in range(4):
    assert f'[{host}] Stopped by SIGTERM on one of the hosts after step {stopped}, which is saved' in out
  for item in ('params', 'opt', 'extra'):  # no host gathers: each has written its own shards
    written = {path.name for path in (tmp_path / 'checkpoints' / str(stopped) / item).glob('ocdbt.process_*')}
    assert written == {f'ocdbt.process_{host}' for host in range(4)}, item
  runs.finish(train(tmp_path, 1, '--config.mesh.data=2', '--config.mesh.tensor=4'), timeout_s=400)
  assert runs.events(tmp_path, 'start')[-1]['resumed_from'] == stopped
  got, want = runs.losses(tmp_path), runs.losses(whole(4))
  assert got[stopped + 1] == pytest.approx(want[stopped + 1], abs=1e-6)
  for step in range(stopped + 2, STEPS + 1):  # the same examples in the same order
    assert got[step] == pytest.approx(want[step], abs=1e-4), step


def test_a_dead_host_ends_the_others_and_the_run_goes_on_bit_for_bit(
    whole: Whole, tmp_path: pathlib.Path) -> None:
  hosts = start_without_launcher(tmp_path / 'run', tmp_path, count=2)
  runs.wait_for_checkpoint(hosts[0], tmp_path / 'run', timeout_s=300)
  hosts[1].kill()
  status, said = hosts[0].wait(timeout=2 * HEARTBEAT_S), (tmp_path / '0.log').read_text()
  assert (status, 'connection to another process of the run was lost' in said) == (75, True) or status == -6, said
  runs.finish(train(tmp_path / 'run', 2), timeout_s=400)
  assert runs.losses(tmp_path / 'run') == runs.losses(whole(2))
  assert runs.final(tmp_path / 'run')['params_digest'] == runs.final(whole(2))['params_digest']


def start_without_launcher(workdir: pathlib.Path, logs: pathlib.Path, *, count: int) -> list[subprocess.Popen[str]]:
  """The processes of a run with nothing above them that would end the others when one ends, as on a pod."""
  flags = f'--xla_backend_optimization_level=0 --xla_force_host_platform_device_count={8 // count}'
  port = int(subprocess.run([sys.executable, '-c', 'import socket; s = socket.create_server(("", 0)); '
                             'print(s.getsockname()[1])'], capture_output=True, text=True, check=True).stdout)
  started = []
  for host in range(count):
    told = environment(XLA_FLAGS=flags, JAX_PLATFORMS='cpu', JAX_CPU_COLLECTIVES_IMPLEMENTATION='gloo',
                       VIT_JAX_COORDINATOR=f'127.0.0.1:{port}', VIT_JAX_NUM_PROCESSES=str(count),
                       VIT_JAX_PROCESS_ID=str(host))
    with open(logs / f'{host}.log', 'w') as log:
      started.append(subprocess.Popen([sys.executable, *PROGRAM, f'--workdir={workdir}', *DIGITS], env=told, text=True,
                                      stdout=log, stderr=subprocess.STDOUT))
  return started


@pytest.fixture(scope='module')
def pictures(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """96 pictures to train on, six batches; 37 to test."""
  root, rng = tmp_path_factory.mktemp('pictures'), np.random.default_rng(0)
  for split, count in (('train', 96), ('test', 37)):
    for i in range(count):
      path = root / split / f'kind{i % 3}' / f'{i}.png'
      path.parent.mkdir(parents=True, exist_ok=True)
      Image.fromarray(rng.integers(0, 256, (20, 20, 3), dtype=np.uint8)).save(path)
  return root


def test_a_host_reads_its_rows_alone_and_process_0_alone_writes_the_record(
    pictures: pathlib.Path, tmp_path: pathlib.Path) -> None:
  # Along `tensor`, two hosts share each half of a batch.
  process = launch(
      4, 2, str(runs.ROOT / 'tests' / 'audited.py'), '--config=from_folder', f'--workdir={tmp_path / "run"}',
      f'--config.data.source=folder:{pictures}', '--config.length=2 steps', '--config.image_px=16,16',
      '--config.data.recipe.eval_resize_px=18', '--config.model.patch=8', '--config.data.threads=1', *runs.TINY,
      '--config.batch_size=16', '--config.evals.test.batch_size=8', '--config.mesh.data=2', '--config.mesh.tensor=4',
      AUDIT=str(tmp_path))
  runs.finish(process, timeout_s=400)
  assert runs.final(tmp_path / 'run')['num_examples'] == {'test': 37}
  opened = [[line.split(' ', 1) for line in (tmp_path / str(host)).read_text().splitlines()] for host in range(4)]
  read = [{split: {path for how, path in lines if how == 'r' and str(pictures / split) in path}
           for split in ('train', 'test')} for lines in opened]
  assert read[0]['train'] == read[1]['train'] and read[2]['train'] == read[3]['train']
  assert not read[0]['train'] & read[2]['train'] and len(read[0]['train']) >= 16
  assert read[1]['test'] == {str(path) for path in (pictures / 'test').rglob('*.png')} - read[2]['test']
  assert len(read[1]['test']) == 5 * 4 and len(read[2]['test']) == 4 * 4 + 1
  for host, lines in enumerate(opened):
    written = {re.sub(r'-[0-9a-f]{16}\.part$', '.part', pathlib.Path(path).relative_to(tmp_path / 'run').parts[0])
               for how, path in lines if how == 'w' and path.startswith(str(tmp_path / 'run'))}
    assert ('metrics.jsonl' in written and '.vit_jax.part' in written) if host == 0 else written <= {'checkpoints'}


def test_rows_that_are_no_neighbors_come_together_as_the_global_batch() -> None:
  runs.finish(launch(2, 4, str(runs.ROOT / 'tests' / 'interleaved.py')), timeout_s=200)


def test_processes_that_find_different_checkpoints_damaged_restore_the_same_one(tmp_path: pathlib.Path) -> None:
  folder = tmp_path / 'run' / 'checkpoints'
  digests = saved.write(folder, saved.program(), [1, 2, 3])
  out = runs.finish(launch(2, 4, str(runs.ROOT / 'tests' / 'disagreeing.py'), str(folder), '2', '3'), timeout_s=200)
  for process in range(2):
    said = '\n'.join(line for line in out.splitlines() if line.startswith(f'[{process}]'))
    assert f'restored 1, has [1, 11], {digests[1]}, saved {digests[1]}' in said
    assert f'checkpoint {2 + process} is damaged and set aside: process {process} has another file' in said
    assert re.search(f'checkpoint {3 - process} is damaged and set aside: another process could not read '
                     f'.*/{3 - process}; see its message', said)
  assert sorted(path.name for path in (folder.parent / 'damaged').iterdir()) == ['2', '3']


def test_a_host_that_reads_slowly_is_named_and_can_be_profiled_while_the_run_trains(tmp_path: pathlib.Path) -> None:
  workdir = tmp_path / 'run'
  with socket.create_server(('', 0)) as free:
    port = free.getsockname()[1]
  process = launch(
      2, 1, str(runs.ROOT / 'tests' / 'slow_host.py'), 'train', '--config=digits', f'--workdir={workdir}', *runs.TINY,
      '--config.batch_size=16', '--config.data.in_memory=no', '--config.data.threads=1', '--config.length=50 steps',
      '--config.checkpoints.every=1000 steps', '--config.evals.test.every=1000 steps',
      '--config.train.log_every=10 steps', f'--config.train.profile_port={port}', SLOW_HOST='1', SLOW_S='.1')
  while not runs.events(workdir, 'hosts'):
    assert process.poll() is None, (process.communicate()[0] or '')[-3000:]
    time.sleep(.1)
  for host in range(2):
    socket.create_connection(('localhost', port + host), 10).close()
  out = runs.finish(process, timeout_s=300)
  assert re.search(r'\[0\] .*warning: Host 1 is late at step 10, in 1 of 1 intervals: it launches', out), out[-4000:]
  found = runs.events(workdir, 'hosts')
  assert [one['step'] for one in found] == list(range(10, 50, 10))
  for one in found[1:]:
    assert one['slowest'] == 1 and one['ready_s'][1] > 3 * one['ready_s'][0] and one['late_s'] > 0
  assert 'Host 1 was late in ' in (workdir / 'report.html').read_text()


def workers(workdir: pathlib.Path) -> list[int]:
  """Process ids of the Python processes of a run, in order."""
  listed = subprocess.run(['ps', '-ewwo', 'pid,args'], capture_output=True, text=True, check=True).stdout
  rows = [line.split(None, 1) for line in listed.splitlines()[1:]]
  return sorted(int(pid) for pid, args in rows if args.startswith(sys.executable) and f'--workdir={workdir} ' in args)
