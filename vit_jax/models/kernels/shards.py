"""Which axes of a mesh the parts of a kernel's arrays are divided over; XLA cannot partition a kernel by itself."""
from __future__ import annotations

from collections.abc import Sequence
from math import prod

from jax.sharding import AbstractMesh


def dividing(mesh: AbstractMesh, axes: Sequence[str], size: int) -> tuple[str, ...] | None:
  """The axes that the mesh has, if it has any and all of them together divide `size`."""
  known = tuple(axis for axis in axes if axis in mesh.axis_names)
  return known if known and size % prod(mesh.shape[axis] for axis in known) == 0 else None
