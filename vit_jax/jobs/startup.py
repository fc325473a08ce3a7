"""Starts a job that computes: platform, compilation cache, logging.

A job calls `start` once, after the checks of its flags and before the first use of a device.

On CPUs, `start` also fixes what the bits of a run depend on: the threads and instructions of XLA (`fix_cpu`). XLA
computes the gradients of weights and biases as sums of parts, and the number of parts follows from the size of its
thread pool. So a run fixes the size: `train.cpu_threads`, or, for 0, the number of cores where the run began. With
`train.portable`, a run uses only instructions that all x86 processors of the last ten years round alike.
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
MAX_THREADS_PER_CORE = 4  # with more threads, `start` warns that they take time
PORTABLE_VARIABLES = ('ONEDNN_MAX_CPU_ISA', 'DNNL_MAX_CPU_ISA')  # oneDNN reads either, and ignores XLA's flag
PORTABLE_ISA = 'AVX2'
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h of glibc


class Note(NamedTuple):
  """A message for the log about the threads or instructions of a run, and the level of the message."""
  level: int
  text: str


def start(train: schema.Train | None = None, before: Mapping[str, Any] | None = None) -> int:
  """Sets up jax, logging and the connection between processes, but no device; returns the index of this process.

  Args:
    train: settings of a run, whose bits must not depend on the cores of this machine; None = a job without training.
    before: the machine that saved the checkpoint to resume (`machine.describe`); None or {} = a new run.

  Raises UserError if the processor cannot run a portable program, or variables of the environment contradict each
  other.
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
  """Returns the default folder of compiled programs; on CPUs, there is one folder for each size of XLA's pool.

  The size decides into how many parts XLA splits a program, but the keys of jax's cache do not contain the size.
  """
  folder = pathlib.Path(os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache') / 'vit_jax' / 'xla'
  return folder / f'cpu_threads_{machine.cpu_threads()}' if hardware.is_cpu_only() else folder


def start_logging() -> None:
  """Shows messages of this package from the level of the command line on, and messages of libraries only with -v."""
  level, root = console.level(), logging.getLogger()
  new_handler = console.Handler(console.began_s())

  def writes_to_stderr(handler: logging.Handler) -> bool:
    return isinstance(handler, console.Handler) or (
        type(handler) is logging.StreamHandler and handler.stream in (sys.stderr, sys.__stderr__))

  # Some imports, and an earlier job of this process, add handlers that write to stderr; they are replaced.
  handlers = [handler for handler in root.handlers if not type(handler).__module__.startswith('absl')]
  root.handlers = [new_handler if writes_to_stderr(handler) else handler for handler in handlers] or [new_handler]
  logging.getLogger('vit_jax').setLevel(level)
  if level == logging.DEBUG:
    root.setLevel(logging.INFO)
    return
  logging.getLogger('absl').setLevel(logging.ERROR)  # Orbax logs every wait for a save
  quiet_abandoned_reads()


def quiet_abandoned_reads() -> None:
  """Silences what Orbax logs after it failed to read a damaged checkpoint or to save to a full disk.

  Orbax raises the first error, which becomes a message for the user. The other reads of Orbax end in tasks that are
  never awaited, on a closed event loop, and the threads of Orbax log the stack of an error that Orbax also raises.
  """
  logging.getLogger('asyncio').setLevel(logging.CRITICAL)
  logging.getLogger('absl').addFilter(_is_not_of_orbax)
  warnings.filterwarnings('ignore', message='coroutine .* was never awaited', category=RuntimeWarning)
  if sys.unraisablehook is not _show_unraisable:
    sys.unraisablehook = _show_unraisable


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
  return f'{os.sep}orbax{os.sep}' not in record.pathname


def _show_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
  """Replaces `sys.unraisablehook`; shows all errors but those of abandoned reads."""
  is_closed_loop = isinstance(unraisable.exc_value, RuntimeError) and 'loop is closed' in str(unraisable.exc_value)
  traceback = unraisable.exc_traceback
  is_from_orbax = traceback is not None and 'orbax' in traceback.tb_frame.f_code.co_filename
  if not is_closed_loop and not is_from_orbax:
    sys.__unraisablehook__(unraisable)


def keep_freed_memory() -> None:
  """Makes glibc keep freed blocks up to 1 GiB, in one arena, instead of returning them to the system.

  XLA's CPU client allocates the temporaries of every step again. If glibc maps them anew each time, page faults take a
  third of the time of a small model's step: 934,000 faults were counted in 100 steps of the digits, and 75,000 without
  mapping; 1,049,000 in 12 steps of CIFAR-10, and 173,000 without mapping and with one arena.
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
  num_devices = num_simulated(os.environ.get('XLA_FLAGS', ''))
  num_threads, reason = _choose_num_threads(train, before, num_devices)
  num_running = machine.running_threads()  # 0 = no device is initialized
  variable, num_set = machine.given_threads()  # a variable of the environment and its value; 0 = not set
  if num_devices:
    num_threads = widen_pool(num_devices, num_threads)
    num_set = num_set if variable == 'PJRT_NPROC' else 0  # PJRT_NPROC, which is set below, precedes NPROC
  num_fixed = num_running or num_set
  if num_threads and not num_fixed:
    os.environ['PJRT_NPROC'] = str(num_threads)
  if num_threads and num_fixed and num_fixed != num_threads:
    if before.get('cpu_threads') == num_threads:  # `resume.warn_of_machine` warns of both numbers
      return notes
    cause = 'the devices of this process, which are initialized' if num_running else f'{variable}={num_set}'
    return [*notes, Note(logging.WARNING, f'train.cpu_threads: expected {num_threads} threads, {reason}, got '
                         f'{num_fixed} by {cause}. The last bits of this run depend on this number.')]
  if num_threads and not num_devices:
    notes += _describe_threads(num_threads, machine.cores(), reason)
  return notes


def _choose_num_threads(train: schema.Train, before: Mapping[str, Any], num_devices: int) -> tuple[int, str]:
  """Returns the number of threads for the pool of a run, 0 = any number, and the reason in words."""
  if train.cpu_threads:
    return train.cpu_threads, f'as set by train.cpu_threads={train.cpu_threads}'
  has_same_devices = before.get('device_kind') == 'cpu' and num_simulated(before.get('XLA_FLAGS', '')) == num_devices
  return int(before.get('cpu_threads') or 0) if has_same_devices else 0, 'as before in this run'


def _describe_threads(num_threads: int, num_cores: int, reason: str) -> list[Note]:
  """Returns a note if the pool has more or fewer threads than the machine has cores; no note if they are equal."""
  if num_threads == num_cores:
    return []
  text = (f'XLA runs {num_threads} thread{"s" if num_threads > 1 else ""} on {num_cores} '
          f'core{"s" if num_cores > 1 else ""}, {reason}, so that the bits of the run do not depend on the cores.')
  if num_threads > MAX_THREADS_PER_CORE * num_cores:
    return [Note(logging.WARNING, f'{text} So many threads a core take time; --config.train.cpu_threads={num_cores} is '
                 'faster, and changes the last bits.')]
  if num_threads < num_cores:
    text += f' --config.train.cpu_threads={num_cores} is faster, and changes the last bits.'
  return [Note(logging.INFO, text)]


def num_simulated(flags: str) -> int:
  """Returns the number of devices that XLA flags simulate on CPUs; 0 = none."""
  flag = re.search(r'--xla_force_host_platform_device_count=(\d+)', flags)
  return int(flag[1]) if flag else 0


def widen_pool(num_devices: int, threads: int = 0) -> int:
  """Stops asynchronous dispatch, and returns a pool size >= `threads` with which simulated devices do not deadlock.

  By default, XLA's pool has one thread per device. A device that runs two collectives at a time, for example along two
  axes of a mesh, blocks two threads; another device then has no thread, and all devices wait.
  """
  jax.config.update('jax_cpu_enable_async_dispatch', False)  # two programs never run at the same time
  return max(threads, THREADS_PER_DEVICE * num_devices)


def _make_portable() -> list[Note]:
  """Limits XLA and oneDNN to AVX2 and portable math functions; returns a warning if the environment prevents that."""
  instruction_sets = list(machine.ISA.values())  # from the newest to the oldest
  if machine.cpu_isa() not in instruction_sets[:instruction_sets.index(PORTABLE_ISA) + 1]:
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
