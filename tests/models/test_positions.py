"""Tests of the kinds of positions."""
from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.config import schema
from vit_jax.config.schema import Pool, Positions
from vit_jax.models.vit import positions
from vit_jax.models.vit.positions import PositionEmbedding

MODEL = schema.ViT(patch=8, width=8, heads=2, mlp=16, depth=1)


def embedding(**settings: object) -> PositionEmbedding:
  return PositionEmbedding(schema.ViT(**{**vars(MODEL), **settings}), (2, 3))


@pytest.mark.parametrize('kind', [Positions.LEARNED, Positions.LEARNED2D])
@pytest.mark.parametrize('pool', [Pool.CLS, Pool.MEAN])
def test_the_class_token_has_a_position_only_in_a_1d_table_and_registers_have_none(kind: Positions, pool: Pool) -> None:
  has_cls, table = pool.has_class_token, embedding(positions=kind, pool=pool, registers=2)
  values = table.init(jax.random.key(0))
  patches = table.of_patches(values, (2, 3))
  complete = table.of_sequence(values, patches)
  assert patches.shape == (6, 8) and complete.shape == (1, has_cls + 2 + 6, 8)
  np.testing.assert_array_equal(complete[0, has_cls + 2:], patches)
  np.testing.assert_array_equal(complete[0, has_cls:has_cls + 2], 0.)
  if has_cls:
    is_zero = bool((complete[0, 0] == 0.).all())
    assert is_zero is (kind is Positions.LEARNED2D)


def test_fixed_and_relative_positions_have_no_table() -> None:
  for kind in (Positions.SINCOS2D, Positions.NONE, Positions.RELATIVE):
    assert not kind.is_learned
    np.testing.assert_array_equal(embedding(positions=kind).of_sequence(None, jnp.ones((6, 8)))[0, 0], 0.)


@pytest.mark.parametrize(('embed', 'steps'), [(positions.sincos2d, 3), (positions.sincos2d_mae, 4)])
def test_sincos_is_the_published_formula(embed: Callable[..., np.ndarray], steps: int) -> None:
  table = embed((3, 5), 16).reshape(3, 5, 16)
  for y in range(3):
    for x in range(5):
      omega = [10_000 ** (-j / steps) for j in range(4)]
      expected = [f(p * o) for p in (x, y) for f in (math.sin, math.cos) for o in omega]
      np.testing.assert_allclose(table[y, x], expected, rtol=1e-5, atol=1e-6)
