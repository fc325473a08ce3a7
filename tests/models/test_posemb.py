"""Tests of fixed position embeddings and of resizing."""
from __future__ import annotations

import math
from collections.abc import Callable

import jax
import numpy as np
import pytest

from vit_jax.models import posemb

# The first six make the published loaders return zeros in the last row and column.
PAIRS = [
    (28, 48), (32, 16), (16, 30), (28, 14), (48, 24), (30, 15), (14, 24), (7, 12), (24, 14), (1, 5), (5, 1)]


def align_corners(positions: np.ndarray, old: tuple[int, int], new: tuple[int, int]) -> np.ndarray:
  """Bilinear interpolation in float64: linear along columns, then along rows."""
  grid = positions.astype(np.float64).reshape(*old, -1)
  for axis in (0, 1):
    at = np.linspace(0, old[axis] - 1, new[axis])
    along = lambda line, at=at: np.interp(at, np.arange(len(line)), line)
    grid = np.apply_along_axis(along, axis, grid)
  return grid.reshape(new[0] * new[1], -1)


@pytest.mark.parametrize('old, new', PAIRS)
def test_resize_is_bilinear_with_aligned_corners(old: int, new: int) -> None:
  positions = np.random.default_rng(0).normal(size=(old * old, 5)).astype(np.float32)
  resized = posemb.resize(positions, (old, old), (new, new))
  np.testing.assert_allclose(
      resized, align_corners(positions, (old, old), (new, new)), rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(resized[0], positions[0], rtol=1e-6)
  if new > 1:
    np.testing.assert_allclose(resized[-1], positions[-1], rtol=1e-6)


@pytest.mark.parametrize('old, new', [((2, 3), (5, 4)), ((7, 4), (3, 9))])
def test_resize_takes_grids_that_are_not_square(old: tuple[int, int], new: tuple[int, int]) -> None:
  positions = np.random.default_rng(0).normal(size=(old[0] * old[1], 5)).astype(np.float32)
  np.testing.assert_allclose(
      posemb.resize(positions, old, new), align_corners(positions, old, new), rtol=1e-5, atol=1e-5)


def test_resize_at_equal_size_is_the_identity() -> None:
  positions = jax.random.normal(jax.random.key(0), (12, 5))
  assert posemb.resize(positions, (3, 4), (3, 4)) is positions


def test_no_sample_lies_beyond_the_last_entry() -> None:
  for old in range(2, 65):
    for new in range(2, 97):
      matrix = posemb.interpolation(old, new)
      np.testing.assert_allclose(matrix.sum(1), 1., rtol=1e-6)
      assert matrix[-1, -1] == 1. and (matrix >= 0).all()


@pytest.mark.parametrize(('embed', 'steps'), [(posemb.sincos2d, 3), (posemb.sincos2d_mae, 4)])
def test_sincos_is_the_published_formula(embed: Callable[..., np.ndarray], steps: int) -> None:
  table = embed((3, 5), 16).reshape(3, 5, 16)
  for y in range(3):
    for x in range(5):
      omega = [10_000 ** (-j / steps) for j in range(4)]
      expected = [f(p * o) for p in (x, y) for f in (math.sin, math.cos) for o in omega]
      np.testing.assert_allclose(table[y, x], expected, rtol=1e-5, atol=1e-6)
