"""The seven levels of AugReg, by both of their names."""
from __future__ import annotations

import pytest

from vit_jax.config import files, schema
from vit_jax.core.errors import UserError
from vit_jax.recipes import augreg


def test_the_levels_of_the_paper() -> None:
  expected = {'none': (0, 0, 0), 'light1': (2, 0, 0), 'light2': (2, 10, .2), 'medium1': (2, 15, .2),
              'medium2': (2, 15, .5), 'strong1': (2, 20, .5), 'strong2': (2, 20, .8)}
  assert {name: tuple(level) for name, level in augreg.LEVELS.items() if not name.startswith('aug_')} == expected


def test_files_call_the_first_two_otherwise() -> None:
  assert augreg.LEVELS['aug_light0'] == augreg.LEVELS['light1'] == (2, 0, 0)
  assert augreg.LEVELS['aug_light1'] == augreg.LEVELS['light2'] == (2, 10, .2)
  for name in ('none', 'medium1', 'medium2', 'strong1', 'strong2'):
    assert augreg.LEVELS[f'aug_{name}'] == augreg.LEVELS[name]


def test_the_config_takes_both_names_and_lists_them_for_another_one() -> None:
  found = {name: files.load(f'augreg:S/16,{name}', []).data.recipe for name in augreg.LEVELS}
  assert len(found) == 14
  assert found['aug_light1'] == found['light2'] != found['light1'] == found['aug_light0']
  strong = found['strong2']
  assert (strong.randaugment.layers, strong.randaugment.magnitude, strong.mixup) == (2, 20., .8)
  assert found['none'] == found['aug_none'] and not found['none'].randaugment.layers and not found['none'].mixup
  with pytest.raises(UserError, match="aug: expected one of none, light1, .*, aug_light0, .*, got 'light0'"):
    files.load('augreg:aug=light0', [])


def test_a_level_gives_a_setting() -> None:
  assert augreg.LEVELS['medium2'].randaugment() == schema.RandAugment(layers=2, magnitude=15)
