"""Colors and geometry of RandAugment against Pillow, an independent implementation."""
from __future__ import annotations

import colorsys

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from tests.data import make_golden_pillow_ops as golden
from tests.data.images import random_image
from vit_jax.config.schema import Interpolation, OpTable
from vit_jax.data.image import colors, geometry, randaugment

GOLDEN = np.load(golden.FILE)
PICTURES = [random_image(0, height=37, width=53), np.random.default_rng(1).integers(0, 256, (31, 40, 3), np.uint8),
            random_image(2, height=24, width=24) // 3 + 40, np.full((9, 8, 3), 77, np.uint8)]
FACTORS = (0., .1, .37, 1., 1.45, 1.9, 3.7)


def assert_near(ours: np.ndarray, theirs: Image.Image, *, levels: int = 0) -> None:
  difference = np.abs(ours.astype(int) - np.asarray(theirs).astype(int))
  assert ours.dtype == np.uint8 and difference.max() <= levels, difference.max()


@pytest.mark.parametrize('image', PICTURES, ids=range(len(PICTURES)))
def test_tables_of_gray_levels_are_pillows_exactly(image: np.ndarray) -> None:
  theirs = Image.fromarray(image)
  assert_near(colors.autocontrast(image), ImageOps.autocontrast(theirs))
  assert_near(colors.equalize(image), ImageOps.equalize(theirs))
  assert_near(colors.invert(image), ImageOps.invert(theirs))
  for bits in range(1, 9):
    assert_near(colors.posterize(image, bits), ImageOps.posterize(theirs, bits))
  for threshold in (0, 1, 26, 128, 255, 256, 384):
    assert_near(colors.solarize(image, threshold), ImageOps.solarize(theirs, threshold))
  for factor in FACTORS:
    assert_near(colors.brightness(image, factor), ImageEnhance.Brightness(theirs).enhance(factor))


@pytest.mark.parametrize('image', PICTURES, ids=range(len(PICTURES)))
def test_blends_are_pillows_but_for_the_rounding_of_gray(image: np.ndarray) -> None:
  theirs = Image.fromarray(image)
  assert_near(colors.grayscale(image), theirs.convert('L').convert('RGB'), levels=1)
  for factor in FACTORS:
    # The gray picture may differ by 1, which the blend multiplies by |1 - factor|; truncation may add one more.
    levels = 1 + int(np.ceil(abs(1 - factor)))
    assert_near(colors.saturation(image, factor), ImageEnhance.Color(theirs).enhance(factor), levels=levels)
    assert_near(colors.contrast(image, factor), ImageEnhance.Contrast(theirs).enhance(factor), levels=levels)
    assert_near(colors.sharpness(image, factor), ImageEnhance.Sharpness(theirs).enhance(factor), levels=levels)


def test_no_bits_are_black_and_additions_stop_at_the_middle() -> None:
  assert not colors.posterize(PICTURES[0], 0).any()
  ramp = np.repeat(np.arange(256, dtype=np.uint8), 3).reshape(1, 256, 3)
  expected = [min(255, v + 110) if v < 128 else v for v in range(256)]
  assert colors.solarize_add(ramp, 110)[0, :, 1].tolist() == expected
  assert colors.solarize_add(ramp, 220)[0, 127, 0] == 255


def test_hue_turns_the_color_circle() -> None:
  image = PICTURES[1]
  same = np.abs(colors.hue(image, 0.).astype(int) - image)
  assert same.max() <= 16 and same.mean() < 4  # hue and saturation have 8 bits, a step of the hue is 6 levels
  turned = colors.hue(image, .3)
  for row, column in ((0, 0), (5, 7), (20, 33)):
    h, s, v = colorsys.rgb_to_hsv(*(image[row, column] / 255.))
    expected = np.array(colorsys.hsv_to_rgb((h + .3) % 1, s, v)) * 255
    np.testing.assert_allclose(turned[row, column], expected, atol=20)
def test_hue_is_near_that_of_torchvision() -> None:
  for turns in golden.HUES:
    difference = np.abs(colors.hue(golden.drawn(), turns).astype(int) - GOLDEN[f'hue {turns}'])
    assert difference.mean() < .4 and difference.max() <= 8  # a step of the hue is 6 levels


def test_blur_has_the_pixels_of_pillow() -> None:
  for sigma in golden.SIGMAS:
    assert_same_pixels(colors.blur(golden.drawn(), sigma), GOLDEN[f'blur {sigma}'])
  for sigma in (.1, .37, .82, 1.29, 1.77):
    theirs = Image.fromarray(PICTURES[1]).filter(ImageFilter.GaussianBlur(sigma))
    assert_same_pixels(colors.blur(PICTURES[1], sigma), np.asarray(theirs))


def test_blur_is_a_gaussian() -> None:
  spot = np.zeros((21, 21, 3), np.uint8)
  spot[10, 10] = 255
  weights = np.exp(-np.arange(-10, 11) ** 2 / (2 * 1.5 ** 2))
  expected = 255 * np.outer(weights, weights) / weights.sum() ** 2
  np.testing.assert_allclose(colors.blur(spot, 1.5)[..., 0], expected, atol=2.5)  # three boxes


def test_cutout_covers_a_square_as_far_as_it_lies_inside() -> None:
  out = randaugment.cutout(PICTURES[0], (2, 50), half_px=6, fill=(128, 128, 128))
  expected = PICTURES[0].copy()
  expected[:8, 44:] = 128
  np.testing.assert_array_equal(out, expected)
  np.testing.assert_array_equal(randaugment.cutout(PICTURES[0], (5, 5), half_px=0, fill=(0, 0, 0)), PICTURES[0])


def pillow_warp(image: np.ndarray, name: str, value: float, how: int, fill: tuple[int, ...]) -> np.ndarray:
  """Pillow's transform; its shear moves by half a pixel more, as it takes corners for the origin."""
  coefficients = {'shear_x': (1, value, -value / 2, 0, 1, 0), 'shear_y': (1, 0, 0, value, 1, -value / 2),
                  'translate_x': (1, 0, value, 0, 1, 0), 'translate_y': (1, 0, 0, 0, 1, value)}
  theirs = Image.fromarray(image)
  if name == 'rotate':
    return np.asarray(theirs.rotate(-value, how, fillcolor=fill))
  return np.asarray(theirs.transform(theirs.size, Image.Transform.AFFINE, coefficients[name], how, fillcolor=fill))


# Not .3, for which whole rows lie halfway between pixels.
WARPS = [('shear_x', .29), ('shear_x', -.17), ('shear_y', .29), ('shear_y', -.17), ('translate_x', 7.),
         ('translate_x', -11.), ('translate_y', 5.), ('translate_y', -200.), ('rotate', 0.), ('rotate', 21.),
         ('rotate', -30.), ('rotate', 90.)]


@pytest.mark.parametrize(('name', 'value'), WARPS)
def test_nearest_geometry_is_pillows(name: str, value: float) -> None:
  image = PICTURES[1][:31, :31]
  style = randaugment.Style(Interpolation.BILINEAR, (128, 128, 128))
  ours = randaugment.apply(image, name, strength=value, table=OpTable.AUGREG, style=style, rng=np.random.default_rng(0))
  # A positive angle turns the other way in the table augreg.
  value = -value if name == 'rotate' else value
  theirs = pillow_warp(image, name, value, Image.Resampling.NEAREST, style.fill)
  # Positions are f32 numbers: pixels whose source lies halfway may fall to the other side.
  assert (ours != theirs).any(-1).mean() < .04


def timm_warp(image: np.ndarray, name: str, value: float, how: Image.Resampling) -> np.ndarray:
  """timm's operation."""
  theirs, coefficients = Image.fromarray(image), {
      'shear_x': (1, value, 0, 0, 1, 0), 'shear_y': (1, 0, 0, value, 1, 0), 'translate_x': (1, 0, value, 0, 1, 0),
      'translate_y': (1, 0, 0, 0, 1, value)}
  if name == 'rotate':
    return np.asarray(theirs.rotate(value, how, fillcolor=golden.FILL))
  return np.asarray(theirs.transform(theirs.size, Image.Transform.AFFINE, coefficients[name], how,
                                     fillcolor=golden.FILL))


def timm_operation(image: np.ndarray, name: str, value: float, how: Interpolation) -> np.ndarray:
  return randaugment.apply(image, name, strength=value, table=OpTable.TIMM, style=randaugment.Style(how, golden.FILL),
                           rng=np.random.default_rng(0))


def assert_same_pixels(ours: np.ndarray, theirs: np.ndarray) -> None:
  """Sums in f32 and in f64 are truncated to the same level unless they are within 2^-14 of it.

  Of bilinear values at strengths of two decimals, 1 in 200 is exactly an integer, on either side of which both may be.
  """
  difference = np.abs(ours.astype(int) - theirs)
  assert ours.dtype == np.uint8 and difference.max() <= 1 and (difference > 0).mean() < 5e-3


@pytest.mark.parametrize('how', [Interpolation.BILINEAR, Interpolation.BICUBIC])
@pytest.mark.parametrize(('name', 'value'), [
    *WARPS, ('shear_x', .0173), ('translate_x', 11.377), ('translate_y', -.7119)])
def test_geometry_of_timm_is_pillows_to_the_border(name: str, value: float, how: Interpolation) -> None:
  for image in (random_image(3, height=40, width=40), PICTURES[1]):
    theirs = timm_warp(image, name, value, Image.Resampling[how.name])
    assert_same_pixels(timm_operation(image, name, value, how), theirs)


def test_geometry_is_that_of_timm_itself() -> None:
  image, size = golden.drawn(), {'translate_x': 27, 'translate_y': 19}
  for name, how, value in golden.GEOMETRY:
    ours = timm_operation(image, name, value * size.get(name, 1), Interpolation(how))
    assert_same_pixels(ours, GOLDEN[f'{name} {how} {value}'])


@pytest.mark.parametrize(('kind', 'pillow'), [(Interpolation.BILINEAR, Image.Resampling.BILINEAR),
                                              (Interpolation.BICUBIC, Image.Resampling.BICUBIC)])
def test_resizing_with_antialias_is_pillows(kind: Interpolation, pillow: Image.Resampling) -> None:
  image = PICTURES[1]
  ours = geometry.resize(image, (10, 13), antialias=True, interpolation=kind)
  np.testing.assert_array_equal(ours, np.asarray(Image.fromarray(image).resize((13, 10), pillow)))
  plain = geometry.resize(image, (10, 13), antialias=False, interpolation=kind)
  assert (ours != plain).any()


def test_bicubic_is_sharper_and_area_is_the_mean() -> None:
  edge = np.zeros((8, 8, 3), np.uint8)
  edge[:, 4:] = 200
  def enlarged(kind: Interpolation) -> np.ndarray:
    return geometry.resize(edge, (16, 16), antialias=False, interpolation=kind)
  assert enlarged(Interpolation.BICUBIC).max() > 200 == enlarged(Interpolation.BILINEAR).max()
  np.testing.assert_array_equal(enlarged(Interpolation.AREA), edge.repeat(2, 0).repeat(2, 1))
  blocks = PICTURES[0][:36, :52].reshape(9, 4, 13, 4, 3).mean((1, 3))
  ours = geometry.resize(PICTURES[0][:36, :52], (9, 13), antialias=False, interpolation=Interpolation.AREA)
  np.testing.assert_allclose(ours, blocks, atol=.51)
