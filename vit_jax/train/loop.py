"""The training loop, `run`. It does not depend on the objective, the evaluators or file formats.

The loop dispatches step t before it passes the metrics of step t - 1 to the hooks, so that logging never stalls the
device:

  step_fn 1, step_fn 2, on_metrics 1, step_fn 3, on_metrics 2, …

After a step t at which a hook takes the state, the loop waits for the metrics of step t: on_metrics t - 1,
on_metrics t, on_state t. A step number is always the number of steps done, from 1. Every process runs the same loop.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import jax
import numpy as np

from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.core.types import Batch
from vit_jax.record.clock import Clock
from vit_jax.train.state import Packed, StepFn, StepMetrics, TrainState


class Done(NamedTuple):
  """A finished step, with the metrics on the host. `state` is the newest state: after this step or the next one."""
  step: int
  metrics: StepMetrics
  batch: Batch
  state: TrainState


class _Dispatched(NamedTuple):
  """A step whose metrics were not passed to the hooks yet; the devices may still compute the step."""
  step: int
  metrics: Packed
  batch: Batch


class Hook(Protocol):
  """A callback of the training loop; methods that a hook does not define do nothing.

  For each step, the loop calls `on_metrics` of all hooks, in their order. If `every` divides the step, it then calls
  `on_state`. A hook may read a state but must not keep it, because the next step donates the buffers.
  """
  every: int = 0
  """Steps between calls of `on_state`; 0 = never. The loop does not call `on_state` after the last step of a run."""

  def on_metrics(self, done: Done) -> None:
    """Takes the metrics of a step; called for every step, in order, after the next step was dispatched."""
    del done

  def on_state(self, step: int, state: TrainState) -> None:
    """Takes the state after `step` steps; called after `on_metrics` of this step."""
    del step, state


class Ended(NamedTuple):
  """The end of a loop after `step` steps: the text of `should_stop`, else '', and an error that prevented a step."""
  state: TrainState
  step: int
  reason: str
  error: UserError | TemporaryError | None = None


def run(step_fn: StepFn, state: TrainState, batches: Iterator[Batch], *, start: int, total: int,
        hooks: Sequence[Hook], clock: Clock, should_stop: Callable[[int], str]) -> Ended:
  """Trains from `start` steps done to `total`, or until `should_stop(step)` returns a reason.

  If the next batch cannot be loaded, or a hook fails for a temporary reason, the loop ends with this error and a valid
  state. The first step of each shape of batches counts as the phase `compile`.
  """
  step, reason = start, ''
  compiled_shapes = set[tuple[tuple[int, ...], ...]]()
  error: UserError | TemporaryError | None = None
  newest: _Dispatched | None = None  # the newest step; None if its metrics were passed to the hooks
  while step < total and not reason:
    try:
      with clock.phase('data_wait'):
        batch = next(batches)
    except (UserError, TemporaryError) as load_error:
      error = load_error
      break
    shapes = tuple(np.shape(x) for x in jax.tree.leaves(batch))
    with contextlib.nullcontext() if shapes in compiled_shapes else clock.phase('compile'):
      state, metrics = step_fn(state, batch)  # returns before the device has finished
    compiled_shapes.add(shapes)
    step += 1
    previous, newest = newest, _Dispatched(step, metrics, batch)
    try:
      _call_on_metrics(previous, state, hooks)
      due = [hook for hook in hooks if hook.every and step % hook.every == 0 and step < total]
      if due:
        current, newest = newest, None  # None first: metrics are not passed twice if a hook fails
        _call_on_metrics(current, state, hooks)
        for hook in due:
          hook.on_state(step, state)
    except TemporaryError as hook_error:
      error = hook_error
      break
    reason = should_stop(step) if step < total else ''
  try:
    _call_on_metrics(newest, state, hooks)
  except TemporaryError as hook_error:
    error = error or hook_error
  return Ended(state, step, reason, error)


def _call_on_metrics(dispatched: _Dispatched | None, state: TrainState, hooks: Sequence[Hook]) -> None:
  """Waits for a step, and passes its metrics to the hooks; does nothing for None. `state` is the newest state."""
  if dispatched:
    done = Done(dispatched.step, dispatched.metrics.unpack(), dispatched.batch, state)
    for hook in hooks:
      hook.on_metrics(done)
