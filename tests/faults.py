"""A matrix of faults: each fault in each phase of a run of two processes, which must end as an undisturbed run does.

  python tests/faults.py [PATTERN …]      prints the table of the cells `FAULT:PHASE` that fit a pattern, by default all
  SLOWNESS=4 python tests/faults.py       on a busy machine: with four times the time-outs

A cell is a small training run of two processes, forked from one that has imported the program. In the first attempt the
fault meets it in one phase; it is started again by the rule of the launchers, until it is done or a launcher would give
up. The columns are the exit statuses of both processes in each attempt, what each launcher does with them, the number
of restarts, and whether all losses and the digest of the parameters are those of the undisturbed run.

Faults: `kill0`, `kill1` end a process with SIGKILL, `stop0`, `stop1` stop one with SIGSTOP for longer than the others
wait for it (`HEARTBEAT_S`). `eio` makes all reads of process 1 fail, in data and run directory, until the process ends;
`full` makes all writes to the run directory fail in both. Both, and `slow`, happen below the C library
(`faulty_files.c`), so that the clients in C++ meet them, too; without a C compiler they are skipped. `503`, `429` (with
Retry-After) and `far` (slow answers) are of a bucket, the stand-in `buckets.py`, in which the run directory then is.

Nothing of this is in the program: a process marks its phases by functions that are replaced after it was forked.
"""
from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import errno
import fnmatch
import functools
import json
import mmap
import multiprocessing
import os
import pathlib
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
PHASES = ('init', 'compile', 'step', 'save', 'restore', 'evaluation', 'end')
FAULTS = ('kill0', 'kill1', 'stop0', 'stop1', 'eio', 'slow', 'full', '503', '429', 'far')
OF_BUCKETS, OF_FILES = ('503', '429', 'far'), ('eio', 'slow', 'full')
SLOWNESS = int(os.environ.get('SLOWNESS', '1'))
"""How many times as long processes may take as on an idle machine."""
HEARTBEAT_S, PATIENCE_S, HANGS_S = 4 * SLOWNESS, 2., 120. * SLOWNESS
STOPPED_S = 2 * HEARTBEAT_S
STEPS, SAVED_EVERY = 12, 4
RUN = ('--config=from_folder', '--config.image_px=16,16', '--config.data.recipe.eval_resize_px=18',
       '--config.model.patch=8', '--config.model.depth=1', '--config.model.width=16', '--config.model.heads=2',
       '--config.model.mlp.hidden=16', '--config.batch_size=16', '--config.train.ema=.9', '--config.data.threads=1',
       '--config.data.in_memory=no', '--config.data.workers=0', '--config.evals.test.batch_size=16',
       '--config.evals.test.every=6 steps', f'--config.length={STEPS} steps', '--config.train.log_every=1 steps',
       f'--config.checkpoints.every={SAVED_EVERY} steps', '--config.checkpoints.keep_best=',
       '--config.train.progress=false')
COUNTS = {'step': 6, 'save': 2}
"""Which occurrence of a phase meets the fault; the first of the others."""
MOST_ATTEMPTS = 3 + SLOWNESS  # gloo gives up after 30 s, which a busy machine may need
_CONTROL = struct.Struct('iii1012s')


# In the processes of the run.


def work(rank: int, words: list[str], environment: dict[str, str], folder: str, phase: str) -> None:
  """Runs the program as one process of a run; at `phase` it says so, and waits to be let on. '' = no phase."""
  os.setsid()
  os.environ.update(environment)
  sys.stdout = sys.stderr = open(os.path.join(folder, f'{rank}.log'), 'a', buffering=1)
  os.dup2(sys.stdout.fileno(), 1)
  os.dup2(sys.stdout.fileno(), 2)
  if (shim := ctypes.CDLL(None)) and hasattr(shim, 'faulty_files'):
    assert shim.faulty_files(os.path.join(folder, f'{rank}.control').encode()) == 0
  if 'STORAGE_EMULATOR_HOST' in environment:
    sys.path.insert(0, str(ROOT / 'tests'))
    import buckets
    buckets.install()
  from vit_jax.core import failures
  failures.PATIENCE_S, failures.FIRST_WAIT_S = PATIENCE_S, .1
  failures.configure = lambda patience_s: None  # train.retry has minutes
  _mark(rank, pathlib.Path(folder), phase)
  import atexit

  from vit_jax import main
  status = main.run(words)
  atexit._run_exitfuncs()  # as at a regular end, which a forked process has not
  os._exit(status)


def _mark(rank: int, folder: pathlib.Path, wanted: str) -> None:
  """Replaces functions by ones that say when a phase begins."""
  import jax

  from vit_jax.jobs import train
  from vit_jax.record.clock import Clock
  from vit_jax.train.checkpoint import Checkpointer
  left = collections.Counter({phase: COUNTS.get(phase, 1) for phase in PHASES})

  def reach(phase: str) -> None:
    if phase == 'init':
      jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.)  # most of a short run is compilation
    left[phase] -= 1
    if phase == wanted and left[phase] == 0:
      (folder / f'{rank}.at').touch()
      while not (folder / f'{rank}.go').exists():
        time.sleep(.002)

  def before(owner: Any, name: str, phase_of: Callable[..., str], *, is_after: bool = False) -> None:
    real = getattr(owner, name)

    @functools.wraps(real)
    def replaced(*args: Any, **kwargs: Any) -> Any:
      if is_after:
        result = real(*args, **kwargs)
        reach(phase_of(*args))
        return result
      reach(phase_of(*args))
      return real(*args, **kwargs)

    setattr(owner, name, replaced)

  phases = {'compile': 'compile', 'data_wait': 'step', 'checkpoint': 'save', 'evaluate': 'evaluation'}
  before(train.startup, 'start', lambda *_: 'init', is_after=True)
  before(Checkpointer, 'restore', lambda *_: 'restore')
  before(Clock, 'phase', lambda clock, name: phases.get(name, ''))
  before(train.Run, '_write_results', lambda *_: 'end')


# In the process that starts them.


@dataclasses.dataclass
class Cell:
  """What was seen: `statuses` of both processes in each attempt, and of the launchers' rules what they do."""
  name: str
  statuses: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
  waited_s: float = 0.  # until the other process had ended
  losses_equal: bool = False
  digest_equal: bool = False
  seconds: float = 0.
  problem: str = ''
  skipped: str = ''

  @property
  def restarts(self) -> int:
    return len(self.statuses) - 1

  @property
  def ok(self) -> bool:
    return self.losses_equal and self.digest_equal and not self.problem


class Matrix:
  """Runs cells in a folder; `server` is the bucket of some cells."""

  def __init__(self, folder: pathlib.Path, server: Any = None, *, has_shim: bool = True) -> None:
    self.folder, self.server, self.has_shim = folder, server, has_shim
    self.context = multiprocessing.get_context('forkserver')
    self.data = folder / 'data'
    _draw(self.data)
    self._whole: dict[bool, tuple[dict[int, float], str]] = {}
    self._begun: dict[bool, Any] = {}
    self._number = 0

  def run(self, fault: str, phase: str) -> Cell:
    """Runs a cell."""
    if fault in OF_FILES and not self.has_shim:
      return Cell(f'{fault}:{phase}', skipped='no C compiler (cc or gcc on Linux) for tests/faulty_files.c')
    is_far, began = fault in OF_BUCKETS, time.monotonic()
    cell, place = Cell(f'{fault}:{phase}'), self._place(is_far)
    whole = self._undisturbed(is_far)
    if phase == 'restore':
      self._put(place, self._stopped(is_far))
    while len(cell.statuses) < MOST_ATTEMPTS:
      try:
        cell.statuses.append(self._attempt(place, fault if not cell.statuses else '', phase, cell))
      except AssertionError as error:
        cell.problem = str(error)
        break
      if launchers(cell.statuses[-1])['k8s'] != 'restart':
        break
    with contextlib.suppress(FileNotFoundError, KeyError, ValueError):
      losses, digest = self._results(place)
      cell.losses_equal, cell.digest_equal = losses == whole[0], digest == whole[1]
    cell.seconds = time.monotonic() - began
    return cell

  def _undisturbed(self, is_far: bool) -> tuple[dict[int, float], str]:
    if is_far not in self._whole:
      place = self._place(is_far)
      assert self._attempt(place, '', '', Cell('whole')) == (0, 0), self.said()
      self._whole[is_far] = self._results(place)
    return self._whole[is_far]

  def _stopped(self, is_far: bool) -> Any:
    """A run that ended with status 75 after its second checkpoint."""
    if is_far not in self._begun:
      place = self._place(is_far)
      assert self._attempt(place, 'term1', 'evaluation', Cell('begun')) == (75, 75), self.said()
      self._begun[is_far] = self._copy(place)
    return self._begun[is_far]

  def _place(self, is_far: bool) -> str:
    self._number += 1
    return f'gs://mine/{self._number}' if is_far else str(self.folder / 'runs' / str(self._number))

  def _copy(self, place: str) -> Any:
    if not place.startswith('gs://'):
      return place
    return {name: self.server.objects[f'{place[5:]}/{name}'] for name in self.server.names(place)}

  def _put(self, place: str, begun: Any) -> None:
    if isinstance(begun, str):
      shutil.copytree(begun, place)
    else:
      self.server.objects.update({f'{place[5:]}/{name}': one for name, one in begun.items()})

  def _results(self, place: str) -> tuple[dict[int, float], str]:
    """Losses by step, the last of each, and the digest of the parameters."""
    read = self.server.read if place.startswith('gs://') else lambda path: pathlib.Path(path).read_bytes()
    rows = [json.loads(line) for line in read(f'{place}/metrics.jsonl').decode().splitlines() if line.endswith('}')]
    return ({row['step']: row['train/loss'] for row in rows if 'train/loss' in row},
            json.loads(read(f'{place}/final.json'))['params_digest'])

  def said(self) -> str:
    """The ends of the logs of the newest attempt."""
    return '\n'.join(path.read_text()[-2000:] for path in sorted(self.logs.glob('*.log')))

  def _attempt(self, place: str, fault: str, phase: str, cell: Cell) -> tuple[int, ...]:
    """Starts both processes, lets the fault meet them, and returns their statuses."""
    self._number += 1
    self.logs = folder = self.folder / 'logs' / f'{self._number}_{cell.name.replace(":", "_")}_{len(cell.statuses)}'
    folder.mkdir(parents=True)
    controls = [_Control(folder / f'{rank}.control') for rank in range(2)]
    victim = 1 if fault.endswith('1') or fault == 'eio' and phase != 'end' else 0
    words = [*RUN, f'--config.data.source=folder:{self.data}', f'--workdir={place}']
    processes = [self.context.Process(target=work, args=(
        rank, words, self._environment(place, rank, port), str(folder), phase if fault and rank == victim else ''))
        for port in [_free_port()] for rank in range(2)]
    for process in processes:
      process.start()
    try:
      if fault:
        self._meet(place, fault, phase, victim, processes, controls, cell)
      for process in processes:
        process.join(HANGS_S)
        assert process.exitcode is not None, f'hang: {processes.index(process)} after {HANGS_S:.0f} s'
      return tuple(process.exitcode for process in processes)
    finally:
      for process in processes:
        if process.exitcode is None:
          process.kill()
          process.join()
      if self.server:
        self.server.faults.clear()

  def _environment(self, place: str, rank: int, port: int) -> dict[str, str]:
    far = self.server.environment() if place.startswith('gs://') else {}
    return {'VIT_JAX_COORDINATOR': f'127.0.0.1:{port}', 'VIT_JAX_NUM_PROCESSES': '2', 'VIT_JAX_PROCESS_ID': str(rank),
            'VIT_JAX_HEARTBEAT_TIMEOUT_S': str(HEARTBEAT_S), 'VIT_JAX_CONNECT_TIMEOUT_S': str(60 * SLOWNESS),
            'JAX_COMPILATION_CACHE_DIR': str(self.folder / 'xla'), **far}

  def _meet(self, place: str, fault: str, phase: str, victim: int, processes: list[Any], controls: list[_Control],
            cell: Cell) -> None:
    """Waits until the victim is in the phase, and lets the fault happen."""
    at, go = self.logs / f'{victim}.at', self.logs / f'{victim}.go'
    _wait(lambda: at.exists() or all(p.exitcode is not None for p in processes), f'no {phase}: {self.said()[-300:]}')
    if fault[:-1] in ('kill', 'stop', 'term'):
      self._signal(place, fault, phase, victim, processes, go, cell)
      return
    if fault == 'eio':
      controls[victim].set(str(self.folder), read_error=errno.EIO)
    elif fault == 'full':
      for control in controls:
        control.set(place, write_error=errno.ENOSPC)
    elif fault == 'slow':
      for control in controls:
        control.set(str(self.folder / 'runs'), delay_ms=50)
    elif fault == 'far':
      self.server.fail('slow', count=40, seconds=.2)
    else:
      self.server.fail(fault, count=6, seconds=.2)
    go.touch()

  def _signal(self, place: str, fault: str, phase: str, victim: int, processes: list[Any], go: pathlib.Path,
              cell: Cell) -> None:
    """Kills or stops the victim; a compilation and a save are under way then."""
    pid, other = processes[victim].pid, processes[1 - victim]
    if phase in ('compile', 'save') or fault == 'term1':
      go.touch()
      if phase == 'save' and not place.startswith('gs://'):
        _wait(lambda: any('tmp' in path.name for path in pathlib.Path(place, 'checkpoints').iterdir()), 'no save', 5.)
      else:
        time.sleep(.2 if phase == 'compile' else 0.)
    kinds = {'kill': signal.SIGKILL, 'stop': signal.SIGSTOP, 'term': signal.SIGTERM}
    began = time.monotonic()
    os.kill(pid, kinds[fault[:-1]])
    if fault.startswith('term'):
      return
    go.touch()
    other.join(HANGS_S)
    cell.waited_s = time.monotonic() - began
    if fault.startswith('stop'):
      time.sleep(max(0., STOPPED_S - cell.waited_s))
      os.kill(pid, signal.SIGCONT)


class _Control:
  """The control file of a process, see `faulty_files.c`."""

  def __init__(self, path: pathlib.Path) -> None:
    path.write_bytes(bytes(_CONTROL.size))
    with open(path, 'r+b') as file:
      self._map = mmap.mmap(file.fileno(), 0)

  def set(self, folder: str, *, read_error: int = 0, write_error: int = 0, delay_ms: int = 0) -> None:
    """Lets operations on the files below a folder go wrong."""
    self._map[:] = _CONTROL.pack(0, 0, 0, folder.encode())
    self._map[:] = _CONTROL.pack(read_error, write_error, delay_ms, folder.encode())


def _wait(is_so: Callable[[], bool], what: str, limit_s: float = HANGS_S) -> None:
  until = time.monotonic() + limit_s
  while not is_so():
    assert time.monotonic() < until, what
    time.sleep(.002)


def _free_port() -> int:
  with socket.create_server(('', 0)) as server:
    return int(server.getsockname()[1])


def _draw(folder: pathlib.Path) -> None:
  """48 images to train on, 20 to test."""
  import numpy as np
  from PIL import Image
  rng = np.random.default_rng(0)
  for split, count in (('train', 48), ('test', 20)):
    for i in range(count):
      path = folder / split / f'kind{i % 3}' / f'{i}.png'
      path.parent.mkdir(parents=True, exist_ok=True)
      Image.fromarray(rng.integers(0, 256, (20, 20, 3), dtype=np.uint8)).save(path)


@functools.cache
def launchers(statuses: tuple[int, ...]) -> dict[str, str]:
  """What each launcher does with these statuses of the processes of a run, by its own script or manifest."""
  own = tuple(status if status >= 0 else 128 - status for status in statuses)
  return {'local': _local(own), 'slurm': _slurm(own), 'tpu_pod': _tpu_pod(own), 'k8s': _k8s(own)}


def _local(statuses: tuple[int, ...]) -> str:
  """The status of launch/local_processes.sh."""
  body = f'all=({" ".join(map(str, statuses))}); trap "" TERM; exit ${{all[VIT_JAX_PROCESS_ID]}}'
  done = subprocess.run(['bash', str(ROOT / 'launch' / 'local_processes.sh'), str(len(statuses)), '1', '--', 'bash',
                         '-c', body], capture_output=True, env={**os.environ, 'NO_CHECK': '1', 'LD_PRELOAD': ''})
  return str(done.returncode)


def _slurm(statuses: tuple[int, ...]) -> str:
  """What the job of launch/gpu_slurm.sh does, by the rule that it shares with others, launch/statuses.sh."""
  return _judged(f'judge {" ".join(map(str, statuses))}')


def _judged(script: str) -> str:
  found = subprocess.run(['bash', '-c', f'source {ROOT / "launch" / "statuses.sh"}\n{script}'], capture_output=True,
                         text=True, check=True, env={**os.environ, 'LD_PRELOAD': ''}).stdout.split()[0]
  return {'done': 'done', 'final': 'end', 'again': 'restart'}[found]


def _tpu_pod(statuses: tuple[int, ...]) -> str:
  """What launch/tpu_pod.sh does with the status that its `job_status` finds in the answers of all hosts."""
  text = (ROOT / 'launch' / 'tpu_pod.sh').read_text()
  function = re.search(r'^job_status\(\) \{.*?^\}', text, re.M | re.S)
  assert function
  answers = '\n'.join(f'VIT_JAX_STATUS h{rank} {status}' for rank, status in enumerate(statuses))
  return _judged(f"worker() {{ echo '{answers}'; }}\n{function[0]}\njob_status")


def _k8s(statuses: tuple[int, ...]) -> str:
  """What the policies of launch/k8s.yaml do."""
  text = (ROOT / 'launch' / 'k8s.yaml').read_text()
  final = {int(one) for one in re.search(r'values: \[([\d, ]+)\]', text)[1].split(',')}  # type: ignore[index]
  if not any(statuses):
    return 'done'
  return 'end' if final & set(statuses) else 'restart'


def compile_shim(folder: pathlib.Path) -> str:
  """Compiles `faulty_files.c`; returns the library's path, or '' without a compiler."""
  if not (compiler := shutil.which('cc') or shutil.which('gcc')) or sys.platform != 'linux':
    return ''
  path = folder / 'faulty_files.so'
  subprocess.run([compiler, '-shared', '-fPIC', '-O1', '-o', str(path), str(ROOT / 'tests' / 'faulty_files.c'), '-ldl'],
                 check=True)
  return str(path)


@contextlib.contextmanager
def opened(folder: pathlib.Path) -> Iterator[Matrix]:
  """A matrix with its server, and a process that has imported the program, from which those of runs are forked."""
  import buckets
  os.environ |= {'JAX_PLATFORMS': 'cpu', 'JAX_CPU_COLLECTIVES_IMPLEMENTATION': 'gloo',
                 'XLA_FLAGS': '--xla_backend_optimization_level=0 --xla_force_host_platform_device_count=1'}
  before = os.environ.get('LD_PRELOAD', '')
  context = multiprocessing.get_context('forkserver')
  context.set_forkserver_preload(['faults_preload'])
  with buckets.serve() as server:
    os.environ['LD_PRELOAD'] = shim = compile_shim(folder)
    try:
      from multiprocessing import forkserver
      forkserver.ensure_running()
    finally:
      os.environ['LD_PRELOAD'] = before
    yield Matrix(folder, server, has_shim=bool(shim))


def table(cells: list[Cell]) -> str:
  """The table, as Markdown."""
  lines = ['| cell | statuses | local, slurm, tpu_pod, k8s | restarts | others ended after | losses | digest | s |',
           '|---|---|---|---|---|---|---|---|']
  for cell in cells:
    if cell.skipped:
      lines.append(f'| {cell.name} | skipped: {cell.skipped} | | | | | | |')
      continue
    statuses = ' → '.join(' '.join(map(str, one)) for one in cell.statuses)
    rules = ', '.join(launchers(cell.statuses[0]).values()) if cell.statuses else ''
    waited = f'{cell.waited_s:.1f} s' if cell.waited_s else ''
    lines.append(f'| {cell.name} | {statuses} | {rules} | {cell.restarts} | {waited} | '
                 f'{"equal" if cell.losses_equal else "DIFFER"} | {"equal" if cell.digest_equal else "DIFFERS"} | '
                 f'{cell.seconds:.0f}{f" {cell.problem}" if cell.problem else ""} |')
  return '\n'.join(lines)


def main(patterns: list[str]) -> int:
  """Prints the table; 1 if a cell ended otherwise than the undisturbed run."""
  folder, cells = pathlib.Path(tempfile.mkdtemp(prefix='faults_')), []
  with opened(folder) as matrix:
    for fault in FAULTS:
      for phase in PHASES:
        if any(fnmatch.fnmatch(f'{fault}:{phase}', pattern) for pattern in patterns or ['*']):
          cells.append(matrix.run(fault, phase))
          print(table(cells[-1:]).splitlines()[-1], '' if cells[-1].ok or cells[-1].skipped else matrix.logs,
                flush=True)
  run = [cell for cell in cells if not cell.skipped]
  print(f'\n{table(cells)}\n\n{sum(cell.ok for cell in run)} of {len(run)} cells as the undisturbed run')
  return int(not all(cell.ok for cell in run))


if __name__ == '__main__':
  sys.path.insert(0, str(ROOT))
  sys.exit(main(sys.argv[1:]))
