"""Optimisers as optax transformations that are told the step and the gradient norm.

`update(grads, state, params, step=…, grad_norm=…, ok=…)`: schedules are functions of the run's step, so nothing
here counts steps for schedules, and the norm is computed once, in the train step. Where `ok` is false the state
stays as it was, and the updates mean nothing. What acts on a tensor as a whole (trust ratios, clipping, factored
statistics) acts on each layer of a stacked leaf for itself.
"""
from __future__ import annotations

from typing import Any, TypeAlias, assert_never

import jax
import jax.numpy as jnp
import optax

from vit_jax.config import schema
from vit_jax.config.durations import Lengths
from vit_jax.core import numerics
from vit_jax.core.types import Array, PyTree, Schedule
from vit_jax.optim import adafactor, adam, clipping, freezing, multipliers, rmsprop, schedules, trust

Optimizer: TypeAlias = optax.GradientTransformationExtraArgs
Kind: TypeAlias = (schema.AdamW | schema.Adam | schema.Adafactor | schema.Lamb | schema.Lars | schema.Lion
                   | schema.RMSProp | schema.Sgd)


def build(config: Kind, schedule: Schedule, *, lengths: Lengths) -> Optimizer:
  """The optimiser of a config. What goes by path is checked when the state is made.

  In order: clip; moments and trust ratio, with coupled decay; decay by the learning rate; factors of layers and
  rules; decay by the schedule alone; the learning rate. Frozen leaves are silent before and after, so that the
  norm that is clipped is of what moves.

  Raises:
    UserError: if moments of the run, such as those of a ramp, are out of order.
  """
  frozen_for = freezing.until(config.rules, lengths.steps)
  frozen = {lengths.steps(rule.frozen_until) for rule in config.rules if rule.frozen_until}
  moving = [_core(config, lengths, schedule)] if not frozen else freezing.freeze(
      lambda: _core(config, lengths, schedule), frozen_for, lengths=[0, *frozen], total=lengths.total_steps)
  by = getattr(config, 'decay_by', schema.DecayBy.GRADIENT)
  parts: list[optax.GradientTransformation] = [*_clip(config), *moving]
  if by is schema.DecayBy.LR and config.weight_decay:
    parts.append(multipliers.add_decay(config, lengths, over=1.))
  if config.layer_decay != 1. or config.rules:
    parts.append(multipliers.scale_by_path(config, lengths))
  if by is schema.DecayBy.SCHEDULE and config.weight_decay:
    peak = schedules.peak_rate(config, batch_size=lengths.batch_size)
    parts.append(multipliers.add_decay(config, lengths, over=peak))
  whole = optax.chain(*parts, scale_by_schedule(schedule))

  def init(params: PyTree) -> PyTree:
    multipliers.check(params, config)
    return whole.init(params)

  def update(grads: PyTree, state: PyTree, params: PyTree | None = None, *, step: Array, grad_norm: Array,
             ok: Array | bool = True, **_: Any) -> tuple[PyTree, PyTree]:
    if frozen:
      grads = freezing.silence(grads, frozen_for, step)
      grad_norm = freezing.whole_norm(grads)
    updates, state = whole.update(grads, state, params, step=step, grad_norm=grad_norm, ok=ok)
    return freezing.silence(updates, frozen_for, step) if frozen else updates, state

  return Optimizer(init, update)


def _clip(config: Kind) -> list[optax.GradientTransformation]:
  found: list[optax.GradientTransformation] = []
  if config.clip_norm:
    found.append(clipping.by_norm(config.clip_norm))
  if config.clip_tensor:
    found.append(clipping.by_tensor_norm(config.clip_tensor))
  if config.clip_adaptive:
    found.append(clipping.adaptive(config.clip_adaptive))
  return found


def _core(config: Kind, lengths: Lengths, schedule: Schedule) -> optax.GradientTransformation:
  """What keeps state, from gradient to update, with the decay that is part of it."""
  coupled = [multipliers.add_decay(config, lengths, over=1.)] if config.weight_decay else []
  match config:
    case schema.AdamW():
      # Loshchilov & Hutter 2019, Algorithm 2; the decay comes after.
      return _adam(config)
    case schema.Adam():
      # Kingma & Ba 2015, Algorithm 1, of the loss with weight_decay / 2 * |w|^2 added: both moments see its gradient.
      return _chain(*coupled, _adam(config))
    case schema.Adafactor():
      # Scaling ViT, section 3.4: the factored second moment first, then the running mean m <- b1 m + (1 - b1) u,
      # without correction for its start at zero (the warm-up covers that).
      return _chain(
          _held(adafactor.scale_by_factored_rms(power=config.b2_power, cap=config.b2_cap, eps=config.eps,
                                                least=config.min_dim_size_to_factor)),
          _keep_as(config.mu_dtype, 'ema', optax.ema(config.b1, debias=False)))
    case schema.Lamb():
      # You et al. 2020, Algorithm 2, with phi(z) = z.
      return _chain(_adam(config), *coupled, trust.scale_by_trust(1., config.trust_ratio_mask))
    case schema.Lars():
      # You et al. 2017, Algorithm 1, with the decayed gradient under the ratio and the learning rate after the
      # momentum, as MAE's linear probe has it.
      return _chain(*coupled, trust.scale_by_trust(config.trust_coefficient, config.trust_ratio_mask),
                    _keep_as(config.mu_dtype, 'trace', optax.trace(config.momentum)))
    case schema.Lion():
      return _keep_as(config.mu_dtype, 'mu', optax.scale_by_lion(config.b1, config.b2))
    case schema.RMSProp():
      return _chain(*coupled, rmsprop.scale_by_rms(
          schedule, b2=config.b2, start=config.initial_scale, eps=config.eps, momentum=config.momentum,
          moment=config.mu_dtype.value))
    case schema.Sgd():
      coupled = coupled if config.decay_by is schema.DecayBy.GRADIENT else []
      return _chain(*coupled, _keep_as(config.mu_dtype, 'trace', optax.trace(config.momentum)))
    case _:
      assert_never(config)


def _adam(config: schema.AdamW | schema.Adam | schema.Lamb) -> optax.GradientTransformation:
  return adam.scale_by_adam(config.b1, config.b2, config.eps, config.mu_dtype.value)


def _chain(*parts: optax.GradientTransformation) -> optax.GradientTransformation:
  return parts[0] if len(parts) == 1 else optax.chain(*parts)


def _held(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
  """`inner`, whose state stays as it was where `ok` is false."""
  inner = optax.with_extra_args_support(inner)

  def update(updates: PyTree, state: PyTree, params: PyTree | None = None, *, ok: Array | bool = True,
             **more: Any) -> tuple[PyTree, PyTree]:
    updates, new = inner.update(updates, state, params, **more)
    return updates, numerics.select(ok, new, state)

  return optax.GradientTransformationExtraArgs(inner.init, update)


def _keep_as(dtype: schema.DType, name: str,
             inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
  """Keeps the moment `name` of the inner state in a dtype, computes with it in f32, and holds where `ok` is false."""

  def cast(state: Any, to: Any) -> Any:
    return state._replace(**{name: optax.tree.cast(getattr(state, name), to)})

  def update(updates: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
    updates, state = inner.update(updates, cast(state, jnp.float32), params)
    return updates, cast(state, dtype.value)

  return _held(optax.GradientTransformation(lambda params: cast(inner.init(params), dtype.value), update))


def scale_by_schedule(schedule: Schedule) -> Optimizer:
  """Multiplies by `-schedule(step)`."""

  def update(updates: PyTree, state: PyTree, params: PyTree | None = None, *, step: Array,
             **_: Any) -> tuple[PyTree, PyTree]:
    del params
    rate = schedule(step)
    return jax.tree.map(lambda u: -rate.astype(u.dtype) * u, updates), state

  return Optimizer(lambda params: optax.EmptyState(), update)
