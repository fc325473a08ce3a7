"""Where every parameter lies on the mesh, from the logical axes that are stated where it is created (`core/axes.py`).

`param_specs` returns the specs of parameters, `follow_specs` those of the optimizer state and of `extra`. `SPLIT_BY`
maps logical axes to axes of the mesh: Megatron's split of attention and MLP over `tensor`, and the other side of each
matrix over `fsdp`. `fsdp` splits no vector. A parameter without axes, or with an axis that is not in the table, is an
error. An array of the optimizer, an average or a teacher has the spec of the parameter whose path its own path ends in.
Of other arrays only small ones may be replicated: counters, centers and running statistics.

On TPUs `fsdp` may split the dimension that `tensor` splits, in place of D, for kernels in a stack of blocks
(`ALSO_SPLIT`). It does so if both divide that dimension, for one of two reasons (both seen with libtpu 0.0.52):

- `SCATTERS_ROWS_ONLY`: the compiler of v2 and v3 has no reduce-scatter along the axis that lies last in memory, which
  is D for the kernels of attention and the second one of the MLP. It sums the complete gradient over all devices
  instead, and sends twice as much.
- Splitting D would give shards of a kernel `[D, A, K]` with fewer than `LANES` entries of D. The compiler stores the
  gradient with D as the last axis, in tiles of `LANES`. For a narrower shard it stores it with K last, and then the
  product that computes the gradient takes up to twice as long.

Both concern gradients. The layout of a run on devices is not part of its checkpoint.
"""
from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vit_jax.core import globs, trees
from vit_jax.core.axes import LAYERS, Names, resolved
from vit_jax.core.errors import UserError
from vit_jax.core.types import PyTree

Split = tuple[str | tuple[str, ...] | None, ...]
"""The mesh axes that split each dimension."""

SPLIT_BY: dict[str, str | None] = {
    LAYERS: None,          # L, the stack of blocks
    'embed': 'fsdp',       # D, the width between layers, as a side of a matrix
    'out': 'fsdp',         # outputs of a convolution, and of other matrices that `ALSO_SPLIT` leaves alone
    'vocabulary': 'fsdp',  # V of a text tower
    'heads': 'tensor',     # A
    'mlp': 'tensor',       # F, the hidden width of an MLP
    'classes': 'tensor',   # C: classes, prototypes, dimensions of a joint space of images and texts
    'features': 'tensor',  # D of the embeddings of a vocabulary
    'head': None,          # K, the width of a head
    'in': None,            # inputs of a convolution
    'patch': None,         # a side of a patch or of the kernel of a convolution
    'tokens': None,        # positions, registers
    'rank': None,          # of a low-rank adapter
}
"""The mesh axis that splits each logical axis; None = it is not split."""
ALSO_SPLIT: dict[Names, str] = {
    (LAYERS, 'embed', 'heads', 'head'): 'heads',
    (LAYERS, 'heads', 'head', 'embed'): 'heads',
    (LAYERS, 'mlp', 'embed'): 'mlp',
}
"""The dimension of these kernels that `fsdp` splits together with `tensor`, where a TPU has a reason for it."""
LANES = 128
"""Entries of the last axis in one tile of a TPU."""
SCATTERS_ROWS_ONLY = ('v2', 'v3')
"""TPUs that scatter a sum only along an axis that is not the last one in memory."""
TILE_ROWS = 8
"""Rows of one tile of a TPU: a shard of other numbers of rows is padded before it is sent (libtpu 0.0.52)."""
MOST_REPLICATED_BYTES = 2**20  # four times the center of DINO's 65,536 outputs

FROZEN = 'frozen'
"""Part of `extra` with parameters that are not trained; they are laid out as the trained ones are."""
TRAINED = 'trained'
"""Part of `extra` that never changes, such as a teacher of another shape; it may be replicated."""


def with_frozen(params: PyTree, extra: PyTree) -> PyTree:
  """Returns all parameters: the trained ones, `params`, and the others, below the key `FROZEN` anywhere in `extra`."""
  trained = trees.flatten(params)
  leaves = dict(trained)
  for name, leaf in trees.flatten(extra).items():
    _, is_frozen, path = f'/{name}'.partition(f'/{FROZEN}/')
    if is_frozen:
      leaves[path] = leaf
  return trees.unflatten(leaves) if len(leaves) > len(trained) else params


def param_specs(params: PyTree, axes: PyTree, mesh: Mesh, *, differentiated: bool = True) -> PyTree:
  """Returns a PartitionSpec for every parameter.

  A mesh axis that does not divide its dimension is left out: that dimension is not split.

  Args:
    params: arrays or their shapes.
    axes: a tree with the `Axes` of each parameter at its path, as `core.axes.trace` returns them.
    mesh: of devices, or an abstract mesh.
    differentiated: whether the parameters get gradients. Without gradients `ALSO_SPLIT` is not used.

  Raises:
    UserError: lists the parameters without axes, and those with an axis that `SPLIT_BY` does not have.
  """
  names_of = {path: stated.names for path, stated in resolved(axes).items()}
  problems = [problem for path in trees.flatten(params) for problem in _problems(path, names_of.get(path))]
  if problems:
    raise UserError('parameters: expected the logical axes of each, which decide how it is sharded:\n'
                    + '\n'.join(problems) + '\nCreate it with models.layers.param(..., axes), or with '
                    'core.axes.labelled(value, axes).')
  device = mesh.abstract_mesh.abstract_device
  is_for_tpu = differentiated and device is not None and device.platform == 'tpu'

  def spec(path: str, leaf: Any) -> PartitionSpec:
    names = names_of[path] or ()
    return _fit(_split_on_tpu(names, leaf.shape, mesh) if is_for_tpu else _split(names), leaf.shape, mesh)

  return trees.map_named(spec, params)


def _problems(path: str, names: Names | None) -> Iterator[str]:
  """Yields the problems of the logical axes of the parameter at a path."""
  if names is None:
    yield f'  {path}: expected logical axes, got none.'
  for name in names or ():
    if name is not None and name not in SPLIT_BY:
      near = globs.similar_names(name, SPLIT_BY)
      yield (f'  {path}: expected one of {", ".join(SPLIT_BY)}, got {name!r}.'
             + (f' Did you mean {near[0]!r}?' if near else ''))
      return
  split = [axis for axis in _split(names or ()) if axis]  # a mesh axis may split one dimension only
  if len(split) > len(set(split)):
    yield f'  {path}: expected axes that different axes of the mesh split, got {names}, split by {split}.'


def _split(names: Names) -> Split:
  """Returns the mesh axes for these logical axes."""
  is_vector = len([name for name in names if name != LAYERS]) < 2
  split = tuple(None if name is None else SPLIT_BY[name] for name in names)
  return tuple(None if is_vector and axis == 'fsdp' else axis for axis in split)


def _split_on_tpu(names: Names, shape: tuple[int, ...], mesh: Mesh) -> Split:
  """Returns the mesh axes on a TPU: those of `ALSO_SPLIT`, if they divide `shape` and there is a reason for them."""
  usual, also = _split(names), ALSO_SPLIT.get(names)
  if also is None or mesh.shape['fsdp'] == 1:
    return usual
  on_tpu = tuple(('tensor', 'fsdp') if name == also else None for name in names)
  is_narrow = shape[usual.index('fsdp')] < LANES * mesh.shape['fsdp'] and usual[-1] != 'fsdp'
  device = mesh.abstract_mesh.abstract_device
  has_reason = is_narrow or (device is not None and device.device_kind.lower().endswith(SCATTERS_ROWS_ONLY))
  is_divided = all(size % _num_shards(axes, mesh) == 0 for axes, size in zip(on_tpu, shape, strict=True))
  return on_tpu if has_reason and is_divided else usual


def _num_shards(axes: str | tuple[str, ...] | None, mesh: Mesh) -> int:
  """Returns the number of shards along a dimension that these mesh axes split."""
  return math.prod(mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes or ()))


def _fit(axes: Split, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
  """Returns the spec of the mesh axes, without those that do not divide their dimension, and those of size 1."""
  def fitting(axes: str | tuple[str, ...] | None, size: int) -> str | tuple[str, ...] | None:
    if axes is None or size % _num_shards(axes, mesh):
      return None
    names = tuple(axis for axis in ((axes,) if isinstance(axes, str) else axes) if mesh.shape[axis] > 1)
    if len(names) > 1:
      return names
    return names[0] if names else None
  return PartitionSpec(*map(fitting, axes, shape)) if any(axes) else PartitionSpec()


def follow_specs(tree: PyTree, params: PyTree, specs: PyTree) -> PyTree:
  """Returns a PartitionSpec for every leaf of the optimizer state or of `extra`.

  A leaf whose path ends in the path of a parameter gets the spec of that parameter, if it has its shape, or that shape
  without one axis (factored moments). Any other leaf is replicated if it is below the key `TRAINED`, or if it is a
  scalar or a vector (of each layer) of at most `MOST_REPLICATED_BYTES`: a counter, a center, a running statistic.

  Args:
    tree: the state, as arrays or their shapes.
    params: all parameters, as `with_frozen` returns them.
    specs: their specs, as `param_specs` returns them.

  Raises:
    UserError: lists the leaves that are none of these.
  """
  spec_leaves = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
  by_path = {path: (leaf.shape, spec) for (path, leaf), spec in zip(
      trees.flatten(params).items(), spec_leaves, strict=True)}
  stray: list[str] = []

  def follow(name: str, leaf: Any) -> PartitionSpec:
    parts = name.split('/')
    endings = ['/'.join(parts[i:]) for i in range(len(parts))]
    candidates = [by_path[ending] for ending in endings if ending in by_path]
    for shape, spec in candidates:
      if (followed := _drop_axis(spec, shape, leaf.shape)) is not None:
        return followed
    of_a_layer = leaf.shape[1:] if trees.is_stacked(name) else leaf.shape
    is_small = sum(size > 1 for size in of_a_layer) <= 1 and trees.num_bytes(leaf) <= MOST_REPLICATED_BYTES
    if TRAINED not in parts and not is_small:
      of = f', where the parameter is {list(candidates[0][0])}' if candidates else ''
      stray.append(f'  {name} {leaf.dtype}{list(leaf.shape)}{of}')
    return PartitionSpec()

  result = trees.map_named(follow, tree)
  if stray:
    raise UserError("extra: expected leaves whose path ends in a parameter's path, with its shape, got others that are "
                    'too large to be replicated:\n' + '\n'.join(stray)
                    + "\nName them as their parameters, such as 'teacher/backbone/…'; else use scalars, vectors of at "
                    f'most {MOST_REPLICATED_BYTES:,} bytes, or constants below the key {TRAINED!r}.')
  return result


def _drop_axis(spec: PartitionSpec, shape: tuple[int, ...], target: tuple[int, ...]) -> PartitionSpec | None:
  """Returns the spec of a parameter for a leaf of its shape, or of that without one axis; None for other shapes."""
  if target == shape:
    return spec
  axes = [*spec, *[None] * (len(shape) - len(spec))]
  for i in range(len(shape)):
    if target == shape[:i] + shape[i + 1:]:
      return PartitionSpec(*axes[:i], *axes[i + 1:])
  return None


def shardings(specs: PyTree, mesh: Mesh) -> PyTree:
  """Returns a NamedSharding for each PartitionSpec."""
  return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs,
                      is_leaf=lambda x: isinstance(x, PartitionSpec))


def bytes_per_device(tree: PyTree, specs: PyTree, mesh: Mesh) -> int:
  """Returns the bytes that one device holds of a tree laid out by `specs`."""
  placed = shardings(specs, mesh)
  sizes = jax.tree.map(lambda x, sharding: math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize, tree, placed)
  return sum(jax.tree.leaves(sizes))
