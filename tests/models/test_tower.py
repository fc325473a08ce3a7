"""Text towers: shapes, rules of sharding, causality, padding and sinusoids, by hand."""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import numpy as np
import programs
import pytest
import vits

from vit_jax.config.schema import Gelu, TextPool
from vit_jax.models import text_tower as tower
from vit_jax.models.text_tower import TextTower

CLIP = TextTower(vocabulary=37, length=6, width=8, depth=2, heads=2, mlp=12, gelu=Gelu.QUICK, norm_eps=1e-5,
                 pool=TextPool.END, is_causal=True, out_width=4, projection_bias=False)
SIGLIP = dataclasses.replace(CLIP, gelu=Gelu.TANH, pool=TextPool.LAST, is_causal=False, projection_bias=True)
TIPS = dataclasses.replace(CLIP, gelu=None, pool=TextPool.MEAN, is_causal=False, is_sinusoidal=True, out_width=0)
IDS = np.array([[3, 9, 36, 1, 1, 1], [5, 36, 2, 2, 2, 2]], np.int32)
ALL = np.ones(IDS.shape, bool)


@functools.cache
def compiled(one: TextTower) -> Callable[[jax.Array, jax.Array], jax.Array]:
  params = vits.drawn(jax.eval_shape(one.init, jax.random.key(1)), deviation=.5)
  return jax.jit(functools.partial(one.apply, params))


def vectors(one: TextTower, ids: np.ndarray, mask: np.ndarray = ALL) -> np.ndarray:
  return np.asarray(compiled(one)(ids, mask))


def changed(ids: np.ndarray, *entries: tuple[int | slice, int | slice, int]) -> np.ndarray:
  ids = ids.copy()
  for row, column, value in entries:
    ids[row, column] = value
  return ids


@pytest.mark.parametrize('one', [CLIP, SIGLIP, TIPS], ids=['clip', 'siglip', 'tips'])
def test_every_parameter_has_logical_axes(one: TextTower) -> None:
  specs = programs.specs(one.init, jax.random.key(0), on=programs.mesh(programs.MESHES['data=2,tensor=4']))
  assert tuple(specs['tokens']) == (None, 'tensor') and tuple(specs['norm']['scale']) == ()


def test_what_follows_the_end_of_a_text_does_not_matter_to_clip() -> None:
  other = changed(IDS, (0, slice(3, None), 7), (1, slice(2, None), 30))
  np.testing.assert_allclose(vectors(CLIP, other), vectors(CLIP, IDS), rtol=1e-6, atol=1e-6)
  assert np.abs(vectors(CLIP, changed(IDS, (0, 1, 8)))[0] - vectors(CLIP, IDS)[0]).max() > 1e-3


def test_padding_matters_to_siglip_and_not_to_tips() -> None:
  other, mask = changed(IDS, (0, slice(4, None), 7)), changed(ALL, (slice(None), slice(4, None), False))
  assert np.abs(vectors(SIGLIP, other)[0] - vectors(SIGLIP, IDS)[0]).max() > 1e-3
  np.testing.assert_allclose(vectors(TIPS, other, mask), vectors(TIPS, IDS, mask), rtol=1e-6, atol=1e-6)
  assert np.abs(vectors(TIPS, other)[0] - vectors(TIPS, IDS)[0]).max() > 1e-3


def test_an_empty_text_has_a_finite_vector() -> None:
  assert np.isfinite(vectors(TIPS, IDS, np.zeros_like(ALL))).all()


def test_sinusoids_are_those_of_the_formula() -> None:
  table = tower.sinusoids(5, 8)
  for position in range(5):
    for i in range(4):
      angle = position * 10_000. ** (-i / 3)
      np.testing.assert_allclose(table[position, [i, 4 + i]], [np.sin(angle), np.cos(angle)], atol=1e-6)
