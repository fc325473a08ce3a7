"""Small sets of images with masks, of different sizes, for tests of segmentation."""
from __future__ import annotations

import pathlib

import numpy as np
from PIL import Image

COLORS = np.array([[220, 40, 40], [40, 200, 60], [50, 70, 230]])
NAMES = ('red', 'green', 'blue sky')
SIZES = ((32, 48), (20, 30), (45, 33), (32, 48), (64, 64), (25, 70), (48, 32))


def write(root: pathlib.Path, **num_images: int) -> pathlib.Path:
  """Noisy rectangles of three colors, with some ignored pixels, in as many images of each split; returns the root."""
  for number, (split, num) in enumerate(num_images.items()):
    for index in range(num):
      rng = np.random.default_rng([number, index])
      height, width = SIZES[index % len(SIZES)]
      y, x = (int(rng.integers(side // 4, 3 * side // 4)) for side in (height, width))
      mask = np.zeros((height, width), np.uint8)
      mask[:y, x:], mask[y:] = rng.permutation(3)[:2]
      image = COLORS[mask] * rng.uniform(.5, 1.) + rng.normal(0, 60, (height, width, 3))
      mask[rng.integers(0, height, 9), rng.integers(0, width, 9)] = 255
      for kind, one in (('images', image.clip(0, 255).astype(np.uint8)), ('masks', mask)):
        (root / kind / split).mkdir(parents=True, exist_ok=True)
        Image.fromarray(one).save(root / kind / split / f'{index}.png')
  (root / 'classes.txt').write_text('\n'.join(NAMES))
  return root
