"""The training loop, `run`. It does not depend on the objective, the evaluators or file formats.

It dispatches step t before it passes the metrics of step t - 1 to the hooks, so that logging never stalls the device:

  step_fn 1, step_fn 2, on_metrics 1, step_fn 3, on_metrics 2, …

At a step t at which a hook wants the state, it first waits for the metrics of step t: on_metrics t - 1, on_metrics t,
on_state t. A step number is always the number of steps done, from 1. Every process runs the same loop.
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
  """A finished step: its number, its metrics on the host, its batch, and the newest state, of this step or the next."""
  step: int
  metrics: StepMetrics
  batch: Batch
  state: TrainState


class _Dispatched(NamedTuple):
  """A step whose metrics were not passed to the hooks yet; the devices may still compute them."""
  step: int
  metrics: Packed
  batch: Batch


class Hook(Protocol):
  """A callback of the training loop; methods that a hook does not define do nothing.

  For each step, the loop calls `on_metrics` of all hooks, in their order. If `every` divides the step, it then calls
  `on_state`. A hook may read states but must not keep them, because the next step donates their buffers.
  """
  every: int = 0
  """Steps between calls of `on_state`; 0 = never. It is not called after the last step, which the job handles."""

  def on_metrics(self, done: Done) -> None:
    """Takes the metrics of a step; called for every step, in order, after the next step was dispatched."""
    del done

  def on_state(self, step: int, state: TrainState) -> None:
    """Takes the state after `step` steps; called after `on_metrics` for all of these steps."""
    del step, state


class Ended(NamedTuple):
  """How a loop ended: after `step` steps; `reason` of `should_stop`, else ''; `error` that prevented the next step."""
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
  step, reason, compiled = start, '', set[tuple[tuple[int, ...], ...]]()
  error: UserError | TemporaryError | None = None
  late: _Dispatched | None = None
  while step < total and not reason:
    try:
      with clock.phase('data_wait'):
        batch = next(batches)
    except (UserError, TemporaryError) as stopped:
      error = stopped
      break
    shapes = tuple(np.shape(x) for x in jax.tree.leaves(batch))
    with contextlib.nullcontext() if shapes in compiled else clock.phase('compile'):
      state, metrics = step_fn(state, batch)  # returns before the device has finished
    compiled.add(shapes)
    before, step, late = late, step + 1, _Dispatched(step + 1, metrics, batch)
    try:
      _call_on_metrics(before, state, hooks)
      due = [hook for hook in hooks if hook.every and step % hook.every == 0 and step < total]
      if due:
        before, late = late, None
        _call_on_metrics(before, state, hooks)
        for hook in due:
          hook.on_state(step, state)
    except TemporaryError as stopped:
      error = stopped
      break
    reason = should_stop(step) if step < total else ''
  try:
    _call_on_metrics(late, state, hooks)
  except TemporaryError as stopped:
    error = error or stopped
  return Ended(state, step, reason, error)


def _call_on_metrics(late: _Dispatched | None, state: TrainState, hooks: Sequence[Hook]) -> None:
  """Waits for the metrics of a step, and passes them to the hooks; does nothing for None."""
  if late:
    done = Done(late.step, late.metrics.unpack(), late.batch, state)
    for hook in hooks:
      hook.on_metrics(done)
