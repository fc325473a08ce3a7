"""Parameters that do not move for a while, or at all: no update, no decay, and no step of their moments."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from vit_jax.config import schema
from vit_jax.core import numerics, trees
from vit_jax.core.types import Array, PyTree
from vit_jax.optim import masks

Until = Callable[[str], int]
"""From a path name to the number of updates that a parameter is frozen for; 0 = never."""


def until(rules: Sequence[schema.PathRule], steps: Callable[[str], int]) -> Until:
  """Returns how long the rules freeze each parameter; `steps` maps a duration to steps."""

  def frozen_for(name: str) -> int:
    rule = masks.find_rule(name, rules)
    return steps(rule.frozen_until) if rule and rule.frozen_until else 0

  return frozen_for


def silence(tree: PyTree, frozen_for: Until, step: Array) -> PyTree:
  """Replaces the leaves that are frozen at this update by zeros."""
  def one(name: str, x: Array) -> Array:
    length = frozen_for(name)
    return jnp.where(step < length, jnp.zeros_like(x), x) if length else x

  return trees.map_named(one, tree)


def freeze(make: Callable[[], optax.GradientTransformation], frozen_for: Until, *, lengths: Sequence[int],
           total: int) -> list[optax.GradientTransformation]:
  """Returns an optimizer for each length of freezing, to be chained: each acts on its parameters alone.

  Its whole state stays as it is, counts included, while its parameters are frozen: they begin as at the start
  of a run. Parameters that are frozen for `total` updates or more have no state.
  """
  found = []
  for length in sorted(set(lengths)):
    if length >= total:
      continue
    mine = optax.masked(make(), lambda tree, length=length: trees.map_named(
        lambda name, _: frozen_for(name) == length, tree))
    found.append(_hold(mine, length) if length else mine)
  return found


def _hold(inner: optax.GradientTransformation, length: int) -> optax.GradientTransformationExtraArgs:
  inner = optax.with_extra_args_support(inner)

  def update(updates: PyTree, state: PyTree, params: PyTree | None = None, *, step: Array,
             **more: Any) -> tuple[PyTree, PyTree]:
    updates, new = inner.update(updates, state, params, step=step, **more)
    return updates, numerics.select(step < length, state, new)

  return optax.GradientTransformationExtraArgs(inner.init, update)


def whole_norm(tree: PyTree) -> Array:
  """Returns the Euclidean norm of a whole tree, f32."""
  return jnp.sqrt(sum((jnp.square(x.astype(jnp.float32)).sum() for x in jax.tree.leaves(tree)), jnp.zeros(())))
