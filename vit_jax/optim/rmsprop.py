"""RMSProp with momentum as TensorFlow 1 has it, which EfficientNet and Noisy Student are trained with.

Hinton, Neural Networks for Machine Learning, lecture 6e; `tf.train.RMSPropOptimizer`:

  v <- b2 v + (1 - b2) g^2,   m <- momentum m + rate g / sqrt(v + eps),   w <- w - m

Other than in `optax.rmsprop` and PyTorch, v begins at 1, eps is below the root, and the rate is inside the momentum.
"""
from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from vit_jax.config import schema
from vit_jax.core.types import Array, PyTree, Schedule
from vit_jax.optim.momentum import Parts, chain


class RmsState(NamedTuple):
  """Mean of squared gradients, f32, and `trace`: m over the learning rate of the last step, 0 where that is 0."""
  nu: PyTree
  trace: PyTree


def scale_by_rms(schedule: Schedule, *, b2: float, start: float, eps: float, momentum: float,
                 moment: Any) -> optax.GradientTransformationExtraArgs:
  """Returns the update `m / rate`; the caller multiplies by the rate.

  The state holds m divided by the rate of the step before, so that an update uses `momentum m (last rate / rate)`.
  Where `ok` is false neither v nor m changes.

  Args:
    schedule: step to learning rate. It may be 0 while m is 0, at the start of a warm-up; m is lost where it is 0 later.
    b2: decay of v.
    start: v before the first update.
    eps: added to v.
    momentum: decay of m.
    moment: dtype that m is kept in; it is computed in f32.
  """

  def init(params: PyTree) -> RmsState:
    return RmsState(jax.tree.map(lambda p: jnp.full(p.shape, start, jnp.float32), params),
                    jax.tree.map(lambda p: jnp.zeros(p.shape, moment), params))

  def update(updates: PyTree, state: RmsState, params: PyTree | None = None, *, step: Array, ok: Array | bool = True,
             **_: Any) -> tuple[PyTree, RmsState]:
    del params
    rate, last = schedule(step), schedule(jnp.maximum(step - 1, 0))
    kept, same = (jnp.where(rate > 0., x / jnp.where(rate > 0., rate, 1.), 0.) for x in (momentum * last, last))
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), updates)
    nu = jax.tree.map(lambda v, g: jnp.where(ok, b2 * v + (1. - b2) * jnp.square(g), v), state.nu, grads)
    found = jax.tree.map(lambda m, v, g: kept * m.astype(jnp.float32) + g * jax.lax.rsqrt(v + eps), state.trace, nu,
                         grads)
    trace = jax.tree.map(lambda m, new: jnp.where(ok, new, same * m.astype(jnp.float32)).astype(moment), state.trace,
                         found)
    return found, RmsState(nu, trace)

  return optax.GradientTransformationExtraArgs(init, update)


def rmsprop(config: schema.RMSProp, *, coupled: Parts, schedule: Schedule, **_: Any) -> optax.GradientTransformation:
  """Returns the RMSProp of TensorFlow with these settings."""
  return chain(*coupled, scale_by_rms(
      schedule, b2=config.b2, start=config.initial_scale, eps=config.eps, momentum=config.momentum,
      moment=config.mu_dtype.value))
