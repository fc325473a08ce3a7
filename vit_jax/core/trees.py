"""Functions on trees of arrays by path: names, differences, digests.

A path name joins the keys with `/`: `backbone/blocks/attn/query/kernel`.
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
  """Returns the leaves by path name in the tree's own order."""
  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  named = {path_name(path): leaf for path, leaf in leaves}
  assert len(named) == len(leaves), 'several leaves of one name'
  return named


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


def map_named(function: Callable[..., T], tree: PyTree, *rest: PyTree) -> PyTree:
  """Applies `jax.tree.map` with the path name as first argument: `function(path name, leaf, *leaves of rest)`."""
  return jax.tree_util.tree_map_with_path(lambda path, *leaves: function(path_name(path), *leaves), tree, *rest)


def map_once(function: Callable[..., Array], tree: PyTree, *rest: PyTree) -> PyTree:
  """Applies `jax.tree.map` while a program is traced; the function is traced once for all leaves of equal shapes.

  The program is the same: what was traced is written into it for each leaf.
  """
  return jax.tree.map(jax.jit(function, inline=True), tree, *rest)


def is_stacked(name: str) -> bool:
  """Returns whether the leaf with this path name is stacked over layers."""
  return BLOCKS in name.split('/')[:-1]


def difference(found: PyTree, wanted: PyTree, *, found_name: str, wanted_name: str) -> str:
  """Describes the differences of two trees in paths, shapes and dtypes; '' if there are none."""
  found_leaves, wanted_leaves = flatten(found), flatten(wanted)
  lines = []
  for name in sorted(found_leaves.keys() | wanted_leaves.keys()):
    a, b = found_leaves.get(name), wanted_leaves.get(name)
    if a is None:
      lines.append(f'  - {name} {_shape(b)}: only in {wanted_name}')
    elif b is None:
      lines.append(f'  + {name} {_shape(a)}: only in {found_name}')
    elif (np.shape(a), a.dtype) != (np.shape(b), b.dtype):
      lines.append(f'  ~ {name}: {_shape(a)} in {found_name}, {_shape(b)} in {wanted_name}')
  return '\n'.join(lines)


def _shape(leaf: Any) -> str:
  return f'{leaf.dtype}{list(np.shape(leaf))}'


def num_elements(tree: PyTree) -> int:
  """Returns the number of scalars in a tree of arrays or shapes."""
  return sum(int(np.prod(x.shape, dtype=np.int64)) for x in jax.tree.leaves(tree))


def num_bytes(tree: PyTree) -> int:
  """Returns the bytes of a tree of arrays or shapes; replicas on several devices count once."""
  return sum(int(np.prod(x.shape, dtype=np.int64)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


class LeafSums(NamedTuple):
  """Two position-dependent sums over the bits of a leaf, uint32."""
  first: Array | np.uint32
  second: Array | np.uint32


def leaf_sums(tree: PyTree) -> list[LeafSums]:
  """Returns the sums of each leaf, for `digest`. It can be traced, and sums over shards without gathering an array."""
  return [_leaf_sums(x) for x in jax.tree.leaves(tree)]


def _leaf_sums(x: Array) -> LeafSums:
  """Hashes each element's bits with its global index, and sums modulo 2^32."""
  bits = x if x.dtype == jnp.bool_ else jax.lax.bitcast_convert_type(x, _WORDS[x.dtype.itemsize])
  index = jnp.zeros(x.shape, jnp.uint32)
  stride = 1
  for axis in reversed(range(x.ndim)):
    index += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * np.uint32(stride % 2**32)
    stride *= x.shape[axis]
  # As one reduction of pairs: XLA for CPUs vectorizes it, and takes a tenth of the time of two reductions.
  return LeafSums(*jax.lax.reduce(_hashes(bits.astype(jnp.uint32), index), (np.uint32(0), np.uint32(0)),
                                  lambda a, b: (a[0] + b[0], a[1] + b[1]), tuple(range(x.ndim))))


def _host_leaf_sums(x: np.ndarray) -> LeafSums:
  """Returns the sums of `_leaf_sums`, computed by NumPy."""
  flat = np.ascontiguousarray(x).reshape(-1)
  bits = flat if flat.dtype == np.bool_ else flat.view(_WORDS[flat.itemsize])
  hashes = _hashes(bits.astype(np.uint32), np.arange(flat.size, dtype=np.uint32))
  return LeafSums(*(one.sum(dtype=np.uint32) for one in hashes))


def _hashes(bits: Any, index: Any) -> tuple[Any, Any]:
  """Returns two hashes of 32 bits for each element, computed as the last steps of MurmurHash3 with two multipliers.

  `bits` and `index` are uint32 arrays of NumPy or JAX of one shape: the elements, and their positions in the leaf.
  """
  def mixed(multiplier: int) -> Any:
    h = (bits ^ (index * np.uint32(0x9E3779B1))) * np.uint32(multiplier)
    h = (h ^ (h >> 15)) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * np.uint32(0xC2B2AE35)
    return h ^ (h >> 16)

  return mixed(0x27D4EB2F), mixed(0x165667B1)


_jitted_leaf_sums = jax.jit(leaf_sums)
_MAX_HOST_ELEMENTS = 2**20  # 15 ms on one core; compiling `leaf_sums` takes 0.5 s and more
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}  # of elements with so many bytes


def digest(tree: PyTree) -> str:
  """Returns the SHA-256 of the sorted (path, shape, dtype, sums) of a tree.

  The digest does not depend on the sharding, and changes with any flipped bit. Every process must call it. The sums of
  a small tree are computed on the host, which saves a compilation for each structure of a tree.
  """
  return begin_digest(tree)()


def begin_digest(tree: PyTree) -> Callable[[], str]:
  """Starts to compute the `digest` of a tree on its devices, and returns a function that waits for it.

  Several digests that are started before the first is waited for are computed together.
  """
  named = {name: (list(np.shape(leaf)), leaf.dtype) for name, leaf in flatten(tree).items()}
  leaves = jax.tree.leaves(tree)
  if num_elements(leaves) <= _MAX_HOST_ELEMENTS and all(getattr(x, 'is_fully_addressable', True) for x in leaves):
    started = [_host_leaf_sums(x) for x in jax.device_get(leaves)]
  else:
    started = _jitted_leaf_sums(tree)

  def finish() -> str:
    sums = jax.device_get(started)
    lines = sorted(f'{name} {shape} {dtype} {int(s.first):08x}{int(s.second):08x}'
                   for (name, (shape, dtype)), s in zip(named.items(), sums, strict=True))
    return hashlib.sha256('\n'.join(lines).encode()).hexdigest()

  return finish
