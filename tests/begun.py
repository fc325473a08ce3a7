"""Directories of runs that have saved a state, made without the compilation of a train step."""
from __future__ import annotations

import pathlib
import time

import jax
import numpy as np

from vit_jax.config import schema
from vit_jax.jobs import resume, train


def write(config: schema.Config, workdir: pathlib.Path) -> pathlib.Path:
  """The directory of a run as two steps would leave it: all that is learned, of every view, is moved by chance."""
  run = train.Run(config, workdir, time.monotonic())
  state, rng = run.parts.program.init_fn(), np.random.default_rng(0)

  def move(leaf: jax.Array) -> jax.Array:
    return leaf + .1 * rng.normal(size=leaf.shape).astype(np.float32) if leaf.dtype == np.float32 else leaf

  moved = state._replace(params=jax.tree.map(move, state.params), extra=jax.tree.map(move, state.extra))
  run.checkpointer.save(moved._replace(step=moved.step + 2), run._describe_run(), {})
  run.checkpointer.close()
  run.loader.close()
  resume.write_config(workdir, run.config)
  return workdir
