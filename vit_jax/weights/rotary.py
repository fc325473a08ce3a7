"""The order of the channels of a head that rotary positions rotate, which differs between formats.

Here channel j is rotated with channel `j + K / 2`; the first K / 4 pairs are rotated by the column, the others by the
row. Queries and keys of a file whose program pairs other channels are reordered when they are read and written: their
products stay the same, and every bit is kept.
"""
from __future__ import annotations

import re

import numpy as np

from vit_jax.config import schema
from vit_jax.core.types import HostArray
from vit_jax.weights.infer import Leaves

HALVES_YX, PAIRS_YX, PAIRS_XY, PAIRS = 'halves_yx', 'pairs_yx', 'pairs_xy', 'pairs'
"""DINOv3: channel j with j + K / 2, rows first. EVA-02: neighbors, rows first. Perception Encoder, and RoPE-ViT with
numbers that no grid scales: columns first. With learned frequencies: neighbors, each pair with its own."""
_ROTATED = r'backbone/blocks/attn/(query|key)(_norm)?/(kernel|bias|scale)'


def order(model: schema.Model) -> str:
  """Returns the order that files of other programs have for this network; '' if nothing is rotated."""
  if not isinstance(model, schema.ViT) or not isinstance(model.positions, schema.Rotary):
    return ''
  if isinstance(model.positions.coordinates, schema.UnitInterval):
    return HALVES_YX
  if model.positions.mixed:
    return PAIRS
  return PAIRS_XY if model.norm_before or not model.positions.coordinates.grid else PAIRS_YX


def channels(width: int, how: str) -> HostArray:
  """Returns for each of the `width` channels of a head here its number in a file with the order `how`."""
  quarter = width // 4
  columns, rows = np.arange(quarter), np.arange(quarter)
  if how == HALVES_YX:
    first = np.concatenate([columns + quarter, rows])
    return np.concatenate([first, first + 2 * quarter])
  if how == PAIRS:
    return np.concatenate([2 * np.arange(2 * quarter), 2 * np.arange(2 * quarter) + 1])
  first = 2 * np.concatenate([columns, rows + quarter] if how == PAIRS_XY else [columns + quarter, rows])
  return np.concatenate([first, first + 1])


def reordered(leaves: Leaves, how: str, *, back: bool = False) -> Leaves:
  """Returns the leaves with the channels of queries and keys as here, or with `back` as in the file.

  Args:
    leaves: attention kernels split into heads, `[L, D, A, K]`.
    how: the order in the file; '' returns `leaves`.
    back: from here to the file.
  """
  if not how:
    return leaves
  found = dict(leaves)
  for name, leaf in leaves.items():
    if re.fullmatch(_ROTATED, name):
      own = channels(leaf.shape[-1], how)
      found[name] = np.ascontiguousarray(leaf[..., np.argsort(own) if back else own])
  return found
