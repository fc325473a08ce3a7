"""Fine-tuning: the numbers of the papers, the splits, and what follows from a model's name."""
from __future__ import annotations

import dataclasses

import pytest

from vit_jax.config import check, durations, files, schema
from vit_jax.core.errors import UserError
from vit_jax.optim import schedules
from vit_jax.recipes import finetune


@pytest.mark.parametrize('dataset', finetune.DATASETS)
@pytest.mark.parametrize('protocol', ['vit', 'augreg', 'mae'])
def test_every_dataset_and_protocol_makes_a_valid_config(dataset: str, protocol: str) -> None:
  for phase, evaluation in (('final', 'test'), ('tune', 'val')):
    config = files.load(f'finetune:Ti/16,{dataset},protocol={protocol},phase={phase}', [])
    check.check(config)
    assert list(config.evals) == [evaluation]


@pytest.mark.parametrize(('dataset', 'steps', 'held', 'rates'), [
    ('imagenet2012', 20_000, 'train[99%:]', (.003, .01, .03, .06)),
    ('cifar10', 10_000, 'train[98%:]', (.001, .003, .01, .03)),
    ('cifar100', 10_000, 'train[98%:]', (.001, .003, .01, .03)),
    ('pets', 500, 'train[90%:]', (.001, .003, .01, .03)),
    ('flowers', 500, 'train[90%:]', (.001, .003, .01, .03)),
])
def test_table_4_of_the_vit_paper(dataset: str, steps: int, held: str, rates: tuple[float, ...]) -> None:
  study = files.load_study(f'finetune_sweep:L/16,{dataset}', [])
  assert [run.optimizer.lr for run in study.runs.values()] == list(rates)
  for run in study.runs.values():
    optimizer = run.optimizer
    assert isinstance(optimizer, schema.Sgd) and (optimizer.momentum, optimizer.weight_decay) == (.9, 0.)
    assert optimizer.mu_dtype is schema.DType.BF16 and optimizer.clip_norm == 1.
    assert optimizer.schedule.decay is schema.Decay.COSINE and run.batch_size == 512 and run.image_px == (384, 384)
    assert run.length == f'{steps} steps' and run.data.eval_split == held and run.train.ema == 0.
  assert [run.data.train_split for run in study.runs.values()] == [held.replace('[', '[:').replace(':]', ']')] * 4


@pytest.mark.parametrize('dataset', finetune.DATASETS)
def test_a_single_run_has_the_third_rate_and_the_first_length_of_the_grid(dataset: str) -> None:
  config, point = files.load(f'finetune:B/16,{dataset}', []), finetune.grid(dataset, 'vit')[2]
  if dataset == 'own':  # a relative warm-up, which also fits a shorter run
    assert config.optimizer.schedule.warmup == '20 %' and 100 * point.warmup == 20 * point.steps
    config = point.apply(config)
  assert point.apply(config) == config and point.rate == finetune.DATASETS[dataset].rates[2]


@pytest.mark.parametrize(('images', 'batch', 'steps', 'epochs'), [
    (16, 8, 150, 75.), (240, 16, 150, 10.), (1_000, 64, 156, 10.), (50_000, 128, 3_906, 10.),
    (1_281_167, 128, 20_000, 2.)])
def test_ones_own_images_decide_batch_and_length(images: int, batch: int, steps: int, epochs: float) -> None:
  config = files.load(f'finetune:Ti/16,own,examples={images}', [])
  check.check(config)
  assert (config.batch_size, config.length) == (batch, f'{steps} steps')
  assert steps * batch / images == pytest.approx(epochs, rel=.01)
  assert 5 <= steps / durations.parse(config.evals['test'].every).value <= 21
  schedules.build(config.optimizer.schedule, peak=1., lengths=durations.lengths(  # the warm-up fits
      '3 steps', num_examples=images, batch_size=batch))


def test_any_number_of_ones_own_images_has_a_batch() -> None:
  for images in (2, 5, 8, 9, 63, 64, 10**7):
    scale = finetune.scale(images)
    assert 1 < scale.batch_size <= images and scale.steps >= finetune.STEPS[0]
  with pytest.raises(UserError, match='examples: expected at least 2 training images, got 1'):
    finetune.scale(1)
  for arguments in ('cifar10,examples=9', 'own,examples=9,protocol=mae'):
    with pytest.raises(UserError, match='examples: expected none for '):
      files.load(f'finetune:Ti/16,{arguments}', [])


def test_ones_own_images_fit_without_their_number() -> None:
  config = files.load('finetune:Ti/16,own', ['length=50 steps'])
  check.check(config)
  assert config.batch_size == 32 and config.image_px == (224, 224)
  schedules.build(config.optimizer.schedule, peak=1., lengths=durations.lengths(
      config.length, num_examples=240, batch_size=32))


@pytest.mark.parametrize(('arguments', 'px', 'ema'), [
    ('L/16,imagenet2012,px=512', 512, .9999), ('H/14,imagenet2012,px=518', 518, .9999), ('L/16,imagenet2012', 384, 0.),
    ('H/14,cifar10', 378, 0.), ('L/16,cifar10,px=512', 512, 0.), ('B/32,cifar10,px=224', 224, 0.),
])
def test_resolutions_and_averaging(arguments: str, px: int, ema: float) -> None:
  config = files.load(f'finetune:{arguments}', [])
  assert config.image_px == (px, px) and config.train.ema == ema


def test_augreg_tries_both_budgets() -> None:
  runs = files.load_study('finetune_sweep:Ti/16,pets,protocol=augreg', []).runs.values()
  assert [(r.optimizer.lr, r.length, r.optimizer.schedule.warmup) for r in runs] == [
      (rate, f'{steps} steps', f'{warmup} steps') for steps, warmup in ((500, 100), (2500, 200))
      for rate in (.001, .003, .01)]
  # arXiv 2106.10270, section 3.4: Pets and Kitti-distance 500 or 2,500 steps, rates .001, .003, .01.
  kitti = files.load_study('finetune_sweep:Ti/16,kitti,protocol=augreg', []).runs.values()
  assert [(r.optimizer.lr, r.length, r.optimizer.schedule.warmup) for r in kitti] == [
      (r.optimizer.lr, r.length, r.optimizer.schedule.warmup) for r in runs]
  assert {(r.data.source, r.data.train_split, r.data.eval_split, r.data.num_classes) for r in kitti} == {
      ('vtab:kitti/distance', 'train', 'val', 4)}
  final = files.load('finetune:Ti/16,kitti,protocol=augreg', []).data
  assert (final.train_split, final.eval_split, final.num_examples) == ('trainval', 'test', 6347 + 423)
  runs = files.load_study('finetune_sweep:Ti/16,cifar100,protocol=augreg', []).runs.values()
  assert {(r.length, r.optimizer.schedule.warmup) for r in runs} == {('2500 steps', '200 steps'),
                                                                     ('10000 steps', '500 steps')}


@pytest.mark.parametrize(('model', 'length', 'rate', 'decay', 'drop'), [
    ('B/16', '100 epochs', 2e-3, .65, .1), ('L/16', '50 epochs', 4e-3, .75, .2), ('H/14', '50 epochs', 4e-3, .75, .3)])
def test_mae_by_the_size_of_the_model(model: str, length: str, rate: float, decay: float, drop: float) -> None:
  config = files.load(f'finetune:{model},imagenet2012,protocol=mae', [])
  optimizer, recipe = config.optimizer, config.data.recipe
  assert isinstance(optimizer, schema.AdamW) and isinstance(config.model, schema.ViT)
  assert optimizer.lr * config.batch_size / optimizer.base_batch_size == pytest.approx(rate)
  assert (config.length, optimizer.layer_decay, config.model.drop_path) == (length, decay, drop)
  assert (optimizer.weight_decay, optimizer.b2, optimizer.clip_norm, config.batch_size) == (.05, .999, 0., 1024)
  assert (recipe.mixup, recipe.cutmix, recipe.cutmix_share, recipe.erase.probability) == (.8, 1., .5, .25)
  assert config.objective.label_smoothing == .1 and config.model.pool == schema.Mean(class_token=True)
  assert config.model.last_norm is schema.LastNorm.POOLED


@pytest.mark.parametrize(('arguments', 'steps', 'drops', 'px', 'mixup', 'area'), [
    ('cifar10', 10_000, (3_000, 6_000, 9_000), 128, .1, .64),
    ('imagenet2012', 20_000, (6_000, 12_000, 18_000), 480, .1, (480 / 512)**2),
    ('pets', 500, (200, 300, 400), 480, 0., (480 / 512)**2),
    ('own,examples=19999,side=95', 500, (200, 300, 400), 128, 0., .64),
    ('own,examples=20000,side=96', 10_000, (3_000, 6_000, 9_000), 480, .1, (480 / 512)**2),
])
def test_bit_hyperrule(arguments: str, steps: int, drops: tuple[int, ...], px: int, mixup: float, area: float) -> None:
  config = files.load(f'bit_hyperrule:BiT-R50x1,{arguments}', [])
  check.check(config)
  assert isinstance(config.optimizer, schema.Sgd) and isinstance(config.model, schema.ResNet)
  assert (config.optimizer.lr, config.optimizer.momentum, config.batch_size) == (.003, .9, 512)
  assert config.length == f'{steps} steps' and config.image_px == (px, px)
  assert [durations.parse(d).value for d in config.optimizer.schedule.milestones] == [
      drop + 1 for drop in drops]  # get_lr of its program: `if s < step`
  assert config.data.recipe.mixup == mixup and config.data.recipe.crop is schema.Crop.WINDOW
  assert config.data.recipe.crop_area == pytest.approx((area, area))


def test_bit_hyperrule_needs_to_know_the_data() -> None:
  with pytest.raises(UserError, match='examples, side: expected the number of training .* of folder:PATH, got none.'):
    files.load('bit_hyperrule:BiT-R50x1,own', [])
  with pytest.raises(UserError, match="examples: expected a whole number, got 'many'."):
    files.load('bit_hyperrule:BiT-R50x1,own,examples=many', [])


def test_final_runs_take_the_best_point_with_several_seeds_and_all_of_the_data() -> None:
  study = files.load_study('finetune_sweep:B/16,cifar10,seeds=2', ['data.source=folder:x'])
  scores = dict(zip(study.runs, (.5, .9, .7, .6), strict=True))
  results = {name: schema.Result(run, name, 10_000, 1., 1, 1., {}, scores[name]) for name, run in study.runs.items()}
  final, = study.then
  runs = final(results)
  assert list(runs) == ['final_lr0.003_steps10000_seed0', 'final_lr0.003_steps10000_seed1']
  assert [(r.seed, r.optimizer.lr, r.data.train_split, r.data.source) for r in runs.values()] == [
      (seed, .003, 'train', 'folder:x') for seed in (0, 1)]
  results |= {name: schema.Result(run, name, 10_000, 1., 1, 1., {}, score)
              for (name, run), score in zip(runs.items(), (.97, .99), strict=True)}
  assert study.table is not None
  rows = study.table(results)
  assert [(row['phase'], row['lr'], row['runs']) for row in rows] == [
      ('tune', .001, 1), ('tune', .003, 1), ('tune', .01, 1), ('tune', .03, 1), ('final', .003, 2)]
  assert rows[-1]['top-1 %'] == pytest.approx(98.) and rows[-1]['deviation'] == pytest.approx(2**.5)
  assert rows[0]['deviation'] is None


def test_protocols_without_a_grid_have_final_runs_alone() -> None:
  study = files.load_study('finetune_sweep:B/16,pets,protocol=mae,seeds=2', [])
  assert list(study.runs) == ['final_seed0', 'final_seed1'] and not study.then


@pytest.mark.parametrize('name', finetune.MODELS)
def test_every_model_fits_its_resolution(name: str) -> None:
  config = files.load(f'finetune:{name},pets', [])
  check.check(config)
  assert dataclasses.is_dataclass(config.model)


# google-research/vision_transformer@c6de1e5, configs/models.py (lines 124 to 335) and augreg.py, line 54.
@pytest.mark.parametrize(('model', 'dropout'), [
    ('B/16', 0.), ('B/32', 0.), ('L/32', 0.), ('R26+S/32', 0.), ('L/16', .1), ('H/14', .1), ('R50+B/16', .1),
    ('R50+L/32', .1)])
def test_dropout_is_that_of_the_program_that_fine_tunes(model: str, dropout: float) -> None:
  def found(arguments: str) -> float:
    network = files.load(f'finetune:{model},{arguments}', []).model
    assert isinstance(network, schema.ViT)
    return network.dropout
  assert (found('cifar10'), found('cifar10,protocol=augreg'), found('own')) == (dropout, 0., 0.)
