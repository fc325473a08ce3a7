"""Tests of the resizing of position embeddings."""
from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models import make_golden_positions as golden
from vit_jax.config.schema import PositionResize
from vit_jax.models.vit import interpolate

ALIGNED = PositionResize.ALIGNED
SQUARE = PositionResize.BICUBIC_ANTIALIAS_SQUARE
FOUND = np.load(pathlib.Path(__file__).with_name('golden_positions.npz'))

# The first six make the published loaders return zeros in the last row and column.
PAIRS = [
    (28, 48), (32, 16), (16, 30), (28, 14), (48, 24), (30, 15), (14, 24), (7, 12), (24, 14), (1, 5), (5, 1)]
resize = jax.jit(interpolate.resize, static_argnums=(1, 2, 3))  # one program for each shape, not five


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
  resized = resize(positions, (old, old), (new, new), ALIGNED)
  np.testing.assert_allclose(
      resized, align_corners(positions, (old, old), (new, new)), rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(resized[0], positions[0], rtol=1e-6)
  if new > 1:
    np.testing.assert_allclose(resized[-1], positions[-1], rtol=1e-6)


@pytest.mark.parametrize('old, new', [((2, 3), (5, 4)), ((7, 4), (3, 9))])
def test_resize_takes_grids_that_are_not_square(old: tuple[int, int], new: tuple[int, int]) -> None:
  positions = np.random.default_rng(0).normal(size=(old[0] * old[1], 5)).astype(np.float32)
  np.testing.assert_allclose(
      resize(positions, old, new, ALIGNED), align_corners(positions, old, new), rtol=1e-5, atol=1e-5)


def test_resize_at_equal_size_is_the_identity() -> None:
  positions = jax.random.normal(jax.random.key(0), (12, 5))
  for how in PositionResize:
    assert interpolate.resize(positions, (3, 4), (3, 4), how) is positions


@pytest.mark.parametrize('number', range(len(golden.GRIDS)))
@pytest.mark.parametrize('how', [how.value for how in PositionResize if how not in (ALIGNED, SQUARE)])
def test_the_other_conventions_are_those_of_pytorch_and_dino(how: str, number: int) -> None:
  old, new = golden.GRIDS[number]
  found = resize(golden.drawn(old), old, new, PositionResize(how))
  # 16 products of weights below 1.3 with values below 2, in f32 on both sides, and their f32 scale of coordinates
  np.testing.assert_allclose(found, FOUND[f'{how} {number}'], rtol=0, atol=5e-5)


def test_positions_that_keep_the_aspect_are_the_first_ones_of_a_square() -> None:
  positions = np.random.default_rng(0).normal(size=(16, 5)).astype(np.float32)
  square = resize(positions, (4, 4), (7, 7), PositionResize.BICUBIC_ANTIALIAS).reshape(7, 7, 5)
  found = resize(positions, (4, 4), (7, 3), SQUARE).reshape(7, 3, 5)
  np.testing.assert_allclose(found, square[:, :3], rtol=0, atol=1e-6)


@pytest.mark.parametrize('how', PositionResize)
def test_every_convention_keeps_what_is_the_same_everywhere(how: PositionResize) -> None:
  for old, new in ((14, 6), (14, 14), (7, 12), (24, 37), (16, 1)):
    np.testing.assert_allclose(interpolate.matrix(old, new, how).sum(1), 1., rtol=1e-6)


def test_the_offset_changes_a_side_that_keeps_its_length() -> None:
  positions = np.random.default_rng(0).normal(size=(12, 2)).astype(np.float32)
  plain, moved = (np.asarray(resize(positions, (3, 4), (3, 6), how)).reshape(3, 6, 2)
                  for how in (PositionResize.BICUBIC, PositionResize.BICUBIC_OFFSET))
  np.testing.assert_allclose(interpolate.matrix(3, 3, PositionResize.BICUBIC), np.eye(3), atol=1e-12)
  assert np.abs(plain - moved).max() > .01 and np.abs(interpolate.matrix(3, 3, PositionResize.BICUBIC_OFFSET)
                                                      - np.eye(3)).max() > .01


def test_no_sample_lies_beyond_the_last_entry() -> None:
  for old in range(2, 65):
    for new in range(2 + old % 3, 97, 3):
      matrix = interpolate.interpolation(old, new)
      np.testing.assert_allclose(matrix.sum(1), 1., rtol=1e-6)
      assert matrix[-1, -1] == 1. and (matrix >= 0).all()


def test_a_2d_position_is_its_columns_half_and_its_rows_half() -> None:
  row, column = jnp.arange(2. * 4).reshape(2, 4), 100. + jnp.arange(3. * 4).reshape(3, 4)
  joined = interpolate.joined(row, column, (2, 3), PositionResize.ALIGNED).reshape(2, 3, 8)
  for i in range(2):
    for j in range(3):
      np.testing.assert_array_equal(joined[i, j], jnp.concatenate([column[j], row[i]]))


@pytest.mark.parametrize('how', PositionResize)
@pytest.mark.parametrize('grid', [(7, 4), (3, 6)])
def test_resizing_a_2d_table_is_resizing_what_it_stands_for(how: PositionResize, grid: tuple[int, int]) -> None:
  row, column = jax.random.normal(jax.random.key(0), (3, 4)), jax.random.normal(jax.random.key(1), (5, 4))
  whole = resize(interpolate.joined(row, column, (3, 5), how), (3, 5), grid, how)
  np.testing.assert_allclose(interpolate.joined(row, column, grid, how), whole, rtol=1e-5, atol=1e-6)
