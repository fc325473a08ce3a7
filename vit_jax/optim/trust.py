"""Updates scaled to the size of what they change, tensor by tensor: the trust ratio of LARS and LAMB."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import optax

from vit_jax.core.types import Array, PyTree
from vit_jax.optim import masks, per_layer


def scale_by_trust(coefficient: float, trusted: Sequence[str]) -> optax.GradientTransformationExtraArgs:
  """Multiplies by `coefficient * |parameter| / |update|`, or by 1 where either norm is 0.

  Each layer of a stacked leaf has a ratio of its own. Leaves that match none of the patterns `trusted` stay.
  """

  def scale(name: str, u: Array, param: Array) -> Array:
    if not masks.matches(name, trusted):
      return u
    over, under = per_layer.norms(name, param), per_layer.norms(name, u)
    is_plain = (over == 0.) | (under == 0.)
    return u * jnp.where(is_plain, 1., coefficient * over / jnp.where(is_plain, 1., under)).astype(u.dtype)

  def update(updates: PyTree, state: PyTree, params: PyTree | None = None, **_: Any) -> tuple[PyTree, PyTree]:
    return per_layer.map_leaves(scale, updates, params), state

  return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
