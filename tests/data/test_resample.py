"""Resizing without antialias beside big_vision and vision_transformer, pixel by pixel."""
from __future__ import annotations

import json
import threading

import numpy as np
import pytest

from tests.data import make_tensorflow_resize as made
from tests.data.images import random_image
from vit_jax.config.schema import Crop, Interpolation, Recipe
from vit_jax.data.image import geometry, resample
from vit_jax.data.image.decode import Window

CHECKSUMS = json.loads(made.FILE.read_text())


def run(program: str, method: str, size: tuple[int, int], px: int, image: str) -> np.ndarray:
  if program == 'float':
    return resample.resize(made.drawn(size, image), (px, px), Window(0, 0, px, px), area=False, truncate=False)
  recipe = Recipe(crop=Crop.RESIZE, interpolation=Interpolation(method), truncate=True,
                  eval_resize_px=px * 256 // 224 if program == 'small' else 0)
  return geometry.fit(made.drawn(size, image), recipe=recipe, image_px=(px, px))[0]


@pytest.mark.parametrize('program', ['resize', 'small', 'float'])
def test_every_pixel_is_that_of_the_program(program: str) -> None:
  cases = [case for case in made.CASES if case[0] == program]
  differ = [case for case in cases if made.checksum(run(*case)) != CHECKSUMS[made.name(case)]]
  assert len(cases) >= 40 and not differ
  assert len(CHECKSUMS) == len(made.CASES)


@pytest.mark.parametrize('truncate', [True, False])
def test_training_and_rounded_evaluation_have_these_pixels_but_for_a_level(truncate: bool) -> None:
  window = Window(0, 0, 224, 224)
  for size in made.SIZES:
    image = made.drawn(size, 'noise')
    exact = resample.resize(image, (224, 224), window, area=False, truncate=truncate).astype(int)
    crop = geometry.resize(image, (224, 224), antialias=False, truncate=truncate) - exact
    seen = geometry.fit(image, recipe=Recipe(truncate=truncate), image_px=(224, 224))[0] - exact
    # Positions differ by up to 2^-14 px at 640 px, and values by up to 255 times as much: 0.016. Crops that are rounded
    # have weights of 11 bits, along both sides: 2 * 255 / 2^11 = 0.25 at most.
    assert abs(crop).max() <= 1 and (crop != 0).mean() < (2e-3 if truncate else 0.2)
    assert abs(seen).max() <= 1 and (seen != 0).mean() < (1e-9 if truncate else 2e-3)


def test_plain_areas_keep_their_level_in_bilinear_images() -> None:
  for level in (0, 1, 77, 200, 255):
    image = np.full((61, 83, 3), level, np.uint8)
    assert (resample.resize(image, (224, 40), Window(0, 0, 224, 40), area=False, truncate=True) == level).all(), level


@pytest.mark.parametrize('area', [True, False])
def test_a_window_shows_the_pixels_of_the_complete_image(area: bool) -> None:
  image = random_image(0, height=70, width=45)
  whole = resample.resize(image, (48, 120), Window(0, 0, 48, 120), area=area, truncate=True)
  window = Window(7, 33, 30, 51)
  np.testing.assert_array_equal(resample.resize(image, (48, 120), window, area=area, truncate=True), window.cut(whole))


def test_area_takes_the_mean_along_one_side_while_it_enlarges_the_other() -> None:
  image = random_image(1, height=30, width=9)
  out = resample.resize(image, (10, 18), Window(0, 0, 10, 18), area=True, truncate=False)
  means = image.reshape(10, 3, 9, 3).astype(np.float64).mean(1).repeat(2, axis=1)
  np.testing.assert_array_equal(out, np.rint(means.astype(np.float32)))


def test_threads_do_not_share_their_memory() -> None:
  images = [random_image(number, height=50 + 7 * number, width=80) for number in range(4)]

  def once(image: np.ndarray) -> np.ndarray:
    return resample.resize(image, (33, 60), Window(0, 0, 33, 60), area=False, truncate=True)

  expected, differ = [once(image) for image in images], []
  def work(number: int) -> None:
    differ.extend(number for _ in range(50) if (once(images[number]) != expected[number]).any())

  threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert not differ
