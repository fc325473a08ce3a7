"""The arrays of a run: the state that one step passes to the next, and the metrics that a step returns.

Both are plain trees of arrays. The metrics of a step leave the devices as one array (`pack`), so that the host fetches
them in one transfer; the training loop unpacks them for its hooks.
"""
from __future__ import annotations

import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.core.types import Array, Extra, Mean, Params, PyTree


class TrainState(NamedTuple):
  """The arrays that one step passes to the next; no functions and no random keys.

  step: number of steps done, scalar i32.   opt: the optimizer's state.
  """
  step: Array
  params: Params
  opt: PyTree
  extra: Extra


class Norms(NamedTuple):
  """Euclidean norms by path name, a scalar, or `[L]` for stacked leaves: of the gradient, of the parameters before the
  step, and of their update."""
  grad: dict[str, Array]
  param: dict[str, Array]
  update: dict[str, Array]


class StepMetrics(NamedTuple):
  """The metrics of a step. `ok` is 0 if loss or gradient were not finite; parameters are not updated then."""
  means: dict[str, Mean]
  grad_norm: Array
  norms: Norms
  ok: Array


class Layout(NamedTuple):
  """The structure of metrics, and the shapes of their arrays."""
  structure: Any
  shapes: tuple[tuple[int, ...], ...]


@jax.tree_util.register_pytree_node_class
class Packed:
  """The arrays of a `StepMetrics` as one array, `values [K]` f32."""

  def __init__(self, values: Array, layout: Layout) -> None:
    self.values, self._layout = values, layout

  def unpack(self) -> StepMetrics:
    """Returns the metrics on the host; waits until the step is done."""
    values = np.asarray(self.values)
    parts = [values[place].reshape(shape) if len(shape) > 1 else values[place]
             for place, shape in zip(_places(self._layout), self._layout.shapes, strict=True)]
    return jax.tree.unflatten(self._layout.structure, parts)

  @property
  def means(self) -> dict[str, Mean]:
    """The means, on the host."""
    return self.unpack().means

  def tree_flatten(self) -> tuple[tuple[Array], Layout]:
    return (self.values,), self._layout

  @classmethod
  def tree_unflatten(cls, layout: Layout, values: tuple[Array]) -> Packed:
    return cls(values[0], layout)


def pack(metrics: StepMetrics) -> Packed:
  """Returns the metrics as one array; `ok` becomes 1 or 0."""
  leaves, structure = jax.tree.flatten(metrics)
  values = jnp.concatenate([x.astype(jnp.float32).ravel() for x in leaves])
  return Packed(values, Layout(structure, tuple(x.shape for x in leaves)))


@functools.lru_cache(4)
def _places(layout: Layout) -> list[Any]:
  """Returns where the arrays of a layout are in the one array: an index for a scalar, or a slice."""
  stops = list(itertools.accumulate(math.prod(shape) for shape in layout.shapes))
  return [slice(stop - math.prod(shape), stop) if shape else (stop - 1, ...)
          for stop, shape in zip(stops, layout.shapes, strict=True)]
