"""Matrices for an unknown number of tokens are those for a known one."""
from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.config.schema import PositionResize
from vit_jax.models.vit import interpolate

SIZES = ((14, 9), (7, 30), (16, 1), (37, 16))


@functools.cache
def matrices() -> dict[PositionResize, list[jax.Array]]:
  """Of all conventions, from one program."""
  make = jax.jit(lambda is_own: {how.name: [
      interpolate.traced_matrix(jnp.arange(new), old, new, how, is_same=is_own) for old, new in SIZES]
                                 for how in PositionResize})
  return {PositionResize[name]: found for name, found in make(jnp.zeros((), jnp.int32)).items()}


@pytest.mark.parametrize('how', PositionResize)
def test_each_convention_has_the_matrix_of_known_sizes(how: PositionResize) -> None:
  for (old, new), found in zip(SIZES, matrices()[how], strict=True):
    # weights up to 1 in f32, sums of at most 10 products, and antialiased a quotient
    np.testing.assert_allclose(found, interpolate.matrix(old, new, how), rtol=0, atol=2e-6)


def test_the_offset_of_dino_leaves_a_grid_of_its_own_size_alone() -> None:
  own = interpolate.is_same_grid((14, 9), (14, 9))
  assert int(own) == 1 and int(interpolate.is_same_grid((14, 9), (14, 8))) == 0
  make = jax.jit(lambda is_own: interpolate.traced_matrix(jnp.arange(14), 14, 14, PositionResize.BICUBIC_OFFSET,
                                                          is_same=is_own))
  np.testing.assert_array_equal(make(own), np.eye(14))
  other = make(jnp.zeros((), jnp.int32))
  assert np.abs(other - np.eye(14)).max() > .01


def test_a_grid_is_free_if_a_side_is_no_integer() -> None:
  assert not interpolate.is_free((3, 4)) and interpolate.is_free((3, jnp.arange(2)))
