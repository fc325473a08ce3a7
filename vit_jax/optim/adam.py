"""Adam, AdamW and LAMB, in a form that one pass over memory can update; `optax.scale_by_adam` is the plain form."""
from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from vit_jax.config import schema
from vit_jax.core import trees
from vit_jax.core.types import Array, PyTree
from vit_jax.optim import per_layer
from vit_jax.optim.masks import Matrices
from vit_jax.optim.momentum import Parts, chain


def adamw(config: schema.Adam, **_: Any) -> optax.GradientTransformation:
  """Returns AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101, Algorithm 2). The decay is applied later."""
  return scale_by_adam(config.b1, config.b2, config.eps, config.mu_dtype.value)


def adam(config: schema.Adam, *, coupled: Parts, **_: Any) -> optax.GradientTransformation:
  """Returns Adam (Kingma & Ba 2015, arXiv 1412.6980, Algorithm 1) of the loss plus `weight_decay / 2 * |w|^2`.

  Both moments include the gradient of the decay.
  """
  return chain(*coupled, adamw(config))


def lamb(config: schema.Lamb, *, coupled: Parts, matrices: Matrices, **_: Any) -> optax.GradientTransformation:
  """Returns LAMB (You et al. 2020, arXiv 1904.00962, Algorithm 2), with phi(z) = z."""
  return chain(adamw(config), *coupled, per_layer.scale_by_trust(1., config.trust_ratio_mask, matrices))


def scale_by_adam(b1: float, b2: float, eps: float, moment_dtype: Any) -> optax.GradientTransformationExtraArgs:
  """Divides the mean of gradients by the root of the mean of their squares, both corrected for their start at zero.

  Where `ok` is false, as with a gradient that is not finite, the moments stay as they were. That is decided before they
  are read for the update: if it is decided afterwards, XLA makes two passes over parameters and moments where one
  suffices.

  Args:
    b1: decay of the mean.
    b2: decay of the mean of squares.
    eps: added to the root.
    moment_dtype: dtype that the mean is kept in; it is computed in f32 (`momentum.py` says where that differs).
  """

  def init(params: PyTree) -> optax.ScaleByAdamState:
    def zeros(dtype: Any) -> PyTree:
      return jax.tree.map(lambda p: jnp.zeros(p.shape, dtype), params)
    return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), zeros(moment_dtype), zeros(jnp.float32))

  def update(updates: PyTree, state: optax.ScaleByAdamState, params: PyTree | None = None, *, ok: Array | bool = True,
             **_: Any) -> tuple[PyTree, optax.ScaleByAdamState]:
    del params
    count = jnp.where(ok, optax.safe_increment(state.count), state.count)

    def moving_mean(decay: float, old: Array, new: Array) -> Array:
      old = old.astype(jnp.float32)
      return jnp.where(ok, decay * old + (1. - decay) * new.astype(jnp.float32), old)

    mu = trees.map_once(lambda m, g: moving_mean(b1, m, g), state.mu, updates)
    nu = trees.map_once(lambda v, g: moving_mean(b2, v, jnp.square(g.astype(jnp.float32))), state.nu, updates)
    mu_sum, nu_sum = (1. - decay ** count.astype(jnp.float32) for decay in (b1, b2))  # of the weights of all gradients
    scaled = trees.map_once(lambda m, v: m / mu_sum / (jnp.sqrt(v / nu_sum) + eps), mu, nu)
    return scaled, optax.ScaleByAdamState(count, jax.tree.map(lambda m: m.astype(moment_dtype), mu), nu)

  return optax.GradientTransformationExtraArgs(init, update)
