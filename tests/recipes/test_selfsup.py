"""The comparison of self-supervised objectives: what its runs share, their lengths, and the rows of the table."""
from __future__ import annotations

import dataclasses

import pytest

from vit_jax.config import check, files, schema
from vit_jax.core.errors import UserError
from vit_jax.recipes import selfsup

STUDY = 'study_selfsup:source=folder:there'


def result(config: schema.Config, metrics: dict[str, float], *, step: int = 7,
           processor_s: float = 0.) -> schema.Result:
  return schema.Result(config, 'somewhere', step, 1., 11, 1., metrics, None, training_processor_s=processor_s)


def test_runs_share_network_evaluations_images_and_where_the_objective_compares_crops_those() -> None:
  runs = files.load_study(f'{STUDY},images=640', []).runs
  trained = {name: run for name, run in runs.items() if name != 'random_seed0'}
  assert len(runs) == len(selfsup.POINTS) and {run.length for run in trained.values()} == {'640 examples'}
  assert all(run.model == runs['dino_seed0'].model and run.data.source == 'folder:there' for run in runs.values())
  assert {repr(dataclasses.replace(run.evals['knn'], views=())) for run in runs.values()} == {
      repr(dataclasses.replace(runs['mae_seed0'].evals['knn'], views=()))}
  crops = [run.data.recipe for run in runs.values() if run.objective.takes_views]
  assert len(crops) == 5 and {repr(one.views.global_area) for one in crops} == {'(0.4, 1.0)'}
  assert sorted(one.views.num_local for one in crops) == [0, 2, 2, 2, 2]


def test_a_run_has_the_settings_of_the_recipe_of_its_objective() -> None:
  run, recipe = files.load_study(STUDY, []).runs['mae_seed0'], files.load('mae_cifar10', [])
  assert run.optimizer == recipe.optimizer and run.objective == recipe.objective
  assert (run.batch_size, run.data.recipe) == (recipe.batch_size, recipe.data.recipe)
  without = files.load_study(f'{STUDY},objectives=dino_ibot', []).runs['dino_ibot_seed0'].objective
  assert isinstance(without, schema.Dinov2) and (without.ibot_weight, without.koleo_weight) == (1., 0.)


def test_widths_of_heads_and_decoders_follow_the_network() -> None:
  runs = files.load_study(f'{STUDY},network=small', []).runs
  mae, ijepa, dino = (runs[f'{name}_seed0'].objective for name in ('mae', 'ijepa', 'dino'))
  assert isinstance(mae, schema.Mae) and isinstance(ijepa, schema.IJepa) and isinstance(dino, schema.Dino)
  assert (mae.decoder_width, ijepa.predictor_width, dino.hidden_dim, dino.out_dim) == (144, 144, 768, 1024)
  assert ijepa.min_context == 10
  tiny = files.load_study(f'{STUDY},objectives=ijepa', []).runs['ijepa_seed0'].objective
  assert isinstance(tiny, schema.IJepa) and tiny.min_context == 4  # of 8 patches at most


def test_the_random_network_is_not_trained() -> None:
  run = files.load_study(f'{STUDY},objectives=random,images=640', []).runs['random_seed0']
  assert (run.length, run.optimizer.lr, list(run.evals)) == ('1 steps', 0., ['knn', 'logistic'])


def test_equal_seconds_follow_from_the_measured_cost_of_a_step() -> None:
  study = files.load_study(f'{STUDY},seconds=60,objectives=random+dino+mae,seeds=2', [])
  assert list(study.runs) == ['dino_cost', 'mae_cost', 'random_seed0', 'random_seed1']
  assert not study.runs['dino_cost'].evals
  measured = {'dino_cost': result(study.runs['dino_cost'], {}, step=100, processor_s=9.9),
              'mae_cost': result(study.runs['mae_cost'], {}, step=50, processor_s=2.45)}
  (equal_seconds,) = study.then
  found = equal_seconds(measured)
  assert {name: run.length for name, run in found.items()} == {
      'dino_seed0': f'{600 * 64} examples', 'dino_seed1': f'{600 * 64} examples',
      'mae_seed0': f'{1200 * 128} examples', 'mae_seed1': f'{1200 * 128} examples'}
  for run in found.values():
    check.check(run)
  with pytest.raises(UserError, match='^seconds: expected the measured cost of a step of mae, got none'):
    equal_seconds({'dino_cost': measured['dino_cost']})


def test_images_and_seconds_exclude_each_other() -> None:
  with pytest.raises(UserError, match='^images: expected it without seconds=60, got 100. Leave one of them out.'):
    files.load_study(f'{STUDY},images=100,seconds=60', [])


def test_a_row_has_median_and_range_over_seeds() -> None:
  study = files.load_study(f'{STUDY},images=640,objectives=random+dino,seeds=3', [])
  results = {f'dino_seed{seed}': result(study.runs[f'dino_seed{seed}'], {'knn/top1_k20@teacher': value}, step=10,
                                        processor_s=4. + seed) for seed, value in enumerate((.5, .3, .31))}
  results['random_seed0'] = result(study.runs['random_seed0'], {'knn/top1_k20': .25}, step=1)
  assert study.table is not None
  random, dino = study.table(results)
  assert (random['images'], random['k-NN %'], random['seeds']) == (0, 25., 1)
  assert (dino['images'], dino['updates'], dino['seeds'], dino['training processor seconds']) == (640, 10, 3, 5.)
  assert [dino[f'k-NN %{part}'] for part in ('', ', smallest', ', largest')] == [31., 30., 50.]


def test_variants_differ_from_dino_in_one_setting_on_the_same_images() -> None:
  runs = files.load_study('study_small_data:images=640', []).runs
  base = runs['base_seed0']
  assert {run.data.train_split for run in runs.values()} == {selfsup.LABELED}
  assert isinstance(base.evals['knn'], schema.Knn) and base.evals['knn'].train_split == selfsup.LABELED
  large = runs['batch_256_seed0']
  assert large.batch_size == 256 and dataclasses.replace(large, name='base', batch_size=64) == base
  changed = dataclasses.replace(runs['momentum_0.996_seed0'], name='base')
  assert changed != base and schema.replaced(changed, {'objective.momentum.start': .99}) == base
