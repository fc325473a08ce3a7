"""Decoding, crops and geometry on the host."""
from __future__ import annotations

import io
import struct
import threading

import cv2
import numpy as np
import pytest

from tests.data.images import encode, random_image
from vit_jax.config.schema import Interpolation, Recipe
from vit_jax.data.image import crops, decode, geometry, headers

Image = pytest.importorskip('PIL.Image')


def saved(image: np.ndarray, kind: str, mode: str | None = None, **options: object) -> bytes:
  out = io.BytesIO()
  pil = Image.fromarray(image)
  (pil.convert(mode) if mode else pil).save(out, kind, **options)
  return out.getvalue()


@pytest.mark.parametrize('extension', ['.png', '.bmp', '.jpg', '.webp'])
def test_every_format_decodes_to_rgb(extension: str) -> None:
  image = random_image(0)
  decoded = decode.decode(encode(image, extension))
  assert decoded.dtype == np.uint8 and decoded.shape == image.shape
  assert np.abs(decoded.astype(int) - image).mean() < 8


def test_cmyk_gray_rgba_palette_progressive_and_16_bit_become_rgb() -> None:
  image = random_image(1)
  gray = image[..., 0]
  files = {
      'cmyk': (saved(image, 'JPEG', 'CMYK', quality=95), image, 8),
      'progressive': (saved(image, 'JPEG', progressive=True, quality=95), image, 8),
      'gray': (saved(gray, 'PNG'), np.repeat(gray[..., None], 3, 2), 0),
      'rgba': (saved(np.dstack([image, np.full_like(gray, 9)]), 'PNG'), image, 0),
      'palette': (saved(image, 'PNG', 'P'), image, 40),
      '16 bit': (cv2.imencode('.png', (image[..., ::-1].astype(np.uint16) * 257))[1].tobytes(), image, 0),
  }
  for name, (encoded, expected, tolerance) in files.items():
    decoded = decode.decode(encoded)
    assert decoded.shape == image.shape, name
    assert np.abs(decoded.astype(int) - expected).mean() <= tolerance, name


def test_the_orientation_in_exif_is_ignored() -> None:
  exif = Image.Exif()
  exif[274] = 6  # rotated by 90 degrees
  assert decode.decode(saved(random_image(0), 'JPEG', exif=exif)).shape == (12, 15, 3)


@pytest.mark.parametrize('kind', ['JPEG', 'PNG', 'BMP', 'WEBP'])
@pytest.mark.parametrize('part', [.3, .6, .95])
def test_a_file_cut_short_is_bad(kind: str, part: float) -> None:
  encoded = saved(random_image(0, height=120, width=150), kind)
  with pytest.raises(headers.BadImage):
    decode.decode(encoded[:int(len(encoded) * part)])


def test_a_cut_jpeg_is_found_by_its_missing_end_even_if_the_decoder_is_silent(
    monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(cv2, 'imdecode', lambda *_: random_image(0))
  encoded = saved(random_image(0), 'JPEG')
  thumbnail = encoded[:2] + b'\xff\xe1\x00\x08\xff\xda\xff\xd9..' + encoded[2:-2]
  for cut in (encoded[:-2], encoded[:len(encoded) // 2], thumbnail):
    with pytest.raises(headers.BadImage, match='the JPEG is truncated: no end marker in [0-9,]+ bytes'):
      decode.decode(cut)
  decode.decode(encoded + b'bytes after the end')


@pytest.mark.parametrize(('kind', 'options'), [
    ('JPEG', {}), ('JPEG', {'progressive': True}), ('JPEG', {'restart_marker_blocks': 1}), ('MPO', {'save_all': True}),
    ('PNG', {}), ('WEBP', {}), ('BMP', {}), ('GIF', {}), ('TIFF', {'compression': 'tiff_lzw'}), ('AVIF', {})])
def test_a_video_behind_an_image_is_not_read(kind: str, options: dict[str, object]) -> None:
  encoded = saved(random_image(0, height=40, width=60), kind, **options)
  plain = decode.decode(encoded)
  video = np.random.default_rng(0).bytes(300_000)
  for start in range(0, 30_000, 3_000):  # each has other markers, and another last one
    np.testing.assert_array_equal(decode.decode(encoded + b'\0\0\0\x18ftypmp42' + video[start:-1 - start]), plain)


def test_a_cut_progressive_jpeg_is_bad_although_its_tables_have_the_bytes_of_an_end() -> None:
  encoded = saved(random_image(0, height=40, width=60), 'JPEG', progressive=True)
  place = encoded.rindex(b'\xff\xda')
  table = b'\xff\xc4\x00\x05\xff\xd9\x00'  # skipped by its length
  with pytest.raises(headers.BadImage, match='the JPEG is truncated'):
    headers.check_jpeg_end(encoded[:place] + table + encoded[place:-2])
  headers.check_jpeg_end(encoded[:place] + table + encoded[place:] + b'...')


def test_text_and_nothing_are_bad_and_say_so() -> None:
  with pytest.raises(headers.BadImage, match="not an image, or truncated .5 bytes, starting with b'hell'"):
    decode.decode(b'hello')
  with pytest.raises(headers.BadImage, match='the file is empty'):
    decode.decode(b'')


def test_crops_lie_inside_with_area_and_aspect_in_range() -> None:
  rng = np.random.default_rng(0)
  areas, aspects = [], []
  for _ in range(2000):
    crop = crops.inception_crop((300, 400), rng=rng, area=(.05, .5), aspect=(.75, 4 / 3))
    assert crop.top >= 0 and crop.left >= 0
    assert crop.top + crop.height <= 300 and crop.left + crop.width <= 400
    areas.append(crop.height * crop.width / 120_000)
    aspects.append(np.log(crop.width / crop.height))
  assert min(areas) > .045 and max(areas) < .51
  assert abs(np.mean(areas) - .275) < .01  # uniform
  assert abs(np.mean(aspects)) < .01 and abs(max(aspects) - np.log(4 / 3)) < .02  # log-uniform


def test_a_picture_too_narrow_for_any_crop_gives_its_middle() -> None:
  rng = np.random.default_rng(0)
  crop = crops.inception_crop((10, 1000), rng=rng, area=(.9, 1.), aspect=(.75, 4 / 3))
  assert crop == decode.Window(0, 493, 10, 13)


def test_resizing_to_the_same_size_changes_nothing() -> None:
  image = random_image(0)
  np.testing.assert_array_equal(geometry.resize(image, (12, 15), antialias=True), image)


def test_area_averages_and_bilinear_samples() -> None:
  stripes = np.zeros((8, 8, 3), np.uint8)
  stripes[:, ::4] = 200
  area = geometry.resize(stripes, (2, 2), antialias=False, interpolation=Interpolation.AREA)
  np.testing.assert_array_equal(area, np.full((2, 2, 3), 50))
  np.testing.assert_array_equal(geometry.resize(stripes, (2, 2), antialias=False), np.zeros((2, 2, 3)))


def test_the_middle_after_resizing_the_short_side_is_where_its_box_says() -> None:
  image = random_image(0, height=64, width=128)
  crop, box = geometry.fit(image, recipe=Recipe(eval_resize_px=32, antialias=True), image_px=(16, 16))
  assert crop.shape == (16, 16, 3)
  np.testing.assert_allclose(box, [.25, .375, .75, .625])
  np.testing.assert_allclose(crop.mean((0, 1)), image[16:48, 48:80].mean((0, 1)), atol=1)


@pytest.mark.parametrize('antialias', [False, True])
@pytest.mark.parametrize('how', list(Interpolation))
def test_the_part_of_a_long_thin_image_is_what_enlarging_it_whole_shows(
    how: Interpolation, antialias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
  for shape in ((3, 500, 3), (500, 3, 3), (1, 301, 3)):
    image = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    recipe = Recipe(eval_resize_px=24, antialias=antialias, interpolation=how)
    part, box = geometry.fit(image, recipe=recipe, image_px=(16, 20))
    with monkeypatch.context() as patch:
      patch.setattr(geometry, 'MAX_ENLARGEMENT', 10**9)
      whole, same = geometry.fit(image, recipe=recipe, image_px=(16, 20))
    # Both round to whole levels, from weights of 8 bits or more: they may round apart, by one level.
    assert np.abs(part.astype(int) - whole).max() <= 1
    np.testing.assert_array_equal(box, same)


def test_a_thin_line_is_not_enlarged_beyond_its_crop(monkeypatch: pytest.MonkeyPatch) -> None:
  made = []
  monkeypatch.setattr(geometry, 'resize', lambda image, size, **_: made.append(size))
  recipe = Recipe(eval_resize_px=256, antialias=True)
  for shape in ((2, 30_000, 3), (30_000, 2, 3)):
    crop, _ = geometry.fit(np.full(shape, 7, np.uint8), recipe=recipe, image_px=(224, 224))
    assert crop.shape == (224, 224, 3) and (crop == 7).all()
  assert not made


@pytest.mark.parametrize('shape', [(375, 500, 3), (28, 28, 3), (60, 1000, 3), (3000, 900, 3)])
def test_ordinary_images_are_resized_whole_and_then_cut(shape: tuple[int, int, int]) -> None:
  image = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
  recipe = Recipe(eval_resize_px=64, antialias=True)
  crop, _ = geometry.fit(image, recipe=recipe, image_px=(56, 56))
  factor = 64 / min(shape[:2])
  size = (round(shape[0] * factor), round(shape[1] * factor))
  whole = geometry.resize(image, size, antialias=True)
  np.testing.assert_array_equal(crop, crops.center(size, (56, 56)).cut(whole))


def test_shift_moves_and_fills_with_zeros() -> None:
  image = random_image(0)
  moved = geometry.shift(image, down_px=2, right_px=-3)
  np.testing.assert_array_equal(moved[2:, :-3], image[:-2, 3:])
  assert not moved[:2].any() and not moved[:, -3:].any()
  np.testing.assert_array_equal(geometry.shift(image, down_px=0, right_px=0), image)


def test_a_window_has_the_shape_of_the_picture_and_any_place() -> None:
  rng = np.random.default_rng(0)
  windows = [crops.window_crop((320, 200), rng=rng, area=(.64, .64)) for _ in range(300)]
  assert {(w.height, w.width) for w in windows} == {(256, 160)}
  assert {min(w.top for w in windows), min(w.left for w in windows)} == {0}
  assert max(w.top for w in windows) == 64 and max(w.left for w in windows) == 40
  areas = [w.height * w.width / 64000 for w in (crops.window_crop((320, 200), rng=rng, area=(.25, 1.))
                                               for _ in range(300))]
  assert .24 < min(areas) < .3 and .95 < max(areas) <= 1.


def test_a_window_is_what_resizing_first_and_cropping_gives() -> None:
  image = np.linspace(0, 255, 160 * 160 * 3).reshape(160, 160, 3).astype(np.uint8)
  window = crops.window_crop((160, 160), rng=np.random.default_rng(1), area=(.64, .64))
  cut = geometry.resize(window.cut(image), (128, 128), antialias=False)
  np.testing.assert_array_equal(cut, image[window.top:window.top + 128, window.left:window.left + 128])


def deep(most: int, *shape: int) -> np.ndarray:
  """An image of 16 bits with values up to `most`."""
  found = np.random.default_rng(0).integers(0, most + 1, shape, np.uint16)
  found.flat[0] = most
  return found


def as_tiff(image: np.ndarray) -> bytes:
  return cv2.imencode('.tif', image)[1].tobytes()


def as_png(image: np.ndarray) -> bytes:
  return cv2.imencode('.png', image)[1].tobytes()


DARK = {
    'gray PNG': (as_png(deep(4_095, 12, 15)), '4,095', 12), 'RGB PNG': (as_png(deep(1_023, 12, 15, 3)), '1,023', 10),
    'PNG with alpha': (as_png(deep(16_383, 12, 15, 4)), '16,383', 14),
    'gray TIFF': (as_tiff(deep(4_000, 9, 9)), '4,000', 12),
    'RGB TIFF': (as_tiff(deep(4_095, 12, 15, 3)), '4,095', 12), '8 bits in 16': (as_png(deep(200, 12, 15)), '200', 8)}


@pytest.mark.parametrize('kind', DARK)
def test_values_of_fewer_bits_in_an_image_of_16_bits_are_reported_once(
    kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(decode, '_has_warned', threading.Event())
  encoded, most, bits = DARK[kind]
  for _ in range(2):
    decode.decode(encoded)
  line, = caplog.messages
  assert f'has values up to {most} of 65,535' in line and f'values of {bits} bits, set data.channels=1' in line
  caplog.clear()
  monkeypatch.setattr(decode, '_has_warned', threading.Event())
  decode.from_pillow(Image.open(io.BytesIO(encoded)), decode.AS_STORED)
  assert len(caplog.messages) == (kind in ('gray PNG', 'gray TIFF', 'RGB TIFF', '8 bits in 16'))


@pytest.mark.parametrize('encoded', [
    as_png(deep(65_535, 12, 15)), as_tiff(deep(65_535, 12, 15)), as_png(np.zeros((5, 5), np.uint16)),
    as_png(deep(255, 12, 15).astype(np.uint8) // 9), b'P5 4 2 4095\n' + deep(4_095, 8).astype('>u2').tobytes()],
    ids=['PNG', 'TIFF', 'black', '8 bits', '12 bits that say so'])
def test_other_images_are_not_reported(encoded: bytes, caplog: pytest.LogCaptureFixture,
                                       monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(decode, '_has_warned', threading.Event())
  decode.decode(encoded)
  assert not caplog.messages


def test_a_tiff_that_says_12_bits_is_read_as_such() -> None:
  pixels = deep(4_095, 10, 12)
  pairs = pixels.reshape(-1, 2)
  packed = np.stack([pairs[:, 0] >> 4, (pairs[:, 0] & 15) << 4 | pairs[:, 1] >> 8, pairs[:, 1] & 255], 1)
  tags = {256: 12, 257: 10, 258: 12, 259: 1, 262: 1, 273: 8, 277: 1, 278: 10, 279: 180}
  encoded = (b'II*\0' + struct.pack('<I', 188) + packed.astype(np.uint8).tobytes() + struct.pack('<H', len(tags))
             + b''.join(struct.pack('<HHII', tag, 4, 1, value) for tag, value in tags.items()) + bytes(4))
  np.testing.assert_array_equal(decode.decode(encoded)[..., 0], pixels >> 4)
