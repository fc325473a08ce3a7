"""The seven levels of augmentation of AugReg (Steiner et al., arXiv 2106.10270, section 3.3): what each means.

A level is RandAugment's number of operations and magnitude (table `augreg`), and mixup's alpha. The names
need care: the paper and big_vision call the first two levels with an effect light1 and light2, the published weight
files call them light0 and light1. So `light1` of the paper and `aug_light1` of a file are different recipes. A
magnitude of 0 is not the identity (see `data/image/randaugment.py`), so the paper's light1 is not mild.
"""
from __future__ import annotations

from typing import NamedTuple

from vit_jax.config import schema
from vit_jax.core.errors import UserError


class Level(NamedTuple):
  """RandAugment's operations an image and magnitude, and mixup's alpha."""
  layers: int
  magnitude: float
  mixup: float


LEVELS = {
    'none': Level(0, 0, 0.),
    'light1': Level(2, 0, 0.),
    'light2': Level(2, 10, .2),
    'medium1': Level(2, 15, .2),
    'medium2': Level(2, 15, .5),
    'strong1': Level(2, 20, .5),
    'strong2': Level(2, 20, .8),
}
"""By the names of the paper."""

FILE_NAMES = {'none': 'none', 'light0': 'light1', 'light1': 'light2', 'medium1': 'medium1', 'medium2': 'medium2',
              'strong1': 'strong1', 'strong2': 'strong2'}
"""From the `aug_…` of a weight file's name to the paper's name."""


def recipe(level: str) -> Level:
  """Returns a level by the name that the paper uses.

  Raises:
    UserError: there is no such level.
  """
  if level not in LEVELS:
    hint = ' light0 is a name of weight files; the paper calls it light1.' if level == 'light0' else ''
    raise UserError(f'aug: expected one of {", ".join(LEVELS)}, got {level!r}.{hint}')
  return LEVELS[level]


def recipe_of_file(aug: str) -> Level:
  """Returns a level by the part of a weight file's name that follows `aug_`.

  Raises:
    UserError: there is no such level.
  """
  if aug not in FILE_NAMES:
    hint = ' light2 is a name of the paper; weight files call it light1.' if aug == 'light2' else ''
    raise UserError(f'aug: expected aug_ and one of {", ".join(FILE_NAMES)}, got aug_{aug}.{hint}')
  return recipe(FILE_NAMES[aug])


NAMES = (*LEVELS, *(f'aug_{name}' for name in FILE_NAMES))
"""All names of levels: `light1` is the paper's, `aug_light1` a weight file's."""


def by_name(name: str) -> Level:
  """Returns a level by either of its names.

  Raises:
    UserError: there is no such level.
  """
  return recipe_of_file(name.removeprefix('aug_')) if name.startswith('aug_') else recipe(name)


def randaugment(level: Level) -> schema.RandAugment:
  """Returns the setting of RandAugment of a level."""
  if not level.layers:
    return schema.RandAugment()
  return schema.RandAugment(level.layers, level.magnitude, table=schema.OpTable.AUGREG)
