"""Images with hostile headers and EXIF data: decoded as they should be, or refused before they take memory."""
from __future__ import annotations

import io
import lzma
import struct
import time
import tracemalloc
import zlib

import numpy as np
import pytest
from PIL import Image, TiffImagePlugin

from tests import fuzzing
from tests.data.images import encode, random_image
from vit_jax.data import prepare
from vit_jax.data.image import channels, decode, headers, masks
from vit_jax.data.image.headers import BadImage, DecodeOptions

UPRIGHT = DecodeOptions(upright=True)
JPEG = encode(random_image(0), '.jpg')


def with_exif(block: bytes, jpeg: bytes = JPEG) -> bytes:
  """A JPEG file with segments that hold `Exif` and this block, in parts of 64 kB."""
  parts = [block[i:i + 65_000] for i in range(0, max(1, len(block)), 65_000)]
  segments = [b'\xff\xe1' + struct.pack('>H', 8 + len(part)) + b'Exif\0\0' + part for part in parts]
  return jpeg[:2] + b''.join(segments) + jpeg[2:]


def orientation(value: int, *, kind: int = 3, count: int = 1, entries: int = 1, start: int = 8) -> bytes:
  entry = struct.pack('>HHIHxx', headers.ORIENTATION, kind, count, value & 0xFFFF)
  return b'MM\0*' + struct.pack('>I', start) + struct.pack('>H', entries) + entry + bytes(4)


@pytest.mark.parametrize('block', [
    *(orientation(value) for value in (0, 1, 9, 255, 65_535)), orientation(6, kind=2), orientation(6, entries=9)[:9],
    orientation(6, start=2**32 - 1), orientation(6, start=0), b'', b'MM', b'II*\0', b'XX*\0' + bytes(20),
    bytes(65_000 * 40)],
    ids=lambda block: f'{len(block)} bytes')
def test_exif_without_a_valid_orientation_changes_nothing(block: bytes) -> None:
  whole = decode.decode(JPEG)
  start_s = time.process_time()
  assert (decode.decode(with_exif(block), UPRIGHT) == whole).all()
  assert time.process_time() - start_s < 1
  assert decode.find_orientation(with_exif(block)) == 1


@pytest.mark.parametrize('value', range(1, 9))
def test_valid_orientations_are_found_among_hostile_entries(value: int) -> None:
  many = struct.pack('>HHIHxx', 1, 3, 2**32 - 1, 0) * 5_000
  block = b'MM\0*' + struct.pack('>IH', 8, 5_001) + many + orientation(value)[10:]
  assert decode.find_orientation(with_exif(block)) == value
  expected = decode.orient(decode.decode(JPEG), value)
  assert (decode.decode(with_exif(block), UPRIGHT) == expected).all()


@pytest.mark.parametrize('value', [0, 9, 70_000, 2**32 - 1, 'top'])
def test_an_orientation_of_a_tiff_that_is_none_changes_nothing(value: object) -> None:
  """Also for a smaller copy, which keeps the orientation."""
  tags = TiffImagePlugin.ImageFileDirectory_v2()
  tags.tagtype[headers.ORIENTATION] = 2 if isinstance(value, str) else 4  # ASCII and LONG
  tags[headers.ORIENTATION] = value
  content = saved(Image.fromarray(random_image(0)), 'TIFF', tiffinfo=tags)
  assert decode.find_orientation(content) == 1
  assert (decode.decode(content, UPRIGHT) == random_image(0)).all()
  assert prepare.encode(content, prepare.Settings(6, 90, 0, 0))[:2] == b'\xff\xd8'


def png(width: int, height: int, pixels: bytes = b'') -> bytes:
  def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))
  return (b'\x89PNG\r\n\x1a\n' + chunk(b'IHDR', struct.pack('>IIBBBBB', width, height, 8, 2, 0, 0, 0))
          + chunk(b'IDAT', zlib.compress(pixels)) + chunk(b'IEND', b''))


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
  out = io.BytesIO()
  image.save(out, kind, **options)
  return out.getvalue()


def sized(kind: str, width: int, height: int) -> bytes:
  """A small file whose header says another size."""
  small = Image.fromarray(random_image(0))
  match kind:
    case 'png':
      return png(width, height)
    case 'jpeg':
      found = bytearray(JPEG)
      at = found.index(b'\xff\xc0') + 5
      found[at:at + 4] = struct.pack('>HH', min(height, 65_535), min(width, 65_535))
    case 'bmp':
      found = bytearray(saved(small, 'BMP'))
      found[18:26] = struct.pack('<ii', min(width, 2**31 - 1), min(height, 2**31 - 1))
    case 'gif':
      found = bytearray(saved(small.convert('P'), 'GIF'))
      found[6:10] = struct.pack('<HH', min(width, 65_535), min(height, 65_535))
    case 'webp':
      found = bytearray(saved(small, 'WEBP', lossless=True))
      found[21:25] = struct.pack('<I', 0xFFFFFFF | int.from_bytes(found[21:25], 'little') & 0xF0000000)
    case 'tiff':
      found = bytearray(saved(small, 'TIFF'))
      start = struct.unpack_from('<I', found, 4)[0]
      for entry in range(struct.unpack_from('<H', found, start)[0]):
        at = start + 2 + 12 * entry
        if (tag := struct.unpack_from('<H', found, at)[0]) in (256, 257):
          found[at:at + 12] = struct.pack('<HHII', tag, 4, 1, width if tag == 256 else height)
    case _:
      return f'P6\n{width} {height}\n255\n'.encode() + bytes(20)
  return bytes(found)


@pytest.mark.parametrize('kind', ['png', 'jpeg', 'bmp', 'gif', 'webp', 'tiff', 'ppm'])
@pytest.mark.parametrize('size', [(2**31 - 1, 2**31 - 1), (100_000, 100_000), (0, 7)])
def test_an_absurd_size_is_refused_before_decoding(kind: str, size: tuple[int, int]) -> None:
  if kind == 'webp' and size != (100_000, 100_000) or kind == 'gif' and not size[0]:
    pytest.skip('the size of WebP is never 0, and that of a GIF file is the one of its frame')
  content = sized(kind, *size)
  start_s = time.process_time()
  with pytest.raises(BadImage) as error:
    decode.decode(content)
  assert time.process_time() - start_s < .5
  fuzzing.check_words(str(error.value))
  assert any(part in str(error.value) for part in ('expected at most', 'expected at least 1 x 1', 'not a complete'))


@pytest.mark.parametrize(('kind', 'mode'), [
    ('GIF', 'P'), ('GIF', 'L'), ('PNG', 'RGB'), ('PNG', 'RGBA'), ('WEBP', 'RGB'), ('TIFF', 'RGB'), ('TIFF', 'CMYK')])
def test_of_several_frames_the_first_is_used(kind: str, mode: str) -> None:
  frames = [Image.fromarray(random_image(seed)).convert(mode) for seed in range(4)]
  several = saved(frames[0], kind, save_all=True, append_images=frames[1:] * 20)
  one = saved(frames[0], kind)
  difference = np.abs(decode.decode(several).astype(int) - decode.decode(one))
  assert difference.mean() < 3 and decode.decode(several).shape == (12, 15, 3)  # WebP is lossy


@pytest.mark.parametrize(('kind', 'mode', 'options'), [
    ('PNG', 'P', {'transparency': bytes(range(256))}), ('PNG', 'P', {'transparency': 3}), ('PNG', 'LA', {}),
    ('PNG', '1', {}), ('GIF', 'P', {'transparency': 0}), ('JPEG', 'CMYK', {}), ('TIFF', 'CMYK', {}),
    ('TIFF', 'LAB', {}), ('PNG', 'I;16', {}), ('TIFF', 'I;16', {}), ('PPM', 'I;16', {}), ('PNG', 'RGBA', {}),
    ('TIFF', 'F', {}), ('TIFF', 'I', {})])
def test_every_mode_is_decoded_or_refused_with_a_reason(kind: str, mode: str, options: dict[str, object]) -> None:
  gray = random_image(0)[..., 0]
  image = {'I;16': lambda: Image.fromarray(gray.astype(np.uint16) * 257), 'F': lambda: Image.fromarray(
      gray.astype(np.float32)), 'I': lambda: Image.fromarray(gray.astype(np.int32)),
           'LAB': lambda: Image.frombytes('LAB', (15, 12), random_image(0).tobytes())}.get(
               mode, lambda: Image.fromarray(random_image(0)).convert(mode))()
  content = saved(image, kind, **options)
  assert decode.read_size(content) == (12, 15)
  if mode in ('F', 'I'):
    with pytest.raises(BadImage, match='expected 8 or 16 bits, got 32 bits'):
      decode.decode(content)
    return
  found = decode.decode(content)
  assert found.shape == (12, 15, 3) and found.dtype == np.uint8
  if mode == 'I;16':
    assert (found[..., 0] == gray).all()


def tiff(strip: bytes, num: int, compression: int, *, tile: int = 0, rows: int = 16) -> bytes:
  """A TIFF of 16 x 16 px whose only strip or tile are these bytes."""
  strip += b'\0' * (len(strip) % 2)
  bits = 8 + len(strip)
  tags = {256: 16, 257: 16, 258: bits if num > 2 else 8, 259: compression, 262: 2 if num == 3 else 1, 277: num}
  tags |= {322: tile, 323: tile, 324: 8, 325: len(strip)} if tile else {273: 8, 278: rows, 279: len(strip)}
  entries = [struct.pack('<HHII', tag, 4, 1, value) if tag != 258 else struct.pack('<HHII', tag, 3, num, value)
             for tag, value in sorted(tags.items())]
  start = bits + 2 * num
  return (b'II*\0' + struct.pack('<I', start) + strip + struct.pack(f'<{num}H', *[8] * num)
          + struct.pack('<H', len(entries)) + b''.join(entries) + bytes(4))


PACKED = {'zlib': (8, zlib.compress(bytes(40_000_000))), 'old zlib': (32946, zlib.compress(bytes(40_000_000))),
          'lzma': (34925, lzma.compress(bytes(40_000_000))), 'PackBits': (32773, b'\x81\0' * 300_000)}


@pytest.mark.parametrize('kind', PACKED)
@pytest.mark.parametrize('options', [{}, {'tile': 16}, {'rows': 65_535}])
def test_a_strip_of_a_tiff_is_not_unpacked_to_more_than_its_pixels(kind: str, options: dict[str, int]) -> None:
  pytest.importorskip('tifffile')
  compression, packed = PACKED[kind]
  content = tiff(packed, 5, compression, **options)
  tracemalloc.start()
  try:
    with pytest.raises(BadImage, match='the TIFF: expected a strip or tile that is unpacked to 1,280 bytes'):
      channels.read(content, 5, DecodeOptions())
    assert tracemalloc.get_traced_memory()[1] < 10e6
  finally:
    tracemalloc.stop()


@pytest.mark.parametrize('num', [1, 3, 5])
def test_a_tiff_with_tiles_larger_than_an_image_is_refused(num: int) -> None:
  pytest.importorskip('tifffile')
  content = tiff(zlib.compress(bytes(1_000)), num, 8, tile=24_000)
  for read in (decode.decode,) if num == 3 else (lambda one: channels.read(one, num, DecodeOptions()),):
    with pytest.raises(BadImage, match='the TIFF.* tiles of .*24,?000'):
      read(content)
  if num == 1:
    with pytest.raises(masks.BadMask, match='cannot be decoded'):
      masks.decode(content)
