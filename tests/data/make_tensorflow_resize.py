"""Makes `tensorflow_resize.json`: checksums of what big_vision's and vision_transformer's resizing makes of images.

Run where TensorFlow and a checkout of google-research/big_vision are:
  PYTHONPATH=BIG_VISION python tests/data/make_tensorflow_resize.py
Made with big_vision 0127fb6, tensorflow-cpu 2.21.0, numpy 2.4; to be renewed when a case is added here.

The file maps `PROGRAM METHOD HEIGHTxWIDTH PX IMAGE` to the CRC-32 of the pixels:

  resize      big_vision's `resize(PX)`, bilinear or area: cast to uint8
  small       big_vision's `resize_small(256 / 224 PX)|central_crop(PX)`, area: cast to uint8
  float       `tf.image.resize(PX)` as vision_transformer calls it, which stays float32: rounded to uint8 here
"""
from __future__ import annotations

import json
import pathlib
import zlib

import numpy as np

FILE = pathlib.Path(__file__).with_name('tensorflow_resize.json')
SIZES = ((375, 500), (500, 375), (333, 500), (223, 301), (224, 301), (99, 64), (64, 99), (641, 263), (30, 900),
         (37, 41))
SIDES = (224, 61)
CASES = [(program, method, size, px, image) for program, methods in (
    ('resize', ('bilinear', 'area')), ('small', ('area',)), ('float', ('bilinear',)))
    for method in methods for size in SIZES for px in SIDES for image in ('smooth', 'noise')]


def name(case: tuple[str, str, tuple[int, int], int, str]) -> str:
  program, method, (height, width), px, image = case
  return f'{program} {method} {height}x{width} {px} {image}'


def drawn(size: tuple[int, int], image: str) -> np.ndarray:
  """An image `[*size, 3] u8` by integer arithmetic: slopes with plain areas and edges, or noise."""
  row, column, channel = np.ogrid[:size[0], :size[1], :3]
  if image == 'noise':
    return ((row * 7919 + column * 104_729 + channel * 1_299_709) ** 2 % 65_521 >> 8).clip(0, 255).astype(np.uint8)
  waves = np.abs(255 - (column * (3 + channel) + row * (5 - channel) + (column * row >> 5)) % 512)
  return np.where((column // 24 + row // 16) % 5 == 0, 201 + channel, waves).astype(np.uint8)


def checksum(image: np.ndarray) -> str:
  """The CRC-32 of the pixels."""
  assert image.dtype == np.uint8
  return f'{zlib.crc32(np.ascontiguousarray(image).tobytes()):08x}'


def main() -> None:
  import tensorflow as tf
  from big_vision.pp import ops_image

  def run(program: str, method: str, size: tuple[int, int], px: int, image: str) -> np.ndarray:
    stored = tf.constant(drawn(size, image))
    if program == 'float':
      return np.rint(tf.image.resize(stored, [px, px]).numpy()).astype(np.uint8)
    if program == 'resize':
      return ops_image.get_resize(px, method)({'image': stored})['image'].numpy()
    resized = ops_image.get_resize_small(px * 256 // 224)({'image': stored})
    return ops_image.get_central_crop(px)(resized)['image'].numpy()

  found = {name(case): checksum(run(*case)) for case in CASES}
  FILE.write_text(json.dumps(found, indent=0) + '\n')
  print(f'tensorflow {tf.__version__}, numpy {np.__version__}: {len(found)} checksums')


if __name__ == '__main__':
  main()
