"""Builds and runs train steps for tests, on meshes of the simulated devices."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.config import durations, schema
from vit_jax.core.contracts import Objective, Prepare
from vit_jax.core.types import Shard
from vit_jax.optim import optimizers
from vit_jax.parallel import mesh as meshes
from vit_jax.parallel.rules import Rule
from vit_jax.train import step as steps

MESHES = {
    'one': schema.Mesh(1, 1, 1),
    'data=8': schema.Mesh(8, 1, 1),
    'fsdp=8': schema.Mesh(1, 8, 1),
    'data=2,fsdp=4': schema.Mesh(2, 4, 1),
    'data=2,tensor=4': schema.Mesh(2, 1, 4),
    'data=2,fsdp=2,tensor=2': schema.Mesh(2, 2, 2),
}
KERNELS: tuple[Rule, ...] = (('.*kernel', ('fsdp', 'tensor')),)
"""Rules for the fakes: kernels [in, out] over both axes."""


LENGTHS = durations.Lengths(num_examples=1000, batch_size=32, total_steps=100)
"""Of a run that a single step is taken from."""


def mesh(settings: schema.Mesh) -> jax.sharding.Mesh:
  return meshes.make(settings, jax.devices()[:settings.data * settings.fsdp * settings.tensor])


def batch(size: int = 32, px: int = 8, classes: int = 7) -> dict[str, np.ndarray]:
  """A batch of random pictures, as a loader yields it."""
  rng = np.random.default_rng(0)
  return {'image': rng.integers(0, 256, (size, px, px, 3), dtype=np.uint8),
          'label': rng.integers(0, classes, size).astype(np.int32), 'index': np.arange(size, dtype=np.int32)}


def build(objective: Objective, prepare: Prepare, settings: schema.Mesh, *, rules: Sequence[Rule],
          like: dict[str, np.ndarray], accumulate: int = 1, seed: int = 0,
          optimizer: optimizers.Kind | None = None, unstacked_layers: bool = True) -> steps.Program:
  optimizer = optimizer or schema.Sgd(weight_decay=0., clip_norm=1.)
  lengths = durations.Lengths(num_examples=1000, batch_size=len(next(iter(like.values()))), total_steps=100)
  return steps.build(objective, optimizers.build(optimizer, lambda step: jnp.asarray(.1), lengths=lengths), prepare,
                     mesh=mesh(settings), rules=rules, batch=like, seed=seed, accumulate=accumulate,
                     unstacked_layers=unstacked_layers)


def run(program: steps.Program, settings: schema.Mesh, data: dict[str, np.ndarray],
        num_steps: int = 1) -> tuple[Any, steps.StepMetrics]:
  """The state and last metrics after steps on the same batch, fetched to the host."""
  placed = meshes.put_batch(data, mesh(settings), Shard((0,), 1))
  state = program.hold(program.init_fn())
  for _ in range(num_steps):
    state, metrics = program.step_fn(state, placed)
  return jax.device_get(program.join(state)), jax.device_get(metrics)


def assert_close(a: Any, b: Any, *, rtol: float = 2e-4, atol: float = 2e-6) -> None:
  """Leafwise, naming the leaf."""
  for (path, x), (_, y) in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree_util.tree_leaves_with_path(b),
                               strict=True):
    np.testing.assert_allclose(x, y, rtol=rtol, atol=atol, err_msg=jax.tree_util.keystr(path))
