"""How one tensor lies in a file, and here: a pair of functions each, exact inverses of one another.

`read` takes a file's array to ours, `write` ours to the file's. Neither computes: bits stay as they are. Kernels of
attention are `[D, A * K]` (and `[A * K, D]`) on our side of these functions where a file does not split heads.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from vit_jax.core.types import HostArray


class Layout(NamedTuple):
  """A way to lie."""
  read: Callable[[HostArray], HostArray]
  write: Callable[[HostArray], HostArray]


def _same(x: HostArray) -> HostArray:
  return x


def _transposed(x: HostArray) -> HostArray:
  return x.T


SAME = Layout(_same, _same)
DENSE = Layout(_transposed, _transposed)
"""PyTorch's `Linear.weight [out, in]`, against `[in, out]`."""
CONV = Layout(lambda x: x.transpose(2, 3, 1, 0), lambda x: x.transpose(3, 2, 0, 1))
"""PyTorch's `Conv2d.weight [out, in, height, width]`, against `[height, width, in, out]`."""
VECTOR = Layout(lambda x: x.reshape(-1), _same)
"""GroupNorm arrays that some files keep as `[1, 1, 1, C]`."""
POINT = Layout(lambda x: x.reshape(x.shape[-2:]), lambda x: x[None, None])
"""A dense layer kept as a convolution of side 1, `[1, 1, in, out]`."""
POINT_CONV = Layout(lambda x: x[:, :, 0, 0].T, lambda x: x.T[:, :, None, None])
"""Likewise in PyTorch, `[out, in, 1, 1]`."""
