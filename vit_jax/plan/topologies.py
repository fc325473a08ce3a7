"""The hardware that a run can be planned for: its chips and slices, and devices for the compiler.

`for_run` parses a name such as `v3:16x16`, a slice of 16 x 16 chips. `missing` says whether this machine can compile
for it. The process that compiles sets `environment` before it imports jax, and then calls `open_devices`, so only it
imports jax here. A device is a device of jax: a core on TPU v2, v3 and TPU7x, a chip elsewhere (two cores run as
one on v4 and v5p).
"""
from __future__ import annotations

import glob
import importlib.util
import itertools
import math
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vit_jax.config import schema
from vit_jax.core import extras, globs
from vit_jax.core.errors import UserError
from vit_jax.parallel import layout, xla_flags
from vit_jax.plan import cards

if TYPE_CHECKING:
  import jax


class Chip(NamedTuple):
  """The properties of one device.

  hbm_gib: memory that a program may use; for TPUs but TPU7x read off the compiler's own errors (libtpu 0.0.51).
  peak_flops: dense bf16 FLOP/s.
  hbm_bytes_s: bytes per second of the memory.
  ring_bytes_s: bytes per second that a device sends around one ring of neighbors, both directions together.
  clock_hz: frequency of the cycles that the compiler counts; 0 = it counts none.
  cores: number of cores in one device, for core-days.
  between_bytes_s: the device's share of the bandwidth of its host to other slices; 0 = unknown.
  capability: the compute capability of a GPU.
  """
  platform: str
  hbm_gib: float
  peak_flops: float
  hbm_bytes_s: float
  ring_bytes_s: float
  clock_hz: float = 0.
  cores: int = 1
  between_bytes_s: float = 0.
  capability: float = 0.


# Peaks, memory and its bandwidth, links: Cloud TPU documentation; v2, v3: Jouppi et al. 2020 (CACM 63(7)), half a
# chip; links of v3 (70 GB/s) and v4 (50 GB/s): Jouppi et al. 2023, Table 4, a core getting half of its chip's. Between
# slices: the documentation has 6.4 Tbit/s for 256 chips of v5e, 25.6 Tbit/s for 256 of v6e, and for one chip 50 Gbit/s
# of v5p and 100 Gbit/s of TPU7x. A device of TPU7x is half a chip, as libtpu presents it; its memory is half of the
# nominal 192 GiB, of which the share that a program may use was not read off.
CHIPS = {
    'v2': Chip('tpu', 7.48, 22.5e12, 350e9, 62e9, .70e9),
    'v3': Chip('tpu', 15.48, 61.5e12, 450e9, 70e9, .94e9),
    'v4': Chip('tpu', 30.75, 275e12, 1228e9, 100e9, 1.05e9, 2),
    'v5e': Chip('tpu', 15.75, 197e12, 819e9, 100e9, 1.5e9, between_bytes_s=3.125e9),
    'v5p': Chip('tpu', 95.73, 459e12, 2765e9, 200e9, 1.75e9, 2, between_bytes_s=6.25e9),
    'v6e': Chip('tpu', 31.24, 918e12, 1640e9, 200e9, 1.75e9, between_bytes_s=12.5e9),
    'tpu7x': Chip('tpu', 96., 1153.5e12, 3690e9, 100e9, between_bytes_s=6.25e9),
    # NVIDIA datasheets, SXM, without sparsity; NVLink, one direction. `gpu` stands for any GPU, with the least figures.
    # The clock of 1 GHz makes cycles of the nanoseconds that `gpu_kernels` estimates.
    **dict.fromkeys(('gpu', 'a100'), Chip('gpu', 76., 312e12, 2039e9, 300e9, capability=8.)),
    'h100': Chip('gpu', 76., 989e12, 3350e9, 450e9, 1e9, capability=9.),
    'h200': Chip('gpu', 134., 989e12, 4800e9, 450e9, 1e9, capability=9.),
    # A nominal simulated device, to try a plan on: the figures are a convention, not a measurement.
    'cpu': Chip('cpu', 8., .1e12, 10e9, 10e9),
}
_FLAT = ('1x1', '2x2', '2x4', '4x4', '4x8', '8x8', '8x16', '16x16')
_PODS = ('2x2', '4x4', '4x8', '8x8', '8x16', '16x16', '16x32', '32x32')
_PARTS = ('2x2x1', '2x2x2', '2x2x4', '2x4x4')  # slices smaller than a cube of 4x4x4 chips
POD_SIDES = {'v4': (16, 16, 16), 'v5p': (16, 20, 28), 'tpu7x': (16, 16, 36)}
"""A whole pod in chips: 4,096, 8,960 and 9,216. Its slices are its parts, or consist of complete cubes."""
NICKNAMES = {'v5litepod': 'v5e', 'v5lite': 'v5e', 'trillium': 'v6e', 'ironwood': 'tpu7x', 'v7x': 'tpu7x'}
_DEVICES_A_CHIP = {'v2': 2, 'v3': 2, 'tpu7x': 2}
_NUMBERED_BY_CORES = ('v2', 'v3', 'v4', 'v5p', 'tpu7x')
"""Numbers in names of cloud providers count cores of these, two a chip, and chips of all others."""


def _grids(sides: tuple[int, int, int]) -> tuple[str, ...]:
  """Returns the slices of a pod, such as `4x4x8`, each with its sides in ascending order, from small to large."""
  cubes = itertools.product(*(range(4, side + 1, 4) for side in sides))  # whole cubes of 4x4x4 chips
  grids = [grid for grid in cubes if list(grid) == sorted(grid)]
  grids.sort(key=lambda grid: (math.prod(grid), sum(grid), grid))
  return (*_PARTS, *('x'.join(map(str, grid)) for grid in grids))


GRIDS = {'v2': _PODS[:6], 'v3': _PODS, 'v5e': _FLAT, 'v6e': _FLAT,
         **{kind: _grids(sides) for kind, sides in POD_SIDES.items()}}
"""Grids of chips that a slice of each chip may have."""


def num_chips(grid: str) -> int:
  """Returns the number of chips of a grid such as `4x4x8`."""
  return math.prod(map(int, grid.split('x')))


def _aliases() -> dict[str, str]:
  """Returns the names of this module by those of cloud providers: `v3-512` is `v3:16x16`.

  Of several grids with as many chips, a name stands for the most compact one, in which neighbors are nearest.
  """
  name_by_alias: dict[str, str] = {}
  for kind, grids in GRIDS.items():
    nicknames = [nickname for nickname, chip in NICKNAMES.items() if chip == kind]
    for grid in reversed(grids):  # the first of equal sizes is the most compact one
      number = num_chips(grid) * (2 if kind in _NUMBERED_BY_CORES else 1)
      name_by_alias |= {f'{name}-{number}': f'{kind}:{grid}' for name in (kind, *nicknames)}
  return name_by_alias


ALIASES = _aliases()


class Topology(NamedTuple):
  """One slice or several equal `slices`, with `num_devices` in total: `v3:16x16` has 512 devices of the kind `v3`."""
  name: str
  kind: str
  chip: Chip
  num_devices: int
  slices: int = 1

  @property
  def label(self) -> str:
    """Its name in text: `v5e:16x16`, or `2 slices of v5e:16x16`."""
    return self.name if self.slices == 1 else f'{self.slices} slices of {self.name}'

  @property
  def hardware(self) -> layout.Hardware:
    """The description that `parallel/layout.py` needs, with the numbers of devices of all possible slices."""
    counts = {num_chips(grid) * _DEVICES_A_CHIP.get(self.kind, 1) for grid in GRIDS.get(self.kind, ())}
    return layout.Hardware(self.kind, self.chip.platform, self.num_devices, self.chip.hbm_gib, self.slices,
                           tuple(sorted(counts)), self.chip.capability)

  @property
  def num_chips(self) -> int:
    """Number of TPU chips or GPUs, which have a price."""
    return self.num_devices // _DEVICES_A_CHIP.get(self.kind, 1)

  @property
  def num_cores(self) -> int:
    """Number of TPU cores or GPUs, for core-days."""
    return self.num_devices * self.chip.cores


def _hint(name: str) -> str:
  """Returns the line `Did you mean v3-512?` with the most similar name of the same chip; '' for an unknown chip."""
  kind, sign, size = re.split('([:-]|$)', name, maxsplit=1)  # 'v3', '-', '513' of 'v3-513'
  names = [f'{kind}:{grid}' for grid in GRIDS.get(kind, ())]
  names += [alias for alias in ALIASES if alias.partition('-')[0] == kind]
  with_other_sign = f'{kind}{"-" if sign == ":" else ":"}{size}'
  similar = [with_other_sign] if with_other_sign in names else globs.similar_names(name, names)
  return f'Did you mean {similar[0]}?' if similar else ''


def parse(text: str, *, slices: int = 1) -> Topology:
  """Parses a slice: a grid of chips, a name of cloud providers (`v3-512`), or a number (`cpu:8`, `h200:8`).

  Args:
    text: the name.
    slices: number of such TPU slices; GPUs and CPUs are given by their total number.

  Raises:
    UserError: unknown name; lists the known ones.
  """
  name = text.strip().lower()
  name = ALIASES.get(name, name)
  kind, _, size = name.partition(':')
  kind = NICKNAMES.get(kind, kind)
  if kind in GRIDS and size in GRIDS[kind]:
    num_devices = num_chips(size) * _DEVICES_A_CHIP.get(kind, 1)
    return Topology(f'{kind}:{size}', kind, CHIPS[kind], num_devices * slices, slices)
  if kind in CHIPS and kind not in GRIDS and re.fullmatch(r'[1-9]\d{0,4}', size):
    return Topology(name, kind, CHIPS[kind], int(size))
  numbered = '  '.join(f'{chip}:N' for chip in CHIPS if chip not in GRIDS)
  lines = [f'--topology: expected one of the topologies below, got {text!r}.', *map(_describe_grids, GRIDS),
           f'  N devices: {numbered}', '  names of cloud providers, such as v3-512, v4-4096, v5litepod-16, v6e-256; '
           'several slices: --config.mesh.slices=N', _hint(name)]
  raise UserError('\n'.join(lines).rstrip('\n'))


def for_run(config: schema.Config, text: str, slices: int = 0) -> Topology:
  """Parses the slice of a run, of which there are as many as its config says.

  Args:
    config: of the run.
    text: the name of one slice.
    slices: number of slices of the hardware; 0 = as in the config, with its `mesh.slices=0` as at the first start.

  Raises:
    UserError: unknown name, or the config has another number of slices.
  """
  if slices and config.mesh.slices not in (0, slices):
    raise UserError(f'mesh.slices: expected {slices}, the number of slices of the hardware, got {config.mesh.slices}. '
                    f'Add --config.mesh.slices={slices} to the command.')
  return parse(text, slices=slices or config.mesh.slices or config.mesh.chosen_slices or 1)


def _describe_grids(kind: str) -> str:
  """Returns a line with the grids of a chip."""
  if kind not in POD_SIDES:
    return f'  {kind + ":":<7}{"  ".join(GRIDS[kind])}'
  return f'  {kind + ":":<7}{"  ".join(_PARTS)}  and 4x4x4 to {GRIDS[kind][-1]}, each side a multiple of 4'


def missing(topology: Topology) -> str:
  """Returns why this machine cannot compile for a topology, and what to do about it; '' if it can."""
  match topology.chip.platform:
    case 'tpu' if importlib.util.find_spec('libtpu') is None:
      return f'The TPU compiler is not installed (Linux; no TPU is needed). Run: {extras.install("plan")}'
    case 'gpu' if is_described(topology) or len(glob.glob('/dev/nvidia[0-9]*')) >= topology.num_devices:
      return ''  # `open_devices` refuses GPUs of another kind
    case 'gpu' if topology.kind in cards.CARDS:
      return f"XLA's compiler for GPUs is not installed (Linux; no GPU is needed). Run: {extras.install('plan-gpu')}"
    case 'gpu':
      return (f'A program for {topology.name} can be compiled only on a machine with that many GPUs, or for '
              f'{" or ".join(cards.CARDS)}, which XLA knows by a description.')
  return ''


def is_described(topology: Topology) -> bool:
  """Returns whether programs are compiled for a description of the devices, also on a machine that has such devices."""
  return topology.chip.platform == 'tpu' or (topology.kind in cards.CARDS and cards.is_installed())


def environment(topology: Topology) -> dict[str, str]:
  """Returns the variables that the compiling process must have before it imports jax."""
  match topology.chip.platform:
    case 'tpu':  # no TPU: no metadata server, a shared library, computation on the CPU
      # The TPU compiler ends the process at a flag that it does not know, as most of those for CPUs and GPUs.
      flags = re.sub(r'--xla_[cg]pu_\S*', '', os.environ.get('XLA_FLAGS', ''))
      return {'JAX_PLATFORMS': 'cpu', 'TPU_SKIP_MDS_QUERY': '1', 'ALLOW_MULTIPLE_LIBTPU_LOAD': '1', 'XLA_FLAGS': flags,
              'LIBTPU_INIT_ARGS': xla_flags.merged('tpu', os.environ.get('LIBTPU_INIT_ARGS', '')),
              'TPU_STDERR_LOG_LEVEL': '3', 'TPU_MIN_LOG_LEVEL': '3', 'TF_CPP_MIN_LOG_LEVEL': '3'}
    case 'cpu':
      flags = re.sub(r'--xla_force_host_platform_device_count=\d+', '', os.environ.get('XLA_FLAGS', ''))
      count = f'--xla_force_host_platform_device_count={topology.num_devices}'
      return {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': f'{flags} {count}'.strip()}
    case _:
      flags = xla_flags.merged('gpu', re.sub(r'--xla_(cpu|force_host)_\S*', '', os.environ.get('XLA_FLAGS', '')))
      if is_described(topology):
        return {'JAX_PLATFORMS': 'cpu', 'JAX_SKIP_CUDA_CONSTRAINTS_CHECK': '1', 'XLA_FLAGS': flags,
                'TF_CPP_MIN_LOG_LEVEL': '3'}
      return {'JAX_PLATFORMS': 'cuda', 'XLA_PYTHON_CLIENT_PREALLOCATE': 'false', 'XLA_FLAGS': flags}


def open_devices(topology: Topology) -> Sequence[jax.Device]:
  """Returns the devices of a topology: described ones where the compiler needs no others, else present ones.

  Raises:
    UserError: this machine has too few of them, or GPUs of another kind.
  """
  import jax
  from jax.experimental import topologies
  if topology.chip.platform == 'tpu':
    # Without megacore, a v4 chip appears as two devices that share memory, of which jax makes no mesh.
    options: dict[str, Any] = {'chip_config_name': 'megacore'} if topology.kind == 'v4' else {}
    if topology.slices > 1:
      options['num_slices'] = topology.slices
    return topologies.get_topology_desc(platform='tpu', topology_name=topology.name, **options).devices
  if is_described(topology):
    return cards.open_devices(topology.kind, topology.num_devices)
  devices = jax.devices()
  if len(devices) < topology.num_devices:
    raise UserError(f'--topology: expected at most {len(devices)} devices, which this machine has, got '
                    f'{topology.name}. Choose a smaller number.')
  kind = devices[0].device_kind  # such as 'NVIDIA A100-SXM4-80GB'
  is_of_kind = topology.kind == 'gpu' or topology.kind in re.findall(r'\w+', kind.lower())
  if topology.chip.platform == 'gpu' and not is_of_kind:
    raise UserError(f'--topology: expected the GPUs of this machine, {kind}, got {topology.name}. Set '
                    f'--topology=gpu:{topology.num_devices}.')
  return devices[:topology.num_devices]
