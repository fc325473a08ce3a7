"""Stacked leaves as one array for each layer: the form of the train state while layers run unrolled.

Cutting a layer from a stacked leaf copies it, and so does stacking the gradients. A leaf `[L, …]` that is
held as `Layers`, L leaves `[1, …]` under the same path name, needs neither: what acts on each layer of a stacked leaf
for itself (optimisers, norms, averages) acts on these. Models and files know stacked leaves alone: `join` gives these
back, and inside a compiled program costs nothing where the model cuts them again, since XLA sees through both.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.core import trees
from vit_jax.core.types import Array, PyTree


@jax.tree_util.register_pytree_with_keys_class
class Layers:
  """A stacked leaf `[L, …]` held as L leaves `[1, …]`."""

  def __init__(self, layers: Iterable[Any]):
    self.layers = tuple(layers)

  def tree_flatten_with_keys(self) -> tuple[tuple[tuple[trees.LayerKey, Any], ...], None]:
    depth = len(self.layers)
    return tuple((trees.LayerKey(i, depth), layer) for i, layer in enumerate(self.layers)), None

  @classmethod
  def tree_unflatten(cls, structure: None, children: Iterable[Any]) -> Layers:
    del structure
    return cls(children)


def is_layers(x: Any) -> bool:
  """For `is_leaf`: where what is decided for a stack is one thing for all its layers."""
  return isinstance(x, Layers)


def split(tree: PyTree, *, but: str = '') -> PyTree:
  """`tree` with `Layers` in the place of its stacked leaves; not below the key `but`."""
  def one(name: str, leaf: Any) -> Any:
    if is_layers(leaf) or not trees.is_stacked(name) or but in name.split('/'):
      return leaf
    return Layers(jax.lax.split(leaf, (1,) * leaf.shape[0]))

  return trees.map_named(one, tree, is_leaf=is_layers)


def join(tree: PyTree) -> PyTree:
  """`tree` with stacked leaves in the place of `Layers`: what `split` was given."""
  return jax.tree.map(lambda x: jnp.concatenate(x.layers) if is_layers(x) else x, tree, is_leaf=is_layers)


def follow(values: PyTree, tree: PyTree) -> PyTree:
  """`values`, one for each leaf of `join(tree)`, repeated for each layer of `tree`."""
  return jax.tree.map(lambda x, value: Layers([value] * len(x.layers)) if is_layers(x) else value, tree, values,
                      is_leaf=is_layers)


def numbers(path: Sequence[Any], leaf: Array) -> tuple[range, int]:
  """Which layers a leaf holds, `[L, …]` or `[1, …]`, and how many there are in all."""
  key = path[-1]
  if isinstance(key, trees.LayerKey):
    return range(key.layer, key.layer + 1), key.depth
  return range(leaf.shape[0]), leaf.shape[0]
