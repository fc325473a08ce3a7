"""Training at the own aspect of images: padding changes nothing, nor do the mesh, microbatches and a pause."""
from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from typing import Any

import jax
import numpy as np
import programs
import pytest

from vit_jax.config import check, files, schema
from vit_jax.core.errors import UserError
from vit_jax.core.types import NativeImages
from vit_jax.data.device.prepare import prepare_train
from vit_jax.jobs import build, train
from vit_jax.train import step as steps

RECIPE = schema.Recipe(eval_native_patch=4, native_lengths=(6, 12), crop=schema.Crop.RESIZE)
MODEL = schema.ViT(patch=4, width=16, depth=2, heads=2, mlp=schema.Mlp(24), positions=schema.Learned(
    resize=schema.PositionResize.BILINEAR_ANTIALIAS), pool=schema.Map())
TEXT = schema.Text(length=5, width=16, depth=1, heads=2, mlp=24)
OBJECTIVES = {'supervised': schema.Supervised(), 'contrastive': schema.Contrastive(text=TEXT, prompts='a {}.')}
GRIDS = np.array([(1, 6), (6, 1), (2, 3), (2, 2)] * 4, np.int32)
ROWS = len(GRIDS)


def config(objective: str = 'supervised', **settings: Any) -> schema.Config:
  found = schema.Config(image_px=(12, 12), batch_size=ROWS, model=MODEL, objective=OBJECTIVES[objective],
                        data=schema.Data(recipe=RECIPE), **settings)
  check.check(found)
  return found


def batch(num_tokens: int, *, padding: int = 0) -> dict[str, np.ndarray]:
  """A batch as the loader yields it; the pixels do not depend on the number of tokens."""
  rng = np.random.default_rng(0)
  image = np.full((ROWS, num_tokens, 4, 4, 3), padding, np.uint8)
  image[:, :6] = rng.integers(0, 256, (ROWS, 6, 4, 4, 3))
  is_patch = np.arange(num_tokens) < GRIDS.prod(-1)[:, None]
  image[~is_patch] = padding
  text = rng.integers(3, 259, (ROWS, 5), dtype=np.int32)
  return {'image': image.reshape(ROWS, num_tokens * 4, 4, 3), 'grid': GRIDS,
          'label': np.arange(ROWS, dtype=np.int32) % 7, 'text': text, 'text_mask': np.ones((ROWS, 5), bool)}


def gradients(objective: str, data: dict[str, np.ndarray], mesh: str = 'one') -> dict[str, Any]:
  c = config(objective)
  task = build.build_objective(c, build.build_backbone(c), 7, lengths=programs.LENGTHS)
  prepared = prepare_train(RECIPE, num_classes=7, on_device_geometry=False)(data, jax.random.key(0), np.int32(0))
  assert isinstance(prepared['image'], NativeImages)
  return programs.gradients(task, programs.MESHES[mesh], batch=jax.tree.map(np.asarray, prepared))


@pytest.mark.parametrize('objective', ['supervised', pytest.param('contrastive', marks=pytest.mark.slow(reason='4 s'))])
def test_more_padding_changes_neither_loss_nor_gradient(objective: str) -> None:
  short, long = gradients(objective, batch(6)), gradients(objective, batch(12, padding=200))
  programs.assert_close(long, short, rtol=1e-6, atol=1e-6)


@pytest.mark.slow(reason='5 s each: two programs')
@pytest.mark.parametrize('mesh', ['data=8', 'data=2,fsdp=2,tensor=2'])
@pytest.mark.parametrize('objective', OBJECTIVES)
def test_gradients_are_the_same_on_one_device_and_on_eight(objective: str, mesh: str) -> None:
  programs.assert_close(gradients(objective, batch(6), mesh), gradients(objective, batch(6)), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(('most', 'share', 'count'), [
    (8, 1., 8), (8, .5, 4), (8, .51, 8), (8, .125, 1), (6, .4, 3), (1, .3, 1), (7, .2, 7)])
def test_short_sequences_take_fewer_microbatches_within_the_memory_of_the_longest(most: int, share: float,
                                                                                  count: int) -> None:
  assert steps.fewest_microbatches(most, share) == count and share / count <= 1 / most


@functools.cache
def after(num_tokens: int, accumulate: int) -> tuple[Any, Any]:
  c = config()
  task = build.build_objective(c, build.build_backbone(c), 7, lengths=programs.LENGTHS)
  prepare = prepare_train(RECIPE, num_classes=7, on_device_geometry=False)
  program = programs.build(task, prepare, programs.MESHES['one'], like=batch(12), accumulate=accumulate)
  state, metrics = programs.run(program, programs.MESHES['one'], batch(num_tokens))
  return state, metrics.means


@pytest.mark.slow(reason='10 s: four programs')
def test_microbatches_give_the_step_of_the_whole_batch_at_each_length() -> None:
  for num_tokens in (6, 12):
    programs.assert_close(after(num_tokens, 4), after(num_tokens, 1), rtol=1e-4, atol=1e-6)
  programs.assert_close(after(12, 1), after(6, 1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(('change', 'said'), [
    ({'eval_native_patch': 0}, 'data.recipe.eval_native_patch: expected the patch of a ViT, here 4, with'),
    ({'mixup': .2}, 'data.recipe.mixup: expected 0 with data.recipe.native_lengths'),
    ({'native_lengths': (6, 0)}, 'data.recipe.native_lengths: expected'),
    ({'erase': schema.Erase(probability=.2)}, 'data.recipe.erase.probability: expected 0 with')])
def test_settings_that_do_not_go_together_are_named(change: dict[str, Any], said: str) -> None:
  recipe = dataclasses.replace(RECIPE, **change)
  with pytest.raises(UserError) as error:
    check.check(dataclasses.replace(config(), data=schema.Data(recipe=recipe)))
  assert said in str(error.value)


def test_objectives_that_need_images_of_one_size_are_refused() -> None:
  with pytest.raises(UserError, match=r'native_lengths: expected \(\) for objective Mae, .*got \(6, 12\)'):
    check.check(dataclasses.replace(config(), objective=schema.Mae(), evals={}))


@pytest.mark.slow(reason='20 s: two runs')
def test_a_run_that_pauses_has_the_bits_of_one_that_does_not(tmp_path: pathlib.Path) -> None:
  c = files.load('digits', [
      'data.recipe.eval_native_patch=4', 'data.recipe.native_lengths=9,16,25', 'data.recipe.crop=inception',
      'data.recipe.crop_area=0.4,1', 'data.recipe.crop_aspect=0.6,1.6', 'length=8 steps', 'model.depth=1',
      'batch_size=16', 'train.accumulate=2', 'evals.test.batch_size=120', 'train.cpu_threads=0'])
  for part in ('3 steps', ''):
    train.run(c, tmp_path / 'paused', until=part)
  train.run(c, tmp_path / 'whole')
  paused, whole = (json.loads((tmp_path / name / 'final.json').read_text()) for name in ('paused', 'whole'))
  assert paused['params_digest'] == whole['params_digest'] and paused['metrics'] == whole['metrics']
