"""The points of a search: equally distributed, extended by more of them, and applied as overrides."""
from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from vit_jax.config import files, schema, searches
from vit_jax.core.errors import UserError


def study(method: schema.SearchMethod | None = None, **more: object) -> schema.Study:
  ranges = {'optimizer.lr': schema.LogUniform(1e-4, 1e-1), 'model.drop_path': schema.Uniform(0., .3),
            'model.depth': schema.Integers(2, 5), 'batch_size': schema.Choices((32, 64, 128))}
  base = files.load('digits', [])
  return schema.Study('mine', search=schema.Search(base, ranges, method=method or schema.Sobol(16), **more))  # type: ignore[arg-type]


def test_more_points_contain_the_fewer_ones_and_another_seed_gives_others() -> None:
  few, many, other = (searches.sobol(num, 3, seed) for num, seed in ((5, 1), (32, 1), (5, 2)))
  np.testing.assert_array_equal(few, many[:5])
  assert few.shape == (5, 3) and not np.isclose(few, other).any()


@pytest.mark.parametrize('seed', [0, 7])
def test_each_power_of_two_of_points_has_one_in_each_interval_of_each_coordinate(seed: int) -> None:
  points = searches.sobol(64, 5, seed)
  for num in (8, 16, 64):
    for column in points[:num].T:
      assert sorted(np.floor(column * num)) == list(range(num))


def test_points_fill_space_as_well_as_those_of_scipy_and_better_than_random_ones() -> None:
  from scipy.stats import qmc
  ours = np.mean([qmc.discrepancy(searches.sobol(64, 4, seed)) for seed in range(8)])
  theirs = np.mean([qmc.discrepancy(qmc.Sobol(4, seed=seed).random(64)) for seed in range(8)])
  random = np.mean([qmc.discrepancy(np.random.default_rng(seed).random((64, 4))) for seed in range(8)])
  assert ours < 1.2 * theirs < .5 * random


def test_the_points_of_a_seed_never_change() -> None:
  np.testing.assert_allclose(searches.sobol(4, 2, 3), GOLDEN, rtol=0, atol=1e-9)
  assert searches.draw(study().search)[:2] == DRAWN  # type: ignore[arg-type]


GOLDEN = [[0.498639355879277, 0.8020299063064158], [0.765616565477103, 0.49646699568256736],
          [0.716710199136287, 0.5106169446371496], [0.043517560232430696, 0.19138194480910897]]
DRAWN = [{'optimizer.lr': '0.005356', 'model.drop_path': '0.17129', 'model.depth': '3', 'batch_size': '128'},
         {'optimizer.lr': '0.0001235', 'model.drop_path': '0.11603', 'model.depth': '5', 'batch_size': '64'}]


def test_points_are_applied_to_the_config_with_the_overrides_of_the_command_line() -> None:
  found = searches.expanded(study(), ['length=3 epochs', 'optimizer=sgd'])
  points = searches.draw(found.search)  # type: ignore[arg-type]
  assert list(found.runs) == [f'point{number:03}' for number in range(16)]
  for run, point in zip(found.runs.values(), points, strict=True):
    assert run.length == '3 epochs' and isinstance(run.optimizer, schema.Sgd)
    assert run.optimizer.lr == float(point['optimizer.lr']) and 1e-4 <= run.optimizer.lr <= 1e-1
    assert 0 <= run.model.drop_path <= .3 and run.model.depth == int(point['model.depth'])
  assert {run.model.depth for run in found.runs.values()} == {2, 3, 4, 5}
  assert {run.batch_size for run in found.runs.values()} == {32, 64, 128}
  rates = sorted(math.log10(run.optimizer.lr) for run in found.runs.values())
  assert [math.floor((rate + 4) / 3 * 16 + 1e-3) for rate in rates] == list(range(16))  # of the logarithm one each


def test_parts_are_chosen_by_name() -> None:
  one = study()
  ranges = {'optimizer': schema.Choices(('adamw', 'sgd')), 'optimizer.lr': schema.LogUniform(1e-3, 1.),
            'data.recipe.flip': schema.Choices((True, False))}
  runs = searches.expanded(schema.Study('x', search=schema.Search(one.search.base, ranges))).runs.values()  # type: ignore[union-attr]
  assert {type(run.optimizer) for run in runs} == {schema.AdamW, schema.Sgd}
  assert {run.data.recipe.flip for run in runs} == {True, False}
  assert len({run.optimizer.lr for run in runs}) == 16


@pytest.mark.parametrize(('text', 'method'), [
    ('sobol:32', schema.Sobol(32)), ('halving:9,factor=3', schema.Halving(9, 3)), ('sobol', schema.Sobol()),
    ('halving:16,factor=2,rungs=3', schema.Halving(16, 2, 3))])
def test_a_method_is_read(text: str, method: schema.SearchMethod) -> None:
  assert searches.parse(text) == method


@pytest.mark.parametrize('text', [
    'random:3', 'sobol:0', 'sobol:x', 'halving:4,factor=1', '', 'sobol:16,factor=4', 'halving:16,points=8',
    'halving:16,factor=2,factor=4', 'sobol:16,,', 'halving:16,', 'sobol:', 'halving:16,factor'])
def test_what_is_no_method_is_refused(text: str) -> None:
  with pytest.raises(ValueError) as refused:
    searches.parse(text)
  assert not isinstance(refused.value, UserError)  # so that the message names the flag


@pytest.mark.parametrize(('change', 'error'), [
    ({'ranges': {}}, 'search.ranges: expected settings with their ranges'),
    ({'ranges': {'optimizer.lr': schema.LogUniform(1e-2, 1e-3)}}, 'search.ranges.optimizer.lr: expected low < high'),
    ({'ranges': {'optimizer.lr': schema.LogUniform(0., 1.)}}, 'optimizer.lr.low: expected more than 0, got 0.0'),
    ({'ranges': {'batch_size': schema.Choices((8,))}}, 'batch_size: expected at least two values'),
    ({'ranges': {'optimizer.rate': schema.Uniform(0., 1.)}}, 'config.optimizer.rate: expected the name of a setting'),
    ({'method': schema.Halving(2, 4)}, 'search.method.points: expected at least search.method.factor=4, of which'),
    ({'metric': 'val/top1'}, "search.metric: expected EVALUATION/METRIC of test, got 'val/top1'"),
])
def test_a_search_that_makes_no_sense_is_refused(change: dict[str, object], error: str) -> None:
  one = study()
  wrong = dataclasses.replace(one, search=dataclasses.replace(one.search, **change))  # type: ignore[type-var]
  with pytest.raises(UserError) as caught:
    searches.expanded(wrong)
  assert error in str(caught.value)


def test_a_setting_that_the_search_chooses_cannot_be_given() -> None:
  with pytest.raises(UserError, match='config.optimizer.lr: expected a setting that the search does not choose'):
    searches.expanded(study(), ['optimizer.lr=1e-3'])
  with pytest.raises(UserError, match='--search: expected a study with ranges of settings'):
    searches.expanded(schema.Study('x', {'a': schema.Config()}), method=schema.Sobol())
