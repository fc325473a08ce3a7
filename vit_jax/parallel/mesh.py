"""The grid of devices, and which rows of a batch this process holds."""
from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.core.numerics import BATCH_AXES
from vit_jax.core.types import Shard

AXES = ('data', 'fsdp', 'tensor')


def shape(config: schema.Mesh, num_devices: int) -> tuple[int, int, int]:
  """Sizes of the axes `data, fsdp, tensor` on so many devices.

  Raises:
    UserError: if they do not multiply to the number of devices.
  """
  sizes = [getattr(config, axis) for axis in AXES]
  fixed = math.prod(s for s in sizes if s != -1)
  if -1 in sizes and num_devices % fixed == 0:
    sizes[sizes.index(-1)] = num_devices // fixed
  if math.prod(sizes) != num_devices:
    named = ', '.join(f'{axis}={size}' for axis, size in zip(AXES, sizes, strict=True))
    raise UserError(f'mesh {named} does not fit {num_devices} devices; want sizes whose product is {num_devices} '
                    '(-1 takes the rest)')
  return sizes[0], sizes[1], sizes[2]


def make(config: schema.Mesh, devices: Sequence[jax.Device] | None = None) -> Mesh:
  """The mesh of a config over `devices` (all of them by default), neighbours along `tensor` first."""
  devices = jax.devices() if devices is None else devices
  sizes = shape(config, len(devices))
  return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Rows over `data` and `fsdp`; every other dimension whole."""
  return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec())


def check_batch(mesh: Mesh, batch_size: int, accumulate: int, *, what: str) -> None:
  """Raises UserError unless every device gets the same number of rows of every microbatch."""
  rows = mesh.shape['data'] * mesh.shape['fsdp']
  if batch_size % (rows * accumulate):
    micro = f' times {accumulate} microbatches' if accumulate > 1 else ''
    below = max(1, batch_size // (rows * accumulate)) * rows * accumulate
    raise UserError(f'{what}={batch_size} is not a multiple of {rows} batch shards (data={mesh.shape["data"]} x '
                    f'fsdp={mesh.shape["fsdp"]}){micro}; {below} would be')


def local_rows(mesh: Mesh) -> Shard:
  """The part of each batch that this process holds.

  Processes that differ only along `tensor` hold the same part.

  Raises:
    UserError: if the devices of this process hold parts that are not next to each other.
  """
  parts = mesh.shape['data'] * mesh.shape['fsdp']
  indices = batch_sharding(mesh).addressable_devices_indices_map((parts,))
  mine = sorted({part for index in indices.values() if index for part in range(parts)[index[0]]})
  if parts % len(mine) or mine[0] % len(mine) or mine != list(range(mine[0], mine[0] + len(mine))):
    raise UserError(f'the devices of this process hold parts {mine} of {parts} of a batch, which are no equal '
                    'contiguous share; want a mesh whose data and fsdp axes follow the processes')
  return Shard(mine[0] // len(mine), parts // len(mine))


def put_batch(batch: dict[str, np.ndarray], mesh: Mesh, shard: Shard) -> dict[str, jax.Array]:
  """This process's rows as part of a global batch on the mesh."""
  sharding = batch_sharding(mesh)
  return {name: jax.make_array_from_process_local_data(sharding, x, (x.shape[0] * shard.count, *x.shape[1:]))
          for name, x in batch.items()}
