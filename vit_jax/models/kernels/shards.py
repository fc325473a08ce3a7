"""What the choices of kernels share: how a mesh divides arrays, which XLA cannot do for a kernel, and a line of log."""
from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from math import prod

from jax.sharding import AbstractMesh

log = logging.getLogger('vit_jax.models')


def dividing(mesh: AbstractMesh, axes: Sequence[str], size: int) -> tuple[str, ...] | None:
  """The axes that the mesh has, if it has any and all of them together divide `size`."""
  known = tuple(axis for axis in axes if axis in mesh.axis_names)
  return known if known and size % prod(mesh.shape[axis] for axis in known) == 0 else None


@functools.cache
def log_once(text: str) -> None:
  """Logs a text that each block would log again while it is traced."""
  log.info('%s', text)
