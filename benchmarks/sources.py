"""Compares how many images per second one core reads from several sources of the same images, in a random order.

  python -m benchmarks.sources array_record:DIR wds:PATH [SOURCE ...]

Reading alone, and reading with decoding and a random crop, are measured in processor seconds, so that the disk does not
count. Sources are interleaved, a pass each, and the median over the rounds is printed; `ratio` is to the first source.
"""
from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from benchmarks import host_images
from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.data.image import opencv, transform
from vit_jax.data.source import Source
from vit_jax.data.sources import opening

NUM_IMAGES, ROUNDS = 5_000, 9
IMAGE_PX = (32, 32)


def measure(sources: Mapping[str, Source], *, num_images: int, rounds: int) -> dict[str, dict[str, host_images.Speed]]:
  """Returns the speed of each source, by what is done with an image."""
  crop, rng = transform.train_transform(schema.Recipe(), IMAGE_PX), np.random.default_rng(0)
  kinds: dict[str, Callable[[Source, int], object]] = {
      'read': lambda source, index: source[index],
      'read, decode and crop': lambda source, index: crop(source[index], rng)}
  rates: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in sources} for kind in kinds}
  for turn in range(rounds + 1):
    places = np.random.default_rng(turn).random(num_images)
    for kind, use in kinds.items():
      for name, source in sources.items():
        indexes = (places * len(source)).astype(int).tolist()
        started_s = time.process_time()
        for index in indexes:
          use(source, index)
        if turn:  # the first round warms up
          rates[kind][name].append(num_images / max(1e-9, time.process_time() - started_s))
  first = next(iter(sources))
  return {kind: {name: host_images.speed(one, found[first]) for name, one in found.items()}
          for kind, found in rates.items()}


def main(arguments: Sequence[str]) -> int:
  """Prints a table for each kind of use."""
  if not arguments or arguments[0].startswith('-'):
    print('usage: python -m benchmarks.sources SOURCE [SOURCE ...], such as array_record:DIR wds:PATH', file=sys.stderr)
    return 2
  opencv.quieten()
  try:
    sources = {name: opening.open_split(schema.Data(source=name), 'train', image_px=IMAGE_PX) for name in arguments}
  except UserError as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  for kind, found in measure(sources, num_images=NUM_IMAGES, rounds=ROUNDS).items():
    print(f'{kind + ", images/s and core":<50}{"median":>10}{"min":>10}{"max":>10}{"ratio":>8}')
    for name, speed in found.items():
      print(f'{name:<50}' + ''.join(f'{x:>10,.0f}' for x in speed[:3]) + f'{speed.ratio:>8.2f}')
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
