"""Optimisers as optax transformations that are told the step and the gradient norm.

`update(grads, state, params, step=…, grad_norm=…)`: schedules are functions of the run's step, so nothing
here counts steps for itself, and the norm is computed once, in the train step.
"""
from __future__ import annotations

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from vit_jax.config import schema
from vit_jax.core.types import Array, PyTree, Schedule
from vit_jax.optim.masks import mask

Optimizer: TypeAlias = optax.GradientTransformationExtraArgs


def build(config: schema.AdamW | schema.Sgd, schedule: Schedule) -> Optimizer:
  """The optimiser of a config. Decay masks go by path and are checked when the state is made."""
  decay = optax.add_decayed_weights(
      config.weight_decay, mask=lambda params: mask(params, config.decayed, what='optimizer.decayed'))
  parts: list[optax.GradientTransformation] = []
  if config.clip_norm:
    parts.append(clip_by_norm(config.clip_norm))
  match config:
    case schema.AdamW():
      # Loshchilov & Hutter 2019, Algorithm 2, with the decay times the learning rate as in optax and PyTorch.
      parts.append(optax.scale_by_adam(config.b1, config.b2, config.eps))
      if config.weight_decay:
        parts.append(decay)
    case schema.Sgd():
      if config.weight_decay:
        parts.append(decay)
      parts.append(optax.trace(config.momentum))
  parts.append(scale_by_schedule(schedule))
  return optax.with_extra_args_support(optax.chain(*parts))


def clip_by_norm(limit: float) -> Optimizer:
  """Scales the whole gradient down to norm `limit` if `grad_norm` exceeds it."""

  def update(updates: PyTree, state: PyTree, params: PyTree | None = None, *, grad_norm: Array,
             **_: Any) -> tuple[PyTree, PyTree]:
    del params
    factor = limit / jnp.maximum(grad_norm, limit)
    return jax.tree.map(lambda u: u * factor.astype(u.dtype), updates), state

  return Optimizer(lambda params: optax.EmptyState(), update)


def scale_by_schedule(schedule: Schedule) -> Optimizer:
  """Multiplies by `-schedule(step)`."""

  def update(updates: PyTree, state: PyTree, params: PyTree | None = None, *, step: Array,
             **_: Any) -> tuple[PyTree, PyTree]:
    del params
    rate = schedule(step)
    return jax.tree.map(lambda u: -rate.astype(u.dtype) * u, updates), state

  return Optimizer(lambda params: optax.EmptyState(), update)
