"""Where every parameter lies on the mesh, by rules of paths that each network has beside it.

Strict both ways: a parameter without a rule and a rule that decides nothing are errors. Optimizer state,
averages and teachers follow the parameter whose path they end in; besides, only counters, centers and running
statistics, which are vectors, may be replicated.

A rule may have a second spec, for TPUs, which is used where it divides the kernel, for one of two reasons (both seen
with libtpu 0.0.52):

- `SCATTERS_ROWS_ONLY`: the compiler of v2 and v3 has no reduce-scatter along the axis that lies last in memory, which
  is D for the kernels of attention and the second of the MLP. It sums the complete gradient over all devices instead,
  and sends twice as much.
- The first spec would cut a kernel `[D, A, K]` into shards of fewer than `LANES` entries of D. The compiler stores the
  gradient with D as the last axis, which the hardware holds in tiles of `LANES`; if a shard is narrower, it stores it
  with K last, and the product that makes the gradient takes up to twice as long.

The layout of a run on devices is not part of its checkpoint.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vit_jax.core import trees
from vit_jax.core.types import PyTree

Axes = tuple[str | tuple[str, ...] | None, ...]
Rule = tuple[str, Axes] | tuple[str, Axes, Axes]
LANES = 128
"""Entries of the last axis in one tile of a TPU."""
SCATTERS_ROWS_ONLY = ('v2', 'v3')
"""TPUs that scatter a sum only along an axis that is not the last one in memory."""
TILE_ROWS = 8
"""Rows of one tile of a TPU: a shard of other numbers of rows is padded before it is sent (libtpu 0.0.52)."""
MOST_REPLICATED_BYTES = 2**20  # four times the center of DINO's 65,536 outputs

FROZEN = 'frozen'
"""Part of `extra` with parameters that are not trained; the rules of the parameters lay them out."""
TRAINED = 'trained'
"""Part of `extra` that never changes, such as a teacher of another shape; it may be replicated."""


def with_frozen(params: PyTree, extra: PyTree) -> PyTree:
  """The parameters, trained and not: those of `params` and those below `FROZEN` anywhere in `extra`."""
  leaves = trees.flatten(params)
  for name, leaf in trees.flatten(extra).items():
    _, is_frozen, rest = f'/{name}'.partition(f'/{FROZEN}/')
    leaves |= {rest: leaf} if is_frozen else {}
  return trees.unflatten(leaves) if len(leaves) > len(trees.flatten(params)) else params


def param_specs(params: PyTree, rules: Sequence[Rule], mesh: Mesh) -> PyTree:
  """A PartitionSpec for every parameter.

  An axis that does not divide its dimension is left out: that dimension is not split.
  """
  matched = trees.match_rules(params, [(pattern, _Spec(*specs)) for pattern, *specs in rules], what='sharding')
  device = mesh.abstract_mesh.abstract_device
  has_lanes = device is not None and device.platform == 'tpu'
  return jax.tree.map(lambda spec, leaf: _fit(spec.choose(leaf.shape, mesh) if has_lanes else spec.axes, leaf.shape,
                                              mesh), matched, params, is_leaf=lambda x: isinstance(x, _Spec))


class _Spec:
  """The specs of a rule as one leaf, so that `jax.tree.map` does not enter them."""

  def __init__(self, axes: Axes, instead: Axes | None = None) -> None:
    self.axes, self.instead = axes, instead

  def choose(self, shape: tuple[int, ...], mesh: Mesh) -> Axes:
    """The first spec, or on a TPU the second one, if that divides `shape` and there is a reason for it."""
    if self.instead is None or 'fsdp' not in self.axes or mesh.shape['fsdp'] == 1:
      return self.axes
    is_narrow = shape[self.axes.index('fsdp')] < LANES * mesh.shape['fsdp'] and self.axes[-1] != 'fsdp'
    device = mesh.abstract_mesh.abstract_device
    has_reason = is_narrow or (device is not None and device.device_kind.lower().endswith(SCATTERS_ROWS_ONLY))
    is_divided = all(size % _places(axes, mesh) == 0 for axes, size in zip(self.instead, shape, strict=True))
    return self.instead if has_reason and is_divided else self.axes


def _places(axes: str | tuple[str, ...] | None, mesh: Mesh) -> int:
  """The number of shards along a dimension that these mesh axes split."""
  return math.prod(mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes or ()))


def _fit(axes: Axes, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
  assert len(axes) in (0, len(shape)), f'spec {axes} for an array of shape {shape}'
  return PartitionSpec(*(_used(one, mesh) if size % _places(one, mesh) == 0 else None
                         for one, size in zip(axes, shape, strict=False)))


def _used(axes: str | tuple[str, ...] | None, mesh: Mesh) -> str | tuple[str, ...] | None:
  """The mesh axes that split a dimension, without those of size 1; None for no axis."""
  found = tuple(axis for axis in ((axes,) if isinstance(axes, str) else axes or ()) if mesh.shape[axis] > 1)
  return found if len(found) > 1 else found[0] if found else None


def follow_specs(tree: PyTree, params: PyTree, specs: PyTree) -> PyTree:
  """Specs for optimizer state or `extra`.

  A leaf whose path ends in a parameter's path takes that parameter's spec, if it has its shape, or that shape
  without one axis (factored moments). Anything else (counters, centers, running statistics) is replicated, if
  it is small or below the key `TRAINED`.

  Raises:
    ValueError: lists every other leaf that is no scalar or vector (one for each layer, if stacked), or a large one.
  """
  by_name = {name: (leaf.shape, spec) for (name, leaf), spec in zip(
      trees.flatten(params).items(),
      jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec)), strict=True)}
  stray: list[str] = []

  def follow(name: str, leaf: Any) -> PartitionSpec:
    parts = name.split('/')
    candidates = [by_name[ending] for i in range(len(parts)) if (ending := '/'.join(parts[i:])) in by_name]
    for shape, spec in candidates:
      if (found := _drop_axis(spec, shape, leaf.shape)) is not None:
        return found
    if TRAINED not in parts and not _is_small(name, leaf):
      of = f', where the parameter is {list(candidates[0][0])}' if candidates else ''
      stray.append(f'  {name} {leaf.dtype}{list(leaf.shape)}{of}')
    return PartitionSpec()

  found = trees.map_named(follow, tree)
  if stray:
    raise ValueError('These leaves follow no parameter, and are too large to be replicated:\n' + '\n'.join(stray)
                     + "\nExpected paths that end in a parameter's path, with its shape; else scalars, vectors of at "
                     f'most {MOST_REPLICATED_BYTES:,} bytes, or constants below the key {TRAINED!r}.')
  return found


def _drop_axis(spec: PartitionSpec, shape: tuple[int, ...], target: tuple[int, ...]) -> PartitionSpec | None:
  """The spec of a parameter for a leaf of its shape, or of that shape without one axis; None for other shapes."""
  if target == shape:
    return spec
  axes = [*spec, *[None] * (len(shape) - len(spec))]
  for i in range(len(shape)):
    if target == shape[:i] + shape[i + 1:]:
      return PartitionSpec(*axes[:i], *axes[i + 1:])
  return None


def _is_small(name: str, leaf: Any) -> bool:
  of_a_layer = leaf.shape[1:] if trees.is_stacked(name) else leaf.shape
  return sum(size > 1 for size in of_a_layer) <= 1 and trees.num_bytes(leaf) <= MOST_REPLICATED_BYTES


def shardings(specs: PyTree, mesh: Mesh) -> PyTree:
  """NamedSharding for each PartitionSpec."""
  return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs,
                      is_leaf=lambda x: isinstance(x, PartitionSpec))


def bytes_per_device(tree: PyTree, specs: PyTree, mesh: Mesh) -> int:
  """Bytes that one device holds of a tree laid out by `specs`."""
  placed = shardings(specs, mesh)
  sizes = jax.tree.map(lambda x, s: int(np.prod(s.shard_shape(x.shape), dtype=np.int64)) * x.dtype.itemsize,
                       tree, placed)
  return sum(jax.tree.leaves(sizes))
