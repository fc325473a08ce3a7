"""Where every parameter lies on the mesh, from the parameter's logical axes (`core/axes.py`).

`param_specs` returns the specs of parameters, `follow_specs` those of the optimizer state and of `extra`. `SPLIT_BY`
maps logical axes to axes of the mesh: Megatron's split of attention and MLP over `tensor`, and the other side of each
matrix over `fsdp`. `fsdp` splits no vector. A parameter without axes, or with an axis that is not in the table, is an
error. If the path of an array of the optimizer, an average or a teacher ends in the path of a parameter, the array has
the spec of that parameter. All remaining arrays are replicated, and must be small: counters, centers, statistics.

On TPUs `fsdp` may split the dimension that `tensor` splits, in place of D, for kernels in a stack of blocks
(`ALSO_SPLIT`). It does so if both axes divide that dimension, for one of two reasons (both seen with libtpu 0.0.52):

- `SCATTERS_ROWS_ONLY`: the compiler of v2 and v3 has no reduce-scatter along the axis that lies last in memory, which
  is D for the kernels of attention and for the second kernel of the MLP. So the compiler sums the complete gradient
  over all devices, and sends twice as much.
- Splitting D would give shards of a kernel `[D, A, K]` with fewer than `LANES` entries of D. The compiler stores the
  gradient of a wider shard with D as the last axis, in tiles of `LANES`, but the gradient of such a shard with K as the
  last axis. Then the product that computes the gradient takes up to twice as long.

Both reasons concern gradients. The layout of a run on devices is not part of the run's checkpoint.
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
"""The mesh axes that split each dimension of an array; None = the dimension is not split."""

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
"""The mesh axis that splits each logical axis; None = the axis is not split."""
ALSO_SPLIT: dict[Names, str] = {
    (LAYERS, 'embed', 'heads', 'head'): 'heads',
    (LAYERS, 'heads', 'head', 'embed'): 'heads',
    (LAYERS, 'mlp', 'embed'): 'mlp',
}
"""By the axes of a kernel, the axis that `fsdp` and `tensor` split together for one of the reasons above."""
LANES = 128
"""Entries of the last axis in one tile of a TPU."""
SCATTERS_ROWS_ONLY = ('v2', 'v3')
"""TPUs that scatter a sum only along an axis that is not the last one in memory."""
TILE_ROWS = 8
"""Rows of one tile of a TPU. A shard is padded to a multiple of this number before it is sent (libtpu 0.0.52)."""
MAX_REPLICATED_BYTES = 2**20  # four times the center of DINO's 65,536 outputs

FROZEN = 'frozen'
"""Key of `extra` with parameters that are not trained; they are laid out as trained parameters are."""
TRAINED = 'trained'
"""Key of `extra` with arrays that never change, such as a teacher of another shape; they may be replicated."""


def with_frozen(params: PyTree, extra: PyTree) -> PyTree:
  """Returns all parameters: the trained ones, `params`, and the frozen ones, below the key `FROZEN` in `extra`."""
  trained = trees.flatten(params)
  leaves = dict(trained)
  for name, leaf in trees.flatten(extra).items():
    _, frozen_key, path = f'/{name}'.partition(f'/{FROZEN}/')
    if frozen_key:
      leaves[path] = leaf
  return trees.unflatten(leaves) if len(leaves) > len(trained) else params


def param_specs(params: PyTree, axes: PyTree, mesh: Mesh, *, differentiated: bool = True) -> PyTree:
  """Returns a PartitionSpec for every parameter.

  A dimension is not split by a mesh axis that does not divide it.

  Args:
    params: arrays or shapes.
    axes: the `Axes` of the parameters, in a tree of the same structure, as `core.axes.trace` returns them.
    mesh: a mesh of devices, or an abstract mesh.
    differentiated: whether the parameters get gradients. Without gradients `ALSO_SPLIT` is not used.

  Raises:
    UserError: lists the parameters without axes, and the parameters with an axis that `SPLIT_BY` does not have.
  """
  names_by_path = {path: parameter_axes.names for path, parameter_axes in resolved(axes).items()}
  problems = [problem for path in trees.flatten(params) for problem in _problems(path, names_by_path.get(path))]
  if problems:
    raise UserError('parameters: expected the logical axes of each, which decide how it is sharded:\n'
                    + '\n'.join(problems) + '\nCreate it with models.layers.param(..., axes), or with '
                    'core.axes.labelled(value, axes).')
  device = mesh.abstract_mesh.abstract_device
  is_for_tpu = differentiated and device is not None and device.platform == 'tpu'

  def spec(path: str, leaf: Any) -> PartitionSpec:
    names = names_by_path[path] or ()
    return _fit(_split_on_tpu(names, leaf.shape, mesh) if is_for_tpu else _split(names), leaf.shape, mesh)

  return trees.map_named(spec, params)


def _problems(path: str, names: Names | None) -> Iterator[str]:
  """Yields messages about the logical axes of the parameter at a path; none if the axes are valid."""
  if names is None:
    yield f'  {path}: expected logical axes, got none.'
  for name in names or ():
    if name is not None and name not in SPLIT_BY:
      similar = globs.similar_names(name, SPLIT_BY)
      yield (f'  {path}: expected one of {", ".join(SPLIT_BY)}, got {name!r}.'
             + (f' Did you mean {similar[0]!r}?' if similar else ''))
      return
  mesh_axes = [axis for axis in _split(names or ()) if axis]  # a mesh axis may split one dimension only
  if len(mesh_axes) > len(set(mesh_axes)):
    yield f'  {path}: expected axes that different axes of the mesh split, got {names}, split by {mesh_axes}.'


def _split(names: Names) -> Split:
  """Returns the mesh axes that split dimensions with these logical axes."""
  is_vector = len([name for name in names if name != LAYERS]) < 2
  split = tuple(None if name is None else SPLIT_BY[name] for name in names)
  return tuple(None if is_vector and axis == 'fsdp' else axis for axis in split)


def _split_on_tpu(names: Names, shape: tuple[int, ...], mesh: Mesh) -> Split:
  """Returns the mesh axes on a TPU: those of `ALSO_SPLIT` if they divide `shape` and a reason exists, else `_split`."""
  usual, jointly_split = _split(names), ALSO_SPLIT.get(names)
  if jointly_split is None or mesh.shape['fsdp'] == 1:
    return usual
  on_tpu = tuple(('tensor', 'fsdp') if name == jointly_split else None for name in names)
  is_narrow = shape[usual.index('fsdp')] < LANES * mesh.shape['fsdp'] and usual[-1] != 'fsdp'
  device = mesh.abstract_mesh.abstract_device
  has_reason = is_narrow or (device is not None and device.device_kind.lower().endswith(SCATTERS_ROWS_ONLY))
  is_divided = all(size % _num_shards(axes, mesh) == 0 for axes, size in zip(on_tpu, shape, strict=True))
  return on_tpu if has_reason and is_divided else usual


def _num_shards(axes: str | tuple[str, ...] | None, mesh: Mesh) -> int:
  """Returns the number of shards along a dimension that these mesh axes split."""
  return math.prod(mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes or ()))


def _fit(axes: Split, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
  """Returns the spec of the mesh axes, without axes that do not divide their dimension, and without axes of size 1."""
  def fitting(axes: str | tuple[str, ...] | None, size: int) -> str | tuple[str, ...] | None:
    if axes is None or size % _num_shards(axes, mesh):
      return None
    kept = tuple(axis for axis in ((axes,) if isinstance(axes, str) else axes) if mesh.shape[axis] > 1)
    if len(kept) > 1:
      return kept
    return kept[0] if kept else None
  return PartitionSpec(*map(fitting, axes, shape)) if any(axes) else PartitionSpec()


def follow_specs(tree: PyTree, params: PyTree, specs: PyTree) -> PyTree:
  """Returns a PartitionSpec for every leaf of the optimizer state or of `extra`.

  A leaf whose path ends in the path of a parameter gets the spec of that parameter, if the leaf has the parameter's
  shape, or that without one axis (factored moments). Any other leaf is replicated: a leaf below the key `TRAINED`,
  a scalar, or a vector (of each layer) of at most `MAX_REPLICATED_BYTES`: a counter, a center, a running statistic.

  Args:
    tree: the state, as arrays or shapes.
    params: all parameters, as `with_frozen` returns them.
    specs: the specs of `params`, as `param_specs` returns them.

  Raises:
    UserError: lists the leaves that have no spec of a parameter, and may not be replicated.
  """
  spec_leaves = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
  parameter_by_path = {path: (leaf.shape, spec) for (path, leaf), spec in zip(
      trees.flatten(params).items(), spec_leaves, strict=True)}
  too_large: list[str] = []

  def follow(name: str, leaf: Any) -> PartitionSpec:
    parts = name.split('/')
    endings = ['/'.join(parts[i:]) for i in range(len(parts))]
    candidates = [parameter_by_path[ending] for ending in endings if ending in parameter_by_path]
    for shape, spec in candidates:
      if (followed := _drop_axis(spec, shape, leaf.shape)) is not None:
        return followed
    layer_shape = leaf.shape[1:] if trees.is_stacked(name) else leaf.shape
    is_small = sum(size > 1 for size in layer_shape) <= 1 and trees.num_bytes(leaf) <= MAX_REPLICATED_BYTES
    if TRAINED not in parts and not is_small:
      parameter = f', where the parameter is {list(candidates[0][0])}' if candidates else ''
      too_large.append(f'  {name} {leaf.dtype}{list(leaf.shape)}{parameter}')
    return PartitionSpec()

  result = trees.map_named(follow, tree)
  if too_large:
    raise UserError("extra: expected leaves whose path ends in a parameter's path, with its shape, got others that are "
                    'too large to be replicated:\n' + '\n'.join(too_large)
                    + "\nName them as their parameters, such as 'teacher/backbone/…'; else use scalars, vectors of at "
                    f'most {MAX_REPLICATED_BYTES:,} bytes, or constants below the key {TRAINED!r}.')
  return result


def _drop_axis(spec: PartitionSpec, shape: tuple[int, ...], target: tuple[int, ...]) -> PartitionSpec | None:
  """Returns the spec for a shape `target` that is a parameter's `shape`, or `shape` without one axis; else None."""
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
  sizes = jax.tree.map(lambda x, sharding: math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize,
                       tree, shardings(specs, mesh))
  return sum(jax.tree.leaves(sizes))
