"""Sources that need no files: `digits` (of scikit-learn), and `synthetic` images of any number and size.

`data/opening.py` calls `digits_opener` and `synthetic_opener`. `Arrays` is also the base class of `archives.Archived`,
and can be the base class of sources of your own.
"""
from __future__ import annotations

import functools
import hashlib
import importlib.util
import pathlib
from collections.abc import Callable

import numpy as np

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.data import splits
from vit_jax.data.source import Record, Rows, Source

DIGITS_FILE = 'datasets/data/digits.csv.gz'  # in scikit-learn 0.18 to 1.9
DIGITS_HELD_OUT, DIGITS_SEED = 0.2, 0  # 1,437 images for training, 360 for testing
SYNTHETIC_EXAMPLES, SYNTHETIC_CLASSES = 1_000, 10  # unless settings have other numbers
SYNTHETIC_IMAGES = 61  # distinct images; a prime number, so that each image is combined with every class


class Arrays(Rows):
  """Images in memory, each of one class."""

  encoded = False  # images are pixels, not the bytes of files

  def __init__(self, image: HostArray, label: HostArray, *, name: str, class_names: tuple[str, ...]) -> None:
    """Takes S images `image [S, H, W, 1 or 3] u8` and their classes `label [S] i32`."""
    self.name, self.class_names = name, class_names
    self._image, self._label = image, label
    self.digest = hashlib.sha256(image.tobytes() + label.tobytes()).hexdigest()

  def __len__(self) -> int:
    return len(self._label)

  def example(self, row: int) -> Record:
    return Record(self._image[row], self.labels(row))

  def labels(self, row: int) -> tuple[int, ...]:
    return (int(self._label[row]),)


def digits_opener(where: str, data: schema.Data, image_px: tuple[int, int]) -> Callable[[str], Source]:
  """Returns the function that opens a split of `digits`; no setting changes this source."""
  del where, data, image_px
  return open_digits


@functools.lru_cache
def open_digits(split: str) -> Source:
  """Opens a split of the UCI handwritten digits in scikit-learn: 8 x 8 px in 17 gray levels, scaled to 0..255.

  `train` and `test` have 1,437 and 360 of the 1,797 images, with equal class proportions, drawn with a fixed seed.
  """
  split = splits.resolve(split, ('train', 'test'), source='digits')
  levels, label = _read_digits()
  shuffled = np.random.Generator(np.random.Philox(key=DIGITS_SEED)).permutation(len(label))
  kept, held = splits.hold_out(label[shuffled], DIGITS_HELD_OUT)
  rows = shuffled[kept if split == 'train' else held]
  image = np.round(levels[rows].reshape(-1, 8, 8, 1) * (255 / 16)).astype(np.uint8)
  return Arrays(image, label[rows].astype(np.int32), name=f'digits/{split}',
                class_names=tuple(str(i) for i in range(10)))


@functools.lru_cache
def _read_digits() -> tuple[HostArray, HostArray]:
  """Returns levels `[S, 64]` from 0 to 16 and labels `[S]`. Raises UserError if scikit-learn is not installed."""
  package = importlib.util.find_spec('sklearn')  # the file is read without importing scikit-learn, which takes 1 s
  if package is None or package.origin is None:
    raise UserError('data.source: expected scikit-learn, whose digits these are, got no such package. Install '
                    'scikit-learn.')
  rows = np.loadtxt(pathlib.Path(package.origin).parent / DIGITS_FILE, delimiter=',')
  return rows[:, :-1], rows[:, -1].astype(int)


class Synthetic(Rows):
  """Images of color noise with classes that depend on the row alone: a replacement for data that are not available."""

  encoded = False  # images are pixels, not the bytes of files

  def __init__(self, *, split: str, num_examples: int, num_classes: int, image_px: tuple[int, int]) -> None:
    self.name = f'synthetic/{split}'
    self.class_names = tuple(f'class {i}' for i in range(num_classes))
    self._num_examples, self._image_px = num_examples, image_px
    self.digest = hashlib.sha256(f'{num_examples} {num_classes} {image_px}'.encode()).hexdigest()

  def __len__(self) -> int:
    return self._num_examples

  def example(self, row: int) -> Record:
    return Record(_make_images(self._image_px)[row % SYNTHETIC_IMAGES], self.labels(row))

  def labels(self, row: int) -> tuple[int, ...]:
    return (row % len(self.class_names),)


def synthetic_opener(where: str, data: schema.Data, image_px: tuple[int, int]) -> Callable[[str], Source]:
  """Returns the function that opens a split of `synthetic`, with images of `image_px` (height, width).

  `train` has `data.num_examples` images (0 = 1,000), and `test` has as many, but at most 1,000. `data.num_classes` is
  the number of classes (0 = 10). Raises UserError if one of the two settings is negative.
  """
  del where
  if data.num_examples < 0 or data.num_classes < 0:
    raise UserError(f'data.num_examples and data.num_classes: expected 0 or more, got {data.num_examples} and '
                    f'{data.num_classes}. Set other numbers.')

  def open_named(split: str) -> Source:
    split = splits.resolve(split, ('train', 'test'), source='synthetic')
    num_examples = data.num_examples or SYNTHETIC_EXAMPLES
    if split == 'test':
      num_examples = min(num_examples, SYNTHETIC_EXAMPLES)
    return Synthetic(split=split, num_examples=num_examples, num_classes=data.num_classes or SYNTHETIC_CLASSES,
                     image_px=(image_px[0], image_px[1]))
  return open_named


@functools.lru_cache(maxsize=2)
def _make_images(image_px: tuple[int, int]) -> HostArray:
  """Returns the distinct images of synthetic data, `[SYNTHETIC_IMAGES, H, W, 3] u8`."""
  rng = np.random.Generator(np.random.Philox(key=0))
  return rng.integers(0, 256, (SYNTHETIC_IMAGES, *image_px, 3), np.uint8)
