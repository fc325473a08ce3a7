"""Several processes as one run: the rank of this process, from the environment, and a rendezvous before jax starts.

Without the variables below, the process runs alone. The module uses no device. `main.py` calls `leave` after a failure.

| environment | rank of this process | address of process 0 |
|---|---|---|
| `VIT_JAX_COORDINATOR=HOST:PORT`, `VIT_JAX_NUM_PROCESSES`, `VIT_JAX_PROCESS_ID` | as given; the rank may also come from `SLURM_PROCID` or `JOB_COMPLETION_INDEX` | as given |
| a Slurm step of several tasks | `SLURM_PROCID` of `SLURM_STEP_NUM_TASKS` | first of `SLURM_STEP_NODELIST` |
| `TPU_WORKER_HOSTNAMES` of several hosts | `TPU_WORKER_ID` | first of them |
| `VIT_JAX_DISTRIBUTED=auto` | detected by jax | detected by jax |
| `VIT_JAX_DISTRIBUTED=off` | alone, whatever else is set | |

`initialize` reads the rank (`find_place`), waits until all processes have connected (`meet`), and starts jax. In the
rendezvous each process connects to process 0 and sends the line `vit_jax RANK NUM_PROCESSES`. When all have done so,
process 0 answers `go`; a process with another number or a rank that is taken gets `stranger` at once.

| time limit, seconds | default | of |
|---|---|---|
| `VIT_JAX_CONNECT_TIMEOUT_S` | 300 | the rendezvous |
| `VIT_JAX_HEARTBEAT_TIMEOUT_S` | 100 | the time without a heartbeat of a process, after which jax ends the others with status 134; an operation over all processes may fail earlier, with status 75 |
| `VIT_JAX_SHUTDOWN_TIMEOUT_S` | 300 | the time that a finished process waits for the others |
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
MOST_PORT = 2**16 - 1
SLURM_PORTS = (20_000, 12_000)  # first and count; below the ephemeral ports of Linux (from 32768)
RETRY_S = 0.2  # between attempts to connect to process 0
TIMEOUTS = {'initialization_timeout': ('VIT_JAX_CONNECT_TIMEOUT_S', 300),
            'heartbeat_timeout_seconds': ('VIT_JAX_HEARTBEAT_TIMEOUT_S', 100),
            'shutdown_timeout_seconds': ('VIT_JAX_SHUTDOWN_TIMEOUT_S', 300)}
"""The variable and its default in seconds, by the argument of `jax.distributed.initialize`."""
GO, STRANGER = b'go\n', b'stranger\n'  # answers of process 0


class Place(NamedTuple):
  """The rank and the coordinator of this process. The fields are arguments of `jax.distributed.initialize`.

  coordinator_address: `host:port` of process 0, as all see it.
  local_device_ids: devices of this host that it uses; None = all.
  """
  coordinator_address: str
  num_processes: int
  process_id: int
  local_device_ids: tuple[int, ...] | None = None

  def __str__(self) -> str:
    return f'process {self.process_id} of {self.num_processes} on {socket.gethostname()}'


def initialize(environment: Mapping[str, str] | None = None) -> Place | None:
  """Joins the other processes of this run, if the environment names any. Call it before devices are used.

  Returns:
    The rank of this process; None if it is alone, or if jax has detected its rank.

  Raises:
    UserError: the environment is contradictory.
    TemporaryError: the other processes do not arrive in time.
  """
  environment = os.environ if environment is None else environment
  if jax.distributed.is_initialized():
    return None
  place = find_place(environment)
  given: dict[str, Any] = {name: _number(environment, *variable, least=1) for name, variable in TIMEOUTS.items()}
  if place is None and environment.get('VIT_JAX_DISTRIBUTED') != 'auto':
    return None
  if place is not None:
    meet(place, given['initialization_timeout'])
    # The detection of jax gives a process one GPU on Slurm, even if it is alone on its host.
    given |= {**place._asdict(), 'cluster_detection_method': 'deactivate'}
  try:
    jax.distributed.initialize(**given)
  except ValueError as error:
    raise UserError(f'VIT_JAX_DISTRIBUTED: expected a cluster that jax detects, got auto, and none ({error}). Set '
                    'VIT_JAX_COORDINATOR, VIT_JAX_NUM_PROCESSES and VIT_JAX_PROCESS_ID, or unset it to run '
                    'alone.') from error
  if place is not None:
    log.info('This is %s; process 0 is at %s.', place, place.coordinator_address)
  return place


def leave(status: int) -> None:
  """Ends this process at once with this exit status if the run has other processes; returns if it is alone.

  Call it after a failure: a regular exit would wait for the other processes, while they wait for this one.
  """
  if jax.distributed.is_initialized():
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def find_place(environment: Mapping[str, str]) -> Place | None:
  """Returns the rank of this process by the table above; None if it is alone, or if jax is to detect its rank.

  Raises:
    UserError: the environment is incomplete or contradictory.
  """
  mode = environment.get('VIT_JAX_DISTRIBUTED', '')
  if mode not in ('', 'auto', 'off'):
    raise UserError(f'VIT_JAX_DISTRIBUTED: expected auto, off or nothing, got {mode!r}. Set one of these, or unset it.')
  if mode == 'off':
    return None
  place: Place | None
  if environment.get('VIT_JAX_COORDINATOR'):
    place = _place_as_given(environment)
  elif environment.get('VIT_JAX_NUM_PROCESSES') or environment.get('VIT_JAX_PROCESS_ID'):
    raise UserError('VIT_JAX_COORDINATOR: expected HOST:PORT with VIT_JAX_NUM_PROCESSES or VIT_JAX_PROCESS_ID, got '
                    'nothing. Set all three.')
  elif mode == 'auto':
    return None
  else:
    place = _place_on_slurm(environment) or _place_on_tpu(environment)
  if place is None or place.num_processes == 1:
    return None
  if not 0 <= place.process_id < place.num_processes:
    raise UserError(f'rank of this process: expected 0 to {place.num_processes - 1}, got {place.process_id}. '
                    'Start as many processes as the number of them says.')
  return place


def _place_as_given(environment: Mapping[str, str]) -> Place:
  coordinator = environment['VIT_JAX_COORDINATOR']
  if not re.fullmatch(r'.+:\d+', coordinator):
    raise UserError(f'VIT_JAX_COORDINATOR: expected HOST:PORT of process 0, such as 10.0.0.2:{TPU_PORT}, got '
                    f'{coordinator!r}. Set host and port.')
  if not 1 <= float(coordinator.rpartition(':')[2]) <= MOST_PORT:
    raise UserError(f'VIT_JAX_COORDINATOR: expected a port from 1 to {MOST_PORT}, got {coordinator!r}. Set another.')
  names = ('VIT_JAX_PROCESS_ID', 'SLURM_PROCID', 'JOB_COMPLETION_INDEX')
  name = next((name for name in names if environment.get(name)), names[0])
  return Place(coordinator, _number(environment, 'VIT_JAX_NUM_PROCESSES'), _number(environment, name),
               _own_devices(environment))


def _place_on_slurm(environment: Mapping[str, str]) -> Place | None:
  # A batch script has SLURM_NTASKS too, but only a step consists of several tasks.
  if not environment.get('SLURM_JOB_ID') or _number(environment, 'SLURM_STEP_NUM_TASKS', 1) == 1:
    return None
  port = SLURM_PORTS[0] + _number(environment, 'SLURM_JOB_ID') % SLURM_PORTS[1]
  return Place(f'{first_host(environment.get("SLURM_STEP_NODELIST", ""))}:{port}',
               _number(environment, 'SLURM_STEP_NUM_TASKS'), _number(environment, 'SLURM_PROCID'),
               _own_devices(environment))


def _own_devices(environment: Mapping[str, str]) -> tuple[int, ...] | None:
  """Returns the GPU of this Slurm task, if a host has several tasks that see all its GPUs; None = all visible ones."""
  visible = environment.get('CUDA_VISIBLE_DEVICES', '').split(',')
  tasks = re.match(r'\d+', environment.get('SLURM_STEP_TASKS_PER_NODE', '1'))
  if tasks is None or int(tasks.group()) == 1 or len(visible) < 2:
    return None
  return (_number(environment, 'SLURM_LOCALID'),)


def first_host(nodes: str) -> str:
  """Returns the first name of a Slurm host list: gpu007 of `gpu[007-009,12],login1`."""
  found = re.match(r'([^,\[]+)(?:\[(\d+))?', nodes)
  if found is None:
    raise UserError(f'SLURM_STEP_NODELIST: expected a list of hosts, got {nodes!r}. Start the program with srun.')
  return found.group(1) + (found.group(2) or '')


def _place_on_tpu(environment: Mapping[str, str]) -> Place | None:
  hosts = [host for host in environment.get('TPU_WORKER_HOSTNAMES', '').split(',') if host]
  slices = _number(environment, 'MEGASCALE_NUM_SLICES', 1)
  if len(hosts) * slices <= 1:
    return None
  first = environment.get('MEGASCALE_COORDINATOR_ADDRESS') or hosts[0]
  index = _number(environment, 'TPU_WORKER_ID') + len(hosts) * _number(environment, 'MEGASCALE_SLICE_ID', 0)
  return Place(f'{first.split(":")[0]}:{TPU_PORT}', len(hosts) * slices, index)


def _number(environment: Mapping[str, str], name: str, default: int | None = None, *, least: int = 0) -> int:
  text = environment.get(name, '') or str('' if default is None else default)
  if not re.fullmatch(r'\d+', text):
    raise UserError(f'{name}: expected a whole number, got {text!r}. Correct the variable.')
  if int(text) < least:
    raise UserError(f'{name}: expected at least {least} second, got {text}. Set a longer time.')
  return int(text)


def meet(place: Place, timeout_s: int) -> None:
  """Returns when all processes have connected. Otherwise jax would abort without naming the missing one.

  Process 0 listens on its port, on which jax listens afterwards; the others send their ranks and wait (`_report`).

  Raises:
    TemporaryError: names the processes that did not connect, or the address that did not answer, and the time limit.
    UserError: another process has the same rank, or expects another number of processes.
  """
  if place.process_id:
    _report(place, timeout_s)
    return
  deadline, missing = time.monotonic() + timeout_s, set(range(1, place.num_processes))
  port = int(place.coordinator_address.rsplit(':', 1)[1])
  family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
  with contextlib.ExitStack() as stack:
    try:
      server = stack.enter_context(socket.create_server(
          ('', port), family=family, backlog=place.num_processes, dualstack_ipv6=family == socket.AF_INET6))
    except OSError as error:
      kind = UserError if error.errno == errno.EACCES else TemporaryError  # an earlier process may still hold the port
      raise kind(f'This is {place}, which cannot listen on port {port}: {error.strerror}. Choose another port, or end '
                 'the program that uses it.') from error
    waiting: list[socket.socket] = []
    while missing:
      server.settimeout(max(deadline - time.monotonic(), 1e-3))
      try:
        other = stack.enter_context(server.accept()[0])
      except TimeoutError:
        names = ', '.join(str(i) for i in sorted(missing))
        raise TemporaryError(f'This is {place}; process {names} did not connect to {place.coordinator_address} within '
                             f'{timeout_s} s. Check their logs, and that they can reach this port.') from None
      other.settimeout(max(min(5., deadline - time.monotonic()), 1e-3))
      line = re.fullmatch(rb'vit_jax (\d+) (\d+)\n', _read_line(other))  # rank, number of processes
      if line and int(line[2]) == place.num_processes and int(line[1]) in missing:
        missing.remove(int(line[1]))
        waiting.append(other)
      else:
        _send(other, STRANGER if line else b'')
        other.close()
    for other in waiting:
      _send(other, GO)


def _report(place: Place, timeout_s: int) -> None:
  """Sends the rank of this process, which is not 0, to process 0, and returns when process 0 answers `go`."""
  deadline, reason = time.monotonic() + timeout_s, 'no connection'
  address = place.coordinator_address
  host, port = address.rsplit(':', 1)
  while (left := deadline - time.monotonic()) > 0:
    try:
      with socket.create_connection((host.strip('[]'), int(port)), timeout=left) as server:
        _send(server, f'vit_jax {place.process_id} {place.num_processes}\n'.encode())
        answer = _read_line(server)
    except OSError as error:
      reason = error.strerror or str(error)
    else:
      if answer == GO:
        return
      if answer == STRANGER:
        raise UserError(f'This is {place}, which process 0 at {address} does not expect: there is another process '
                        f'{place.process_id}, or it expects another number of processes.')
      reason = 'it closed the connection'
    time.sleep(RETRY_S)
  raise TemporaryError(f'This is {place}; process 0 at {address} did not answer within {timeout_s} s ({reason}). Check '
                       'its log, and that this host can reach that port.')


def _read_line(connection: socket.socket) -> bytes:
  """Returns a short line; b'' if it does not arrive in time."""
  with contextlib.suppress(OSError), connection.makefile('rb') as file:
    return file.readline(64)
  return b''


def _send(connection: socket.socket, line: bytes) -> None:
  with contextlib.suppress(OSError):  # if the other process has ended, reading from it fails as well
    connection.sendall(line)
