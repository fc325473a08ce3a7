"""The arrays of a run: the state that one step passes to the next (`TrainState`), and its metrics (`StepMetrics`).

Both are plain trees of arrays. A step packs its metrics into one array (`pack`), which the host fetches in one
transfer; the training loop unpacks this array for the hooks (`Packed.unpack`).
"""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.core.types import Array, Batch, Extra, Mean, Params, PyTree


class TrainState(NamedTuple):
  """The arrays that one step passes to the next; no functions and no random keys."""
  step: Array  # number of steps done, scalar i32
  params: Params
  opt: PyTree  # state of the optimizer
  extra: Extra  # state of the objective


class Norms(NamedTuple):
  """Euclidean norms by path name: a scalar for each leaf, or an array `[L]` for a leaf that stacks the L layers."""
  grad: dict[str, Array]
  param: dict[str, Array]  # before the step
  update: dict[str, Array]


class StepMetrics(NamedTuple):
  """The metrics of a step."""
  means: dict[str, Mean]  # by name, such as 'loss'
  grad_norm: Array  # of all parameters together, before clipping
  norms: Norms
  ok: Array  # whether loss and gradient are finite; if not, the step changes no parameters


class Layout(NamedTuple):
  """The structure of a `StepMetrics`, and the shapes of its arrays in the order of `jax.tree.leaves`."""
  structure: jax.tree_util.PyTreeDef
  shapes: tuple[tuple[int, ...], ...]


@jax.tree_util.register_pytree_node_class
class Packed:
  """The arrays of a `StepMetrics`, raveled and concatenated to `values [K]` f32."""

  def __init__(self, values: Array, layout: Layout) -> None:
    self.values, self._layout = values, layout

  def unpack(self) -> StepMetrics:
    """Returns the metrics on the host; waits until the step is done."""
    values = np.asarray(self.values)
    leaves = []
    start = 0
    for shape in self._layout.shapes:  # `np.split` takes three times as long, in every step
      stop = start + math.prod(shape)
      leaves.append(values[start:stop].reshape(shape))
      start = stop
    return jax.tree.unflatten(self._layout.structure, leaves)

  def tree_flatten(self) -> tuple[tuple[Array], Layout]:
    return (self.values,), self._layout

  @classmethod
  def tree_unflatten(cls, layout: Layout, values: tuple[Array]) -> Packed:
    return cls(values[0], layout)


StepFn = Callable[[TrainState, Batch], tuple[TrainState, Packed]]  # the train step; it donates the state


def pack(metrics: StepMetrics) -> Packed:
  """Returns the metrics in one array; `ok` becomes 1 or 0."""
  leaves, structure = jax.tree.flatten(metrics)
  values = jnp.concatenate([x.astype(jnp.float32).ravel() for x in leaves])
  return Packed(values, Layout(structure, tuple(x.shape for x in leaves)))
