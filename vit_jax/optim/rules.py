"""What differs by the path of a parameter: layer-wise decay, and the rules of a config.

A rule (`schema.PathRule`) has patterns of path names, factors of the learning rate and of the weight decay, and how
long its parameters are frozen. A frozen parameter has no update and no decay, and its moments make no step. The first
rule that matches a path name decides. `optimizers.build` puts the transformations of this module around an optimizer.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from vit_jax.config import schema
from vit_jax.config.durations import Lengths
from vit_jax.config.schema.optim import find_rule
from vit_jax.core import numerics, trees
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, PyTree, Schedule
from vit_jax.optim import masks, schedules
from vit_jax.optim.masks import Matrices
from vit_jax.optim.momentum import stateless

BODY = 'backbone/'
BELOW = 'backbone/(stem/.*|stem_norm/.*|norm_before/.*|cls|dist|registers|positions(/.*)?)'
"""The parameters before the blocks."""
Until = Callable[[str], int]
"""Maps a path name to the number of updates that the parameter is frozen for; 0 = it is not frozen."""


def check(params: PyTree, config: schema.Optimizer, matrices: Matrices) -> None:
  """Raises UserError if a pattern matches no parameter, a rule decides none, or there are no layers to count."""
  names = list(trees.flatten(params))
  used = [find_rule(name, config.rules) for name in names]
  idle = [rule.paths for rule in config.rules if not any(rule is other for other in used)]
  if idle:
    raise UserError(f'optimizer.rules: {", ".join(map(repr, idle))} decides no parameter; parameters are named like '
                    f'{", ".join(names[:3])}, and the first rule that matches decides')
  masks.mask(params, config.weight_decay_mask if config.weight_decay else (), what='optimizer.weight_decay_mask',
             matrices=matrices)
  masks.mask(params, config.clip_parts, what='optimizer.clip_parts')
  for setting in ('trust_ratio_mask', 'matrices'):
    masks.mask(params, getattr(config, setting, ()), what=f'optimizer.{setting}', matrices=matrices)
  if config.layer_decay != 1.:
    find_depth(params)


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

  Layers are counted as in MAE: what comes before the blocks is layer 0, block i is layer i + 1, and the rest (last
  norm, head, and what is outside of the backbone) is layer depth + 1.
  """
  if name.startswith(BODY) and trees.is_stacked(name):
    below = depth - jnp.arange(depth)
    return (jnp.asarray(decay, jnp.float32) ** below).reshape(-1, *[1] * (leaf.ndim - 1))
  return decay ** (depth + 1) if masks.matches(name, [BELOW]) else 1.


def scale_by_path(config: schema.Optimizer, lengths: Lengths) -> optax.GradientTransformationExtraArgs:
  """Multiplies each leaf by the factors of its layer and of its rule."""
  rate_factor = _rule_factors(config, lengths, lambda rule: rule.lr)

  def change(updates: PyTree, params: PyTree | None, *, step: Array, **_: Any) -> PyTree:
    del params
    depth = find_depth(updates) if config.layer_decay != 1. else 0

    def scale(name: str, u: Array) -> Array:
      if depth:
        u = u * layer_factor(name, u, decay=config.layer_decay, depth=depth)
      return u * rate_factor(name)(step).astype(u.dtype)

    return trees.map_named(scale, updates)

  return stateless(change)


def add_decay(config: schema.Optimizer, lengths: Lengths, *, over: float,
              matrices: Matrices) -> optax.GradientTransformationExtraArgs:
  """Adds `weight_decay * ramp(step) * rule(step) / over * parameter` to the leaves that `weight_decay_mask` names."""
  decay_factor = _rule_factors(config, lengths, lambda rule: rule.weight_decay)
  ramp = schedules.ramp(config.weight_decay_ramp, lengths=lengths)

  def change(updates: PyTree, params: PyTree | None, *, step: Array, **_: Any) -> PyTree:
    def add(name: str, u: Array, param: Array) -> Array:
      if not masks.matches(name, config.weight_decay_mask, matrices):
        return u
      return u + (config.weight_decay / over * ramp(step) * decay_factor(name)(step)).astype(u.dtype) * param

    return trees.map_named(add, updates, params)

  return stateless(change)


def _rule_factors(config: schema.Optimizer, lengths: Lengths,
                  pick: Callable[[schema.PathRule], float | schema.Ramp]) -> Callable[[str], Schedule]:
  """Returns a function from a path name to the factor of its rule over the run; `pick` returns it from the rule."""
  def factor(name: str) -> Schedule:
    rule = find_rule(name, config.rules)
    return schedules.ramp(pick(rule) if rule else 1., lengths=lengths)

  for rule in config.rules:  # so that a ramp that runs backwards is found here
    schedules.ramp(pick(rule), lengths=lengths)
  return factor


def until(rules: Sequence[schema.PathRule], steps: Callable[[str], int]) -> Until:
  """Returns how long the rules freeze each parameter; `steps` maps a duration such as `'10 %'` to steps."""

  def frozen_for(name: str) -> int:
    rule = find_rule(name, rules)
    return steps(rule.frozen_until) if rule and rule.frozen_until else 0

  return frozen_for


def silence(tree: PyTree, frozen_for: Until, step: Array) -> PyTree:
  """Replaces the leaves that are frozen at this update by zeros."""
  def zero_if_frozen(name: str, x: Array) -> Array:
    length = frozen_for(name)
    return jnp.where(step < length, jnp.zeros_like(x), x) if length else x

  return trees.map_named(zero_if_frozen, tree)


def freeze(make: Callable[[], optax.GradientTransformation], frozen_for: Until, *, lengths: Sequence[int],
           total: int) -> list[optax.GradientTransformation]:
  """Returns an optimizer for each length of freezing, to be chained: each acts on its parameters alone.

  Its whole state stays as it is, counts included, while its parameters are frozen: they begin as at the start
  of a run. Parameters that are frozen for `total` updates or more have no state.

  Args:
    make: makes the optimizer of a group of parameters.
    frozen_for: the length of freezing of a parameter.
    lengths: all lengths of freezing in updates, with 0 for the parameters that are not frozen.
    total: updates of the run.
  """
  optimizers = []
  for length in sorted(set(lengths)):
    if length >= total:
      continue
    of_group = optax.masked(make(), lambda tree, length=length: trees.map_named(
        lambda name, _: frozen_for(name) == length, tree))
    optimizers.append(_hold_until(length, of_group) if length else of_group)
  return optimizers


def _hold_until(length: int, inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
  """Returns `inner` with a state that does not change before the update of this number."""
  inner = optax.with_extra_args_support(inner)

  def update(updates: PyTree, state: PyTree, params: PyTree | None = None, *, step: Array,
             **extra: Any) -> tuple[PyTree, PyTree]:
    updates, new_state = inner.update(updates, state, params, step=step, **extra)
    return updates, numerics.select(step < length, state, new_state)

  return optax.GradientTransformationExtraArgs(inner.init, update)


def whole_norm(tree: PyTree) -> Array:
  """Returns the Euclidean norm of a whole tree, f32."""
  return jnp.sqrt(sum((jnp.square(x.astype(jnp.float32)).sum() for x in jax.tree.leaves(tree)), jnp.zeros(())))
