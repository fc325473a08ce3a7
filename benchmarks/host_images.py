"""Measures the images per second that one core prepares for each recipe.

  python -m benchmarks.host_images DATASET [DATASET ...]

A DATASET is a folder of images (see `folder.py`) or of shards written by `--job=prepare` (see `array_record.py`).
Reading, decoding, geometry and colors are measured in processor seconds, so that the disk does not count. Recipes and
datasets are interleaved, a chunk each, and the median over the rounds is printed: other load slows down all of them.
"""
from __future__ import annotations

import dataclasses
import pathlib
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.data import opening
from vit_jax.data.formats import array_record
from vit_jax.data.image import jpeg, opencv, transform
from vit_jax.data.source import Source, read_one
from vit_jax.recipes import augreg

NUM_IMAGES, CHUNK, ROUNDS = 500, 40, 9
IMAGE_PX = (224, 224)
_TIMM = schema.RandAugment(2, 9., 0.5, 0.5, schema.OpTable.TIMM)
_DINO = schema.Views(
    on=True, num_local=8, local_px=96, global_area=(0.4, 1.), local_area=(0.05, 0.4), blur=(1., 0.1, 0.5),
    solarize=(0., 0.2, 0.), grayscale=0.2, jitter=schema.Jitter(0.4, 0.4, 0.2, 0.1, probability=0.8))


def _like_timm(recipe: schema.Recipe) -> schema.Recipe:
  return dataclasses.replace(recipe, interpolation=schema.Interpolation.BICUBIC, antialias=True)


RECIPES: dict[str, schema.Recipe] = {
    'decode and resize': schema.Recipe(crop=schema.Crop.RESIZE, flip=False),
    'crop and flip': schema.Recipe(),
    'area': schema.Recipe(interpolation=schema.Interpolation.AREA),
    'bicubic': schema.Recipe(interpolation=schema.Interpolation.BICUBIC),
    'bilinear, antialias': schema.Recipe(antialias=True),
    'bicubic, antialias': _like_timm(schema.Recipe()),
    'AugReg light2 (2, 10)': schema.Recipe(randaugment=augreg.LEVELS['light2'].randaugment()),
    'AugReg strong2 (2, 20)': schema.Recipe(randaugment=augreg.LEVELS['strong2'].randaugment()),
    'timm m9-mstd0.5-inc1': _like_timm(schema.Recipe(randaugment=_TIMM)),
    '3-Augment': _like_timm(schema.Recipe(three_augment=True, jitter=schema.Jitter(0.3, 0.3, 0.3))),
    'color jitter 0.4 0.4 0.2 0.1': schema.Recipe(jitter=schema.Jitter(0.4, 0.4, 0.2, 0.1)),
    'DINO 2 + 8 views': _like_timm(schema.Recipe(views=_DINO)),
}


PARTIAL = 'crop and flip, only the crop decoded'
"""'crop and flip' with `data.decode=crop`, if nvImageCodec is installed."""


class Speed(NamedTuple):
  """Images per second and core: median, smallest and largest of the rounds; `ratio` to the first dataset by round."""
  median: float
  smallest: float
  largest: float
  ratio: float


def measure(sets: Mapping[str, Source], *, rounds: int, chunk: int,
            image_px: tuple[int, int] = IMAGE_PX) -> dict[str, dict[str, Speed]]:
  """Measures the host part of each recipe on each dataset, interleaved, in one thread, in processor seconds."""
  transforms = {name: transform.train_transform(recipe, image_px) for name, recipe in RECIPES.items()}
  if jpeg.is_installed():
    transforms[PARTIAL] = transform.train_transform(schema.Recipe(), image_px, decode=schema.Decode.CROP)
  rates: dict[str, dict[str, list[float]]] = {name: {one: [] for one in sets} for name in transforms}
  for turn in range(rounds + 1):
    rng = np.random.default_rng(turn)
    places = rng.random(chunk)
    for name, prepare in transforms.items():
      for one, source in sets.items():
        started_s = time.process_time()
        for i in (places * min(len(source), NUM_IMAGES)).astype(int).tolist():
          prepare(read_one(source, i), rng)
        if turn:  # the first round warms up
          rates[name][one].append(chunk / max(1e-9, time.process_time() - started_s))
  first = next(iter(sets))
  return {one: {name: speed(found[one], found[first]) for name, found in rates.items()} for one in sets}


def speed(rates: Sequence[float], first: Sequence[float]) -> Speed:
  """Summarizes the rates of some rounds; `first` has those of the first dataset."""
  ratios = [a / b for a, b in zip(rates, first, strict=True)]
  return Speed(statistics.median(rates), min(rates), max(rates), statistics.median(ratios))


def open_set(where: str) -> Source:
  """Opens the training images of a folder of images, or of shards.

  Raises:
    UserError: the folder has neither.
  """
  kind = 'array_record' if (pathlib.Path(where) / array_record.INFO).is_file() else 'folder'
  return opening.open_split(schema.Data(source=f'{kind}:{where}'), 'train', image_px=IMAGE_PX)


def main(arguments: Sequence[str]) -> int:
  """Prints a table for each dataset."""
  if not arguments or arguments[0].startswith('-'):
    print('usage: python -m benchmarks.host_images DATASET [DATASET ...], folders of images or shards',
          file=sys.stderr)
    return 2
  opencv.quieten()
  try:
    sets = {where: open_set(where) for where in arguments}
  except UserError as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  for where, speeds in measure(sets, rounds=ROUNDS, chunk=CHUNK).items():
    print(f'{where}\n{"images/s and core, to 224 px":<38}{"median":>8}{"min":>8}{"max":>8}{"ratio":>8}')
    for name, found in speeds.items():
      print(f'{name:<38}' + ''.join(f'{x:>8,.0f}' for x in found[:3]) + f'{found.ratio:>8.2f}')
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
