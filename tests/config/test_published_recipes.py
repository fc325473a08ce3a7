"""Recipes against the numbers of their papers and of the programs of their authors."""
from __future__ import annotations

import numpy as np
import pytest

from vit_jax.config import check, files
from vit_jax.config import schema as s
from vit_jax.optim import masks
from vit_jax.weights import tables
from vit_jax.weights.families import timm

# The args.txt of the published weights of facebookresearch/dino, as others repeat them; the files were not read.
# B/16 and B/8: texts that cite their address (the DINO README of DyT). S/16 and S/8: two copies that agree in all
# fields (scripts of a fork on JUWELS; notes of the fork weiyx16/dino for S/16, of a CIFAR repository for S/8). The
# author's statement in issue 122 has clip_grad, min_lr and freeze_last_layer of S/16.
DINO = {  # epochs, batch, lr, min_lr, clip_grad, cut of areas, freeze_last_layer, teacher temperature, its epochs, norm
    'S/16': (800, 1024, .0005, 1e-5, 0., .25, 1, .04, 30, False),
    'S/8': (800, 1024, .0005, 1e-6, 3., .4, 1, .04, 30, False),
    'B/16': (400, 1024, .00075, 2e-6, .3, .25, 3, .04, 50, True),
    'B/8': (300, 1056, .0005, 2e-6, 3., .25, 3, .03, 50, True),
}


@pytest.mark.parametrize('size', DINO)
def test_dino_has_the_arguments_that_others_repeat_of_its_published_weights(size: str) -> None:
  epochs, batch_size, lr, min_lr, clip, cut, frozen, temperature, warming, norm_last_layer = DINO[size]
  c = files.load(f'dino_i1k:{size}', [])
  check.check(c)
  assert isinstance(c.optimizer, s.AdamW) and isinstance(c.objective, s.Dino) and isinstance(c.model, s.ViT)
  o, views = c.optimizer, c.data.recipe.views
  assert (c.length, c.batch_size, o.lr, o.base_batch_size) == (f'{epochs} epochs', batch_size, lr, 256)
  assert (o.schedule.decay, o.schedule.warmup, o.schedule.end_lr) == (s.Decay.COSINE, '10 epochs', min_lr)
  assert (o.clip_tensor, o.clip_norm, o.weight_decay) == (clip, 0., .04)
  assert (o.weight_decay_ramp.start, o.weight_decay_ramp.end, o.weight_decay_ramp.curve) == (1., 10., s.Curve.COSINE)
  assert o.rules == (s.PathRule('projector/prototypes/.*', frozen_until=f'{frozen} epochs'),)
  assert (views.num_local, views.local_px, views.global_area, views.local_area) == (10, 96, (cut, 1.), (.05, cut))
  warm = c.objective.teacher_temperature
  assert (warm.start, warm.end, warm.until) == (temperature, .07, f'{warming - 1} epochs')  # np.linspace
  assert (warm.curve, warm.stairs) == (s.Curve.LINEAR, '1 epoch')
  assert (c.objective.momentum.start, c.objective.momentum.end, c.objective.norm_last_layer) == (
      .996, 1., norm_last_layer)
  assert (c.objective.out_dim, c.model.drop_path, c.model.patch) == (65_536, .1, int(size[2:]))
  assert ('projector/prototypes/norm' in o.weight_decay_mask) != c.objective.norm_last_layer


# facebookresearch/dinov2@b8931f7, configs/ssl_default_config.yaml and train/{vitl16_short, vitl14, vitg14}.yaml
DINOV2 = {  # epochs, batch, a device's, lr, warm-up, end of decay, layers, drop, momentum, out, bottleneck, local px
    'L/16': (100, 2048, 64, .004, 10, .4, .9, .3, .992, 65_536, 256, 96),
    'L/14': (500, 3072, 32, .0002, 80, .2, 1., .4, .994, 131_072, 384, 98),
    'g/14': (500, 3072, 12, .0002, 80, .2, 1., .4, .994, 131_072, 384, 98),  # batch of all devices: paper, Table 16
}


@pytest.mark.parametrize('size', DINOV2)
def test_dinov2_has_the_numbers_of_its_programs_configs(size: str) -> None:
  epochs, batch, group, lr, warmup, end, layers, drop, momentum, out, bottleneck, px = DINOV2[size]
  c = files.load(f'dinov2_i1k:{size}', [])
  check.check(c)
  assert isinstance(c.optimizer, s.AdamW) and isinstance(c.objective, s.Dinov2) and isinstance(c.model, s.ViT)
  o, one, views, m, is_long = c.optimizer, c.objective, c.data.recipe.views, c.model, size != 'L/16'
  assert (c.length, c.batch_size, one.group) == (f'{epochs * 1250} steps', batch, group)
  assert o.lr == pytest.approx(lr * (batch / 1024) ** .5)
  assert (o.schedule.decay, o.schedule.warmup, o.schedule.end_lr) == (s.Decay.COSINE, f'{warmup * 1250} steps', 1e-6)
  assert (o.b1, o.b2, o.clip_norm, o.layer_decay, o.weight_decay) == (.9, .999, 3., layers, .04)
  assert o.weight_decay * o.weight_decay_ramp.end == pytest.approx(end) and len(o.clip_parts) == 1 + is_long
  assert (m.drop_path, m.drop_path_even, m.block.layer_scale, m.init) == (drop, True, 1e-5, s.Init.DINOV2)
  assert (m.gelu, m.norm.eps, isinstance(m.mlp, s.SwiGlu)) == (s.Gelu.EXACT, 1e-6, is_long)
  assert (m.width, m.depth, m.heads) == ((1536, 40, 24) if size == 'g/14' else (1024, 24, 16))
  assert (one.momentum.start, one.momentum.end, one.student_temperature) == (momentum, 1., .1)
  warm = one.teacher_temperature
  assert (warm.start, warm.end, warm.until) == (.04, .07, f'{30 * 1250 - 1} steps')  # np.linspace
  assert (one.out_dim, one.bottleneck_dim, one.hidden_dim, one.patch_out_dim) == (out, bottleneck, 2048, out * is_long)
  assert (one.patch_bottleneck_dim, one.koleo_weight, one.mask_share, one.mask_ratio) == (256, .1, .5, (.1, .5))
  assert (one.centering, one.center_momentum) == (s.Centering.SINKHORN if is_long else s.Centering.MEAN, .9)
  assert (views.num_local, views.local_px, views.global_area, views.local_area) == (8, px, (.32, 1.), (.05, .32))
  stem, token, last = o.rules
  assert (stem.lr, token.lr) == (.2, pytest.approx(layers ** (m.depth + 1)))
  assert last.lr == s.Ramp(0., 1., begin='1250 steps', until='1250 steps')


# facebookresearch/dinov3@6876159, configs/train/vitl_im1k_lin834.yaml, dinov3_vit7b16_{gram_anchor,high_res_adapt}.yaml
DINOV3 = {  # steps, batch, px, group, rate, b2, clip, layers, momentum, temperature, flips, pairs with local crops
    'pretrain': (125_000, 2048, (224, 96), 64, .001 * 4 * 2 ** .5, .999, 3., .9, (.992, 1.), (.04, .07), True, 1.),
    'gram': (40_000, 4096, (256, 112), 16, 3e-5 * 4 * 2, .99, 30., .98, (.999, .999), (.07, .07), False, .5),
    'highres': (30_000, 4096, (512, 112), 16, 1.25e-5 * 4 * 2, .99, 30., .98, (.999, .999), (.07, .07), False, .5),
}


@pytest.mark.parametrize('stage', DINOV3)
def test_dinov3_has_the_numbers_of_its_programs_configs(stage: str) -> None:
  steps, batch, px, group, lr, b2, clip, layers, momentum, temperature, flip, local = DINOV3[stage]
  c = files.load(f'dinov3_i1k:L/16,stage={stage}', [])
  check.check(c)
  assert isinstance(c.optimizer, s.AdamW) and isinstance(c.objective, s.Dinov2) and isinstance(c.model, s.ViT)
  o, one, views, m = c.optimizer, c.objective, c.data.recipe.views, c.model
  assert int(c.length.split()[0].replace('_', '')) == steps and c.batch_size == batch
  assert (c.image_px[0], views.local_px, one.group, c.data.recipe.flip) == (*px, group, flip)
  assert (o.lr, o.b1, o.b2, o.clip_norm, o.layer_decay) == (pytest.approx(lr), .9, b2, clip, layers)
  assert (o.weight_decay, o.weight_decay_ramp.end) == (.04, 10. if stage == 'pretrain' else 1.)
  assert (one.momentum.start, one.momentum.end, one.local_weight) == (*momentum, local)
  assert (one.teacher_temperature.start, one.teacher_temperature.end) == temperature
  assert (one.out_dim, one.bottleneck_dim, one.patch_out_dim, one.patch_bottleneck_dim) == (65_536, 256) * 2
  assert (one.centering, one.koleo_weight, one.koleo_crops, one.hidden_dim) == (s.Centering.SINKHORN, .1, 2, 2048)
  assert (m.registers, m.drop_path, m.block.layer_scale, m.norm.eps) == (0, .3, 1e-5, 1e-6)
  assert (m.attention.qkv_bias, m.positions.base) == (s.QkvBias.ALL, 100.)
  rates = {rule.paths: rule.lr for rule in o.rules}
  if stage == 'pretrain':
    assert type(one) is s.Dinov2 and o.schedule.decay is s.Decay.COSINE and o.schedule.end_lr == 1e-6
    assert o.schedule.warmup == '12500 steps' and rates['backbone/stem/.*'] == .2
    assert rates['.*projector/prototypes/.*'] == s.Ramp(0., 1., begin='1250 steps', until='1250 steps')
  else:
    assert isinstance(one, s.Dinov3) and not views.gram_colors
    assert (one.gram.weight, bool(one.gram.refresh)) == ((2., True) if stage == 'gram' else (1.5, False))
    assert views.gram_scale == (2. if stage == 'gram' else 1.5)
  if stage == 'highres':
    assert rates == {paths: s.Ramp(0., value, until='10_000 steps') for paths, value in (
        ('backbone/stem/.*', .2), ('mask_token', .98 ** 25), ('.*', 1.))}


def test_ijepa_has_the_numbers_of_its_programs_config() -> None:
  """facebookresearch/ijepa@52c1ae9, configs/in1k_vith14_ep300.yaml."""
  c = files.load('ijepa_i1k:H/14', [])
  check.check(c)
  assert isinstance(c.optimizer, s.AdamW) and isinstance(c.objective, s.IJepa)
  o, one = c.optimizer, c.objective
  assert (c.length, c.batch_size, o.lr, o.schedule.warmup, o.schedule.warmup_lr, o.schedule.end_lr) == (
      '300 epochs', 2048, .001, '40 epochs', .0002, 1e-6)
  assert (o.weight_decay, o.weight_decay_ramp) == (.04, s.Ramp(1., 10., curve=s.Curve.COSINE))
  assert 'mask_token' in o.weight_decay_mask and c.data.recipe.interpolation is s.Interpolation.BILINEAR
  assert (one.num_targets, one.target_area, one.target_aspect, one.context_area, one.min_context) == (
      4, (.15, .2), (.75, 1.5), (.85, 1.), 10)
  assert (one.predictor_width, one.predictor_depth, one.loss) == (384, 12, s.JepaLoss.SMOOTH_L1)
  assert (one.momentum.start, one.momentum.end, one.momentum.curve) == (.996, 1., s.Curve.LINEAR)
  assert .26 <= one.context_ratio <= .28  # of 60 batches of 128 images of 16 x 16 patches, cut to the shortest: .271


def test_lejepa_has_the_numbers_of_its_programs_scripts() -> None:
  """rbalestr-lab/lejepa@eddffdd, scripts/launch_proj_ablation.md."""
  c = files.load('lejepa_i1k:L/14', [])
  assert (c.length, c.batch_size, c.optimizer.lr, c.optimizer.weight_decay, c.model.drop_path) == (
      '100 epochs', 512, 5e-4, 5e-2, .1)
  assert (c.objective.weight, c.objective.directions, c.objective.out_dim) == (.05, 1024, 512)


@pytest.mark.parametrize(('recipe', 'init'), [
    ('vit_b16_jft', 'vision_transformer'), ('vit_l16_i21k', 'vision_transformer'), ('finetune', 'vision_transformer'),
    ('vit_s16_i1k', 'big_vision'), ('augreg:Ti/16,i1k', 'big_vision'), ('vit_g14_jft3b', 'big_vision'),
    ('gsam_b32_i1k', 'big_vision'), ('optimizers_s16_i1k', 'big_vision'),
    ('distill_i1k:teach=consistent', 'big_vision'),
    ('dinov2_i1k', 'dinov2'), ('dinov3_i1k:L/16', 'dinov2'),
    ('dino_i1k', 'dino'), ('deit_b16_i1k', 'deit'), ('distill_i1k:teach=soft', 'deit'), ('mae_scratch_i1k', 'deit'),
    ('deit3_s16_i1k', 'deit3'), ('token_label_i1k', 'lvvit'), ('token_label_finetune', 'lvvit'), ('mae_i1k', 'mae'),
    ('mae_finetune', 'mae'), ('linear_probe:B/16', 'mae'), ('linear_probe:S/16,protocol=dino', 'dino')])
def test_parameters_of_a_recipe_start_by_the_laws_of_its_program(recipe: str, init: str) -> None:
  c = files.load(recipe, [])
  assert isinstance(c, s.Config) and isinstance(c.model, s.ViT)
  assert c.model.init.value == init


# DeiT (arXiv 2012.12877), section 4: tau 3 and lambda .1 of soft, weights of 1/2 of hard distillation.
# The division of the teacher's term: facebookresearch/deit@7e160fe, losses.py, lines 53 to 66.
@pytest.mark.parametrize(('teach', 'weight', 'temperature', 'soft_mean'), [
    ('hard', .5, 1., 'paper'), ('soft', .1, 3., 'code'), ('consistent', 1., 1., 'paper')])
def test_distillation_weighs_the_teacher_as_its_program_does(teach: str, weight: float, temperature: float,
                                                             soft_mean: str) -> None:
  c = files.load(f'distill_i1k:teach={teach}', [])
  check.check(c)
  assert isinstance(c.objective, s.Distill)
  assert (c.objective.weight, c.objective.temperature, c.objective.soft_mean.value) == (weight, temperature, soft_mean)


def test_consistent_distillation_has_the_numbers_of_its_program_but_for_the_rate_of_its_resnet() -> None:
  # big_vision@0127fb6, configs/proj/distill/bit_i1k.py.
  c = files.load('distill_i1k:teach=consistent', [])
  o, r = c.optimizer, c.data.recipe
  assert isinstance(o, s.AdamW) and (c.batch_size, c.data.train_split) == (4096, 'train[:98%]')
  assert (o.clip_norm, o.mu_dtype, o.schedule.warmup, o.schedule.end_lr) == (1., s.DType.BF16, '5_000 steps', 0.)
  assert o.weight_decay == pytest.approx(.0003 / .03) and o.lr == 1e-3  # its rate is .03, for a BiT-R50x1
  assert (r.mixup, r.interpolation, r.antialias, r.eval_resize_px, r.eval_area, r.truncate) == (
      1., s.Interpolation.BILINEAR, False, 256, True, True)
  deit = files.load('distill_i1k:teach=hard', [])
  assert (deit.optimizer.schedule.lag, deit.optimizer.schedule.stairs) == ('1 epoch', '1 epoch')
  assert deit.optimizer == files.load('deit_b16_i1k', []).optimizer and deit.batch_size == 1024


# facebookresearch/mae@efb2a80, main_pretrain.py, line 177: timm's add_weight_decay leaves out what has one axis. These
# are the trained parameters of models_mae.py with one block in encoder and decoder, as named_parameters() lists them.
MAE_DECAYED = (
    'cls_token', 'mask_token', 'patch_embed.proj.weight', 'blocks.0.attn.qkv.weight', 'blocks.0.attn.proj.weight',
    'blocks.0.mlp.fc1.weight', 'blocks.0.mlp.fc2.weight', 'decoder_embed.weight', 'decoder_blocks.0.attn.qkv.weight',
    'decoder_blocks.0.attn.proj.weight', 'decoder_blocks.0.mlp.fc1.weight', 'decoder_blocks.0.mlp.fc2.weight',
    'decoder_pred.weight')
MAE_UNDECAYED = (
    *(name.replace('weight', 'bias') for name in MAE_DECAYED if name.endswith('weight')),
    *(f'{norm}.{leaf}' for norm in ('blocks.0.norm1', 'blocks.0.norm2', 'norm', 'decoder_blocks.0.norm1',
                                    'decoder_blocks.0.norm2', 'decoder_norm') for leaf in ('weight', 'bias')))


def test_mae_decays_what_its_program_decays() -> None:
  optimizer = files.load('mae_i1k', []).optimizer
  cubes = {name: np.zeros((6,) * {'cls_token': 3, 'mask_token': 3, 'patch_embed.proj.weight': 4}.get(name, 2))
           for name in MAE_DECAYED}
  tensors = cubes | {name: np.zeros(6) for name in MAE_UNDECAYED}
  found = [(name, leaf) for name, x in tensors.items() for leaf in tables.read({name: x}, timm.TABLE).leaves]
  assert {name for name, _ in found} == tensors.keys()
  assert len(found) == 36 + 8  # query, key and value are one tensor there
  for name, leaf in found:
    assert masks.matches(leaf, optimizer.weight_decay_mask) == (name in MAE_DECAYED), leaf


def test_gsam_has_the_numbers_of_its_program() -> None:
  # big_vision@0127fb6, configs/proj/gsam/vit_i1k_gsam_no_aug.py.
  c = files.load('gsam_b32_i1k', [])
  o, sam = c.optimizer, c.train.sam
  assert isinstance(o, s.AdamW) and isinstance(c.model, s.ViT) and isinstance(c.objective, s.Supervised)
  assert (c.length, c.batch_size, c.data.train_split) == ('300 epochs', 4096, 'train[:99%]')
  assert (o.lr, o.weight_decay, o.decay_by, o.clip_norm) == (.003, .001, s.DecayBy.SCHEDULE, 1.)
  assert (o.schedule.decay, o.schedule.warmup) == (s.Decay.LINEAR, '10_000 steps')
  assert o.schedule.end_lr == pytest.approx(.01 * o.lr) and o.mu_dtype is s.DType.F32
  assert (sam.rho, sam.rho_end, sam.alpha) == (.6, .1, .6)
  assert (c.model.pool, c.head.pre_logits, c.head.bias_init) == (s.Mean(), 0, -10.)
  assert c.objective.loss is s.Loss.SIGMOID and not c.data.recipe.randaugment.layers and not c.data.recipe.mixup


# facebookresearch/dino@7c446df, eval_linear.py, lines 62 to 107 and 241 to 266, README.md, line 340.
# facebookresearch/mae@efb2a80, main_linprobe.py, lines 128 to 137, util/crop.py.
@pytest.mark.parametrize(('arguments', 'features', 'sampler', 'train', 'length', 'rate'), [
    ('S/8,protocol=dino', s.FeatureLayers((-4, -3, -2, -1)), 'torchvision', 'bilinear', '100 epochs', .004),
    ('S/16,protocol=dino', s.FeatureLayers((-4, -3, -2, -1)), 'torchvision', 'bilinear', '100 epochs', .004),
    ('B/16,protocol=dino', s.FeatureLayers((-1,), patches=True), 'torchvision', 'bilinear', '100 epochs', .004),
    ('B/16,protocol=mae', s.FeatureLayers(), 'clipped', 'same', '90 epochs', 6.4)])
def test_a_linear_probe_crops_and_reads_as_its_program(arguments: str, features: s.FeatureLayers, sampler: str,
                                                       train: str,
                                                       length: str, rate: float) -> None:
  c = files.load(f'linear_probe:{arguments}', [])
  check.check(c)
  r = c.data.recipe
  assert (c.head.features, r.crop_sampler.value, r.crop_interpolation.value,
          c.length) == (features, sampler, train, length)
  assert (r.crop_area, r.interpolation, r.antialias) == ((.08, 1.), s.Interpolation.BICUBIC, True)
  assert (r.eval_resize_px, r.eval_geometry) == (256, s.Geometry.TORCHVISION)
  assert c.optimizer.lr * c.batch_size / c.optimizer.base_batch_size == pytest.approx(rate)
  assert isinstance(c.optimizer, s.Sgd | s.Lars) and (c.optimizer.momentum, c.optimizer.weight_decay) == (.9, 0.)


@pytest.mark.parametrize('name', ['vit_s16_i1k', 'optimizers_s16_i1k', 'augreg', 'mixer_i1k', 'gsam_b32_i1k',
                                  'vit_g14_jft3b', 'vit_22b_jft4b', 'bit_pretrain'])
def test_recipes_of_big_vision_resize_as_its_program(name: str) -> None:
  recipe = files.load(name, []).data.recipe
  assert recipe.truncate and recipe.eval_area and not recipe.antialias
  assert recipe.interpolation is s.Interpolation.BILINEAR and recipe.crop_sampler is s.CropSampler.TENSORFLOW


@pytest.mark.parametrize(('name', 'devices'), [
    ('deit_b16_i1k', 16), ('deit_b16_i1k:size=S/16', 4), ('deit3_s16_i1k', 8), ('distill_i1k:B/16', 16),
    ('mae_finetune:B/16', 32), ('mae_finetune:L/16', 32), ('mae_finetune:H/14', 64), ('mae_scratch_i1k', 32)])
def test_mixing_is_drawn_for_the_batch_of_a_device_of_the_published_command(name: str, devices: int) -> None:
  config = files.load(name, [])
  recipe = config.data.recipe
  assert s.num_groups(config.batch_size, recipe.mix_group) == devices and recipe.mixup == .8 and recipe.cutmix == 1.
  assert recipe.repeats <= devices


@pytest.mark.parametrize('name', ['token_label_i1k', 'token_label_finetune'])
def test_boxes_of_tokens_are_those_of_eight_devices(name: str) -> None:
  config = files.load(name, [])
  assert isinstance(config.objective, s.TokenLabel)
  assert s.num_groups(config.batch_size, config.objective.mix_group) == 8
