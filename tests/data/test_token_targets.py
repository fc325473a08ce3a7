"""Targets of tokens: maps are cut as pictures are cropped, mirrored and shifted, on the host and on the device."""
from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.config import schema
from vit_jax.core.types import Shard
from vit_jax.data import answers, loader
from vit_jax.data.device import token_targets
from vit_jax.data.device.prepare import prepare_train
from vit_jax.data.formats.builtin import Arrays
from vit_jax.data.image import transform as transforms
from vit_jax.data.source import Record

STORED, GRID, PX = (10, 15), (4, 6), (24, 36)
ROWS, COLUMNS = (axis.astype(np.float32) for axis in np.divmod(np.arange(150), 15))
MAP = np.stack([ROWS, COLUMNS, np.ones(150, np.float32)], -1)[None]  # each position says where it is
ALIGN = jax.jit(lambda box: token_targets.roi_align(jnp.asarray(np.tile(MAP, (len(box), 1, 1))), box, stored=STORED,
                                             grid=GRID))
roi_align = jax.jit(token_targets.roi_align, static_argnames=('stored', 'grid'))
OFFICIAL = np.load(pathlib.Path(__file__).with_name('token_targets.npz'))  # made by make_token_targets.py
SMOOTHING = .1


def coded(size: tuple[int, int]) -> np.ndarray:
  """A picture whose red is the row and whose green is the column, in 255ths of the sides; blue is full."""
  rows, columns = np.meshgrid((np.arange(size[0]) + .5) / size[0], (np.arange(size[1]) + .5) / size[1], indexing='ij')
  return np.round(255 * np.stack([rows, columns, 0 * rows + 1], -1)).astype(np.uint8)


def seen(image: np.ndarray) -> np.ndarray:
  """Row and column, as fractions, that a coded picture shows at the center of each token, and blue, `[N, 3]`."""
  (h, w), (side_y, side_x) = GRID, (PX[0] // GRID[0], PX[1] // GRID[1])
  cut = image.reshape(h, side_y, w, side_x, 3).astype(np.float64)
  middle = slice(side_y // 2 - 1, side_y // 2 + 1)
  return cut[:, middle, :, middle].mean((1, 3)).reshape(-1, 3) / 255


def places(box: np.ndarray) -> np.ndarray:
  """Row and column on the map that each token gets, `[B, N, 2]`."""
  found = np.asarray(ALIGN(jnp.asarray(box)))
  np.testing.assert_allclose(found[..., 2], 1., rtol=1e-5)
  return found[..., :2]


def on_map(fractions: np.ndarray) -> np.ndarray:
  return np.clip(fractions * np.array(STORED) - .5, 0, np.array(STORED) - 1.)


@pytest.mark.parametrize('seed', range(6))
def test_a_map_is_cut_and_mirrored_as_the_picture_is(seed: int) -> None:
  recipe = schema.Recipe(crop_area=(.2, .6))
  example = transforms.train_transform(recipe, PX)(Record(coded((240, 320)), (3,)), np.random.default_rng(seed))
  box = example['box']
  assert not np.allclose(box, [0, 0, 1, 1])
  np.testing.assert_allclose(places(box[None])[0], on_map(seen(example['image'])[:, :2]), atol=.12)


def test_some_of_these_pictures_are_mirrored() -> None:
  recipe = schema.Recipe(crop_area=(.2, .6))
  boxes = [transforms.train_transform(recipe, PX)(Record(coded((240, 320)), (3,)), np.random.default_rng(seed))['box']
           for seed in range(6)]
  assert {bool(b[1] > b[3]) for b in boxes} == {True, False}


def test_maps_follow_flips_and_shifts_on_the_device() -> None:
  recipe = schema.Recipe(crop=schema.Crop.RESIZE, shift_px=5)
  prepare = prepare_train(recipe, num_classes=2, on_device_geometry=True,
                          targets=token_targets.Targets(STORED, GRID, classes=False))
  num = 12
  batch = {'image': jnp.asarray(np.tile(coded(PX), (num, 1, 1, 1))),
           'box': jnp.tile(jnp.array([[0., 0., 1., 1.]]), (num, 1)), 'label': jnp.zeros(num, jnp.int32),
           'token_labels': jnp.zeros((num, 150, 1), jnp.int32), 'token_scores': jnp.ones((num, 150, 1))}
  done = jax.jit(prepare)(batch, jax.random.key(0), jnp.asarray(0))
  assert set(batch) - set(done) == {'token_labels', 'token_scores'} and 'labels' not in done
  box = np.asarray(done['box'])
  assert {bool(m) for m in box[:, 1] > box[:, 3]} == {True, False} and (box < 0).any()
  inside = np.asarray(done['token_targets']).sum(-1) > 0
  assert inside.mean() > .8
  image, got = np.asarray(done['image']) * 127.5 + 127.5, places(box)
  for b in range(num):
    rows, columns, blue = seen(image[b]).T
    whole = blue > .99  # the middle of the token is not half beyond the border
    assert inside[b][whole].all()
    edges = on_map(np.stack([rows, columns], -1))
    middle = whole & (edges > 1).all(1) & (edges < np.array(STORED) - 2.).all(1)  # no sample is beyond the border
    np.testing.assert_allclose(got[b][middle], edges[middle], atol=.12)


@pytest.mark.parametrize('box', [(.2, .1, .7, .9), (.1, .8, .9, .3)])
def test_a_map_of_an_image_turned_by_a_quarter_gives_the_turned_targets(box: tuple[float, ...]) -> None:
  y0, x0, y1, x1 = box
  stored = np.random.default_rng(0).normal(size=STORED)

  def cut(stored: np.ndarray, box: tuple[float, ...], grid: tuple[int, int]) -> np.ndarray:
    done = roi_align(stored.reshape(1, -1, 1).astype(np.float32), np.array([box], np.float32), stored=stored.shape,
                     grid=grid)
    return np.asarray(done).reshape(grid)

  upright = cut(stored, box, GRID)
  turned = cut(np.rot90(stored), (1 - x1, y0, 1 - x0, y1), GRID[::-1])
  np.testing.assert_allclose(turned, np.rot90(upright), atol=1e-4)


def test_tokens_beyond_the_image_have_no_target() -> None:
  visible = jax.jit(token_targets.visible, static_argnums=1)
  found = np.asarray(visible(jnp.array([[-.5, 0., .5, 1.]]), GRID)).reshape(GRID)
  assert not found[:2].any() and (found[2:] == 1).all()


@pytest.mark.parametrize('size', [4, 7, 12])
def test_targets_are_those_of_the_authors_program(size: int) -> None:
  boxes, (labels_BSk, scores_BSk) = OFFICIAL['boxes'], (OFFICIAL[name].reshape(len(OFFICIAL['boxes']), 81, 3)
                                                       for name in ('labels', 'scores'))
  targets = token_targets.Targets((9, 9), (size, size), classes=True)
  done = jax.jit(lambda batch: token_targets.add(batch, targets, num_classes=11))({
      'box': jnp.asarray(boxes), 'token_labels': jnp.asarray(labels_BSk), 'token_scores': jnp.asarray(scores_BSk)})
  off = SMOOTHING / 11
  ours = np.concatenate([np.asarray(done['labels'])[:, None], np.asarray(done['token_targets'])], 1)
  theirs = np.moveaxis(OFFICIAL[f'targets_{size}'], 1, 2)[:, 1:]  # the first is the true class as one-hot
  # f32 logits up to 10 through sums of 4 to 81 terms: 1e-5 of a probability.
  np.testing.assert_allclose(ours * (1. - SMOOTHING + off) + off, theirs, atol=1e-5)


def test_a_mirrored_box_is_the_box_of_the_mirrored_map() -> None:
  maps, boxes = OFFICIAL['scores'][..., 0].reshape(-1, 9, 9), OFFICIAL['boxes']

  def align(maps: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    return np.asarray(roi_align(maps.reshape(len(maps), 81, 1), boxes, stored=(9, 9), grid=(5, 4)))

  top, left, bottom, right = boxes.T
  mirrored = align(maps[:, :, ::-1], np.stack([top, 1 - right, bottom, 1 - left], -1))
  np.testing.assert_allclose(align(maps, boxes[:, [0, 3, 2, 1]]), mirrored, atol=2e-5)


def test_a_loader_adds_label_maps_and_replaced_images_have_their_own_class(tmp_path: pathlib.Path) -> None:
  images = Arrays(np.zeros((9, 4, 4, 3), np.uint8), np.arange(9, dtype=np.int32), name='some', class_names=('a',))
  info = answers.Info('some', 'digest', 9, (1, 2), 1, 5000, 4, {}, answers.LOGITS)
  answers.write(tmp_path / 'maps', info, lambda rows: (
      np.array([[[[4000 + r], [4100 + r]]] for r in rows]), np.full((len(rows), 1, 2, 1), .5)), setting='--to')
  maps = answers.Answers(tmp_path / 'maps')
  source = loader.train_loader(images, recipe=schema.Recipe(crop=schema.Crop.RESIZE), image_px=(4, 4), batch_size=9,
                               seed=0, shard=Shard((0,), 1), workers=0, threads=1, in_memory=True, max_bad_images=0,
                               extra=answers.AddAnswers(maps))
  batch = next(source.batches(3))
  assert batch['token_labels'][..., 0].tolist() == [[4000 + i, 4100 + i] for i in batch['index'].tolist()]
  assert batch['token_labels'].dtype == np.int32 and batch['token_scores'].dtype == np.float32
  assert source.info.digest.startswith(f'{images.digest} maps=') and source.info.num_examples == 9
  source.close()
  replaced = answers.AddAnswers(maps)({'index': np.array([5, 0]), 'label': np.array([1, 3], np.int32),
                                  'bad': np.array([False, True])}, np.array([8, 9]))
  assert replaced['token_labels'][..., 0].tolist() == [[4005, 4105], [3, 3]]
  assert replaced['token_scores'][1].tolist() == [[30.], [30.]]
