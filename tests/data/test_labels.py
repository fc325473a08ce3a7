"""Targets of tokens: maps are cut as pictures are cropped, mirrored and shifted, on the host and on the device."""
from __future__ import annotations

import pathlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import ndimage

from vit_jax.config import schema
from vit_jax.core.api import LoaderInfo
from vit_jax.core.types import Batch
from vit_jax.data import label_maps, labels, recipes
from vit_jax.data.sources import Record

STORED, GRID, PX = (10, 15), (4, 6), (24, 36)
PLACES = np.arange(150).reshape(1, 150, 1)  # each position of the map is a class of its own
CUT = jax.jit(lambda batch: labels.cut(batch, stored=STORED, grid=GRID))


def coded(size: tuple[int, int]) -> np.ndarray:
  """A picture whose red is the row and whose green is the column, in 255ths of the sides; blue is full."""
  rows, columns = np.meshgrid((np.arange(size[0]) + .5) / size[0], (np.arange(size[1]) + .5) / size[1], indexing='ij')
  return np.round(255 * np.stack([rows, columns, 0 * rows + 1], -1)).astype(np.uint8)


def seen(image: np.ndarray) -> np.ndarray:
  """Row and column, as fractions, that a coded picture shows at the centre of each token, and blue, `[N, 3]`."""
  (h, w), (side_y, side_x) = GRID, (PX[0] // GRID[0], PX[1] // GRID[1])
  cut = image.reshape(h, side_y, w, side_x, 3).astype(np.float64)
  middle = slice(side_y // 2 - 1, side_y // 2 + 1)
  return cut[:, middle, :, middle].mean((1, 3)).reshape(-1, 3) / 255


def places(batch: Batch) -> np.ndarray:
  """Row and column on the map that each token got, `[B, N, 2]`."""
  rows, columns = np.divmod(np.asarray(batch['token_labels']), STORED[1])
  scores = np.asarray(batch['token_scores'])
  np.testing.assert_allclose(scores.sum(-1), 1., rtol=1e-5)
  return np.stack([(rows * scores).sum(-1), (columns * scores).sum(-1)], -1)


def on_map(fractions: np.ndarray) -> np.ndarray:
  return np.clip(fractions * np.array(STORED) - .5, 0, np.array(STORED) - 1.)


@pytest.mark.parametrize('seed', range(6))
def test_a_map_is_cut_and_mirrored_as_the_picture_is(seed: int) -> None:
  recipe = schema.Recipe(crop_area=(.2, .6))
  example = recipes.train_transform(recipe, PX)(Record(coded((240, 320)), 3), np.random.default_rng(seed))
  box = example['box']
  assert not np.allclose(box, [0, 0, 1, 1])
  batch = CUT({'box': jnp.asarray(box)[None], 'token_labels': jnp.asarray(PLACES),
               'token_scores': jnp.ones(PLACES.shape)})
  np.testing.assert_allclose(places(batch)[0], on_map(seen(example['image'])[:, :2]), atol=.12)


def test_some_of_these_pictures_are_mirrored() -> None:
  recipe = schema.Recipe(crop_area=(.2, .6))
  boxes = [recipes.train_transform(recipe, PX)(Record(coded((240, 320)), 3), np.random.default_rng(seed))['box']
           for seed in range(6)]
  assert {bool(b[1] > b[3]) for b in boxes} == {True, False}


def test_maps_follow_flips_and_shifts_on_the_device() -> None:
  recipe = schema.Recipe(crop=schema.Crop.RESIZE, shift_px=5)
  prepare = labels.cutting(recipes.prepare_train(recipe, num_classes=2, on_device_geometry=True), stored=STORED,
                           grid=GRID)
  num = 12
  batch = {'image': jnp.asarray(np.tile(coded(PX), (num, 1, 1, 1))),
           'box': jnp.tile(jnp.array([[0., 0., 1., 1.]]), (num, 1)), 'label': jnp.zeros(num, jnp.int32),
           'token_labels': jnp.tile(jnp.asarray(PLACES), (num, 1, 1)), 'token_scores': jnp.ones((num, 150, 1))}
  done = jax.jit(prepare)(batch, jax.random.key(0), jnp.asarray(0))
  box = np.asarray(done['box'])
  assert {bool(m) for m in box[:, 1] > box[:, 3]} == {True, False} and (box < 0).any()
  inside = np.asarray(done['token_scores']).sum(-1) > 0
  assert inside.mean() > .8
  image = np.asarray(done['image']) * 127.5 + 127.5
  for b in range(num):
    rows, columns, blue = seen(image[b]).T
    whole = blue > .99  # the middle of the token is not half beyond the border
    assert inside[b][whole].all()
    got = places({name: done[name][b][whole] for name in ('token_labels', 'token_scores')})
    np.testing.assert_allclose(got, on_map(np.stack([rows, columns], -1)[whole]), atol=.12)


@pytest.mark.parametrize('box', [(.2, .1, .7, .9), (.1, .8, .9, .3)])
def test_a_map_of_a_picture_turned_by_a_quarter_is_cut_to_the_turned_targets(box: tuple[float, ...]) -> None:
  y0, x0, y1, x1 = box

  def cut(stored: np.ndarray, box: tuple[float, ...], grid: tuple[int, int]) -> np.ndarray:
    done = labels.cut({'box': jnp.array([box]), 'token_labels': jnp.asarray(stored.reshape(1, -1, 1)),
                       'token_scores': jnp.ones((1, stored.size, 1))}, stored=stored.shape, grid=grid)
    dense = jax.nn.one_hot(done['token_labels'], PLACES.size) * done['token_scores'][..., None]
    return np.asarray(dense.sum(2)).reshape(*grid, -1)

  upright = cut(PLACES.reshape(STORED), box, GRID)
  turned = cut(np.rot90(PLACES.reshape(STORED)), (1 - x1, y0, 1 - x0, y1), GRID[::-1])
  np.testing.assert_allclose(turned, np.rot90(upright), atol=1e-4)


def test_tokens_beyond_the_picture_have_no_target() -> None:
  batch = {'box': jnp.array([[-.5, 0., .5, 1.]]), 'token_labels': jnp.asarray(PLACES),
           'token_scores': jnp.ones(PLACES.shape)}
  scores = np.asarray(CUT(batch)['token_scores']).sum(-1).reshape(GRID)
  assert not scores[:2].any() and np.allclose(scores[2:], 1.)


def test_the_full_class_vector_is_interpolated() -> None:
  rng, num_classes = np.random.default_rng(0), 5
  ids, scores = rng.integers(0, num_classes, (1, 150, 3)), rng.uniform(size=(1, 150, 3)).astype(np.float32)
  box = np.array([[.13, .81, .87, .22]], np.float32)
  done = CUT({'box': jnp.asarray(box), 'token_labels': jnp.asarray(ids), 'token_scores': jnp.asarray(scores)})
  dense = np.zeros((num_classes, 150))
  for k in range(3):
    np.add.at(dense, (ids[0, :, k], np.arange(150)), scores[0, :, k])
  y = (box[0, 0] + (np.arange(4) + .5) / 4 * (box[0, 2] - box[0, 0])) * 10 - .5
  x = (box[0, 1] + (np.arange(6) + .5) / 6 * (box[0, 3] - box[0, 1])) * 15 - .5
  at = np.meshgrid(y, x, indexing='ij')
  want = [ndimage.map_coordinates(one.reshape(STORED), at, order=1, mode='nearest').ravel() for one in dense]
  got = (jax.nn.one_hot(done['token_labels'], num_classes) * done['token_scores'][..., None]).sum(2)
  np.testing.assert_allclose(got[0].T, want, rtol=1e-4, atol=1e-5)


class Batches:
  """A loader of two batches."""
  info = LoaderInfo('some', 9, 3, 0, 'digest')
  closed = False

  def batches(self, start: int) -> Iterator[Batch]:
    for step in range(start, 2):
      yield {'index': np.array([4 + step, 0, 8], np.int32), 'label': np.array([1, 2, 3], np.int32),
             'bad': np.array([False, False, step == 1])}

  def describe(self, index: int) -> str:
    return f'picture {index}'

  def close(self) -> None:
    self.closed = True


def test_a_loader_attaches_whole_maps_and_bad_images_have_their_own_class(tmp_path: pathlib.Path) -> None:
  info = label_maps.Info('some', 'digest', 9, (1, 2), 1, 5000, 4, {})
  label_maps.write(tmp_path / 'maps', info, lambda rows: (
      np.array([[[[4000 + r], [4100 + r]]] for r in rows]), np.full((len(rows), 1, 2, 1), .5)))
  inner = Batches()
  loader = labels.LabelledLoader(inner, label_maps.LabelMaps(tmp_path / 'maps'))
  first, second = loader.batches(0)
  assert first['token_labels'][..., 0].tolist() == [[4004, 4104], [4000, 4100], [4008, 4108]]
  assert first['token_labels'].dtype == np.int32 and first['token_scores'].dtype == np.float32
  assert second['token_labels'][2].tolist() == [[3], [3]] and second['token_scores'][2].tolist() == [[1.], [1.]]
  assert [b['index'][0] for b in loader.batches(1)] == [5] and loader.describe(3) == 'picture 3'
  assert loader.info.digest.startswith('digest maps=') and loader.info.num_examples == 9
  loader.close()
  assert inner.closed


