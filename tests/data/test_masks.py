"""Masks: what files are read, nearest-neighbor geometry, and the classes of tokens."""
from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from vit_jax.data.image import masks

VALUES = np.random.default_rng(0).integers(0, 7, (5, 8)).astype(np.uint8)


def encoded(image: Image.Image, kind: str = 'png') -> bytes:
  file = io.BytesIO()
  image.save(file, kind)
  return file.getvalue()


def test_gray_levels_and_palette_indices_are_the_values() -> None:
  colors = Image.fromarray(VALUES, 'L').convert('P')
  colors.putdata(VALUES.ravel().tolist())
  colors.putpalette([200, 10, 10, 0, 90, 0, 3, 3, 3, 1, 2, 3, 9, 9, 9, 5, 5, 5, 7, 7, 7])
  deep = Image.fromarray(VALUES.astype(np.uint16) + 300)
  for image, more in ((Image.fromarray(VALUES), 0), (colors, 0), (deep, 300)):
    found = masks.decode(encoded(image))
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, VALUES.astype(int) + more)
  np.testing.assert_array_equal(masks.decode(encoded(Image.fromarray(VALUES > 3))), VALUES > 3)


@pytest.mark.parametrize(('file', 'said'), [
    (encoded(Image.fromarray(VALUES), 'jpeg'), r'expected a mask stored without loss \(PNG, .*\), got JPEG'),
    (encoded(Image.fromarray(np.stack([VALUES] * 3, -1))), 'one channel of class indices, .* got the mode RGB'),
    (b'<html>', 'expected a mask, got a file that cannot be decoded'),
    (encoded(Image.fromarray(VALUES))[:50], 'expected a mask, got a file that cannot be decoded')])
def test_other_files_are_refused(file: bytes, said: str) -> None:
  with pytest.raises(masks.BadMask, match=said):
    masks.decode(file)


def test_values_become_classes_or_are_ignored() -> None:
  values = np.array([[0, 1, 3, 255]])
  assert masks.classes(values, masks.MaskValues(1, 255, 3)).tolist() == [[-1, 0, 2, -1]]
  assert masks.classes(values, masks.MaskValues(0, 255, 4)).tolist() == [[0, 1, 3, -1]]
  assert masks.classes(values, masks.MaskValues(0, 3, 256)).tolist() == [[0, 1, -1, 255]]
  with pytest.raises(masks.BadMask, match='expected class indices from 1 to 2, or 255 for pixels to ignore, got 3'):
    masks.classes(values, masks.MaskValues(1, 255, 2))


def test_resizing_takes_the_pixel_under_each_center() -> None:
  for size in ((5, 8), (10, 24), (2, 3), (7, 5), (1, 1)):
    want = [[VALUES[int((i + .5) * 5 / size[0]), int((j + .5) * 8 / size[1])] for j in range(size[1])]
            for i in range(size[0])]
    np.testing.assert_array_equal(masks.resize(VALUES, size), want)


def test_a_token_has_the_most_frequent_class_of_its_counted_pixels() -> None:
  mask = np.array([[0, 0, 5, 4], [0, -1, 4, 5], [-1, -1, 2, -1], [-1, -1, -1, -1]], np.int32)
  assert masks.majority(mask, (2, 2)).tolist() == [[0, 4], [-1, 2]]  # of equal counts the lower class
  assert masks.majority(np.full((4, 4), -1, np.int32), (1, 2)).tolist() == [[-1, -1]]
  np.testing.assert_array_equal(masks.majority(mask, (4, 4)), mask)
