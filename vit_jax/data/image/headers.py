"""Reads the headers of image files before any pixel is decoded: format, size and EXIF orientation.

`decode.py` calls `detect_format`, then the function of the format (`read_jpeg`, `read_png`, `read_webp`, `read_bmp`),
then `check_size`. Pillow reads the headers of the other formats. This module also holds the table of formats,
`BadImage` and `DecodeOptions`; it imports no library for images.

The orientation is read from the EXIF block or, if that has none, from the XMP block, as in Pillow. A PNG may store the
EXIF block as hexadecimal text, as ImageMagick writes it.
"""
from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from vit_jax.config import schema

MAX_PIXELS = 178_956_970  # twice Pillow's MAX_IMAGE_PIXELS; Pillow refuses larger images, too
ORIENTATION = 0x0112      # the EXIF tag; EXIF 2.3, table 4
_SHORT, _LONG = 3, 4      # EXIF types of 16 and 32 bits
_SOF_MARKERS = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # JPEG markers of a frame header, which has the image size
_EOI, _SOS, _APP1 = 0xD9, 0xDA, 0xE1  # JPEG markers: end of the image, start of a scan, EXIF or XMP
_JPEG_MARKER = re.compile(rb'\xff[^\x00\x01\xd0-\xd8\xff]')  # EOI, and the markers of segments with a length field
_EXIF_PREFIX, _XMP_PREFIX = b'Exif\0\0', b'http://ns.adobe.com/xap/1.0/\0'
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([1-8])')  # such as `tiff:Orientation="6"`
_PNG_EXIF_KEYWORD, _PNG_XMP_KEYWORD = b'Raw profile type exif', b'XML:com.adobe.xmp'
_PNG_METADATA = (b'eXIf', b'tEXt', b'zTXt', b'iTXt')  # types of chunks that may have the orientation
_MAX_TEXT_BYTES = 2**20  # limit for an unpacked text in a PNG, as in Pillow
_PNG_SIGNATURE = b'\x89PNG\r\n\x1a\n'
_PNG_PIXELS = (b'IHDR', b'PLTE', b'IDAT', b'IEND')  # types of chunks that are needed to decode the pixels
_SIGNATURES = ((b'\xff\xd8', 'jpeg'), (_PNG_SIGNATURE, 'png'), (b'BM', 'bmp'), (b'GIF8', 'gif'), (b'II*\0', 'tiff'),
               (b'MM\0*', 'tiff'), (b'II+\0', 'tiff'), (b'MM\0+', 'tiff'), (b'\0\0\0\x0cjP  ', 'jp2'),
               (b'\xff\x4f\xff\x51', 'jp2'), (b'\xff\x0a', 'jxl'), (b'\0\0\0\x0cJXL ', 'jxl'),
               *((b'P%d' % digit, 'ppm') for digit in range(1, 7)))  # first bytes of a file, and its format


class Format(NamedTuple):
  """A format of image files: its name in messages, and the extensions of its files."""
  name: str
  extensions: tuple[str, ...]


FORMATS = {
    'jpeg': Format('JPEG', ('.jpg', '.jpeg', '.jpe', '.jfif', '.mpo')), 'png': Format('PNG', ('.png',)),
    'webp': Format('WebP', ('.webp',)), 'bmp': Format('BMP', ('.bmp', '.dib')), 'gif': Format('GIF', ('.gif',)),
    'tiff': Format('TIFF', ('.tif', '.tiff')), 'avif': Format('AVIF', ('.avif', '.avifs')),
    'jp2': Format('JPEG 2000', ('.jp2', '.j2k', '.j2c', '.jpx')),
    'ppm': Format('PPM', ('.ppm', '.pgm', '.pbm', '.pnm'))}
"""The formats that can be decoded, by the name that `detect_format` returns. Sources of folders and tar files read the
files with the extensions of these formats, and skip other files."""
UNREAD = {'heic': Format('HEIC', ('.heic', '.heif')), 'jxl': Format('JPEG XL', ('.jxl',))}
"""Formats of images that are recognized but cannot be decoded."""
*_first, _last = (image_format.name for image_format in FORMATS.values())
NAMES = f'{", ".join(_first)} or {_last}'
"""The names of the formats for messages: `JPEG, PNG, … or PPM`."""
_AVIF_BRANDS = {b'avif', b'avis'}  # brands in the `ftyp` box of an ISO base media file
_HEIC_BRANDS = {b'heic', b'heix', b'hevc', b'hevx', b'heim', b'heis', b'mif1', b'msf1'}


class BadImage(ValueError):
  """The bytes are not a complete image that can be decoded."""


class DecodeOptions(NamedTuple):
  """How encoded images are decoded.

  max_pixels: largest allowed height x width; a larger image raises BadImage before it is decoded.
  upright: whether the EXIF orientation is applied.
  """
  max_pixels: int = MAX_PIXELS
  upright: bool = False


AS_STORED = DecodeOptions()


def decode_options(recipe: schema.Recipe) -> DecodeOptions:
  """Returns the decoding options of a recipe."""
  return DecodeOptions(recipe.max_image_pixels, recipe.upright)


class Header(NamedTuple):
  """Stored height and width in px, and the EXIF orientation from 1 to 8; 1 = upright, or the file has none."""
  height: int
  width: int
  orientation: int = 1


def detect_format(encoded: bytes) -> str:
  """Returns the format of a file, a key of `FORMATS` or `UNREAD`; '' if the format is not known."""
  if encoded[:4] == b'RIFF' and encoded[8:12] == b'WEBP':
    return 'webp'
  if encoded[4:8] == b'ftyp':  # an ISO base media file begins with the size of a box, `ftyp`, and brands of 4 bytes
    box_end = min(int.from_bytes(encoded[:4], 'big'), 256)
    brands = {encoded[offset:offset + 4] for offset in range(8, box_end, 4)}
    if brands & _AVIF_BRANDS:
      return 'avif'
    return 'heic' if brands & _HEIC_BRANDS else ''
  for signature, file_format in _SIGNATURES:
    if encoded.startswith(signature):
      return file_format
  return ''


def check_size(height: int, width: int, options: DecodeOptions) -> None:
  """Raises BadImage for an image that has no pixels, or more than `options.max_pixels`."""
  if height < 1 or width < 1:
    raise BadImage(f'image header: expected at least 1 x 1 px, got {width:,} x {height:,} px')
  if height * width > options.max_pixels:
    raise BadImage(f'{width:,} x {height:,} px: expected at most {options.max_pixels:,} pixels, got '
                   f'{height * width:,}. Shrink the image, or raise data.recipe.max_image_pixels')


def read_jpeg(encoded: bytes) -> Header:
  """Returns the header of a JPEG file; raises BadImage if there is none.

  The orientation is that of the first EXIF block or else of the last XMP block before the frame header.
  """
  exif = xmp = b''
  for marker, start in _jpeg_segments(encoded):
    if marker in (_EOI, _SOS):
      break
    if marker in _SOF_MARKERS and start + 7 <= len(encoded):  # length (2 bytes), bits (1), height (2), width (2)
      height, width = struct.unpack_from('>HH', encoded, start + 3)
      return Header(height, width, _find_orientation(exif, xmp))
    if marker == _APP1:
      content = encoded[start + 2:start + int.from_bytes(encoded[start:start + 2], 'big')]
      if content.startswith(_EXIF_PREFIX):
        exif = exif or content
      elif content.startswith(_XMP_PREFIX):
        xmp = content
  raise BadImage(f'the JPEG has no frame header in {len(encoded):,} bytes')


def check_jpeg_end(encoded: bytes) -> None:
  """Raises BadImage if a JPEG is truncated, that is, has no end marker. Bytes after the end marker are allowed.

  OpenCV before version 5 decodes a truncated file without an error, with gray in place of the missing part.

  Some cameras write a video behind the image (motion photos). The video's bytes may contain any marker by chance, so a
  search for the end marker is not enough. If a file does not end with the end marker, all segments before it are read.
  The pixels of a scan cannot contain a marker.
  """
  if encoded.endswith(b'\xff\xd9', 4):
    return
  markers = {marker for marker, _ in _jpeg_segments(encoded)}
  if not markers >= {_SOS, _EOI}:
    raise BadImage(f'the JPEG is truncated: no end marker in {len(encoded):,} bytes')


def read_png(encoded: bytes) -> tuple[Header, bytes]:
  """Returns the header of a PNG file, and the file reduced to the chunks that are needed for its pixels.

  Other chunks, such as color profiles, are left out: they do not change the pixels, and libpng prints warnings about
  some of them to stderr. A chunk is its length (4 bytes), type (4 bytes), content and checksum (4 bytes).

  Raises BadImage if the file is truncated, or a needed chunk does not match its checksum.
  """
  view = memoryview(encoded)
  pixel_chunks: list[bytes] = []
  metadata: dict[bytes, bytes] = {}
  for chunk_type, start, end in _png_chunks(view):
    if chunk_type in _PNG_METADATA:
      keyword, text = _png_metadata(chunk_type, encoded[start + 8:end - 4])
      metadata[keyword] = text
    if chunk_type not in _PNG_PIXELS:
      if not chunk_type[0] & 0x20:  # the type of a critical chunk begins with a capital letter
        raise BadImage(f'the PNG has an unknown critical chunk {chunk_type!r}')
      continue
    if zlib.crc32(view[start + 4:end - 4]) != int.from_bytes(view[end - 4:end], 'big'):
      name = chunk_type.decode()
      raise BadImage(f'the PNG is damaged: its chunk {name} at byte {start:,} does not match its checksum')
    pixel_chunks.append(bytes(view[start:end]))
  if pixel_chunks[0][4:8] != b'IHDR' or len(pixel_chunks[0]) != 25:
    raise BadImage('the PNG does not start with an IHDR chunk')
  width, height = struct.unpack_from('>II', pixel_chunks[0], 8)
  exif = metadata.get(b'eXIf')
  if exif is None:  # ImageMagick's text: a line break, a name, the length, and lines of hexadecimal digits
    digits = b''.join(metadata.get(_PNG_EXIF_KEYWORD, b'').split(b'\n')[3:])
    try:
      exif = bytes.fromhex(digits.decode('ascii'))
    except ValueError:
      exif = b''
  header = Header(height, width, _find_orientation(exif, metadata.get(_PNG_XMP_KEYWORD, b'')))
  return header, _PNG_SIGNATURE + b''.join(pixel_chunks)


def read_png_size(encoded: bytes) -> tuple[int, int]:
  """Returns height and width in the first chunk of a PNG file. Raises BadImage if that chunk is not IHDR."""
  if encoded[12:16] != b'IHDR' or len(encoded) < 33:
    raise BadImage('the PNG does not start with an IHDR chunk')
  width, height = struct.unpack_from('>II', encoded, 16)
  return height, width


def read_webp(encoded: bytes) -> Header:
  """Returns the header of a WebP file; raises BadImage if there is none."""
  chunk_type, content = encoded[12:16], encoded[20:30]  # of the first chunk
  try:
    if chunk_type == b'VP8X':  # flags (4 bytes), width - 1 (3), height - 1 (3)
      width, height = (1 + int.from_bytes(content[offset:offset + 3], 'little') for offset in (4, 7))
      has_metadata = content[0] & 0x0C  # the flags of EXIF and XMP
      return Header(height, width, _webp_orientation(encoded) if has_metadata else 1)
    if chunk_type == b'VP8L' and content[0] == 0x2F:  # lossless: width - 1 and height - 1, of 14 bits each
      bits = struct.unpack_from('<I', content, 1)[0]
      return Header((bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1)
    if chunk_type == b'VP8 ' and content[3:6] == b'\x9d\x01\x2a':  # lossy: width and height, of 14 bits each
      width, height = struct.unpack_from('<HH', content, 6)
      return Header(height & 0x3FFF, width & 0x3FFF)
  except (IndexError, struct.error):  # the file ends inside the chunk
    pass
  raise BadImage(f'the WebP has no frame header in {len(encoded):,} bytes')


def read_bmp(encoded: bytes) -> Header:
  """Returns the header of a BMP file; raises BadImage if there is none."""
  try:
    is_os2 = struct.unpack_from('<I', encoded, 14)[0] == 12  # a header of OS/2 has 12 bytes and sides of 16 bits
    width, height = struct.unpack_from('<HH' if is_os2 else '<ii', encoded, 18)
  except struct.error:
    raise BadImage(f'the BMP is truncated: {len(encoded):,} bytes') from None
  return Header(abs(height), width)  # if rows are stored from the top down, the height is negative


def read_orientation(exif: bytes) -> int:
  """Returns the orientation in an EXIF block: 1 to 8, or 0 if the block has none. An invalid value counts as 1.

  The block begins with its byte order (`II` or `MM`). At byte 4 is the offset of the first directory: the number of its
  entries (2 bytes), and 12 bytes for each entry: tag (2), type (2), count (4), value (4).
  """
  byte_order = {b'II': '<', b'MM': '>'}.get(exif[:2])
  if byte_order is None:
    return 0
  try:
    directory = struct.unpack_from(f'{byte_order}I', exif, 4)[0]
    num_entries = struct.unpack_from(f'{byte_order}H', exif, directory)[0]
    for entry in range(directory + 2, directory + 2 + 12 * num_entries, 12):
      tag, value_type = struct.unpack_from(f'{byte_order}HH', exif, entry)
      if tag == ORIENTATION and value_type in (_SHORT, _LONG):
        value_format = 'H' if value_type == _SHORT else 'I'
        orientation = struct.unpack_from(f'{byte_order}{value_format}', exif, entry + 8)[0]
        return orientation if 1 <= orientation <= 8 else 1
  except struct.error:  # the block ends inside the directory
    pass
  return 0


def _find_orientation(exif: bytes, xmp: bytes) -> int:
  """Returns the orientation in an EXIF block, or else in an XMP block, 1 to 8; 1 if neither block has one."""
  # Some programs write the prefix twice.
  orientation = read_orientation(exif.removeprefix(_EXIF_PREFIX).removeprefix(_EXIF_PREFIX))
  if orientation:
    return orientation
  match = _XMP_ORIENTATION.search(xmp)
  return int(match[1]) if match else 1


def write_orientation(jpeg: bytes, orientation: int) -> bytes:
  """Returns a JPEG file with an EXIF block that holds only this orientation."""
  entry = struct.pack('>HHIHxx', ORIENTATION, _SHORT, 1, orientation)
  block = b'Exif\0\0MM\0*' + struct.pack('>IH', 8, 1) + entry + bytes(4)
  return jpeg[:2] + b'\xff\xe1' + struct.pack('>H', 2 + len(block)) + block + jpeg[2:]


def _jpeg_segments(encoded: bytes) -> Iterator[tuple[int, int]]:
  """Yields the marker of each segment of a JPEG and the offset of the length field, up to the first EOI."""
  match = _JPEG_MARKER.search(encoded, 2)
  while match:
    offset = match.end()
    marker = encoded[offset - 1]
    yield marker, offset
    if marker == _EOI:
      return
    segment_end = offset + int.from_bytes(encoded[offset:offset + 2], 'big')
    match = _JPEG_MARKER.search(encoded, segment_end)


def _png_metadata(chunk_type: bytes, content: bytes) -> tuple[bytes, bytes]:
  """Returns keyword and text of a chunk whose type is in `_PNG_METADATA`; b'' and b'' if the keyword is not needed.

  The keyword of an EXIF chunk is its type. In the other chunks, the text begins after the keyword and b'\\0':

    tEXt   text
    zTXt   method of compression (1 byte), packed text
    iTXt   is packed (1 byte), method (1 byte), language, b'\\0', translated keyword, b'\\0', text
  """
  if chunk_type == b'eXIf':
    return chunk_type, content
  keyword, _, text = content.partition(b'\0')
  if keyword not in (_PNG_EXIF_KEYWORD, _PNG_XMP_KEYWORD):
    return b'', b''
  is_packed = chunk_type == b'zTXt'
  if chunk_type == b'zTXt':
    text = text[1:]
  elif chunk_type == b'iTXt':
    is_packed = text[:1] == b'\1'
    text = text[2:].split(b'\0', 2)[-1]
  try:
    return keyword, zlib.decompressobj().decompress(text, _MAX_TEXT_BYTES) if is_packed else text
  except zlib.error:
    return keyword, b''


def _png_chunks(view: memoryview) -> Iterator[tuple[bytes, int, int]]:
  """Yields type, first byte and end of each chunk with its checksum; raises BadImage if IEND is missing."""
  start, chunk_type = len(_PNG_SIGNATURE), b''
  while chunk_type != b'IEND':
    if start + 12 > len(view):
      raise BadImage(f'the PNG is truncated: no end chunk in {len(view):,} bytes')
    length = int.from_bytes(view[start:start + 4], 'big')
    chunk_type = bytes(view[start + 4:start + 8])
    end = start + 12 + length
    if end > len(view):
      raise BadImage(f'the PNG is truncated: its chunk {chunk_type!r} extends to byte {end:,} of {len(view):,}')
    yield chunk_type, start, end
    start = end


def _webp_orientation(encoded: bytes) -> int:
  """Returns the orientation in the EXIF and XMP chunks of a WebP file, 1 to 8; 1 if there is none.

  The chunks begin at byte 12: type (4 bytes), length (4 bytes), content, and a byte of padding after an odd length.
  """
  end = min(len(encoded), 8 + int.from_bytes(encoded[4:8], 'little'))
  metadata = {b'EXIF': b'', b'XMP ': b''}
  start = 12
  while start + 8 <= end:
    chunk_type = encoded[start:start + 4]
    length = int.from_bytes(encoded[start + 4:start + 8], 'little')
    if chunk_type in metadata:
      metadata[chunk_type] = encoded[start + 8:start + 8 + length]
    start += 8 + length + length % 2
  return _find_orientation(metadata[b'EXIF'], metadata[b'XMP '])
