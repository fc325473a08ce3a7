"""Tests of the kinds of positions."""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
import vits

from vit_jax.config import schema
from vit_jax.config.schema import Pool, Positions
from vit_jax.core import implementation
from vit_jax.core.errors import UserError
from vit_jax.models.vit import positions, rotary, vit

MODEL = schema.ViT(patch=8, width=8, heads=2, mlp=schema.Mlp(16), depth=1)


def made(model: schema.ViT, grid: tuple[int, int]) -> positions.NoPositions:
  found: positions.NoPositions = implementation.make(model.positions, model=model, grid=grid)
  return found


def embedding(**settings: object) -> positions.NoPositions:
  return made(dataclasses.replace(MODEL, **settings), (2, 3))


@pytest.mark.parametrize('kind', [schema.Learned(), schema.Learned2d()], ids=['1d', '2d'])
@pytest.mark.parametrize('pool', [schema.ClassToken(), schema.Mean()], ids=['class token', 'mean'])
def test_the_class_token_has_a_position_only_in_a_1d_table_and_registers_have_none(kind: Positions, pool: Pool) -> None:
  has_cls, table = pool.class_token, embedding(positions=kind, pool=pool, registers=2)
  values = programs.draw(jax.eval_shape(table.init, jax.random.key(0)))
  patches, complete = jax.jit(lambda v: (p := table.of_patches(v, (2, 3)), table.of_sequence(v, p)))(values)
  assert patches.shape == (6, 8) and complete.shape == (1, has_cls + 2 + 6, 8)
  np.testing.assert_array_equal(complete[0, has_cls + 2:], patches)
  np.testing.assert_array_equal(complete[0, has_cls:has_cls + 2], 0.)
  if has_cls:
    is_zero = bool((complete[0, 0] == 0.).all())
    assert is_zero is isinstance(kind, schema.Learned2d)


def test_fixed_and_relative_positions_have_no_table() -> None:
  for kind in (schema.SinCos(), schema.NoPositions(), schema.Relative()):
    assert not kind.has_table and embedding(positions=kind).init(jax.random.key(0)) is None
    np.testing.assert_array_equal(embedding(positions=kind).of_sequence(None, jnp.ones((6, 8)))[0, 0], 0.)


@pytest.mark.parametrize(('embed', 'steps'), [(positions.sincos2d, 3), (positions.sincos2d_mae, 4)])
def test_sincos_is_the_published_formula(embed: Callable[..., np.ndarray], steps: int) -> None:
  table = embed((3, 5), 16).reshape(3, 5, 16)
  for y in range(3):
    for x in range(5):
      omega = [10_000 ** (-j / steps) for j in range(4)]
      expected = [f(p * o) for p in (x, y) for f in (math.sin, math.cos) for o in omega]
      np.testing.assert_allclose(table[y, x], expected, rtol=1e-5, atol=1e-6)


ROTARY = schema.ViT(patch=8, width=32, depth=2, heads=2, mlp=schema.Mlp(48), registers=1, positions=schema.Rotary())


def of_grid(grid: tuple[int, int], **settings: object) -> jax.Array:
  table = made(dataclasses.replace(ROTARY, positions=schema.Rotary(**settings)), grid)
  rotations = table.in_blocks(None, table.of_patches(None, grid))
  assert rotations is not None
  return rotations


@pytest.mark.parametrize('grid, base', [((3, 5), 100.), ((1, 4), 10_000.), ((6, 2), 30.)])
def test_rotary_positions_turn_pairs_of_channels_by_row_and_column(grid: tuple[int, int], base: float) -> None:
  num_patches, extra = grid[0] * grid[1], 2
  x = np.random.default_rng(0).normal(size=(2, extra + num_patches, 2, 16)).astype(np.float32)
  found = rotary.rotated(jnp.asarray(x), of_grid(grid, base=base))
  settings = schema.Rotary(base)
  expected = np.array([[vits.turned(x[b, extra:, a], grid, settings) for a in range(2)] for b in range(2)])
  # two products of values below 5 with cosines and sines that are rounded to f32
  np.testing.assert_allclose(found[:, extra:], expected.swapaxes(1, 2), rtol=0, atol=4 * 5 * 2 ** -24)
  np.testing.assert_array_equal(found[:, :extra], x[:, :extra])  # class token and register have no place


def test_training_shifts_and_scales_coordinates_alike_for_all_images() -> None:
  """In the unit interval, for tables with and without learned vectors; evaluation has the coordinates as they are."""
  still, moving = (schema.UnitInterval(*x) for x in ((), (.3, 1.5, 2.)))
  kinds = schema.Rotary(coordinates=moving), schema.LearnedRotary(coordinates=moving)
  plain, one, learned = (made(dataclasses.replace(ROTARY, positions=kind), (3, 5)) for kind in (
      schema.Rotary(coordinates=still), *kinds))
  assert [table.is_drawn for table in (plain, one, learned)] == [False, True, True]
  places = one.of_patches(None, (3, 5))
  want = plain.in_blocks(None, plain.of_patches(None, (3, 5)))
  np.testing.assert_allclose(one.in_blocks(None, places), want, rtol=0, atol=2e-5)  # angles of up to 2 pi in f32
  move = jax.jit(one.drawn)
  draws = []
  for seed in range(200):
    found = np.asarray(move(places, jax.random.key(seed)), np.float64)
    scale = np.ptp(found, axis=0) / np.ptp(np.asarray(places, np.float64), axis=0)
    np.testing.assert_allclose(found, (np.asarray(places) + (found.mean(0) / scale)) * scale, atol=2e-5)
    draws.append([*(found.mean(0) / scale / (2 * np.pi)), *np.log(scale)])
  x, y, log_x, log_y = np.array(draws).T
  for shift in (x, y):
    assert np.abs(shift).max() < .3001 and .14 < shift.std() < .2 and abs(np.corrcoef(x, y)[0, 1]) < .3
  for log in (log_x, log_y):
    wanted = (np.log(2)**2 + np.log(1.5)**2) / 3
    assert .9 < np.abs(log).max() < np.log(3.) and np.var(log) == pytest.approx(wanted, rel=.3)
  assert np.abs(log_x - log_y).max() < 2 * np.log(1.5) + 1e-5 and np.corrcoef(log_x, log_y)[0, 1] > .5
  both, key = jnp.concatenate([jnp.ones((15, 32)), places], axis=1), jax.random.key(7)
  np.testing.assert_array_equal(learned.drawn(both, key),
                                jnp.concatenate([both[:, :32], one.drawn(places, key)], axis=1))


@pytest.mark.slow(reason='2 s: a network, three times')
def test_a_network_in_training_has_moved_coordinates_and_else_those_of_the_grid() -> None:
  settings = dataclasses.replace(ROTARY, positions=schema.Rotary(coordinates=schema.UnitInterval(rescale=2.)))
  params, image, backbone = vits.parameters(ROTARY), vits.some_image(), vit.build(settings, vits.PX)

  def pooled(network: vit.ViT, train: bool, seed: int) -> jax.Array:
    return network.apply(params, {}, image, train=train, key=jax.random.key(seed))[0].pooled

  still = vit.build(dataclasses.replace(ROTARY, positions=schema.Rotary(coordinates=schema.UnitInterval())), vits.PX)
  np.testing.assert_allclose(pooled(backbone, False, 0), pooled(still, True, 0), atol=1e-4)
  one, again, other = (pooled(backbone, True, seed) for seed in (0, 0, 1))
  np.testing.assert_array_equal(one, again)
  assert jnp.abs(one - other).max() > 1e-3


@pytest.mark.slow(reason='2 s; the network in float64 has rotary positions')
def test_rotary_logits_depend_on_the_offset_of_two_patches_alone() -> None:
  query, key = np.random.default_rng(0).normal(size=(2, 16)).astype(np.float32)

  def logits(grid: tuple[int, int]) -> np.ndarray:
    places, extra = of_grid(grid), 2
    shape = (1, places.shape[1], 1, 16)
    q, k = (rotary.rotated(jnp.asarray(np.broadcast_to(x, shape)), places)[0, extra:, 0] for x in (query, key))
    return np.asarray(q @ k.T, np.float64).reshape(*grid, *grid)

  found, atol = logits((4, 6)), 16 * 9 * 2 ** -23  # 16 products of values below 3 accumulate rounding in f32
  np.testing.assert_allclose(found[1:, 2:, 1:, 2:], found[:-1, :-2, :-1, :-2], rtol=0, atol=atol)
  np.testing.assert_allclose(logits((2, 3)), found[:2, :3, :2, :3], rtol=0, atol=atol)  # the same in another grid
  for line in (found[0, 0, 0], found[0, 0, :, 0]):
    assert np.abs(line - line[0]).max() > .1


def test_a_network_with_rotary_positions_equals_numpy_in_float64() -> None:
  params, image = vits.parameters(ROTARY), vits.some_image()
  backbone = vit.build(ROTARY, vits.PX)
  features, _ = jax.jit(lambda p, x: backbone.apply(p, {}, x, train=False, key=None))(params, image)
  p64 = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  expected = np.stack([vits.numpy_vit(ROTARY, p64, one) for one in np.asarray(image, np.float64)])
  np.testing.assert_allclose(features.pooled, expected, rtol=1e-3, atol=1e-4)
  assert 'positions' not in params and jax.tree.structure(params) == jax.tree.structure(
      vits.shapes_of(dataclasses.replace(ROTARY, positions=schema.NoPositions())))

  @jax.jit
  def by_block(tokens: jax.Array) -> jax.Array:
    for layer in range(2):
      tokens, _ = backbone.block(params, tokens, layer=layer, capture=True)
    return backbone.finish(params, tokens, grid=vits.GRID).pooled

  np.testing.assert_allclose(by_block(backbone.begin(params, image)), features.pooled, rtol=1e-3, atol=1e-5)


@pytest.mark.slow(reason='2 s: two programs')
def test_some_patches_keep_their_rotary_positions_in_any_order() -> None:
  params, image, backbone = vits.parameters(ROTARY), vits.some_image(), vit.build(ROTARY, vits.PX)
  tokens, places = backbone.embed(params, image), backbone.positions(params, vits.GRID)
  encode = jax.jit(lambda t, p: backbone.encode(params, t, p, grid=vits.GRID, train=False, key=None))
  kept = jnp.asarray([[4, 1, 2], [0, 5, 3]] * 3)
  chosen = jnp.take_along_axis(tokens, kept[..., None], axis=1)
  found, reverse = encode(chosen, places[kept]), encode(chosen[:, ::-1], places[kept[:, ::-1]])
  np.testing.assert_allclose(found.pooled, reverse.pooled, rtol=1e-3, atol=1e-4)
  assert jnp.abs(found.pooled - encode(chosen, places[kept[:, ::-1]]).pooled).max() > 1e-3


@pytest.mark.parametrize('settings, said', [
    ({'width': 36, 'heads': 2}, 'model.width: expected a multiple of 4 channels for each of model.heads=2 with '
                                'model.positions=rotary, got 36.'),
    ({'block': schema.Axial(), 'pool': schema.Mean(), 'registers': 0},
     'model.positions: expected learned, learned2d, sincos or nopositions with model.block=axial, got rotary.'),
    ({'positions': schema.Rotary(1.)}, 'model.positions.base: expected more than 1, got 1.0.')])
def test_rotary_positions_are_refused_where_they_cannot_work(settings: dict[str, object], said: str) -> None:
  with pytest.raises(UserError) as error:
    vit.build(dataclasses.replace(ROTARY, **settings), vits.PX)
  assert said in str(error.value)
