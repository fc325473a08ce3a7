"""What Pallas kernels for TPUs share: the tiles of on-chip memory, and a product within a kernel."""
from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from vit_jax.core.types import Array

LANES = 128
ROWS = 16
"""Rows in a tile of bf16, and a multiple of those in one of f32."""


def padded(size: int, multiple: int) -> int:
  """The least multiple that is not smaller."""
  return -(-size // multiple) * multiple


def dot(a: Array, b: Array, of_a: int, of_b: int) -> Array:
  """The product over axis `of_a` of `a` and `of_b` of `b`, f32."""
  exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
  return lax.dot_general(a, b, (((of_a,), (of_b,)), ((), ())), precision=exact, preferred_element_type=jnp.float32)
