"""A network with its weights: images of any kind in, numpy arrays out, for every family of networks."""
from __future__ import annotations

import functools
import io
import pathlib

import jax
import jax.numpy as jnp
import loaded
import numpy as np
import pytest
from PIL import Image

from vit_jax.core.errors import UserError
from vit_jax.data.image.headers import BadImage
from vit_jax.inspect.model import Model
from vit_jax.weights import inference, loading


@functools.cache
def network(name: str) -> Model:
  """One for all tests, which compiles each program once."""
  return Model(loaded.weights(name), batch_size=4)


@pytest.fixture
def vit() -> Model:
  return network('vit')


def by_hand(image: np.ndarray) -> np.ndarray:
  """Preprocessing with Pillow and numpy alone, by torchvision's rules: short side 40, bicubic, center 32 x 48."""
  h, w = image.shape[:2]
  size = (max(48, int(w * 40 / min(h, w))), max(32, int(h * 40 / min(h, w))))
  resized = np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BICUBIC))
  top, left = round((resized.shape[0] - 32) / 2), round((resized.shape[1] - 48) / 2)
  cut = resized[top:top + 32, left:left + 48]
  return ((cut / 255. - np.array([[[.5, .4, .3]]])) / np.array([[[.2, .3, .4]]])).astype(np.float32)


@pytest.mark.quick('vit', reason='1 to 4 s: a network of its own')
@pytest.mark.parametrize('name', list(loaded.MODELS))
def test_every_family_classifies_and_gives_features(name: str) -> None:
  found = loaded.weights(name)
  model, images = network(name), loaded.pictures(2)
  prepared = jnp.asarray(np.stack([by_hand(image) for image in images]))
  logits, features = jax.jit(inference.function(found))(inference.parameters(found), prepared)
  np.testing.assert_allclose(model.logits(images), logits, rtol=2e-4, atol=2e-4)
  np.testing.assert_allclose(model.features(images), features.pooled, rtol=2e-4, atol=2e-4)
  assert model.features(images).shape == (2, features.pooled.shape[1])


def test_the_table_of_loaded_weights_includes_the_head(vit: Model) -> None:
  lines = vit.tabulate().splitlines()
  assert any(line.startswith('head/kernel') for line in lines) and lines[-2].startswith('head')


def test_images_of_all_kinds_give_the_same(vit: Model, tmp_path: pathlib.Path) -> None:
  image = loaded.pictures(1)[0]
  want = vit.logits(image)
  file = io.BytesIO()
  Image.fromarray(image).save(file, 'png')
  (tmp_path / 'a.png').write_bytes(file.getvalue())
  path = tmp_path / 'a.png'
  for same in (Image.fromarray(image), file.getvalue(), path, str(path), [image], [[image]], image[None], (path,)):
    np.testing.assert_array_equal(vit.logits(same), want)
  gray = image[..., :1]
  np.testing.assert_array_equal(vit.logits(gray[..., 0]), vit.logits(np.repeat(gray, 3, 2)))
  np.testing.assert_array_equal(vit.logits(gray), vit.logits(Image.fromarray(gray[..., 0])))


def test_the_rest_of_a_batch_does_not_matter(vit: Model) -> None:
  images = loaded.pictures(7)
  whole = vit.logits(images)
  assert whole.shape == (7, loaded.CLASSES)
  for i, image in enumerate(images):
    np.testing.assert_allclose(vit.logits(image)[0], whole[i], rtol=1e-4, atol=1e-5)


def test_classes_come_by_probability_with_their_names(vit: Model) -> None:
  images = loaded.pictures(2)
  logits = vit.logits(images).astype(np.float64)
  for row, found in zip(logits, vit.classify(images, top=3), strict=True):
    p = np.exp(row) / np.exp(row).sum()
    assert [g.label for g in found] == np.argsort(-p)[:3].tolist()
    assert [g.name for g in found] == [f'kind {g.label}' for g in found]
    np.testing.assert_allclose([g.probability for g in found], np.sort(p)[::-1][:3], rtol=1e-5)
  assert len(vit.classify(images[0], top=50)[0]) == loaded.CLASSES


def test_classes_without_names_are_numbered() -> None:
  model = Model(loaded.weights('mixer', names=False))
  assert model.class_names == tuple(f'class {i}' for i in range(loaded.CLASSES))


def test_features_of_a_layer_are_all_its_tokens(vit: Model) -> None:
  images = loaded.pictures(2)
  assert vit.num_layers == 2 and vit.features(images, layer=0).shape == (2, 7, 32)
  last = vit.features(images, layer=-1)
  np.testing.assert_array_equal(last, vit.features(images, layer=2))
  assert not np.allclose(last, vit.features(images, layer=1))
  norm = vit.weights.params['backbone']['norm']
  cls = last[:, 0].astype(np.float64)
  normed = (cls - cls.mean(1, keepdims=True)) / np.sqrt(cls.var(1, keepdims=True) + 1e-6) * norm['scale'] + norm['bias']
  np.testing.assert_allclose(vit.features(images), normed, rtol=1e-3, atol=1e-4)


@pytest.mark.quick('dinov2', reason='1 s: a network of its own')
@pytest.mark.parametrize('name', ['vit', 'dinov2', 'deit'])
def test_grids_are_the_patch_tokens_in_their_places(name: str) -> None:
  model, images, extra = network(name), loaded.pictures(2), {'vit': 1, 'dinov2': 3, 'deit': 2}[name]
  depth = model.num_layers
  both = model.features(images, layers=[0, -1], as_grid=True)
  assert both.shape == (2, 2, 2, 3, 32)
  for found, layer in zip(both, (0, depth), strict=True):
    tokens = model.features(images, layer=layer)
    assert tokens.shape == (2, extra + 6, 32)
    for row, column in np.ndindex(2, 3):
      np.testing.assert_array_equal(found[:, row, column], tokens[:, extra + 3 * row + column])
  np.testing.assert_array_equal(model.features(images, layers=(depth, 0), as_grid=True), both[::-1])


def test_the_norm_of_grids_is_the_last_one(vit: Model) -> None:
  images, norm = loaded.pictures(2), vit.weights.params['backbone']['norm']
  raw = vit.features(images, layers=[1, 2], as_grid=True).astype(np.float64)
  want = (raw - raw.mean(-1, keepdims=True)) / np.sqrt(raw.var(-1, keepdims=True) + 1e-6) * norm['scale'] + norm['bias']
  normed = vit.features(images, layers=[1, 2], as_grid=True, norm=True)
  np.testing.assert_allclose(normed, want, rtol=1e-3, atol=1e-4)
  np.testing.assert_allclose(vit.features(images, as_grid=True), normed[1], rtol=1e-3, atol=1e-4)
  np.testing.assert_array_equal(vit.features(images, layer=1, as_grid=True, norm=True), normed[0])


def test_a_network_without_blocks_gives_its_last_grid() -> None:
  images = loaded.pictures(2)
  assert network('mixer').features(images, as_grid=True).shape == (2, 2, 3, 32)
  model = network('bit')
  grid = model.features(images, as_grid=True)
  assert grid.ndim == 4 and grid.shape[1:3] == (4, 6)  # 32 x 48 px at a stride of 8
  np.testing.assert_allclose(grid.mean((1, 2)), model.features(images), rtol=1e-4, atol=1e-4)


def test_grids_follow_the_size_of_the_images() -> None:
  found = loaded.weights('vit')
  wide = Model(loading.at_size(found, found.preprocess._replace(image_px=(48, 80))), batch_size=4)
  assert wide.features(loaded.pictures(1), layers=[1], as_grid=True).shape == (1, 1, 3, 5, 32)


@pytest.mark.quick('deit', reason='1 s: a network of its own')
@pytest.mark.parametrize('name', ['vit', 'dinov2', 'map', 'deit', 'hybrid'])
def test_attention_is_that_of_the_block_and_rolls_out(name: str) -> None:
  model, images = network(name), loaded.pictures(2)
  extra = {'vit': 1, 'dinov2': 3, 'map': 0, 'deit': 2, 'hybrid': 0}[name]
  each = [model.attention(images, layer=layer + 1) for layer in range(model.num_layers)]
  assert each[0].shape == (2, 4, extra + 6, extra + 6)
  np.testing.assert_allclose(np.stack(each).sum(-1), 1., rtol=1e-5)
  np.testing.assert_array_equal(each[-1], model.attention(images))
  rolled = model.rollout(images)
  assert rolled.shape == (2, 2, 3) and (rolled >= 0).all()
  if name == 'vit':
    product = np.eye(7)[None]
    for attention in each:
      product = (attention.mean(1) + np.eye(7)) / 2 @ product
    np.testing.assert_allclose(rolled.reshape(2, 6), product[:, 0, 1:], rtol=1e-4)


@pytest.mark.slow(reason='2 s: a gradient')
def test_relevance_is_of_the_given_class(vit: Model) -> None:
  images = loaded.pictures(2)
  first = [vit.rank(row, top=2)[0].label for row in vit.logits(images)]
  own = vit.relevance(images)
  assert own.shape == (2, 2, 3)
  np.testing.assert_allclose(own[1], vit.relevance(images[1], of_class=first[1])[0], rtol=1e-5)
  np.testing.assert_array_equal(vit.relevance(images[0], of_class='kind 1'), vit.relevance(images[0], of_class=1))
  assert np.abs(vit.relevance(images[0], of_class=0) - vit.relevance(images[0], of_class=1)).max() > 0


@pytest.mark.parametrize(('name', 'call', 'said'), [
    ('vit', lambda m: m.features(loaded.pictures(1), layer=3), 'expected 0 to 2, or -1 for the last block, got 3'),
    ('vit', lambda m: m.features(loaded.pictures(1), layer=1, layers=[2]), 'expected layer or layers, and norm'),
    ('vit', lambda m: m.features(loaded.pictures(1), layer=1, norm=True), 'and norm=True with as_grid=True only'),
    ('vit', lambda m: m.features(loaded.pictures(1), layers=[]), 'layers: expected at least one block, got none'),
    ('vit', lambda m: m.features(loaded.pictures(1), layers=[1, 3]), 'expected 0 to 2, or -1 .* got 3'),
    ('vit', lambda m: m.attention(loaded.pictures(1), layer=0), 'expected 1 to 2, or -1 for the last block, got 0'),
    ('bit', lambda m: m.attention(loaded.pictures(1)), 'layer: expected None, as ResNet has no blocks, got -1'),
    ('mixer', lambda m: m.rollout(loaded.pictures(1)), 'got a Mixer without transformer blocks'),
    ('vit', lambda m: m.logits([]), 'images: expected at least one image, got none'),
    ('vit', lambda m: m.logits(np.zeros((4, 4, 3))), r'expected a uint8 array .* got an array \(4, 4, 3\) of float64'),
    ('vit', lambda m: m.logits(np.zeros((4, 4, 2), np.uint8)), 'images: expected a uint8 array'),
    ('vit', lambda m: m.logits([np.zeros((0, 0, 3), np.uint8)]), r'got an array \(0, 0, 3\) of uint8. Pass'),
    ('vit', lambda m: m.logits(Image.new('RGB', (0, 4))), r'got Image \(0, 4\). Pass'),
    ('vit', lambda m: m.logits(3), 'got int'),
])
def test_impossible_requests_are_errors(name: str, call: object, said: str) -> None:
  with pytest.raises(UserError, match=said):
    call(network(name))  # type: ignore[operator]


def test_weights_without_a_head_do_not_classify() -> None:
  model = Model(loaded.weights('vit', num_classes=0))
  assert model.features(loaded.pictures(2)).shape == (2, 32)
  headless = r'small vit: expected weights with a classification head, got weights without one\.'
  with pytest.raises(UserError, match=rf'{headless} Use rollout'):
    model.relevance(loaded.pictures(1))
  with pytest.raises(UserError, match=rf'{headless} Use features'):
    model.classify(loaded.pictures(1))


def test_a_file_that_is_not_an_image_is_named(vit: Model, tmp_path: pathlib.Path) -> None:
  (tmp_path / 'broken.jpg').write_bytes(b'no picture')
  with pytest.raises(BadImage, match='broken.jpg: '):
    vit.classify([loaded.pictures(1)[0], tmp_path / 'broken.jpg'])


def test_bytes_that_are_not_an_image_are_an_error(vit: Model) -> None:
  with pytest.raises(BadImage, match='not an image'):
    vit.logits(b'<html>')
