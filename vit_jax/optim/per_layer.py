"""One tensor at a time: a leaf under a key `blocks` is stacked, `[L, …]`, and holds one tensor for each layer."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from vit_jax.core import trees
from vit_jax.core.axes import Matrix
from vit_jax.core.types import Array, PyTree
from vit_jax.optim import masks
from vit_jax.optim.masks import Matrices


def per_layer(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
  """Returns `inner` acting on each layer of a stack as on a tree of its own.

  A transformation that depends on the rank or the norm of a whole leaf (`optax.contrib.muon`,
  `optax.scale_by_trust_ratio`, `optax.scale_by_factored_rms`) takes a stacked leaf for one tensor. This function
  applies `inner` by `jax.vmap` over the first axis of each stack, and to all other leaves together without it.
  Transformations that act on each entry, such as `optax.scale_by_adam`, do not need it.

  State: `{path of a stack: state of inner, stacked}`, with the path '' for what is in no stack. Extra arguments of
  `update` reach `inner` for every layer.
  """
  inner = optax.with_extra_args_support(inner)

  def init(params: PyTree) -> dict[str, PyTree]:
    return {stack: (jax.vmap(inner.init) if stack else inner.init)(part) for stack, part in _stacks(params).items()}

  def update(updates: PyTree, state: dict[str, PyTree], params: PyTree | None = None,
             **extra: Any) -> tuple[PyTree, dict[str, PyTree]]:
    def update_one(updates: PyTree, state: PyTree, params: PyTree | None) -> tuple[PyTree, PyTree]:
      return inner.update(updates, state, params, **extra)

    params_by_stack = {} if params is None else _stacks(params)
    new_updates, new_state = [], {}
    for stack, part in _stacks(updates).items():
      update_stack = jax.vmap(update_one) if stack else update_one
      moved, new_state[stack] = update_stack(part, state[stack], params_by_stack.get(stack))
      new_updates.append(moved)

    def first_present(update: Any, *in_stacks: Any) -> Any:
      return next((leaf for leaf in in_stacks if not _is_absent(leaf)), update)

    return jax.tree.map(first_present, updates, *new_updates, is_leaf=_is_absent), new_state

  return optax.GradientTransformationExtraArgs(init, update)


def _is_absent(leaf: Any) -> bool:
  return isinstance(leaf, optax.MaskedNode)


def _stacks(tree: PyTree) -> dict[str, PyTree]:
  """Returns a tree for each stack by its path, such as `backbone/blocks`, and for '', which has the leaves of no stack.

  Each has the structure of `tree`, with `optax.MaskedNode` in place of the leaves of the other stacks.
  """
  def stack_of(name: str) -> str:
    return name[:name.index(f'{trees.BLOCKS}/') + len(trees.BLOCKS)] if trees.is_stacked(name) else ''

  def part(stack: str) -> PyTree:
    return trees.map_named(lambda name, leaf: leaf if stack_of(name) == stack else optax.MaskedNode(), tree)

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

  If the leaf is not a matrix, each of its tensors counts as one unit.
  """
  if matrix is None:
    return norms(name, x)
  num_inputs, num_outputs = matrix
  first_output = x.ndim - num_outputs
  return jnp.sqrt(jnp.square(x.astype(jnp.float32)).sum(range(first_output - num_inputs, first_output), keepdims=True))


def scale_by_trust(coefficient: float, patterns: Sequence[str], matrices: Matrices) -> optax.GradientTransformation:
  """Multiplies by the trust ratio `coefficient * |parameter| / |update|`, or by 1 where either norm is 0.

  Each layer of a stacked leaf has a ratio of its own, and so has each matrix of a leaf that holds several.
  Leaves that match none of `patterns` stay unchanged (`masks.matches`).
  """

  def scale(name: str, u: Array, param: Array) -> Array:
    if not masks.matches(name, patterns, matrices):
      return u
    param_norms, update_norms = norms(name, param, matrices.get(name)), norms(name, u, matrices.get(name))
    is_plain = (param_norms == 0.) | (update_norms == 0.)
    ratios = coefficient * param_norms / jnp.where(is_plain, 1., update_norms)
    return u * jnp.where(is_plain, 1., ratios).astype(u.dtype)

  return optax.stateless(lambda updates, params: trees.map_named(scale, updates, params))
