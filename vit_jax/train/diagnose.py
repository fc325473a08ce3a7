"""Finds the examples whose own loss is not finite, by bisecting a batch with its mask.

The train job calls `build`; the hook `Finite` calls the function that it returns after a step that was not finite.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from vit_jax.core.contracts import Objective, Prepare
from vit_jax.core.types import Array, Batch, HostArray
from vit_jax.parallel.mesh import batch_sharding, replicated
from vit_jax.train.loop import Done
from vit_jax.train.state import TrainState
from vit_jax.train.step import preparing

MAX_EXAMPLES = 5  # that are found; each takes about log2(batch) forward passes


def build(objective: Objective, prepare: Prepare, describe: Callable[[int], str],
          indexes: Callable[[int], HostArray], *, mesh: Mesh, seed: int) -> Callable[[Done], Sequence[str]]:
  """Returns a function that maps a non-finite step to the names of examples with a non-finite loss of their own.

  The function uses the newest parameters. With mixup, it names both examples of a pair. Every process must call it.

  Args:
    objective, prepare: of the run.
    describe: returns the name of the example at an index of the source.
    indexes: maps a step, counted from 0, to the indexes `[B] i64` of the examples of the step in the source.
    mesh, seed: of the train step.
  """
  prepared = preparing(prepare, seed)

  def is_loss_finite(state: TrainState, batch: Batch, step: Array, mask_B: Array) -> Array:
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      batch, key = prepared(batch, step)
      batch = {**batch, 'mask': mask_B * batch.get('mask', 1.)}
      return jnp.isfinite(objective.loss(state.params, state.extra, batch, key, step).loss.sum)

  is_finite = jax.jit(is_loss_finite, out_shardings=replicated(mesh))

  def diagnose(done: Done) -> list[str]:
    index_B = indexes(done.step - 1)
    step = jnp.asarray(done.step - 1, jnp.int32)

    def is_bad(low: int, high: int) -> bool:
      mask_B = np.zeros(len(index_B), np.float32)
      mask_B[low:high] = 1.
      return not bool(is_finite(done.state, done.batch, step, jax.device_put(mask_B, batch_sharding(mesh))))

    bad_indexes = [int(index_B[row]) for row in _find(is_bad, 0, len(index_B), MAX_EXAMPLES)]
    return [f'{describe(index)} (index {index})' for index in bad_indexes]
  return diagnose


def _find(is_bad: Callable[[int, int], bool], low: int, high: int, max_rows: int) -> list[int]:
  """Returns up to `max_rows` bad rows of `[low, high)`; `is_bad` returns whether the loss of a range is not finite."""
  if max_rows <= 0 or not is_bad(low, high):
    return []
  if high - low == 1:
    return [low]
  middle = (low + high) // 2
  rows = _find(is_bad, low, middle, max_rows)
  return rows + _find(is_bad, middle, high, max_rows - len(rows))
