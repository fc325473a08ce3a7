"""Headers of image files: sizes before pixels, orientations, and what a PNG file is cut down to."""
from __future__ import annotations

import io
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from tests.data.images import random_image
from vit_jax.config import check, schema
from vit_jax.core.errors import UserError
from vit_jax.data.image import decode, headers
from vit_jax.data.image import transform as transforms
from vit_jax.data.image.headers import BadImage, DecodeOptions
from vit_jax.data.source import Record

TURNED = range(1, 9)


def saved(kind: str, *, orientation: int = 1, image: np.ndarray | None = None, **options: object) -> bytes:
  """An image of 12 x 15 px as a file that says an orientation."""
  exif, out = Image.Exif(), io.BytesIO()
  exif[headers.ORIENTATION] = orientation
  Image.fromarray(random_image(0) if image is None else image).save(out, kind, exif=exif, **options)
  return out.getvalue()


def chunk(kind: bytes, content: bytes) -> bytes:
  return struct.pack('>I', len(content)) + kind + content + struct.pack('>I', zlib.crc32(kind + content))


def png(height: int, width: int, data: bytes = b'', *, depth: int = 8, color: int = 2) -> bytes:
  head = struct.pack('>IIBBBBB', width, height, depth, color, 0, 0, 0)
  return b'\x89PNG\r\n\x1a\n' + chunk(b'IHDR', head) + chunk(b'IDAT', zlib.compress(data)) + chunk(b'IEND', b'')


def by_pillow(stored: np.ndarray, orientation: int) -> np.ndarray:
  """Upright by Pillow's own names of the eight orientations."""
  ways = dict(zip(range(2, 9), ('FLIP_LEFT_RIGHT', 'ROTATE_180', 'FLIP_TOP_BOTTOM', 'TRANSPOSE', 'ROTATE_270',
                                'TRANSVERSE', 'ROTATE_90'), strict=True))
  image = Image.fromarray(stored)
  return np.asarray(image.transpose(Image.Transpose[ways[orientation]]) if orientation in ways else image)


@pytest.mark.parametrize('kind', ['JPEG', 'PNG', 'WEBP', 'TIFF'])
@pytest.mark.parametrize('orientation', TURNED)
def test_all_orientations_are_honored_when_asked_for_and_ignored_else(kind: str, orientation: int) -> None:
  encoded = saved(kind, orientation=orientation)
  plain = decode.decode(saved(kind))
  assert decode.find_orientation(encoded) == orientation
  np.testing.assert_array_equal(decode.decode(encoded), plain)
  np.testing.assert_array_equal(decode.decode(encoded, DecodeOptions(upright=True)), by_pillow(plain, orientation))


def test_an_orientation_is_read_in_both_byte_orders_and_types_and_nonsense_is_none() -> None:
  for order, start in (('<', b'II*\0'), ('>', b'MM\0*')):
    for kind, code in (('HHIHxx', 3), ('HHII', 4)):
      entry = struct.pack(f'{order}{kind}', headers.ORIENTATION, code, 1, 6)
      other = struct.pack(f'{order}HHII', 0x0100, 4, 1, 99)
      block = start + struct.pack(f'{order}IH', 8, 2) + other + entry
      assert headers.read_orientation(block) == 6
      assert [headers.read_orientation(block[:end]) for end in range(len(block) - 4)] == [0] * (len(block) - 4)
  nine = b'MM\0*' + struct.pack('>IHHHIHxx', 8, 1, headers.ORIENTATION, 3, 1, 9)
  assert headers.read_orientation(nine) == 1
  assert headers.read_orientation(b'') == headers.read_orientation(b'XX*\0') == 0


XMP = b'<x:xmpmeta><rdf:Description tiff:Orientation%s/></x:xmpmeta>'


def raw_profile(block: bytes) -> str:
  """An EXIF block as ImageMagick writes it into a PNG."""
  digits = block.hex()
  return f'\nexif\n{len(block):8}\n' + '\n'.join(digits[i:i + 72] for i in range(0, len(digits), 72)) + '\n'


def noted(kind: str, *, xmp: bytes = b'', exif: int = 0, text: str = '', zip: bool = False) -> bytes:
  """An image of 12 x 15 px with the orientation in XMP, in EXIF, or as text of a PNG."""
  options: dict[str, object] = {}
  if exif:
    options['exif'] = Image.Exif()
    options['exif'][headers.ORIENTATION] = exif  # type: ignore[index]
  if kind == 'PNG':
    info = PngImagePlugin.PngInfo()
    if xmp:
      info.add_itxt('XML:com.adobe.xmp', xmp.decode(), zip=zip)
    if text:
      info.add_text('Raw profile type exif', text, zip=zip)
    options['pnginfo'] = info
  elif xmp:
    options['xmp'] = xmp
  out = io.BytesIO()
  Image.fromarray(random_image(0)).save(out, kind, **options)
  return out.getvalue()


@pytest.mark.parametrize('encoded', [
    *(noted(kind, xmp=XMP % form) for kind in ('JPEG', 'WEBP', 'PNG', 'TIFF', 'AVIF') for form in (b'="6"', b'>8<')),
    noted('PNG', xmp=XMP % b'="3"', zip=True), noted('JPEG', xmp=XMP % b'="6"', exif=3),
    noted('WEBP', xmp=XMP % b'="6"', exif=3), noted('JPEG', xmp=XMP % b'="9"'), noted('JPEG', xmp=XMP % b''),
    *(noted('PNG', text=raw_profile(write), zip=zip) for zip in (False, True)
      for write in (headers.write_orientation(b'..', 6)[6:], headers.write_orientation(b'..', 8)[12:])),
    noted('PNG', text='\nexif\n   8\nno digits\n'), noted('PNG', text=raw_profile(b'Exif\0\0'), xmp=XMP % b'="5"')])
def test_an_orientation_in_xmp_or_as_text_is_that_of_pillow(encoded: bytes) -> None:
  image, plain = Image.open(io.BytesIO(encoded)), decode.decode(encoded)
  try:
    wanted = image.getexif().get(headers.ORIENTATION, 1)
  except ValueError:  # text without digits
    wanted = 1
  wanted = wanted if wanted in TURNED else 1
  assert decode.find_orientation(encoded) == wanted
  np.testing.assert_array_equal(decode.decode(encoded, DecodeOptions(upright=True)), by_pillow(plain, wanted))


def test_a_text_of_a_png_is_not_unpacked_without_a_limit() -> None:
  long = b'x' * 20_000_000
  packed = chunk(b'zTXt', b'Raw profile type exif\0\0' + zlib.compress(long))
  encoded = png(2, 2, b'\0' * 14)
  tracemalloc.start()
  try:
    assert decode.find_orientation(encoded[:33] + packed + encoded[33:]) == 1
    assert tracemalloc.get_traced_memory()[1] < 5e6
  finally:
    tracemalloc.stop()


def test_chunks_behind_a_webp_are_not_read() -> None:
  encoded = noted('WEBP', xmp=XMP % b'="6"')
  exif = headers.write_orientation(b'..', 3)[6:]
  behind = b'EXIF' + struct.pack('<I', len(exif)) + exif
  assert decode.find_orientation(encoded + behind) == 6


def test_an_orientation_is_written_into_a_jpeg() -> None:
  plain = saved('JPEG')
  for orientation in TURNED:
    encoded = headers.write_orientation(plain, orientation)
    assert headers.read_jpeg(encoded) == (12, 15, orientation)
    assert Image.open(io.BytesIO(encoded)).getexif()[headers.ORIENTATION] == orientation
    np.testing.assert_array_equal(decode.decode(encoded), decode.decode(plain))


@pytest.mark.parametrize('kind', ['JPEG', 'PNG', 'WEBP', 'BMP', 'GIF', 'TIFF', 'AVIF', 'JPEG2000', 'PPM'])
def test_an_image_with_too_many_pixels_is_refused_by_its_header(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
  encoded = saved(kind)
  assert decode.decode(encoded, DecodeOptions(max_pixels=180)).shape == (12, 15, 3)
  monkeypatch.setattr('cv2.imdecode', lambda *_: pytest.fail('it was decoded'))
  monkeypatch.setattr('vit_jax.data.image.decode._to_rgb', lambda *_: pytest.fail('it was decoded'))
  with pytest.raises(BadImage, match='15 x 12 px: expected at most 179 pixels, got 180. .*max_image_pixels'):
    decode.decode(encoded, DecodeOptions(max_pixels=179))


@pytest.mark.parametrize('options', [{'lossless': True}, {'quality': 50}])
def test_sizes_of_all_kinds_of_webp_are_read(options: dict[str, object]) -> None:
  for shape in ((12, 15), (300, 2), (1, 4000)):
    out = io.BytesIO()
    Image.fromarray(np.zeros((*shape, 3), np.uint8)).save(out, 'WEBP', **options)
    assert headers.read_webp(out.getvalue())[:2] == shape


def test_a_recipe_says_how_many_pixels_there_may_be_and_whether_images_are_turned() -> None:
  record, px = Record(saved('PNG', orientation=6), (0,)), (15, 12)
  plain = schema.Recipe(crop=schema.Crop.RESIZE, flip=False)
  upright = schema.Recipe(crop=schema.Crop.RESIZE, flip=False, exif_orientation=True)
  stored = transforms.eval_transform(plain, px[::-1])(record)['image']
  for transform in (transforms.eval_transform(upright, px),
                    lambda r: transforms.train_transform(upright, px)(r, np.random.default_rng(0))):
    np.testing.assert_array_equal(transform(record)['image'], by_pillow(stored, 6))  # type: ignore[no-untyped-call]
  small = schema.Recipe(max_image_pixels=179)
  views = schema.Recipe(max_image_pixels=179, views=schema.Views(on=True))
  for transform in (transforms.eval_transform(small, px), *(
      lambda r, one=one: transforms.train_transform(one, px)(r, np.random.default_rng(0)) for one in (small, views))):
    with pytest.raises(BadImage, match='expected at most 179 pixels'):
      transform(record)
  config = schema.Config(name='x', data=schema.Data(recipe=schema.Recipe(max_image_pixels=0)))
  with pytest.raises(UserError, match='max_image_pixels: expected 1 to .*, got 0'):
    check.check(config)


def test_other_chunks_of_a_png_are_not_shown_to_libpng_and_change_no_pixel(capfd: pytest.CaptureFixture[str]) -> None:
  plain = saved('PNG')
  odd = (plain[:33] + chunk(b'iCCP', b'x\0\0none') + chunk(b'gAMA', b'\0' * 7) + chunk(b'tIME', b'1')
         + chunk(b'tRNS', b'\0' * 6) + plain[33:])
  np.testing.assert_array_equal(decode.decode(odd), decode.decode(plain))
  assert capfd.readouterr() == ('', '')  # libpng writes to the file descriptor


def test_a_palette_with_transparency_loses_only_that() -> None:
  image = Image.fromarray(random_image(3)).convert('P')
  files = []
  for options in ({}, {'transparency': bytes(range(256))}):
    out = io.BytesIO()
    image.save(out, 'PNG', **options)
    files.append(decode.decode(out.getvalue()))
  np.testing.assert_array_equal(*files)
  np.testing.assert_array_equal(files[0], np.asarray(image.convert('RGB')))


def test_damage_of_a_png_is_named() -> None:
  encoded = saved('PNG', image=np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8))
  place = encoded.index(b'IDAT')
  flipped = bytearray(encoded)
  flipped[place + 99] ^= 1
  cases = {bytes(flipped): f'its chunk IDAT at byte {place - 4} does not match its checksum',
           encoded[:-12]: 'the PNG is truncated: no end chunk', encoded[:place + 9]: "chunk b'IDAT' extends to byte",
           encoded[:8] + chunk(b'CgBI', b'') + encoded[8:]: "an unknown critical chunk b'CgBI'",
           encoded[:8] + chunk(b'IEND', b''): 'does not start with an IHDR chunk', png(0, 5): 'expected at least 1 x 1'}
  for content, message in cases.items():
    with pytest.raises(BadImage, match=message):
      decode.decode(content)


def test_files_without_a_header_are_bad() -> None:
  for content, message in {b'\xff\xd8\xff\xd9': 'the JPEG has no frame header', b'\xff\xd8' + b'\xff' * 9: 'no frame',
                           b'RIFF....WEBPVP8 ': 'the WebP has no frame header', b'BM': 'the BMP is truncated',
                           b'\xff\xd8\xff\xc0\0\x09\x08\0\0\0\x05\x01': 'got 5 x 0 px'}.items():
    with pytest.raises(BadImage, match=message):
      decode.decode(content)


def test_heic_and_jpeg_xl_get_a_message_of_their_own() -> None:
  heic = struct.pack('>I', 24) + b'ftypheic\0\0\0\0mif1heic' + b'...'
  for content, name in ((heic, 'HEIC'), (heic.replace(b'heic', b'mif1'), 'HEIC'), (b'\xff\x0a...', 'JPEG XL')):
    with pytest.raises(BadImage, match=f'{name} images are not supported. Convert the image to JPEG or PNG first'):
      decode.decode(content)
  assert headers.detect_format(heic.replace(b'mif1', b'avif')) == 'avif' and headers.detect_format(b'hello') == ''
