"""What the bits of a run on CPUs depend on, set before a device is initialized: XLA's threads and instructions.

XLA computes the gradients of weights and biases as sums of parts, whose number follows from the size of its thread
pool. So a run fixes that size: `train.cpu_threads`, or for 0 the number of cores where it began. With `train.portable`
it is also limited to instructions that all x86 processors of the last ten years round alike.
"""
from __future__ import annotations

import logging
import os
import platform
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.parallel import xla_flags
from vit_jax.record import machine

THREADS_PER_DEVICE = 8
MOST_A_CORE = 4
"""Threads a core above which a run is warned of their cost."""
PORTABLE_VARIABLES = ('ONEDNN_MAX_CPU_ISA', 'DNNL_MAX_CPU_ISA')  # oneDNN reads either; it ignores XLA's flag
PORTABLE_ISA = 'AVX2'


class Note(NamedTuple):
  """A message about the threads or instructions of a run, and its level."""
  level: int
  text: str


def fix(train: schema.Train, before: Mapping[str, Any]) -> list[Note]:
  """Sets the size of XLA's pool in the environment, and the instructions of a portable run.

  A size that the user sets in the environment stays, and so does the pool of devices that are already initialized.

  Args:
    train: settings of the run.
    before: the machine of the checkpoint from which the run resumes (`record/machine.py`); {} = there is none.

  Returns:
    Messages for the user.

  Raises:
    UserError: the processor cannot run a portable program.
  """
  notes = _make_portable() if train.portable else []
  simulated = num_simulated(os.environ.get('XLA_FLAGS', ''))
  wanted, why = _wanted(train, before, simulated)
  running, (name, given) = machine.running_threads(), machine.given_threads()
  if simulated:
    wanted, given = widen_pool(simulated, wanted), given if name == 'PJRT_NPROC' else 0
  fixed = running or given
  if wanted and not fixed:
    os.environ['PJRT_NPROC'] = str(wanted)
  if wanted and fixed and fixed != wanted:
    if before.get('cpu_threads') == wanted:  # the warning of a resume names both numbers
      return notes
    cause = 'the devices of this process, which are initialized' if running else f'{name}={given}'
    return [*notes, Note(logging.WARNING, f'train.cpu_threads: expected {wanted} threads, {why}, got {fixed} by '
                         f'{cause}. The last bits of this run depend on this number.')]
  return notes if simulated or not wanted else [*notes, *_compare(wanted, machine.cores(), why)]


def _wanted(train: schema.Train, before: Mapping[str, Any], simulated: int) -> tuple[int, str]:
  """Returns the number of threads that a run is to have, and why; 0 = any number."""
  if train.cpu_threads:
    return train.cpu_threads, f'as set by train.cpu_threads={train.cpu_threads}'
  is_alike = before.get('device_kind') == 'cpu' and num_simulated(before.get('XLA_FLAGS', '')) == simulated
  return (int(before['cpu_threads']) if is_alike and before.get('cpu_threads') else 0), 'as before in this run'


def _compare(threads: int, cores: int, why: str) -> list[Note]:
  """Returns what the user should know about a number of threads that is not that of the cores."""
  if threads == cores:
    return []
  text = (f'XLA runs {threads} thread{"s" * (threads > 1)} on {cores} core{"s" * (cores > 1)}, {why}, so that the bits '
          'of the run do not depend on the cores.')
  if threads > MOST_A_CORE * cores:
    return [Note(logging.WARNING, f'{text} So many threads a core take time; --config.train.cpu_threads={cores} is '
                 'faster, and changes the last bits.')]
  faster = f' --config.train.cpu_threads={cores} is faster, and changes the last bits.' if threads < cores else ''
  return [Note(logging.INFO, text + faster)]


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
  isa = list(machine.ISA.values())
  if machine.cpu_isa() not in isa[:isa.index(PORTABLE_ISA) + 1]:
    raise UserError(f'train.portable: expected a processor with {PORTABLE_ISA}, got {platform.machine()} with '
                    f'{machine.cpu_isa() or "unknown instructions"}. Set --config.train.portable=false.')
  before = dict(os.environ)
  os.environ['XLA_FLAGS'] = xla_flags.join(xla_flags.PORTABLE, os.environ.get('XLA_FLAGS', ''))
  for name in PORTABLE_VARIABLES:
    os.environ.setdefault(name, PORTABLE_ISA)
  other = [text for text in os.environ['XLA_FLAGS'].split() if xla_flags.name_of(text) in
           map(xla_flags.name_of, xla_flags.PORTABLE) and text not in xla_flags.PORTABLE]
  other += [f'{name}={os.environ[name]}' for name in PORTABLE_VARIABLES if os.environ[name] != PORTABLE_ISA]
  if machine.running_threads() and before != dict(os.environ):
    other.append('devices that are initialized')
  text = f'train.portable: expected AVX2 alone, got {", ".join(other)}. The bits may depend on the processor.'
  return [Note(logging.WARNING, text)] if other else []
