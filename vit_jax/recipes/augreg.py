"""The seven levels of augmentation of AugReg (Steiner et al., arXiv 2106.10270, section 3.3): what each means.

A level is RandAugment's number of operations and magnitude (table `augreg`), and mixup's alpha. The names
need care: the paper and big_vision call the first two levels with an effect light1 and light2, the published weight
files call them light0 and light1. So `light1` of the paper and `aug_light1` of a file are different recipes. A
magnitude of 0 is not the identity (see `data/image/randaugment.py`), so the paper's light1 is not mild.
"""
from __future__ import annotations

from typing import NamedTuple

from vit_jax.config import schema


class Level(NamedTuple):
  """RandAugment's operations an image and magnitude, and mixup's alpha."""
  layers: int
  magnitude: float
  mixup: float

  def randaugment(self) -> schema.RandAugment:
    """Returns the setting of RandAugment."""
    if not self.layers:
      return schema.RandAugment()
    return schema.RandAugment(self.layers, self.magnitude, table=schema.OpTable.AUGREG)


LEVELS = {  # by the names of the paper
    'none': Level(0, 0, 0.),
    'light1': Level(2, 0, 0.),
    'light2': Level(2, 10, .2),
    'medium1': Level(2, 15, .2),
    'medium2': Level(2, 15, .5),
    'strong1': Level(2, 20, .5),
    'strong2': Level(2, 20, .8)}
LEVELS |= {  # by the names of weight files
    'aug_none': LEVELS['none'], 'aug_light0': LEVELS['light1'], 'aug_light1': LEVELS['light2'],
    **{f'aug_{name}': LEVELS[name] for name in ('medium1', 'medium2', 'strong1', 'strong2')}}
"""By either of their names: `light1` is the paper's, `aug_light1` a weight file's."""
