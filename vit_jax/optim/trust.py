"""LARS and LAMB: updates scaled to the norm of the parameters, tensor by tensor."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import optax

from vit_jax.config import schema
from vit_jax.core import trees
from vit_jax.core.types import Array, PyTree
from vit_jax.optim import adam, masks, per_layer
from vit_jax.optim.masks import Matrices
from vit_jax.optim.momentum import Parts, chain, keep_as


def lamb(config: schema.Lamb, *, coupled: Parts, matrices: Matrices, **_: Any) -> optax.GradientTransformation:
  """Returns LAMB (You et al. 2020, arXiv 1904.00962, Algorithm 2), with phi(z) = z."""
  return chain(adam.adamw(config), *coupled, scale_by_trust(1., config.trust_ratio_mask, matrices))


def lars(config: schema.Lars, *, coupled: Parts, matrices: Matrices, **_: Any) -> optax.GradientTransformation:
  """Returns LARS (You et al. 2017, arXiv 1708.03888, Algorithm 1), as in MAE's linear probe.

  The trust ratio is that of the gradient with decay, and the learning rate comes after the momentum.
  """
  return chain(*coupled, scale_by_trust(config.trust_coefficient, config.trust_ratio_mask, matrices),
               keep_as(config.mu_dtype, 'trace', optax.trace(config.momentum)))


def scale_by_trust(coefficient: float, trusted: Sequence[str],
                   matrices: Matrices) -> optax.GradientTransformationExtraArgs:
  """Multiplies by `coefficient * |parameter| / |update|`, or by 1 where either norm is 0.

  Each layer of a stacked leaf has a ratio of its own, and so has each matrix of a leaf that holds several.
  Leaves that match none of the patterns `trusted` stay.
  """

  def scale(name: str, u: Array, param: Array) -> Array:
    if not masks.matches(name, trusted, matrices):
      return u
    over, under = (per_layer.norms(name, x, matrices.get(name)) for x in (param, u))
    is_plain = (over == 0.) | (under == 0.)
    return u * jnp.where(is_plain, 1., coefficient * over / jnp.where(is_plain, 1., under)).astype(u.dtype)

  def update(updates: PyTree, state: PyTree, params: PyTree | None = None, **_: Any) -> tuple[PyTree, PyTree]:
    return trees.map_named(scale, updates, params), state

  return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
