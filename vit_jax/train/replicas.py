"""Shares the reading of a checkpoint among the replicas of a state, which then send each other what they have read.

Where the parameters are replicated over hosts, each of them would read the same bytes from storage. Instead, each array
is read by one replica, so that each byte is read once for the whole run, and all replicas read at the same time. The
arrays then reach the other replicas through the mesh, as sums of their bits with zeros, so no bit changes.

Orbax's `SingleReplicaArrayHandler` (0.12) is not used: one replica reads everything, while the others wait, and arrays
are summed as numbers, which turns -0.0 into 0.0, so that their digests would differ.
"""
from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vit_jax.core.types import Array, PyTree

LEAST_BYTES = 2**24
"""The smallest item that is shared; of a smaller one, each process reads what it needs."""
CHUNK_BYTES = 2**28
"""Bytes of a replica that are sent in one program, which needs three times the memory meanwhile."""


class Sharing(NamedTuple):
  """Who reads which array: leaf i is read by the devices at position `owners[i]` of the first axis of the mesh."""
  mesh: Mesh
  owners: tuple[int, ...]

  def is_reader(self, leaf: int) -> bool:
    """Returns whether this process reads (its part of) a leaf."""
    return any(d.process_index == jax.process_index() for d in self.mesh.devices[self.owners[leaf]].flat)

  def target(self, leaf: int, sharding: NamedSharding) -> NamedSharding:
    """Returns the sharding over the devices of the one that reads a leaf."""
    row = self.owners[leaf]
    return NamedSharding(Mesh(self.mesh.devices[row:row + 1], self.mesh.axis_names), sharding.spec)

  def send(self, read: Sequence[Array | None], target: Sequence[jax.ShapeDtypeStruct]) -> list[Array]:
    """Returns all arrays on all replicas, with the shardings of `target`. Every process must call it.

    Args:
      read: the arrays that this process has read, with the shardings of `self.target`; None for the others.
      target: shapes, dtypes and shardings.
    """
    found: list[Array] = []
    for leaves in _chunks(target):
      parts = [self._globalize(read[i], i, target[i]) for i in leaves]
      shardings = tuple(target[i].sharding for i in leaves)
      found += jax.block_until_ready(_summed(shardings)(parts))
    return found

  def _globalize(self, own: Array | None, leaf: int, target: jax.ShapeDtypeStruct) -> Array:
    """Returns `[replicas, *shape]`: the array in the row of its owner, zeros in the others."""
    sharding = NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names[0], *target.sharding.spec))
    shape = (self.mesh.devices.shape[0], *target.shape)
    here = {} if own is None else {shard.device: shard.data for shard in own.addressable_shards}
    parts = []
    for device in sharding.addressable_devices:
      parts.append(here[device][None] if device in here else
                   jnp.zeros(sharding.shard_shape(shape), target.dtype, device=device))
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def share(shardings: PyTree, abstract: PyTree) -> Sharing | None:
  """Returns how the replicas share an item; None if each process should read what it needs.

  Devices are in replicas along the first axis of the mesh. Of replicas that have devices of the same process, only the
  first reads. Leaves are assigned by their bytes, the largest first.
  """
  leaves, places = jax.tree.leaves(abstract), jax.tree.leaves(shardings)
  sizes = [int(np.prod(x.shape, dtype=np.int64)) * x.dtype.itemsize for x in leaves]
  first = places[0] if places else None
  if not isinstance(first, NamedSharding) or sum(sizes) < LEAST_BYTES:
    return None
  mesh = first.mesh
  if not isinstance(mesh, Mesh) or any(not isinstance(one, NamedSharding) or one.mesh != mesh
                                       or mesh.axis_names[0] in jax.tree.leaves(tuple(one.spec)) for one in places):
    return None
  rows = readers(mesh)
  if len(rows) < 2:
    return None
  loads, owners = dict.fromkeys(rows, 0), [rows[0]] * len(leaves)
  for leaf in sorted(range(len(leaves)), key=lambda i: -sizes[i]):
    owners[leaf] = min(rows, key=lambda row: loads[row])
    loads[owners[leaf]] += sizes[leaf]
  return Sharing(mesh, tuple(owners))


def readers(mesh: Mesh) -> list[int]:
  """Returns positions along the first axis of the mesh such that no process has devices at two of them."""
  found: list[int] = []
  used: set[int] = set()
  for row, devices in enumerate(mesh.devices):
    processes = {device.process_index for device in devices.flat}
    if not processes & used:
      found.append(row)
      used |= processes
  return found


def _chunks(target: Sequence[jax.ShapeDtypeStruct]) -> list[list[int]]:
  """Returns consecutive leaves, together of `CHUNK_BYTES` on a device or a single leaf."""
  chunks: list[list[int]] = []
  left = 0
  for leaf, one in enumerate(target):
    size = int(np.prod(one.sharding.shard_shape(one.shape), dtype=np.int64)) * one.dtype.itemsize
    if not chunks or size > left:
      chunks.append([])
      left = CHUNK_BYTES
    chunks[-1].append(leaf)
    left -= size
  return chunks


@functools.lru_cache(64)
def _summed(shardings: tuple[NamedSharding, ...]) -> jax.stages.Wrapped:
  """A program that sums the bits of arrays over their first axis."""
  return jax.jit(lambda parts: [_sum_bits(part) for part in parts], out_shardings=list(shardings))


def _sum_bits(parts: Array) -> Array:
  if parts.dtype == jnp.bool_:
    return parts.any(0)
  width = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[parts.dtype.itemsize]
  bits = jax.lax.bitcast_convert_type(parts, width)
  return jax.lax.bitcast_convert_type(bits.sum(0, dtype=width), parts.dtype)
