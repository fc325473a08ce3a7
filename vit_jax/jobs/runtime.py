"""Startup of every job that computes: platform, compilation cache, logging.

A job calls `start` once, after it has checked its flags and before it uses a device. What the bits of a run on CPUs
depend on is set by `cpu.py`.
"""
from __future__ import annotations

import ctypes
import logging
import os
import pathlib
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import jax

from vit_jax.config import schema
from vit_jax.core import failures
from vit_jax.data.files import open_files
from vit_jax.jobs import cpu
from vit_jax.parallel import hardware, hosts
from vit_jax.record import console, machine

log = logging.getLogger('vit_jax.jobs')
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h of glibc


def start(train: schema.Train | None = None, before: Mapping[str, Any] | None = None) -> int:
  """Sets up jax and logging, and connects this process to the others of the run. Initializes no device.

  Args:
    train: settings of a run, whose bits must not depend on the cores of this machine; None = of another job.
    before: the machine on which that run was saved, if it was.

  Returns:
    The index of this process, 0 if it is alone.

  Raises:
    UserError: the processor or the environment does not allow it.
  """
  open_files.raise_limit()
  failures.configure(train.retry_s if train else None)
  start_logging()
  notes: list[cpu.Note] = []
  if hardware.is_cpu_only():
    keep_freed_memory()
    notes = cpu.fix(train or schema.Train(), before or {})
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

  def is_plain(handler: logging.Handler) -> bool:
    return isinstance(handler, console.Handler) or (
        type(handler) is logging.StreamHandler and handler.stream in (sys.stderr, sys.__stderr__))

  # Some imports configure the root logger, and so does an earlier job of this process.
  root.handlers = [messages if is_plain(handler) else handler for handler in root.handlers
                   if not type(handler).__module__.startswith('absl')] or [messages]
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
