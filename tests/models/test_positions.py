"""Tests of learned position tables."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.config.schema import PositionResize, Positions
from vit_jax.models.vit import posemb
from vit_jax.models.vit.positions import Table


def test_a_2d_position_is_its_columns_half_and_its_rows_half() -> None:
  row, column = jnp.arange(2. * 4).reshape(2, 4), 100. + jnp.arange(3. * 4).reshape(3, 4)
  joined = posemb.joined(row, column, (2, 3), PositionResize.ALIGNED).reshape(2, 3, 8)
  for i in range(2):
    for j in range(3):
      np.testing.assert_array_equal(joined[i, j], jnp.concatenate([column[j], row[i]]))


@pytest.mark.parametrize('how', PositionResize)
@pytest.mark.parametrize('grid', [(7, 4), (3, 6)])
def test_resizing_a_2d_table_is_resizing_what_it_stands_for(how: PositionResize, grid: tuple[int, int]) -> None:
  row, column = jax.random.normal(jax.random.key(0), (3, 4)), jax.random.normal(jax.random.key(1), (5, 4))
  whole = posemb.resize(posemb.joined(row, column, (3, 5), how), (3, 5), grid, how)
  np.testing.assert_allclose(posemb.joined(row, column, grid, how), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('kind', [Positions.LEARNED, Positions.LEARNED2D])
@pytest.mark.parametrize('has_cls', [False, True])
def test_the_class_token_has_a_position_only_in_a_1d_table_and_registers_have_none(
    kind: Positions, has_cls: bool) -> None:
  table = Table(kind, (2, 3), 8, has_cls, PositionResize.ALIGNED)
  values = table.init(jax.random.key(0))
  patches = table.of_patches(values, (2, 3))
  whole = table.extended(values, patches, num_registers=2)
  assert table.exists and patches.shape == (6, 8) and whole.shape == (1, has_cls + 2 + 6, 8)
  np.testing.assert_array_equal(whole[0, has_cls + 2:], patches)
  np.testing.assert_array_equal(whole[0, has_cls:has_cls + 2], 0.)
  if has_cls:
    is_zero = bool((whole[0, 0] == 0.).all())
    assert is_zero is (kind is Positions.LEARNED2D)


def test_fixed_and_relative_positions_have_no_table() -> None:
  for kind in (Positions.SINCOS2D, Positions.NONE, Positions.RELATIVE):
    table = Table(kind, (2, 3), 8, True, PositionResize.ALIGNED)
    assert not table.exists
    np.testing.assert_array_equal(table.extended(None, jnp.ones((6, 8)), num_registers=0)[0, 0], 0.)
