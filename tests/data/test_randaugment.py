"""What the levels of the two tables mean, and what is drawn."""
from __future__ import annotations

import collections

import numpy as np
import pytest

from tests.data.images import random_image
from vit_jax.config.schema import Interpolation, OpTable, RandAugment
from vit_jax.data.image import randaugment as ra

A, T = OpTable.AUGREG, OpTable.TIMM
SIZE = (40, 60)


def value(name: str, level: float, *, table: OpTable, sign: float = 1.) -> float:
  return ra.to_strength(name, level, sign=sign, table=table, size=SIZE)


@pytest.mark.parametrize(('name', 'values'), [  # at M = 0, 10, 15, 20
    ('rotate', (0, 30, 45, 60)), ('shear_x', (0, .3, .45, .6)), ('shear_y', (0, .3, .45, .6)),
    ('translate_x', (0, 100, 150, 200)), ('translate_y', (0, 100, 150, 200)), ('posterize', (0, 4, 6, 8)),
    ('solarize', (0, 256, 384, 512)), ('solarize_add', (0, 110, 165, 220)), ('cutout', (0, 40, 60, 80)),
    ('color', (.1, 1.9, 2.8, 3.7)), ('contrast', (.1, 1.9, 2.8, 3.7)), ('brightness', (.1, 1.9, 2.8, 3.7)),
    ('sharpness', (.1, 1.9, 2.8, 3.7))])
def test_levels_of_augreg_are_the_published_ones(name: str, values: tuple[float, ...]) -> None:
  np.testing.assert_allclose([value(name, m, table=A) for m in (0, 10, 15, 20)], values)


@pytest.mark.parametrize(('name', 'sign', 'values'), [  # at M = 0, 5, 9, 10
    ('rotate', -1, (0, -15, -27, -30)), ('shear_x', 1, (0, .15, .27, .3)), ('translate_x', 1, (0, 13.5, 24.3, 27)),
    ('translate_y', -1, (0, -9, -16.2, -18)), ('posterize', 1, (4, 2, 1, 0)), ('solarize', 1, (256, 128, 26, 0)),
    ('solarize_add', 1, (0, 55, 99, 110)), ('color', 1, (1, 1.45, 1.81, 1.9)), ('sharpness', -1, (1, .55, .19, .1)),
    ('contrast', -1, (1, .55, .19, .1)), ('brightness', 1, (1, 1.45, 1.81, 1.9))])
def test_levels_of_timm_grow(name: str, sign: float, values: tuple[float, ...]) -> None:
  np.testing.assert_allclose([value(name, m, table=T, sign=sign) for m in (0, 5, 9, 10)], values, atol=1e-9)


def test_there_are_sixteen_operations_and_fifteen() -> None:
  assert len(set(ra.OPERATIONS[A])) == 16 and len(set(ra.OPERATIONS[T])) == 15
  assert set(ra.OPERATIONS[A]) - set(ra.OPERATIONS[T]) == {'cutout'}


def all_of(table: OpTable, level: float) -> dict[str, np.ndarray]:
  settings = RandAugment(1, level, table=table)
  style = ra.make_style(settings, interpolation=Interpolation.BILINEAR, mean=(.5, .5, .5))
  image, rng = random_image(0, height=40, width=60), np.random.default_rng(0)
  return {name: ra.apply(image, name, strength=value(name, level, table=table), table=table, style=style, rng=rng)
          for name in ra.OPERATIONS[table]}


def test_magnitude_nought_destroys_in_augreg_and_hardly_in_timm() -> None:
  image = random_image(0, height=40, width=60)
  found = all_of(A, 0)
  np.testing.assert_array_equal(found['posterize'], image & 128)
  np.testing.assert_array_equal(found['solarize'], 255 - image)
  np.testing.assert_allclose(found['brightness'], image * .1, atol=1)
  for name in ('rotate', 'shear_x', 'translate_y', 'cutout', 'solarize_add'):
    np.testing.assert_array_equal(found[name], image, err_msg=name)
  mild = all_of(T, 0)
  for name in set(mild) - {'autocontrast', 'equalize', 'invert', 'posterize'}:
    np.testing.assert_array_equal(mild[name], image, err_msg=name)


def test_operations_are_drawn_evenly_and_signs_both(monkeypatch: pytest.MonkeyPatch) -> None:
  seen: list[tuple[str, float]] = []
  monkeypatch.setattr(ra, 'apply', lambda image, name, strength, **_: (seen.append((name, strength)), image)[1])
  image, rng = random_image(0), np.random.default_rng(0)
  for settings, num in ((RandAugment(2, 10.), 4000), (RandAugment(2, 9., .5, .5, T), 2000)):
    seen.clear()
    style = ra.make_style(settings, interpolation=Interpolation.BICUBIC, mean=(.5, .5, .5))
    for _ in range(2000):
      ra.randaugment(image, settings, rng, style=style)
    assert abs(len(seen) - num) < 150
    counts = collections.Counter(name for name, _ in seen)
    names = ra.OPERATIONS[settings.table]
    expected = len(seen) / len(names)
    assert set(counts) == set(names) and max(abs(c - expected) for c in counts.values()) < 5 * expected ** .5
    angles = [v for n, v in seen if n == 'rotate']
    assert min(angles) < 0 < max(angles)
    assert .35 < np.mean([a > 0 for a in angles]) < .65


def test_the_noise_of_timm_is_normal_and_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
  levels: list[float] = []
  monkeypatch.setattr(ra, 'to_strength', lambda name, level, *a, **k: levels.append(level) or 0.)
  monkeypatch.setattr(ra, 'apply', lambda image, *a, **k: image)
  settings = RandAugment(1, 9., .5, 1., T)
  style = ra.make_style(settings, interpolation=Interpolation.BILINEAR, mean=(0., .5, 1.))
  rng = np.random.default_rng(0)
  for _ in range(3000):
    ra.randaugment(random_image(0), settings, rng, style=style)
  assert max(levels) == 10. and abs(np.mean(np.array(levels) == 10.) - .0228) < .01  # two deviations above
  assert abs(np.median(levels) - 9) < .03 and abs(np.std(levels) - .5) < .03


def test_augreg_has_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
  seen: list[float] = []
  monkeypatch.setattr(ra, 'apply', lambda image, name, strength, **_: (seen.append(strength) if name == 'cutout' else 0,
                                                                    image)[1])
  settings = RandAugment(2, 1., 2., table=A)
  style = ra.make_style(settings, interpolation=Interpolation.BILINEAR, mean=(0., .5, 1.))
  rng = np.random.default_rng(0)
  for _ in range(200):
    ra.randaugment(random_image(0), settings, rng, style=style)
  assert set(seen) == {4}


def test_styles_differ() -> None:
  assert ra.make_style(RandAugment(), interpolation=Interpolation.BICUBIC, mean=(0., .5, 1.)).fill == (128, 128, 128)
  timm = ra.make_style(RandAugment(table=T), interpolation=Interpolation.BICUBIC, mean=(.485, .456, .406))
  assert timm.fill == (124, 116, 104) and timm.interpolation is Interpolation.BICUBIC


def test_the_same_generator_gives_the_same_picture() -> None:
  settings = RandAugment(3, 12.)
  style = ra.make_style(settings, interpolation=Interpolation.BILINEAR, mean=(.5, .5, .5))
  image = random_image(0, height=40, width=60)
  one, two, three = (ra.randaugment(image, settings, np.random.default_rng(s), style=style) for s in (4, 4, 5))
  np.testing.assert_array_equal(one, two)
  assert (one != three).any() and one.shape == image.shape and one.dtype == np.uint8
