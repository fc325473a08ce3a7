"""Every step, microbatch, example and device draws its own random numbers.

The task below has a parameter for each example and draw, and a loss whose gradient is the draw itself: what a step drew
is read from what it changed. The draws are those of the project's own dropout, drop path, MAE masks and mixup.
"""
from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

from vit_jax.config import schema
from vit_jax.core.axes import labelled
from vit_jax.core.numerics import split_key, weighted_mean
from vit_jax.core.types import Array, Batch, Extra, Key, LossOut, Params, Shard
from vit_jax.data import loader, order
from vit_jax.data.device.prepare import prepare_train
from vit_jax.data.formats import builtin
from vit_jax.data.source import take_first
from vit_jax.models import layers
from vit_jax.objectives import patches
from vit_jax.train import diagnose, loop

SIZE, WIDTH, ACCUMULATE = 32, 16, 4
DRAWS = ('dropout', 'drop_path', 'mae_mask', 'flip', 'mixup')
OF_EXAMPLES = ('dropout', 'mae_mask')  # with so many outcomes that two examples never share one here
IMAGE = np.arange(SIZE * 4 * 4 * 3, dtype=np.float32).reshape(SIZE, 4, 4, 3) % 251
DATA = {'image': IMAGE.astype(np.uint8), 'label': np.zeros(SIZE, np.int32), 'index': np.arange(SIZE, dtype=np.int32),
        'box': np.tile(np.array([[0., 0., 1., 1.]], np.float32), (SIZE, 1))}
RECIPE = schema.Recipe(crop=schema.Crop.RESIZE, flip=True, mixup=.5)


class DrawTask:
  """`L = sum of draw * parameter`, so that plain SGD moves each parameter by the draw."""

  def init(self, key: Key, batch: Batch) -> tuple[Params, Extra]:
    return {name: labelled(jnp.zeros((SIZE, WIDTH)), (None, None)) for name in DRAWS}, {}

  def loss(self, params: Params, extra: Extra, batch: Batch, key: Key, step: Array) -> LossOut:
    keys, num = split_key(key, 'dropout', 'drop_path', 'mae_mask'), batch['image'].shape[0]
    ones = jnp.ones((num, WIDTH))
    draws = {
        'dropout': layers.dropout(ones, .5, keys['dropout']),
        'drop_path': layers.drop_path(ones, jnp.asarray(.5), keys['drop_path'], num_images=num),
        'mae_mask': patches.draw(keys['mae_mask'], num_images=num, num_patches=WIDTH, num_chosen=4).rank + 1.,
        'flip': batch['box'][:, 1:2] * ones,  # the left edge: 1 where mirrored
        'mixup': batch['labels'][:, :1] * ones}
    each_B = sum((draws[name] * params[name][batch['index']]).sum(-1) for name in DRAWS)
    return LossOut(weighted_mean(each_B), {}, {})

  def after_update(self, params: Params, extra: Extra, stats: Any, step: Array) -> Extra:
    return extra

  def views(self) -> dict[str, Any]:
    return {}


@functools.cache
def draws(mesh: str = 'one', accumulate: int = ACCUMULATE) -> list[dict[str, np.ndarray]]:
  """The draws `[SIZE, WIDTH]` of two steps by name, rows by example."""
  settings = programs.MESHES[mesh]
  # Flips and mixup see soft labels that differ between the images of a pair.
  data = {**DATA, 'label': np.arange(SIZE, dtype=np.int32) % 2}
  with pytest.MonkeyPatch.context() as patch:  # which compiles much faster
    patch.setattr(jax.random, 'beta', lambda key, a, b, dtype: jax.random.uniform(key, dtype=dtype))
    return _draws(settings, data, accumulate)


def _draws(settings: schema.Mesh, data: Batch, accumulate: int) -> list[dict[str, np.ndarray]]:
  program = programs.build(
      DrawTask(), prepare_train(RECIPE, num_classes=2, on_device_geometry=True), settings, like=data,
      accumulate=accumulate, optimizer=schema.Sgd(momentum=0., weight_decay=0., clip_norm=0.))
  placed = programs.meshes.put_batch(data, programs.mesh(settings), Shard((0,), 1))
  state, found, before = program.init_fn(), [], {name: np.zeros((SIZE, WIDTH)) for name in DRAWS}
  for _ in range(2):
    state, _ = program.step_fn(state, placed)
    after = jax.device_get(state.params)
    found.append({name: (before[name] - after[name]) * SIZE / .1 for name in DRAWS})  # .1: the rate of `programs`
    before = after
  return found


@pytest.mark.parametrize('name', DRAWS)
def test_every_step_draws_anew(name: str) -> None:
  first, second = draws()
  assert np.abs(first[name]).max() > 0
  assert not np.allclose(first[name], second[name], atol=1e-2)


@pytest.mark.parametrize('name', ['dropout', 'drop_path', 'mae_mask'])
def test_every_microbatch_draws_anew(name: str) -> None:
  micros = draws()[0][name].reshape(-1, ACCUMULATE, WIDTH).swapaxes(0, 1)  # row i is in microbatch i % ACCUMULATE
  for one, other in itertools.combinations(micros, 2):
    assert not np.allclose(one, other, atol=1e-2)


@pytest.mark.parametrize('name', OF_EXAMPLES)
def test_every_example_draws_anew(name: str) -> None:
  assert len({tuple(row) for row in np.round(draws()[0][name]).tolist()}) == SIZE


def test_drop_path_and_flips_are_drawn_for_each_example() -> None:
  kept = draws()[0]['drop_path'][:, 0].reshape(-1, ACCUMULATE) > 1.
  mirrored = draws()[0]['flip'][:, 0] > .5
  assert any(0 < of_micro.sum() < 8 for of_micro in kept.T)  # else with probability 4e-9
  assert 4 < mirrored.sum() < 28  # of 32 fair coins; outside with probability 2e-5


def test_every_device_draws_its_own_examples_as_one_device_does() -> None:
  for one, eight in zip(draws(), draws('data=8'), strict=True):
    for name in DRAWS:
      np.testing.assert_allclose(eight[name], one[name], atol=1e-3, err_msg=name)


def test_a_diagnosis_repeats_the_draws_of_its_step() -> None:
  class Task(DrawTask):
    """Not finite for the example that this step draws."""

    def loss(self, params: Params, extra: Extra, batch: Batch, key: Key, step: Array) -> LossOut:
      drawn_B = batch['index'] == jax.random.randint(key, (), 0, SIZE)
      return LossOut(weighted_mean(jnp.where(drawn_B, jnp.nan, 0.) + params['w'].sum(), batch.get('mask')), {}, {})

    def init(self, key: Key, batch: Batch) -> tuple[Params, Extra]:
      return {'w': labelled(jnp.zeros(1), (None,))}, {}

  def prepare(batch: Batch, key: Key, step: Array) -> Batch:
    return batch

  mesh = programs.mesh(programs.MESHES['one'])
  placed = programs.meshes.put_batch(DATA, mesh, Shard((0,), 1))
  find = diagnose.build(Task(), prepare, str, lambda step: DATA['index'], mesh=mesh, seed=0)
  program = programs.build(Task(), prepare, programs.MESHES['one'], like=DATA)
  state = program.init_fn()
  found = []
  for number in (1, 2, 3):
    key = split_key(jax.random.fold_in(jax.random.key(0), number - 1), 'prepare', 'loss')['loss']
    row = int(jax.random.randint(key, (), 0, SIZE))
    found.append(row)
    assert find(loop.Done(number, None, placed, state)) == [f'{row} (index {row})']  # type: ignore[arg-type]
  assert len(set(found)) == 3


def test_host_augmentation_draws_anew_for_every_position_and_seed() -> None:
  drawn = [order.ExampleRngs(seed).at(position).random() for seed in (0, 1) for position in range(100)]
  assert len(set(drawn)) == 200


def test_random_crops_differ_between_the_examples_and_epochs_of_a_loader() -> None:
  source = take_first(builtin.open_digits('train'), 240)
  batches = loader.train_loader(
      source, recipe=schema.Recipe(), image_px=(8, 8), batch_size=80, seed=0, shard=Shard((0,), 1), workers=0,
      threads=1, in_memory=False, max_bad_images=0)
  boxes: dict[int, list[tuple[float, ...]]] = {}
  for batch in itertools.islice(batches.batches(0), 6):  # 240 images, twice
    for index, box in zip(batch['index'].tolist(), batch['box'].tolist(), strict=True):
      boxes.setdefault(index, []).append(tuple(box))
  batches.close()
  first, second = zip(*boxes.values(), strict=True)
  # Images of 8 px have few boxes: with own draws most pairs still differ; with shared ones none would.
  assert len(set(first)) > 60
  assert sum(one != other for one, other in zip(first, second, strict=True)) > 200
