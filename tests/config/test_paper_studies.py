"""The paper's studies as data: which runs, of what, and the tables made of their results."""
from __future__ import annotations

import collections
import dataclasses

import pytest

from vit_jax.config import check, durations, files, schema
from vit_jax.core.errors import UserError
from vit_jax.recipes import ablations, noisy_student, published, scaling, sizes
from vit_jax.weights import addresses

SPECS = ['study_scaling', 'study_scaling:small', 'study_data_size', 'study_data_size:i1k', 'study_data_size:small',
         'study_data_size:sets', 'study_optimizers', 'study_selfsup', 'study_small_data', 'noisy_student',
         'noisy_student:cifar10',
         'noisy_student:cifar10,teacher=x.npz,model=BiT',
         *(f'ablations:{which},{scale}' for which in (*ablations.VARIANTS, 'optimizer') for scale in ('jft', 'small'))]


def result(config: schema.Config, name: str, headline: float = .5, exaflops: float = 1.,
           **best: float) -> schema.Result:
  return schema.Result(config, f'/w/{name}', 9, 1., 11, exaflops, collections.defaultdict(float), headline,
                       {key.replace('__', '/'): value for key, value in best.items()})


def done(study: schema.Study) -> tuple[dict[str, schema.Config], schema.Results]:
  """All runs of a study with results that are all alike."""
  runs = dict(study.runs)
  for stage in study.then:
    runs |= stage({name: result(config, name) for name, config in runs.items()})
  return runs, {name: result(config, name) for name, config in runs.items()}


@pytest.mark.dear('study_scaling', reason='4 s: many large networks are traced')
@pytest.mark.parametrize('spec', SPECS)
def test_all_runs_of_a_study_fit_and_its_figure_has_its_columns(spec: str) -> None:
  study = files.load_study(spec, [])
  runs, results = done(study)
  for config in runs.values():
    check.check(config)
  assert study.table is not None
  rows = study.table(results)
  columns = {name for row in rows for name in row}
  assert {name for f in study.figures for name in (f.x, f.y, f.series) if name} <= columns and rows
  if study.curves:
    assert study.curves(results)


def test_subsets_are_nested_and_all_else_is_the_same() -> None:
  study = files.load_study('study_data_size:small,source=digits,subsets=300+100,models=ViT+BiT,steps=7', [])
  assert list(study.runs) == ['ViT_100', 'BiT_100', 'ViT_300', 'BiT_300']
  assert [run.data.train_split for run in study.runs.values()] == ['train[:100]'] * 2 + ['train[:300]'] * 2
  one, other = study.runs['BiT_100'], study.runs['BiT_300']
  assert dataclasses.replace(one, name='', data=other.data) == dataclasses.replace(other, name='')
  assert one.length == '7 steps' and one.model == sizes.small('BiT') and one.data.source == 'digits'
  assert one.train.early_stop.metric == 'val/top1' and one.data.eval_split == 'train[-2000:]'


def test_what_counts_is_the_best_moment_and_who_was_ahead() -> None:
  study = files.load_study('study_data_size:small,subsets=100+300,models=ViT+BiT', [])
  val = {'ViT_100': .2, 'BiT_100': .3, 'ViT_300': .6, 'BiT_300': .5}
  rows = study.table({name: result(config, name, 0., val__top1=val[name], fewshot__5shot=.1, step=4.)
                      for name, config in study.runs.items()})
  assert [(row['model'], row['images'], row['best val %'], row['ahead of ResNets']) for row in rows] == [
      ('ViT', 100, 20., 'no'), ('BiT', 100, 30., None), ('ViT', 300, 60., 'yes'), ('BiT', 300, 50., None)]
  assert rows[0]['few-shot %'] == 10. and rows[0]['best at step'] == 4


def test_runs_of_the_study_of_data_size_may_have_another_name() -> None:
  study = files.load_study('study_data_size:small,subsets=100,models=ViT+BiT', ['name=mine'])
  rows = study.table({name: result(config, name, val__top1=.5) for name, config in study.runs.items()})
  assert [(row['model'], row['images'], row['ahead of ResNets']) for row in rows] == [
      ('ViT', 100, 'no'), ('BiT', 100, None)]


def test_sets_of_three_sizes_are_pretrained_on_and_then_imagenet() -> None:
  study = files.load_study('study_data_size:sets,models=L/16+BiT-R50x1', [])
  runs, results = done(study)
  assert list(runs)[:6] == [f'{name}_{one}' for name in ('L_16', 'BiT-R50x1') for one in ('i1k', 'i21k', 'jft')]
  assert [runs[f'L_16_{one}'].length for one in ('i1k', 'i21k', 'jft')] == ['300 epochs', '90 epochs', '7 epochs']
  assert runs['L_16_jft_imagenet2012_seed0'].init_from == '/w/L_16_jft' and study.table
  assert len(runs) == 6 + 3 * (4 + 1) + 3 * (5 + 1)  # BiT tries BiT-HyperRule too
  rows = study.table({**results, 'L_16_jft_imagenet2012_seed0': result(runs['L_16_jft'], 'x', .875)})
  assert [(row['model'], row['set'], row['images']) for row in rows[1:3]] == [
      ('L/16', 'i21k', 14_197_122), ('L/16', 'jft', 303_000_000)]
  assert rows[2]['ImageNet %'] == 87.5 and len(rows) == 6
  assert [row['Table 5 %'] for row in rows] == [76.53, 85.15, 87.12, None, None, None]


@pytest.mark.parametrize(('spec', 'message'), [
    ('study_data_size:small,subsets=many', "subsets: expected numbers of images such as 1000.4000.16000, got 'many'"),
    ('study_data_size:small,subsets=0', 'subsets: expected positive numbers of images such as .*, got 0'),
    ('study_data_size:small,models=ViT+MLP', 'models: expected some of ViT, hybrid, BiT, got MLP. Put . betw'),
    ('study_scaling:models=B/32+X/1', "models: expected some of ViT, hybrid, ResNet, .*, got 'X/1'. Put"),
    ('noisy_student:cifar10,model=X', 'model: expected SIZE.PATCH')])
def test_unknown_arguments_are_reported(spec: str, message: str) -> None:
  with pytest.raises(UserError, match=message):
    files.load_study(spec, [])


def test_networks_with_a_plus_in_their_names_can_be_chosen() -> None:
  study = files.load_study('study_scaling:models=R50+B/16+ResNet+B/32', [])
  assert list(study.runs) == [
      'B_32_7ep', 'R50+B_16_7ep', 'BiT-R50x1_7ep', 'BiT-R50x2_7ep', 'BiT-R101x1_7ep', 'BiT-R152x1_7ep',
      'BiT-R152x2_7ep', 'BiT-R152x2_14ep', 'BiT-R200x3_14ep']


TABLE_3 = {  # ViT paper, Table 3: learning rate of pre-training on JFT-300M; R200x3 is not in it
    'B/32': 8e-4, 'B/16': 8e-4, 'L/32': 6e-4, 'L/16': 4e-4, 'H/14': 3e-4, 'R50+B/32': 8e-4, 'R50+B/16': 8e-4,
    'R50+L/32': 2e-4, 'R50+L/16': 4e-4, 'BiT-R50x1': 1e-3, 'BiT-R50x2': 1e-3, 'BiT-R101x1': 8e-4, 'BiT-R152x1': 6e-4,
    'BiT-R152x2': 6e-4, 'BiT-R200x3': 6e-4}


def test_the_scaling_study_has_the_eighteen_runs_of_table_six_with_the_rates_of_table_three() -> None:
  runs = files.load_study('study_scaling', []).runs
  assert list(runs) == [f'{row.model.replace("/", "_")}_{row.epochs}ep' for row in published.TABLE_6]
  assert len(runs) == 18 and sum(name.startswith('BiT') for name in runs) == 7
  for row, run in zip(published.TABLE_6, runs.values(), strict=True):
    assert (run.length, run.optimizer.lr) == (f'{row.epochs} epochs', TABLE_3[row.model])


def test_the_scaling_study_fine_tunes_as_the_paper_and_shows_all_six_columns() -> None:
  study = files.load_study('study_scaling:models=BiT-R50x1,sets=imagenet2012+cifar10', [])
  runs, _ = done(study)
  tuned = [name.removeprefix('BiT-R50x1_7ep_') for name in runs][1:]
  assert [name for name in tuned if name.startswith('cifar10')] == [
      *(f'cifar10_lr{rate}_steps10000' for rate in (.001, .003, .01, .03)), 'cifar10_hyperrule', 'cifar10_seed0']
  final = runs['BiT-R50x1_7ep_imagenet2012_seed0']
  assert final.image_px == (384, 384) and final.train.ema == 0. and list(final.evals) == ['test', 'real']
  assert final.init_from == '/w/BiT-R50x1_7ep'
  scores = {name: result(run, name, .8) for name, run in runs.items()}
  scores['BiT-R50x1_7ep_imagenet2012_seed0'].metrics['real/top1'] = .9
  row = study.table(scores)[0]
  assert [row[name] for name in ('top-1 %', 'ImageNet ReaL %', 'CIFAR-10 %', 'CIFAR-100 %')] == [80., 90., 80., None]
  assert (row['ImageNet ReaL published %'], row['Oxford Flowers-102 published %']) == (84.56, 94.26)


def test_the_scaling_table_has_the_papers_numbers_its_law_and_what_comes_next() -> None:
  study = files.load_study('study_scaling:models=ViT', [])
  runs, _ = done(study)
  paper = {scaling.Run(row.model, row.epochs).name: row for row in published.TABLE_6}
  results = {}
  for name, config in runs.items():
    row = next(row for known, row in paper.items() if f'{name}_'.startswith(f'{known}_'))
    results[name] = result(config, name, row.imagenet / 100, row.exaflops)
  assert study.table and study.curves
  rows = study.table(results)
  measured, predicted = rows[:-1], rows[-1]
  assert [row['exaFLOPs'] for row in measured] == [row['published exaFLOPs'] for row in measured] == [
      55, 224, 196, 783, 1567, 4262]
  assert [row['top-1 %'] for row in measured] == pytest.approx([row['published %'] for row in measured])
  assert [row['model'] for row in measured if row['on the frontier'] == 'no'] == ['B/16']
  assert predicted['model'] == 'ViT-g/14' and 6000 < float(predicted['exaFLOPs'] or 0) < 7500
  assert 88 < float(predicted['law %'] or 0) < float(predicted['at most %'] or 0) < 91
  drawn = study.curves(results)
  assert {row['family'] for row in drawn} == {'ViT', 'frontier'}
  assert max(float(row['exaFLOPs'] or 0) for row in drawn) == pytest.approx(float(predicted['exaFLOPs'] or 0), rel=1e-3)
  assert runs['B_32_7ep_imagenet2012_seed0'].init_from == '/w/B_32_7ep'
  assert runs['H_14_14ep_imagenet2012_seed0'].image_px == (378, 378)


def test_a_student_is_the_next_teacher() -> None:
  study = files.load_study('noisy_student:cifar10,source=digits', [])
  runs, results = done(study)
  assert list(runs) == ['teacher', 'student_1', 'student_2']
  first, second = (runs[f'student_{number}'].data.pseudo for number in (1, 2))
  assert (first.teacher, first.labels) == ('/w/teacher', '/w/teacher/pseudo_1')
  assert (second.teacher, second.labels) == ('/w/student_1', '/w/student_1/pseudo_2')
  assert first.split == 'train[10%:]' and runs['teacher'].data.train_split == 'train[:10%]'
  assert runs['student_1'].batch_size * (1 - first.share) == runs['teacher'].batch_size
  assert not runs['teacher'].data.pseudo.source
  scores = {'teacher': .5, 'student_1': .6, 'student_2': .58}
  rows = noisy_student.rows({name: dataclasses.replace(one, headline=scores[name]) for name, one in results.items()})
  assert [row['round'] for row in rows] == [0, 1, 2] and rows[0]['over its teacher'] is None
  assert rows[2]['over its teacher'] == pytest.approx(-2) and rows[2]['over the first'] == pytest.approx(8)


@pytest.mark.parametrize('suffix', addresses.SUFFIXES)
def test_labels_of_a_file_of_weights_lie_beside_it(suffix: str) -> None:
  one = noisy_student.taught(schema.Config(), f'a/x{suffix}', schema.Pseudo(), 2)
  assert one.data.pseudo.labels == f'a/x{suffix}.pseudo_2'


def test_rounds_may_begin_with_weights_that_are_there() -> None:
  study = files.load_study('noisy_student:model=B/16,teacher=a/x.npz,rounds=3', [])
  runs, _ = done(study)
  assert list(study.runs) == ['student_1'] and list(runs) == ['student_1', 'student_2', 'student_3']
  pseudo = runs['student_3'].data.pseudo
  assert study.runs['student_1'].data.pseudo.labels == 'a/x.npz.pseudo_1'
  assert pseudo.share == pytest.approx(28 / 29) and runs['student_3'].batch_size == 29 * 2048
  assert (pseudo.per_class, pseudo.threshold) == (130_000, .3)


# google-research/noisystudent@aac52bf, main.py and local_scripts/imagenet.
def test_noisy_student_of_the_paper_goes_from_b7_to_l2() -> None:
  runs, _ = done(files.load_study('noisy_student', []))
  factors = {name: run.model.width_factor for name, run in runs.items() if isinstance(run.model, schema.EfficientNet)}
  assert factors == {'teacher': 2., 'student_1': 4.3, 'student_2': 4.3, 'student_3': 4.3, 'at_800px': 4.3}
  assert runs['teacher'].image_px == (600, 600) and runs['student_1'].image_px == (475, 475)
  assert runs['student_1'].data.recipe.randaugment.magnitude == 27.


def test_noisy_student_has_the_optimizer_of_its_program_and_ends_at_800_px() -> None:
  runs, _ = done(files.load_study('noisy_student', []))
  epoch = 1_281_167 / 2_048  # google-research/noisystudent@aac52bf, main.py: flags and model_fn; utils.py
  for name, scale in (('teacher', 1), ('student_1', 15), ('student_3', 29)):
    run, o = runs[name], runs[name].optimizer
    assert isinstance(o, schema.RMSProp) and (o.b2, o.momentum, o.clip_norm) == (.9, .9, 0.)
    assert o.lr * run.batch_size / o.base_batch_size == pytest.approx(.016 * 2_048 / 256)
    # Its loss is `scale` times the mean over all images: the same updates with these.
    assert (o.weight_decay * scale, o.eps * scale**2, o.initial_scale * scale**2) == pytest.approx((1e-5, 1e-3, 1.))
    assert (o.schedule.decay, o.schedule.gamma) == (schema.Decay.EXPONENTIAL, .97)
    assert [durations.parse(text).value for text in (o.schedule.warmup, o.schedule.every)] == pytest.approx(
        [5 * epoch, 2.4 * epoch], abs=.5)
    assert run.train.ema == .9999 and run.data.recipe.mean == (.485, .456, .406)
    assert run.data.recipe.eval_resize_px == run.image_px[0] + 32  # preprocessing.py, CROP_PADDING
  last = runs['at_800px']
  assert (last.image_px, last.length, last.init_from) == ((800, 800), '1.5 epochs', '/w/student_3')
  assert last.data.recipe.crop is schema.Crop.RESIZE and not last.data.recipe.flip and not last.data.pseudo.source
  assert last.optimizer.lr == pytest.approx(.016 * .97 ** 145) and last.optimizer.schedule.warmup == '0 steps'
  assert last.optimizer.rules[0].frozen_until == '100 %' and last.data.recipe.randaugment.layers == 0


def test_an_ablation_changes_one_thing() -> None:
  runs = files.load_study('ablations:shape', []).runs
  base = runs['base'].model
  assert isinstance(base, schema.ViT) and (base.depth, base.width, base.mlp.hidden, base.patch) == (8, 1024, 2048, 32)
  changed = {name: [f.name for f in dataclasses.fields(base)
                    if getattr(run.model, f.name) != getattr(base, f.name)] for name, run in runs.items()}
  assert changed['depth_2'] == ['depth'] and changed['width_4'] == ['width', 'heads'] and changed['mlp_2'] == ['mlp']
  assert changed['patch_4'] == ['patch'] and set(changed['all_2']) == {'depth', 'width', 'heads', 'mlp', 'patch'}
  pool = files.load_study('ablations:pool', []).runs
  assert [run.optimizer.lr for run in pool.values()] == pytest.approx([8e-4, 8e-4, 3e-4])
  assert len(files.load_study('ablations:positions', []).runs) == 8


def test_the_ablation_of_optimizers_is_measured_on_five_sets_beside_table_seven() -> None:
  study = files.load_study('ablations:optimizer', [])
  assert list(study.runs) == list(published.TABLE_7)
  sgd = study.runs['BiT-R50x1_sgd'].optimizer
  assert isinstance(sgd, schema.Sgd) and (sgd.lr, sgd.base_batch_size, sgd.weight_decay,
                                          sgd.momentum) == (.03, 256, 1e-4, .9)
  assert isinstance(study.runs['BiT-R152x2_adam'].optimizer, schema.AdamW)
  runs, results = done(study)
  assert len(runs) == 4 * (1 + 5 * (5 + 1)) and runs['BiT-R50x1_adam_pets_seed0'].init_from == '/w/BiT-R50x1_adam'
  assert study.table
  rows = {row['run']: row for row in study.table(results)}
  for run, paper in published.TABLE_7.items():
    assert {name: rows[run][f'{name}, Table 7'] for name in paper} == paper and rows[run]['mean'] == 50.
    sets = [value for name, value in paper.items() if name != 'mean']
    assert sum(sets) / 5 == pytest.approx(paper['mean'], abs=.006)  # rounded to 0.01
  del results['BiT-R50x1_sgd_flowers_seed0']
  assert {row['run']: row for row in study.table(results)}['BiT-R50x1_sgd']['mean'] is None


def test_the_ablation_of_positions_stands_beside_table_eight() -> None:
  study = files.load_study('ablations:positions', [])
  assert set(study.runs) == set(published.TABLE_8) and study.table
  rows = study.table({name: result(run, name, .6) for name, run in study.runs.items()})
  assert {row['run']: row['Table 8 %'] for row in rows} == published.TABLE_8


def test_optimizers_are_compared_at_equal_steps_and_at_equal_processor_seconds() -> None:
  study = files.load_study('study_optimizers:optimizers=adamw+muon,steps=100', [])
  assert len(study.runs) == 2 * 2 * 3 * 3 and {run.length for run in study.runs.values()} == {'100 steps'}

  def made(runs: dict[str, schema.Config], more: float = 0.) -> schema.Results:
    return {name: dataclasses.replace(
        result(run, name, (.2 if 'muon' in name else .1) + .01 * run.seed + more
               + .1 * ('_lr0.012_' in name or '_lr0.002_' in name)),
        training_processor_s=80. if 'muon' in name else 60.) for name, run in runs.items()}

  results = made(study.runs)
  again = study.then[0](results)
  assert list(again) == [f'muon_{kind}_lr0.012_seed{seed}_equal_seconds' for kind in ('light', 'full')
                         for seed in range(3)]
  assert {run.length for run in again.values()} == {'75 steps'}  # 60 s of 80 s
  assert study.table
  rows = {(row['optimizer'], row['learning rate']): row for row in study.table(results | made(again, -.05))}
  muon, adamw = rows['muon, full', .012], rows['adamw, full', .002]
  assert (muon['top1 %'], muon['lowest'], muon['highest'], muon['half of the range'], muon['seeds']) == (
      31., 30., 32., 1., 3)
  assert muon['best rate'] == 'yes' and rows['muon, full', .006]['best rate'] == 'no'
  assert (muon['top1 % at equal seconds'], adamw['top1 % at equal seconds']) == (26., 21.)
  assert (muon['processor s'], adamw['processor s at equal seconds']) == (80., 60.)
  assert rows['muon, full', .006]['top1 % at equal seconds'] is None


def test_a_study_of_optimizers_without_adamw_has_equal_steps_alone() -> None:
  study = files.load_study('study_optimizers:optimizers=muon+lion,seeds=1', [])
  assert len(study.runs) == 12 and not study.then
