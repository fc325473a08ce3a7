"""The platform of this machine, detected before jax is imported.

If the TPU compiler is installed for planning, jax would look for a TPU at every start and print warnings on machines
without one. Imports no jax.
"""
from __future__ import annotations

import importlib.util
import os
import pathlib
from collections.abc import Iterable, Mapping, MutableMapping

from vit_jax.parallel import xla_flags

_TPU_VARIABLES = ('TPU_ACCELERATOR_TYPE', 'TPU_WORKER_ID', 'TPU_NAME', 'COLAB_TPU_ADDR', 'TPU_WORKER_HOSTNAMES')
_GOOGLE_VENDOR = '0x1ae0'  # PCI vendor of TPUs
_GPU_PLUGINS = ('jax_cuda13_plugin', 'jax_cuda12_plugin')


def choose(environ: MutableMapping[str, str] = os.environ, *, flags: Iterable[str] = (),
           root: pathlib.Path = pathlib.Path('/')) -> None:
  """Adds the XLA flags, and sets `JAX_PLATFORMS` if libtpu is installed without a TPU; what the user sets stays.

  `flags`: names of further sets of flags.
  """
  is_tpu, has_gpu = has_tpu(environ, root), (root / 'dev/nvidiactl').exists()
  xla_flags.choose(environ, 'tpu' if is_tpu else 'gpu' if has_gpu else 'cpu', flags)
  if found := platforms(environ, root=root):
    environ['JAX_PLATFORMS'] = found


def platforms(environ: Mapping[str, str] = os.environ, *, root: pathlib.Path = pathlib.Path('/')) -> str:
  """Returns the platforms for jax if libtpu is installed without a TPU; '' = the default of jax."""
  if importlib.util.find_spec('libtpu') is None or has_tpu(environ, root) or environ.get('JAX_PLATFORMS'):
    return ''
  can_use = (root / 'dev/nvidiactl').exists() and any(importlib.util.find_spec(name) for name in _GPU_PLUGINS)
  return 'cuda,cpu' if can_use else 'cpu'


def has_tpu(environ: Mapping[str, str], root: pathlib.Path) -> bool:
  """Returns whether this machine has a TPU.

  The signs are device files of the driver, a PCI device of its vendor, and variables of TPU VMs.
  """
  if any(environ.get(name) for name in _TPU_VARIABLES) or any((root / 'dev').glob('accel[0-9]*')):
    return True
  vendors = (root / 'sys/bus/pci/devices').glob('*/vendor')
  return any((root / 'dev/vfio').glob('[0-9]*')) and any(v.read_text().strip() == _GOOGLE_VENDOR for v in vendors)


def is_cpu_only(environ: MutableMapping[str, str] = os.environ, *, root: pathlib.Path = pathlib.Path('/')) -> bool:
  """Returns whether this process computes on the CPU: by its environment, or without an accelerator."""
  return environ.get('JAX_PLATFORMS') == 'cpu' or not (has_tpu(environ, root) or (root / 'dev/nvidiactl').exists())


def use_cpu(environ: MutableMapping[str, str] = os.environ) -> None:
  """Makes this process use the CPU only, so that it does not occupy an accelerator."""
  environ['JAX_PLATFORMS'] = 'cpu'
