"""Multinomial logistic regression on features, optimized to convergence for many penalties at once.

  f(W, b) = sum_i w_i CE(x_i W + b, y_i) / sum_i w_i + l / 2 |W|^2

The bias is not penalized, and l is per example: scikit-learn's C is 1 / (l N). The solver is L-BFGS with a line search
for the strong Wolfe conditions (Nocedal & Wright 2006, chapters 3 and 7); all penalties are optimized together until
the last one converges. Examples are split over the devices and processed in blocks to limit the memory of the logits.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax.config import schema
from vit_jax.core.types import Array
from vit_jax.evaluate import linear
from vit_jax.evaluate.features import Split
from vit_jax.evaluate.linear import Linear, cut
from vit_jax.evaluate.resources import Make, Resources
from vit_jax.evaluate.results import Measuring

MEMORY = 10              # pairs of updates and gradient differences that L-BFGS stores
TOLERANCE = 1e-6         # a fit has converged if no entry of its gradient is larger
LINE_SEARCH_STEPS = 20
SOLVER_BYTES = 2**31  # limit for kernels and the memory of L-BFGS, over the penalties that are fitted at once


class Solution(NamedTuple):
  """Classifiers `kernel [n, D, C], bias [n, C]`, with their numbers of steps and largest gradient entries, `[n]`."""
  linear: Linear
  steps: Array
  gradient: Array


@functools.partial(jax.jit, static_argnames=('num_classes', 'max_steps'))
def fit(features: Array, label: Array, weight: Array, penalties: Array, *, num_classes: int,
        max_steps: int) -> Solution:
  """Fits a classifier for each penalty, starting at zero.

  Args:
    features: `[G, R, D]` f32, standardized, because L-BFGS converges slowly on features of different scales.
    label: `[G, R]` i32.
    weight: `[G, R]` f32, 0 for rows to ignore.
    penalties: l, `[n]`.
    num_classes: C.
    max_steps: limit of the steps of L-BFGS.
  """
  blocks = cut((features, label, weight), rows=linear.LOGITS_A_BLOCK // (num_classes * penalties.shape[0]))
  total = weight.sum()

  def fit_one(penalty: Array) -> Solution:
    def value(fitted: Linear) -> Array:
      loss = jax.lax.map(jax.checkpoint(functools.partial(linear.block_loss, fitted)), blocks).sum()
      return loss / total + penalty / 2. * jnp.square(fitted.kernel).sum()

    zero = Linear(jnp.zeros((features.shape[-1], num_classes)), jnp.zeros(num_classes))
    return _minimize(jax.jit(value), zero, max_steps=max_steps)

  return jax.vmap(fit_one)(penalties)


class _State(NamedTuple):
  """The state of the solver: the classifier, the state of L-BFGS, and of the last step the number, the largest entry
  of the gradient, and the relative decrease of the value."""
  linear: Linear
  lbfgs: optax.OptState
  steps: Array
  gradient: Array
  gain: Array


def _minimize(value: Callable[[Linear], Array], start: Linear, *, max_steps: int) -> Solution:
  """Runs L-BFGS until the gradient is small, or the value no longer decreases in f32."""
  solver = optax.lbfgs(memory_size=MEMORY, linesearch=optax.scale_by_zoom_linesearch(
      LINE_SEARCH_STEPS, initial_guess_strategy='one'))
  value_and_grad = optax.value_and_grad_from_state(value)

  def step(state: _State) -> _State:
    before, gradient = value_and_grad(state.linear, state=state.lbfgs)
    updates, lbfgs = solver.update(gradient, state.lbfgs, state.linear, value=before, grad=gradient, value_fn=value)
    after, gradient = optax.tree.get(lbfgs, 'value'), optax.tree.get(lbfgs, 'grad')
    largest = jnp.maximum(*(jnp.abs(x).max() for x in gradient))
    return _State(optax.apply_updates(state.linear, updates), lbfgs, state.steps + 1, largest,
                  gain=(before - after) / jnp.abs(before))

  def is_unfinished(state: _State) -> Array:
    return (state.gradient > TOLERANCE) & (state.steps < max_steps) & (state.gain > jnp.finfo(jnp.float32).eps)

  infinite = jnp.full((), jnp.inf)
  begin = _State(start, solver.init(start), jnp.zeros((), jnp.int32), gradient=infinite, gain=infinite)
  end = jax.lax.while_loop(is_unfinished, step, begin)
  return Solution(end.linear, end.steps, end.gradient)


def evaluator(train: Split, test: Split, *, num_classes: int, penalties: Sequence[float], holdout: float,
              max_steps: int) -> linear.Evaluator:
  """Returns the evaluator of one view: `top1`, `top5`, the chosen penalty `l2`, and its held-out accuracy and NLL.

  The penalty with the smallest held-out NLL is chosen: on few examples several penalties have the same accuracy, and
  accuracy does not depend on the probability of a wrong prediction. If the smallest or the largest penalty is chosen,
  the grid is extended on that side.

  Args:
    train, test, holdout: see `linear.Evaluator`.
    penalties: to choose from, per example (see above).
    num_classes, max_steps: see `fit`.
  """
  fit_penalties = functools.partial(fit_all, num_classes=num_classes, max_steps=max_steps)
  return linear.Evaluator(train, test, fit_penalties, penalties, setting='l2', holdout=holdout, rank=linear.by_nll,
                          is_standardized=True)


def fit_all(data: linear.Data, penalties: Sequence[float], *, num_classes: int, max_steps: int) -> Linear:
  """Fits classifiers for all penalties, as many at once as `SOLVER_BYTES` allows; arguments as of `fit`."""
  bytes_of_one = 4 * data.features.shape[-1] * num_classes * (2 * MEMORY + 5)
  at_once = max(1, SOLVER_BYTES // bytes_of_one)
  fitted = [fit(data.features, data.label, data.weight, np.asarray(penalties[start:start + at_once], np.float32),
                num_classes=num_classes, max_steps=max_steps).linear
            for start in range(0, len(penalties), at_once)]
  return Linear(*(jnp.concatenate(x) for x in zip(*fitted, strict=True)))


def build(resources: Resources, name: str, settings: schema.Logistic) -> Make:
  """Builds the evaluator for each view."""
  train, test = resources.sources(name)

  def make(view: str) -> Measuring:
    return evaluator(
        *resources.splits(name, settings, train, test, view),
        num_classes=len(train.class_names), penalties=settings.l2, holdout=settings.holdout,
        max_steps=settings.max_steps)
  return make
