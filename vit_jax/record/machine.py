"""The origin of a result: the command, the commit of the code, and the machine (`origin`, `describe`).

The train job writes the origin into the `start` event of `metrics.jsonl` and into the description of each checkpoint,
and compares the machines when it resumes. On CPUs, the gradient of a weight or a bias is a sum that XLA splits by the
size of its thread pool, and each instruction set rounds sums in other places. So two runs are equal bit for bit only
if `differences` returns {} for their machines.
"""
from __future__ import annotations

import contextlib
import importlib.metadata
import os
import pathlib
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import jax

from vit_jax import __version__

ROOT = pathlib.Path(__file__).resolve().parents[2]
POOL_VARIABLES = ('PJRT_NPROC', 'NPROC')
"""Environment variables: the first one with a number sets the size of XLA's thread pool, which else is `cores()`."""
THREAD_NAME = 'tf_XLAEigen'  # of the threads of XLA's pool, as Linux lists the threads of a process
CPUINFO = pathlib.Path('/proc/cpuinfo')
STATM = pathlib.Path('/proc/self/statm')
ISA = {'amx_tile': 'AMX', 'avx512_fp16': 'AVX512_FP16', 'avx512_bf16': 'AVX512_BF16', 'avx512_vnni': 'AVX512_VNNI',
       'avx512f': 'AVX512', 'avx2': 'AVX2', 'avx': 'AVX', 'sse4_2': 'SSE4_2', 'sve2': 'SVE2', 'sve': 'SVE',
       'asimd': 'NEON'}
"""Maps a flag in Linux's /proc/cpuinfo to the name of an instruction set, the highest first."""
_CPU_FIELDS = ('cpu_threads', 'cpu_model', 'cpu_isa', 'XLA_FLAGS', 'ONEDNN_MAX_CPU_ISA')
"""Fields of `describe` that change the bits of results on a CPU. The number of cores changes no bits."""


def describe(device_kind: str = '') -> dict[str, Any]:
  """Returns the properties of this machine that the bits and the speed of a run depend on, as JSON values.

  `device_kind` is that of the devices (`jax.Device`); '' = initialize the devices of this process, and use theirs.
  """
  return {'device_kind': device_kind or jax.devices()[0].device_kind, 'cpu_threads': cpu_threads(), 'cores': cores(),
          'cpu_model': cpu_model(), 'cpu_isa': cpu_isa(), 'XLA_FLAGS': os.environ.get('XLA_FLAGS', '').strip(),
          'ONEDNN_MAX_CPU_ISA': os.environ.get('ONEDNN_MAX_CPU_ISA', ''), 'versions': versions()}


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
  """Returns the differences between two results of `describe` that change bits: (before, now) by field or package.

  A field or package that is only in one of the two results does not count.
  """
  is_cpu = before.get('device_kind') == now.get('device_kind') == 'cpu'
  fields = ['device_kind', *(_CPU_FIELDS if is_cpu else ())]
  pairs = {name: (before[name], now[name]) for name in fields if name in before and name in now}
  old, new = before.get('versions', {}), now.get('versions', {})
  pairs |= {name: (old[name], new[name]) for name in ('jax', 'jaxlib') if name in old and name in new}
  return {name: pair for name, pair in pairs.items() if _comparable(pair[0]) != _comparable(pair[1])}


def _comparable(value: Any) -> Any:
  """Returns the set of flags in a text of XLA flags, without flags that write files; any other value unchanged."""
  if isinstance(value, str) and value.startswith('--'):
    return frozenset(flag for flag in value.split() if not flag.startswith('--xla_dump'))
  return value


def cores() -> int:
  """Returns the number of cores that this process may use: its affinity, as set by taskset, Slurm or a container."""
  return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


def cpu_threads() -> int:
  """Returns the size of XLA's thread pool on CPUs; before a device is initialized, the size that the pool will have."""
  return running_threads() or given_threads()[1] or cores()


def given_threads() -> tuple[str, int]:
  """Returns the environment variable that sets the size of the pool, and this size; ('', 0) if no variable does."""
  for name in POOL_VARIABLES:
    text = os.environ.get(name, '')
    if re.fullmatch(r'\s*[0-9]+\s*', text) and int(text):
      return name, int(text)
  return '', 0


def running_threads() -> int:
  """Returns the number of threads in XLA's pool; 0 before a device is initialized, and on other systems than Linux."""
  count = 0
  for path in pathlib.Path('/proc/self/task').glob('*/comm'):
    with contextlib.suppress(OSError):  # the thread has ended
      count += path.read_text().startswith(THREAD_NAME)
  return count


def cpu_model() -> str:
  """Returns the name of the processor; '' if the name is not known."""
  return _processor('model name') or platform.processor()


def cpu_isa() -> str:
  """Returns the highest instruction set of `ISA` that the processor is known to have; '' if there is none."""
  flags = set((_processor('flags') or _processor('Features')).split())
  return next((name for flag, name in ISA.items() if flag in flags), '')


def _processor(field: str) -> str:
  """Returns a field of the first processor in /proc/cpuinfo, such as `model name`; '' if there is no such field."""
  match = re.search(rf'^{field}\s*: *(.*)$', CPUINFO.read_text(), re.M) if CPUINFO.is_file() else None
  return match[1].strip() if match else ''


def versions() -> dict[str, str]:
  """Returns the versions of the packages that a result may depend on."""
  packages = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'grain', 'numpy')
  return {'vit_jax': __version__, 'python': platform.python_version(),
          **{name: importlib.metadata.version(name) for name in packages}}


def origin() -> dict[str, Any]:
  """Returns command, commit and machine of this process, as JSON values. Initializes the devices."""
  return {'command': sys.argv, 'commit': commit(), 'machine': describe()}


def commit() -> str:
  """Returns the commit of the checkout that this package is in; '' if it is installed without a checkout.

  A `+` follows if tracked files of the package or of the configs differ from that commit.
  """
  head = _git('rev-parse', 'HEAD') if (ROOT / '.git').exists() else ''
  is_changed = head and _git('status', '--porcelain', '--untracked-files=no', '--', 'vit_jax', 'configs')
  return f'{head}+' if is_changed else head


def _git(*words: str) -> str:
  """Returns the output of a git command; '' if git is not installed or fails."""
  try:
    process = subprocess.run(['git', '-C', str(ROOT), *words], capture_output=True, text=True, check=False, timeout=20)
  except (OSError, subprocess.TimeoutExpired):
    return ''
  return '' if process.returncode else process.stdout.strip()


def processor_s() -> float:
  """Returns the processor seconds of this process and of its child processes that have ended."""
  return round(sum(os.times()[:4]), 2)


def used_memory_gib() -> float | None:
  """Returns the GiB in use on the first device, else by this process; None = not known. Initializes the devices."""
  stats = jax.local_devices()[0].memory_stats() or {}
  if 'bytes_in_use' in stats:
    return stats['bytes_in_use'] / 2**30
  try:
    return int(STATM.read_text().split()[1]) * resource.getpagesize() / 2**30
  except (OSError, ValueError, IndexError):
    return None
