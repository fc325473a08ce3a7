"""Learning rates and other numbers over the run: functions of the number of updates done so far."""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from vit_jax.config import schema
from vit_jax.config.durations import Lengths
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, Schedule


def peak_rate(config: schema.Optimizer, *, batch_size: int) -> float:
  """Returns the learning rate at the peak: `lr`, or `lr * batch_size / base_batch_size`.

  Source: Goyal et al. 2017, section 2.1.
  """
  return config.lr * batch_size / config.base_batch_size if config.base_batch_size else config.lr


class _Steps(NamedTuple):
  """The durations of a schedule in steps, and its milestones in steps from the start of the run."""
  total: int
  warmup: int
  cooldown: int
  hold: int
  every: int
  timescale: int
  stairs: int
  lag: int
  drops: tuple[int, ...]


def build(schedule: schema.Schedule, *, peak: float, lengths: Lengths) -> Schedule:
  """Builds a linear warm-up to `peak`, then a decay, then perhaps a linear cooldown to `end_lr` at the end of the run.

  The rate of an update is that at step s (from 0), or with `stairs` and `lag` at
  max(0, stairs * floor(s / stairs) - lag). In a warm-up of w updates it is `warmup_lr + (peak - warmup_lr) * share`,
  where the share is (s + 1) / (w + 1), s / w or s / (w - 1) by `warmup_form`. Then, with
  t = (s - w) / (total - hold - w), or with `decay_from_start` s / (total - hold), at most 1,

    cosine: end + (peak - end) * (1 + cos(pi t)) / 2        linear: end + (peak - end) * (1 - t)
    rsqrt: peak / sqrt(1 + (s - w) / timescale)        constant: peak
    steps: peak * gamma ** (number of `milestones` at or before s)
    exponential: peak * gamma ** floor(s / every)

  A cooldown of c steps takes the last three to `end + (rate - end) * (total - s) / c` (Scaling ViT, section 3.5;
  with `constant` it is warmup-stable-decay).

  Raises:
    UserError: if warm-up and cooldown overlap, or the milestones are not in order.
  """
  at = _in_steps(schedule, lengths)
  decayed, end = _decay(schedule, at, peak=peak), schedule.end_lr

  def rate(step: Array | int) -> Array:
    step = jnp.maximum(_on_stairs(jnp.asarray(step, jnp.float32), at.stairs) - at.lag, 0.)
    after_warmup = decayed(step)
    if at.cooldown:
      after_warmup = end + (after_warmup - end) * jnp.clip((at.total - step) / at.cooldown, 0., 1.)
    match schedule.warmup_form:
      case schema.Warmup.MOVING:
        share = (step + 1.) / (at.warmup + 1.)
      case schema.Warmup.FROM_ZERO:
        share = step / max(1, at.warmup)
      case schema.Warmup.LINSPACE:
        share = step / max(1, at.warmup - 1)
    in_warmup = schedule.warmup_lr + (peak - schedule.warmup_lr) * jnp.minimum(share, 1.)
    return jnp.where(step < at.warmup, in_warmup, after_warmup)

  return rate


def _on_stairs(step: Array, stairs: int) -> Array:
  """Returns the last multiple of `stairs`; with 0 the step itself."""
  return jnp.floor(step / stairs) * stairs if stairs else step


def _in_steps(schedule: schema.Schedule, lengths: Lengths) -> _Steps:
  """Returns the durations of a schedule in steps. Raises UserError if they overlap, or the drops are not in order."""
  def optional(duration: str) -> int:
    return lengths.steps(duration) if duration else 0

  total, warmup = lengths.total_steps, lengths.steps(schedule.warmup)
  cooldown, hold = optional(schedule.cooldown), optional(schedule.hold)
  drops = tuple(map(lengths.steps, schedule.milestones))
  if hold and warmup + hold >= total:
    raise UserError(f'optimizer.schedule.hold: expected less than the run ({total:,} steps) without its warm-up '
                    f'({warmup:,}), got {schedule.hold!r} ({hold:,} steps). Set a longer --config.length.')
  if warmup + cooldown > total:
    raise UserError(f'optimizer.schedule.warmup: expected at most the run ({total:,} steps) together with '
                    f'optimizer.schedule.cooldown={schedule.cooldown!r} ({cooldown:,}), got {schedule.warmup!r} '
                    f"({warmup:,}). Set a share of it, such as --config.optimizer.schedule.warmup='10 %', or a longer "
                    '--config.length.')
  is_ascending = list(drops) == sorted(set(drops))
  if drops and not (is_ascending and warmup <= drops[0] and drops[-1] < total):
    raise UserError(f'optimizer.schedule.milestones: expected ascending ones from the end of the warm-up (step '
                    f'{warmup:,}) to before the end of the run ({total:,}), got {schedule.milestones}, steps '
                    f'{list(drops)}. Set others.')
  return _Steps(total=total, warmup=warmup, cooldown=cooldown, hold=hold, drops=drops,
                every=max(1, lengths.steps(schedule.every)), timescale=max(1, lengths.steps(schedule.timescale)),
                stairs=optional(schedule.stairs), lag=optional(schedule.lag))


def _decay(schedule: schema.Schedule, at: _Steps, *, peak: float) -> Callable[[Array], Array]:
  """Returns the function from a step to the rate after the warm-up, without a cooldown."""
  end, start = schedule.end_lr, 0 if schedule.decay_from_start else at.warmup

  def decayed(step: Array) -> Array:
    since_warmup = jnp.maximum(step - at.warmup, 0.)
    t = jnp.clip((step - start) / max(1, at.total - at.hold - start), 0., 1.)
    match schedule.decay:
      case schema.Decay.COSINE:
        return end + (peak - end) * (1. + jnp.cos(jnp.pi * t)) / 2.
      case schema.Decay.LINEAR:
        return end + (peak - end) * (1. - t)
      case schema.Decay.RSQRT:
        return peak / jnp.sqrt(1. + since_warmup / at.timescale)
      case schema.Decay.STEPS:
        num_drops = sum((jnp.where(step >= drop, 1., 0.) for drop in at.drops), jnp.zeros(()))
        return peak * schedule.gamma ** num_drops
      case schema.Decay.EXPONENTIAL:
        return peak * schedule.gamma ** jnp.floor(step / at.every)
      case schema.Decay.CONSTANT:
        return jnp.full((), peak)

  return decayed


def ramp(setting: float | schema.Ramp, *, lengths: Lengths) -> Schedule:
  """Returns a constant, or `start` up to update `begin`, `end` from `until` on, and a curve between them.

  With t from 0 to 1 between the two: linear `start + (end - start) * t`, cosine
  `end + (start - end) * (1 + cos(pi t)) / 2`. Where both moments are the same, the value jumps there. With `stairs` the
  value is that at the last multiple of `stairs`.
  """
  if not isinstance(setting, schema.Ramp):
    return lambda step: jnp.full((), setting, jnp.float32)
  begin, until = lengths.steps(setting.begin), lengths.steps(setting.until)
  if begin > until:
    raise UserError(f'ramp: expected an end after its start at {setting.begin!r} ({begin:,} steps), got '
                    f'{setting.until!r} ({until:,}). Set a later end.')
  stairs = lengths.steps(setting.stairs) if setting.stairs else 0

  def value(step: Array | int) -> Array:
    step = _on_stairs(jnp.asarray(step, jnp.float32), stairs)
    t = jnp.clip((step - begin) / (until - begin), 0., 1.) if until > begin else jnp.where(step >= begin, 1., 0.)
    if setting.curve is schema.Curve.COSINE:
      t = (1. - jnp.cos(jnp.pi * t)) / 2.
    return setting.start + (setting.end - setting.start) * t

  return value
