"""Mixup and cutmix against NumPy."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.data import make_golden_mixing as golden
from vit_jax.config import schema
from vit_jax.data.device import mix

mix_pairs = jax.jit(mix.mix_pairs, static_argnames='num_classes')


@pytest.fixture
def betas(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
  """Parameters of the Beta distributions that are drawn from; the draws are uniform, which compiles much faster."""
  seen: list[tuple[float, float]] = []

  def beta(key: jax.Array, a: float, b: float, dtype: type) -> jax.Array:
    seen.append((a, b))
    return jax.random.uniform(key, dtype=dtype)
  monkeypatch.setattr(jax.random, 'beta', beta)
  return seen


def batch_of(size: int) -> dict[str, jax.Array]:
  rng = np.random.default_rng(0)
  return {'image': jnp.array(rng.normal(size=(size, 4, 4, 3)), jnp.float32),
          'label': jnp.array(rng.integers(0, 7, size), jnp.int32)}


@pytest.mark.parametrize('size', [6, 7, 1])
def test_neighbors_are_mixed_and_the_odd_one_out_stays(size: int) -> None:
  batch = batch_of(size)
  out = mix_pairs(batch, .3, num_classes=7)
  image, labels = np.asarray(batch['image']), np.eye(7)[np.asarray(batch['label'])]
  for row in range(size):
    partner = row ^ 1 if row ^ 1 < size else row
    np.testing.assert_allclose(out['image'][row], .3 * image[row] + .7 * image[partner], atol=1e-6)
    np.testing.assert_allclose(out['labels'][row], .3 * labels[row] + .7 * labels[partner], atol=1e-6)
  np.testing.assert_array_equal(out['label'], batch['label'])


def test_labels_that_are_soft_already_are_mixed() -> None:
  batch = batch_of(6) | {'labels': jnp.array(np.random.default_rng(1).random((6, 7)), jnp.float32)}
  out = mix_pairs(batch, .25, num_classes=7)
  np.testing.assert_allclose(out['labels'][3], .25 * batch['labels'][3] + .75 * batch['labels'][2], rtol=1e-6)


def test_padding_is_not_mixed_into_examples() -> None:
  batch = batch_of(6) | {'mask': jnp.array([1., 1., 1., 0., 0., 0.])}
  out = mix_pairs(batch, .3, num_classes=7)
  np.testing.assert_array_equal(out['image'][2], batch['image'][2])
  np.testing.assert_array_equal(out['labels'][2], np.eye(7)[int(batch['label'][2])])
  assert not np.allclose(out['image'][0], batch['image'][0])


def test_lambda_follows_the_beta_distribution() -> None:
  one_hot = {'image': jnp.zeros((2, 1, 1, 3)), 'label': jnp.array([0, 1])}
  recipe = schema.Recipe(mixup=.5)
  draw = jax.jit(jax.vmap(lambda key: mix.mix(one_hot, key, recipe=recipe, num_classes=2)['labels'][0, 0]))
  drawn = np.asarray(draw(jax.random.split(jax.random.key(0), 4000)))
  assert drawn.mean() == pytest.approx(.5, abs=.02)
  assert drawn.var() == pytest.approx(1 / 8, abs=.01)  # 1 / (4 (2 alpha + 1))


def kept_boxes(num: int, size: tuple[int, int], alpha: float) -> np.ndarray:
  draw = jax.jit(jax.vmap(lambda key: mix.draw_kept(key, size, alpha=alpha)))
  return np.asarray(draw(jax.random.split(jax.random.key(0), num)))


def test_cutmix_takes_one_box_and_mixes_labels_by_its_area() -> None:
  batch = batch_of(6)
  kept = np.ones((4, 4), np.float32)
  kept[1:3, 2:4] = 0
  out = mix_pairs(batch, jnp.array(kept), num_classes=7)
  image, labels = np.asarray(batch['image']), np.eye(7)[np.asarray(batch['label'])]
  for row in range(6):
    np.testing.assert_array_equal(out['image'][row, 1:3, 2:4], image[row ^ 1, 1:3, 2:4])
    np.testing.assert_array_equal(np.asarray(out['image'][row])[kept > 0], image[row][kept > 0])
    np.testing.assert_allclose(out['labels'][row], .75 * labels[row] + .25 * labels[row ^ 1], atol=1e-6)


def test_padding_is_not_cut_into_examples() -> None:
  batch = batch_of(6) | {'mask': jnp.array([1., 1., 1., 0., 0., 0.])}
  out = mix_pairs(batch, jnp.zeros((4, 4)), num_classes=7)
  np.testing.assert_array_equal(out['image'][2], batch['image'][2])
  np.testing.assert_array_equal(out['image'][0], batch['image'][1])


def test_boxes_of_cutmix_are_rectangles_of_the_drawn_area(betas: list[tuple[float, float]]) -> None:
  kept = kept_boxes(600, (24, 37), alpha=.7)
  assert betas == [(.7, .7)]
  for one in kept[:200]:
    ys, xs = np.where(one == 0)
    if len(ys):
      assert (one[ys.min():ys.max() + 1, xs.min():xs.max() + 1] == 0).all()
      assert not (one.sum() + len(ys) - one.size)
  # Reference: the same definition in NumPy, with its own draws.
  rng, areas = np.random.default_rng(0), []
  for _ in range(4000):
    sides = np.floor(np.sqrt(1 - rng.uniform()) * np.array([24, 37]))
    center = np.array([rng.integers(24), rng.integers(37)])
    low, high = np.maximum(0, center - sides // 2), np.minimum([24, 37], center + sides // 2)
    areas.append(np.prod(high - low) / (24 * 37))
  drawn = 1 - kept.mean((1, 2))
  assert abs(drawn.mean() - np.mean(areas)) < .04
  np.testing.assert_allclose(np.quantile(drawn, [.25, .5, .75, .95]), np.quantile(areas, [.25, .5, .75, .95]), atol=.06)


def test_the_box_of_cutmix_has_the_area_that_lambda_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(jax.random, 'beta', lambda key, a, b, dtype: jnp.asarray(.75, dtype))
  kept = jax.jit(jax.vmap(lambda key: mix.draw_kept(key, (8, 8), alpha=1.)))(jax.random.split(jax.random.key(0), 8))
  assert int((kept == 0).sum((1, 2)).max()) == 16  # a quarter of 64, where the border cuts nothing off


def weights(recipes: tuple[schema.Recipe, ...], num: int) -> list[tuple[np.ndarray, np.ndarray]]:
  """Of pairs of a black and a white image, for each recipe: whether pixels are mixed, and the label's weight."""
  batch = {'image': jnp.stack([jnp.zeros((6, 6, 3)), jnp.ones((6, 6, 3))]), 'label': jnp.array([0, 1])}

  def one(key: jax.Array, recipe: schema.Recipe) -> tuple[jax.Array, jax.Array]:
    out = mix.mix(batch, key, recipe=recipe, num_classes=2)
    image = out['image'][0]
    return ((image > 0) & (image < 1)).any(), out['labels'][0, 0]

  every = jax.jit(jax.vmap(lambda key: [one(key, recipe) for recipe in recipes]))
  return jax.device_get(every(jax.random.split(jax.random.key(1), num)))


def test_the_recipe_chooses_between_mixup_cutmix_and_neither(betas: list[tuple[float, float]]) -> None:
  (mixed, weight), alone = weights((schema.Recipe(mixup=.8, cutmix=1., mix_probability=.75, cutmix_share=.4),
                                    schema.Recipe(cutmix=1.)), 600)
  assert betas == [(.8, .8), (1., 1.), (1., 1.)]
  assert abs(mixed.mean() - .75 * .6) < .08                 # mixup
  assert .2 < (weight == 1).mean() < .25 + .75 * .4 * .3    # neither, or a box without a pixel
  assert not alone[0].any() and alone[1].mean() < .9


@pytest.mark.usefixtures('betas')
def test_mixup_alone_is_what_it_was() -> None:
  batch, key = batch_of(6), jax.random.key(3)
  one = jax.jit(lambda batch, key: mix.mix(batch, key, recipe=schema.Recipe(mixup=.3), num_classes=7))(batch, key)
  two = mix_pairs(batch, jax.random.beta(key, .3, .3, dtype=jnp.float32), num_classes=7)
  np.testing.assert_array_equal(one['image'], two['image'])


def test_several_labels_are_mixed_as_their_sum() -> None:
  batch = {'image': jnp.zeros((2, 4, 4, 3)), 'label': jnp.array([0, 2]), 'label_list': jnp.array([[0, 1], [2, -1]])}
  labels = mix_pairs(batch, .75, num_classes=3)['labels']
  np.testing.assert_allclose(labels, [[.75, .75, .25], [.25, .25, .75]])


TIMM = np.load(golden.FILE)
GROUPED = schema.Recipe(mixup=.8, cutmix=1., mix_group=4)


def of_groups(recipe: schema.Recipe, num: int, keys: int) -> tuple[np.ndarray, np.ndarray]:
  """Of `num` rows, black and white in turns, for each key `[keys, num]`: whether pixels are mixed, the own weight."""
  image = jnp.broadcast_to((jnp.arange(num) % 2.)[:, None, None, None], (num, golden.PX, golden.PX, 3))
  batch = {'image': image, 'label': jnp.arange(num) % 2}

  def one(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    out = mix.mix(batch, key, recipe=recipe, num_classes=2)
    mixed = ((out['image'] > 0) & (out['image'] < 1)).any((1, 2, 3))
    return mixed, jnp.take_along_axis(out['labels'], batch['label'][:, None], 1)[:, 0]
  return jax.device_get(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(2), keys)))


@pytest.mark.slow(reason='7 s, to draw from Beta distributions; with uniform draws below')
def test_draws_of_groups_have_the_law_of_timm() -> None:
  mixed, weight = (values[:, ::4] for values in of_groups(GROUPED, 32, 250))
  # 2,000 groups against 20,000 of timm: standard deviations 0.012 of a share, at most 0.017 of a decile's probability.
  assert abs(mixed.mean() - (1 - TIMM['cutmix'])) < .05
  for chosen, deciles in ((mixed, TIMM['mixup']), (~mixed, TIMM['boxes'])):
    found = [(weight[chosen] <= at + 1e-6).mean() for at in deciles]
    np.testing.assert_allclose(found, np.arange(1, 10) / 10, atol=.07)
  neighbors = [np.corrcoef(weight[:, i], weight[:, i + 1])[0, 1] for i in range(7)]
  assert np.abs(neighbors).max() < .3  # five standard deviations of 250 pairs


def test_a_group_is_at_most_the_batch() -> None:
  assert [schema.num_groups(6, group) for group in (0, 2, 6, 64)] == [1, 3, 1, 1]


@pytest.mark.usefixtures('betas')
def test_each_group_of_the_global_batch_has_its_own_draw_on_any_number_of_devices() -> None:
  batch = {'image': batch_of(32)['image'], 'label': jnp.arange(32) % 2}
  step = jax.jit(lambda batch, key: mix.mix(batch, key, recipe=GROUPED, num_classes=2))
  alone = step(batch, jax.random.key(5))
  own = np.take_along_axis(np.asarray(alone['labels']), np.asarray(batch['label'])[:, None], 1).reshape(8, 4)
  assert (own == own[:, :1]).all() and len(set(own[:, 0])) >= 4
  rows = NamedSharding(Mesh(np.array(jax.devices()), ('data',)), PartitionSpec('data'))
  spread = step(jax.device_put(batch, rows), jax.random.key(5))
  for name in ('image', 'labels'):
    np.testing.assert_allclose(spread[name], alone[name], atol=1e-6)


def test_padding_is_not_mixed_in_groups() -> None:
  batch = batch_of(8) | {'mask': jnp.array([1.] * 5 + [0.] * 3)}
  out = mix_pairs(batch, jnp.array([.25, .5]), num_classes=7)
  image = np.asarray(batch['image'])
  np.testing.assert_allclose(out['image'][0], .25 * image[0] + .75 * image[1], atol=1e-6)
  np.testing.assert_array_equal(out['image'][4], image[4])
