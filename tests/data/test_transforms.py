"""Host transforms, and what is done on the device."""
from __future__ import annotations

import dataclasses
import functools
import pickle
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.data.images import encode, random_image
from vit_jax.config import schema
from vit_jax.data.device import mix
from vit_jax.data.device.prepare import augment_geometry, normalize, prepare_eval, prepare_train
from vit_jax.data.image import colors, geometry
from vit_jax.data.image import transform as transforms
from vit_jax.data.source import Record

RESIZE = schema.Recipe(crop=schema.Crop.RESIZE, flip=False)
EVERYTHING = schema.Recipe(crop=schema.Crop.RESIZE, shift_px=3, rotate_degrees=9., scale=.1, shear=.1,
                           mixup=.2)


def uniform(key: jax.Array, a: float, b: float, dtype: type) -> jax.Array:
  """In place of `jax.random.beta`, which compiles far longer; `test_mix.py` holds its parameters."""
  return jax.random.uniform(key, dtype=dtype)


def host_batch(size: int = 6) -> dict[str, np.ndarray]:
  return {'image': np.stack([random_image(i) for i in range(size)]), 'label': np.arange(size, dtype=np.int32) % 7,
          'box': np.tile(np.array([0, 0, 1, 1], np.float32), (size, 1)), 'bad': np.zeros(size, bool),
          'index': np.arange(size, dtype=np.int32)}


def test_training_examples_are_the_part_of_the_picture_that_the_box_says() -> None:
  image = random_image(0, height=60, width=80)
  transform = transforms.train_transform(schema.Recipe(), (8, 10))
  mirrored = set()
  for seed in range(20):
    example = transform(Record(encode(image), (3,)), np.random.default_rng(seed))
    top, left, bottom, right = example['box'] * [60, 80, 60, 80]
    mirrored.add(bool(left > right))
    low, high = sorted((round(float(left)), round(float(right))))
    part = image[round(float(top)):round(float(bottom)), low:high]
    expected = geometry.resize(part, (8, 10), antialias=False)
    np.testing.assert_array_equal(example['image'], expected[:, ::-1] if left > right else expected)
    assert example['label'] == 3
  assert mirrored == {True, False}


def test_a_transform_is_a_function_of_record_and_generator_and_pickles() -> None:
  transform = transforms.train_transform(EVERYTHING, (8, 8))
  copy = pickle.loads(pickle.dumps(transform))
  record = Record(random_image(0), (1,))
  one, two = transform(record, np.random.default_rng(4)), copy(record, np.random.default_rng(4))
  other = transform(record, np.random.default_rng(5))
  np.testing.assert_array_equal(one['image'], two['image'])
  assert (one['image'] != other['image']).any()


def prepared(recipes: Sequence[tuple[schema.Recipe, bool]], key: int) -> list[dict[str, np.ndarray]]:
  """Batches prepared by recipes, with or without geometry on the device, all in one program."""
  every = [prepare_train(recipe, num_classes=7, on_device_geometry=geometry) for recipe, geometry in recipes]
  return jax.device_get(jax.jit(lambda batch: [one(batch, jax.random.key(key), jnp.int32(0)) for one in every])(
      host_batch()))


def plain(recipe: schema.Recipe) -> np.ndarray:
  return (host_batch()['image'] / 255. - np.array(recipe.mean)) / np.array(recipe.std)


GEOMETRY = {field: dataclasses.replace(RESIZE, **{field: value}) for field, value in {
    'shift_px': 2, 'rotate_degrees': 20., 'scale': .3, 'shear': .3, 'flip': True}.items()}


@functools.cache
def with_geometry() -> dict[str, np.ndarray]:
  found = prepared([(recipe, True) for recipe in GEOMETRY.values()], key=1)
  return {field: batch['image'] for field, batch in zip(GEOMETRY, found, strict=True)}


@pytest.mark.parametrize('field', list(GEOMETRY))
def test_every_field_of_geometry_acts_on_host_and_device(field: str) -> None:
  recipe, batch = GEOMETRY[field], host_batch()
  transform = transforms.train_transform(recipe, (12, 15))
  hosted = np.stack([transform(Record(image, (0,)), np.random.default_rng(i))['image']
                     for i, image in enumerate(batch['image'])])
  assert (hosted != batch['image']).any()
  assert np.abs(with_geometry()[field] - plain(recipe)).max() > .05


def test_on_the_host_path_the_device_only_normalizes() -> None:
  recipe = schema.Recipe(shift_px=3, rotate_degrees=20., mean=(.1, .2, .3), std=(.4, .5, .6))
  batch = host_batch()
  out = prepare_train(recipe, num_classes=7, on_device_geometry=False)(
      batch, jax.random.key(0), jnp.int32(0))
  expected = (batch['image'] / 255. - np.array([.1, .2, .3])) / np.array([.4, .5, .6])
  np.testing.assert_allclose(out['image'], expected, atol=1e-6)
  assert out['image'].dtype == jnp.float32 and 'labels' not in out
  assert out.keys() <= batch.keys()


def test_evaluation_squashes_or_takes_the_middle() -> None:
  image = random_image(0, height=20, width=40)
  squashed = transforms.eval_transform(RESIZE, (8, 8))(Record(image, (0,)))
  np.testing.assert_array_equal(squashed['image'], geometry.resize(image, (8, 8), antialias=False))
  np.testing.assert_array_equal(squashed['box'], [0, 0, 1, 1])
  middle = transforms.eval_transform(schema.Recipe(eval_resize_px=10), (8, 8))(Record(image, (0,)))
  np.testing.assert_allclose(middle['box'], [.1, .3, .9, .7], atol=1e-6)


def test_evaluation_may_shrink_by_area_where_training_does_not() -> None:
  image = random_image(0, height=20, width=40)
  recipe = schema.Recipe(eval_resize_px=10, eval_area=True, interpolation=schema.Interpolation.BICUBIC, antialias=True)
  seen = transforms.eval_transform(recipe, (8, 8))(Record(image, (0,)))['image']
  means = image.reshape(10, 2, 20, 2, 3).astype(np.float64).mean((1, 3))[1:9, 6:14]
  np.testing.assert_allclose(seen, means, atol=.51)
  train = [transforms.train_transform(r, (8, 8))(Record(image, (0,)), np.random.default_rng(1))['image']
           for r in (recipe, dataclasses.replace(recipe, eval_area=False))]
  np.testing.assert_array_equal(*train)


def test_crops_may_be_resized_otherwise_than_evaluation_does() -> None:
  bicubic = schema.Recipe(crop_area=(.3, .3), interpolation=schema.Interpolation.BICUBIC, antialias=True)
  recipe = dataclasses.replace(bicubic, crop_interpolation=schema.CropInterpolation.BILINEAR)
  bilinear = dataclasses.replace(bicubic, interpolation=schema.Interpolation.BILINEAR)
  record = Record(random_image(0, height=20, width=40), (0,))
  made = [transforms.train_transform(r, (8, 8))(record, np.random.default_rng(1))['image'] for r in (recipe, bilinear)]
  np.testing.assert_array_equal(*made)
  seen = [transforms.eval_transform(r, (8, 8))(record)['image'] for r in (recipe, bicubic, bilinear)]
  np.testing.assert_array_equal(seen[0], seen[1])
  assert (seen[0] != seen[2]).any()


def test_gray_pictures_get_three_equal_channels() -> None:
  gray = random_image(0)[..., :1]
  out = transforms.eval_transform(RESIZE, (12, 15))(Record(gray, (0,)))
  np.testing.assert_array_equal(out['image'], np.repeat(gray, 3, 2))


def test_prepared_batches_depend_on_key_and_not_on_call() -> None:
  recipe = schema.Recipe(crop=schema.Crop.RESIZE, shift_px=3)
  prepare = jax.jit(prepare_train(recipe, num_classes=7, on_device_geometry=True))
  np.testing.assert_allclose(jax.jit(prepare_eval(recipe))(host_batch(), None, None)['image'], plain(recipe), atol=1e-6)
  one, two, other = (prepare(host_batch(), jax.random.key(k), 0)['image'] for k in (0, 0, 1))
  np.testing.assert_array_equal(one, two)
  assert float(jnp.abs(one - other).max()) > .1


@pytest.mark.parametrize(('field', 'value'), [
    ('randaugment', schema.RandAugment(2, 9.)), ('three_augment', True), ('jitter', schema.Jitter(.4, .4, .4)),
    ('interpolation', schema.Interpolation.BICUBIC), ('antialias', True)])
def test_every_field_of_the_host_acts(field: str, value: object) -> None:
  plain = transforms.train_transform(RESIZE, (8, 10))
  changed = transforms.train_transform(dataclasses.replace(RESIZE, **{field: value}), (8, 10))
  pairs = [(t(Record(random_image(i), (0,)), np.random.default_rng(i))['image'] for t in (plain, changed))
           for i in range(6)]
  assert any((one != two).any() for one, two in pairs)


DEVICE = {'erase': schema.Erase(1.), 'cutmix': 1., 'mixup': .5}


@functools.cache
def with_fields() -> dict[tuple[str, bool], dict[str, np.ndarray]]:
  cases = [(field, geometry) for field in DEVICE for geometry in (False, True)]
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(jax.random, 'beta', uniform)
    found = prepared([(dataclasses.replace(RESIZE, **{field: DEVICE[field]}), geometry) for field, geometry in cases],
                     key=4)
  return dict(zip(cases, found, strict=True))


@pytest.mark.dear('cutmix-False', reason='2 s: another program')
@pytest.mark.parametrize('on_device_geometry', [False, True])
@pytest.mark.parametrize('field', list(DEVICE))
def test_every_field_of_the_device_acts_on_both_paths(field: str, *, on_device_geometry: bool) -> None:
  out = with_fields()[field, on_device_geometry]
  assert np.abs(out['image'] - plain(RESIZE)).max() > .05
  assert ('labels' in out) == (field != 'erase')


def test_new_settings_leave_the_draws_of_old_ones_alone(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(jax.random, 'beta', uniform)
  recipe = schema.Recipe(crop=schema.Crop.RESIZE, shift_px=2, mixup=.2)

  @jax.jit
  def as_first(batch: dict[str, jax.Array], key: jax.Array) -> jax.Array:
    # Split as in the first version of the recipe: geometry, then mixup.
    geometry_key, mixup_key = jax.random.split(key)
    moved = augment_geometry(batch | {'image': batch['image'].astype(jnp.float32)}, geometry_key, recipe=recipe)
    moved = moved | {'image': normalize(moved['image'], recipe)}
    return mix.mix_pairs(moved, jax.random.beta(mixup_key, .2, .2, dtype=jnp.float32), num_classes=7)['image']

  out, = prepared([(recipe, True)], key=7)
  np.testing.assert_array_equal(out['image'], as_first(host_batch(), jax.random.key(7)))


def test_what_only_the_host_can_do_is_named() -> None:
  assert transforms.host_only(RESIZE) == ''
  assert transforms.host_only(schema.Recipe(three_augment=True, randaugment=schema.RandAugment(2))) == (
      'data.recipe.crop=inception, data.recipe.randaugment.layers=2, data.recipe.three_augment=true')


def test_jitter_is_as_likely_as_asked_and_three_augment_takes_turns() -> None:
  image = random_image(0)
  jitter = schema.Jitter(.4, .4, .2, .1, probability=.3)
  changed = [(colors.jitter(image, jitter, np.random.default_rng(i)) != image).any() for i in range(400)]
  assert abs(np.mean(changed) - .3) < .07
  assert colors.jitter(image, schema.Jitter(), np.random.default_rng(0)) is image
  kinds = []
  for i in range(300):
    out = colors.three_augment(image, np.random.default_rng(i))
    gray, solar = (out == colors.grayscale(image)).all(), (out == colors.solarize(image, 128)).all()
    kinds.append('gray' if gray else 'solar' if solar else 'blur')
  assert all(75 < kinds.count(k) < 125 for k in ('gray', 'solar', 'blur'))


@pytest.mark.slow(reason='5 s; tests/test_invariance.py prepares images on a mesh')
@pytest.mark.skipif('jax.device_count() < 8', reason='needs 8 simulated devices (tests/conftest.py)')
def test_prepared_batches_are_the_same_on_one_and_on_eight_devices(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(jax.random, 'beta', uniform)
  recipes = (EVERYTHING, dataclasses.replace(RESIZE, mixup=.8, cutmix=1., erase=schema.Erase(.5)))
  every = [prepare_train(recipe, num_classes=7, on_device_geometry=True) for recipe in recipes]
  prepare = jax.jit(lambda batch, key: [one(batch, key, 0) for one in every])
  batch = host_batch(16)
  mesh = Mesh(np.array(jax.devices()[:8]), ('data',))
  spread = jax.device_put(batch, NamedSharding(mesh, PartitionSpec('data')))
  for seed in range(4):
    for single, sharded in zip(*(prepare(x, jax.random.key(seed)) for x in (batch, spread)), strict=True):
      assert set(single) == set(sharded)
      for name in single:
        np.testing.assert_allclose(single[name], sharded[name], atol=1e-5, err_msg=name)
