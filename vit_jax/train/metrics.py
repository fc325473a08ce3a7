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


@jax.tree_util.register_pytree_node_class
class Packed:
  """The arrays of a `StepMetrics` as one array, `values [K]` f32; `layout` is their structure and shapes."""

  def __init__(self, values: Array, layout: tuple[Any, tuple[tuple[int, ...], ...]]) -> None:
    self.values, self._layout = values, layout

  def unpack(self) -> StepMetrics:
    """Returns the metrics on the host; waits until the step is done."""
    structure, shapes = self._layout
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    parts = np.split(np.asarray(self.values), ends[:-1])
    return jax.tree.unflatten(structure, [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)])

  def tree_flatten(self) -> tuple[tuple[Array], tuple[Any, tuple[tuple[int, ...], ...]]]:
    return (self.values,), self._layout

  @classmethod
  def tree_unflatten(cls, layout: tuple[Any, tuple[tuple[int, ...], ...]], values: tuple[Array]) -> Packed:
    return cls(values[0], layout)


def pack(metrics: StepMetrics) -> Packed:
  """Returns the metrics as one array; `ok` becomes 1 or 0."""
  leaves, structure = jax.tree.flatten(metrics)
  values = jnp.concatenate([x.astype(jnp.float32).ravel() for x in leaves])
  return Packed(values, (structure, tuple(x.shape for x in leaves)))
