"""Runs that train a text tower: they begin with weights of any program, and are weights themselves."""
from __future__ import annotations

import dataclasses
import pathlib

import jax
import numpy as np
import programs
import pytest

from tests.weights import text_models
from vit_jax.config import check, schema
from vit_jax.config.schema import PairLoss
from vit_jax.core.errors import UserError
from vit_jax.inspect.model import Model
from vit_jax.jobs import build
from vit_jax.weights import inherit, init_state, loading, runs, saving
from vit_jax.weights import text as texts

NAMES = ['cat', 'red boat', 'house']


def configured(folder: str, **text: object) -> schema.Config:
  image = loading.load(folder)
  loss = PairLoss.SIGMOID if 'siglip' in folder else PairLoss.SOFTMAX
  return schema.Config(
      model=image.model, image_px=image.preprocess.image_px, batch_size=4, length='2 steps', init_from=folder,
      objective=schema.Contrastive(loss=loss, out_dim=image.num_classes, text=schema.Text(weights=folder, **text)),
      train=schema.Train(accumulate=1), data=schema.Data(recipe=schema.Recipe(
          mean=image.preprocess.mean, std=image.preprocess.std)))


@pytest.mark.quick('siglip', reason='3 s each: programs of a network')
@pytest.mark.parametrize('family', ['clip', 'siglip', 'tips'])
def test_a_run_that_begins_with_weights_is_those_weights(family: str, tmp_path: pathlib.Path) -> None:
  pytest.importorskip('tokenizers')
  folder = text_models.write(family, tmp_path / family)
  config = inherit.resolve(configured(folder), (), tmp_path / 'run').config
  check.check(config)
  text = config.objective.text  # type: ignore[union-attr]
  assert text.tokens.value == family and pathlib.Path(text.tokenizer).is_file() and text.weights == folder
  parts = build.parts(config, mesh=programs.mesh(schema.Mesh(1, 1, 1)), num_examples=100, num_classes=0,
                      in_memory=False)
  state = jax.device_get(init_state.begin(config, parts.program, (), tmp_path))
  runs.write(tmp_path / 'run', config, state.params, {}, class_names=('a', 'b'), image_px=config.image_px)
  again, own = (Model(loading.load(str(where))).zero_shot(NAMES) for where in (tmp_path / 'run', folder))
  image = np.random.default_rng(0).integers(0, 256, (2, *config.image_px, 3), dtype=np.uint8)
  np.testing.assert_allclose(again.logits(image, prepared=True), own.logits(image, prepared=True), rtol=1e-5, atol=1e-5)
  assert again.probability == own.probability


def test_a_text_tower_that_does_not_fit_the_run_is_named(tmp_path: pathlib.Path) -> None:
  pytest.importorskip('tokenizers')
  folder = text_models.write('siglip', tmp_path / 'siglip')
  config = inherit.resolve(configured(folder), (), tmp_path / 'run').config
  other = dataclasses.replace(config.objective, out_dim=6)  # type: ignore[type-var]
  config = dataclasses.replace(config, objective=other)
  parts = build.parts(config, mesh=programs.mesh(schema.Mesh(1, 1, 1)), num_examples=100, num_classes=0,
                      in_memory=False)
  with pytest.raises(UserError, match='objective.text.weights: expected a text tower that fits this run'):
    init_state.given(config, parts.program, ())


def test_a_run_without_a_text_tower_is_named(tmp_path: pathlib.Path) -> None:
  config = schema.Config(model=schema.ViT(patch=4, width=8, depth=1, heads=2, mlp=schema.Mlp(8)), image_px=(8, 8))
  found = build.build_objective(config, build.build_backbone(config), 2, lengths=programs.LENGTHS)
  params, _ = found.init(jax.random.key(0), {'image': np.zeros((1, 8, 8, 3), np.float32)})
  runs.write(tmp_path / 'run', config, jax.device_get(params), {}, class_names=('a', 'b'), image_px=(8, 8))
  with pytest.raises(UserError, match='got a run without one'):
    texts.load(str(tmp_path / 'run'))


def test_a_run_with_a_text_tower_is_not_written_as_one_of_classes(tmp_path: pathlib.Path) -> None:
  text = schema.Text(tokens=schema.Tokens.BYTES, width=8, depth=1, heads=2, mlp=8, length=8)
  config = schema.Config(model=schema.ViT(patch=4, width=8, depth=1, heads=2, mlp=schema.Mlp(8)), image_px=(8, 8),
                         objective=schema.Contrastive(out_dim=4, text=text))
  found = build.build_objective(config, build.build_backbone(config), 2, lengths=programs.LENGTHS)
  params, _ = found.init(jax.random.key(0), {'image': np.zeros((1, 8, 8, 3), np.float32)})
  runs.write(tmp_path / 'run', config, jax.device_get(params), {}, class_names=(), image_px=(8, 8))
  with pytest.raises(UserError, match='--family: expected weights without a text tower with --family=run, got .*run. '):
    saving.save(loading.load(str(tmp_path / 'run')), str(tmp_path / 'written'), family='run')
  assert [one.name for one in tmp_path.iterdir()] == ['run']
