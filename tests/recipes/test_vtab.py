"""VTAB-1k and Table 2 as studies: which runs there are, and what their tables say."""
from __future__ import annotations

import numpy as np
import pytest

from vit_jax.config import check, files, schema
from vit_jax.core.errors import UserError
from vit_jax.data.image import crops
from vit_jax.recipes import published, transfer
from vit_jax.recipes.studies import Point
from vit_jax.study import table


def done(config: schema.Config, score: float, **metrics: float) -> schema.Result:
  return schema.Result(config, 'somewhere', 1, 1., 1, 1., {'test/top1': score, **metrics}, score)


def results(study: schema.Study, scores: dict[str, float]) -> schema.Results:
  return {name: done(study.runs[name], score) for name, score in scores.items()}


def test_the_papers_protocol_has_three_runs_a_task() -> None:
  study = files.load_study('vtab:L/16', [])
  assert len(study.runs) == 57 and not study.then
  config = study.runs['clevr-count_seed2']
  check.check(config)
  assert (config.length, config.batch_size, config.image_px, config.seed) == ('2500 steps', 512, (384, 384), 2)
  assert config.optimizer.lr == .01 and config.optimizer.schedule.warmup == '200 steps' and config.model.width == 1024
  assert (config.data.source, config.data.train_split, config.data.eval_split) == (
      'vtab:clevr/count', 'train800val200', 'test') and config.data.num_classes == 8


# BiT (arXiv 1912.11370), Appendix F: what is not flipped, and what is not cropped. The ViT paper, B.1.1, follows it.
UNFLIPPED = {'dsprites/orientation', 'dsprites/x_position', 'smallnorb/azimuth'}
UNCROPPED = {'clevr/count', 'clevr/distance', 'dmlab', 'kitti/distance', 'dsprites/x_position'}


def test_tasks_are_cropped_and_flipped_as_in_bit() -> None:
  runs = files.load_study('vtab:L/16,seeds=1', []).runs.values()
  recipes = {run.data.source.removeprefix('vtab:'): run.data.recipe for run in runs}
  assert {task for task, recipe in recipes.items() if not recipe.flip} == UNFLIPPED
  assert {task for task, recipe in recipes.items() if recipe.crop is schema.Crop.RESIZE} == UNCROPPED
  size = (448, 448)  # as if every image were resized to it
  for task in recipes.keys() - UNCROPPED:
    windows = [crops.draw(recipes[task], size, np.random.default_rng(seed)) for seed in range(20)]
    assert {(one.height, one.width) for one in windows} == {(384, 384)} and len({one.top for one in windows}) > 5
    assert recipes[task].eval_resize_px == 0  # evaluation only resizes
  for run in runs:
    check.check(run)


def test_the_sweep_chooses_by_val200_for_each_task() -> None:
  study = files.load_study('vtab:Ti/16,protocol=augreg,tasks=pets+dmlab,seeds=2,px=224', [])
  assert len(study.runs) == 16 and study.runs['pets_lr0.03_steps500'].data.eval_split == 'val200'
  assert study.runs['pets_lr0.03_steps500'].image_px == (224, 224)
  found = study.then[0](results(study, {'pets_lr0.03_steps500': .5, 'pets_lr0.003_steps2500': .7}))
  assert list(found) == ['pets_seed0', 'pets_seed1']  # dmlab has nothing to choose by
  assert found['pets_seed1'].optimizer.lr == .003 and found['pets_seed1'].length == '2500 steps'
  assert found['pets_seed1'].data.eval_split == 'test' and found['pets_seed1'].seed == 1
  with pytest.raises(UserError, match='results: expected at least one finished run to choose by, got none.'):
    study.then[0]({})


def test_an_unknown_task_is_reported() -> None:
  with pytest.raises(UserError, match='tasks: expected some of caltech101, cifar100, .*, got dogs. Put . between'):
    files.load_study('vtab:Ti/16,tasks=pets+dogs', [])


def test_the_table_has_tasks_groups_and_all_over_seeds() -> None:
  study = files.load_study('vtab:Ti/16,tasks=pets+dtd+dmlab', [])
  rows = study.table(results(study, {
      'pets_seed0': .5, 'pets_seed1': .7, 'dtd_seed0': .1, 'dtd_seed1': .2, 'dmlab_seed0': .9, 'dmlab_seed1': .9}))
  by_task = {row['task']: row for row in rows}
  assert by_task['pets'] == {
      'task': 'pets', 'group': 'natural', 'top-1 %': 60., 'deviation': 14.14, 'runs': 2, 'tasks': '1',
      'ViT-H/14 JFT, Table 9': 97.2, 'ViT-L/16 JFT, Table 9': 96.7, 'ViT-L/16 I21k, Table 9': 92.7}
  assert (by_task['mean of natural']['top-1 %'], by_task['mean of natural']['deviation']) == (37.5, 10.61)
  assert by_task['mean of natural']['tasks'] == '2 of 7' and by_task['mean of structured']['top-1 %'] == 90.
  assert by_task['VTAB-19']['top-1 %'] == 55. and by_task['VTAB-19']['tasks'] == '3 of 19'


def test_a_task_without_a_result_is_not_in_the_means_and_marked() -> None:
  study = files.load_study('vtab:Ti/16,tasks=pets+dtd', [])
  by_task = {row['task']: row for row in study.table(results(study, {'dtd_seed0': .25}))}
  assert by_task['pets']['tasks'] == 'not measured' and by_task['pets']['top-1 %'] is None
  assert by_task['VTAB-19']['top-1 %'] == 25. and by_task['VTAB-19']['tasks'] == '1 of 19'


def test_a_quick_look_is_marked_in_the_table() -> None:
  study = files.load_study('vtab:Ti/16,tasks=pets', ['evals.test.limit=50'])
  rows = table.make_rows(study, results(study, {'pets_seed0': .5}))
  assert all(row['partial'] == 'some runs were evaluated on a part of their split' for row in rows)


def test_table_two_tunes_and_then_runs_three_times() -> None:
  study = files.load_study('transfer:L/16,tasks=pets', [])
  assert len(study.runs) == 5 * 4 + 3
  tuned = study.runs['imagenet2012_lr0.06_steps20000']
  assert tuned.image_px == (512, 512) and tuned.data.eval_split == 'train[99%:]' and list(tuned.evals) == ['val']
  found = study.then[0](results(study, {'imagenet2012_lr0.06_steps20000': .8, 'cifar10_lr0.01_steps10000': .9,
                                        'cifar10_lr0.03_steps10000': .95}))
  assert list(found) == [f'{name}_seed{i}' for name in ('imagenet2012', 'cifar10') for i in range(3)]
  final = found['imagenet2012_seed1']
  check.check(final)
  assert final.train.ema == .9999 and list(final.evals) == ['test', 'real'] and final.seed == 1
  assert final.evals['real'].source == 'tfds:imagenet2012_real' and final.evals['real'].labels == ''
  assert found['cifar10_seed0'].optimizer.lr == .03 and found['cifar10_seed0'].image_px == (384, 384)
  assert transfer.build('L/16', 'imagenet2012', phase='final', point=Point(.03, 20_000, 500), px=0,
                        real='r.json').evals['real'].labels == 'r.json'


def test_no_two_runs_of_table_two_have_the_same_name() -> None:
  study = files.load_study('transfer:L/16', [])
  final = study.then[0](results(study, dict.fromkeys(study.runs, .5)))
  assert len(study.runs) == 5 * 4 + 19 * 3 and len(final) == 5 * 3
  assert not set(final) & set(study.runs)  # CIFAR-100 and Pets are tasks of VTAB, too


def test_table_nine_stands_beside_the_tasks_and_its_mean_is_that_of_the_paper() -> None:
  rows = files.load_study('vtab:L/16', []).table({})
  means = {row['task']: [row[f'{name}, Table 9'] for name in published.TABLE_9_COLUMNS] for row in rows}['VTAB-19']
  assert [round(value, 1) for value in means] == list(published.TABLE_9_MEAN)
  table_2 = [cell.mean for cell in published.CELLS['VTAB (19 tasks)'][:3]]
  assert means == pytest.approx(table_2, abs=.02)  # Table 9 is rounded to 0.1, so its mean is exact to 0.05 / sqrt(19)


# ViT paper, Appendix B.1.1.
def test_a_resnet_takes_the_better_of_both_protocols() -> None:
  study = files.load_study('transfer:BiT-R50x1,sets=pets+imagenet2012,seeds=1,real=no', [])
  tried = study.runs['pets_hyperrule']
  check.check(tried)
  assert (tried.optimizer.lr, tried.image_px, tried.length) == (.003, (480, 480), '500 steps')
  assert (tried.data.train_split, tried.data.eval_split) == ('train[:90%]', 'train[90%:]')
  assert len(study.runs) == 2 * 5
  first, second = (study.then[0](results(study, {'pets_lr0.01_steps500': .8, 'pets_hyperrule': score}))['pets_seed0']
                   for score in (.7, .9))
  assert first.optimizer.schedule.decay is schema.Decay.COSINE and first.image_px == (384, 384)
  assert second.optimizer.schedule.decay is schema.Decay.STEPS and second.data.train_split == 'train'
  assert 'pets_hyperrule' not in files.load_study('transfer:B/16,sets=pets', []).runs


def test_table_five_stands_beside_a_network_that_is_in_it() -> None:
  by_set = {row['set']: row for row in files.load_study('transfer:B/32,sets=cifar10', []).table({})}
  assert [by_set['ImageNet'][f'ViT-B/32 {one}, Table 5'] for one in ('i1k', 'i21k', 'jft')] == [
      '73.38', '81.28', '80.73']
  assert by_set['VTAB (19 tasks)']['ViT-B/32 jft, Table 5'] == '–'
  assert by_set['Oxford Flowers-102']['ViT-B/32 i21k, Table 5'] == '99.11'
  assert 'ViT-Ti/16 i1k, Table 5' not in files.load_study('transfer:Ti/16,sets=cifar10', []).table({})[0]


def test_the_parts_of_table_two_can_be_chosen() -> None:
  assert set(files.load_study('transfer:L/16,sets=vtab,tasks=pets,seeds=1', []).runs) == {'vtab_pets_seed0'}
  assert len(files.load_study('transfer:L/16,sets=cifar10+pets', []).runs) == 8
  with pytest.raises(UserError, match='sets: expected some of imagenet2012, cifar10, .*, vtab, got jft. Put'):
    files.load_study('transfer:L/16,sets=jft', [])


def test_ours_stand_beside_the_published_numbers_and_say_where_they_are_from() -> None:
  study = files.load_study('transfer:L/16,tasks=pets+dtd', [])
  config = study.runs['vtab_pets_seed0']
  found = {f'imagenet2012_seed{i}': done(config, .85 + i / 100, **{'real/top1': .5, 'real/top1@ema': .88 + i / 100})
           for i in range(3)} | {'vtab_pets_seed0': done(config, .5), 'cifar10_seed0': done(config, .99)}
  by_set = {row['set']: row for row in study.table(found)}
  assert list(by_set) == list(published.CELLS)
  one = by_set['ImageNet']
  assert (one['L/16 here'], one['runs'], one['status']) == ('86.00 ± 1.00', 3, 'measured here')
  assert one['ViT-H/14 JFT'] == '88.55 ± 0.04' and one['Noisy Student EfficientNet-L2'] == '88.4/88.5'
  assert by_set['ImageNet ReaL']['L/16 here'] == '89.00 ± 1.00'
  assert by_set['CIFAR-10']['L/16 here'] == '99.00' and by_set['CIFAR-100']['status'] == 'published only'
  assert by_set['Oxford-IIIT Pets']['status'] == 'published only'  # the task of VTAB has 1,000 examples only
  assert by_set['VTAB (19 tasks)']['note'] == '1 of 19 tasks' and by_set['VTAB (19 tasks)']['L/16 here'] == '50.00'
  cost = by_set['TPUv3-core-days']
  assert cost['ViT-L/16 JFT'] == '0.68k' and (cost['L/16 here'], cost['note']) == ('–', 'of pre-training')


def test_published_rows_are_whole() -> None:
  assert all(len(cells) == len(published.COLUMNS) for cells in published.CELLS.values())
  assert str(published.CELLS['VTAB (19 tasks)'][3]) == '76.29 ± 1.70' and str(published.Cell(None)) == '–'
