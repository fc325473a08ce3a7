"""Learning rates over the run: functions of the number of updates done so far."""
from __future__ import annotations

import jax.numpy as jnp

from vit_jax.config import schema
from vit_jax.core.types import Array, Schedule


def build(schedule: schema.Schedule, *, peak: float, total_steps: int, warmup_steps: int) -> Schedule:
  """Linear warm-up to `peak`, then decay to `end_lr` at the end of the run.

  Update s (from 0) takes `peak * (s + 1) / (warmup + 1)` during the warm-up, so that the first update
  already moves, and then, with t = (s - warmup) / (total - warmup),

    cosine: end + (peak - end) * (1 + cos(pi t)) / 2        linear: end + (peak - end) * (1 - t)
  """
  end, decay_steps = schedule.end_lr, max(1, total_steps - warmup_steps)

  def rate(step: Array | int) -> Array:
    step = jnp.asarray(step, jnp.float32)
    t = jnp.clip((step - warmup_steps) / decay_steps, 0., 1.)
    match schedule.decay:
      case schema.Decay.COSINE:
        left = (1. + jnp.cos(jnp.pi * t)) / 2.
      case schema.Decay.LINEAR:
        left = 1. - t
    warm = jnp.minimum((step + 1.) / (warmup_steps + 1.), 1.)
    return jnp.where(step < warmup_steps, peak * warm, end + (peak - end) * left)

  return rate
