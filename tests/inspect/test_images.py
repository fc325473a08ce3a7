"""Images of any kind that the Python API takes give the same pixels, and are limited in size."""
from __future__ import annotations

import pathlib

import loaded
import numpy as np
import pytest
from PIL import Image

from vit_jax.data.image import headers
from vit_jax.data.image.headers import BadImage
from vit_jax.inspect import images as module


def test_a_file_its_bytes_and_what_pillow_makes_of_it_are_the_same_image(tmp_path: pathlib.Path) -> None:
  deep = np.linspace(0, 65_535, 12 * 15).astype(np.uint16).reshape(12, 15)
  exif = Image.Exif()
  exif[headers.ORIENTATION] = 6
  colors = Image.fromarray(loaded.pictures(1)[0])
  for image, kind in ((Image.fromarray(deep), 'png'), (colors, 'webp'), (colors.convert('P'), 'gif'),
                      (colors, 'tiff')):
    path = tmp_path / f'image.{kind}'
    image.save(path, **({'lossless': True} if kind == 'webp' else {}), **({} if kind == 'gif' else {'exif': exif}))
    want = module.decode(path)
    np.testing.assert_array_equal(module.decode(path.read_bytes()), want)
    np.testing.assert_array_equal(module.decode(Image.open(path)), want)
    np.testing.assert_array_equal(module.decode(want), want)
    assert want.shape == ((image.height, image.width, 3) if kind == 'gif' else (image.width, image.height, 3))
  np.testing.assert_array_equal(module.decode(tmp_path / 'image.png')[..., 0], np.rot90(deep >> 8, -1))


def test_too_large_an_image_is_refused_whatever_it_comes_as(tmp_path: pathlib.Path) -> None:
  assert module.UPRIGHT == (178_956_970, True)  # as Pillow
  path = tmp_path / 'large.png'
  Image.new('RGB', (30, 30)).save(path)
  for image in (path, path.read_bytes(), Image.open(path)):
    with pytest.raises(BadImage, match='30 x 30 px: expected at most 899 pixels, got 900'):
      module.decode(image, headers.DecodeOptions(max_pixels=899, upright=True))
