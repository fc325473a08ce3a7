"""How many pictures a second one core makes ready, recipe by recipe: `python -m vit_jax.data.speed FOLDER`.

FOLDER holds pictures (see `folder.py`); a few hundred are read into memory first, so that the disk does not count.
Recipes take turns, a chunk each, and the median over the turns is given: a machine that is busy now and then
slows all of them.
"""
from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.config import augreg, schema
from vit_jax.core.errors import UserError
from vit_jax.data import prefetch, recipes, sources
from vit_jax.data.sources import Record

NUM_PICTURES, CHUNK, TURNS = 200, 40, 9
IMAGE_PX = (224, 224)
_TIMM = schema.RandAugment(2, 9., .5, .5, schema.OpTable.TIMM)


def _like_timm(recipe: schema.Recipe) -> schema.Recipe:
  return dataclasses.replace(recipe, interpolation=schema.Interpolation.BICUBIC, antialias=True)


RECIPES: dict[str, schema.Recipe] = {
    'decode and resize': schema.Recipe(crop=schema.Crop.RESIZE, flip=False),
    'crop and flip': schema.Recipe(),
    'area': schema.Recipe(interpolation=schema.Interpolation.AREA),
    'bicubic': schema.Recipe(interpolation=schema.Interpolation.BICUBIC),
    'bilinear, antialias': schema.Recipe(antialias=True),
    'bicubic, antialias': _like_timm(schema.Recipe()),
    'AugReg light2 (2, 10)': schema.Recipe(randaugment=augreg.randaugment(augreg.recipe('light2'))),
    'AugReg strong2 (2, 20)': schema.Recipe(randaugment=augreg.randaugment(augreg.recipe('strong2'))),
    'timm m9-mstd0.5-inc1': _like_timm(schema.Recipe(randaugment=_TIMM)),
    '3-Augment': _like_timm(schema.Recipe(three_augment=True, jitter=schema.Jitter(.3, .3, .3))),
    'colour jitter .4 .4 .2 .1': schema.Recipe(jitter=schema.Jitter(.4, .4, .2, .1)),
    'DINO 2 + 8 views': _like_timm(schema.Recipe(views=schema.Views(on=True))),
}


class Speed(NamedTuple):
  """Pictures a second of one core: median, least and most over the turns."""
  median: float
  least: float
  most: float


def measure(records: Sequence[Record], *, turns: int, chunk: int,
            image_px: tuple[int, int] = IMAGE_PX) -> dict[str, Speed]:
  """Each recipe's host part, in turns, in one thread; processor seconds count, not the clock."""
  rates: dict[str, list[float]] = {name: [] for name in RECIPES}
  transforms = {name: recipes.train_transform(recipe, image_px) for name, recipe in RECIPES.items()}
  for turn in range(turns + 1):
    rng = np.random.default_rng(turn)
    chosen = [records[i] for i in rng.integers(0, len(records), chunk)]
    for name, transform in transforms.items():
      started_s = time.process_time()
      for record in chosen:
        transform(record, rng)
      if turn:  # the first one warms up
        rates[name].append(chunk / max(1e-9, time.process_time() - started_s))
  return {name: Speed(statistics.median(r), min(r), max(r)) for name, r in rates.items()}


def main(arguments: Sequence[str]) -> int:
  """Prints the table of a folder of pictures."""
  if len(arguments) != 1:
    print('usage: python -m vit_jax.data.speed FOLDER', file=sys.stderr)
    return 2
  prefetch.quieten_cv2()
  try:
    source = sources.open_split(schema.Data(source=f'folder:{arguments[0]}'), 'train', image_px=IMAGE_PX)
  except UserError as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  records = [source[i] for i in range(min(len(source), NUM_PICTURES))]
  print(f'{"images/s and core, to 224 px":<30}{"median":>8}{"least":>8}{"most":>8}')
  for name, speed in measure(records, turns=TURNS, chunk=CHUNK).items():
    print(f'{name:<30}' + ''.join(f'{x:>8,.0f}' for x in speed))
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
