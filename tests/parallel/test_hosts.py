"""Who a process is among others, as the environment says it; and the meeting before jax starts."""
from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time

import faults
import jax
import pytest

from vit_jax.core import reports
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.parallel import hosts
from vit_jax.parallel.hosts import Rank

TOLD = {'VIT_JAX_COORDINATOR': 'first:7777', 'VIT_JAX_NUM_PROCESSES': '3', 'VIT_JAX_PROCESS_ID': '2'}
SLURM = {'SLURM_JOB_ID': '12345', 'SLURM_STEP_NUM_TASKS': '6', 'SLURM_STEP_NODELIST': 'gpu[007-009,12],x1',
         'SLURM_PROCID': '5', 'SLURM_LOCALID': '1', 'SLURM_STEP_TASKS_PER_NODE': '2(x3)',
         'CUDA_VISIBLE_DEVICES': '0,1'}
TPU = {'TPU_WORKER_HOSTNAMES': 'h0,h1,h2', 'TPU_WORKER_ID': '1'}


def free_port() -> int:
  with socket.create_server(('', 0)) as server:
    return int(server.getsockname()[1])


@pytest.mark.parametrize('environment', [
  {}, {'SLURM_JOB_ID': '1', 'SLURM_NTASKS': '4', 'SLURM_PROCID': '0'}, SLURM | {'SLURM_STEP_NUM_TASKS': '1'},
  {'TPU_WORKER_HOSTNAMES': 'localhost', 'TPU_WORKER_ID': '0'}, TOLD | {'VIT_JAX_NUM_PROCESSES': '1'},
  TOLD | {'VIT_JAX_DISTRIBUTED': 'off'}, SLURM | {'VIT_JAX_DISTRIBUTED': 'off'},
])
def test_a_process_that_is_alone_starts_nothing(environment: dict[str, str]) -> None:
  assert hosts.find_rank(environment) is None
  hosts.initialize(environment)
  assert not jax.distributed.is_initialized()
  hosts.leave(1)  # and this returns


@pytest.mark.parametrize(('environment', 'place'), [
  (TOLD, Rank('first:7777', 3, 2)),
  ({'VIT_JAX_COORDINATOR': 'a:1', 'VIT_JAX_NUM_PROCESSES': '4', 'JOB_COMPLETION_INDEX': '3'}, Rank('a:1', 4, 3)),
  (SLURM, Rank('gpu007:20345', 6, 5, (1,))),
  # Bound to one GPU by Slurm, or alone on its node: all that it sees.
  (SLURM | {'CUDA_VISIBLE_DEVICES': '0'}, Rank('gpu007:20345', 6, 5)),
  (SLURM | {'SLURM_STEP_TASKS_PER_NODE': '1(x6)', 'SLURM_LOCALID': '0'}, Rank('gpu007:20345', 6, 5)),
  (SLURM | TOLD | {'VIT_JAX_PROCESS_ID': '', 'SLURM_PROCID': '1'}, Rank('first:7777', 3, 1, (1,))),
  (TPU, Rank('h0:8476', 3, 1)),
  (TPU | {'MEGASCALE_NUM_SLICES': '2', 'MEGASCALE_SLICE_ID': '1', 'MEGASCALE_COORDINATOR_ADDRESS': 's0:8080'},
   Rank('s0:8476', 6, 4)),
])
def test_the_rank_of_a_process_is_read_from_the_environment(environment: dict[str, str], place: Rank) -> None:
  assert hosts.find_rank(environment) == place


@pytest.mark.parametrize(('nodes', 'first'), [('n1', 'n1'), ('n1,n2', 'n1'), ('a-b[3,5-9],c', 'a-b3')])
def test_the_first_host_of_a_slurm_list(nodes: str, first: str) -> None:
  assert hosts.first_host(nodes) == first


@pytest.mark.parametrize(('environment', 'message'), [
  ({'VIT_JAX_PROCESS_ID': '0'}, 'got nothing. Set all three'),
  (TOLD | {'VIT_JAX_COORDINATOR': 'first'}, "VIT_JAX_COORDINATOR: expected HOST:PORT of process 0, .*got 'first'"),
  (TOLD | {'VIT_JAX_COORDINATOR': 'first:65536'}, 'VIT_JAX_COORDINATOR: expected a port from 1 to 65535, .*:65536'),
  (TOLD | {'VIT_JAX_COORDINATOR': 'first:0'}, 'VIT_JAX_COORDINATOR: expected a port from 1 to 65535, .*first:0'),
  (TOLD | {'VIT_JAX_NUM_PROCESSES': 'two'}, "VIT_JAX_NUM_PROCESSES: expected a whole number, got 'two'"),
  (TOLD | {'VIT_JAX_PROCESS_ID': ''}, "VIT_JAX_PROCESS_ID: expected a whole number, got ''"),
  (TOLD | {'VIT_JAX_PROCESS_ID': '3'}, 'rank of this process: expected 0 to 2, got 3'),
  (SLURM | {'SLURM_STEP_NODELIST': ''}, "SLURM_STEP_NODELIST: expected a list of hosts, got ''. Start"),
  (TPU | {'TPU_WORKER_ID': ''}, "TPU_WORKER_ID: expected a whole number, got ''"),
  ({'VIT_JAX_DISTRIBUTED': 'on'}, "VIT_JAX_DISTRIBUTED: expected auto, off or nothing, got 'on'"),
  ({'VIT_JAX_HEARTBEAT_TIMEOUT_S': '0'}, 'VIT_JAX_HEARTBEAT_TIMEOUT_S: expected at least 1 second, got 0'),
])
def test_a_contradictory_environment_is_reported(environment: dict[str, str], message: str) -> None:
  with pytest.raises(UserError, match=message.replace('?', r'\?')):
    hosts.initialize(environment)


def test_jax_is_started_with_what_was_found_and_bounds_on_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
  calls: list[tuple[object, ...]] = []
  monkeypatch.setattr(hosts, 'meet', lambda place, timeout_s: calls.append((place, timeout_s)))
  monkeypatch.setattr(jax.distributed, 'initialize', lambda **k: calls.append((k,)))
  hosts.initialize(TOLD | {'VIT_JAX_HEARTBEAT_TIMEOUT_S': '7'})
  hosts.initialize({'VIT_JAX_DISTRIBUTED': 'auto', 'VIT_JAX_CONNECT_TIMEOUT_S': '9'})
  waits = {'initialization_timeout': 300, 'heartbeat_timeout_seconds': 7, 'shutdown_timeout_seconds': 300}
  assert calls == [
    (Rank('first:7777', 3, 2), 300),
    ({'coordinator_address': 'first:7777', 'num_processes': 3, 'process_id': 2, 'local_device_ids': None,
      'cluster_detection_method': 'deactivate', **waits},),
    (waits | {'initialization_timeout': 9, 'heartbeat_timeout_seconds': 100},)]


def test_auto_without_a_cluster_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
  def refuse(**_: object) -> None:
    raise ValueError('coordinator_address should be defined.')
  monkeypatch.setattr(jax.distributed, 'initialize', refuse)
  with pytest.raises(UserError, match='expected a cluster that jax detects, .*Set VIT_JAX_COORDINATOR'):
    hosts.initialize({'VIT_JAX_DISTRIBUTED': 'auto'})


def meet_all(places: list[Rank], timeout_s: int = 5) -> list[str]:
  """What each process hears, met in threads: '' or the message of its error."""
  heard = ['?'] * len(places)

  def one(i: int) -> None:
    try:
      hosts.meet(places[i], timeout_s)
      heard[i] = ''
    except (UserError, TemporaryError) as error:
      heard[i] = f'{reports.explain(error).status} {error}'

  threads = [threading.Thread(target=one, args=(i,)) for i in range(len(places))]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  return heard


def test_all_continue_when_the_last_has_connected_and_the_port_is_free_again() -> None:
  address = f'127.0.0.1:{free_port()}'
  for _ in range(2):
    assert meet_all([Rank(address, 3, i) for i in (2, 1, 0)]) == ['', '', '']


def test_process_0_names_those_that_did_not_connect() -> None:
  address = f'127.0.0.1:{free_port()}'
  began = time.monotonic()
  first, second = meet_all([Rank(address, 4, 0), Rank(address, 4, 2)], 1)
  assert f'process 1, 3 did not connect to {address} within 1 s' in first and first.startswith('75 ')
  assert f'75 This is process 2 of 4 on {socket.gethostname()}; process 0 at {address} did not answer' in second
  assert time.monotonic() - began < 4


def test_a_coordinator_that_does_not_answer_is_reported_with_rank_address_and_time() -> None:
  address = f'127.0.0.1:{free_port()}'
  with pytest.raises(TemporaryError) as caught:
    hosts.meet(Rank(address, 2, 1), 1)
  assert str(caught.value) == (
    f'This is process 1 of 2 on {socket.gethostname()}; process 0 at {address} did not answer within 1 s '
    '(Connection refused). Check its log, and that this host can reach that port.')


def test_processes_with_the_same_rank_or_another_count_are_refused() -> None:
  address = f'127.0.0.1:{free_port()}'
  heard = meet_all([Rank(address, 3, 0), Rank(address, 3, 1), Rank(address, 3, 1), Rank(address, 2, 1)], 2)
  assert 'process 2 did not connect' in heard[0]
  assert sum('does not expect: there is another process 1' in one and one.startswith('2 ') for one in heard[1:]) == 2


def test_a_port_in_use_is_reported() -> None:
  with socket.create_server(('', 0)) as server:
    port = server.getsockname()[1]
    with pytest.raises(TemporaryError, match=f'cannot listen on port {port}: Address already in use'):
      hosts.meet(Rank(f'127.0.0.1:{port}', 2, 0), 1)


def test_other_connections_to_the_port_have_no_effect() -> None:
  port, met = free_port(), []

  def knock() -> None:
    for line in (b'GET / HTTP/1.1\r\n\r\n', b'', b'vit_jax x\n'):
      for _ in range(50):
        try:
          with socket.create_connection(('127.0.0.1', port)) as server:
            server.sendall(line)
          break
        except OSError:
          time.sleep(.02)
    hosts.meet(Rank(f'127.0.0.1:{port}', 2, 1), 5)
    met.append(1)

  visitor = threading.Thread(target=knock)
  visitor.start()
  hosts.meet(Rank(f'127.0.0.1:{port}', 2, 0), 5)
  visitor.join()
  assert met == [1]


@pytest.mark.slow(reason='2 s: a process; test_main.py has one that ends before devices are initialized')
def test_importing_touches_no_device() -> None:
  code = ('import vit_jax.parallel.hosts, jax; from jax._src import xla_bridge; '
          'assert not xla_bridge.backends_are_initialized()')
  subprocess.run([sys.executable, '-c', code], check=True)


WAITS_S = 600
"""How long a process would wait for another one that has ended."""
PROGRAM = """
import os, sys, time
from vit_jax.parallel import hosts
hosts.initialize()
print('in', flush=True)
if os.environ['VIT_JAX_PROCESS_ID'] == os.environ['ENDS']:
  input()
  {end}
time.sleep({waits_s})
"""


def start_two(end: str, ends: int = 1, waits_s: float = WAITS_S, heartbeat_s: int = 2) -> list[subprocess.Popen[str]]:
  """Returns two processes of one run, of which process `ends` ends that way, after both are initialized."""
  address = f'127.0.0.1:{free_port()}'
  common = {'VIT_JAX_COORDINATOR': address, 'VIT_JAX_NUM_PROCESSES': '2', 'JAX_PLATFORMS': 'cpu', 'ENDS': str(ends),
            'PYTHONPATH': ':'.join(path for path in sys.path if path), 'PATH': '',
            'VIT_JAX_HEARTBEAT_TIMEOUT_S': str(heartbeat_s)}
  processes = [subprocess.Popen([sys.executable, '-c', PROGRAM.format(end=end, waits_s=waits_s)], text=True,
                                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                env=common | {'VIT_JAX_PROCESS_ID': str(i)}) for i in range(2)]
  for process in processes:
    assert process.stdout and 'in\n' in iter(process.stdout.readline, '')
  assert (stdin := processes[ends].stdin)
  stdin.write('\n')
  stdin.flush()
  return processes


@pytest.mark.slow(reason='2 s: starts programs')
def test_a_process_that_leaves_does_not_wait_for_the_others() -> None:
  first, second = start_two('hosts.leave(2)', heartbeat_s=WAITS_S)
  assert second.wait(timeout=WAITS_S / 4) == 2
  first.kill()
  first.communicate()


@pytest.mark.slow(reason='about 8 s each: two processes, one of which waits for the heartbeat of the other')
@pytest.mark.parametrize('ends', [0, 1])
@pytest.mark.parametrize(('end', 'own', 'verdict'), [
    ('os.kill(os.getpid(), 9)', -9, 'restart'), ('os.kill(os.getpid(), 19)', -6, 'restart'),
    ('hosts.leave(2)', 2, 'end'), ('hosts.leave(70)', 70, 'restart'), ('hosts.leave(75)', 75, 'restart')])
def test_a_lost_process_ends_the_others_with_134_and_launchers_judge_by_all_statuses(
    end: str, own: int, verdict: str, ends: int) -> None:
  processes = start_two(end, ends)
  out, _ = processes[1 - ends].communicate(timeout=WAITS_S / 4)
  assert processes[1 - ends].returncode == -6 and 'the JAX distributed service detected fatal errors' in out
  processes[ends].send_signal(18)  # a stopped process continues, and ends, too
  processes[ends].communicate(timeout=WAITS_S / 4)
  assert processes[ends].returncode == own
  found = faults.launchers(tuple(process.returncode for process in processes))
  assert {found[name] for name in ('slurm', 'tpu_pod', 'k8s')} == {verdict}  # local_processes.sh has Slurm's rule


@pytest.mark.slow(reason='about 12 s: two processes, one of which waits for the end of the other')
def test_a_process_that_has_finished_waits_for_the_others_for_longer_than_the_heartbeat() -> None:
  processes = start_two('sys.exit(0)', waits_s=6.)
  assert [process.wait(timeout=WAITS_S / 4) for process in processes] == [0, 0]
  assert {*faults.launchers((0, 0)).values()} == {'0', 'done'}
  for process in processes:
    process.communicate()
