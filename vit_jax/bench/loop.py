"""Runs steps in the training loop, to show what a step costs there beside the bare step, with and without logging.

The loop is that of `--job=train`, with the hooks that every run has: metrics, written to a directory that is removed,
and non-finite values. A thread reads and places the batches.
"""
from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax

from vit_jax.config import schema
from vit_jax.core.types import Batch
from vit_jax.jobs import build
from vit_jax.record import clock as clocks
from vit_jax.record.writer import Writer
from vit_jax.train import hooks, loop
from vit_jax.train.state import TrainState

NEVER = 2**31
T = TypeVar('T')


def run(parts: build.Parts, state: TrainState, batches: Iterator[Batch], count: int, *, is_logged: bool,
        timed: Callable[[Callable[[], TrainState]], T]) -> tuple[TrainState, T]:
  """Runs `count` steps in the loop.

  Args:
    parts: of the run.
    state: held.
    batches: placed.
    count: number of steps.
    is_logged: log the metrics of every step; otherwise of none.
    timed: calls a function and returns what it cost; it measures the steps without the files around them.

  Returns:
    The state after them, and what `timed` returned.
  """
  clock = clocks.Clock(parts.config.batch_size, 0., None)
  with tempfile.TemporaryDirectory(prefix='vit_jax_bench_') as folder, Writer(
      folder, process_index=0, resumed_from=None, progress_total=NEVER, progress=False) as writer:
    metrics = hooks.Metrics(writer, clock, log_every=1 if is_logged else NEVER, total=NEVER, steps_an_epoch=1.,
                            schedule=parts.schedule)
    metrics.rates.at(0)  # compiles
    kept: list[loop.Hook] = [metrics, hooks.Finite(schema.OnNonfinite.STOP, lambda done: [])]
    ended: list[TrainState] = []

    def steps() -> TrainState:
      # From step 1, as the first step is always logged; the last one of `count` is not the last of the run.
      ended.append(loop.run(parts.program.step_fn, state, batches, start=1, total=1 + count, hooks=kept, clock=clock,
                            should_stop=lambda step: '').state)
      return jax.block_until_ready(ended[0])

    cost = timed(steps)
  return ended[0], cost
