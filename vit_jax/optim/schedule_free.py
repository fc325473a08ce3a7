"""Schedule-free AdamW: a constant learning rate, and an average of the iterates in place of a decay.

Defazio et al. 2024, "The Road Less Scheduled" (arXiv 2405.15682), Algorithm 1. Of its three sequences, y, where
gradients are computed, are the parameters of the run; x, which is evaluated, is the view `ema`; and of z the optimizer
keeps d = z - y, which is 0 at the start. With u, the step of AdamW without a first moment, c the weight of the newest
z in the average, and b = `b1`:

  y <- y + c d + (1 - b (1 - c)) u        d <- (1 - c) (d + b u)        x <- x + c / (1 - b (1 - c)) (y - x)

which is the algorithm, solved for y, d and x. The weight of a z is the square of the largest learning rate so far, as
in the authors' program.
"""
from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from vit_jax.config import schema
from vit_jax.core import numerics, trees
from vit_jax.core.types import Array, PyTree, Schedule


class Weights(NamedTuple):
  """What is known of the z so far: scalars f32."""
  largest: Array  # the largest learning rate
  total: Array    # the sum of the weights of all z


class RootState(NamedTuple):
  """State of the part before the learning rate."""
  updates: Array  # number of updates so far, `[] i32`
  nu: PyTree      # mean of squared gradients, f32


class AheadState(NamedTuple):
  """State of the part after the learning rate."""
  weights: Weights  # of the average
  ahead: PyTree     # d, f32, with a leaf for each parameter


def no_weights() -> Weights:
  """Returns the weights before the first update."""
  return Weights(jnp.zeros(()), jnp.zeros(()))


def newest(weights: Weights, rate: Array) -> tuple[Array, Weights]:
  """Returns the weight c of the z that an update with this learning rate gives, and the weights with it."""
  largest = jnp.maximum(weights.largest, rate)
  total = weights.total + largest**2
  return jnp.where(total > 0., largest**2 / jnp.where(total > 0., total, 1.), 1.), Weights(largest, total)


def adamw(config: schema.ScheduleFree, **_: Any) -> optax.GradientTransformationExtraArgs:
  """Returns the part before decay and learning rate: gradients over the root of the mean of their squares."""

  def init(params: PyTree) -> RootState:
    return RootState(jnp.zeros((), jnp.int32), trees.map_once(lambda p: jnp.zeros(p.shape, jnp.float32), params))

  def update(updates: PyTree, state: RootState, params: PyTree | None = None, *, ok: Array | bool = True,
             **_: Any) -> tuple[PyTree, RootState]:
    del params
    count = jnp.where(ok, state.updates + 1, state.updates)

    def moving_mean(v: Array, g: Array) -> Array:
      return jnp.where(ok, config.b2 * v + (1. - config.b2) * jnp.square(g.astype(jnp.float32)), v)

    nu = trees.map_once(moving_mean, state.nu, updates)
    nu_sum = 1. - config.b2 ** count.astype(jnp.float32)  # of the weights of all gradients
    return trees.map_once(lambda g, v: g / (jnp.sqrt(v / nu_sum) + config.eps), updates, nu), RootState(count, nu)

  return optax.GradientTransformationExtraArgs(init, update)


def interpolate(config: schema.ScheduleFree, schedule: Schedule) -> optax.GradientTransformationExtraArgs:
  """Returns the part after the learning rate, which makes steps of y from steps of z."""

  def init(params: PyTree) -> AheadState:
    return AheadState(no_weights(), trees.map_once(lambda p: jnp.zeros(p.shape, jnp.float32), params))

  def update(updates: PyTree, state: AheadState, params: PyTree | None = None, *, step: Array, ok: Array | bool = True,
             **_: Any) -> tuple[PyTree, AheadState]:
    del params
    c, new_weights = newest(state.weights, schedule(step))
    moved = trees.map_once(lambda d, u: c * d + (1. - config.b1 * (1. - c)) * u, state.ahead, updates)
    ahead = trees.map_once(lambda d, u: jnp.where(ok, (1. - c) * (d + config.b1 * u), d), state.ahead, updates)
    return moved, AheadState(numerics.select(ok, new_weights, state.weights), ahead)

  return optax.GradientTransformationExtraArgs(init, update)


class Average:
  """The law of the average x: how far it moves at each update, for `objectives.ema.Ema`."""

  def __init__(self, config: schema.ScheduleFree, schedule: Schedule) -> None:
    self._b1, self._schedule = config.b1, schedule

  def init(self) -> PyTree:
    return no_weights()._asdict()

  def decay(self, memory: PyTree, step: Array) -> tuple[Array, PyTree]:
    c, weights = newest(Weights(**memory), self._schedule(step))
    return 1. - c / (1. - self._b1 * (1. - c)), weights._asdict()
