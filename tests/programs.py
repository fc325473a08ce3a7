"""Builds and runs train steps for tests, on meshes of the simulated devices."""
from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from vit_jax.config import durations, schema
from vit_jax.core import axes, trees
from vit_jax.core.contracts import Objective, Prepare
from vit_jax.core.types import LossOut, Shard
from vit_jax.jobs import build as jobs_build
from vit_jax.optim import optimizers
from vit_jax.parallel import layout, sharding
from vit_jax.parallel import mesh as meshes
from vit_jax.train import step as steps
from vit_jax.train.state import TrainState

MESHES = {
    'one': schema.Mesh(1, 1, 1),
    'data=8': schema.Mesh(8, 1, 1),
    'fsdp=8': schema.Mesh(1, 8, 1),
    'data=2,fsdp=4': schema.Mesh(2, 4, 1),
    'data=2,tensor=4': schema.Mesh(2, 1, 4),
    'data=2,fsdp=2,tensor=2': schema.Mesh(2, 2, 2),
}
LENGTHS = durations.Lengths(num_examples=1000, batch_size=32, total_steps=100)
"""Of a run that a single step is taken from."""


def mesh(settings: schema.Mesh) -> jax.sharding.Mesh:
  return meshes.make(settings, jax.devices()[:settings.data * settings.fsdp * settings.tensor])


def batch(size: int = 32, px: int = 8, classes: int = 7) -> dict[str, np.ndarray]:
  """A batch of random images, as a loader yields it."""
  rng = np.random.default_rng(0)
  return {'image': rng.integers(0, 256, (size, px, px, 3), dtype=np.uint8),
          'label': rng.integers(0, classes, size).astype(np.int32), 'index': np.arange(size, dtype=np.int32)}


def build(objective: Objective, prepare: Prepare, settings: schema.Mesh, *,
          like: dict[str, np.ndarray], accumulate: int = 1, seed: int = 0,
          optimizer: optimizers.Kind | None = None) -> steps.Program:
  optimizer = optimizer or schema.Sgd(weight_decay=0., clip_norm=1.)
  lengths = durations.Lengths(num_examples=1000, batch_size=len(next(iter(like.values()))), total_steps=100)
  return steps.build(objective, optimizers.build(optimizer, lambda step: jnp.asarray(.1), lengths=lengths), prepare,
                     mesh=mesh(settings), batch=like, seed=seed, accumulate=accumulate)


def train_flops(config: schema.Config, num_classes: int = 10) -> float:
  """FLOPs of an image in a training step of a config."""
  return jobs_build.train_flops(abstract_parts(config, num_classes))


def kept_bytes(config: schema.Config) -> int:
  """Bytes that an image keeps for the backward pass of a config."""
  return jobs_build.kept_bytes(abstract_parts(config), config.model)


def abstract_parts(config: schema.Config, num_classes: int = 10) -> jobs_build.Parts:
  """The objects of a run on one abstract device."""
  one = layout.plain(dataclasses.replace(config, mesh=schema.Mesh(1, 1, 1)))
  alone = AbstractMesh((1, 1, 1), meshes.AXES, axis_types=(AxisType.Auto,) * 3)
  return jobs_build.parts(  # type: ignore[arg-type]
      one, mesh=alone, num_examples=1_000_000, num_classes=num_classes, in_memory=False)


def specs(init: Callable[..., Any], *args: Any, on: Mesh) -> Any:
  """How the parameters that a function creates are sharded."""
  shapes, labels = axes.trace(init, *args)
  return sharding.param_specs(shapes, labels, on)


def run(program: steps.Program, settings: schema.Mesh, data: dict[str, np.ndarray], num_steps: int = 1,
        start: TrainState | None = None) -> tuple[Any, steps.StepMetrics]:
  """The state and last metrics after steps on the same batch, fetched to the host.

  With `start`, a state on the host, the program that makes the state is not compiled.
  """
  placed = meshes.put_batch(data, mesh(settings), Shard((0,), 1))
  state = program.init_fn() if start is None else jax.device_put(start, program.shardings)
  for _ in range(num_steps):
    state, metrics = program.step_fn(state, placed)
  return jax.device_get(state), metrics.unpack()


def draw(abstract: Any) -> Any:
  """Values for parameters or state of a network, by path name, of which none is 0 or 1: a mistake anywhere shows."""
  def one(name: str, leaf: Any) -> np.ndarray:
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    if name.endswith('var'):
      return rng.uniform(.5, 2., leaf.shape).astype(leaf.dtype)
    inputs = math.prod(leaf.shape[:-1]) / (leaf.shape[0] if trees.is_stacked(name) else 1)
    size = inputs**-.5 if name.endswith('kernel') else .2
    return np.asarray(name.endswith('scale') + size * rng.normal(size=leaf.shape), leaf.dtype)

  return trees.map_named(one, abstract)


def gradients(objective: Objective, settings: schema.Mesh, *, batch: dict[str, np.ndarray]) -> dict[str, Any]:
  """Loss, gradient and the changed `extra` of an objective on a mesh, for `draw`n parameters, fetched to the host.

  The part of a step that depends on the network: it compiles in a third of the time of a step.
  """
  on, key = mesh(settings), jax.random.key(1)
  shapes, (labels, _) = axes.trace(objective.init, key, batch)
  params, extra = map(draw, shapes)
  specs = sharding.param_specs(params, labels, on)

  def total(params: Any, extra: Any, batch: Any) -> tuple[Any, LossOut]:
    out = objective.loss(params, extra, batch, key, jnp.zeros((), jnp.int32))
    return out.loss.value, out

  @jax.jit
  def both(params: Any, extra: Any, batch: Any) -> dict[str, Any]:
    with jax.sharding.use_abstract_mesh(on.abstract_mesh):
      grads, out = jax.grad(total, has_aux=True)(params, extra, batch)
      return {'loss': out.loss, 'gradient': grads,
              'extra': objective.after_update(params, extra, out.stats, jnp.zeros((), jnp.int32))}

  placed = jax.device_put((params, extra), (
      sharding.shardings(specs, on), sharding.shardings(sharding.follow_specs(extra, params, specs), on)))
  return jax.device_get(both(*placed, meshes.put_batch(batch, on, Shard((0,), 1))))


def assert_close(a: Any, b: Any, *, rtol: float = 2e-4, atol: float = 2e-6) -> None:
  """Leafwise, naming the leaf."""
  for (path, x), (_, y) in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree_util.tree_leaves_with_path(b),
                               strict=True):
    np.testing.assert_allclose(x, y, rtol=rtol, atol=atol, err_msg=jax.tree_util.keystr(path))


def assert_reordered(got: Any, want: Any, *, terms: int, operations: int) -> None:
  """Leafwise equal up to the rounding of f32 sums of `terms` products that are added in another order.

  Such a sum is within `terms` u of the exact one, times the sum of its magnitudes (u = 2^-24). `operations` in a row
  each add an error of that size, relative to the leaf; in a leaf that is zero but for cancellation the terms are as
  large as the largest leaf of the tree.
  """
  scale = max([float(np.abs(x).max(initial=0.)) for x in jax.tree.leaves(want)], default=0.)
  for (path, x), (_, y) in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree_util.tree_leaves_with_path(want),
                               strict=True):
    own = float(np.abs(y).max(initial=0.))
    np.testing.assert_allclose(x, y, rtol=0, atol=terms * 2.**-24 * (operations * own + scale),
                               err_msg=jax.tree_util.keystr(path))
