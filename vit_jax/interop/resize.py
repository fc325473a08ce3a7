"""Parameters for other images: position grids of any shape to any other, and patch kernels of another side.

All of it is linear, a matrix an axis, computed in float64.
"""
from __future__ import annotations

import numpy as np

from vit_jax.config.schema import Interpolation
from vit_jax.core.types import HostArray, UserError
from vit_jax.models import posemb

CUBIC = -.5  # a of Keys' kernel, as Pillow and PyTorch's antialiased resize have it


def positions(table: HostArray, old_grid: tuple[int, int], new_grid: tuple[int, int],
              how: Interpolation) -> HostArray:
  """Position embeddings of another grid.

  Args:
    table: `[h * w, D]` f32 of `old_grid`, patch tokens only.
    old_grid: (h, w).
    new_grid: (h, w).
    how: BILINEAR: with aligned corners and no antialiasing, as the published JAX loaders mean it (and without the row
      of zeros that they make of 28 -> 48 and others). BICUBIC: antialiased, pixel borders aligned, as timm has it.

  Returns:
    `[h' * w', D]` f32.

  Raises:
    UserError: `how` is something else.
  """
  if old_grid == new_grid:
    return table
  match how:
    case Interpolation.BILINEAR:
      rows, columns = (posemb.interpolation(o, n) for o, n in zip(old_grid, new_grid, strict=True))
    case Interpolation.BICUBIC:
      rows, columns = (bicubic(o, n) for o, n in zip(old_grid, new_grid, strict=True))
    case _:
      raise UserError(f'init_interpolation={how.value}: positions are resized by bilinear or bicubic')
  grid_hwD = table.reshape(*old_grid, -1).astype(np.float64)
  resized = np.einsum('ih,jw,hwd->ijd', rows.astype(np.float64), columns.astype(np.float64), grid_hwD, optimize=True)
  return resized.reshape(-1, table.shape[-1]).astype(np.float32)


def bicubic(old: int, new: int) -> HostArray:
  """Matrix `[new, old]` f64 of cubic interpolation (Keys 1981), as wide as a new pixel where that is the wider one.

  Sample i lies at `(i + 1/2) old / new - 1/2`. Weights beyond the ends are left out and the others made to sum to 1.
  """
  scale = max(old / new, 1.)
  centers = (np.arange(new) + .5) * old / new - .5
  x = np.abs(np.arange(old)[None] - centers[:, None]) / scale
  near = ((CUBIC + 2) * x - (CUBIC + 3)) * x * x + 1
  far = ((x - 5) * x + 8) * x * CUBIC - 4 * CUBIC
  weights = np.where(x < 1, near, np.where(x < 2, far, 0.))
  return weights / weights.sum(1, keepdims=True)


def bilinear(old: int, new: int) -> HostArray:
  """Matrix `[new, old]` f64 of linear interpolation, pixel borders aligned, without antialiasing."""
  centers = np.clip((np.arange(new) + .5) * old / new - .5, 0, old - 1)
  return np.maximum(0., 1. - np.abs(np.arange(old)[None] - centers[:, None]))


def patches(kernel: HostArray, new: int) -> HostArray:
  """A patch kernel of another side that answers enlarged patches as the old one answers the small ones.

  The least-squares solution w' of `<B x, w'> = <x, w>` for all patches x, with B their bilinear resize: `w' =
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
  # Of a Kronecker product the pseudo-inverse is that of its factors.
  inverse = np.linalg.pinv(bilinear(side, new).T)
  return np.einsum('ip,jq,pqcd->ijcd', inverse, inverse, kernel.astype(np.float64), optimize=True).astype(np.float32)
