"""Entries of the tables of names: our path, the name in a file, and the layout of the tensor.

A layout is a pair of inverse functions: `read` converts a file's array to ours, `write` ours to the file's. Both only
reorder elements, so all bits are kept. If a file does not split heads, our attention kernels are `[D, A * K]` and
`[A * K, D]` here.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from vit_jax.core.types import HostArray


class Layout(NamedTuple):
  """The two directions of a layout."""
  read: Callable[[HostArray], HostArray]
  write: Callable[[HostArray], HostArray]


def _same(x: HostArray) -> HostArray:
  return x


def _transposed(x: HostArray) -> HostArray:
  return x.T


SAME = Layout(_same, _same)
DENSE = Layout(_transposed, _transposed)
"""PyTorch's `Linear.weight [out, in]`; ours is `[in, out]`."""
CONV = Layout(lambda x: x.transpose(2, 3, 1, 0), lambda x: x.transpose(3, 2, 0, 1))
"""PyTorch's `Conv2d.weight [out, in, height, width]`; ours is `[height, width, in, out]`."""
VECTOR = Layout(lambda x: x.reshape(-1), _same)
"""GroupNorm arrays that some files store as `[1, 1, 1, C]`."""
POINT = Layout(lambda x: x.reshape(x.shape[-2:]), lambda x: x[None, None])
"""A dense layer stored as a 1×1 convolution, `[1, 1, in, out]`."""
POINT_CONV = Layout(lambda x: x[:, :, 0, 0].T, lambda x: x.T[:, :, None, None])
"""A dense layer stored as a 1×1 convolution in PyTorch, `[out, in, 1, 1]`."""


class Entry(NamedTuple):
  """One of our leaves and a tensor of a family: all of it, or part `part[0]` of `part[1]` equal parts of axis 0."""
  ours: str
  theirs: str
  layout: Layout
  part: tuple[int, int] = (0, 1)


Table = tuple[Entry, ...]


def layer(ours: str, theirs: str, *, layout: Layout = DENSE, part: tuple[int, int] = (0, 1)) -> list[Entry]:
  """Returns the entries for kernel and bias of a PyTorch layer."""
  return [Entry(f'{ours}/kernel', f'{theirs}.weight', layout, part),
          Entry(f'{ours}/bias', f'{theirs}.bias', SAME, part)]


def norm(ours: str, theirs: str) -> list[Entry]:
  """Returns the entries for scale and bias of a PyTorch norm."""
  return [Entry(f'{ours}/scale', f'{theirs}.weight', SAME), Entry(f'{ours}/bias', f'{theirs}.bias', SAME)]


def timm_unit(ours: str, theirs: str) -> list[Entry]:
  """Returns the entries of a bottleneck unit; only the first unit of a stage has `proj`."""
  found = [Entry(f'{ours}/{a}/kernel', f'{theirs}.{b}.weight', CONV)
           for a, b in (('conv1', 'conv1'), ('conv2', 'conv2'), ('conv3', 'conv3'), ('proj', 'downsample.conv'))]
  for a, b in (('norm1', 'norm1'), ('norm2', 'norm2'), ('norm3', 'norm3'), ('proj_norm', 'downsample.norm')):
    found += norm(f'{ours}/{a}', f'{theirs}.{b}')
  return found
