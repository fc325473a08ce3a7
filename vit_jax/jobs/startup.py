"""Starts a job that computes: platform, compilation cache, logging.

A job calls `start` once, after it has checked its flags and before it uses a device.

`start` also fixes what the bits of a run on CPUs depend on: XLA's threads and instructions (`fix_cpu`). XLA computes
the gradients of weights and biases as sums of parts, whose number follows from the size of its thread pool. So a run
fixes that size: `train.cpu_threads`, or for 0 the number of cores where it began. With `train.portable` it is also
limited to instructions that all x86 processors of the last ten years round alike.
"""
from __future__ import annotations

import ctypes
import logging
import os
import pathlib
import platform
import re
import sys
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from vit_jax.config import schema
from vit_jax.core import failures
from vit_jax.core.errors import UserError
from vit_jax.data import open_files
from vit_jax.parallel import hardware, hosts, xla_flags
from vit_jax.record import console, machine

log = logging.getLogger('vit_jax.jobs')
THREADS_PER_DEVICE = 8  # of XLA's pool, for each simulated device
MOST_A_CORE = 4  # threads for each core, above which a run is warned of their cost
PORTABLE_VARIABLES = ('ONEDNN_MAX_CPU_ISA', 'DNNL_MAX_CPU_ISA')  # oneDNN reads either; it ignores XLA's flag
PORTABLE_ISA = 'AVX2'
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h of glibc


class Note(NamedTuple):
  """A message about the threads or instructions of a run, and its level."""
  level: int
  text: str


def start(train: schema.Train | None = None, before: Mapping[str, Any] | None = None) -> int:
  """Sets up jax and logging, and connects this process to the others of the run. Initializes no device.

  Args:
    train: settings of a run, whose bits must not depend on the cores of this machine; None = another job.
    before: the machine that the checkpoint to resume describes (`record/machine.py`); None or {} = a new run.

  Returns:
    The index of this process, 0 if it is alone.

  Raises:
    UserError: the processor cannot run a portable program, or the environment is contradictory.
  """
  open_files.raise_limit()
  failures.configure(train.retry_s if train else None)
  start_logging()
  notes: list[Note] = []
  if hardware.is_cpu_only():
    keep_freed_memory()
    notes = fix_cpu(train or schema.Train(), before or {})
  elif train and train.portable:
    log.warning('train.portable has no effect on accelerators.')
  if os.environ.get('JAX_COMPILATION_CACHE_DIR') is None:
    jax.config.update('jax_compilation_cache_dir', str(cache_folder()))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)
  host = hosts.initialize()
  if host and host.process_id:
    console.hide_stages()
    console.name_host(host.process_id)
    logging.getLogger('vit_jax').setLevel(logging.WARNING)  # process 0 logs progress, all log warnings
  for note in notes:
    log.log(note.level, '%s', note.text)
  if host:
    return host.process_id
  return jax.process_index() if jax.distributed.is_initialized() else 0


def cache_folder() -> pathlib.Path:
  """Returns the default folder of compiled programs, on CPUs one for each size of XLA's pool.

  XLA splits a program into parts by that size, and jax does not tell such programs apart in its cache.
  """
  folder = pathlib.Path(os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache') / 'vit_jax' / 'xla'
  return folder / f'cpu_threads_{machine.cpu_threads()}' if hardware.is_cpu_only() else folder


def start_logging() -> None:
  """Shows messages of this package from the level of the command line on, and those of libraries only with -v."""
  level, root = console.level(), logging.getLogger()
  messages = console.Handler(console.began_s())

  def writes_to_stderr(handler: logging.Handler) -> bool:
    return isinstance(handler, console.Handler) or (
        type(handler) is logging.StreamHandler and handler.stream in (sys.stderr, sys.__stderr__))

  # Some imports add such handlers to the root logger, and so does an earlier job of this process.
  others = [handler for handler in root.handlers if not type(handler).__module__.startswith('absl')]
  root.handlers = [messages if writes_to_stderr(handler) else handler for handler in others] or [messages]
  logging.getLogger('vit_jax').setLevel(level)
  if level == logging.DEBUG:
    root.setLevel(logging.INFO)
    return
  logging.getLogger('absl').setLevel(logging.ERROR)  # Orbax logs every wait for a save
  quiet_abandoned_reads()


def quiet_abandoned_reads() -> None:
  """Silences what Orbax logs after it failed to read a damaged checkpoint or to save to a full disk.

  Orbax raises the first error, which becomes a message. Its other reads end in tasks that are never awaited, on a
  closed event loop, and its threads log the stack of an error that it also raises.
  """
  logging.getLogger('asyncio').setLevel(logging.CRITICAL)
  logging.getLogger('absl').addFilter(_is_not_of_orbax)
  warnings.filterwarnings('ignore', message='coroutine .* was never awaited', category=RuntimeWarning)
  if sys.unraisablehook is not _show_unraisable:
    sys.unraisablehook = _show_unraisable


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
  return f'{os.sep}orbax{os.sep}' not in record.pathname


def _show_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
  """Replaces `sys.unraisablehook`; ignores the errors of abandoned reads."""
  is_closed_loop = isinstance(unraisable.exc_value, RuntimeError) and 'loop is closed' in str(unraisable.exc_value)
  trace = unraisable.exc_traceback
  if not is_closed_loop and not (trace and 'orbax' in trace.tb_frame.f_code.co_filename):
    sys.__unraisablehook__(unraisable)


def keep_freed_memory() -> None:
  """Makes glibc keep freed blocks up to 1 GiB, in one arena, instead of returning them to the system.

  XLA's CPU client allocates the temporaries of every step again; when they are mapped each time, page faults take
  a third of the time of a small model's step (counted: 934,000 faults in 100 steps of the digits, 75,000 without
  mapping; 1,049,000 in 12 steps of CIFAR-10, 173,000 with one arena too).
  """
  mallopt = getattr(ctypes.CDLL(None), 'mallopt', None) if sys.platform == 'linux' else None
  if mallopt:
    mallopt(_M_MMAP_THRESHOLD, 1 << 30)
    mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
    mallopt(_M_ARENA_MAX, 1)  # heaps of other arenas are at most 64 MiB; larger blocks are mapped


def fix_cpu(train: schema.Train, before: Mapping[str, Any]) -> list[Note]:
  """Sets the size of XLA's pool in the environment, and the instructions of a portable run.

  A size that the user sets in the environment stays, and so does the pool of devices that are already initialized.

  Returns messages for the user. The arguments and errors are those of `start`.
  """
  notes = _make_portable() if train.portable else []
  simulated = num_simulated(os.environ.get('XLA_FLAGS', ''))
  threads, reason = _choose_threads(train, before, simulated)
  running, (variable, set_threads) = machine.running_threads(), machine.given_threads()
  if simulated:
    threads = widen_pool(simulated, threads)
    set_threads = set_threads if variable == 'PJRT_NPROC' else 0  # which precedes NPROC
  fixed = running or set_threads
  if threads and not fixed:
    os.environ['PJRT_NPROC'] = str(threads)
  if threads and fixed and fixed != threads:
    if before.get('cpu_threads') == threads:  # the warning of a resume names both numbers
      return notes
    cause = 'the devices of this process, which are initialized' if running else f'{variable}={set_threads}'
    return [*notes, Note(logging.WARNING, f'train.cpu_threads: expected {threads} threads, {reason}, got {fixed} by '
                         f'{cause}. The last bits of this run depend on this number.')]
  return notes if simulated or not threads else [*notes, *_describe_threads(threads, machine.cores(), reason)]


def _choose_threads(train: schema.Train, before: Mapping[str, Any], simulated: int) -> tuple[int, str]:
  """Returns the number of threads that the pool of a run should have, 0 = any number, and the reason in words."""
  if train.cpu_threads:
    return train.cpu_threads, f'as set by train.cpu_threads={train.cpu_threads}'
  has_same_devices = before.get('device_kind') == 'cpu' and num_simulated(before.get('XLA_FLAGS', '')) == simulated
  return int(before.get('cpu_threads') or 0) if has_same_devices else 0, 'as before in this run'


def _describe_threads(threads: int, cores: int, reason: str) -> list[Note]:
  """Returns a note that the pool has more or fewer threads than the machine has cores; none if they are equal."""
  if threads == cores:
    return []
  text = (f'XLA runs {threads} thread{"s" if threads > 1 else ""} on {cores} core{"s" if cores > 1 else ""}, {reason}, '
          'so that the bits of the run do not depend on the cores.')
  if threads > MOST_A_CORE * cores:
    return [Note(logging.WARNING, f'{text} So many threads a core take time; --config.train.cpu_threads={cores} is '
                 'faster, and changes the last bits.')]
  if threads < cores:
    text += f' --config.train.cpu_threads={cores} is faster, and changes the last bits.'
  return [Note(logging.INFO, text)]


def num_simulated(flags: str) -> int:
  """Returns the number of devices that XLA flags simulate on CPUs; 0 = none."""
  flag = re.search(r'--xla_force_host_platform_device_count=(\d+)', flags)
  return int(flag[1]) if flag else 0


def widen_pool(num_devices: int, threads: int = 0) -> int:
  """Returns a size of the pool with which simulated devices do not deadlock, at least `threads`.

  XLA's pool has one thread per device. A device that runs two collectives at a time, for example along two axes of a
  mesh, takes two threads and waits on both; another device then finds none, and all wait.
  """
  jax.config.update('jax_cpu_enable_async_dispatch', False)  # two programs never run at the same time
  return max(threads, THREADS_PER_DEVICE * num_devices)


def _make_portable() -> list[Note]:
  """Limits XLA and oneDNN to AVX2, and math functions to forms that are the same on every processor."""
  sets = list(machine.ISA.values())  # from the highest to the lowest
  if machine.cpu_isa() not in sets[:sets.index(PORTABLE_ISA) + 1]:
    raise UserError(f'train.portable: expected a processor with {PORTABLE_ISA}, got {platform.machine()} with '
                    f'{machine.cpu_isa() or "unknown instructions"}. Set --config.train.portable=false.')
  environment_before = dict(os.environ)
  os.environ['XLA_FLAGS'] = xla_flags.join(xla_flags.PORTABLE, os.environ.get('XLA_FLAGS', ''))
  for name in PORTABLE_VARIABLES:
    os.environ.setdefault(name, PORTABLE_ISA)
  # What the user set stays, even if it is not portable.
  portable_names = {xla_flags.name_of(flag) for flag in xla_flags.PORTABLE}
  obstacles = [flag for flag in os.environ['XLA_FLAGS'].split()
               if xla_flags.name_of(flag) in portable_names and flag not in xla_flags.PORTABLE]
  obstacles += [f'{name}={os.environ[name]}' for name in PORTABLE_VARIABLES if os.environ[name] != PORTABLE_ISA]
  if machine.running_threads() and environment_before != dict(os.environ):
    obstacles.append('devices that are initialized')
  text = f'train.portable: expected AVX2 alone, got {", ".join(obstacles)}. The bits may depend on the processor.'
  return [Note(logging.WARNING, text)] if obstacles else []
