"""JPEGs decoded at a fraction of their size for large crops."""
from __future__ import annotations

import pickle

import cv2
import numpy as np
import pytest

from vit_jax.config import schema
from vit_jax.data.image import decode, headers, jpeg
from vit_jax.data.image import transform as transforms
from vit_jax.data.image.decode import Window
from vit_jax.data.source import Record


def smooth(size: tuple[int, int], ending: str = '.jpg') -> bytes:
  """An image of smooth noise, `size` (height, width)."""
  noise = np.random.default_rng(0).integers(0, 256, (6, 8, 3), np.uint8)
  return cv2.imencode(ending, cv2.resize(noise, size[::-1], interpolation=cv2.INTER_CUBIC))[1].tobytes()


@pytest.mark.parametrize(('window', 'scale'), [
    (Window(0, 0, 63, 64), 1), (Window(0, 0, 64, 64), 2), (Window(0, 0, 127, 500), 2), (Window(0, 0, 128, 128), 4),
    (Window(0, 0, 256, 256), 8), (Window(0, 0, 900, 900), 8)])
def test_the_target_never_has_more_pixels_than_what_is_decoded(window: Window, scale: int) -> None:
  assert jpeg.find_scale(window, (32, 32)) == scale


@pytest.mark.parametrize('orientation', [1, 6])
@pytest.mark.parametrize('scale', [2, 4, 8])
def test_a_reduced_crop_is_the_mean_of_the_pixels_of_the_full_one(scale: int, orientation: int) -> None:
  """Means of blocks of smooth noise; each of JPEG's two roundings, of coefficients and of pixels, is a level or two."""
  encoded, side = headers.write_orientation(smooth((256, 320)), orientation), 256 // scale
  image = jpeg.ReducedJpeg(encoded, headers.DecodeOptions(upright=True), (side // 2, side // 2))
  assert image.size == ((256, 320) if orientation == 1 else (320, 256))
  window = Window(0, 0, 128, 160) if orientation == 1 else Window(0, 128, 160, 128)
  full = window.cut(decode.orient(decode.decode(encoded), orientation))
  found = image.cut(window)
  assert found.shape == (window.height // scale, window.width // scale, 3)
  wanted = cv2.resize(full, found.shape[1::-1], interpolation=cv2.INTER_AREA)
  assert np.abs(found.astype(int) - wanted).max() <= 4


def test_small_crops_and_other_formats_have_the_pixels_of_full_decoding() -> None:
  window = Window(3, 5, 50, 40)
  for ending in ('.jpg', '.png'):
    encoded = smooth((203, 309), ending)
    found = jpeg.ReducedOpener((32, 32))(encoded).cut(window)
    np.testing.assert_array_equal(found, window.cut(decode.decode(encoded)))


def test_a_recipe_takes_the_same_crops_with_nearly_the_same_pixels() -> None:
  """The edges of a crop move by at most half a pixel of the reduced image, a quarter of one of the result."""
  record, recipe = Record(smooth((600, 800)), 1), schema.Recipe(crop_area=(.5, 1.))
  full, reduced = (pickle.loads(pickle.dumps(transforms.train_transform(recipe, (32, 32), decode=how)))
                   for how in (schema.Decode.FULL, schema.Decode.REDUCED))
  for seed in range(4):
    a, b = (one(record, np.random.default_rng(seed)) for one in (full, reduced))
    np.testing.assert_array_equal(a['box'], b['box'])
    assert a['image'].shape == b['image'].shape and (a['image'] != b['image']).any()
    assert np.abs(a['image'].astype(int) - b['image']).mean() < 8


def test_a_truncated_file_is_a_bad_image() -> None:
  with pytest.raises(headers.BadImage, match='truncated'):
    jpeg.ReducedOpener((8, 8))(smooth((64, 64))[:-400])
