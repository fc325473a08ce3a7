"""Describes GPUs for XLA, so that it compiles for a card that is not here; `topologies` calls `open_devices`.

XLA's compiler for GPUs reads the properties of a card from a `GpuTargetConfigProto`; the figures are NVIDIA's for the
SXM cards. It needs the packages of jax's CUDA plugin, which bring cuBLAS, cuDNN and the assembler, but neither a card
nor its driver. On a card XLA chooses some kernels by timing them; here it chooses them by its cost model.
"""
from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from vit_jax.core.errors import UserError

if TYPE_CHECKING:
  import jax

PLUGIN = 'jax_cuda13_plugin'
A_NODE = 8
"""GPUs that NVLink joins in the machines of these cards (DGX and HGX)."""
NIC_BYTES_S = 50e9
"""Bytes per second of the network card beside each GPU of such a machine: 400 Gbit/s (NVIDIA, DGX H100 and H200)."""
CUDNN = 91_000
"""The version of cuDNN that is assumed when attention is lowered; jax asks a card for it."""


class Card(NamedTuple):
  """A card: the name that XLA uses, and bytes per second and bytes of its memory."""
  title: str
  bandwidth: int
  memory: int


class _Unit(NamedTuple):
  """Units of a multiprocessor that compute with a type: its number in XLA's `PrimitiveType`, and their speed."""
  dtype: int
  units: int
  ops_per_cycle: int


CARDS = {
    'h100': Card('NVIDIA H100 80GB HBM3', 3_352_320_000_000, 84_942_979_072),
    'h200': Card('NVIDIA H200 141GB HBM3e', 4_800_000_000_000, 151_397_597_184),
}
_CLOCK_GHZ = 1.98
_TENSOR_GHZ = 1.8295201
_S8, _F16, _F32, _F64, _BF16 = 2, 10, 11, 12, 16  # some numbers of PrimitiveType
_SCALAR = (_Unit(4, 64, 1), _Unit(8, 64, 1), _Unit(_F16, 128, 2), _Unit(_F32, 128, 1), _Unit(_F64, 64, 1),
           _Unit(_BF16, 128, 2))
_TENSOR = (_Unit(_S8, 4, 1024), _Unit(6, 4, 1024), _Unit(_F16, 4, 512), _Unit(_F32, 4, 256), _Unit(_BF16, 4, 512),
           *(_Unit(dtype_of_8_bits, 4, 1024) for dtype_of_8_bits in (19, 20, 23, 24, 25, 28, 29, 33, 35, 36)))


def is_installed() -> bool:
  """Returns whether the packages are installed with which XLA compiles for these cards."""
  return importlib.util.find_spec(PLUGIN) is not None


def describe(kind: str) -> str:
  """Returns the description of a card as the text of a protocol buffer."""
  card = CARDS[kind]
  scalar = '\n'.join(_describe_unit(unit, _CLOCK_GHZ) for unit in _SCALAR)
  tensor = '\n'.join([*(_describe_unit(unit, _TENSOR_GHZ) for unit in _TENSOR),
                      _describe_unit(_Unit(_F64, 4, 32), _CLOCK_GHZ)])
  limits = {
      'threads_per_block_limit': 1024, 'threads_per_warp': 32, 'shared_memory_per_block': 49_152,
      'shared_memory_per_core': 233_472, 'threads_per_core_limit': 2048, 'core_count': 132, 'fpus_per_core': 128,
      'block_dim_limit_x': 2**31 - 1, 'block_dim_limit_y': 65_535, 'block_dim_limit_z': 65_535,
      'memory_bandwidth': card.bandwidth, 'l2_cache_size': 50 * 2**20, 'clock_rate_ghz': _CLOCK_GHZ,
      'device_memory_size': card.memory, 'shared_memory_per_block_optin': 232_448, 'registers_per_core_limit': 65_536,
      'registers_per_block_limit': 65_536}
  limits_text = '\n'.join(f'{name}: {value}' for name, value in limits.items())
  return f"""gpu_device_info {{
{limits_text}
cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
scalar_unit_description {{ {scalar} }}
matrix_unit_description {{ {tensor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{card.title}"
"""


def _describe_unit(unit: _Unit, clock_ghz: float) -> str:
  """Returns the entry of a unit in the description of a card."""
  return (f'rate_infos {{ key: {unit.dtype} value {{ clock_rate_ghz: {clock_ghz} units_per_core: {unit.units} '
          f'ops_per_clock: {unit.ops_per_cycle} }} }}')


def open_devices(kind: str, num_devices: int) -> Sequence[jax.Device]:
  """Returns described devices; `JAX_PLATFORMS=cpu` and `JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1` must be set before.

  Lowering attention for cuDNN asks a card for the version of cuDNN and for the capability, so these questions of jax
  0.10 to 0.12 are answered here for the rest of the process.

  Raises UserError if the devices cannot be divided into nodes with equal numbers of at most `A_NODE`.
  """
  nodes = -(-num_devices // A_NODE)
  if num_devices % nodes:
    raise UserError(f'--topology: expected nodes with equal numbers of at most {A_NODE} GPUs, got '
                    f'{kind}:{num_devices}. Set --topology={kind}:{nodes * A_NODE}.')
  from jax._src.cudnn import fused_attention_stablehlo as attention
  from jax.experimental import topologies
  attention.check_cudnn_version = lambda: CUDNN
  attention.check_compute_capability = lambda capability: True
  attention.is_cuda_compute_capability_equal = lambda capability: capability == '9.0'
  shape = f'1x{nodes}x{num_devices // nodes}'
  return topologies.get_topology_desc(
      platform='cuda', topology_name=kind, topology=shape, target_config=describe(kind)).devices
