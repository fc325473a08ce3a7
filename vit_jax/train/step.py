"""The train step, which is the same for all models and objectives. `build` compiles it for a run.

A step prepares the batch (`Prepare`: normalization, augmentation on the device), computes the gradient over
microbatches, updates the parameters, and calls `after_update` of the objective. The planner compiles the same programs.
Hooks that need the prepared batch of a step compute it again with `preparing`.
"""
from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from vit_jax.core import axes, contracts, numerics, trees
from vit_jax.core.contracts import Objective, Prepare
from vit_jax.core.types import Array, ArrayLike, Batch, Extra, Key, LossOut, Params, PyTree
from vit_jax.optim.masks import Matrices
from vit_jax.optim.optimizers import Optimizer
from vit_jax.parallel import mesh as meshes
from vit_jax.parallel import sharding
from vit_jax.train import grad_cache
from vit_jax.train.state import Norms, Packed, StepMetrics, TrainState, pack


class Program(NamedTuple):
  """The jitted functions of a run; call them outside of any mesh context.

  abstract_state: shapes and dtypes of the state.    shardings: the same tree, with the sharding of each leaf.
  init_fn: `() -> TrainState`, each array created on its devices.
  step_fn: a `StepFn`, `(TrainState, Batch) -> (TrainState, Packed)`; it donates the state.
  prepared: shapes and dtypes of a prepared batch.
  """
  abstract_state: TrainState
  shardings: TrainState
  init_fn: jax.stages.Wrapped
  step_fn: jax.stages.Wrapped
  prepared: Batch

  @property
  def placed_state(self) -> TrainState:
    """The state as `jax.ShapeDtypeStruct`s with shardings."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), self.abstract_state,
                        self.shardings)


def build(objective: Objective, optimizer: Optimizer, prepare: Prepare, *, mesh: Mesh, batch: Batch,
          seed: int, accumulate: int) -> Program:
  """Builds init and step for global batches of the shapes of `batch` (arrays or ShapeDtypeStructs).

  Random keys depend only on (seed, step), so resuming needs no saved generator. The step splits a batch into
  `accumulate` microbatches, each with its own random numbers. The gradients of all microbatches are added and divided
  once, which gives the gradient of the complete batch. Other batches may have smaller images than `batch`, if
  images keep their own aspect: the step is then compiled for each size, with `fewest_microbatches`.
  """
  prepared = preparing(prepare, seed)
  max_image_size = _image_size(batch)
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    by_row = meshes.batch_sharding(mesh)  # as in the step, so that `prepared` is traced only once
    shapes, _ = jax.eval_shape(
        prepared, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=by_row), batch),
        jax.ShapeDtypeStruct((), jnp.int32))

  @jax.jit
  def init_network() -> tuple[Params, Extra]:
    keys = numerics.split_key(jax.random.key(seed), 'init', 'prepare')  # 'prepare' is unused, but changes the first key
    return objective.init(keys['init'], jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))

  matrices = axes.matrices(axes.trace(init_network)[1][0])

  def init() -> TrainState:
    params, extra = init_network()
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params, matrices), extra)

  def step(state: TrainState, batch: Batch) -> tuple[TrainState, Packed]:
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      share = _image_size(batch) / max_image_size
      batch, key = prepared(batch, state.step)
      state, metrics = _step(state, batch, key, objective, optimizer, matrices, fewest_microbatches(accumulate, share))
      return state, pack(metrics)

  abstract, axis_labels = axes.trace(init)
  shardings = _shardings(abstract, axis_labels, mesh)
  return Program(
      abstract, shardings, jax.jit(init, out_shardings=shardings),
      jax.jit(step, in_shardings=(shardings, by_row), out_shardings=(shardings, meshes.replicated(mesh)),
              donate_argnums=0),
      jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes))


def fewest_microbatches(most: int, share: float) -> int:
  """Returns the number of microbatches for images that have a `share` of the size of the largest images.

  The number is the smallest divisor of `most`, the number of microbatches for the largest images, with which no
  microbatch has more image values than with the largest images.
  """
  return next(count for count in range(1, most + 1) if most % count == 0 and count >= most * share)


def _image_size(batch: Batch) -> int:
  """Returns the number of values of `image` in a batch; 1 if the batch has no images."""
  return math.prod(batch['image'].shape) if 'image' in batch else 1


def preparing(prepare: Prepare, seed: int) -> Callable[[Batch, Array], tuple[Batch, Key]]:
  """Returns a function that maps (batch, number of steps done) to (prepared batch, key of the loss)."""
  @functools.partial(jax.jit, inline=True)
  def prepared(batch: Batch, step: Array) -> tuple[Batch, Key]:
    keys = numerics.split_key(jax.random.fold_in(jax.random.key(seed), step), 'prepare', 'loss')
    return prepare(batch, keys['prepare'], step), keys['loss']
  return prepared


def _shardings(abstract: TrainState, axis_labels: TrainState, mesh: Mesh) -> TrainState:
  """Returns the sharding of each leaf. Labels of axes decide for parameters, whose moments and EMA follow them."""
  network = sharding.with_frozen(abstract.params, abstract.extra)
  specs = sharding.param_specs(network, sharding.with_frozen(axis_labels.params, axis_labels.extra), mesh)
  params, opt, extra = (sharding.shardings(sharding.follow_specs(tree, network, specs), mesh)
                        for tree in (abstract.params, abstract.opt, abstract.extra))
  return TrainState(meshes.replicated(mesh), params, opt, extra)  # type: ignore[arg-type]


def _step(state: TrainState, batch: Batch, key: Key, objective: Objective, optimizer: Optimizer, matrices: Matrices,
          accumulate: int) -> tuple[TrainState, StepMetrics]:
  """Returns the state after a step on a prepared batch, and the metrics of the step; `key` is that of the loss."""
  out, grads = _gradients(objective, state, batch, key, accumulate)
  grad_squares = _squares(grads)
  grad_norm = jnp.sqrt(sum((x.sum() for x in grad_squares.values()), jnp.zeros(())))
  ok = jnp.isfinite(out.loss.value) & jnp.isfinite(grad_norm)
  updates, opt = optimizer.update(grads, state.opt, state.params, step=state.step, grad_norm=grad_norm, ok=ok,
                                  matrices=matrices)
  # The following lines allow XLA to compute parameters, moments and norms in one pass over memory.
  params = trees.map_once(lambda p, u: (p + jnp.where(ok, u, -0.)).astype(p.dtype), state.params, updates)
  moved = trees.map_once(jnp.subtract, params, state.params)
  extra = numerics.select(ok, objective.after_update(params, state.extra, out.stats, state.step), state.extra)
  norms = Norms(*({path: jnp.sqrt(square) for path, square in squares.items()}
                  for squares in (grad_squares, _squares(state.params), _squares(moved))))
  return TrainState(state.step + 1, params, opt, extra), StepMetrics(
      {'loss': out.loss, **out.metrics}, grad_norm, norms, ok)


def _gradients(objective: Objective, state: TrainState, batch: Batch, key: Key,
               accumulate: int) -> tuple[LossOut, PyTree]:
  """Returns the outputs of the loss, and the gradient of the mean loss over the complete batch.

  Microbatches are computed one after the other; microbatch i has the rows i, i + accumulate, …
  """
  num_rows = jax.tree.leaves(batch)[0].shape[0] / accumulate  # of a microbatch

  def total(params: Params, extra: Extra, batch: Batch, key: Key) -> tuple[Array, LossOut]:
    out = objective.loss(params, extra, batch, key, state.step)
    # The total weight of several microbatches is only known after the last one: `scale` corrects the gradient below.
    return out.loss.sum / (jax.lax.stop_gradient(_weight(out)) if accumulate == 1 else num_rows), out

  differentiate = jax.grad(total, has_aux=True)
  if accumulate == 1:
    grads, out = differentiate(state.params, state.extra, batch, key)
    return out, grads

  def own_key(i: Array) -> Key:
    return jax.random.fold_in(key, i)

  def add(sums: PyTree, xs: tuple[Batch, Array]) -> tuple[PyTree, None]:
    micro, i = xs
    grads_and_out = differentiate(state.params, state.extra, micro, own_key(i))
    return jax.tree.map(jnp.add, sums, grads_and_out), None

  micros = grad_cache.divided(batch, accumulate)
  if coupling := contracts.coupling(objective):
    return grad_cache.gradients(coupling, state, batch, key, micros, own_key)

  shapes = jax.eval_shape(lambda: differentiate(state.params, state.extra, jax.tree.map(lambda x: x[0], micros), key))
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  (grads, out), _ = jax.lax.scan(add, zeros, (micros, jnp.arange(accumulate)))
  scale = num_rows / _weight(out)
  return out, jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)


def _weight(out: LossOut) -> Array:
  """Returns the sum of the weights of the examples, but at least 1e-12, because callers divide by the sum."""
  return jnp.maximum(out.loss.weight, 1e-12)


def _squares(tree: PyTree) -> dict[str, Array]:
  """Returns the sum of squares of each leaf by path name: f32 [], or [L] for leaves that stack layers."""
  @functools.partial(jax.jit, static_argnums=1, inline=True)  # traced once for all leaves of equal shapes
  def squares(x: Array, is_stacked: bool) -> Array:
    return jnp.square(x.astype(jnp.float32)).sum(tuple(range(1 if is_stacked else 0, x.ndim)))

  return {name: squares(x, trees.is_stacked(name)) for name, x in trees.flatten(tree).items()}


def nonfinite_paths(norms: Mapping[str, ArrayLike]) -> list[str]:
  """Returns the path names of norms that are not finite: `PATH`, or `PATH (layer i)` for leaves that stack layers."""
  names = []
  for path, norm in norms.items():
    if np.ndim(norm):
      names += [f'{path} (layer {i})' for i in np.flatnonzero(~np.isfinite(norm))]
    elif not np.isfinite(norm):
      names.append(path)
  return names
