"""Small sets of images on disk."""
from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from tests.data.images import encode, random_image

CLASSES = ('ant', 'bee', 'cow', 'dog', 'elk', 'fox', 'gnu')  # seven
NUM_IMAGES = 37


@pytest.fixture(scope='session')
def write_split() -> Callable[..., None]:
  """Writes `num` pictures below a folder, going round the classes."""
  def write(folder: pathlib.Path, num: int = NUM_IMAGES, *, classes: tuple[str, ...] = CLASSES,
            extension: str = '.png') -> None:
    for i in range(num):
      path = folder / classes[i % len(classes)] / f'{i:03d}{extension}'
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_bytes(encode(random_image(i), extension))
  return write


@pytest.fixture(scope='session')
def image_folder(tmp_path_factory: pytest.TempPathFactory, write_split: Callable[..., None]) -> pathlib.Path:
  """37 training and 20 test pictures in seven classes."""
  root = tmp_path_factory.mktemp('images')
  write_split(root / 'train')
  write_split(root / 'test', 20)
  return root
