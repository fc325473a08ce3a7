"""Every combination of settings of optimizer, schedule and training that cannot work or has no effect."""
from __future__ import annotations

import dataclasses

import pytest

from vit_jax.config import check, schema
from vit_jax.config.schema import AdamW, Decay, EarlyStop, PathRule, Ramp, Sam, Schedule, Sgd, Supervised, TopK, Train
from vit_jax.core.errors import UserError

GOOD = schema.Config(name='x', evals={'test': TopK(metrics=('ece',))}, train=Train(
    sam=Sam(.6, .1, .4), ema=.9, ema_warmup=schema.EmaWarmup.NONE, early_stop=EarlyStop('test/ece@ema')),
    objective=Supervised(schema.Loss.BCE, threshold=.2), optimizer=AdamW(
        lr=1.5e-4, base_batch_size=32, weight_decay=.1, layer_decay=.75,
        weight_decay_ramp=Ramp(1., 10.), rules=(PathRule('head/.*', weight_decay=100., frozen_until='1 epoch'),),
        schedule=Schedule(Decay.CONSTANT, cooldown='20 %', end_lr=5e-4)))


def test_a_good_config_passes() -> None:
  check.check(GOOD)


def scheduled(**settings: object) -> dict[str, object]:
  return {'optimizer': AdamW(schedule=Schedule(**{'decay': Decay.COSINE, **settings})), 'train': Train()}


def ruled(**settings: object) -> dict[str, object]:
  return {'optimizer': AdamW(rules=(PathRule('head/.*', **settings),)), 'train': Train()}


@pytest.mark.parametrize(('changes', 'said'), [
    ({'optimizer': Sgd(clip_norm=1., clip_tensor=3.)},
     "optimizer: expected at most one of clip_norm, clip_tensor, got {'clip_norm': 1.0, 'clip_tensor': 3.0}. Set the"),
    ({'optimizer': Sgd(clip_parts=('head/.*',))}, 'optimizer.clip_parts: expected its default'),
    ({'optimizer': Sgd(clip_norm=1., clip_parts=('(a',))}, 'optimizer.clip_parts: expected'),
    ({'optimizer': Sgd(clip_adaptive=-1.)}, 'optimizer.clip_adaptive: expected at least 0, got -1.0'),
    ({'train': Train(profile='5..3')}, 'train.profile: expected first..last, from 1 and in order'),
    ({'optimizer': Sgd(base_batch_size=-1)}, 'optimizer.base_batch_size: expected at least 0, got -1'),
    ({'optimizer': Sgd(layer_decay=0.)}, 'optimizer.layer_decay: expected more than 0 to 1, got 0.0'),
    ({'optimizer': AdamW(weight_decay_mask=('(a',))},
     "weight_decay_mask: expected a regular expression, got '(a'. Pyt"),
    ({'optimizer': schema.Lars(trust_ratio_mask=('*',))}, 'optimizer.trust_ratio_mask: expected a regular expression'),
    ({'optimizer': AdamW(weight_decay=.1, weight_decay_mask=())},
     'optimizer.weight_decay_mask: expected a pattern with optimizer.weight_decay=0.1, got ()'),
    (scheduled(timescale='1 epoch'),
     "optimizer.schedule.timescale: expected its default '10_000 steps' with optimizer.schedule.decay=cosine, got "
     "'1 epoch'. It has no effect there. It is a setting of decay=rsqrt."),
    (scheduled(gamma=.5), 'schedule.gamma: expected its default 0.1 with optimizer.schedule.decay=cosine'),
    ({'train': Train(early_stop=EarlyStop(patience=3))}, 'patience: expected its default 5 with train.early'),
    ({'train': Train(early_stop=EarlyStop('test/top2'))}, 'early_stop.metric: expected one of the metrics of'),
    ({'objective': Supervised(), 'head': schema.Head(bias_init=-10.)}, 'head.bias_init: expected 0 with objective.'),
    ({'optimizer': AdamW(eps=0.)}, 'optimizer.eps: expected more than 0, got 0.0'),
    ({'optimizer': schema.RMSProp(schedule=schema.Schedule(schema.Decay.COSINE, hold='1 epoch'))},
     'optimizer.schedule.end_lr: expected more than 0 for RMSProp with optimizer.schedule.hold'),
    ({'evals': {'h': schema.Health()}, 'data': schema.Data(recipe=schema.Recipe(eval_native_patch=16))},
     'data.recipe.eval_native_patch: expected 0 with evals.h, which mirrors and crops images of one size, got 16'),
    ({'optimizer': schema.Lars(trust_coefficient=0.)}, 'optimizer.trust_coefficient: expected more than 0, got 0.0'),
    ({'optimizer': schema.Adafactor(b2_cap=1.)}, 'optimizer.b2_cap: expected more than 0 to below 1, got 1.0'),
    ({'optimizer': schema.Lion(b2=1.)}, 'optimizer.b2: expected 0 to below 1, got 1.0'),
    ({'optimizer': AdamW(lr=0., decay_by=schema.DecayBy.SCHEDULE)}, 'optimizer.lr: expected a positive number'),
    ({'optimizer': AdamW(decay_by=schema.DecayBy.GRADIENT)},
     'optimizer.decay_by: expected lr or schedule for AdamW, whose weight decay is decoupled, got gradient. For coup'),
    ({'optimizer': Sgd(decay_by=schema.DecayBy.LR)},
     'optimizer.decay_by: expected its default gradient with optimizer.weight_decay=0, got lr. It has no effect there'),
    ({'optimizer': Sgd(weight_decay_ramp=Ramp(1., 10.))},
     'weight_decay_ramp: expected its default with optimizer.weight_decay=0, got Ramp(start'),
    ({'optimizer': AdamW(weight_decay_ramp=Ramp(-1.))}, 'optimizer.weight_decay_ramp.start: expected at least 0'),
    ({'optimizer': AdamW(weight_decay_ramp=Ramp(until='end'))}, 'weight_decay_ramp.until: expected a number and a'),
    ({'optimizer': AdamW(lr=1e-3, base_batch_size=256, schedule=Schedule(end_lr=6e-4))},
     'optimizer.schedule.end_lr: expected at most 0.0005, the peak that optimizer.lr=0.001 gives, got 0.0006'),
    (scheduled(cooldown='10 %'),
     "cooldown: expected its default '' with optimizer.schedule.decay=cosine, which reaches end_lr"),
    (scheduled(decay=Decay.RSQRT, end_lr=1e-5),
     'end_lr: expected its default 0.0 with optimizer.schedule.decay=rsqrt and no'),
    (scheduled(decay=Decay.RSQRT, timescale='x'), 'optimizer.schedule.timescale: expected a number and a unit'),
    (scheduled(decay=Decay.CONSTANT, cooldown='x'), 'optimizer.schedule.cooldown: expected a number and a unit'),
    (scheduled(milestones=('3 steps',)),
     'milestones: expected its default () with optimizer.schedule.decay=cosine'),
    (scheduled(decay=Decay.STEPS), 'milestones: expected at least one with optimizer.schedule.decay=steps'),
    (scheduled(decay=Decay.STEPS, milestones=('x',)), 'optimizer.schedule.milestones: expected a number and a unit'),
    (scheduled(decay=Decay.STEPS, milestones=('3 steps',), gamma=0.),
     'optimizer.schedule.gamma: expected more than 0 to 1'),
    ({'optimizer': AdamW(rules=(PathRule('(head'),))}, "rules[0].paths: expected a regular expression, got '(head'"),
    (ruled(lr=-1.), 'optimizer.rules[0].lr: expected at least 0, got -1.0'),
    (ruled(lr=Ramp(begin='x')), 'optimizer.rules[0].lr.begin: expected a number and a unit'),
    (ruled(frozen_until='soon'), 'optimizer.rules[0].frozen_until: expected a number and a unit'),
    ({'optimizer': Sgd(rules=(PathRule('head/.*', weight_decay=3.),))},
     'rules[0].weight_decay: expected its default 1.0'),
    ({'train': Train(sam=Sam(-.1))}, 'train.sam.rho: expected at least 0, got -0.1'),
    ({'train': Train(sam=Sam(alpha=.4))}, 'train.sam.alpha: expected its default 0.0 with train.sam.rho=0'),
    ({'train': Train(sam=Sam(.1, .6))}, 'train.sam.rho_end: expected at most train.sam.rho=0.1, got 0.6'),
    ({'train': Train(sam=Sam(.6, .1)), 'optimizer': AdamW(schedule=Schedule(Decay.CONSTANT))},
     'train.sam.rho_end: expected its default -1.0 with a constant learning rate'),
    ({'train': Train(ema_warmup=schema.EmaWarmup.POWER)}, 'ema_warmup: expected its default ratio with'),
    ({'train': Train(early_stop=EarlyStop('val/top1'))},
     'expected EVALUATION/METRIC with one of the evaluations (test'),
    ({'train': Train(early_stop=EarlyStop('test/top1@ema'))}, 'expected no @ema with train.ema=0'),
    ({'train': Train(early_stop=EarlyStop('test/top1', patience=0))}, 'train.early_stop.patience: expected at least 1'),
    ({'objective': Supervised(threshold=.2)}, 'objective.loss: expected sigmoid or bce with objective.thr'),
    ({'objective': Supervised(schema.Loss.BCE, threshold=1.)}, 'objective.threshold: expected 0 to below 1, or -1'),
    ({'objective': Supervised(class_weights=(1., -1.))}, 'objective.class_weights: expected numbers, each at least 0'),
    ({'objective': Supervised(class_weights=(1., 1.)), 'data': schema.Data(num_classes=3)},
     'class_weights: expected a number for each of data.num_classes=3, got 2'),
    ({'evals': {'test': TopK(metrics=('f1',))}},
     "evals.test.metrics: expected some of ece, class_mean, got ('f1',). top1"),
], ids=lambda x: x if isinstance(x, str) else '')
def test_a_problem_names_the_setting_and_its_value(changes: dict[str, object], said: str) -> None:
  with pytest.raises(UserError) as error:
    check.check(dataclasses.replace(GOOD, **changes))
  assert said in str(error.value)
