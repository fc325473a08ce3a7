"""The metrics of a train step: one array on the devices, so that the host fetches them in one transfer."""
from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.core.types import Array, Mean


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
    values, parts, start = np.asarray(self.values), [], 0
    for shape in self._layout.shapes:
      stop = start + math.prod(shape)
      parts.append(values[start:stop].reshape(shape))
      start = stop
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
