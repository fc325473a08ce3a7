"""Reads the headers of image files before any pixel is decoded: format, size and EXIF orientation.

`decode.py` calls `detect_format`, then the function of the format, then `check_size`. JPEG, PNG, WebP and BMP headers
are parsed here, in microseconds; Pillow reads those of the other formats. The orientation is that of the EXIF block, or
if there is none that of XMP, as Pillow finds it; a PNG may have the EXIF block as text, as ImageMagick writes it. This
module also holds the table of formats, `BadImage` and `DecodeOptions`, and imports no library for images.
"""
from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from vit_jax.config import schema

MAX_PIXELS = 178_956_970  # twice Pillow's MAX_IMAGE_PIXELS, the size above which Pillow refuses an image as well
ORIENTATION = 0x0112      # EXIF 2.3, table 4
_SHORT, _LONG = 3, 4      # EXIF types
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # JPEG markers SOF0 to SOF15, which hold the size
_MARKER = re.compile(rb'\xff[^\x00\x01\xd0-\xd8\xff]')  # a JPEG marker with a length field, or the end
_END, _SCAN, _APP1 = 0xD9, 0xDA, 0xE1
_EXIF, _XMP = b'Exif\0\0', b'http://ns.adobe.com/xap/1.0/\0'
_TURNED = re.compile(rb'tiff:Orientation(?:="|>)([1-8])')
_RAW_EXIF, _PNG_XMP = b'Raw profile type exif', b'XML:com.adobe.xmp'  # keywords of texts in a PNG
_PNG_BLOCKS = (b'eXIf', b'tEXt', b'zTXt', b'iTXt')  # chunks that may have the orientation
_MOST_TEXT = 2**20  # bytes of such a text, as for Pillow
_PNG = b'\x89PNG\r\n\x1a\n'
_PNG_PIXELS = (b'IHDR', b'PLTE', b'IDAT', b'IEND')
_SIGNATURES = ((b'\xff\xd8', 'jpeg'), (_PNG, 'png'), (b'BM', 'bmp'), (b'GIF8', 'gif'), (b'II*\0', 'tiff'),
               (b'MM\0*', 'tiff'), (b'II+\0', 'tiff'), (b'MM\0+', 'tiff'), (b'\0\0\0\x0cjP  ', 'jp2'),
               (b'\xff\x4f\xff\x51', 'jp2'), (b'\xff\x0a', 'jxl'), (b'\0\0\0\x0cJXL ', 'jxl'),
               *((b'P%d' % i, 'ppm') for i in range(1, 7)))


class Format(NamedTuple):
  """A format of image files: its name, and the extensions of its files."""
  name: str
  extensions: tuple[str, ...]


FORMATS = {
    'jpeg': Format('JPEG', ('.jpg', '.jpeg', '.jpe', '.jfif', '.mpo')), 'png': Format('PNG', ('.png',)),
    'webp': Format('WebP', ('.webp',)), 'bmp': Format('BMP', ('.bmp', '.dib')), 'gif': Format('GIF', ('.gif',)),
    'tiff': Format('TIFF', ('.tif', '.tiff')), 'avif': Format('AVIF', ('.avif', '.avifs')),
    'jp2': Format('JPEG 2000', ('.jp2', '.j2k', '.j2c', '.jpx')),
    'ppm': Format('PPM', ('.ppm', '.pgm', '.pbm', '.pnm'))}
"""The formats that are read, by the name that `detect_format` returns. The files that are read from a folder or a tar
file are those with these extensions."""
UNREAD = {'heic': Format('HEIC', ('.heic', '.heif')), 'jxl': Format('JPEG XL', ('.jxl',))}
"""Formats of images that are known but not supported."""
*_first, _last = (one.name for one in FORMATS.values())
NAMES = f'{", ".join(_first)} or {_last}'
_HEIC = {b'heic', b'heix', b'hevc', b'hevx', b'heim', b'heis', b'mif1', b'msf1'}


class BadImage(ValueError):
  """The bytes are not a complete image that can be decoded."""


class DecodeOptions(NamedTuple):
  """How encoded images are decoded.

  max_pixels: larger images are refused before decoding.
  upright: apply the EXIF orientation; if False, it is ignored.
  """
  max_pixels: int = MAX_PIXELS
  upright: bool = False


AS_STORED = DecodeOptions()


def decode_options(recipe: schema.Recipe) -> DecodeOptions:
  """Returns the decoding options of a recipe."""
  return DecodeOptions(recipe.max_image_pixels, recipe.upright)


class Header(NamedTuple):
  """Stored height and width in px, and the EXIF orientation from 1 to 8; 1 means upright or not given."""
  height: int
  width: int
  orientation: int = 1


def detect_format(encoded: bytes) -> str:
  """Returns the format of a file, a key of `FORMATS` or `UNREAD`; '' if it is not known."""
  if encoded[:4] == b'RIFF' and encoded[8:12] == b'WEBP':
    return 'webp'
  if encoded[4:8] == b'ftyp':
    end = min(int.from_bytes(encoded[:4], 'big'), 256)
    brands = {encoded[i:i + 4] for i in range(8, end, 4)}
    return 'avif' if brands & {b'avif', b'avis'} else 'heic' if brands & _HEIC else ''
  return next((kind for start, kind in _SIGNATURES if encoded.startswith(start)), '')


def check_size(height: int, width: int, options: DecodeOptions) -> None:
  """Raises BadImage for an image that has no pixels, or more than the options allow."""
  if height < 1 or width < 1:
    raise BadImage(f'image header: expected at least 1 x 1 px, got {width:,} x {height:,} px')
  if height * width > options.max_pixels:
    raise BadImage(f'{width:,} x {height:,} px: expected at most {options.max_pixels:,} pixels, got '
                   f'{height * width:,}. Shrink the image, or raise data.recipe.max_image_pixels')


def read_jpeg(encoded: bytes) -> Header:
  """Returns the header of a JPEG file. Raises BadImage if there is none."""
  exif = xmp = b''
  for marker, place in _jpeg_markers(encoded):
    if marker in (_END, _SCAN):
      break
    if marker in _FRAMES and place + 7 <= len(encoded):
      height, width = struct.unpack_from('>HH', encoded, place + 3)
      return Header(height, width, _orientation(exif, xmp))
    if marker == _APP1:
      block = encoded[place + 2:place + int.from_bytes(encoded[place:place + 2], 'big')]
      exif = exif or (block if block.startswith(_EXIF) else b'')
      xmp = block if block.startswith(_XMP) else xmp
  raise BadImage(f'the JPEG has no frame header in {len(encoded):,} bytes')


def check_jpeg_end(encoded: bytes) -> None:
  """Raises BadImage if a JPEG is truncated: it has no end marker, which other bytes may follow.

  OpenCV before 5 fills the missing part with gray without an error.

  Some cameras write a video behind the image (motion photos), whose bytes contain any marker by chance. So unless the
  file ends with the end marker, the markers are followed one by one. The pixels of a scan cannot contain a marker.
  """
  if not encoded.endswith(b'\xff\xd9', 4):
    has_scan, last = False, 0
    for last, _ in _jpeg_markers(encoded):
      has_scan |= last == _SCAN
    if not has_scan or last != _END:
      raise BadImage(f'the JPEG is truncated: no end marker in {len(encoded):,} bytes')


def read_png(encoded: bytes) -> tuple[Header, bytes]:
  """Returns the header of a PNG file, and the file reduced to the chunks that are needed for its pixels.

  Other chunks, such as color profiles, are not used, and libpng prints warnings about some of them to stderr.

  Raises:
    BadImage: the file is truncated, or a needed chunk does not match its checksum.
  """
  view, kept = memoryview(encoded), [_PNG]
  blocks: dict[bytes, bytes] = {}
  for kind, start, end in _png_chunks(view):
    if kind in _PNG_BLOCKS:
      name, block = _png_block(kind, encoded[start + 8:end - 4])
      blocks[name] = block
    if kind not in _PNG_PIXELS:
      if not kind[0] & 0x20:  # a capital letter marks a critical chunk
        raise BadImage(f'the PNG has an unknown critical chunk {kind!r}')
      continue
    if zlib.crc32(view[start + 4:end - 4]) != int.from_bytes(view[end - 4:end], 'big'):
      raise BadImage(f'the PNG is damaged: its chunk {kind.decode()} at byte {start:,} does not match its checksum')
    kept.append(bytes(view[start:end]))
  if kept[1][4:8] != b'IHDR' or len(kept[1]) != 25:
    raise BadImage('the PNG does not start with an IHDR chunk')
  width, height = struct.unpack_from('>II', kept[1], 8)
  exif = blocks.get(b'eXIf')
  if exif is None:  # a text in ImageMagick's form: a line break, the kind, the length, and lines of hexadecimal digits
    try:
      exif = bytes.fromhex(b''.join(blocks.get(_RAW_EXIF, b'').split(b'\n')[3:]).decode('ascii'))
    except ValueError:
      exif = b''
  return Header(height, width, _orientation(exif, blocks.get(_PNG_XMP, b''))), b''.join(kept)


def read_png_size(encoded: bytes) -> tuple[int, int]:
  """Returns height and width in the first chunk of a PNG file. Raises BadImage if that is another chunk."""
  if encoded[12:16] != b'IHDR' or len(encoded) < 33:
    raise BadImage('the PNG does not start with an IHDR chunk')
  width, height = struct.unpack_from('>II', encoded, 16)
  return height, width


def read_webp(encoded: bytes) -> Header:
  """Returns the header of a WebP file. Raises BadImage if there is none."""
  try:
    first, body = encoded[12:16], encoded[20:30]
    if first == b'VP8X':
      height, width = (1 + int.from_bytes(body[i:i + 3], 'little') for i in (7, 4))
      return Header(height, width, _webp_orientation(encoded) if body[0] & 0x0C else 1)  # EXIF or XMP
    if first == b'VP8L' and body[0] == 0x2F:
      bits = struct.unpack_from('<I', body, 1)[0]
      return Header((bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1)
    if first == b'VP8 ' and body[3:6] == b'\x9d\x01\x2a':
      width, height = struct.unpack_from('<HH', body, 6)
      return Header(height & 0x3FFF, width & 0x3FFF)
  except (IndexError, struct.error):
    pass
  raise BadImage(f'the WebP has no frame header in {len(encoded):,} bytes')


def read_bmp(encoded: bytes) -> Header:
  """Returns the header of a BMP file. Raises BadImage if there is none."""
  try:
    is_old = struct.unpack_from('<I', encoded, 14)[0] == 12
    width, height = struct.unpack_from('<HH' if is_old else '<ii', encoded, 18)
  except struct.error:
    raise BadImage(f'the BMP is truncated: {len(encoded):,} bytes') from None
  return Header(abs(height), width)


def read_orientation(exif: bytes) -> int:
  """Returns the orientation in an EXIF block from its byte order on: 0 if it has none, 1 if it is not valid."""
  order = {b'II': '<', b'MM': '>'}.get(exif[:2])
  if order is None:
    return 0
  try:
    start = struct.unpack_from(f'{order}I', exif, 4)[0]
    for entry in range(struct.unpack_from(f'{order}H', exif, start)[0]):
      tag, kind = struct.unpack_from(f'{order}HH', exif, start + 2 + 12 * entry)
      if tag == ORIENTATION and kind in (_SHORT, _LONG):
        found = struct.unpack_from(f'{order}{"H" if kind == _SHORT else "I"}', exif, start + 10 + 12 * entry)[0]
        return found if 1 <= found <= 8 else 1
  except struct.error:
    pass
  return 0


def _orientation(exif: bytes, xmp: bytes) -> int:
  """Returns the orientation of an EXIF block, or else of XMP, 1 to 8; 1 if none has it."""
  if found := read_orientation(exif.removeprefix(_EXIF).removeprefix(_EXIF)):
    return found
  turned = _TURNED.search(xmp)
  return int(turned[1]) if turned else 1


def write_orientation(jpeg: bytes, orientation: int) -> bytes:
  """Returns a JPEG file with an EXIF block that holds only this orientation."""
  entry = struct.pack('>HHIHxx', ORIENTATION, _SHORT, 1, orientation)
  block = b'Exif\0\0MM\0*' + struct.pack('>IH', 8, 1) + entry + bytes(4)
  return jpeg[:2] + b'\xff\xe1' + struct.pack('>H', 2 + len(block)) + block + jpeg[2:]


def _jpeg_markers(encoded: bytes) -> Iterator[tuple[int, int]]:
  """Yields each marker of a JPEG that has a length, and the place of the length; the end marker is the last."""
  place, marker = 2, 0
  while marker != _END and (found := _MARKER.search(encoded, place)):
    place = found.end()
    marker = encoded[place - 1]
    yield marker, place
    place += int.from_bytes(encoded[place:place + 2], 'big')


def _png_block(kind: bytes, content: bytes) -> tuple[bytes, bytes]:
  """Returns keyword and text of a chunk that may have the orientation; for an EXIF chunk, its type and content."""
  if kind == b'eXIf':
    return kind, content
  keyword, _, text = content.partition(b'\0')
  if keyword not in (_RAW_EXIF, _PNG_XMP):
    return b'', b''
  is_packed = kind == b'zTXt' or (kind == b'iTXt' and text[:1] == b'\1')
  text = text[1:] if kind == b'zTXt' else text[2:].split(b'\0', 2)[-1] if kind == b'iTXt' else text
  try:
    return keyword, zlib.decompressobj().decompress(text, _MOST_TEXT) if is_packed else text
  except zlib.error:
    return keyword, b''


def _png_chunks(view: memoryview) -> Iterator[tuple[bytes, int, int]]:
  """Yields type, first byte and end of each chunk, including its checksum; raises BadImage if IEND is missing."""
  place, kind = len(_PNG), b''
  while kind != b'IEND':
    if place + 12 > len(view):
      raise BadImage(f'the PNG is truncated: no end chunk in {len(view):,} bytes')
    length, kind = int.from_bytes(view[place:place + 4], 'big'), bytes(view[place + 4:place + 8])
    end = place + 12 + length
    if end > len(view):
      raise BadImage(f'the PNG is truncated: its chunk {kind!r} extends to byte {end:,} of {len(view):,}')
    yield kind, place, end
    place = end


def _webp_orientation(encoded: bytes) -> int:
  """Returns the orientation in the chunks of EXIF and XMP, which follow the pixels."""
  place, end, blocks = 12, min(len(encoded), 8 + int.from_bytes(encoded[4:8], 'little')), {b'EXIF': b'', b'XMP ': b''}
  while place + 8 <= end:
    size = int.from_bytes(encoded[place + 4:place + 8], 'little')
    kind = encoded[place:place + 4]
    if kind in blocks:
      blocks[kind] = encoded[place + 8:place + 8 + size]
    place += 8 + size + size % 2
  return _orientation(blocks[b'EXIF'], blocks[b'XMP '])
