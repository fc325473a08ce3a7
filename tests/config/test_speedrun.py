"""The config of the speedrun: each change is kept by the later ones, and its rules hold for all."""
from __future__ import annotations

import itertools

import pytest

from vit_jax.config import check, durations, files, schema

CHANGES = ('baseline', 'muon', 'mimetic', 'patch_dropout', 'qk_norm', 'no_shift', 'muon_patches')


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
  # Each condition is first true of one of the changes, and then of all after it.
  first = (('muon', lambda run: isinstance(run.optimizer, schema.Muon)),
           ('mimetic', lambda run: run.model.init is schema.Init.MIMETIC),
           ('patch_dropout', lambda run: run.model.patch_dropout == .5),
           ('qk_norm', lambda run: run.model.attention.qk_norm),
           ('no_shift', lambda run: not run.data.recipe.shift_px),
           ('muon_patches', lambda run: run.data.recipe.std == (.25, .25, .25)),
           ('muon_patches', lambda run: any('stem' in one for one in getattr(run.optimizer, 'matrices', ()))))
  for name, is_so in first:
    assert [is_so(run) for run in runs] == [index >= CHANGES.index(name) for index in range(len(CHANGES))], name
  assert files.load('speedrun_cifar10:source=digits', []) == runs[-1]
  for upto in CHANGES:
    short, long = (durations.parse(load(target, upto).length).value for target in ('75', '80'))
    assert short < long
