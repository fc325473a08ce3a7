"""The optimizer of a config, as one optax transformation.

`update(grads, state, params, step=…, grad_norm=…, ok=…)`: schedules are functions of the run's step, so no optimizer
counts steps for schedules, and the norm is computed once, in the train step. Where `ok` is false the state does not
change, and the updates have no meaning. Operations on complete tensors (trust ratios, clipping, factored statistics)
treat each layer of a stacked leaf separately.

A settings class names its optimizer in `implementation`: a function `(settings, *, coupled, schedule, matrices)` that
returns an optax transformation from gradients to updates, before decoupled weight decay and learning rate. It takes by
name what it uses, and the rest as `**_`. `coupled` is the weight decay that is part of the gradient or of the update;
`schedule` maps a step to a learning rate; `matrices` says which parameters are matrices. The transformation gets
`step`, `grad_norm` and `ok` as extra arguments; `momentum.hold` adds the meaning of `ok` to one that ignores it, and
`per_layer.per_layer` makes one act on each layer.

A settings class may name a second transformation in `after_rate`, a function `(settings, schedule)`: it gets the steps
of the parameters, in which learning rate and decay are. And a law of an average that is evaluated, in `average`, a
function `(settings, schedule)` that returns an `objectives.ema.Law`.
"""
from __future__ import annotations

from typing import Any, TypeAlias

import optax

from vit_jax.config import schema
from vit_jax.config.durations import Lengths
from vit_jax.core import implementation, trees
from vit_jax.core.types import Array, PyTree, Schedule
from vit_jax.optim import clipping, masks, rules, schedules
from vit_jax.optim.masks import Matrices
from vit_jax.optim.momentum import stateless

Optimizer: TypeAlias = optax.GradientTransformationExtraArgs
Kind: TypeAlias = schema.AnyOptimizer


def build(config: Kind, schedule: Schedule, *, lengths: Lengths) -> Optimizer:
  """Builds the optimizer of a config. Patterns of path names are checked when the state is made.

  Its steps are, in this order: clipping; moments and trust ratio, with coupled decay; decay by the learning rate;
  factors of layers and rules; decay by the schedule alone; the learning rate; `after_rate`. The gradients and the
  updates of frozen leaves are zeros, so that the norm that is clipped is that of the leaves that move.

  `init` and `update` of the optimizer take `matrices`, which of the parameters are matrices (`masks.Matrices`); None =
  the leaves called `kernel`, as `masks.find_matrices` returns them.

  Raises:
    UserError: if moments of the run, such as those of a ramp, are out of order.
  """
  frozen_for = rules.until(config.rules, lengths.steps)
  is_freezing = any(rule.frozen_until for rule in config.rules)
  after = optax.with_extra_args_support(
      implementation.load(config.after_rate)(config, schedule)) if config.after_rate else None
  _steps(config, schedule, lengths, {})  # raises the errors of the config

  def init(params: PyTree, matrices: Matrices | None = None) -> PyTree:
    matrices = masks.find_matrices(params) if matrices is None else matrices
    rules.check(params, config, matrices)
    state = _steps(config, schedule, lengths, matrices).init(params)
    return (state, after.init(params)) if after else state

  def update(grads: PyTree, state: PyTree, params: PyTree | None = None, *, step: Array, grad_norm: Array,
             ok: Array | bool = True, matrices: Matrices | None = None, **_: Any) -> tuple[PyTree, PyTree]:
    matrices = masks.find_matrices(grads) if matrices is None else matrices
    if is_freezing:
      grads = rules.silence(grads, frozen_for, step)
      grad_norm = rules.whole_norm(grads)
    extra: dict[str, Any] = {'step': step, 'grad_norm': grad_norm, 'ok': ok}
    before_state, after_state = state if after else (state, None)
    updates, before_state = _steps(config, schedule, lengths, matrices).update(grads, before_state, params, **extra)
    if is_freezing:
      updates = rules.silence(updates, frozen_for, step)
    if after is None:
      return updates, before_state
    updates, after_state = after.update(updates, after_state, params, **extra)
    return updates, (before_state, after_state)

  return Optimizer(init, update)


def _steps(config: Kind, schedule: Schedule, lengths: Lengths, matrices: Matrices) -> Optimizer:
  """Returns the transformation from gradients to the steps of the parameters, learning rate included."""
  def decay(over: float = 1.) -> Optimizer:
    return rules.add_decay(config, lengths, over=over, matrices=matrices)

  def moments() -> optax.GradientTransformation:
    coupled = [decay()] if config.weight_decay else []
    transformation: optax.GradientTransformation = implementation.of(config)(
        config, coupled=coupled, schedule=schedule, matrices=matrices)
    return transformation

  parts: list[optax.GradientTransformation] = []
  if config.clip_norm:
    parts.append(clipping.by_norm(config.clip_norm, config.clip_parts))
  if config.clip_tensor:
    parts.append(clipping.by_tensor_norm(config.clip_tensor))
  if config.clip_adaptive:
    parts.append(clipping.adaptive(config.clip_adaptive, matrices))
  freeze_lengths = {lengths.steps(rule.frozen_until) for rule in config.rules if rule.frozen_until}
  if freeze_lengths:
    frozen_for = rules.until(config.rules, lengths.steps)
    parts += rules.freeze(moments, frozen_for, lengths=[0, *freeze_lengths], total=lengths.total_steps)
  else:
    parts.append(moments())
  decay_by = getattr(config, 'decay_by', schema.DecayBy.GRADIENT)
  if decay_by is schema.DecayBy.LR and config.weight_decay:
    parts.append(decay())
  if config.layer_decay != 1. or config.rules:
    parts.append(rules.scale_by_path(config, lengths))
  if decay_by is schema.DecayBy.SCHEDULE and config.weight_decay:
    parts.append(decay(over=schedules.peak_rate(config, batch_size=lengths.batch_size)))
  return optax.chain(*parts, scale_by_schedule(schedule))


def scale_by_schedule(schedule: Schedule) -> Optimizer:
  """Multiplies by `-schedule(step)`."""

  def change(updates: PyTree, params: PyTree | None, *, step: Array, **_: Any) -> PyTree:
    del params
    rate = schedule(step)
    return trees.map_once(lambda u: -rate.astype(u.dtype) * u, updates)

  return stateless(change)
