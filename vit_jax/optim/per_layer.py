"""One tensor at a time: leaves with their path names, where a stacked leaf is one tensor a layer."""
from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from vit_jax.core import trees
from vit_jax.core.axes import Matrix
from vit_jax.core.types import Array, PyTree


def per_layer(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
  """Returns `inner` acting on each layer of a stack as on a tree of its own.

  Leaves under a key `blocks` have the shape `[L, …]`. A transformation that depends on the rank or the norm of a whole
  leaf (`optax.contrib.muon`, `optax.scale_by_trust_ratio`, `optax.scale_by_factored_rms`) takes such a leaf for one
  tensor. This function applies `inner` by `jax.vmap` over the first axis of each stack, and to all other leaves
  together without it. Transformations that act on each entry, such as `optax.scale_by_adam`, do not need it.

  State: `{path of a stack: state of inner, stacked}`, with the path '' for what is in no stack. Extra arguments of
  `update` reach `inner` for every layer.
  """
  inner = optax.with_extra_args_support(inner)

  def init(params: PyTree) -> dict[str, PyTree]:
    return {stack: (jax.vmap(inner.init) if stack else inner.init)(part) for stack, part in _stacks(params).items()}

  def update(updates: PyTree, state: dict[str, PyTree], params: PyTree | None = None,
             **more: Any) -> tuple[PyTree, dict[str, PyTree]]:
    def one(updates: PyTree, state: PyTree, params: PyTree | None) -> tuple[PyTree, PyTree]:
      return inner.update(updates, state, params, **more)

    own = {} if params is None else _stacks(params)
    new = {stack: (jax.vmap(one) if stack else one)(part, state[stack], own.get(stack))
           for stack, part in _stacks(updates).items()}
    found = jax.tree.map(lambda given, *parts: next((x for x in parts if not _is_absent(x)), given),
                         updates, *(part for part, _ in new.values()), is_leaf=_is_absent)
    return found, {stack: one for stack, (_, one) in new.items()}

  return optax.GradientTransformationExtraArgs(init, update)


def _is_absent(x: Any) -> bool:
  return isinstance(x, optax.MaskedNode)


def _stacks(tree: PyTree) -> dict[str, PyTree]:
  """Returns a tree by the path of each stack, '' for the rest, in which all other leaves are `optax.MaskedNode`."""
  def stack_of(name: str) -> str:
    return name[:name.index(f'{trees.BLOCKS}/') + len(trees.BLOCKS)] if trees.is_stacked(name) else ''

  def part(stack: str) -> PyTree:
    return trees.map_named(lambda name, x: x if stack_of(name) == stack else optax.MaskedNode(), tree)

  return {stack: part(stack) for stack in sorted({stack_of(name) for name in trees.flatten(tree)})}


def norms(name: str, x: Array, matrix: Matrix | None = None) -> Array:
  """Returns the Euclidean norm of each tensor of a leaf, f32, with the leaf's rank.

  The shape is `[1, 1]`, or `[L, 1, 1]` if the leaf is stacked. A leaf of several matrices, such as one for each expert,
  has a norm for each.
  """
  first = x.ndim - sum(matrix) if matrix else int(trees.is_stacked(name))
  return jnp.sqrt(jnp.square(x.astype(jnp.float32)).sum(range(first, x.ndim), keepdims=True))


def unit_norms(name: str, x: Array, matrix: Matrix | None) -> Array:
  """Returns the Euclidean norm over the inputs of each output unit of a matrix, f32, with the leaf's rank.

  Any other leaf is one unit a tensor.
  """
  if matrix is None:
    return norms(name, x)
  last = x.ndim - matrix[1]
  return jnp.sqrt(jnp.square(x.astype(jnp.float32)).sum(range(last - matrix[0], last), keepdims=True))
