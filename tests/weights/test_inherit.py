"""What a run takes from the weights that it starts from, and what decides over it."""
from __future__ import annotations

import dataclasses
import functools
import logging
import pathlib

import numpy as np
import pytest

from tests.weights import made
from vit_jax.config import engine, files, schema
from vit_jax.config.schema import Gelu, Geometry, InitSettings, Interpolation, PositionResize
from vit_jax.core.errors import UserError
from vit_jax.weights import inherit, loading, preprocess
from vit_jax.weights.network import Weights
from vit_jax.weights.preprocess import Preprocess

HOW = Preprocess(Geometry.TORCHVISION, 248, (224, 224), Interpolation.BICUBIC, True, (.4, .5, .6), (.2, .3, .4), 'made')


@functools.cache
def given() -> Weights:
  return made.network(gelu=Gelu.EXACT, preprocess=HOW, **{
      'norm.eps': 1e-5, 'positions.resize': PositionResize.BICUBIC_OFFSET})


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(loading, 'load', lambda where, **_: given())


def config(**changes: object) -> schema.Config:
  return schema.Config(image_px=(384, 384), init_from='a.npz', **changes)


def with_recipe(**changes: object) -> schema.Config:
  return config(data=schema.Data(recipe=schema.Recipe(**changes)))


def test_what_nothing_sets_is_that_of_the_weights_and_is_logged(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
  caplog.set_level(logging.INFO, 'vit_jax.weights')
  found, read = inherit.resolve(config(), (), tmp_path)
  model, recipe = found.model, found.data.recipe
  assert (model.gelu, model.norm.eps, model.positions.resize) == (Gelu.EXACT, 1e-5, PositionResize.BICUBIC_OFFSET)
  assert (recipe.mean, recipe.std) == (HOW.mean, HOW.std)
  assert (recipe.interpolation, recipe.antialias, recipe.eval_geometry) == (
      Interpolation.BICUBIC, True, Geometry.TORCHVISION)
  assert recipe.eval_resize_px == 425  # 248 * 384 / 224, truncated
  assert found.init_settings is InitSettings.CONFIG and read is given()  # it is not read again
  assert 'Taken from a.npz, because the config does not set them: model.gelu=exact, model.norm.eps=1e-05' in caplog.text
  assert 'data.recipe.mean=(0.4, 0.5, 0.6)' in caplog.text


def test_the_command_line_decides_one_setting_and_a_recipe_its_group(tmp_path: pathlib.Path) -> None:
  given = with_recipe(antialias=True)
  by_recipe = inherit.resolve(given, (), tmp_path).config.data.recipe
  assert (by_recipe.interpolation, by_recipe.eval_resize_px, by_recipe.mean) == (Interpolation.BILINEAR, 0, HOW.mean)
  by_person = inherit.resolve(given, {'data.recipe.antialias', 'model.gelu'}, tmp_path).config
  assert by_person.data.recipe.interpolation is Interpolation.BICUBIC and by_person.model.gelu is Gelu.TANH
  own_mean = inherit.resolve(with_recipe(mean=(.1, .1, .1)), (), tmp_path).config.data.recipe
  assert own_mean.mean == (.1, .1, .1) and own_mean.std == (.5, .5, .5)


def test_a_protocol_keeps_its_way_to_resize_and_a_resolved_config_everything(tmp_path: pathlib.Path) -> None:
  network = inherit.resolve(config(init_settings=InitSettings.NETWORK), (), tmp_path).config
  assert network.data.recipe.eval_resize_px == 0 and network.data.recipe.mean == HOW.mean
  assert network.model.gelu is Gelu.EXACT
  for one in (config(init_settings=InitSettings.CONFIG), dataclasses.replace(config(), init_from='')):
    assert inherit.resolve(one, (), tmp_path) == (one, None)


def test_recipes_of_papers_resize_as_their_papers_do() -> None:
  def chosen(dataset: str, protocol: str) -> InitSettings:
    spec = (f'bit_hyperrule:Ti/16,{dataset},examples=1000,side=300' if protocol == 'hyperrule' else
            f'finetune:Ti/16,{dataset},protocol={protocol}')
    return files.load(spec, []).init_settings
  assert [chosen('own', protocol) for protocol in ('vit', 'augreg')] == [InitSettings.WEIGHTS] * 2
  assert {chosen('cifar10', 'vit'), chosen('pets', 'augreg'), chosen('own', 'hyperrule')} == {InitSettings.NETWORK}
  tasks = files.load_study('vtab:Ti/16,protocol=augreg,tasks=caltech101,px=224', []).runs.values()
  assert {one.init_settings for one in tasks} == {InitSettings.NETWORK}


def test_a_saved_run_goes_on_with_the_settings_it_began_with(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  began = inherit.resolve(config(), (), tmp_path).config
  (tmp_path / 'config.json').write_text(engine.to_json(began))

  def gone(where: str, **_: object) -> Weights:
    raise UserError(f'{where} is gone')

  monkeypatch.setattr(loading, 'load', gone)
  with pytest.raises(UserError, match='gone'):
    inherit.resolve(config(), (), tmp_path)  # nothing has been saved, so the run begins
  (tmp_path / 'checkpoints' / '5').mkdir(parents=True)
  assert inherit.resolve(config(), (), tmp_path) == (began, None)
  assert inherit.resolve(config(), {'model.gelu'}, tmp_path).config.model.gelu is Gelu.TANH


def test_weights_that_evaluate_by_area_train_bilinearly(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  how = HOW._replace(interpolation=Interpolation.AREA, antialias=False, truncate=True)
  monkeypatch.setattr(loading, 'load', lambda where, **_: given()._replace(preprocess=how))
  recipe = inherit.resolve(config(), (), tmp_path).config.data.recipe
  assert recipe.eval_area and recipe.truncate and recipe.interpolation is Interpolation.BILINEAR
  resized = inherit.resolve(with_recipe(crop=schema.Crop.RESIZE), (), tmp_path).config.data.recipe
  assert not resized.eval_area and resized.interpolation is Interpolation.AREA


def test_another_kind_of_network_takes_only_how_images_are_prepared(tmp_path: pathlib.Path) -> None:
  found = inherit.resolve(config(model=schema.Mixer()), (), tmp_path).config
  assert found.model == schema.Mixer() and found.data.recipe.mean == HOW.mean


@dataclasses.dataclass
class Own:
  """A person's own network, one of whose settings has no default."""
  width: int
  gelu: Gelu = Gelu.TANH


def test_a_network_with_a_setting_without_default_keeps_what_it_sets(tmp_path: pathlib.Path) -> None:
  assert 'model.gelu' in inherit.unset(config(model=Own(3)), ())
  assert 'model.gelu' not in inherit.unset(config(model=Own(3, Gelu.EXACT)), ())
  found = inherit.resolve(config(model=Own(3)), (), tmp_path).config
  assert found.model == Own(3) and found.data.recipe.mean == HOW.mean
  alone = dataclasses.replace(config(model=Own(3)), init_from='')
  assert inherit.resolve(alone, (), tmp_path) == (alone, None)


def test_images_of_another_shape_are_resized_to_at_least_their_longer_side() -> None:
  assert preprocess.scaled(HOW, (112, 112)).resize_px == 124
  assert preprocess.scaled(HOW, (112, 160)).resize_px == 160
  assert preprocess.scaled(HOW._replace(resize_px=0), (112, 160)).resize_px == 0


def test_a_setting_that_the_weights_of_a_teacher_decide_is_refused_on_the_command_line(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  """It would have no effect. One that is as in the weights, and those of the recipe, are accepted."""
  prototypes = {'kernel': np.zeros((4, 24)), 'norm': np.zeros(24)}
  projector = {'mlp1': {'kernel': np.zeros((32, 12))}, 'prototypes': prototypes}
  teacher = given()._replace(params={**given().params, 'projector': projector})
  monkeypatch.setattr(loading, 'load', lambda where, **_: teacher)
  own = schema.FeatureTeacher('run', model=schema.ViT(width=32, heads=4, depth=5))
  run = schema.Config(objective=schema.Dinov2Distill(teacher=own, out_dim=23, hidden_dim=12))
  found = inherit.resolve(run, {'objective.hidden_dim', 'objective.teacher.weights'}, tmp_path).config.objective
  assert isinstance(found, schema.Dinov2Distill) and (found.out_dim, found.bottleneck_dim) == (24, 4)
  with pytest.raises(UserError, match='objective.out_dim: expected 24, as in objective.teacher.weights, got 23. Leave '
                                      r'it out.*\nobjective.teacher.model.depth: expected \d, as .*, got 5'):
    inherit.resolve(run, {'objective.out_dim', 'objective.hidden_dim', 'objective.teacher.model.depth'}, tmp_path)
