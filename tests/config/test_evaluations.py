"""Settings of evaluations: faults are found before anything runs, and evaluations can be had by name."""
from __future__ import annotations

import dataclasses

import pytest

from vit_jax.config import check, files, schema
from vit_jax.config.schema import FeatureLayers, FewShot, Head, Knn, Logistic, PathRule, Probe, Real, Sgd, TopK
from vit_jax.core.errors import UserError

FROZEN = Sgd(rules=(PathRule('backbone/.*', frozen_until='100 %'),))
GOOD = schema.Config(evals={
    'top': TopK(only_present=True, classes='map', source='folder:x'), 'real': Real(labels='real.json', limit=5),
    'few': FewShot(train_split='train[:65000]', num_seeds=2, l2_sweep=(1., 2.)), 'knn': Knn(headline=10),
    'log': Logistic(max_steps=3), 'mae': Probe(), 'dino': schema.EVALUATIONS['probe_dino']()})


def test_a_config_with_all_evaluations_is_valid() -> None:
  check.check(GOOD)
  check.check(dataclasses.replace(GOOD, optimizer=FROZEN,
                                  head=Head(probe=True, batch_norm=True, features=FeatureLayers((-1,), True))))


@pytest.mark.parametrize(('one', 'message'), [
    (TopK(limit=-1), 'evals.x.limit: expected at least 0, got -1'),
    (TopK(every='soon'), 'evals.x.every: expected a number and a unit'),
    (Real(classes='map'), "evals.x.classes: expected '', as ReaL labels are numbers of ImageNet classes, got 'map'"),
    (FewShot(shots=(5, 0)), r'evals.x.shots: expected numbers, each at least 1, got \(5, 0\)'),
    (FewShot(l2=0.), 'evals.x.l2: expected more than 0, got 0.0'), (FewShot(l2_sweep=(-1.,)), 'evals.x.l2_sweep'),
    (FewShot(num_seeds=0), 'evals.x.num_seeds: expected at least 1, got 0'),
    (Knn(neighbors=()), r'evals.x.neighbors: expected at least one number, got \(\)'),
    (Knn(temperature=0.), 'evals.x.temperature'),
    (Knn(neighbors=(5,)), r'evals.x.headline: expected one of evals.x.neighbors=\(5,\), got 20'),
    (Logistic(l2=()), 'evals.x.l2'), (Logistic(holdout=1.), 'evals.x.holdout: expected more than 0 to below 1'),
    (Logistic(max_steps=0), 'evals.x.max_steps: expected at least 1, got 0'),
    (Probe(learning_rates=(0.,)), 'evals.x.learning_rates'),
    (Probe(epochs=5, warmup_epochs=6), 'evals.x.warmup_epochs: expected at most evals.x.epochs=5, got 6'),
    (Probe(train_batch_size=0), 'evals.x.train_batch_size: expected at least 1'),
    (Probe(base_batch_size=-1), 'evals.x.base_batch_size: expected at least 0'),
    (Probe(momentum=2.), 'evals.x.momentum: expected 0 to 1'),
    (Probe(trust_coefficient=-1.), 'evals.x.trust_coefficient: expected at least 0'),
    (Knn(features=FeatureLayers(patches=True)),
     'evals.x.features.blocks: expected block numbers, such as -1, with evals.x.features.patches=true')])
def test_settings_that_cannot_work_are_refused(one: schema.Eval, message: str) -> None:
  with pytest.raises(UserError, match=message):
    check.check(schema.Config(evals={'x': one}))


@pytest.mark.parametrize(('changes', 'message'), [
    ({'head': Head(batch_norm=True)}, 'head.batch_norm: expected its default False with head.probe=false'),
    ({'head': Head(features=FeatureLayers((-1,)))}, 'head.features: expected its default with head.probe=false'),
    ({'head': Head(probe=True)}, 'optimizer.rules: expected one that freezes the backbone with head.probe=true'),
    ({'head': Head(probe=True), 'optimizer': Sgd(rules=(PathRule('.*/norm/.*', lr=.5), *FROZEN.rules))},
     'optimizer.rules: expected one that freezes the backbone with head.probe=true'),
    ({'head': Head(probe=True), 'optimizer': Sgd(rules=(PathRule('(', frozen_until='100 %'),))},
     'optimizer.rules.0..paths: expected a regular expression'),
    ({'head': Head(probe=True, batch_norm=True), 'optimizer': FROZEN, 'train': schema.Train(accumulate=2)},
     'train.accumulate: expected 1 with head.batch_norm=true'),
    ({'head': Head(probe=True, features=FeatureLayers(patches=True)), 'optimizer': FROZEN},
     'head.features.blocks: expected block numbers'),
    ({'evals': {'x': TopK(limit=9)}, 'checkpoints': schema.Checkpoints(keep_best='x/top1')},
     "evals.x.limit: expected 0 with checkpoints.keep_best='x/top1', which compares complete results, got 9")])
def test_settings_that_do_not_go_together_are_named(changes: dict, message: str) -> None:
  with pytest.raises(UserError, match=message):
    check.check(dataclasses.replace(schema.Config(), **changes))


def test_a_run_gets_evaluations_by_their_names_and_overrides_reach_into_them() -> None:
  config = files.load('digits', ['evals=test,knn,probe_dino', 'evals.knn.limit=50', 'evals.knn.features.blocks=-2,-1',
                                 'evals.knn.neighbors=5,20', 'evals.test.every=3 epochs'])
  assert list(config.evals) == ['test', 'knn', 'probe_dino'] and config.evals['test'].batch_size == 360
  assert config.evals['knn'] == Knn(limit=50, neighbors=(5, 20), features=FeatureLayers((-2, -1)))
  assert config.evals['probe_dino'].features.blocks == (-4, -3, -2, -1) and config.evals['test'].every == '3 epochs'
  assert list(files.load('digits', []).evals) == ['test']


def test_an_unknown_evaluation_and_a_setting_of_another_one_are_both_told() -> None:
  with pytest.raises(UserError) as raised:
    files.load('digits', ['evals=test,nearest', 'optimizer.lrr=1'])
  assert 'config.optimizer.lrr: expected the name of a setting. Did you mean config.optimizer.lr?' in str(raised.value)
  assert 'config.evals: expected names of evaluations (test, topk, real, ' in str(raised.value)
  with pytest.raises(UserError, match='config.evals.knn.shots: expected the name of a setting'):
    files.load('digits', ['evals=knn', 'evals.knn.shots=5'])


@pytest.mark.parametrize('name', schema.EVALUATIONS)
def test_a_named_evaluation_is_a_right_one(name: str) -> None:
  check.check(schema.Config(evals={name: schema.EVALUATIONS[name]()}))
