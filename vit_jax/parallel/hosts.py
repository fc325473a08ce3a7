"""Several processes as one run: reads the rank of this process from the environment, and connects the processes.

Without the variables below, the process runs alone. Jobs call `initialize`; `main.py` calls `leave` after a failure.

| environment | rank of this process | address of process 0 |
|---|---|---|
| `VIT_JAX_COORDINATOR=HOST:PORT`, `VIT_JAX_NUM_PROCESSES`, `VIT_JAX_PROCESS_ID` | as given; the rank may also come from `SLURM_PROCID` or `JOB_COMPLETION_INDEX` | as given |
| a Slurm step of several tasks | `SLURM_PROCID` of `SLURM_STEP_NUM_TASKS` | first host of `SLURM_STEP_NODELIST` |
| `TPU_WORKER_HOSTNAMES` of several hosts | `TPU_WORKER_ID` | first of the hosts |
| `VIT_JAX_DISTRIBUTED=auto` | detected by jax | detected by jax |
| `VIT_JAX_DISTRIBUTED=off` | alone, whatever else is set | |

`initialize` reads the rank (`find_rank`), waits until all processes have connected (`meet`), and starts jax. In `meet`,
each process connects to process 0 and sends the line `vit_jax RANK NUM_PROCESSES`. Process 0 answers `go` when all
lines have arrived, or `stranger` at once if the number of processes differs or the rank is taken.

| time limit, seconds | default | limits |
|---|---|---|
| `VIT_JAX_CONNECT_TIMEOUT_S` | 300 | `meet` |
| `VIT_JAX_HEARTBEAT_TIMEOUT_S` | 100 | the time without a heartbeat of a process, after which jax ends the other processes with status 134; an operation over all processes may fail earlier, with status 75 |
| `VIT_JAX_SHUTDOWN_TIMEOUT_S` | 300 | the time that a finished process waits for the other processes |
"""  # noqa: E501
from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from vit_jax.core.errors import TemporaryError, UserError

log = logging.getLogger('vit_jax.parallel')

TPU_PORT = 8476    # of process 0 on TPU hosts, as in jax
MAX_PORT = 2**16 - 1
SLURM_PORTS = range(20_000, 32_000)  # of process 0 on Slurm; the ephemeral ports of Linux begin at 32768
RETRY_S = 0.2  # between attempts to connect to process 0
TIMEOUTS = {'initialization_timeout': ('VIT_JAX_CONNECT_TIMEOUT_S', 300),
            'heartbeat_timeout_seconds': ('VIT_JAX_HEARTBEAT_TIMEOUT_S', 100),
            'shutdown_timeout_seconds': ('VIT_JAX_SHUTDOWN_TIMEOUT_S', 300)}
"""The environment variable and its default in seconds, by the argument of `jax.distributed.initialize`."""
GO, STRANGER = b'go\n', b'stranger\n'  # answers of process 0


class Rank(NamedTuple):
  """The rank of this process among the processes of a run. The fields are arguments of `jax.distributed.initialize`.

  coordinator_address: `host:port` of process 0, to which all processes can connect.
  process_id: the rank itself, from 0 to `num_processes - 1`.
  local_device_ids: the devices of this host that the process uses; None = all devices.
  """
  coordinator_address: str
  num_processes: int
  process_id: int
  local_device_ids: tuple[int, ...] | None = None

  def __str__(self) -> str:
    return f'process {self.process_id} of {self.num_processes} on {socket.gethostname()}'


def initialize(environment: Mapping[str, str] | None = None) -> Rank | None:
  """Joins the other processes of this run, if the environment names any, and starts jax. Call it before using devices.

  Returns:
    The rank of this process; None if the process is alone, or if jax has detected the rank.

  Raises:
    UserError: the environment is contradictory.
    TemporaryError: the other processes do not connect in time.
  """
  environment = os.environ if environment is None else environment
  if jax.distributed.is_initialized():
    return None
  rank = find_rank(environment)
  arguments: dict[str, Any] = {name: _read_number(environment, variable, default_s, min_value=1)
                               for name, (variable, default_s) in TIMEOUTS.items()}
  if rank is None and environment.get('VIT_JAX_DISTRIBUTED') != 'auto':
    return None
  if rank is not None:
    meet(rank, arguments['initialization_timeout'])
    # On Slurm, jax's own detection would give a process one GPU, even if the process is alone on its host.
    arguments |= {**rank._asdict(), 'cluster_detection_method': 'deactivate'}
  try:
    jax.distributed.initialize(**arguments)
  except ValueError as error:
    raise UserError(f'VIT_JAX_DISTRIBUTED: expected a cluster that jax detects, got auto, and none ({error}). Set '
                    'VIT_JAX_COORDINATOR, VIT_JAX_NUM_PROCESSES and VIT_JAX_PROCESS_ID, or unset it to run '
                    'alone.') from error
  if rank is not None:
    log.info('This is %s; process 0 is at %s.', rank, rank.coordinator_address)
  return rank


def leave(status: int) -> None:
  """Ends this process at once with this exit status if the run has other processes; returns if the process is alone.

  Call it after a failure: a regular exit would wait for the other processes, which wait for this process.
  """
  if jax.distributed.is_initialized():
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def find_rank(environment: Mapping[str, str]) -> Rank | None:
  """Returns the rank of this process by the table above; None if the process is alone, or if jax detects the rank.

  Raises:
    UserError: the environment is incomplete or contradictory.
  """
  mode = environment.get('VIT_JAX_DISTRIBUTED', '')
  if mode not in ('', 'auto', 'off'):
    raise UserError(f'VIT_JAX_DISTRIBUTED: expected auto, off or nothing, got {mode!r}. Set one of these, or unset it.')
  if mode == 'off':
    return None
  rank: Rank | None
  if environment.get('VIT_JAX_COORDINATOR'):
    rank = _rank_from_variables(environment)
  elif environment.get('VIT_JAX_NUM_PROCESSES') or environment.get('VIT_JAX_PROCESS_ID'):
    raise UserError('VIT_JAX_COORDINATOR: expected HOST:PORT with VIT_JAX_NUM_PROCESSES or VIT_JAX_PROCESS_ID, got '
                    'nothing. Set all three.')
  elif mode == 'auto':
    return None
  else:
    rank = _rank_on_slurm(environment) or _rank_on_tpu(environment)
  if rank is None or rank.num_processes == 1:
    return None
  if not 0 <= rank.process_id < rank.num_processes:
    raise UserError(f'rank of this process: expected 0 to {rank.num_processes - 1}, got {rank.process_id}. '
                    'Start as many processes as the number of them says.')
  return rank


def _rank_from_variables(environment: Mapping[str, str]) -> Rank:
  coordinator = environment['VIT_JAX_COORDINATOR']
  if not re.fullmatch(r'.+:\d+', coordinator):
    raise UserError(f'VIT_JAX_COORDINATOR: expected HOST:PORT of process 0, such as 10.0.0.2:{TPU_PORT}, got '
                    f'{coordinator!r}. Set host and port.')
  if not 1 <= float(coordinator.rpartition(':')[2]) <= MAX_PORT:
    raise UserError(f'VIT_JAX_COORDINATOR: expected a port from 1 to {MAX_PORT}, got {coordinator!r}. Set another.')
  names = ('VIT_JAX_PROCESS_ID', 'SLURM_PROCID', 'JOB_COMPLETION_INDEX')
  name = next((name for name in names if environment.get(name)), names[0])
  return Rank(coordinator, _read_number(environment, 'VIT_JAX_NUM_PROCESSES'), _read_number(environment, name),
              _local_device_ids(environment))


def _rank_on_slurm(environment: Mapping[str, str]) -> Rank | None:
  # Read SLURM_STEP_NUM_TASKS, not SLURM_NTASKS, which a batch script also has: only a step consists of several tasks.
  if not environment.get('SLURM_JOB_ID') or _read_number(environment, 'SLURM_STEP_NUM_TASKS', 1) == 1:
    return None
  port = SLURM_PORTS[_read_number(environment, 'SLURM_JOB_ID') % len(SLURM_PORTS)]
  return Rank(f'{first_host(environment.get("SLURM_STEP_NODELIST", ""))}:{port}',
              _read_number(environment, 'SLURM_STEP_NUM_TASKS'), _read_number(environment, 'SLURM_PROCID'),
              _local_device_ids(environment))


def _local_device_ids(environment: Mapping[str, str]) -> tuple[int, ...] | None:
  """Returns the GPU of this Slurm task if all tasks of the host see the same GPUs; None = use all visible GPUs."""
  visible_gpus = environment.get('CUDA_VISIBLE_DEVICES', '').split(',')
  tasks_per_host = re.match(r'\d+', environment.get('SLURM_STEP_TASKS_PER_NODE', '1'))
  if tasks_per_host is None or int(tasks_per_host[0]) == 1 or len(visible_gpus) < 2:
    return None
  return (_read_number(environment, 'SLURM_LOCALID'),)


def first_host(nodes: str) -> str:
  """Returns the first name of a Slurm host list: gpu007 of `gpu[007-009,12],login1`."""
  name = re.match(r'([^,\[]+)(?:\[(\d+))?', nodes)
  if name is None:
    raise UserError(f'SLURM_STEP_NODELIST: expected a list of hosts, got {nodes!r}. Start the program with srun.')
  return name[1] + (name[2] or '')


def _rank_on_tpu(environment: Mapping[str, str]) -> Rank | None:
  hosts = [host for host in environment.get('TPU_WORKER_HOSTNAMES', '').split(',') if host]
  num_processes = len(hosts) * _read_number(environment, 'MEGASCALE_NUM_SLICES', 1)
  if num_processes <= 1:
    return None
  first = environment.get('MEGASCALE_COORDINATOR_ADDRESS') or hosts[0]
  slice_id = _read_number(environment, 'MEGASCALE_SLICE_ID', 0)
  process_id = slice_id * len(hosts) + _read_number(environment, 'TPU_WORKER_ID')
  return Rank(f'{first.split(":")[0]}:{TPU_PORT}', num_processes, process_id)


def _read_number(environment: Mapping[str, str], name: str, default: int | None = None, *, min_value: int = 0) -> int:
  """Returns the whole number in a variable, or the default if the variable is not set; else raises UserError."""
  text = environment.get(name, '') or str('' if default is None else default)
  if not re.fullmatch(r'\d+', text):
    raise UserError(f'{name}: expected a whole number, got {text!r}. Correct the variable.')
  if int(text) < min_value:
    raise UserError(f'{name}: expected at least {min_value} second, got {text}. Set a longer time.')
  return int(text)


def meet(rank: Rank, timeout_s: int) -> None:
  """Returns when all processes have connected to process 0. Without this, jax would abort and not name the missing one.

  Process 0 listens on its port, on which jax listens afterwards. The other processes send their ranks (`_report`).

  Raises:
    TemporaryError: names the processes that did not connect, or the address that did not answer, and the time limit.
    UserError: another process has the same rank, or expects another number of processes.
  """
  if rank.process_id:
    _report(rank, timeout_s)
    return
  deadline = time.monotonic() + timeout_s
  missing = set(range(1, rank.num_processes))
  port = int(rank.coordinator_address.rsplit(':', 1)[1])
  family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
  with contextlib.ExitStack() as stack:
    try:
      server = stack.enter_context(socket.create_server(
          ('', port), family=family, backlog=rank.num_processes, dualstack_ipv6=family == socket.AF_INET6))
    except OSError as error:
      error_class = UserError if error.errno == errno.EACCES else TemporaryError  # an earlier process may hold the port
      raise error_class(f'This is {rank}, which cannot listen on port {port}: {error.strerror}. Choose another port, '
                        'or end the program that uses it.') from error
    waiting: list[socket.socket] = []
    while missing:
      server.settimeout(max(deadline - time.monotonic(), 1e-3))
      try:
        connection = stack.enter_context(server.accept()[0])
      except TimeoutError:
        ranks = ', '.join(str(process_id) for process_id in sorted(missing))
        raise TemporaryError(f'This is {rank}; process {ranks} did not connect to {rank.coordinator_address} within '
                             f'{timeout_s} s. Check their logs, and that they can reach this port.') from None
      connection.settimeout(max(min(5., deadline - time.monotonic()), 1e-3))
      line = re.fullmatch(rb'vit_jax (?P<rank>\d+) (?P<num_processes>\d+)\n', _read_line(connection))
      if line and int(line['num_processes']) == rank.num_processes and int(line['rank']) in missing:
        missing.remove(int(line['rank']))
        waiting.append(connection)
      else:
        _send(connection, STRANGER if line else b'')
        connection.close()
    for connection in waiting:
      _send(connection, GO)


def _report(rank: Rank, timeout_s: int) -> None:
  """Sends the rank of this process, which is not 0, to process 0, and returns when process 0 answers `go`."""
  deadline = time.monotonic() + timeout_s
  address, reason = rank.coordinator_address, 'no connection'
  host, port = address.rsplit(':', 1)
  while (left_s := deadline - time.monotonic()) > 0:
    try:
      with socket.create_connection((host.strip('[]'), int(port)), timeout=left_s) as server:
        _send(server, f'vit_jax {rank.process_id} {rank.num_processes}\n'.encode())
        answer = _read_line(server)
    except OSError as error:
      reason = error.strerror or str(error)
    else:
      if answer == GO:
        return
      if answer == STRANGER:
        raise UserError(f'This is {rank}, which process 0 at {address} does not expect: there is another process '
                        f'{rank.process_id}, or it expects another number of processes.')
      reason = 'it closed the connection'
    time.sleep(RETRY_S)
  raise TemporaryError(f'This is {rank}; process 0 at {address} did not answer within {timeout_s} s ({reason}). Check '
                       'its log, and that this host can reach that port.')


def _read_line(connection: socket.socket) -> bytes:
  """Returns one line of at most 64 bytes; b'' if no line arrives in time."""
  with contextlib.suppress(OSError), connection.makefile('rb') as file:
    return file.readline(64)
  return b''


def _send(connection: socket.socket, line: bytes) -> None:
  with contextlib.suppress(OSError):  # if the other process has ended, reading its answer fails as well
    connection.sendall(line)
