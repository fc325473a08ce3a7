"""Functions on trees of arrays: path names, differences, digests.

The path name of a leaf joins the keys on the path to the leaf with `/`: `backbone/blocks/attn/query/kernel`.
"""
from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.core.types import Array, PyTree

T = TypeVar('T')
BLOCKS = 'blocks'
"""Leaves under a key of this name are stacked over layers along axis 0."""


def path_name(path: Sequence[Any]) -> str:
  """Returns the `/`-joined name of a path of `jax.tree_util`."""
  return jax.tree_util.keystr(tuple(path), simple=True, separator='/')


def flatten(tree: PyTree) -> dict[str, Any]:
  """Returns the leaves by path name, in the order of `jax.tree.leaves`."""
  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  leaf_by_name = {path_name(path): leaf for path, leaf in leaves}
  assert len(leaf_by_name) == len(leaves), 'several leaves of one name'
  return leaf_by_name


def unflatten(leaves: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a nested dict from leaves by path name."""
  tree: dict[str, Any] = {}
  for name, leaf in leaves.items():
    *parents, last = name.split('/')
    node = tree
    for parent in parents:
      node = node.setdefault(parent, {})
    node[last] = leaf
  return tree


def map_named(function: Callable[..., T], tree: PyTree, *other_trees: PyTree) -> PyTree:
  """Applies `jax.tree.map` with the path name as first argument: `function(path_name, leaf, *leaves_of_others)`."""
  return jax.tree_util.tree_map_with_path(lambda path, *leaves: function(path_name(path), *leaves), tree, *other_trees)


def map_once(function: Callable[..., Array], tree: PyTree, *other_trees: PyTree) -> PyTree:
  """Applies `jax.tree.map` in a traced program, with one trace of the function for all leaves of the same shape.

  The program is the same as with `jax.tree.map`, since each call is inlined; only tracing is faster.
  """
  return jax.tree.map(jax.jit(function, inline=True), tree, *other_trees)


def is_stacked(name: str) -> bool:
  """Returns whether the leaf with this path name is stacked over layers."""
  return BLOCKS in name.split('/')[:-1]


def difference(found: PyTree, wanted: PyTree, *, found_name: str, wanted_name: str) -> str:
  """Returns one line for each difference of two trees in path names, shapes and dtypes; '' if the trees are equal."""
  found_types = {name: _type_text(leaf) for name, leaf in flatten(found).items()}
  wanted_types = {name: _type_text(leaf) for name, leaf in flatten(wanted).items()}
  lines = []
  for name in sorted(found_types.keys() | wanted_types.keys()):
    if name not in found_types:
      lines.append(f'  - {name} {wanted_types[name]}: only in {wanted_name}')
    elif name not in wanted_types:
      lines.append(f'  + {name} {found_types[name]}: only in {found_name}')
    elif found_types[name] != wanted_types[name]:
      lines.append(f'  ~ {name}: {found_types[name]} in {found_name}, {wanted_types[name]} in {wanted_name}')
  return '\n'.join(lines)


def _type_text(leaf: Any) -> str:
  """Returns dtype and shape of a leaf, such as `float32[8, 3]`."""
  return f'{leaf.dtype}{list(np.shape(leaf))}'


def num_elements(tree: PyTree) -> int:
  """Returns the number of scalars in a tree of arrays or shapes."""
  return sum(int(np.prod(x.shape, dtype=np.int64)) for x in jax.tree.leaves(tree))


def num_bytes(tree: PyTree) -> int:
  """Returns the bytes of a tree of arrays or shapes; an array that several devices hold counts once."""
  return sum(int(np.prod(x.shape, dtype=np.int64)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


class LeafSums(NamedTuple):
  """Two checksums of a leaf, uint32. Each is a sum over hashes of the elements' bits and positions."""
  first: Array | np.uint32
  second: Array | np.uint32


def leaf_sums(tree: PyTree) -> list[LeafSums]:
  """Returns the sums of each leaf, for `digest`; can be traced, and does not gather arrays that are sharded."""
  return [_leaf_sums(x) for x in jax.tree.leaves(tree)]


def _leaf_sums(x: Array) -> LeafSums:
  """Returns the sums, modulo 2^32, of the hashes of all elements of a leaf, by their positions in the global array."""
  bits = x if x.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(x, _UINT_BY_ITEMSIZE[x.dtype.itemsize])
  index = jnp.zeros(x.shape, jnp.uint32)
  stride = 1
  for axis in reversed(range(x.ndim)):
    index += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * np.uint32(stride % 2**32)
    stride *= x.shape[axis]
  # XLA for CPUs vectorizes one reduction of pairs, which takes a tenth of the time of two reductions.
  return LeafSums(*jax.lax.reduce(_hashes(bits.astype(jnp.uint32), index), (np.uint32(0), np.uint32(0)),
                                  lambda a, b: (a[0] + b[0], a[1] + b[1]), tuple(range(x.ndim))))


def _host_leaf_sums(x: np.ndarray) -> LeafSums:
  """Returns the same sums as `_leaf_sums`, computed with NumPy."""
  flat = np.ascontiguousarray(x).reshape(-1)
  bits = flat if flat.dtype == np.bool_ else flat.view(_UINT_BY_ITEMSIZE[flat.itemsize])
  hashes = _hashes(bits.astype(np.uint32), np.arange(flat.size, dtype=np.uint32))
  return LeafSums(*(values.sum(dtype=np.uint32) for values in hashes))


def _hashes(bits: Any, index: Any) -> tuple[Any, Any]:
  """Returns two 32-bit hashes of each element: the final mix of MurmurHash3, with a different multiplier for each hash.

  `bits` (the elements) and `index` (their positions in the leaf) are uint32 arrays of NumPy or JAX of the same shape.
  """
  def mixed(multiplier: int) -> Any:
    h = (bits ^ (index * np.uint32(0x9E3779B1))) * np.uint32(multiplier)
    h = (h ^ (h >> 15)) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * np.uint32(0xC2B2AE35)
    return h ^ (h >> 16)

  return mixed(0x27D4EB2F), mixed(0x165667B1)


_jitted_leaf_sums = jax.jit(leaf_sums)
_MAX_HOST_ELEMENTS = 2**20  # these take 15 ms on one core; compiling `leaf_sums` takes 0.5 s and more
_UINT_BY_ITEMSIZE = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def digest(tree: PyTree) -> str:
  """Returns the SHA-256 of the sorted (path name, shape, dtype, sums) of a tree's leaves.

  The digest does not depend on the sharding, and changes with any flipped bit. Every process must call `digest`. For a
  small tree the sums are computed on the host, which saves a compilation for each structure of a tree.
  """
  return begin_digest(tree)()


def begin_digest(tree: PyTree) -> Callable[[], str]:
  """Starts to compute the `digest` of a tree on the tree's devices, and returns a function that waits for the digest.

  A caller can start several digests before waiting for the first, so that they are computed together.
  """
  types = [f'{name} {list(np.shape(leaf))} {leaf.dtype}' for name, leaf in flatten(tree).items()]
  leaves = jax.tree.leaves(tree)
  if num_elements(leaves) <= _MAX_HOST_ELEMENTS and all(getattr(x, 'is_fully_addressable', True) for x in leaves):
    started = [_host_leaf_sums(x) for x in jax.device_get(leaves)]
  else:
    started = _jitted_leaf_sums(tree)

  def finish() -> str:
    all_sums = jax.device_get(started)
    lines = sorted(f'{type_text} {int(sums.first):08x}{int(sums.second):08x}'
                   for type_text, sums in zip(types, all_sums, strict=True))
    return hashlib.sha256('\n'.join(lines).encode()).hexdigest()

  return finish
