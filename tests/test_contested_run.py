"""A run of four processes in a bucket that fails, which is killed, and which another start takes over."""
from __future__ import annotations

import collections
import json
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import buckets
import pytest
import runs
import test_lost_host

from vit_jax.record import reader, storage

WORKDIR = 'gs://mine/run'
STEPS, EVERY, HOSTS = 160, 10, 4
COMMAND = ('--job=train', '--config=digits', *runs.TINY, f'--workdir={WORKDIR}', f'--config.length={STEPS} steps',
           f'--config.checkpoints.every={EVERY} steps', '--config.train.log_every=1 steps',
           '--config.evals.test.every=40 steps', '--config.checkpoints.keep_latest=2', '--config.train.progress=false')


class Start:
  """The processes of one start of the run, each on a device of its own, with nothing above them."""

  def __init__(self, bucket: buckets.Server, logs: pathlib.Path, *, heartbeat_s: int = 300) -> None:
    with socket.create_server(('127.0.0.1', 0)) as free:
      port = free.getsockname()[1]
    environment = runs.environment() | bucket.environment() | {
        'JAX_CPU_COLLECTIVES_IMPLEMENTATION': 'gloo', 'VIT_JAX_COORDINATOR': f'127.0.0.1:{port}',
        'VIT_JAX_NUM_PROCESSES': str(HOSTS), 'VIT_JAX_SHUTDOWN_TIMEOUT_S': '60',
        'VIT_JAX_HEARTBEAT_TIMEOUT_S': str(heartbeat_s)}
    self.logs = [logs / f'{host}.log' for host in range(HOSTS)]
    logs.mkdir()
    self.processes = []
    for host, log in enumerate(self.logs):
      with open(log, 'w') as file:
        self.processes.append(subprocess.Popen(
            [sys.executable, str(runs.ROOT / 'tests' / 'contested.py'), *COMMAND], text=True, stdout=file,
            stderr=subprocess.STDOUT, env=environment | {'VIT_JAX_PROCESS_ID': str(host)}))

  def signal(self, number: signal.Signals) -> None:
    for process in self.processes:
      if process.poll() is None:
        process.send_signal(number)

  def wait(self, timeout_s: float = 400.) -> list[int]:
    """Returns the statuses of all processes."""
    return [process.wait(timeout=timeout_s) for process in self.processes]

  def said(self, host: int = 0) -> str:
    return self.logs[host].read_text()[-5000:]


@pytest.fixture
def trouble(bucket: buckets.Server) -> Iterator[list[buckets.Fault]]:
  """Again and again, some of the next requests are refused, or done without an answer: fewer than clients repeat."""
  rng, closed, faults = random.Random(0), threading.Event(), []

  def run() -> None:
    while not closed.wait(1.5):
      if not faults or len(faults[-1].hits) == faults[-1].count:
        kind, count = rng.choice((('503', 3), ('503', 1), ('429', 2), ('500', 1), ('lost answer', 1)))
        faults.append(bucket.fail(kind, name='mine/run/*', count=count))

  thread = threading.Thread(target=run, daemon=True)
  thread.start()
  yield faults
  closed.set()
  thread.join()


def saved(bucket: buckets.Server) -> int:
  """The step of the newest complete checkpoint."""
  names = (name.split('/') for name in bucket.names(WORKDIR))
  return max((int(name[1]) for name in names if name[0] == 'checkpoints' and name[-1] == 'commit_success.txt'
              and len(name) == 3), default=0)


def wait_for(start: Start, is_so: Callable[[], bool]) -> None:
  until = time.monotonic() + 400
  while not is_so():
    assert all(process.poll() is None for process in start.processes), [start.said(host) for host in range(HOSTS)]
    assert time.monotonic() < until, start.said()
    time.sleep(.02)


def objects(bucket: buckets.Server) -> dict[str, int]:
  return {name: found[0] for name, found in bucket.objects.items()}


@pytest.mark.timeout(2400)
@pytest.mark.slow(reason='about 6 min on two idle cores: five starts of four processes')
def test_a_run_of_four_processes_that_is_killed_and_taken_over_in_a_failing_bucket_records_every_step_once(
    bucket: buckets.Server, trouble: list[buckets.Fault], tmp_path: pathlib.Path) -> None:
  notes: list[str] = []

  # All hosts are lost a moment after a checkpoint.
  start = Start(bucket, tmp_path / '1')
  wait_for(start, lambda: saved(bucket) >= EVERY)
  time.sleep(.3)
  start.signal(signal.SIGKILL)
  assert start.wait() == [-9] * HOSTS
  notes.append(f'killed all at checkpoint {saved(bucket)}')

  # One host is lost; the others end as after a temporary error, or jax ends them.
  before, start = saved(bucket), Start(bucket, tmp_path / '2', heartbeat_s=40)
  wait_for(start, lambda: saved(bucket) >= before + EVERY)
  start.processes[2].kill()
  statuses = start.wait()
  assert statuses[2] == -9 and {*statuses} <= {-9, 75, -6}, (statuses, start.said())
  notes.append(f'killed host 2 at checkpoint {saved(bucket)}, statuses {statuses}')

  # A start is suspended, another one takes over, and the first one continues while the other one owns the directory.
  before, first = saved(bucket), Start(bucket, tmp_path / '3')
  wait_for(first, lambda: saved(bucket) >= before + EVERY)
  first.signal(signal.SIGSTOP)
  before, second = saved(bucket), Start(bucket, tmp_path / '4')
  wait_for(second, lambda: saved(bucket) >= before + EVERY)
  second.signal(signal.SIGSTOP)  # what is written now is written by the first one
  time.sleep(.5)
  seen = objects(bucket)
  first.signal(signal.SIGCONT)
  statuses = first.wait()
  assert 2 in statuses and {*statuses} <= {2, 75, -6}, (statuses, [first.said(host) for host in range(HOSTS)])
  assert f'got process {second.processes[0].pid} on {socket.gethostname()}' in first.said()
  changed = {name for name, generation in objects(bucket).items() if seen.get(name) != generation}
  removed = {*seen} - {*objects(bucket)}
  notes.append(f'first start: statuses {statuses}, wrote {len(changed)} objects and removed {len(removed)}')
  # Arrays of a checkpoint that is never committed, and what was left of a removal that had begun.
  assert all(re.fullmatch(r'mine/run/checkpoints/\d+/(?!commit_success).*', name) for name in changed), changed
  assert all(int(name.split('/')[3]) < before for name in removed), removed
  second.signal(signal.SIGCONT)
  wait_for(second, lambda: saved(bucket) >= before + 2 * EVERY)
  second.signal(signal.SIGKILL)
  second.wait()
  notes.append(f'killed the second one at checkpoint {saved(bucket)}')

  last = Start(bucket, tmp_path / '5')
  assert last.wait() == [0] * HOSTS, [last.said(host) for host in range(HOSTS)]
  run, every = reader.read(WORKDIR), list(range(1, STEPS + 1))
  resumed = [e['resumed_from'] for e in run.events if e['event'] == 'start']
  notes += [f'starts resumed from {resumed}; {run.lost_steps} recorded steps were lost and done again',
            f'faults met: {dict(collections.Counter(f.kind for f in trouble for _ in f.hits))}']
  steps = [int(row['step']) for row in run.rows if 'train/loss' in row]
  norms = [int(event['step']) for event in run.events if event['event'] == 'norms']
  storage.copy(WORKDIR, tmp_path / 'copy')
  shown = test_lost_host.board_steps(tmp_path / 'copy')
  notes += [f'{name}: {len(found)} rows of {len({*found})} steps' for name, found in
            (('record', steps), ('norms', norms), ('TensorBoard', shown))]
  print('\n'.join(notes))
  assert steps == norms == shown == every and run.num_broken == 0
  assert [e['step'] for e in run.events if e['event'] == 'checkpoint'] == list(range(EVERY, STEPS + 1, EVERY))
  assert json.loads(bucket.read(f'{WORKDIR}/final.json'))['step'] == STEPS
