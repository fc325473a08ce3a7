"""RandAugment's table `augreg` gives the pixels of the authors' program."""
from __future__ import annotations

import json

import numpy as np
import pytest

from tests.data import make_tensorflow_pixels as made
from vit_jax.config.schema import Interpolation, OpTable, RandAugment
from vit_jax.data.image import randaugment as ra

CHECKSUMS = json.loads(made.FILE.read_text())
STYLE = ra.make_style(RandAugment(), interpolation=Interpolation.BILINEAR, mean=(.5, .5, .5))


class At:
  """A generator that draws the place of the fixture's cutouts."""

  def __init__(self) -> None:
    self._places = iter(made.CENTER)

  def integers(self, stop: int) -> int:
    place = next(self._places)
    assert place < stop
    return place


def run(image: np.ndarray, name: str, magnitude: float, sign: float) -> np.ndarray:
  value = ra.to_strength(name, magnitude, sign=sign, table=OpTable.AUGREG, size=image.shape[:2])
  return ra.apply(image, name, strength=value, table=OpTable.AUGREG, style=STYLE, rng=At())  # type: ignore[arg-type]


@pytest.mark.parametrize('name', ra.OPERATIONS[OpTable.AUGREG])
def test_every_pixel_is_that_of_the_program(name: str) -> None:
  images = made.images()
  cases = [case for case in made.cases() if case[1] == name]
  differ = [case for case in cases
            if made.checksum(run(images[case[0]], *case[1:])) != CHECKSUMS[' '.join(map(str, case))]]
  assert len(cases) >= 2 * len(made.MAGNITUDES) and not differ


def test_the_fixture_holds_every_operation_once() -> None:
  assert set(made.NAMES.values()) == set(ra.OPERATIONS[OpTable.AUGREG])
  assert len(CHECKSUMS) == len(made.cases()) == 2 * 6 * (16 + 5)


@pytest.mark.parametrize(('magnitude', 'first'), [(0, 0), (5, 128), (10, 0), (15, 128), (20, 0)])
def test_solarize_inverts_from_a_threshold_that_wraps_around(magnitude: float, first: int) -> None:
  ramp = np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(3, 2)
  np.testing.assert_array_equal(run(ramp, 'solarize', magnitude, 1), np.where(ramp < first, ramp, 255 - ramp))


@pytest.mark.parametrize(('bits', 'kept'), [(0, 128), (1, 128), (4, 240), (8, 255), (9, 128)])
def test_posterize_keeps_one_bit_at_least(bits: int, kept: int) -> None:
  ramp = np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(3, 2)
  np.testing.assert_array_equal(ra.tensorflow_posterize(ramp, bits), ramp & kept)


@pytest.mark.parametrize(('px', 'gray'), [(32, 4), (224, 196), (256, 255), (384, 255)])
def test_contrast_blends_from_the_number_of_pixels(px: int, gray: int) -> None:
  image = np.full((px, px, 3), 100, np.uint8)
  np.testing.assert_array_equal(ra.tensorflow_contrast(image, 0.), np.full_like(image, gray))


def test_one_channel_of_a_single_level_stays_in_autocontrast() -> None:
  image = np.stack([np.full((4, 4), 9), np.arange(16).reshape(4, 4), np.full((4, 4), 0)], -1).astype(np.uint8)
  found = ra.tensorflow_autocontrast(image)
  assert (found[..., 0] == 9).all() and not found[..., 2].any() and found[..., 1].max() == 255
