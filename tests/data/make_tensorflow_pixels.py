"""Makes `tensorflow_pixels.json`: checksums of what big_vision's RandAugment makes of two images.

Run where TensorFlow, TensorFlow Addons and a checkout of google-research/big_vision are:
  PYTHONPATH=BIG_VISION python tests/data/make_tensorflow_pixels.py
Made with big_vision 0127fb6, tensorflow-cpu 2.15.1, tensorflow-addons 0.23.0, numpy 1.26 on Python 3.11, with and
without oneDNN, which give the same. (NumPy 2 and eager execution refuse the thresholds and shifts that do not fit
into a uint8; in a graph with NumPy 1 they wrap around, as when the published weights were trained.)

The file maps `IMAGE OPERATION MAGNITUDE SIGN` to the CRC-32 of the pixels. The sign, the place of cutouts and the
probability, which the program draws, are given.
"""
from __future__ import annotations

import json
import pathlib
import zlib

import numpy as np

FILE = pathlib.Path(__file__).with_name('tensorflow_pixels.json')
MAGNITUDES = (0, 5, 10, 15, 20, 27)
NAMES = {
    'AutoContrast': 'autocontrast', 'Equalize': 'equalize', 'Invert': 'invert', 'Rotate': 'rotate',
    'Posterize': 'posterize', 'Solarize': 'solarize', 'Color': 'color', 'Contrast': 'contrast',
    'Brightness': 'brightness', 'Sharpness': 'sharpness', 'ShearX': 'shear_x', 'ShearY': 'shear_y',
    'TranslateX': 'translate_x', 'TranslateY': 'translate_y', 'Cutout': 'cutout', 'SolarizeAdd': 'solarize_add'}
SIGNED = ('rotate', 'shear_x', 'shear_y', 'translate_x', 'translate_y')
CENTER = (30, 70)  # of cutouts: row, column


def images() -> dict[str, np.ndarray]:
  """Images `[H, W, 3] u8` by name, in integer arithmetic: noise beside slopes of few levels, and a gray ramp."""
  row, column, channel = np.ogrid[:224, :224, :3]
  noise = (row * 7919 + column * 104_729 + channel * 1_299_709) ** 2 % 65_521 >> 8
  slopes = 40 + (row * (3 - channel) + column * (1 + channel)) // 6
  ramp = np.broadcast_to(np.arange(64)[:, None, None] * 4, (64, 97, 3))
  return {'mixed': np.where(column < 100, noise, slopes).clip(0, 255).astype(np.uint8), 'ramp': ramp.astype(np.uint8)}


def cases() -> list[tuple[str, str, int, int]]:
  """Image, operation, magnitude, sign."""
  return [(image, name, magnitude, sign) for image in images() for name in NAMES.values() for magnitude in MAGNITUDES
          for sign in ((1, -1) if name in SIGNED else (1,))]


def checksum(image: np.ndarray) -> str:
  """The CRC-32 of the pixels."""
  return f'{zlib.crc32(np.ascontiguousarray(image).tobytes()):08x}'


def main() -> None:
  from unittest import mock

  import tensorflow as tf
  from big_vision.pp.archive import autoaugment
  published = {ours: theirs for theirs, ours in NAMES.items()}
  settings = autoaugment.HParams(cutout_const=40, translate_const=100)

  def run(image: np.ndarray, name: str, magnitude: int, sign: int) -> np.ndarray:
    def apply(pixels: tf.Tensor) -> tf.Tensor:
      given = {'_randomly_negate_tensor': lambda level: tf.constant(level, tf.float32) * sign}
      with mock.patch.multiple(autoaugment, **given):
        function, _, args = autoaugment._parse_policy_info(
            published[name], .5, float(magnitude), [128] * 3, settings)
      centers = [tf.constant(place, tf.int32) for place in CENTER]
      with mock.patch.object(autoaugment.tf, 'random_uniform', side_effect=centers):
        return function(pixels, *args)
    return next(iter(tf.data.Dataset.from_tensors(image).map(apply))).numpy()

  of = images()
  found = {' '.join(map(str, case)): checksum(run(of[case[0]], *case[1:])) for case in cases()}
  FILE.write_text(json.dumps(found, indent=0) + '\n')
  print(f'tensorflow {tf.__version__}, numpy {np.__version__}: {len(found)} checksums')


if __name__ == '__main__':
  main()
