"""Where every parameter lies on the mesh, by rules of paths that each network has beside it.

Strict both ways: a parameter without a rule and a rule that decides nothing are errors. Optimiser state,
averages and teachers follow the parameter whose path they end in; besides, only counters, centres and running
statistics, which are vectors, may be replicated.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vit_jax.core import trees
from vit_jax.core.types import PyTree

Rule = tuple[str, tuple[str | None, ...]]
MOST_REPLICATED_BYTES = 2**20  # four times the centre of DINO's 65,536 outputs

TRAINED = 'trained'
"""Part of `extra` that never changes, such as a teacher of another shape; it may be replicated."""


def param_specs(params: PyTree, rules: Sequence[Rule], mesh: Mesh) -> PyTree:
  """A PartitionSpec for every parameter.

  An axis that does not divide its dimension is left out: that dimension is not split.
  """
  matched = trees.match_rules(params, [(pattern, _Spec(spec)) for pattern, spec in rules], what='sharding')
  return jax.tree.map(lambda spec, leaf: _fit(spec.axes, leaf.shape, mesh), matched, params,
                      is_leaf=lambda x: isinstance(x, _Spec))


class _Spec:
  """A spec as one leaf, so that `jax.tree.map` does not enter it."""

  def __init__(self, axes: tuple[str | None, ...]):
    self.axes = axes


def _fit(axes: tuple[str | None, ...], shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
  assert len(axes) in (0, len(shape)), f'spec {axes} for an array of shape {shape}'
  return PartitionSpec(*(axis if axis and size % mesh.shape[axis] == 0 and mesh.shape[axis] > 1 else None
                         for axis, size in zip(axes, shape, strict=False)))


def follow_specs(tree: PyTree, params: PyTree, specs: PyTree) -> PyTree:
  """Specs for optimiser state or `extra`.

  A leaf whose path ends in a parameter's path takes that parameter's spec, if it has its shape, or that shape
  without one axis (factored moments). Anything else (counters, centres, running statistics) is replicated, if
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
