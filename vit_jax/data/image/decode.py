"""Decodes image files into uint8 arrays `[H, W, 3]`, RGB.

`transform.py` calls `decode` for a complete image, or `open_image` for an image to be cropped; `prepare.py` calls
`read_size` and `find_orientation`, which read only the header. OpenCV decodes JPEG, PNG, WebP and BMP; Pillow decodes
GIF, TIFF, AVIF, JPEG 2000 and PPM, each format by its own reader. If a file has several frames or pages, the first one
is used. This module does not know recipes, sources or batches.
"""
from __future__ import annotations

import contextlib
import importlib
import io
import logging
import struct
import threading
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from vit_jax.core.types import HostArray
from vit_jax.data.image import headers
from vit_jax.data.image.headers import AS_STORED, BadImage, DecodeOptions
from vit_jax.data.image.opencv import cv2

PILLOW_READERS = {'gif': 'GifImagePlugin.GifImageFile', 'tiff': 'TiffImagePlugin.TiffImageFile',
                  'avif': 'AvifImagePlugin.AvifImageFile', 'jp2': 'Jpeg2KImagePlugin.Jpeg2KImageFile',
                  'ppm': 'PpmImagePlugin.PpmImageFile'}
"""Pillow's module and class of each format that Pillow decodes here."""
DAMAGE = (OSError, SyntaxError, ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, EOFError,
           RuntimeError, ArithmeticError, struct.error, zlib.error, UnidentifiedImageError,
           Image.DecompressionBombError)  # each of them was raised by Pillow for some damaged file
_BITS, _PLANES, _SEPARATE = 258, 284, 2  # tags of TIFF files, and the value for planes that follow each other
_TILE = 322, 323  # width and height, tags of TIFF files
USUAL_TILE = 2**24  # pixels that a tile of a TIFF may have even if `max_pixels` is smaller
_SIXTEEN_BITS = ('I;16', 'I;16L', 'I;16B', 'I;16N')
_PNG_DEPTH = 24  # byte of a PNG with the bits of a value
_DEEP, _DARK = 16, 2**14  # bits of a value; an image of 16 bits whose values are all smaller is too dark
_warned = threading.Event()
log = logging.getLogger('vit_jax.data')
_ANY_SIZE = DecodeOptions(max_pixels=2**30)  # the limit of OpenCV

FLIPPED_ROWS, FLIPPED_COLUMNS, FIRST_TRANSPOSED = (3, 4, 6, 7), (2, 3, 7, 8), 5
"""EXIF orientations that are stored upside down, mirrored, and (from 5 on) transposed after that."""
_INVERSE = {2: 2, 3: 3, 4: 4, 5: 5, 6: 8, 7: 7, 8: 6}


class Window(NamedTuple):
  """A rectangle of an image, in px."""
  top: int
  left: int
  height: int
  width: int

  def cut(self, image: HostArray) -> HostArray:
    """Returns the part of `image [H, W, 3]` inside the window; a view."""
    return image[self.top:self.top + self.height, self.left:self.left + self.width]


class DecodedImage(NamedTuple):
  """A decoded image `[H, W, 3] u8`, to be cropped."""
  image: HostArray

  @property
  def size(self) -> tuple[int, int]:
    """Height and width, px."""
    return self.image.shape[0], self.image.shape[1]

  def cut(self, window: Window) -> HostArray:
    """Returns the part inside a window, `[h, w, 3] u8`."""
    return window.cut(self.image)


def open_image(image: bytes | HostArray, options: DecodeOptions = AS_STORED) -> DecodedImage:
  """Decodes a stored image."""
  return DecodedImage(decode(image, options))


def decode(encoded: bytes | HostArray, options: DecodeOptions = AS_STORED) -> HostArray:
  """Decodes a JPEG, PNG, WebP, BMP, GIF, TIFF, AVIF, JPEG 2000 or PPM file into an RGB image `[H, W, 3] u8`.

  Gray images are repeated over the channels, transparency is dropped, and CMYK is converted to RGB. The upper 8 of 16
  bits are used; a warning names the first image of 16 bits that has only small values. libjpeg prints a warning to
  stderr for damage inside a JPEG. It has no setting that stops this, and redirecting stderr would also hide the
  messages of other threads.

  Args:
    encoded: the content of the file, or an image `[H, W, 3 or 1] u8` that is stored as an array.
    options: the largest allowed size, and whether the EXIF orientation is applied.

  Raises:
    BadImage: not an image, truncated, or too large. Damage that leaves a JPEG parseable is not detected.
    MemoryError: there is not enough memory for the pixels.
  """
  if not isinstance(encoded, bytes):
    return np.repeat(encoded, 3, axis=2) if encoded.shape[2] == 1 else encoded
  kind = headers.detect_format(encoded)
  if kind in PILLOW_READERS:
    with _as_bad_image(kind):
      return _read(_open(encoded, kind), options)
  image, header, encoded = read_opencv(encoded, kind, options, cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION)
  if kind == 'png' and encoded[_PNG_DEPTH] == _DEEP:
    _compare_range(int(image.max()), encoded)
  return orient(image, header.orientation) if options.upright else image


def from_pillow(image: Image.Image, options: DecodeOptions) -> HostArray:
  """Returns `[H, W, 3] u8` of a Pillow image of any mode, equal to what `decode` gives for its file.

  The upper 8 of 16 bits are used. CMYK is converted by OpenCV's formula, R = k - floor(C k / 256) with k = 255 - K.

  Raises:
    BadImage: the file is damaged, the image is too large, or its mode has no known range (32 bits).
  """
  with _as_bad_image(image.format or image.mode):
    return _read(image, options)


def read_any_mode(encoded: bytes, kind: str, options: DecodeOptions) -> HostArray:
  """Returns the pixels that Pillow reads from a file, `[H, W]` or `[H, W, C]`, with all bits, as they are stored.

  Raises:
    BadImage: not a complete image, or too large.
  """
  with _as_bad_image(kind):
    image = _open(encoded, kind)
    headers.check_size(image.size[1], image.size[0], options)
    check_tiles(image, options)
    image.load()
    return np.asarray(image)


def read_opencv(encoded: bytes, kind: str, options: DecodeOptions,
                flags: int) -> tuple[HostArray, headers.Header, bytes]:
  """Returns the pixels that OpenCV decodes with these flags, the header of the file, and the bytes that were decoded.

  Raises:
    BadImage: not an image, truncated, or too large.
    MemoryError: there is not enough memory for the pixels.
  """
  header, encoded = read_header(encoded, kind)
  headers.check_size(header.height, header.width, options)
  if kind == 'jpeg':
    headers.check_jpeg_end(encoded)
  try:
    image = cv2.imdecode(np.frombuffer(encoded, np.uint8), flags)
  except cv2.error as error:
    if error.code == cv2.Error.StsNoMem:
      raise MemoryError(f'{header.width:,} x {header.height:,} px') from error
    raise BadImage(f'not an image: {error.err or error}') from error
  if image is None:
    raise _unknown(encoded)
  return image, header, encoded


def read_header(encoded: bytes, kind: str) -> tuple[headers.Header, bytes]:
  """Returns the header of a file in a format that OpenCV decodes, and the bytes to pass to OpenCV.

  Raises:
    BadImage: there is no header, or the format is not supported.
  """
  match kind:
    case 'jpeg':
      return headers.read_jpeg(encoded), encoded
    case 'png':
      return headers.read_png(encoded)
    case 'webp':
      return headers.read_webp(encoded), encoded
    case 'bmp':
      return headers.read_bmp(encoded), encoded
  if kind in headers.UNREAD:
    raise BadImage(f'{headers.UNREAD[kind].name} images are not supported. Convert the image to JPEG or PNG first')
  raise _unknown(encoded) if encoded else BadImage('the file is empty')


def read_size(encoded: bytes) -> tuple[int, int]:
  """Returns height and width of an image file in px, from its header; its pixels may be damaged.

  Raises:
    BadImage: it is not an image file, or has no pixels.
  """
  kind = headers.detect_format(encoded)
  if kind in PILLOW_READERS:
    with _as_bad_image(kind):
      width, height = _open(encoded, kind).size
  elif kind == 'png':
    height, width = headers.read_png_size(encoded)
  else:
    height, width, _ = read_header(encoded, kind)[0]
  headers.check_size(height, width, _ANY_SIZE)
  return height, width


def find_orientation(encoded: bytes) -> int:
  """Returns the EXIF orientation of an image file, 1 to 8; 1 if it has none. Raises BadImage as `decode` does."""
  kind = headers.detect_format(encoded)
  if kind not in PILLOW_READERS:
    return read_header(encoded, kind)[0].orientation
  with _as_bad_image(kind):
    found = _open(encoded, kind).getexif().get(headers.ORIENTATION, 1)
    return found if found in range(1, 9) else 1


def orient(image: HostArray, orientation: int) -> HostArray:
  """Returns `image [H, W, 3]`, stored with an EXIF orientation from 1 to 8, upright; the same array for 1."""
  if orientation not in range(2, 9):
    return image
  image = image[::-1 if orientation in FLIPPED_ROWS else 1, ::-1 if orientation in FLIPPED_COLUMNS else 1]
  return np.ascontiguousarray(image.swapaxes(0, 1) if orientation >= FIRST_TRANSPOSED else image)


def _unknown(encoded: bytes) -> BadImage:
  return BadImage(f'not an image, or truncated ({len(encoded):,} bytes, starting with {encoded[:4]!r})')


def _open(encoded: bytes, kind: str) -> Image.Image:
  """Returns a file as Pillow's reader of its format opens it, before pixels are read."""
  module, _, name = PILLOW_READERS[kind].partition('.')
  try:
    opener = getattr(importlib.import_module(f'PIL.{module}'), name)
  except ImportError:
    raise BadImage(f'an image of format {kind}, which this version of Pillow cannot decode') from None
  found: Image.Image = opener(io.BytesIO(encoded))
  return found


def _read(image: Image.Image, options: DecodeOptions) -> HostArray:
  """Returns an opened image as `from_pillow` does."""
  width, height = image.size
  headers.check_size(height, width, options)
  check_tiles(image, options)
  stored = 1
  if image.format == 'TIFF':
    tags = getattr(image, 'tag_v2', {})
    bits = tags.get(_BITS, (1,))
    # Pillow decodes planes of more than 8 bits wrongly if they are not compressed.
    if tags.get(_PLANES) == _SEPARATE and len(bits) > 1 and max(bits) > 8 and image.info.get('compression') == 'raw':
      raise BadImage(f'a TIFF of {len(bits)} planes with {max(bits)} bits: expected channels that are stored together '
                     'or compressed. Save it with planarconfig=contig')
    stored = image.getexif().get(headers.ORIENTATION, 1)
  image.load()  # applies the orientation of a TIFF
  pixels = _levels(image)
  if not options.upright:
    return orient(pixels, _INVERSE.get(stored, 1))
  return orient(pixels, image.getexif().get(headers.ORIENTATION, 1))


def check_tiles(image: Image.Image, options: DecodeOptions) -> None:
  """Raises BadImage if a TIFF has tiles that are larger than an image may be; they are decoded completely."""
  width, height = (int(getattr(image, 'tag_v2', {}).get(tag, 1)) for tag in _TILE)
  if width * height > max(options.max_pixels, USUAL_TILE):
    raise BadImage(f'the TIFF has tiles of {width:,} x {height:,} px: expected at most {options.max_pixels:,} pixels. '
                   'Save it with smaller tiles')


def _levels(image: Image.Image) -> HostArray:
  """Returns a loaded image of any mode as RGB in 8 bits; see `from_pillow`."""
  mode, bits = image.mode, max(getattr(image, 'tag_v2', {}).get(_BITS, (_DEEP,)))
  if mode == 'RGB':
    pixels = np.asarray(image)
    if image.format == 'TIFF' and bits == _DEEP:
      _compare_range(int(pixels.max()))
    return pixels
  if mode in _SIXTEEN_BITS or (mode == 'I' and image.format in ('PNG', 'PPM')):  # which have at most 16 bits
    values = np.asarray(image)
    if bits == _DEEP:
      _warn_of_range(int(values.max()))
    gray = (values >> min(bits, _DEEP) - 8).astype(np.uint8)
    return np.repeat(gray[..., None], 3, axis=2)
  if mode in ('I', 'F'):
    raise BadImage(f'pixels: expected 8 or 16 bits, got 32 bits (mode {mode}), whose range is not known. '
                   'Convert the image first')
  if mode == 'CMYK':
    inks = np.asarray(image).astype(np.uint16)
    paper = 255 - inks[..., 3:]
    return (paper - (inks[..., :3] * paper >> 8)).astype(np.uint8)
  if 'transparency' in image.info:  # Pillow warns about some kinds of it
    image = image.copy()
    del image.info['transparency']
  return np.asarray(image.convert('RGB'))


def _compare_range(level: int, encoded: bytes = b'') -> None:
  """Warns as `_warn_of_range` does, given the largest of the upper 8 bits, and the file to read if these are 0."""
  most = (level + 1 << 8) - 1 if level else 0
  if encoded and not level:  # black, or fewer than 9 bits
    whole = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_ANYDEPTH)
    most = 0 if whole is None else int(whole.max())
  _warn_of_range(most)


def _warn_of_range(most: int) -> None:
  """Warns once about images of 16 bits with values up to `most`, if these are small."""
  if not 0 < most < _DARK or _warned.is_set():
    return
  _warned.set()
  bits = most.bit_length()
  log.warning('An image of 16 bits has values up to %s of 65,535. Its upper 8 bits are used, so it is dark: its levels '
              'are 0 to %s of 255. If your images have values of %s bits, set data.channels=1, which keeps all bits of '
              'gray images, or scale them to 16 bits first.', f'{most:,}', most >> 8, bits)


@contextlib.contextmanager
def _as_bad_image(kind: str) -> Iterator[None]:
  """Raises BadImage in place of the errors that Pillow raises for a damaged file."""
  try:
    yield
  except BadImage:
    raise
  except DAMAGE as error:
    if isinstance(error, OSError) and error.errno:
      raise  # an error of the system, not of the file
    raise BadImage(f'not a complete {kind.upper()} image: {error or type(error).__name__}') from error
