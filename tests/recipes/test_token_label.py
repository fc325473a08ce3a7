"""LV-ViT's recipes against the numbers of its authors' program (zihangJiang/TokenLabeling@9dbfd59)."""
from __future__ import annotations

import pytest

from vit_jax.config import check, files, schema
from vit_jax.core.errors import UserError

PROGRAM = {  # README.md, "Training": rate, stochastic depth, operations of RandAugment; tlt/models/lvvit.py: crop_pct
    'T': (1.6e-3, 0., 2, 248), 'S': (1.6e-3, .1, 2, 248), 'M': (1.6e-3, .2, 2, 224), 'L': (1e-3, .3, 3, 224)}


@pytest.mark.parametrize('size', PROGRAM)
def test_training_has_the_settings_of_the_program(size: str) -> None:
  run = files.load(f'token_label_i1k:{size}', [])
  check.check(run)
  optimizer, recipe, task = run.optimizer, run.data.recipe, run.objective
  assert isinstance(optimizer, schema.AdamW) and isinstance(run.model, schema.ViT)
  assert isinstance(task, schema.TokenLabel)
  assert (optimizer.lr, run.model.drop_path, recipe.randaugment.layers, recipe.eval_resize_px) == PROGRAM[size]
  # main.py's defaults: --batch-size of 8 x 128, --epochs 300 and --cooldown-epochs 10, --min-lr, --warmup-epochs
  schedule = optimizer.schedule
  assert (run.batch_size, run.length, schedule.hold, schedule.end_lr, schedule.warmup) == (
      1024, '310 epochs', '10 epochs', 1e-5, '5 epochs')
  assert (optimizer.weight_decay, optimizer.clip_norm, run.train.ema) == (.05, 0., .99992)
  assert (recipe.randaugment.magnitude, recipe.randaugment.magnitude_std, recipe.erase.probability) == (9., .5, .25)
  # --dense-weight, --smoothing, and no --ground-truth: the class learns its map
  assert (task.dense_weight, task.label_smoothing, task.class_target) == (1., .1, schema.ClassTarget.MAP)


@pytest.mark.parametrize(('arguments', 'px', 'eval_px'), [('S', 384, 426), ('M,px=448', 448, 448), ('L', 448, 448)])
def test_fine_tuning_has_the_settings_of_the_program(arguments: str, px: int, eval_px: int) -> None:
  run = files.load(f'token_label_finetune:{arguments}', [])
  check.check(run)
  # README.md, "Fine-tuning": --lr 5.e-6 --min-lr 5.e-6 --weight-decay 1.e-8, 8 x 64 images, no --model-ema
  assert (run.optimizer.lr, run.optimizer.weight_decay, run.batch_size) == (5e-6, 1e-8, 512)
  assert run.optimizer.schedule.decay is schema.Decay.CONSTANT and run.train.ema == 0.
  assert (run.image_px, run.data.recipe.eval_resize_px) == ((px, px), eval_px)
  # tlt/utils/utils.py: F.interpolate(mode='bicubic')
  assert run.model.positions.resize is schema.PositionResize.BICUBIC


def test_a_resolution_that_was_not_published_is_an_error() -> None:
  with pytest.raises(UserError, match='px: expected one of 448, 512 for LV-ViT-L, got 384'):
    files.load('token_label_finetune:L,px=384', [])
