"""One tensor at a time: leaves with their path names, where a stacked leaf is one tensor a layer."""
from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from vit_jax.core import trees
from vit_jax.core.types import Array, PyTree


def map_leaves(function: Callable[..., Array], tree: PyTree, *rest: PyTree) -> PyTree:
  """`function(path name, leaf, *leaves of rest)` for each leaf."""
  return jax.tree_util.tree_map_with_path(lambda path, *leaves: function(trees.path_name(path), *leaves), tree, *rest)


def norms(name: str, x: Array) -> Array:
  """Euclidean norm of each tensor of a leaf, f32, with the leaf's rank: `[1, 1]`, or `[L, 1, 1]` if stacked."""
  axes = tuple(range(1 if trees.is_stacked(name) else 0, x.ndim))
  return jnp.sqrt(jnp.square(x.astype(jnp.float32)).sum(axes, keepdims=True))


def unit_norms(name: str, x: Array) -> Array:
  """Euclidean norm over the inputs of each output unit of a kernel, f32, with the leaf's rank.

  Kernels end in their output axes: two (heads, width of a head) for query, key and value, else one. Any
  other leaf is one unit a tensor.
  """
  *_, parent, last = ('', *name.split('/'))
  if last != 'kernel':
    return norms(name, x)
  outputs = 2 if parent in ('query', 'key', 'value') else 1
  axes = tuple(range(1 if trees.is_stacked(name) else 0, x.ndim - outputs))
  return jnp.sqrt(jnp.square(x.astype(jnp.float32)).sum(axes, keepdims=True))
