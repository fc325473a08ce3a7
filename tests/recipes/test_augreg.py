"""The seven levels of AugReg, by both of their names."""
from __future__ import annotations

import pytest

from vit_jax.config import files, schema
from vit_jax.core.errors import UserError
from vit_jax.recipes import augreg


def test_the_levels_of_the_paper() -> None:
  expected = {'none': (0, 0, 0), 'light1': (2, 0, 0), 'light2': (2, 10, .2), 'medium1': (2, 15, .2),
              'medium2': (2, 15, .5), 'strong1': (2, 20, .5), 'strong2': (2, 20, .8)}
  assert {name: tuple(augreg.recipe(name)) for name in augreg.LEVELS} == expected


def test_files_call_the_first_two_otherwise() -> None:
  assert augreg.recipe_of_file('light0') == augreg.recipe('light1') == (2, 0, 0)
  assert augreg.recipe_of_file('light1') == augreg.recipe('light2') == (2, 10, .2)
  for name in ('none', 'medium1', 'medium2', 'strong1', 'strong2'):
    assert augreg.recipe_of_file(name) == augreg.recipe(name)
  assert len(augreg.FILE_NAMES) == len(augreg.LEVELS) == 7


def test_the_other_kind_of_name_is_explained() -> None:
  with pytest.raises(UserError, match="aug: expected one of none, light1, light2.*, got 'light0'. light0 is a name "
                                      'of weight files; the paper calls it light1.'):
    augreg.recipe('light0')
  with pytest.raises(UserError, match='expected aug_ and one of none, light0, light1.*, got aug_light2. light2 is '
                                      'a name of the paper; weight files call it light1.'):
    augreg.recipe_of_file('light2')


def test_the_config_takes_both_names() -> None:
  found = {name: files.load(f'augreg:S/16,{name}', []).data.recipe for name in augreg.NAMES}
  assert len(found) == 14 and len(augreg.NAMES) == 14
  assert found['aug_light1'] == found['light2'] != found['light1'] == found['aug_light0']
  strong = found['strong2']
  assert (strong.randaugment.layers, strong.randaugment.magnitude, strong.mixup) == (2, 20., .8)
  assert found['none'] == found['aug_none'] and not found['none'].randaugment.layers and not found['none'].mixup


def test_a_level_gives_a_setting() -> None:
  assert augreg.randaugment(augreg.recipe('medium2')) == schema.RandAugment(layers=2, magnitude=15)
