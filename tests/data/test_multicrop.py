"""Several views of an image."""
from __future__ import annotations

import dataclasses
import itertools
import pathlib

import cv2
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.data.images import encode, random_image
from vit_jax.config import schema
from vit_jax.core.types import Shard
from vit_jax.data import loader, opening
from vit_jax.data.device.prepare import prepare_train
from vit_jax.data.image import crops, decode
from vit_jax.data.image import transform as transforms
from vit_jax.data.source import Record

OFF = schema.Views(on=True, num_local=3, local_px=6, blur=(0., 0., 0.), solarize=(0., 0., 0.), grayscale=0.,
                   jitter=schema.Jitter())
IMAGE = random_image(0, height=60, width=80)


def views(**changes: object) -> schema.Recipe:
  return schema.Recipe(views=dataclasses.replace(OFF, **changes))


def make(recipe: schema.Recipe, seed: int = 0) -> dict[str, np.ndarray]:
  return transforms.train_transform(recipe, (8, 10))(Record(encode(IMAGE), (3,)), np.random.default_rng(seed))


def test_views_have_the_promised_shapes() -> None:
  recipe = schema.Recipe(views=schema.Views(on=True, num_local=3, local_px=6))
  example = make(recipe)
  assert {k: (v.shape, v.dtype.name) for k, v in example.items()} == {
      'views_global': ((2, 8, 10, 3), 'uint8'), 'views_local': ((3, 6, 6, 3), 'uint8'), 'label': ((), 'int32')}
  shapes = transforms.train_shapes(recipe, (8, 10))
  assert {k: (s, np.dtype(d).name) for k, (s, d) in shapes.items()} == {
      k: (v.shape, v.dtype.name) for k, v in example.items()}
  assert 'views_local' not in make(views(num_local=0)) and 'views_local' not in transforms.train_shapes(
      views(num_local=0), (8, 10))


def test_crops_keep_to_their_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
  seen: list[tuple[tuple[float, float], float, float]] = []
  crop = crops.inception_crop

  def spy(size: tuple[int, int], *, area: tuple[float, float], **rest: object) -> decode.Window:
    window = crop(size, area=area, **rest)
    seen.append((area, window.height * window.width / (size[0] * size[1]), window.width / window.height))
    return window
  monkeypatch.setattr(crops, 'inception_crop', spy)
  for seed in range(60):
    make(views(), seed)
  assert [a for a, _, _ in seen[:5]] == [(.4, 1.)] * 2 + [(.05, .4)] * 3
  for (low, high), area, aspect in seen:
    assert low - .02 < area < high + .02 and .7 < aspect < 1.4
  local = [area for (low, _), area, _ in seen if low == .05]
  assert min(local) < .08 and max(local) > .37


def test_each_kind_of_view_has_its_own_chances() -> None:
  image = np.full((60, 80, 3), 200, np.uint8)
  image[:, ::8] = 255
  record = Record(image, (0,))
  for name in ('solarize', 'blur'):
    for kind in range(3):
      chances = tuple(float(k == kind) for k in range(3))
      transform = transforms.train_transform(views(**{name: chances}), (60, 80))
      example = transform(record, np.random.default_rng(0))
      plain = transforms.train_transform(views(), (60, 80))(record, np.random.default_rng(0))
      if name == 'solarize':
        changed = [example['views_global'][0].max() < 128, example['views_global'][1].max() < 128,
                   bool((example['views_local'] < 128).all())]
        assert changed == [k == kind for k in range(3)], (name, kind)
      else:
        rows = [(e['views_global'][0], e['views_global'][1], e['views_local'][0]) for e in (example, plain)]
        differ = [bool((one != two).any()) for one, two in zip(*rows, strict=True)]
        # The draws of the views before are the same; a blur draws its sigma, and so changes what comes after.
        assert differ[:kind + 1] == [k == kind for k in range(kind + 1)], (kind, differ)
  gray = make(views(grayscale=1.))
  assert (gray['views_global'][..., :1] == gray['views_global']).all()
  jittered = make(views(jitter=schema.Jitter(.4, .4, .2, .1)))
  assert (jittered['views_global'] != make(views())['views_global']).any()


def test_the_views_of_an_image_differ_and_follow_from_the_generator() -> None:
  one, two, other = make(views()), make(views()), make(views(), 1)
  np.testing.assert_array_equal(one['views_local'], two['views_local'])
  assert (one['views_global'][0] != one['views_global'][1]).any()
  assert (one['views_local'] != other['views_local']).any()


def test_loaders_and_the_device_take_views(image_folder: pathlib.Path) -> None:
  colors = schema.Views(on=True, num_local=3, local_px=6, blur=(1., .1, .5), solarize=(0., .2, 0.), grayscale=.2,
                        jitter=schema.Jitter(.4, .4, .2, .1, probability=.8))
  recipe = schema.Recipe(views=colors, mean=(.1, .2, .3))
  source = opening.open_split(schema.Data(source=f'folder:{image_folder}'), 'train', image_px=(8, 10))

  def take(start: int, num: int, shard: Shard, threads: int) -> list[dict[str, np.ndarray]]:
    made = loader.train_loader(source, recipe=recipe, image_px=(8, 10), batch_size=6, seed=0, shard=shard, workers=0,
                               threads=threads, in_memory=False, max_bad_images=0)
    found = list(itertools.islice(made.batches(start), num))
    made.close()
    return found
  whole = take(0, 8, Shard((0,), 1), 2)
  parts = [take(6, 2, Shard((i,), 2), 1) for i in range(2)]
  for step in (0, 1):
    for name in ('views_global', 'views_local', 'label', 'index', 'bad'):
      joined = np.concatenate([p[step][name] for p in parts])
      np.testing.assert_array_equal(whole[6 + step][name], joined, err_msg=name)
  assert set(whole[0]) == {'views_global', 'views_local', 'label', 'index', 'bad'}
  out = prepare_train(recipe, num_classes=7, on_device_geometry=False)(whole[0], jax.random.key(0),
                                                                               jnp.int32(0))
  expected = (whole[0]['views_local'] / 255. - np.array([.1, .2, .3])) / .5
  np.testing.assert_allclose(out['views_local'], expected, atol=1e-5)
  assert out['views_global'].dtype == jnp.float32 and out['views_global'].shape == (6, 2, 8, 10, 3)


def test_small_pictures_are_enlarged() -> None:
  record = Record(cv2.resize(IMAGE, (5, 4)), (0,))
  example = transforms.train_transform(views(), (8, 10))(record, np.random.default_rng(0))
  assert example['views_global'].shape == (2, 8, 10, 3)
