"""Resizes position embeddings between grids of any shape, and patch kernels to another patch size.

All operations are linear, with one matrix per axis, and are computed in float64.
"""
from __future__ import annotations

import numpy as np

from vit_jax.config.schema import Frequencies, PositionResize, SinCos
from vit_jax.core.types import HostArray
from vit_jax.models.vit import interpolate
from vit_jax.models.vit.positions import sincos2d, sincos2d_mae
from vit_jax.weights.infer import Leaves
from vit_jax.weights.network import Line


def positions(table: HostArray, old_grid: tuple[int, int], new_grid: tuple[int, int],
              how: PositionResize) -> HostArray:
  """Resizes position embeddings to another grid in f64, as the forward pass does.

  Args:
    table: `[h * w, D]` f32 of `old_grid`, patch tokens only.
    old_grid: (h, w).
    new_grid: (h, w).
    how: the program whose interpolation is used. Published loaders make a row of zeros of 28 -> 48; ALIGNED does not.

  Returns:
    `[h' * w', D]` f32.
  """
  if old_grid == new_grid:
    return table
  rows, columns = interpolate.both(old_grid, new_grid, how)
  grid_hwD = table.reshape(*old_grid, -1).astype(np.float64)
  resized = np.einsum('ih,jw,hwd->ijd', rows, columns, grid_hwD, optimize=True)
  return resized.reshape(-1, table.shape[-1]).astype(np.float32)


def fixed(positions: SinCos, grid: tuple[int, int], width: int) -> HostArray:
  """Returns the fixed positions of a grid (h, w), `[h * w, width]` f32."""
  make = sincos2d if positions.frequencies is Frequencies.BIG_VISION else sincos2d_mae
  return make(grid, width).astype(np.float32)


def tables(leaves: Leaves, old: tuple[int, int], new: tuple[int, int], *, num_first: int,
           how: PositionResize) -> tuple[Leaves, list[Line]]:
  """Resizes the learned positions of a network, at the stem or in the blocks; also returns the report of changes.

  Args:
    leaves: by path name.
    old: grid (h, w) of the positions.
    new: grid (h, w) to resize to.
    num_first: number of rows before those of the patch tokens; they stay unchanged.
    how: the program whose interpolation is used.
  """
  leaves, lines = dict(leaves), []
  for name in ('backbone/positions', 'backbone/blocks/positions'):
    if name in leaves:
      stacked = np.asarray(leaves[name])
      found = [np.concatenate([table[:num_first], positions(table[num_first:], old, new, how)])
               for table in stacked.reshape(-1, *stacked.shape[-2:])]
      leaves[name] = np.stack(found).reshape(*stacked.shape[:-2], *found[0].shape)
      lines.append(Line(name, 'resized', f'{old[0]} x {old[1]} to {new[0]} x {new[1]} tokens, {how.value}'))
  return leaves, lines


def patches(kernel: HostArray, new: int) -> HostArray:
  """Resizes a patch kernel so that its outputs for resized patches match those of the old kernel for the original ones.

  Returns the least-squares solution w' of `<B x, w'> = <x, w>` for all patches x, with B their bilinear resize: `w' =
  pinv(B^T) w` (FlexiViT, arXiv 2212.08013, section 3.4). Exact where `new` is the larger side.

  Args:
    kernel: `[P, P, C, D]` f32.
    new: the new side, px.

  Returns:
    `[new, new, C, D]` f32.
  """
  side = kernel.shape[0]
  if side == new:
    return kernel
  # The pseudo-inverse of a Kronecker product is the product of the factors' pseudo-inverses.
  inverse = np.linalg.pinv(interpolate.bilinear(side, new).T)
  return np.einsum('ip,jq,pqcd->ijcd', inverse, inverse, kernel.astype(np.float64), optimize=True).astype(np.float32)


def channels(kernel: HostArray, num: int) -> HostArray:
  """Returns a first kernel `[h, w, 3, D]` for images of `num` channels, `[h, w, num, D]`, as timm adapts it.

  For one channel it is the sum over RGB, so that a gray image gives what the same image in RGB gave. For others RGB is
  repeated and multiplied by 3 / num, which keeps the size of the outputs (timm, `adapt_input_conv`).
  """
  if num == 1:
    return kernel.sum(2, keepdims=True, dtype=kernel.dtype)
  return np.tile(kernel, (1, 1, -(-num // 3), 1))[:, :, :num] * kernel.dtype.type(3 / num)
