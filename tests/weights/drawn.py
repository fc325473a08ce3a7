"""Random tensors that depend on their name and shape alone, so that a reference need not be stored to be had again.

Needs numpy only: `make_golden.py` runs it beside PyTorch, the tests beside jax.
"""
from __future__ import annotations

import math
import zlib

import numpy as np


def tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
  """f32: near 1 for scales of norms, small for other vectors, and of about unit gain for matrices and kernels."""
  unit = np.random.default_rng(zlib.crc32(name.encode())).random(shape) * 2. - 1.
  is_scale = len(shape) == 1 and name.endswith(('weight', 'scale', 'gamma', 'lambda1'))
  if is_scale or name.endswith(('running_var', 'norm/var')):
    return (1. + .2 * unit).astype(np.float32)
  if len(shape) <= 1 or 'token' in name or 'embed' in name.rsplit('.', 1)[-1]:
    return (.3 * unit).astype(np.float32)
  is_torch = name.endswith('weight')
  fan_in = math.prod(shape[1:]) if is_torch else math.prod(shape[:-1])
  return (1.7 / math.sqrt(fan_in) * unit).astype(np.float32)


def image(px: int, number: int = 2) -> np.ndarray:
  """`[B, px, px, 3]` f32 in [-1, 1]."""
  return (np.random.default_rng(0).random((number, px, px, 3)) * 2. - 1.).astype(np.float32)


def decoder_positions(grid: int, width: int) -> np.ndarray:
  """MAE's fixed table with a zero row first, `[1, 1 + grid^2, width]`: x in the first half of the channels, then y."""
  quarter = width // 4
  omega = 10_000. ** -(np.arange(quarter) / quarter)
  rows = [np.zeros(width)]
  for y in range(grid):
    for x in range(grid):
      rows.append(np.concatenate([f(at * omega) for at in (x, y) for f in (np.sin, np.cos)]))
  return np.stack(rows)[None].astype(np.float32)
