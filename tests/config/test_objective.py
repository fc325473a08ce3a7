"""Settings of objectives that cannot work or have no effect are refused."""
from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from vit_jax.config import check, schema
from vit_jax.core.errors import UserError

C, V = schema.Config, schema.ViT
MODEL = V(patch=4, width=32, depth=1, heads=2, mlp=schema.Mlp(16))
VIEWS = schema.Data(recipe=schema.Recipe(views=schema.Views(on=True, local_px=8)))
SINKHORN = schema.Centering.SINKHORN


def config(objective: schema.Objective, **settings: Any) -> C:
  data = {'data': VIEWS} if isinstance(objective, schema.Dino) else {}
  return C(**({'image_px': (16, 16), 'model': MODEL, 'objective': objective} | data | settings))


def model(**changes: Any) -> V:
  return dataclasses.replace(MODEL, **changes)


def recipe(**settings: Any) -> schema.Data:
  return schema.Data(recipe=schema.Recipe(**settings))


TASKS = (schema.Mae(), schema.MaskedPatch(), schema.Dino(), schema.TokenLabel(),
         schema.Distill(schema.Teacher(model=MODEL)))


@pytest.mark.parametrize('objective', TASKS, ids=lambda o: type(o).__name__)
def test_the_defaults_are_fine(objective: schema.Objective) -> None:
  check.check(config(objective))


@pytest.mark.parametrize(('given', 'said'), [
    (config(schema.Supervised(label_smoothing=1.)), 'objective.label_smoothing: expected 0 to below 1, got 1.0'),
    (config(schema.Mae(mask_ratio=.99)),
     'objective.mask_ratio: expected a share that leaves 1 to 15 of 16 patches visible, g'),
    (config(schema.Mae(decoder_width=30, decoder_heads=4)), 'decoder_width: expected a multiple of objective.decoder_'),
    (config(schema.Mae(decoder_width=30, decoder_heads=3)), 'decoder_width: expected a multiple of 4, for 2-D sine-co'),
    (config(schema.Mae(decoder_depth=0)), 'objective.decoder_depth: expected 1 to 10000, got 0'),
    (config(schema.Mae(), model=model(positions=schema.Relative())), 'for objective Mae, got model.positions='),
    (config(schema.Mae(), model=model(stem=schema.ResNetStem(()))), 'for objective Mae, got model.stem=ResNetStem'),
    (config(schema.Mae(), model=schema.ResNet()), 'model: expected a ViT for objective Mae, which works on patch toke'),
    (config(schema.Mae(), evals={'val': schema.TopK()}), 'evals.val: expected an evaluation of features for objective'),
    (config(schema.Mae(), head=schema.Head(pre_logits=3)), 'head: expected the default for objective Mae'),
    (config(schema.Mae(), data=schema.Data(max_labels=3)), 'data.max_labels: expected 0 for objective Mae, which'),
    (config(schema.Mae(), data=recipe(mixup=.2)), 'data.recipe.mixup: expected 0 for objective Mae, which has no head'),
    (config(schema.MaskedPatch(mask_ratio=0.)), 'objective.mask_ratio: expected more than 0 to 1, got 0.0'),
    (config(schema.MaskedPatch(mask_token_prob=.8, random_patch_prob=.3)),
     'objective.mask_token_prob: expected at most 1 together with'),
    (config(schema.MaskedPatch(schema.PatchTarget.COLORS), model=model(patch=2)), 'model.patch: expected a multiple o'),
    (config(schema.MaskedPatch(), model=model(stem=schema.ConvStem())), 'model: expected one without BatchNorm for ob'),
    (config(schema.Dino(), data=schema.Data()), 'views.on: expected true for objective Dino, which compares'),
    (config(schema.Dino(student_temperature=0.)), 'objective.student_temperature: expected more than 0, got 0.0'),
    (config(schema.Dino(teacher_temperature=schema.Ramp(0., .07))), 'temperature.start: expected at least 1e-06'),
    (config(schema.Dino(momentum=schema.Ramp(.9, 1.1))), 'objective.momentum.end: expected 0 to 1, got 1.1'),
    (config(schema.Dino(momentum=schema.Ramp(.9, 1., until='soon'))), 'momentum.until: expected a number'),
    (config(schema.Dino(center_momentum=1.)), 'objective.center_momentum: expected 0 to below 1, got 1.0'),
    (config(schema.Dino(centering=SINKHORN, center_momentum=.5)), 'center_momentum: expected its default 0.9 wit'),
    (config(schema.Dino(centering=SINKHORN), train=schema.Train(accumulate=2)), 'train.accumulate: expected 1 with ob'),
    (config(schema.Dino(collapse=schema.Collapse(threshold=-1.))), 'objective.collapse.threshold: expected at least 0'),
    (config(schema.Dino(collapse=schema.Collapse(patience='3'))), 'collapse.patience: expected a number'),
    (config(schema.Dino(), model=model(positions=schema.Relative())), 'num_local: expected 0 with model.posi'),
    (config(schema.Dino(), model=schema.EfficientNet()), 'model: expected one without BatchNorm for objective D'),
    (config(schema.Dino(), model=schema.Mixer(patch=4)), 'num_local: expected 0 with model Mixer, which takes images'),
    (config(schema.TokenLabel(dense_weight=0.)), 'objective.dense_weight: expected more than 0, got 0.0'),
    (config(schema.TokenLabel(map_grid=(0, 3))), 'objective.map_grid: expected numbers, each at least 1, got (0, 3)'),
    (config(schema.TokenLabel(), data=recipe(cutmix=1., rotate_degrees=3.)), 'recipe.rotate_degrees: expected 0 for'),
    (config(schema.TokenLabel(mix_group=4)), 'mix_group: expected its default 0 with objective.mix_token=False'),
    (config(schema.TokenLabel(mix_token=True, mix_group=6), batch_size=64),
     'objective.mix_group: expected 0, or an even number that divides batch_size / train.accumulate=64, got 6.'),
    (config(schema.TokenLabel(mix_token=True), batch_size=6, train=schema.Train(accumulate=2)),
     'accumulate: expected a multiple of'),
    (config(schema.Distill(weight=1.5)), 'objective.weight: expected 0 to 1, got 1.5'),
    (config(schema.Distill(temperature=3.)),
     'objective.temperature: expected its default 1.0 with objective.distill_type=hard'),
    (config(schema.Distill(soft_mean=schema.SoftMean.CODE)),
     'soft_mean: expected its default paper with objective.distill_type=hard, got code. It has no effect there'),
    (config(schema.Distill(weight=1., label_smoothing=.1)), 'label_smoothing: expected its default 0.0 with obj'),
    (config(schema.Distill(schema.Teacher(model=model(patch=5)))), 'image_px: expected multiples of objective.teach'),
    (config(schema.Distill(schema.Teacher(std=(0., 1., 1.)))), 'teacher.std: expected numbers, each more'),
    (config(schema.Distill(schema.Teacher(model=MODEL)), data=VIEWS),
     'expected False for objective Distill, which take'),
])
def test_settings_that_cannot_work_are_refused(given: C, said: str) -> None:
  with pytest.raises(UserError) as error:
    check.check(given)
  assert said in str(error.value)
