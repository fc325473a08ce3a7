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


class _Moments(NamedTuple):
  """The moments of a schedule, in steps from the start of the run; `timescale` is a length."""
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
    steps: peak * drop ** (number of `drops` at or before s)            exponential: peak * drop ** floor(s / every)

  A cooldown of c steps takes the last three to `end + (rate - end) * (total - s) / c` (Scaling ViT, section 3.5;
  with `constant` it is warmup-stable-decay).

  Raises:
    UserError: if warm-up and cooldown overlap, or the drops are not in order.
  """
  at = _find_moments(schedule, lengths)
  decayed, end = _decay(schedule, at, peak=peak), schedule.end_lr

  def rate(step: Array | int) -> Array:
    step = jnp.maximum(_on_stairs(jnp.asarray(step, jnp.float32), at.stairs) - at.lag, 0.)
    after = decayed(step)
    if at.cooldown:
      after = end + (after - end) * jnp.clip((at.total - step) / at.cooldown, 0., 1.)
    share = jnp.minimum(_warm(schedule.warmup_form, step, at.warmup), 1.)
    return jnp.where(step < at.warmup, schedule.warmup_lr + (peak - schedule.warmup_lr) * share, after)

  return rate


def _on_stairs(step: Array, stairs: int) -> Array:
  """Returns the last multiple of `stairs`; with 0 the step itself."""
  return jnp.floor(step / stairs) * stairs if stairs else step


def _warm(form: schema.Warmup, step: Array, warmup: int) -> Array:
  """Returns how far the warm-up has come."""
  match form:
    case schema.Warmup.MOVING:
      return (step + 1.) / (warmup + 1.)
    case schema.Warmup.FROM_ZERO:
      return step / max(1, warmup)
    case schema.Warmup.LINSPACE:
      return step / max(1, warmup - 1)


def _find_moments(schedule: schema.Schedule, lengths: Lengths) -> _Moments:
  total, warmup = lengths.total_steps, lengths.steps(schedule.warmup)
  cooldown = lengths.steps(schedule.cooldown) if schedule.cooldown else 0
  drops = [lengths.steps(drop) for drop in schedule.milestones]
  hold = lengths.steps(schedule.hold) if schedule.hold else 0
  if hold and warmup + hold >= total:
    raise UserError(f'optimizer.schedule.hold: expected less than the run ({total:,} steps) without its warm-up '
                    f'({warmup:,}), got {schedule.hold!r} ({hold:,} steps). Set a longer --config.length.')
  if warmup + cooldown > total:
    raise UserError(f'optimizer.schedule.warmup: expected at most the run ({total:,} steps) together with '
                    f'optimizer.schedule.cooldown={schedule.cooldown!r} ({cooldown:,}), got {schedule.warmup!r} '
                    f"({warmup:,}). Set a share of it, such as --config.optimizer.schedule.warmup='10 %', or a longer "
                    '--config.length.')
  if drops != sorted(set(drops)) or drops and not warmup <= drops[0] <= drops[-1] < total:
    raise UserError(f'optimizer.schedule.milestones: expected ascending ones from the end of the warm-up (step '
                    f'{warmup:,}) to before the end of the run ({total:,}), got {schedule.milestones}, steps {drops}. '
                    'Set others.')
  return _Moments(total, warmup, cooldown, hold, max(1, lengths.steps(schedule.every)),
                  max(1, lengths.steps(schedule.timescale)), lengths.steps(schedule.stairs) if schedule.stairs else 0,
                  lengths.steps(schedule.lag) if schedule.lag else 0, tuple(drops))


def _decay(schedule: schema.Schedule, at: _Moments, *, peak: float) -> Callable[[Array], Array]:
  """Returns the rate after the warm-up, without a cooldown."""
  end, start = schedule.end_lr, 0 if schedule.decay_from_start else at.warmup

  def decayed(step: Array) -> Array:
    since = jnp.maximum(step - at.warmup, 0.)
    t = jnp.clip((step - start) / max(1, at.total - at.hold - start), 0., 1.)
    match schedule.decay:
      case schema.Decay.COSINE:
        return end + (peak - end) * (1. + jnp.cos(jnp.pi * t)) / 2.
      case schema.Decay.LINEAR:
        return end + (peak - end) * (1. - t)
      case schema.Decay.RSQRT:
        return peak / jnp.sqrt(1. + since / at.timescale)
      case schema.Decay.STEPS:
        return peak * schedule.gamma ** sum((jnp.where(step >= drop, 1., 0.) for drop in at.drops), jnp.zeros(()))
      case schema.Decay.EXPONENTIAL:
        return peak * schedule.gamma ** jnp.floor(step / at.every)
      case schema.Decay.CONSTANT:
        return jnp.full((), peak)

  return decayed


def ramp(setting: float | schema.Ramp, *, lengths: Lengths) -> Schedule:
  """Returns a constant, or `start` up to update `begin`, `end` from `until` on, and a curve between them.

  With t from 0 to 1 between the two: linear `start + (end - start) * t`, cosine
  `end + (start - end) * (1 + cos(pi t)) / 2`. Where both moments are the same, the value jumps there. With `stairs` it
  is that of the last multiple of them.
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
    match setting.curve:
      case schema.Curve.COSINE:
        t = (1. - jnp.cos(jnp.pi * t)) / 2.
      case schema.Curve.LINEAR:
        pass
    return setting.start + (setting.end - setting.start) * t

  return value
