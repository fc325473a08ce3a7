"""The arrays of a run: the state that one step passes to the next (`TrainState`), and its metrics (`StepMetrics`).

Both are plain trees of arrays. A step packs its metrics into one array (`pack`), which the host fetches in one
transfer; the training loop unpacks this array for the hooks (`Packed.unpack`).
"""
from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.core.types import Array, Batch, Extra, Mean, Params, PyTree


class TrainState(NamedTuple):
  """The arrays that one step passes to the next; no functions and no random keys.

  step: number of steps done, scalar i32.   opt: state of the optimizer.   extra: state of the objective, see `Extra`.
  """
  step: Array
  params: Params
  opt: PyTree
  extra: Extra


class Norms(NamedTuple):
  """Euclidean norms by path name: a scalar for each leaf, or an array `[L]` for a leaf that stacks the L layers."""
  grad: dict[str, Array]
  param: dict[str, Array]  # before the step
  update: dict[str, Array]


class StepMetrics(NamedTuple):
  """The metrics of a step. If loss or gradient are not finite, `ok` is false, and the step changes no parameters."""
  means: dict[str, Mean]
  grad_norm: Array
  norms: Norms
  ok: Array


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
    leaves = [values[index].reshape(shape)
              for index, shape in zip(_indexes(self._layout), self._layout.shapes, strict=True)]
    return jax.tree.unflatten(self._layout.structure, leaves)

  @property
  def means(self) -> dict[str, Mean]:
    """The means on the host; waits until the step is done."""
    return self.unpack().means

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


@functools.lru_cache(4)
def _indexes(layout: Layout) -> list[Any]:
  """Returns the index of each array in `Packed.values`: a slice, or for a scalar `(i, ...)`, which gives shape []."""
  stops = itertools.accumulate(math.prod(shape) for shape in layout.shapes)
  return [slice(stop - math.prod(shape), stop) if shape else (stop - 1, ...)
          for stop, shape in zip(stops, layout.shapes, strict=True)]
