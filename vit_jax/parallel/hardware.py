"""Which platform this machine has, found before jax is imported.

With the TPU compiler installed for planning, jax would look for a TPU at every start, and print alarming lines
where there is none. Imports no jax.
"""
from __future__ import annotations

import importlib.util
import os
import pathlib
from collections.abc import Mapping, MutableMapping

from vit_jax.parallel import xla_flags

_TPU_VARIABLES = ('TPU_ACCELERATOR_TYPE', 'TPU_WORKER_ID', 'TPU_NAME', 'COLAB_TPU_ADDR', 'TPU_WORKER_HOSTNAMES')
_GOOGLE_VENDOR = '0x1ae0'  # PCI vendor of TPUs
_GPU_PLUGINS = ('jax_cuda13_plugin', 'jax_cuda12_plugin')


def choose(environ: MutableMapping[str, str] = os.environ, *, root: pathlib.Path = pathlib.Path('/')) -> None:
  """Sets XLA's switches, and `JAX_PLATFORMS` where libtpu is installed and no TPU is here; what is set stays."""
  is_tpu, has_gpu = has_tpu(environ, root), (root / 'dev/nvidiactl').exists()
  xla_flags.choose(environ, 'tpu' if is_tpu else 'gpu' if has_gpu else 'cpu')
  if found := platforms(environ, root=root):
    environ['JAX_PLATFORMS'] = found


def platforms(environ: Mapping[str, str] = os.environ, *, root: pathlib.Path = pathlib.Path('/')) -> str:
  """What JAX is to look for where libtpu is installed and no TPU is here; '' = what it looks for by itself."""
  if importlib.util.find_spec('libtpu') is None or has_tpu(environ, root) or environ.get('JAX_PLATFORMS'):
    return ''
  can_use = (root / 'dev/nvidiactl').exists() and any(importlib.util.find_spec(name) for name in _GPU_PLUGINS)
  return 'cuda,cpu' if can_use else 'cpu'


def has_tpu(environ: Mapping[str, str], root: pathlib.Path) -> bool:
  """Whether a TPU is on this machine: device files of the driver, a PCI device of its maker, or what TPU VMs set."""
  if any(environ.get(name) for name in _TPU_VARIABLES) or any((root / 'dev').glob('accel[0-9]*')):
    return True
  vendors = (root / 'sys/bus/pci/devices').glob('*/vendor')
  return any((root / 'dev/vfio').glob('[0-9]*')) and any(v.read_text().strip() == _GOOGLE_VENDOR for v in vendors)


def is_cpu_only(environ: MutableMapping[str, str] = os.environ, *, root: pathlib.Path = pathlib.Path('/')) -> bool:
  """Whether this process computes on the CPU: told so, or on a machine without an accelerator."""
  return environ.get('JAX_PLATFORMS') == 'cpu' or not (has_tpu(environ, root) or (root / 'dev/nvidiactl').exists())


def use_cpu(environ: MutableMapping[str, str] = os.environ) -> None:
  """Keeps this process off accelerators, for work that only describes: a device that is not touched stays free."""
  environ['JAX_PLATFORMS'] = 'cpu'
