"""Several processes as one run: who this one is, read from the environment, and the meeting before jax starts.

Alone, a process stays alone: without the variables below nothing happens. Touches no device.

| environment | who | address of process 0 |
|---|---|---|
| `VIT_JAX_COORDINATOR=HOST:PORT`, `VIT_JAX_NUM_PROCESSES`, `VIT_JAX_PROCESS_ID` | as said; the number of this process may come from `SLURM_PROCID` or `JOB_COMPLETION_INDEX` | as said |
| a Slurm step of several tasks | `SLURM_PROCID` of `SLURM_STEP_NUM_TASKS` | first of `SLURM_STEP_NODELIST` |
| `TPU_WORKER_HOSTNAMES` of several hosts | `TPU_WORKER_ID` | first of them |
| `VIT_JAX_DISTRIBUTED=auto` | what jax finds out | what jax finds out |
| `VIT_JAX_DISTRIBUTED=off` | alone, whatever the rest says | |

`VIT_JAX_CONNECT_TIMEOUT_S` (300) bounds the meeting. `VIT_JAX_HEARTBEAT_TIMEOUT_S` (100): when a process dies
without a word, jax ends the others, with a message, after this long. `VIT_JAX_SHUTDOWN_TIMEOUT_S` (300): how
long a finished process waits for the others.
"""  # noqa: E501
from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Mapping
from typing import NamedTuple

import jax

from vit_jax.core.errors import UserError

log = logging.getLogger('vit_jax.parallel')

TPU_PORT = 8476    # for hosts that no other port is given for
SLURM_PORTS = (20_000, 12_000)  # first and count; below the ports Linux hands out by itself (32768 on)
RETRY_S = 0.2
GO, STRANGER = b'go\n', b'stranger\n'


class Place(NamedTuple):
  """This process among the others.

  coordinator: `host:port` of process 0, as all see it.
  local_devices: devices of this host that are its own; None = all.
  """
  coordinator: str
  num_processes: int
  process_id: int
  local_devices: tuple[int, ...] | None = None

  def __str__(self) -> str:
    return f'process {self.process_id} of {self.num_processes} on {socket.gethostname()}'


class Timeouts(NamedTuple):
  """Bounds on waiting for the others, whole seconds."""
  connect: int
  heartbeat: int
  shutdown: int


def initialize(environment: Mapping[str, str] | None = None) -> Place | None:
  """Joins the processes of this run, if the environment names others. To be called before devices are touched.

  Returns:
    This process's place among them; None where it is alone, or jax found it out by itself.

  Raises:
    UserError: if the environment contradicts itself, or the others do not come in time.
  """
  environment = os.environ if environment is None else environment
  if jax.distributed.is_initialized():
    return None
  place, timeouts = find_place(environment), read_timeouts(environment)
  if place is not None:
    meet(place, timeouts.connect)
    _start_jax(timeouts, place)
  elif environment.get('VIT_JAX_DISTRIBUTED') == 'auto':
    _start_jax(timeouts, None)
  return place


def leave(status: int) -> None:
  """Ends this process at once with that exit status, if others belong to the run; returns where it is alone.

  For failures: an ordinary end waits for the others, and they wait for this one.
  """
  if jax.distributed.is_initialized():
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _start_jax(timeouts: Timeouts, place: Place | None) -> None:
  join = functools.partial(
      jax.distributed.initialize, initialization_timeout=timeouts.connect,
      heartbeat_timeout_seconds=timeouts.heartbeat, shutdown_timeout_seconds=timeouts.shutdown)
  try:
    if place is None:
      join()
    else:
      # Left to detect it, jax gives a process one GPU on Slurm, also where it is alone on its host.
      join(place.coordinator, place.num_processes, place.process_id, local_device_ids=place.local_devices,
           cluster_detection_method='deactivate')
      log.info('This is %s; process 0 is at %s.', place, place.coordinator)
  except ValueError as error:
    raise UserError(f'VIT_JAX_DISTRIBUTED=auto, but jax finds no cluster here ({error}); set VIT_JAX_COORDINATOR, '
                    'VIT_JAX_NUM_PROCESSES and VIT_JAX_PROCESS_ID, or unset it to run alone') from error


def read_timeouts(environment: Mapping[str, str]) -> Timeouts:
  """The bounds on waiting, from the environment."""
  names = {'VIT_JAX_CONNECT_TIMEOUT_S': 300, 'VIT_JAX_HEARTBEAT_TIMEOUT_S': 100, 'VIT_JAX_SHUTDOWN_TIMEOUT_S': 300}
  found = Timeouts(*(_number(environment, name, default) for name, default in names.items()))
  for name, value in zip(names, found, strict=True):
    if value < 1:
      raise UserError(f'{name}={value}; want at least 1 second')
  return found


def find_place(environment: Mapping[str, str]) -> Place | None:
  """What the environment says of this process; None where it is alone, or jax is to find out.

  Raises:
    UserError: if it says only half of it, or what cannot be.
  """
  asked = environment.get('VIT_JAX_DISTRIBUTED', '')
  if asked not in ('', 'auto', 'off'):
    raise UserError(f'VIT_JAX_DISTRIBUTED={asked!r}; want auto, off, or nothing')
  if asked == 'off':
    return None
  place: Place | None
  if environment.get('VIT_JAX_COORDINATOR'):
    place = _place_as_told(environment)
  elif environment.get('VIT_JAX_NUM_PROCESSES') or environment.get('VIT_JAX_PROCESS_ID'):
    raise UserError('VIT_JAX_NUM_PROCESSES or VIT_JAX_PROCESS_ID is set, VIT_JAX_COORDINATOR is not; want all three')
  elif asked == 'auto':
    return None
  else:
    place = _place_on_slurm(environment) or _place_on_tpu(environment)
  if place is None or place.num_processes == 1:
    return None
  if not 0 <= place.process_id < place.num_processes:
    raise UserError(f'process number {place.process_id} of {place.num_processes} processes; want 0 to '
                    f'{place.num_processes - 1}')
  return place


def _place_as_told(environment: Mapping[str, str]) -> Place:
  coordinator = environment['VIT_JAX_COORDINATOR']
  if not re.fullmatch(r'.+:\d+', coordinator):
    raise UserError(f'VIT_JAX_COORDINATOR={coordinator!r}; want HOST:PORT of process 0, such as 10.0.0.2:{TPU_PORT}')
  names = ('VIT_JAX_PROCESS_ID', 'SLURM_PROCID', 'JOB_COMPLETION_INDEX')
  name = next((n for n in names if environment.get(n)), names[0])
  return Place(coordinator, _number(environment, 'VIT_JAX_NUM_PROCESSES'), _number(environment, name),
               _own_devices(environment))


def _place_on_slurm(environment: Mapping[str, str]) -> Place | None:
  # A batch script has SLURM_NTASKS too, but is no task of several: only a step is.
  if not environment.get('SLURM_JOB_ID') or _number(environment, 'SLURM_STEP_NUM_TASKS', 1) == 1:
    return None
  port = SLURM_PORTS[0] + _number(environment, 'SLURM_JOB_ID') % SLURM_PORTS[1]
  return Place(f'{first_host(environment.get("SLURM_STEP_NODELIST", ""))}:{port}',
               _number(environment, 'SLURM_STEP_NUM_TASKS'), _number(environment, 'SLURM_PROCID'),
               _own_devices(environment))


def _own_devices(environment: Mapping[str, str]) -> tuple[int, ...] | None:
  """One device to each of several Slurm tasks of a host that see all its GPUs; otherwise all that is seen."""
  visible = environment.get('CUDA_VISIBLE_DEVICES', '').split(',')
  tasks = re.match(r'\d+', environment.get('SLURM_STEP_TASKS_PER_NODE', '1'))
  if tasks is None or int(tasks.group()) == 1 or len(visible) < 2:
    return None
  return (_number(environment, 'SLURM_LOCALID'),)


def first_host(nodes: str) -> str:
  """First name of a Slurm list of hosts: `gpu[007-009,12],login1` begins with gpu007."""
  found = re.match(r'([^,\[]+)(?:\[(\d+))?', nodes)
  if found is None:
    raise UserError(f'SLURM_STEP_NODELIST={nodes!r} names no host; start the program with srun')
  return found.group(1) + (found.group(2) or '')


def _place_on_tpu(environment: Mapping[str, str]) -> Place | None:
  hosts = [host for host in environment.get('TPU_WORKER_HOSTNAMES', '').split(',') if host]
  slices = _number(environment, 'MEGASCALE_NUM_SLICES', 1)
  if len(hosts) * slices <= 1:
    return None
  first = environment.get('MEGASCALE_COORDINATOR_ADDRESS') or hosts[0]
  index = _number(environment, 'TPU_WORKER_ID') + len(hosts) * _number(environment, 'MEGASCALE_SLICE_ID', 0)
  return Place(f'{first.split(":")[0]}:{TPU_PORT}', len(hosts) * slices, index)


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
  text = environment.get(name, '')
  if not text and default is not None:
    return default
  if not re.fullmatch(r'\d+', text):
    raise UserError(f'{name}={text!r}; want a whole number')
  return int(text)


def meet(place: Place, timeout_s: int) -> None:
  """Returns when all processes have come. jax would abort without saying which one is missing, and where.

  Process 0 listens on its own port, which jax takes over afterwards; the others tell it who they are and wait.

  Raises:
    UserError: names the processes that did not come, or says where nobody answered, after how long.
  """
  deadline = time.monotonic() + timeout_s
  if place.process_id:
    _report(place, timeout_s, deadline)
  else:
    _gather(place, timeout_s, deadline)


def _gather(place: Place, timeout_s: int, deadline: float) -> None:
  """Process 0: waits for every other one, then lets them all go on."""
  port = int(place.coordinator.rsplit(':', 1)[1])
  missing = set(range(1, place.num_processes))
  family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
  with contextlib.ExitStack() as stack:
    try:
      server = stack.enter_context(socket.create_server(
          ('', port), family=family, backlog=place.num_processes, dualstack_ipv6=family == socket.AF_INET6))
    except OSError as error:
      raise UserError(f'This is {place}, and cannot listen on port {port}: {error.strerror}; end what holds it, or '
                      'take another port') from error
    peers = []
    while missing:
      server.settimeout(max(deadline - time.monotonic(), 1e-3))
      try:
        peer = stack.enter_context(server.accept()[0])
      except TimeoutError:
        names = ', '.join(str(i) for i in sorted(missing))
        raise UserError(f'This is {place}; process {names} did not come to {place.coordinator} within {timeout_s} s. '
                        'Look at their logs, and whether they can reach this port') from None
      peer.settimeout(max(min(5., deadline - time.monotonic()), 1e-3))
      who = _read_line(peer)
      known = re.fullmatch(rb'vit_jax (\d+) (\d+)\n', who)
      if known and int(known[2]) == place.num_processes and int(known[1]) in missing:
        missing.remove(int(known[1]))
        peers.append(peer)
      elif known:
        _send(peer, STRANGER)
    for peer in peers:
      _send(peer, GO)


def _report(place: Place, timeout_s: int, deadline: float) -> None:
  """The other processes: say who they are, and wait to be let on."""
  host, port = place.coordinator.rsplit(':', 1)
  said = 'no connection'
  while True:
    left = deadline - time.monotonic()
    if left <= 0:
      raise UserError(f'This is {place}; process 0 at {place.coordinator} did not answer within {timeout_s} s '
                      f'({said}). Look at its log, and whether this host can reach that port')
    try:
      with socket.create_connection((host.strip('[]'), int(port)), timeout=left) as server:
        server.sendall(f'vit_jax {place.process_id} {place.num_processes}\n'.encode())
        answer = _read_line(server)
    except OSError as error:
      said = error.strerror or str(error)
    else:
      if answer == GO:
        return
      if answer == STRANGER:
        raise UserError(f'This is {place}, and process 0 at {place.coordinator} does not expect it: there is another '
                        f'process {place.process_id}, or it expects another number of processes')
      said = 'it hung up'
    time.sleep(min(RETRY_S, max(left, 0)))


def _read_line(connection: socket.socket) -> bytes:
  """A short line, or what came of it before the other end hung up or time ran out."""
  got = b''
  with contextlib.suppress(OSError):
    while not got.endswith(b'\n') and len(got) < 64 and (part := connection.recv(64)):
      got += part
  return got


def _send(connection: socket.socket, line: bytes) -> None:
  with contextlib.suppress(OSError):  # a peer that is gone is missed by jax, with its own bound
    connection.sendall(line)
