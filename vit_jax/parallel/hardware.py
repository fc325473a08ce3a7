"""The platform of this machine, detected before jax is imported; `Command.run` calls `choose` before each job.

libtpu may be installed on a machine without a TPU, since planning needs its compiler. jax would then look for a TPU at
every start, and print warnings, so `choose` sets `JAX_PLATFORMS`. In all functions, `environ` has the environment
variables, and `root` is the root of the file system, which tests replace. This module does not import jax.
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
_EXTRA_BY_GPU_PLUGIN = {'jax_cuda13_plugin': 'gpu', 'jax_cuda12_plugin': 'gpu12'}
_MIN_CUDA_13_DRIVER = 580  # the first version of the driver for CUDA 13


def choose(environ: MutableMapping[str, str] = os.environ, *, flags: Iterable[str] = (),
           root: pathlib.Path = pathlib.Path('/')) -> None:
  """Adds XLA flags to an environment, and sets `JAX_PLATFORMS` if libtpu is installed without a TPU.

  Flags and variables that the user has set stay. `flags` has names of `xla_flags.SETS`, added to the default sets.
  """
  xla_flags.choose(environ, kind(environ, root=root), flags)
  if jax_platforms := platforms(environ, root=root):
    environ['JAX_PLATFORMS'] = jax_platforms


def platforms(environ: Mapping[str, str] = os.environ, *, root: pathlib.Path = pathlib.Path('/')) -> str:
  """Returns the `JAX_PLATFORMS` to set if libtpu is installed without a TPU; '' = do not set the variable."""
  if importlib.util.find_spec('libtpu') is None or has_tpu(environ, root) or environ.get('JAX_PLATFORMS'):
    return ''
  has_cuda = (root / 'dev/nvidiactl').exists() and any(importlib.util.find_spec(name) for name in _EXTRA_BY_GPU_PLUGIN)
  return 'cuda,cpu' if has_cuda else 'cpu'


def kind(environ: Mapping[str, str] = os.environ, *, root: pathlib.Path = pathlib.Path('/')) -> str:
  """Returns the platform of the fastest devices of this machine: `tpu`, `gpu` or `cpu`."""
  if has_tpu(environ, root):
    return 'tpu'
  return 'gpu' if (root / 'dev/nvidiactl').exists() else 'cpu'


def extra(environ: Mapping[str, str] = os.environ, *, root: pathlib.Path = pathlib.Path('/')) -> str:
  """Returns the extra of vit_jax that installs jax for this machine: `tpu`, `gpu`, `gpu12`; '' for a CPU.

  On a GPU, a CUDA plug-in of jax that is installed decides between CUDA 12 and 13, so that the plug-in is updated
  together with jax. Without a plug-in, the version of the driver decides.
  """
  platform = kind(environ, root=root)
  if platform != 'gpu':
    return 'tpu' if platform == 'tpu' else ''
  for plugin, extra_name in _EXTRA_BY_GPU_PLUGIN.items():
    if importlib.util.find_spec(plugin):
      return extra_name
  driver = root / 'proc/driver/nvidia/version'
  version = re.search(r'Kernel Module.*?(\d+)\.\d', driver.read_text()) if driver.exists() else None
  return 'gpu12' if version and int(version[1]) < _MIN_CUDA_13_DRIVER else 'gpu'


def has_tpu(environ: Mapping[str, str], root: pathlib.Path) -> bool:
  """Returns whether this machine has variables of TPU VMs, device files of TPU drivers, or a PCI device of Google."""
  if any(environ.get(name) for name in _TPU_VARIABLES) or any((root / 'dev').glob('accel[0-9]*')):
    return True
  vendor_files = (root / 'sys/bus/pci/devices').glob('*/vendor')
  return any((root / 'dev/vfio').glob('[0-9]*')) and any(
      file.read_text().strip() == _GOOGLE_VENDOR for file in vendor_files)


def is_cpu_only(environ: MutableMapping[str, str] = os.environ, *, root: pathlib.Path = pathlib.Path('/')) -> bool:
  """Returns whether this process computes on the CPU: its environment says so, or the machine has no accelerator."""
  return environ.get('JAX_PLATFORMS') == 'cpu' or not (has_tpu(environ, root) or (root / 'dev/nvidiactl').exists())


def use_cpu(environ: MutableMapping[str, str] = os.environ) -> None:
  """Makes this process use the CPU only, so that it does not occupy an accelerator."""
  environ['JAX_PLATFORMS'] = 'cpu'
