"""Images with masks as windows: the same geometry for both, and errors that name the file."""
from __future__ import annotations

import dataclasses
import pathlib

import numpy as np
import pytest
from PIL import Image

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.data import opening
from vit_jax.data.image import masks
from vit_jax.data.image.masks import MaskedImages, MaskValues

CLASSES = 6


def source(root: pathlib.Path, *sizes: tuple[int, int]) -> MaskedImages:
  """Images whose red channel is 40 times the class of the mask; value 1 is class 0."""
  for number, (height, width) in enumerate(sizes):
    mask = np.kron(np.random.default_rng(number).integers(0, CLASSES + 1, (2, 3)), np.ones((9, 9), int))
    mask = masks.resize(mask, (height, width))
    image = np.stack([40 * np.maximum(mask - 1, 0), mask, mask], -1).astype(np.uint8)
    for kind, one in (('images', image), ('masks', mask.astype(np.uint8))):
      (root / kind / 'train').mkdir(parents=True, exist_ok=True)
      Image.fromarray(one).save(root / kind / 'train' / f'{number}.png')
  found = opening.open_split(schema.Data(source=f'masks:{root}'), 'train', image_px=(8, 8))
  recipe = schema.Recipe(antialias=False)
  return MaskedImages(found, recipe, (8, 12), 0, 0, (2, 3), MaskValues(1, 255, CLASSES))


def test_one_window_is_the_whole_image_and_its_mask(tmp_path: pathlib.Path) -> None:
  found = source(tmp_path, (16, 24))(0)
  assert found['windows'].shape == (1, 8, 12, 3) and found['mask'].shape == (16, 24)
  assert found['size'].tolist() == [8, 12] and found['tokens'].shape == (1, 2, 3)
  stored = np.asarray(Image.open(tmp_path / 'masks/train/0.png')).astype(int) - 1
  np.testing.assert_array_equal(found['mask'], stored)
  np.testing.assert_array_equal(found['tokens'][0], masks.majority(masks.resize(found['mask'], (8, 12)), (2, 3)))


def test_windows_of_image_and_mask_cover_the_same_pixels(tmp_path: pathlib.Path) -> None:
  images = dataclasses.replace(source(tmp_path, (18, 27)), resize_px=18, stride_px=5)
  found = images(0)  # not resized, so that the windows have stored pixels
  assert found['size'].tolist() == [18, 27]
  image, mask = images.read(0)
  places = [(top, left) for top in (0, 5, 10) for left in (0, 5, 10, 15)]
  assert len(found['windows']) == len(places)
  for window, tokens, (top, left) in zip(found['windows'], found['tokens'], places, strict=True):
    np.testing.assert_array_equal(window, image[top:top + 8, left:left + 12])
    np.testing.assert_array_equal(tokens, masks.majority(mask[top:top + 8, left:left + 12], (2, 3)))


@pytest.mark.parametrize(('size', 'resized'), [((16, 64), (16, 64)), ((64, 16), (64, 16)), ((8, 8), (16, 16)),
                                               ((100, 50), (32, 16))])
def test_the_short_side_is_resized_and_covers_a_window(tmp_path: pathlib.Path, size: tuple[int, int],
                                                       resized: tuple[int, int]) -> None:
  images = dataclasses.replace(source(tmp_path, size), resize_px=16)
  found = images(0)
  assert tuple(found['size']) == resized and found['mask'].shape == size
  tall = dataclasses.replace(images, window_px=(24, 12))(0)
  assert (tall['size'] >= [24, 12]).all()  # enlarged where the window is larger than the image


def test_a_split_with_two_folders_is_refused(tmp_path: pathlib.Path) -> None:
  for split in ('train', 'Training', 'test'):
    (tmp_path / 'images' / split).mkdir(parents=True)
  with pytest.raises(UserError, match='images: expected one folder for each split, got Training, train. Rename'):
    opening.open_split(schema.Data(source=f'masks:{tmp_path}'), 'train', image_px=(8, 8))


def test_what_is_beside_the_splits_is_named_and_a_share_of_zero_is_refused(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
  def opened(**settings: float) -> int:
    return len(opening.open_split(schema.Data(source=f'masks:{tmp_path}', **settings), 'train', image_px=(8, 8)))
  for kind in ('images', 'masks'):
    (tmp_path / kind).mkdir()
    for number in range(3):
      Image.new('L', (4, 4)).save(tmp_path / kind / f'{number}.png')
  assert opened() == 2 and not caplog.text
  with pytest.raises(UserError, match='data.holdout: expected a fraction between 0 and 1, such as 0.1, got 0.0. Set'):
    opened(holdout=0.)
  for kind in ('images', 'masks'):
    (tmp_path / kind / 'train').mkdir()
    (tmp_path / kind / '0.png').rename(tmp_path / kind / 'train' / '0.png')
  assert opened() == 1
  assert f'{tmp_path}/images: images are those of the folders train; not read: 1.png, 2.png.' in caplog.text


def test_mistakes_in_files_are_errors_that_name_them(tmp_path: pathlib.Path) -> None:
  images = source(tmp_path, (16, 24))
  path = tmp_path / 'masks/train/0.png'
  with pytest.raises(UserError, match=r'masks/train/0\.png: expected class indices from 1 to 2, or 255 for pixels to '
                                      r'ignore, got 3.*Replace it, or set ignore, first_class and num_classes'):
    dataclasses.replace(images, values=MaskValues(1, 255, 2))(0)
  Image.new('L', (23, 16)).save(path)
  with pytest.raises(UserError, match=r'masks/train/0\.png: expected 16 x 24 px, the size of .*images/train/0\.png, '
                                      r'got 16 x 23 px\. Replace the mask'):
    images(0)
  path.write_bytes(b'?')
  with pytest.raises(UserError, match=r'masks/train/0\.png: expected a mask, got a file that cannot be decoded'):
    images(0)
  (tmp_path / 'images/train/0.png').write_bytes(b'?')
  with pytest.raises(UserError, match=r'images/train/0\.png: expected an image, got a file that cannot be decoded'):
    images(0)
  path.unlink()
  with pytest.raises(UserError, match='expected to read it, got "No such file or directory"'):
    images(0)
