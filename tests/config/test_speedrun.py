"""The config of the speedrun: each change is kept by the later ones, and its rules hold for all."""
from __future__ import annotations

import itertools

import pytest

from vit_jax.config import check, durations, files, schema

CHANGES = ('baseline', 'muon', 'mimetic', 'patch_dropout')


def load(target: str, upto: str) -> schema.Config:
  return files.load(f'speedrun_cifar10:{target},upto={upto},source=digits', [])


@pytest.mark.parametrize(('target', 'upto'), [*itertools.product(('75', '80'), CHANGES)])
def test_the_rules_hold_for_every_record(target: str, upto: str) -> None:
  config = load(target, upto)
  check.check(config)
  assert isinstance(config.model, schema.ViT) and type(config.model.stem) is schema.PatchStem
  assert config.model.patch >= 2 and type(config.model.block) is schema.Plain
  assert config.seed == 0 and config.train.cpu_threads <= 2 and not config.init_from
  assert (config.data.train_split, config.data.eval_split) == ('train', 'test')
  assert [(name, one.every, one.limit) for name, one in config.evals.items()] == [('test', '100 %', 0)]


def test_a_change_is_kept_by_the_later_ones_and_80_percent_takes_longer() -> None:
  runs = [load('75', upto) for upto in CHANGES]
  assert [type(run.optimizer).__name__ for run in runs] == ['AdamW', 'Muon', 'Muon', 'Muon']
  vits = [run.model for run in runs if isinstance(run.model, schema.ViT)]
  assert [one.init is schema.Init.MIMETIC for one in vits] == [False, False, True, True]
  assert [one.patch_dropout for one in vits] == [0., 0., 0., .5]
  assert files.load('speedrun_cifar10:source=digits', []) == runs[-1]
  for upto in CHANGES:
    short, long = (durations.parse(load(target, upto).length).value for target in ('75', '80'))
    assert short < long
