"""Converts stacked leaves to one array per layer, the form of the train state while layers run unrolled.

Slicing a layer from a stacked leaf copies it, and so does stacking the gradients. A leaf `[L, …]` that is stored as
`Layers`, L leaves `[1, …]` under the same path name, avoids both copies: operations on each layer separately
(optimizers, norms, averages) apply to these leaves. Models and files use stacked leaves only; `join` restores them.
Inside a compiled program this is free if the model slices them again, because XLA removes both operations.
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
  """A stacked leaf `[L, …]`, stored as L leaves `[1, …]`."""

  def __init__(self, layers: Iterable[Any]) -> None:
    self.layers = tuple(layers)

  def tree_flatten_with_keys(self) -> tuple[tuple[tuple[trees.LayerKey, Any], ...], None]:
    depth = len(self.layers)
    return tuple((trees.LayerKey(i, depth), layer) for i, layer in enumerate(self.layers)), None

  def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
    return self.layers, None  # without keys, as every call of a compiled function flattens its arguments

  @classmethod
  def tree_unflatten(cls, structure: None, children: Iterable[Any]) -> Layers:
    del structure
    return cls(children)


def is_layers(x: Any) -> bool:
  """Whether `x` is a `Layers`; as `is_leaf`, it makes a tree function treat all layers of a stack as one leaf."""
  return isinstance(x, Layers)


def split(tree: PyTree, *, but: str = '') -> PyTree:
  """Returns `tree` with `Layers` in place of its stacked leaves, except below the key `but`."""
  def one(name: str, leaf: Any) -> Any:
    if is_layers(leaf) or not trees.is_stacked(name) or but in name.split('/'):
      return leaf
    return Layers(jax.lax.split(leaf, (1,) * leaf.shape[0]))

  return trees.map_named(one, tree, is_leaf=is_layers)


def join(tree: PyTree) -> PyTree:
  """Returns `tree` with stacked leaves in place of `Layers`; the inverse of `split`."""
  return jax.tree.map(lambda x: jnp.concatenate(x.layers) if is_layers(x) else x, tree, is_leaf=is_layers)


def follow(values: PyTree, tree: PyTree) -> PyTree:
  """Returns `values`, one for each leaf of `join(tree)`, repeated for each layer of `tree`."""
  return jax.tree.map(lambda x, value: Layers([value] * len(x.layers)) if is_layers(x) else value, tree, values,
                      is_leaf=is_layers)


def numbers(path: Sequence[Any], leaf: Array) -> tuple[range, int]:
  """Returns the numbers of the layers in a leaf `[L, …]` or `[1, …]`, and the total number of layers."""
  key = path[-1]
  if isinstance(key, trees.LayerKey):
    return range(key.layer, key.layer + 1), key.depth
  return range(leaf.shape[0]), leaf.shape[0]
