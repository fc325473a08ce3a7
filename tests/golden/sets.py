"""The same 41 images of three classes in every kind of source, JPEG and PNG; only `prepare` is of the program.

Images are 64 px or so, of different aspects, so that crops and lengths differ; some carry several labels, captions and
masks. The order of all splits is that of the folder.
"""
from __future__ import annotations

import json
import pathlib

import cv2
import numpy as np

from tests.data import packed, parquets
from tests.data.images import encode
from tests.data.packed import NAMES, Example
from tests.golden import surface
from vit_jax import main

NUM_TRAIN, NUM_TEST = 41, 13
SETTINGS = {'wds': ('data.label_column=json/label',), 'tfrecord': ('data.label_column=image/class/text',)}
"""What the formats need so that their classes have the names of the folder."""


def photo(seed: int) -> bytes:
  """Returns the file of an image with edges and noise, every third a PNG; sizes differ."""
  rng = np.random.default_rng(seed)
  height, width = (int(side) for side in rng.integers(48, 96, 2))
  image = cv2.resize(rng.integers(0, 256, (5, 6, 3), np.uint8), (width, height), interpolation=cv2.INTER_NEAREST)
  image = np.clip(image + rng.normal(0, 12, image.shape), 0, 255).astype(np.uint8)
  return encode(image, '.png' if seed % 3 == 0 else '.jpg')


def examples(num: int, *, first: int = 0) -> list[Example]:
  return [Example(f'{i:06d}', photo(i), i * 5 % 7 % len(NAMES)) for i in range(first, first + num)]


def write(root: pathlib.Path) -> pathlib.Path:
  """Writes all sources below a folder, which is returned."""
  for split, found in (('train', examples(NUM_TRAIN)), ('test', examples(NUM_TEST, first=100))):
    for key, image, label in found:
      name = f'{NAMES[label]}/{key}.{packed.extension(image)}'
      for path in (root / 'folder' / split / name, root / 'labels' / name, root / 'captions' / split / name):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image)
    names = [f'{NAMES[e.label]}/{e.key}.{packed.extension(e.image)}' for e in found]
    cells = [[name, *sorted({NAMES[e.label], NAMES[int(e.key) % 3]})] for name, e in zip(names, found, strict=True)]
    (root / 'labels' / f'labels_{split}.csv').write_text(''.join(','.join(row) + '\n' for row in cells))
    (root / 'captions' / f'captions_{split}.jsonl').write_text(''.join(json.dumps({
        'image': f'{split}/{name}', 'captions': [f'a {NAMES[e.label]}', f'number {e.key}']}) + '\n'
        for name, e in zip(names, found, strict=True)))
    by_name = {one.key: one for one in found}
    in_order = [by_name[pathlib.Path(path).stem] for path in surface.described(f'folder:{root}/folder', split)]
    packed.write_tars(root / 'wds', split, in_order)
    packed.write_tfrecords(root / 'tfrecord', split, in_order)
    parquets.write(root / 'parquet', split, in_order)
  assert main.run(['--job=prepare', f'--data=folder:{root}/folder', f'--to={root}/array_record', '--shards=3']) == 0
  return root


def damage(root: pathlib.Path) -> None:
  """Makes two images of the folder unreadable: one becomes a text, the other one ends early."""
  found = sorted((root / 'folder' / 'train').glob('*/*.jpg'))
  found[3].write_text('no image')
  found[11].write_bytes(found[11].read_bytes()[:-400])
