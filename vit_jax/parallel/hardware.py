"""The platform of this machine, detected before jax is imported; `Command.run` calls `choose` before each job.

If libtpu is installed, which planning needs as a compiler, jax looks for a TPU at every start, and prints warnings on
machines without one. So `choose` sets `JAX_PLATFORMS` there. `root` is another root of the file system, for tests.
Imports no jax.
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
  """Adds XLA flags to an environment, and sets `JAX_PLATFORMS` if libtpu is installed without a TPU.

  What the user has set stays. `flags` has the names of sets of `xla_flags.SETS` to add to the default ones.
  """
  xla_flags.choose(environ, kind(environ, root=root), flags)
  if found := platforms(environ, root=root):
    environ['JAX_PLATFORMS'] = found


def platforms(environ: Mapping[str, str] = os.environ, *, root: pathlib.Path = pathlib.Path('/')) -> str:
  """Returns the platforms for jax if libtpu is installed without a TPU; '' = the default of jax."""
  if importlib.util.find_spec('libtpu') is None or has_tpu(environ, root) or environ.get('JAX_PLATFORMS'):
    return ''
  has_cuda = (root / 'dev/nvidiactl').exists() and any(importlib.util.find_spec(name) for name in _GPU_PLUGINS)
  return 'cuda,cpu' if has_cuda else 'cpu'


def kind(environ: Mapping[str, str] = os.environ, *, root: pathlib.Path = pathlib.Path('/')) -> str:
  """Returns `tpu`, `gpu` or `cpu`: the fastest devices of this machine."""
  if has_tpu(environ, root):
    return 'tpu'
  return 'gpu' if (root / 'dev/nvidiactl').exists() else 'cpu'


def extra(environ: Mapping[str, str] = os.environ, *, root: pathlib.Path = pathlib.Path('/')) -> str:
  """Returns the extra of vit_jax that installs jax for this machine: `tpu`, `gpu`, `gpu12`; '' for a CPU.

  On a GPU an installed CUDA plug-in of jax decides between CUDA 12 and 13, so that the plug-in is updated together with
  jax. If there is none, the version of the driver decides.
  """
  if (platform := kind(environ, root=root)) != 'gpu':
    return 'tpu' if platform == 'tpu' else ''
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
