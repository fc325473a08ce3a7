"""Gradients kept from being too long: the whole, parts of it, each tensor, or each output unit. None keeps state."""
from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from vit_jax.core import trees
from vit_jax.core.types import Array, PyTree
from vit_jax.optim import per_layer
from vit_jax.optim.masks import Matrices
from vit_jax.optim.momentum import stateless

EXEMPT = 'head/'  # Brock et al. 2021 (arXiv 2102.06171), section 4.1: the final linear layer is not clipped
LEAST = 1e-3  # same, eq. 3: a parameter's norm counts as at least this, so that zeros can move
QKV = re.compile(r'(.*blocks/(?:.*/)?attn/)(?:query|key|value)(/(?:kernel|bias))')
"""Projections of a block that the PyTorch programs keep in one tensor, such as `backbone/blocks/attn/query/kernel`."""


def by_norm(limit: float, parts: Sequence[str] = ()) -> optax.GradientTransformationExtraArgs:
  """Scales the whole gradient down to norm `limit` if `grad_norm` exceeds it.

  With `parts`, patterns of path names, each part has a norm of its own, which takes the place of `grad_norm`: a leaf
  is of the first pattern that matches, and the other leaves are one more part. FSDP in PyTorch, by whose modules
  DINOv2's program clips, divides by the norm plus 1e-6.
  """
  def change(updates: PyTree, params: PyTree | None, *, grad_norm: Array, **_: Any) -> PyTree:
    del params
    if not parts:
      factor = limit / jnp.maximum(grad_norm, limit)
      return jax.tree.map(lambda u: u * factor.astype(u.dtype), updates)
    return _clip_groups(updates, limit, group_of, lambda name, u: jnp.square(u.astype(jnp.float32)).sum())

  def group_of(name: str) -> str:
    return next((pattern for pattern in parts if re.fullmatch(pattern, name)), '')

  return stateless(change)


def by_tensor_norm(limit: float) -> optax.GradientTransformationExtraArgs:
  """Scales each tensor down to norm `limit`, each layer of a stacked leaf for itself.

  Query, key and value of a block are one tensor, as in DINO's program (`attn.qkv`); it divides by the norm plus 1e-6.
  """
  def tensor_of(name: str) -> str:
    return QKV.sub(r'\1qkv\2', name)

  return stateless(lambda updates, params, **_: _clip_groups(
      updates, limit, tensor_of, lambda name, u: jnp.square(per_layer.norms(name, u))))


def _clip_groups(updates: PyTree, limit: float, group_of: Callable[[str], str],
                 square: Callable[[str, Array], Array]) -> PyTree:
  """Scales each group of leaves down to norm `limit`.

  Args:
    updates: the gradients.
    limit: the largest norm of a group.
    group_of: maps the path name of a leaf to the name of its group.
    square: returns the squared norm of a leaf, or of each tensor in it, from path name and leaf.
  """
  squares: dict[str, Array] = {}
  for name, u in trees.flatten(updates).items():
    squares[group_of(name)] = square(name, u) + squares.get(group_of(name), 0.)

  def clip(name: str, u: Array) -> Array:
    return u * (limit / jnp.maximum(jnp.sqrt(squares[group_of(name)]), limit)).astype(u.dtype)

  return trees.map_named(clip, updates)


def adaptive(ratio: float, matrices: Matrices) -> optax.GradientTransformationExtraArgs:
  """Clips gradients adaptively, unit by unit (Brock et al. 2021, eq. 3).

    g_i <- g_i * min(1, ratio * max(|w_i|, 1e-3) / |g_i|)

  A unit i is an output unit of a matrix, each layer's for itself, or any other tensor whole. The head is exempt.
  """

  def clip(name: str, u: Array, param: Array) -> Array:
    if name.startswith(EXEMPT):
      return u
    matrix = matrices.get(name)
    limit = ratio * jnp.maximum(per_layer.unit_norms(name, param, matrix), LEAST)
    return u * (limit / jnp.maximum(per_layer.unit_norms(name, u, matrix), limit)).astype(u.dtype)

  return stateless(lambda updates, params, **_: trees.map_named(clip, updates, params))
