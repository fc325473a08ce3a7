"""The training loop. It does not depend on the objective, the evaluators or file formats.

It dispatches step t before it passes the metrics of step t - 1 to the hooks, so that logging never stalls the
device. "Step" in hooks is the number of steps done.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import jax
import numpy as np

from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.core.types import Batch
from vit_jax.train.state import Packed, StepMetrics, TrainState


class Done(NamedTuple):
  """A finished step: its number, metrics on the host, its batch, and the newest state, maybe one step ahead."""
  step: int
  metrics: StepMetrics
  batch: Batch
  state: TrainState


class _Late(NamedTuple):
  step: int
  metrics: Packed
  batch: Batch


class Hook(Protocol):
  """A callback of the training loop; what a hook does not define does nothing.

  For each step, the loop calls `on_metrics` of all hooks, in their order. At the steps that `every` divides, it then
  calls `on_state`. A hook may read states but must not keep them: the next step donates their buffers.
  """
  every: int = 0
  """Steps between calls of `on_state`; 0 = never. It is not called after the last step, which the job handles."""

  def on_metrics(self, done: Done) -> None:
    """Takes the metrics of a step, for every step in order, one step later, when they are on the host."""
    del done

  def on_state(self, step: int, state: TrainState) -> None:
    """Takes the state after `step` steps, after `on_metrics` was called for all of these steps."""
    del step, state


class Phases(Protocol):
  """Measures the time of the loop by phase; see `record/clock.py`."""

  def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
    ...


class Ended(NamedTuple):
  """How a loop ended: `reason` is '' after the last step; `error` is the error that prevented the next step."""
  state: TrainState
  step: int
  reason: str
  error: UserError | TemporaryError | None = None


def run(step_fn: Callable[[TrainState, Batch], tuple[TrainState, Packed]], state: TrainState,
        batches: Iterator[Batch], *, start: int, total: int, hooks: Sequence[Hook], clock: Phases,
        should_stop: Callable[[int], str]) -> Ended:
  """Runs steps `start` to `total`, or until `should_stop(step)` gives a reason.

  The first step of each shape of batches counts as compilation.

  If the next batch cannot be loaded, or a hook fails for a temporary reason, the loop ends with this error and a valid
  state.
  """
  step, reason, compiled = start, '', set[tuple[tuple[int, ...], ...]]()
  error: UserError | TemporaryError | None = None
  late: _Late | None = None
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
    before, step, late = late, step + 1, _Late(step + 1, metrics, batch)
    try:
      _hand_over(before, state, hooks)
      due = [h for h in hooks if h.every and step % h.every == 0 and step < total]
      if due:
        before, late = late, None
        _hand_over(before, state, hooks)
        for hook in due:
          hook.on_state(step, state)
    except TemporaryError as stopped:
      error = stopped
      break
    reason = should_stop(step) if step < total else ''
  try:
    _hand_over(late, state, hooks)
  except TemporaryError as stopped:
    error = error or stopped
  return Ended(state, step, reason, error)


def _hand_over(late: _Late | None, state: TrainState, hooks: Sequence[Hook]) -> None:
  """Passes the metrics of the step before to the hooks, once they are on the host."""
  if late:
    done = Done(late.step, late.metrics.unpack(), late.batch, state)
    for hook in hooks:
      hook.on_metrics(done)
