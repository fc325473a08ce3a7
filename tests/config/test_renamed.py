"""Files of earlier versions are read with the names of today.

`old_config.json` and the texts below were written by `to_json` of the last version that had the old names.
"""
from __future__ import annotations

import dataclasses
import enum
import json
import pathlib

import options
import pytest

from vit_jax.config import json_files, provenance, renamed
from vit_jax.config import schema as s

OLD = pathlib.Path(__file__).parent / 'old_config.json'


def test_a_config_of_an_old_run_is_read_with_all_its_values() -> None:
  config = json_files.read(OLD)
  assert config.optimizer == s.Lars(
      lr=.2, base_batch_size=256, weight_decay_mask=('x',), mu_dtype=s.DType.BF16, trust_ratio_mask=('head/.*',),
      trust_coefficient=.002, schedule=s.Schedule(s.Decay.STEPS, warmup='5 %', milestones=('3 epochs',), gamma=.2))
  assert config.train == s.Train(
      accumulate=1, unstacked_layers=False, early_stop=s.EarlyStop('probe/top1', min_delta=.01))
  assert (config.data.mix_classes, config.data.decode) == (s.MixClasses.SEPARATE, s.Decode.FULL)
  assert config.objective == s.Dino(out_dim=7, hidden_dim=8, bottleneck_dim=9, norm_last_layer=False,
                                    collapse=s.Collapse(.1, '3 %', '6 %', s.OnCollapse.STOP))
  assert config.evals == {'probe': s.Probe(learning_rates=(.3,), base_batch_size=128, trust_coefficient=.003,
                                           features=s.FeatureLayers((-2,), True))}
  assert config.head == s.Head(probe=True, features=s.FeatureLayers((-4, -1)))


@pytest.mark.parametrize(('part', 'text', 'expected'), [
    ('objective', '{"type": "Mae", "hidden": 0.6, "normalized": false}', s.Mae(mask_ratio=.6, norm_pix_loss=False)),
    ('objective', '{"type": "MaskedPatch", "corrupted": 0.4, "masked": 0.7, "swapped": 0.2}',
     s.MaskedPatch(mask_ratio=.4, mask_token_prob=.7, random_patch_prob=.2)),
    ('objective', '{"type": "TokenLabel", "mix": true}', s.TokenLabel(mix_token=True)),
    ('objective', '{"type": "Distill", "teach": "soft"}', s.Distill(distill_type=s.DistillType.SOFT)),
    ('optimizer', '{"type": "RMSProp", "start": 0.5}', s.RMSProp(initial_scale=.5)),
    ('optimizer', '{"type": "Adafactor", "factored_side": 5}', s.Adafactor(min_dim_size_to_factor=5))])
def test_old_names_of_other_parts_are_read(part: str, text: str, expected: object) -> None:
  assert getattr(json_files.from_json(f'{{"{part}": {text}}}'), part) == expected


def test_the_settings_of_an_old_checkpoint_are_compared_by_their_new_names() -> None:
  saved = {'head.tap.type': 'Tap', 'head.tap.blocks': [-4, -1], 'objective.type': 'Mae', 'objective.normalized': False}
  config = s.Config(head=s.Head(features=s.FeatureLayers((-4, -1))), objective=s.Mae(norm_pix_loss=True))
  assert provenance.differences({provenance.SETTINGS: saved}, config) == {'objective.norm_pix_loss': (False, True)}


def test_the_table_leads_to_settings_that_exist_and_away_from_names_that_do_not() -> None:
  kinds = {kind.__name__: kind for one in options.classes() for kind in one.__mro__}
  for old, new in renamed.SETTINGS.items():
    kind, _, name = old.partition('.')
    known = {field.name for one in options.classes() if issubclass(one, kinds[kind])
             for field in dataclasses.fields(one)}
    assert new in known and name not in known, old
  for old, new in renamed.CHOICES.items():
    kind, _, name = old.partition('.')
    values = {choice.value for choice in getattr(s, kind)}
    assert issubclass(getattr(s, kind), enum.Enum) and new in values and name not in values, old


def test_what_is_written_has_the_new_names_alone() -> None:
  written = json.loads(json_files.to_json(json_files.read(OLD)))
  assert 'lr_per' not in written['optimizer'] and written['head']['features']['type'] == 'FeatureLayers'
