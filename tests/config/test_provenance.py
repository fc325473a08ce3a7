"""What a checkpoint and a config say of the same network."""
from __future__ import annotations

import dataclasses

import pytest

from vit_jax.config import provenance, schema
from vit_jax.core.errors import UserError


def changed(config: schema.Config, **model: object) -> schema.Config:
  return dataclasses.replace(config, model=dataclasses.replace(config.model, **model))


META = {provenance.SETTINGS: provenance.settings(schema.Config()), 'step': 3}


@pytest.mark.parametrize(('config', 'name'), [
    (changed(schema.Config(), gelu=schema.Gelu.EXACT), 'model.gelu'),
    (changed(schema.Config(), norm=schema.LayerNorm(1e-5)), 'model.norm.eps'),
    (changed(schema.Config(), stem=schema.ResNetStem()), 'model.stem.type'),
    (schema.Config(model=schema.Mixer()), 'model.type'),
    (schema.Config(image_px=(96, 96)), 'image_px'),
    (schema.Config(objective=schema.Mae()), 'objective.type'),
    (schema.Config(data=schema.Data(recipe=schema.Recipe(mean=(0., 0., 0.)))), 'data.recipe.mean'),
    (schema.Config(data=schema.Data(recipe=schema.Recipe(eval_resize_px=256))), 'data.recipe.eval_resize_px')])
def test_a_setting_that_changes_results_is_refused_unless_a_person_gave_it(
    config: schema.Config, name: str, caplog: pytest.LogCaptureFixture) -> None:
  assert name in provenance.differences(META, config)
  with pytest.raises(UserError, match=rf'a/config.json: expected the settings that checkpoint 3 (.|\n)*{name}: .* in '
                                      r'the checkpoint, .* in the config'):
    provenance.check(META, config, said='a/config.json')
  provenance.check(META, config, said='x', overridden=tuple(provenance.differences(META, config)))
  assert name in caplog.text


@pytest.mark.parametrize('config', [
    changed(schema.Config(), dtype=schema.DType.BF16, remat=schema.Remat.FULL, execution=schema.Execution.SCAN),
    changed(schema.Config(), dropout=.1, drop_path=.1),
    schema.Config(seed=4, length='3 steps', data=schema.Data(source='folder:x', recipe=schema.Recipe(mixup=.2)))])
def test_what_changes_training_or_rounding_alone_is_not_compared(config: schema.Config) -> None:
  assert provenance.differences(META, config) == {}


def test_settings_of_the_same_objective_are_compared() -> None:
  saved = provenance.settings(schema.Config(objective=schema.Mae(norm_pix_loss=True)))
  config = schema.Config(objective=schema.Mae(norm_pix_loss=False))
  assert provenance.differences({provenance.SETTINGS: saved}, config) == {'objective.norm_pix_loss': (True, False)}


def test_settings_that_only_one_side_knows_are_not_compared() -> None:
  saved = dict(META[provenance.SETTINGS])
  del saved['model.gelu']
  saved['model.gone'] = 1
  for meta in ({provenance.SETTINGS: saved}, {provenance.SETTINGS: 'damaged'}, {}):
    assert provenance.differences(meta, changed(schema.Config(), gelu=schema.Gelu.EXACT)) == {}


def test_a_part_that_a_person_gave_covers_what_is_in_it() -> None:
  config = changed(schema.Config(), stem=schema.ResNetStem())
  provenance.check(META, config, said='x', overridden=('model.stem',))
  with pytest.raises(UserError):
    provenance.check(META, config, said='x', overridden=('model.ste',))
