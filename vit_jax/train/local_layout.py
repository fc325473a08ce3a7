"""Which parts of a state are on which process, and how a process sends parts to another through the mesh.

A piece is the part of an array that a device holds. Processes compute the same lists of pieces from the shardings, so
files need no table of their contents, and transfers need no agreement.
"""
from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vit_jax.core import trees
from vit_jax.core.types import Array, HostArray
from vit_jax.train.checkpoint_reader import ITEMS
from vit_jax.train.state import TrainState

OWN, ONLY = 'own', 'only'
"""Kinds of files: all pieces of a process, or only those that no other process has."""
KINDS = (OWN, ONLY)
CHUNK_BYTES = 2**28
"""Bytes of a device that are sent in one program, which needs twice the memory meanwhile."""

Key = tuple[tuple[int, int], ...]
"""The place of a piece in its array: first and last + 1 of each dimension."""


class Piece(NamedTuple):
  """A piece: the number of its array, and its place."""
  leaf: int
  key: Key


class Leaf(NamedTuple):
  """An array of the state, with the place of the piece that each device holds, in the order of the devices."""
  name: str
  shape: tuple[int, ...]
  dtype: np.dtype[Any]
  sharding: jax.sharding.Sharding
  places: dict[jax.Device, Key]

  def size(self, key: Key) -> tuple[int, ...]:
    """Returns the shape of a piece."""
    return tuple(last - first for first, last in key)

  def num_bytes(self, key: Key) -> int:
    """Returns the bytes of a piece."""
    return math.prod(self.size(key)) * self.dtype.itemsize


class Layout:
  """The pieces of a state on the processes of a run.

  Args:
    abstract: shapes and dtypes.
    shardings: of the arrays.
  """

  def __init__(self, abstract: TrainState, shardings: TrainState) -> None:
    self.leaves = [_leaf(f'{item}/{name}', shape, sharding) for item in ITEMS
                   for (name, shape), sharding in zip(trees.flatten(getattr(abstract, item)).items(),
                                                      jax.tree.leaves(getattr(shardings, item)), strict=True)]
    self.devices = sorted({device for leaf in self.leaves for device in leaf.places},
                          key=lambda device: (device.process_index, device.id))
    self.processes = sorted({device.process_index for device in self.devices})
    holders: dict[Piece, set[int]] = {}
    for number, leaf in enumerate(self.leaves):
      for device, key in leaf.places.items():
        holders.setdefault(Piece(number, key), set()).add(device.process_index)
    self.pieces: dict[tuple[int, str], list[Piece]] = {
        (process, kind): [] for process in self.processes for kind in KINDS}
    for piece in sorted(holders):
      for process in holders[piece]:
        self.pieces[process, OWN].append(piece)
      if len(holders[piece]) == 1:
        self.pieces[process, ONLY].append(piece)
    self.holders = holders

  @property
  def devices_of_each(self) -> int:
    """Number of devices of each process; 0 if they differ."""
    counts = {sum(d.process_index == process for d in self.devices) for process in self.processes}
    return counts.pop() if len(counts) == 1 else 0

  def digest(self) -> str:
    """Returns a digest of everything that the contents of files depend on."""
    text = json.dumps([[leaf.name, list(leaf.shape), str(leaf.dtype), [
        [device.process_index, key] for device, key in sorted(
            leaf.places.items(), key=lambda item: (item[0].process_index, item[0].id))]] for leaf in self.leaves])
    return hashlib.sha256(text.encode()).hexdigest()

  def num_bytes(self, owner: int, kind: str) -> int:
    """Returns the bytes of a file."""
    return sum(self.leaves[piece.leaf].num_bytes(piece.key) for piece in self.pieces[owner, kind])

  def is_complete(self, files: Mapping[int, Iterable[tuple[int, str]]]) -> bool:
    """Returns whether the files that the processes have, as (owner, kind), hold every piece together."""
    found = {piece for own in files.values() for file in own for piece in self.pieces[file]}
    return len(found) == len(self.holders)


def _leaf(name: str, abstract: Any, sharding: jax.sharding.Sharding) -> Leaf:
  places = {device: tuple((part.indices(size)[0], part.indices(size)[1])
                          for part, size in zip(index, abstract.shape, strict=True))
            for device, index in sharding.devices_indices_map(abstract.shape).items() if index is not None}
  return Leaf(name, tuple(abstract.shape), np.dtype(abstract.dtype), sharding, places)


class Send(NamedTuple):
  """A piece that one device sends to another, by their numbers in `Layout.devices`."""
  source: int
  target: int
  piece: Piece


def shifted(layout: Layout) -> list[Send]:
  """Returns what each process sends to the next one: the pieces that it alone has."""
  each, total = layout.devices_of_each, len(layout.devices)
  return [Send(number, (number + each) % total, Piece(leaf, key)) for leaf, one in enumerate(layout.leaves)
          for number, device in enumerate(layout.devices)
          if len(layout.holders[Piece(leaf, key := one.places[device])]) == 1]


def missing(layout: Layout, files: Mapping[int, Iterable[tuple[int, str]]]) -> list[list[Send]]:
  """Returns rounds of sends after which every device has its piece, if the processes have these files.

  A device sends at most one piece of an array in a round. The files must be complete.
  """
  have = {process: {piece for file in own for piece in layout.pieces[file]} for process, own in files.items()}
  devices_of = {process: [number for number, device in enumerate(layout.devices) if device.process_index == process]
                for process in layout.processes}
  rounds: list[list[Send]] = []
  for leaf, one in enumerate(layout.leaves):
    used: list[set[int]] = []
    for target, device in enumerate(layout.devices):
      piece = Piece(leaf, one.places[device])
      if piece in have.get(device.process_index, ()):
        continue
      providers = [number for process in layout.processes if piece in have.get(process, ())
                   for number in devices_of[process]]
      turn = next((turn for turn, busy in enumerate(used) if not busy.issuperset(providers)), len(used))
      if turn == len(used):
        used.append(set())
      if turn == len(rounds):
        rounds.append([])
      source = next(number for number in providers if number not in used[turn])
      used[turn].add(source)
      rounds[turn].append(Send(source, target, piece))
  return rounds


def send(layout: Layout, sends: Sequence[Send], values: Mapping[tuple[jax.Device, Piece], Array]) -> dict[
    tuple[jax.Device, Piece], Array]:
  """Sends pieces through the mesh; returns those that devices of this process have received, on these devices.

  Every process must call it with the same `sends`, with at most one for each source and each target in an array.

  Args:
    layout: of the state.
    sends: what is sent.
    values: the pieces that devices of this process send, on these devices.
  """
  by_leaf: dict[int, list[Send]] = {}
  for one in sends:
    by_leaf.setdefault(one.piece.leaf, []).append(one)
  groups: dict[tuple[tuple[int, int], ...], list[list[int]]] = {}
  left: dict[tuple[tuple[int, int], ...], int] = {}
  for leaf, own in sorted(by_leaf.items()):
    route = tuple((one.source, one.target) for one in own)
    size = layout.leaves[leaf].num_bytes(own[0].piece.key)
    if size > left.get(route, -1):
      groups.setdefault(route, []).append([])
      left[route] = CHUNK_BYTES
    groups[route][-1].append(leaf)
    left[route] -= size
  mesh = Mesh(np.asarray(layout.devices), ('all',))
  found: dict[tuple[jax.Device, Piece], Array] = {}
  for route, chunks in groups.items():
    for leaves in chunks:
      parts = [_spread(layout, mesh, by_leaf[leaf], values) for leaf in leaves]
      for leaf, moved in zip(leaves, jax.block_until_ready(_permuted(mesh, route)(parts)), strict=True):
        received = {shard.device: shard.data for shard in moved.addressable_shards}
        for one in by_leaf[leaf]:
          if (target := layout.devices[one.target]) in received:
            found[target, one.piece] = received[target]
  return found


def _spread(layout: Layout, mesh: Mesh, sends: Sequence[Send],
            values: Mapping[tuple[jax.Device, Piece], Array]) -> Array:
  """Returns `[devices, *piece]`: on each device of this process the piece that it sends, or zeros."""
  leaf = layout.leaves[sends[0].piece.leaf]
  size, own = (1, *leaf.size(sends[0].piece.key)), {layout.devices[one.source]: one.piece for one in sends}
  parts = [values[device, own[device]].reshape(size) if device in own else
           jax.device_put(np.zeros(size, leaf.dtype), device)
           for device in layout.devices if device.process_index == jax.process_index()]
  return jax.make_array_from_single_device_arrays(
      (mesh.size, *size[1:]), NamedSharding(mesh, PartitionSpec('all')), parts)


@functools.lru_cache(64)
def _permuted(mesh: Mesh, route: tuple[tuple[int, int], ...]) -> jax.stages.Wrapped:
  """A program that moves the rows of arrays `[devices, …]` along a route of (source, target)."""
  spec = PartitionSpec('all')
  return jax.jit(jax.shard_map(lambda parts: [jax.lax.ppermute(part, 'all', route) for part in parts], mesh=mesh,
                               in_specs=spec, out_specs=spec))


def assemble(leaf: Leaf, pieces: Mapping[jax.Device, HostArray | Array]) -> Array:
  """Returns an array from the pieces of the devices of this process."""
  parts = [jax.device_put(np.asarray(pieces[device]).reshape(leaf.size(key)), device)
           for device, key in leaf.places.items() if device.process_index == jax.process_index()]
  return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)
