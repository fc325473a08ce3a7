"""Factors of learning rate and weight decay by path: layer-wise decay, and the rules of a config."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax

from vit_jax.config import schema
from vit_jax.config.durations import Lengths
from vit_jax.core import trees
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, PyTree, Schedule
from vit_jax.optim import masks, schedules
from vit_jax.optim.masks import Matrices

BODY = 'backbone/'
BELOW = 'backbone/(stem/.*|stem_norm/.*|norm_before/.*|cls|dist|registers|positions(/.*)?)'
"""What comes before the blocks."""


def find_depth(params: PyTree) -> int:
  """Returns the number of transformer blocks.

  Raises:
    UserError: if the backbone has none, so that there are no layers to count.
  """
  depths = {leaf.shape[0] for name, leaf in trees.flatten(params).items()
            if name.startswith(BODY) and trees.is_stacked(name)}
  if len(depths) != 1:
    raise UserError('optimizer.layer_decay: expected 1 for a backbone without transformer blocks, got another value. '
                    'Set optimizer.layer_decay=1.')
  return depths.pop()


def layer_factor(name: str, leaf: Array, *, decay: float, depth: int) -> Array | float:
  """Returns `decay ** (depth + 1 - layer)` of a leaf: a number, or `[L, 1, …]` for the blocks.

  Layers as in MAE: what comes before the blocks is 0, block i is i + 1, the rest (last norm, head, and what is
  not of the backbone) depth + 1.
  """
  if name.startswith(BODY) and trees.is_stacked(name):
    below = depth - jnp.arange(depth)
    return (jnp.asarray(decay, jnp.float32) ** below).reshape(-1, *[1] * (leaf.ndim - 1))
  return decay ** (depth + 1) if masks.matches(name, [BELOW]) else 1.


def scale_by_path(config: schema.Optimizer, lengths: Lengths) -> optax.GradientTransformationExtraArgs:
  """Multiplies each leaf by its layer's factor and by that of its rule."""
  rules = _values(config, lengths, lambda rule: rule.lr)

  def update(updates: PyTree, state: PyTree, params: PyTree | None = None, *, step: Array,
             **_: Any) -> tuple[PyTree, PyTree]:
    del params
    depth = find_depth(updates) if config.layer_decay != 1. else 0

    def scale(name: str, u: Array) -> Array:
      if depth:
        u = u * layer_factor(name, u, decay=config.layer_decay, depth=depth)
      return u * rules(name)(step).astype(u.dtype)

    return trees.map_named(scale, updates), state

  return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def add_decay(config: schema.Optimizer, lengths: Lengths, *, over: float,
              matrices: Matrices) -> optax.GradientTransformationExtraArgs:
  """Adds `weight_decay * ramp(step) * rule(step) / over * parameter` to the leaves that `weight_decay_mask` names."""
  rules, ramp = _values(config, lengths, lambda rule: rule.weight_decay), schedules.ramp(
      config.weight_decay_ramp, lengths=lengths)

  def update(updates: PyTree, state: PyTree, params: PyTree | None = None, *, step: Array,
             **_: Any) -> tuple[PyTree, PyTree]:
    def add(name: str, u: Array, param: Array) -> Array:
      if not masks.matches(name, config.weight_decay_mask, matrices):
        return u
      return u + (config.weight_decay / over * ramp(step) * rules(name)(step)).astype(u.dtype) * param

    return trees.map_named(add, updates, params), state

  return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _values(config: schema.Optimizer, lengths: Lengths,
            pick: Callable[[schema.PathRule], float | schema.Ramp]) -> Callable[[str], Schedule]:
  """Returns the factor of each rule over the run, by path name."""
  def value(name: str) -> Schedule:
    rule = masks.find_rule(name, config.rules)
    return schedules.ramp(pick(rule) if rule else 1., lengths=lengths)

  for rule in config.rules:  # so that a ramp that runs backwards is found here
    schedules.ramp(pick(rule), lengths=lengths)
  return value


def check(params: PyTree, config: schema.Optimizer, matrices: Matrices) -> None:
  """Raises UserError if a pattern or a layer-wise decay does not fit the parameters."""
  masks.check_rules(params, config.rules)
  masks.mask(params, config.weight_decay_mask if config.weight_decay else (), what='optimizer.weight_decay_mask',
             matrices=matrices)
  masks.mask(params, config.clip_parts, what='optimizer.clip_parts')
  for setting in ('trust_ratio_mask', 'matrices'):
    masks.mask(params, getattr(config, setting, ()), what=f'optimizer.{setting}', matrices=matrices)
  if config.layer_decay != 1.:
    find_depth(params)
