"""Geometry on the device, against the host and against NumPy."""
from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.data.images import random_image
from vit_jax.config import schema
from vit_jax.data.device import prepare
from vit_jax.data.image import geometry
from vit_jax.data.image.geometry import inverse_affine

sample_affine = jax.jit(prepare.sample_affine)
IMAGES = np.stack([random_image(i) for i in range(6)]).astype(np.float32)
BOXES = np.tile(np.array([.1, .2, .5, 1.], np.float32), (6, 1))


def matrix(degrees: float, zoom: float, shear: float) -> np.ndarray:
  angle = math.radians(degrees)
  return np.array(inverse_affine(math.cos(angle), math.sin(angle), zoom, shear, size=(12, 15)))


def test_affine_with_nothing_to_do_is_the_identity() -> None:
  np.testing.assert_allclose(matrix(0, 1, 0), [[1, 0, 0], [0, 1, 0]], atol=1e-12)
  same = sample_affine(jnp.array(IMAGES), jnp.tile(jnp.eye(2, 3), (6, 1, 1)))
  np.testing.assert_allclose(same, IMAGES, atol=1e-4)


def test_a_quarter_turn_is_the_one_of_numpy() -> None:
  square = IMAGES[:1, :, :12]
  angle = math.radians(90)
  turn = jnp.array(inverse_affine(math.cos(angle), math.sin(angle), 1., 0., size=(12, 12)))[None]
  np.testing.assert_allclose(sample_affine(jnp.array(square), turn)[0], np.rot90(square[0], -1), atol=2e-3)


def test_zoom_enlarges_about_the_center() -> None:
  image = np.zeros((1, 9, 9, 3), np.float32)
  image[:, 3:6, 3:6] = 1.
  large = sample_affine(jnp.array(image), jnp.array(inverse_affine(1., 0., 2., 0., size=(9, 9)))[None])
  assert float(large.sum()) == pytest.approx(4 * image.sum(), rel=.05)
  assert float(large[0, 4, 4, 0]) == 1.


@pytest.mark.parametrize('args', [(12, 1, 0), (0, 1.2, 0), (0, 1, .2), (-7, .9, -.1)])
def test_host_and_device_warp_alike(args: tuple[float, float, float]) -> None:
  device = sample_affine(jnp.array(IMAGES[:1]), jnp.array(matrix(*args), jnp.float32)[None])[0]
  host = geometry.warp_affine(IMAGES[0].astype(np.uint8), matrix(*args))
  # OpenCV rounds coordinates to 1/32 px and values to integers.
  assert np.abs(np.asarray(device) - host).mean() < 2.


def test_flip_mirrors_the_chosen_rows_and_their_boxes() -> None:
  chosen = jnp.array([True, False, True, False, False, True])
  out = jax.jit(prepare.flip)({'image': jnp.array(IMAGES), 'box': jnp.array(BOXES)}, chosen)
  for row in range(6):
    expected = IMAGES[row, :, ::-1] if chosen[row] else IMAGES[row]
    np.testing.assert_array_equal(out['image'][row], expected)
    np.testing.assert_array_equal(out['box'][row], BOXES[row][[0, 3, 2, 1]] if chosen[row] else BOXES[row])


def test_shifts_are_drawn_for_each_image_and_reach_both_limits(monkeypatch: pytest.MonkeyPatch) -> None:
  drawn: list[jax.Array] = []
  monkeypatch.setattr(prepare, 'shift', lambda batch, offsets, limit_px: drawn.append(offsets) or batch)
  recipe = schema.Recipe(crop=schema.Crop.RESIZE, flip=False, shift_px=1)
  prepare.augment_geometry({'image': np.zeros((64, 2, 2, 3))}, jax.random.key(0), recipe=recipe)
  places = {tuple(row) for row in np.asarray(drawn[0]).tolist()}
  assert places == {(down, right) for down in (-1, 0, 1) for right in (-1, 0, 1)}  # one is missed by 5 of 1,000 seeds


def test_shift_is_the_one_of_the_host_and_its_box_follows() -> None:
  offsets = np.array([[0, 0], [1, 2], [-3, 3], [3, -1], [-2, -2], [0, 3]])
  out = jax.jit(prepare.shift, static_argnames='limit_px')(
      {'image': jnp.array(IMAGES), 'box': jnp.array(BOXES)}, jnp.array(offsets), limit_px=3)
  for row, (down, right) in enumerate(offsets.tolist()):
    expected = geometry.shift(IMAGES[row], down_px=down, right_px=right)
    np.testing.assert_array_equal(out['image'][row], expected)
  # One pixel down is 1/12 of a height of 0.4; two to the right are 2/15 of a width of 0.8.
  expected = [.1 - .4 / 12, .2 - 1.6 / 15, .5 - .4 / 12, 1. - 1.6 / 15]
  np.testing.assert_allclose(out['box'][1], expected, atol=1e-6)


def test_draws_stay_in_the_ranges_of_the_recipe() -> None:
  recipe = schema.Recipe(rotate_degrees=10., scale=.1, shear=.2)
  drawn = np.asarray(jax.jit(lambda key: prepare.draw_affine(key, (500, 12, 15, 3), recipe=recipe))(jax.random.key(0)))
  zooms = 1 / np.sqrt(drawn[:, 0, 0] ** 2 + drawn[:, 1, 0] ** 2)
  angles = np.degrees(np.arctan2(-drawn[:, 1, 0], drawn[:, 0, 0]))
  assert .9 <= zooms.min() < .905 and 1.095 < zooms.max() <= 1.1001
  assert -10.001 <= angles.min() < -9.5 and 9.5 < angles.max() <= 10.001
