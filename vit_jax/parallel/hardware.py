"""The platform of this machine, detected before jax is imported.

If the TPU compiler is installed for planning, jax would look for a TPU at every start and print warnings on machines
without one. Imports no jax.
"""
from __future__ import annotations

import importlib.util
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, MutableMapping

from vit_jax.parallel import xla_flags

_TPU_VARIABLES = ('TPU_ACCELERATOR_TYPE', 'TPU_WORKER_ID', 'TPU_NAME', 'COLAB_TPU_ADDR', 'TPU_WORKER_HOSTNAMES')
_GOOGLE_VENDOR = '0x1ae0'  # PCI vendor of TPUs
_GPU_PLUGINS = {'jax_cuda13_plugin': 'gpu', 'jax_cuda12_plugin': 'gpu12'}  # and the extras that have them
_CUDA_13_DRIVER = 580  # the first version of the driver for CUDA 13


def choose(environ: MutableMapping[str, str] = os.environ, *, flags: Iterable[str] = (),
           root: pathlib.Path = pathlib.Path('/')) -> None:
  """Adds the XLA flags, and sets `JAX_PLATFORMS` if libtpu is installed without a TPU; what the user sets stays.

  `flags`: names of further sets of flags.
  """
  xla_flags.choose(environ, kind(environ, root=root), flags)
  if found := platforms(environ, root=root):
    environ['JAX_PLATFORMS'] = found


def platforms(environ: Mapping[str, str] = os.environ, *, root: pathlib.Path = pathlib.Path('/')) -> str:
  """Returns the platforms for jax if libtpu is installed without a TPU; '' = the default of jax."""
  if importlib.util.find_spec('libtpu') is None or has_tpu(environ, root) or environ.get('JAX_PLATFORMS'):
    return ''
  can_use = (root / 'dev/nvidiactl').exists() and any(importlib.util.find_spec(name) for name in _GPU_PLUGINS)
  return 'cuda,cpu' if can_use else 'cpu'


def kind(environ: Mapping[str, str] = os.environ, *, root: pathlib.Path = pathlib.Path('/')) -> str:
  """Returns `tpu`, `gpu` or `cpu`: the fastest devices of this machine."""
  return 'tpu' if has_tpu(environ, root) else 'gpu' if (root / 'dev/nvidiactl').exists() else 'cpu'


def extra(environ: Mapping[str, str] = os.environ, *, root: pathlib.Path = pathlib.Path('/')) -> str:
  """Returns the extra of the package with the jax for this machine; '' for a CPU.

  A CUDA plug-in of jax that is installed decides which CUDA stays, so that the plug-in is updated together with jax. If
  there is none, the version of the driver decides.
  """
  if (found := kind(environ, root=root)) != 'gpu':
    return 'tpu' if found == 'tpu' else ''
  for plugin, name in _GPU_PLUGINS.items():
    if importlib.util.find_spec(plugin):
      return name
  driver = root / 'proc/driver/nvidia/version'
  version = re.search(r'Kernel Module.*?(\d+)\.\d', driver.read_text()) if driver.exists() else None
  return 'gpu12' if version and int(version[1]) < _CUDA_13_DRIVER else 'gpu'


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
