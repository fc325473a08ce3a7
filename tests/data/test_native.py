"""Images at their own aspect: the search for the grid, patches on the host, and batches."""
from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest

from vit_jax.config import schema
from vit_jax.core.types import Batch, Shard
from vit_jax.data import loader, order
from vit_jax.data.image import crops, geometry
from vit_jax.data.image import transform as transforms
from vit_jax.data.source import Record, Rows, read_one
from vit_jax.evaluate import resources

RECIPE = schema.Recipe(eval_native_patch=4, antialias=True)
PX = (16, 16)
TRANSFORMERS = (
    ((291, 3135), 196, (4, 44)), ((56, 2204), 256, (3, 85)), ((1562, 105), 256, (60, 4)), ((30, 317), 196, (4, 43)),
    ((1651, 30), 256, (111, 2)), ((1420, 102), 64, (28, 2)), ((717, 188), 64, (16, 4)),
    ((2561, 2229), 1024, (34, 30)), ((49, 44), 256, (17, 15)), ((5970, 3744), 64, (10, 6)),
    ((739, 25), 1024, (170, 6)), ((114, 505), 1024, (15, 67)), ((32, 259), 64, (3, 21)), ((734, 69), 1024, (102, 10)),
    ((680, 326), 196, (19, 10)), ((4701, 62), 256, (128, 2)))
"""Sizes, most patches of 16 px, and the grids of the image processor of SigLIP 2 in transformers 5.23."""


class Images(Rows):
  """Images of several sizes, without files."""
  name, digest, class_names = 'images', 'images', ('a', 'b')

  def __len__(self) -> int:
    return 7

  def example(self, row: int) -> Record:
    rng = np.random.default_rng(row)
    return Record(rng.integers(0, 256, (*rng.integers(5, 60, 2), 3), dtype=np.uint8), self.labels(row))

  def labels(self, row: int) -> tuple[int, ...]:
    return (row % 2,)

  def describe(self, index: int) -> str:
    return f'image {index}'


def largest(size: tuple[int, int], patch: int, most: int) -> tuple[int, int]:
  """The largest grid along the diagonal, exactly: rows and columns grow one after the other, in integers."""
  (h, w), (rows, columns) = size, (1, 1)
  while True:
    grows_rows, grows_columns = rows * w <= columns * h, columns * h <= rows * w
    new = rows + grows_rows, columns + grows_columns
    if math.prod(new) > most:
      return rows, columns
    rows, columns = new


@pytest.mark.parametrize('num_tokens', [64, 196, 256])
def test_the_grid_is_the_largest_along_the_diagonal_but_for_the_precision_of_the_search(num_tokens: int) -> None:
  rng = np.random.default_rng(num_tokens)
  sizes = [(int(h), int(w)) for h, w in np.exp(rng.uniform(np.log(32), np.log(2000), (1000, 2)))
           if max(h / w, w / h) < num_tokens / 2]
  found = [geometry.choose_grid(size, 16, num_tokens) for size in sizes]
  same = np.mean([grid == largest(size, 16, num_tokens) for grid, size in zip(found, sizes, strict=True)])
  assert same > .99 and all(math.prod(grid) <= num_tokens for grid in found)


@pytest.mark.parametrize(('size', 'grid'), [
    ((500, 375), (16, 12)), ((375, 500), (12, 16)), ((224, 224), (14, 14)), ((1, 5000), (1, 196)),
    ((5000, 1), (196, 1)), ((16, 16), (14, 14))])
def test_grids_of_some_sizes(size: tuple[int, int], grid: tuple[int, int]) -> None:
  assert geometry.choose_grid(size, 16, 196) == grid


def test_grids_are_those_of_transformers() -> None:
  assert all(geometry.choose_grid(size, 16, most) == grid for size, most, grid in TRANSFORMERS)


def test_patches_are_those_of_the_resized_image_and_zeros_follow() -> None:
  image = read_one(Images(), 3).image
  assert isinstance(image, np.ndarray)
  packed, grid = geometry.fit_native(image, recipe=RECIPE, image_px=PX)
  rows, columns = grid.tolist()
  assert packed.shape == (16, 16, 3) and (rows, columns) == geometry.choose_grid(image.shape[:2], 4, 16)
  resized = geometry.resize(image, (rows * 4, columns * 4), antialias=True)
  patches = packed.reshape(16, 4, 4, 3)
  for number in range(16):
    row, column = divmod(number, columns)
    own = resized[4 * row:4 * row + 4, 4 * column:4 * column + 4] if row < rows else np.zeros((4, 4, 3))
    np.testing.assert_array_equal(patches[number], own)


def test_batches_have_grids_and_are_equal_where_images_may_be_held_in_memory() -> None:
  def batches(*, in_memory: bool) -> list[dict[str, np.ndarray]]:
    made = loader.eval_loader(Images(), recipe=RECIPE, image_px=PX, batch_size=4, shard=Shard((0,), 1), threads=1,
                              in_memory=in_memory)
    return [{name: np.array(value) for name, value in batch.items()} for batch in made.batches()]

  alone = batches(in_memory=False)
  assert [batch['grid'].shape for batch in alone] == [(4, 2), (4, 2)] and alone[0]['grid'].all()
  for one, other in zip(alone, batches(in_memory=True), strict=True):
    assert one.keys() == other.keys()
    for name, value in one.items():
      np.testing.assert_array_equal(value, other[name], err_msg=name)


def test_training_images_and_few_shot_images_of_big_vision_keep_one_size() -> None:
  recipe = dataclasses.replace(RECIPE, crop=schema.Crop.RESIZE)
  made = loader.train_loader(Images(), recipe=recipe, image_px=PX, batch_size=4, seed=0, shard=Shard((0,), 1),
                             workers=0, threads=1, in_memory=True, max_bad_images=0)
  batch = next(iter(made.batches(0)))
  plain = geometry.fit(read_one(Images(), int(batch['index'][0])).image, recipe=recipe, image_px=PX)[0]
  np.testing.assert_array_equal(batch['image'][0], plain)
  config = schema.Config(data=schema.Data(recipe=RECIPE))
  assert not resources.squashed_crop(config).eval_native_patch


ALONE = Shard((0,), 1)


def train_batches(start: int = 0, *, workers: int = 0, shard: Shard = ALONE) -> list[Batch]:
  recipe = dataclasses.replace(RECIPE, native_lengths=(6, 9, 20), crop_area=(.3, 1.))
  made = loader.train_loader(Images(), recipe=recipe, image_px=PX, batch_size=4, seed=3, shard=shard, workers=workers,
                             threads=1, in_memory=False, max_bad_images=0)
  batches = [{name: np.array(value) for name, value in batch.items()}
             for batch in itertools.islice(made.batches(start), 6)]
  made.close()
  return batches


def assert_same(first: list[Batch], second: list[Batch]) -> None:
  for one, other in zip(first, second, strict=True):
    assert one.keys() == other.keys()
    for name, value in one.items():
      np.testing.assert_array_equal(value, other[name], err_msg=name)


def test_each_training_batch_has_one_of_the_lengths_and_follows_from_seed_and_step() -> None:
  batches = train_batches()
  lengths = [batch['image'].shape[1] // 4 for batch in batches]
  assert set(lengths) == {6, 9, 20}
  assert lengths == [(6, 9, 20)[order.draw_length_index(3, step, 3)] for step in range(6)]
  for batch, length in zip(batches, lengths, strict=True):
    num = batch['grid'].prod(-1)
    assert (num > 0).all() and (num <= length).all() and not batch['image'][0, num[0] * 4:].any()
  assert_same(train_batches(2)[:4], batches[2:])


def test_hosts_draw_the_same_length_and_load_their_rows() -> None:
  whole, halves = train_batches(), [train_batches(shard=Shard((part,), 2)) for part in range(2)]
  assert_same(whole, [{name: np.concatenate([one[name], other[name]]) for name in one}
                      for one, other in zip(*halves, strict=True)])


@pytest.mark.slow(reason='3 s: two processes')
def test_training_batches_are_equal_for_any_number_of_workers() -> None:
  assert_same(train_batches(workers=2), train_batches())


def test_each_length_is_drawn_as_often_as_it_is_listed() -> None:
  counts = np.bincount([order.draw_length_index(0, step, 4) for step in range(2_000)], minlength=4)
  np.testing.assert_allclose(counts, 500, atol=4 * math.sqrt(2_000 * 3 / 16))


def test_crops_keep_the_aspect_of_the_image_and_are_not_squashed() -> None:
  size, recipe = (300, 100), schema.Recipe(crop_area=(.2, .2), crop_aspect=(1., 1.))
  windows = [crops.draw(recipe, size, np.random.default_rng(seed), is_scaled=True) for seed in range(20)]
  assert {(one.height, one.width) for one in windows} == {(134, 45)} and len({one.top for one in windows}) > 5
  assert crops.draw(recipe, size, np.random.default_rng(0)).height == 77
  image = np.zeros((*size, 3), np.uint8)
  image[:, :50] = 255
  made = transforms.train_transform(dataclasses.replace(RECIPE, crop=schema.Crop.RESIZE, flip=False), PX, num_tokens=12)
  example = made(Record(image, (0,)), np.random.default_rng(0))
  assert example['grid'].tolist() == [6, 2] and example['box'].tolist() == [0, 0, 1, 1]
  assert [int(patch.mean()) > 127 for patch in example['image'].reshape(12, -1)] == [True, False] * 6
