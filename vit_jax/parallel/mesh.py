"""The mesh of devices `[data, fsdp, tensor]`, and the batches that are placed on it.

A job calls `make` for the mesh, `local_rows` for the rows of each batch that its loader reads, and `put_batch` to place
them. A batch is split over `data` and `fsdp`, parameters over `fsdp` and `tensor` (`sharding.py`).
"""
from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from numpy.typing import ArrayLike

from vit_jax.config import layout, schema
from vit_jax.core.errors import UserError
from vit_jax.core.numerics import BATCH_AXES
from vit_jax.core.types import Shard

AXES = ('data', 'fsdp', 'tensor')


def shape(config: schema.Mesh, num_devices: int) -> tuple[int, int, int]:
  """Returns the sizes of the axes `data`, `fsdp` and `tensor` for this number of devices.

  Raises:
    UserError: their product is not the number of devices, or the slices do not divide `data`.
  """
  sizes = [getattr(config, axis) or 1 for axis in AXES]  # 0 = to be chosen by `config/layout.py`, which has not: 1
  fixed = math.prod(size for size in sizes if size != -1)
  if -1 in sizes and num_devices % fixed == 0:
    sizes[sizes.index(-1)] = num_devices // fixed
  if math.prod(sizes) != num_devices:
    named = ', '.join(f'{axis}={size}' for axis, size in zip(AXES, sizes, strict=True))
    raise UserError(f'mesh: expected sizes whose product is {num_devices}, the number of devices, got {named}. -1 '
                    'takes the remaining devices, 0 is chosen from the hardware.')
  if sizes[0] % (config.slices or 1):
    raise UserError(f'mesh.slices: expected a divisor of data={sizes[0]} (of {num_devices} devices with '
                    f'fsdp={sizes[1]}, tensor={sizes[2]}), got {config.slices}. Set other sizes: fsdp and tensor '
                    'stay inside one slice.')
  return sizes[0], sizes[1], sizes[2]


def count_slices(devices: Sequence[jax.Device]) -> int:
  """Returns the number of slices that devices are in, by their `slice_index`; on CPUs each process is a slice."""
  is_cpu = devices[0].platform == 'cpu'
  return len({device.process_index if is_cpu else getattr(device, 'slice_index', 0) for device in devices})


def find_hardware(slices: int) -> layout.Hardware:
  """Returns a description of the devices of this run for `config/layout.py`, which is equal on every process.

  Args:
    slices: number of slices that they are in; 0 = counted here.
  """
  first, slices = jax.local_devices()[0], slices or count_slices(jax.devices())
  limit = (first.memory_stats() or {}).get('bytes_limit', 0) if first.platform != 'cpu' else 0
  memory_gib = int(of_process_0(np.int32(limit // 2**30)))  # devices of a kind differ by some bytes
  capability = str(getattr(first, 'compute_capability', ''))  # '9.0' of a GPU, '10.0a' of some
  number = re.match(r'\d+(\.\d+)?', capability)
  return layout.Hardware(first.device_kind, first.platform, jax.device_count(), memory_gib, slices,
                         capability=float(number[0]) if number and first.platform == 'gpu' else 0.)


def of_process_0(value: ArrayLike) -> np.ndarray:
  """Returns the array that process 0 passes, on every process; all must call it, with arrays of one shape and dtype."""
  return np.asarray(multihost_utils.broadcast_one_to_all(value) if jax.process_count() > 1 else value)


def make(config: schema.Mesh, devices: Sequence[jax.Device] | None = None) -> Mesh:
  """Returns the mesh of a config over `devices` (all of them by default), neighbors along `tensor` first.

  Raises:
    UserError: it does not fit the devices, or the slices that they are in.
  """
  devices = jax.devices() if devices is None else devices
  slices = config.slices or count_slices(devices)
  sizes = shape(dataclasses.replace(config, slices=slices), len(devices))
  if slices > 1:
    return Mesh(arrange(sizes, slices=slices, devices=devices), AXES, axis_types=(AxisType.Auto,) * 3)
  actual = len({getattr(device, 'slice_index', 0) for device in devices})
  if actual > 1:
    raise UserError(f'mesh.slices: expected {actual}, the number of slices that the {len(devices)} devices are in, got '
                    f'1. Set --config.mesh.slices={actual}; then only sums over `data` are sent between slices.')
  try:
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)
  except NotImplementedError:  # an axis is no product of sides of the TPU's torus: split a side
    grid = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 3)


def arrange(sizes: tuple[int, int, int], *, slices: int, devices: Sequence[jax.Device]) -> np.ndarray:
  """Returns the devices as a grid `[data, fsdp, tensor]`, whose axis `data` has one part after another of each slice.

  A slice is a set of devices with a fast network, those with the same `slice_index`. If they have none, or all the
  same, a slice is an equal number of consecutive processes (a node may run several), or in a single process an equal
  number of consecutive devices.

  Raises:
    UserError: the number of slices or processes does not fit, or they differ in size.
  """
  inner = (sizes[0] // slices, *sizes[1:])
  in_slices = Counter(getattr(device, 'slice_index', 0) for device in devices)
  is_sliced = len(in_slices) > 1 or devices[0].platform == 'tpu'
  counts = in_slices if is_sliced else Counter(device.process_index for device in devices)
  what = 'slices' if is_sliced else 'processes'
  if (is_sliced or len(counts) > 1) and (len(counts) % slices or (is_sliced and len(counts) != slices)):
    expected = len(counts) if is_sliced else f'a divisor of {len(counts)}, such as the number of nodes'
    raise UserError(f'mesh.slices: expected {expected}, for {len(devices)} devices in {len(counts)} {what}, got '
                    f'{slices}.')
  if len(set(counts.values())) > 1:
    each = ', '.join(str(counts[key]) for key in sorted(counts))
    raise UserError(f'mesh.slices: expected {what} with equal numbers of devices, got {each}. Start on equal slices.')
  if len(counts) == slices:
    return mesh_utils.create_hybrid_device_mesh(
        inner, (slices, 1, 1), devices, process_is_granule=not is_sliced, allow_split_physical_axes=True)
  ordered = sorted(devices, key=lambda device: device.process_index)
  size = len(devices) // slices
  return np.concatenate([mesh_utils.create_device_mesh(inner, ordered[i * size:(i + 1) * size],
                                                       allow_split_physical_axes=True) for i in range(slices)])


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Returns the sharding of rows over `data` and `fsdp`; other dimensions are not split."""
  return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
  """Returns the sharding of an array of which every device holds a copy."""
  return NamedSharding(mesh, PartitionSpec())


def check_batch(mesh: Mesh, batch_size: int, accumulate: int, *, what: str) -> None:
  """Raises UserError unless all devices get the same number of rows of every microbatch."""
  rows = mesh.shape['data'] * mesh.shape['fsdp']
  if batch_size % (rows * accumulate):
    micro = f' x {accumulate} microbatches' if accumulate > 1 else ''
    nearest = layout.nearest_batch(batch_size, rows * accumulate)
    raise UserError(f'{what}: expected a multiple of {rows} batch shards (data={mesh.shape["data"]} x '
                    f'fsdp={mesh.shape["fsdp"]}){micro}, got {batch_size}. Set it to {nearest}, the nearest one.')


def local_rows(mesh: Mesh, process_index: int | None = None) -> Shard:
  """Returns the parts of each batch that the devices of a process (by default this one) hold.

  One part for each position along `data` and `fsdp`. Processes whose devices differ only along `tensor` hold the same
  part.
  """
  process_index = jax.process_index() if process_index is None else process_index
  devices = mesh.devices.reshape(mesh.shape['data'] * mesh.shape['fsdp'], -1)
  parts = [part for part, along_tensor in enumerate(devices)
           if any(device.process_index == process_index for device in along_tensor)]
  return Shard(tuple(parts), len(devices))


def put_batch(batch: dict[str, np.ndarray], mesh: Mesh, shard: Shard) -> dict[str, jax.Array]:
  """Returns the global batch as arrays on the mesh, given this process's rows in the order of `shard.rows`.

  The `index` of an example is i64 on the host. On the device it has the low 32 bits, as nothing is computed with it.
  """
  sharding = batch_sharding(mesh)
  if 'index' in batch:
    batch = {**batch, 'index': batch['index'].astype(np.int32)}
  if mesh.size == 1:
    placed: dict[str, jax.Array] = _placing(sharding)(batch)
    return placed
  if len(shard.parts) == shard.count:
    return jax.device_put(batch, sharding)  # all arrays in one call
  return {name: jax.make_array_from_process_local_data(
      sharding, x, (x.shape[0] // len(shard.parts) * shard.count, *x.shape[1:])) for name, x in batch.items()}


@functools.cache
def _placing(sharding: NamedSharding) -> Callable[[dict[str, np.ndarray]], dict[str, jax.Array]]:
  """Returns a compiled identity, which places a batch on one device in 0.03 ms; `device_put` of 5 arrays takes 0.4."""
  return jax.jit(lambda batch: batch, out_shardings=sharding)
