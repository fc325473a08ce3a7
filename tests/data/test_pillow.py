"""Images by Pillow: the formats that OpenCV is not asked for, and images that are Pillow's, as of their files."""
from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from tests.data.images import random_image
from vit_jax.data.image import decode, headers
from vit_jax.data.image.headers import AS_STORED, BadImage, DecodeOptions

DEEP = np.linspace(0, 65_535, 12 * 15).astype(np.uint16).reshape(12, 15)


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
  out = io.BytesIO()
  image.save(out, kind, **options)
  return out.getvalue()


@pytest.mark.parametrize('kind', ['GIF', 'TIFF', 'AVIF', 'JPEG2000', 'PPM'])
def test_rare_formats_decode_to_rgb(kind: str) -> None:
  image = random_image(0, height=24, width=30)
  got = decode.decode(saved(Image.fromarray(image), kind))
  assert got.dtype == np.uint8 and got.shape == image.shape
  assert np.abs(got.astype(int) - image).mean() < 8  # GIF has 256 colors, AVIF and JPEG 2000 lose some


@pytest.mark.parametrize('mode', ['RGB', 'L', '1', 'P', 'LA', 'RGBA', 'I;16', 'CMYK'])
@pytest.mark.parametrize('kind', ['JPEG', 'PNG', 'TIFF', 'WEBP', 'GIF', 'BMP'])
def test_an_image_of_pillows_has_the_pixels_of_its_file(kind: str, mode: str) -> None:
  plain = Image.fromarray(DEEP) if mode == 'I;16' else Image.fromarray(random_image(1)).convert(
      'L' if mode == 'LA' else mode)
  if mode == 'LA':
    plain.putalpha(Image.fromarray(random_image(2)[..., 0]))
  try:
    encoded = saved(plain, kind)
  except (OSError, KeyError, ValueError):
    pytest.skip('there are no such files')
  got = decode.from_pillow(Image.open(io.BytesIO(encoded)), AS_STORED)
  # The discrete cosine transform of two builds of libjpeg may round apart, by a level; all else is exact.
  assert np.abs(got.astype(int) - decode.decode(encoded)).max() <= (kind == 'JPEG')


def test_sixteen_bits_become_the_upper_eight_everywhere() -> None:
  want = np.repeat((DEEP >> 8).astype(np.uint8)[..., None], 3, 2)
  image = Image.fromarray(DEEP)
  np.testing.assert_array_equal(decode.from_pillow(image, AS_STORED), want)
  for kind in ('PNG', 'TIFF', 'JPEG2000', 'PPM'):
    np.testing.assert_array_equal(decode.decode(saved(image, kind)), want, err_msg=kind)


@pytest.mark.parametrize('mode', ['I', 'F'])
def test_pixels_of_32_bits_have_no_known_range(mode: str) -> None:
  image = Image.fromarray(DEEP.astype(np.int32 if mode == 'I' else np.float32))
  for read in (lambda: decode.from_pillow(image, AS_STORED), lambda: decode.decode(saved(image, 'TIFF'))):
    with pytest.raises(BadImage, match=f'expected 8 or 16 bits, got 32 bits .mode {mode}., whose range is not known'):
      read()


@pytest.mark.parametrize('orientation', range(1, 9))
@pytest.mark.parametrize('kind', ['JPEG', 'PNG', 'TIFF'])
def test_an_image_of_pillows_is_turned_as_its_file_is(kind: str, orientation: int) -> None:
  exif = Image.Exif()
  exif[headers.ORIENTATION] = orientation
  encoded = saved(Image.fromarray(random_image(0)), kind, exif=exif)
  for how in (DecodeOptions(), DecodeOptions(upright=True)):
    want = decode.decode(encoded, how).astype(int)
    assert np.abs(decode.from_pillow(Image.open(io.BytesIO(encoded)), how) - want).max() <= (kind == 'JPEG')


@pytest.mark.parametrize('kind', ['GIF', 'TIFF', 'AVIF', 'JPEG2000', 'PPM'])
@pytest.mark.parametrize('part', [0, .1, .5])
def test_a_file_cut_short_is_bad(kind: str, part: float) -> None:
  encoded = saved(Image.fromarray(random_image(0, height=64, width=80)), kind)
  with pytest.raises(BadImage):
    decode.decode(encoded[:max(12, int(part * len(encoded)))])


def test_an_error_of_the_system_is_not_taken_for_damage(monkeypatch: pytest.MonkeyPatch) -> None:
  encoded = saved(Image.fromarray(random_image(0)), 'GIF')
  monkeypatch.setattr(decode, '_to_rgb', lambda image: open('/nowhere/at/all'))
  with pytest.raises(FileNotFoundError):
    decode.decode(encoded)
