"""Decodes image files into uint8 arrays `[H, W, 3]`, RGB; the main entry point is `decode`.

`transform.py` calls `decode` for a complete image, or `open_image` for an image to be cropped. `prepare.py` calls
`read_size` and `find_orientation`, which read only the header. OpenCV decodes JPEG, PNG, WebP and BMP. Pillow decodes
GIF, TIFF, AVIF, JPEG 2000 and PPM. If a file has several frames or pages, the first one is used.
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
"""Pillow's module and class for each format that Pillow decodes here."""
PILLOW_ERRORS = (
    OSError, SyntaxError, ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, EOFError,
    RuntimeError, ArithmeticError, struct.error, zlib.error, UnidentifiedImageError, Image.DecompressionBombError)
"""Errors that Pillow raised for damaged files in tests."""
_BITS_PER_SAMPLE, _PLANAR_CONFIGURATION, _TILE_WIDTH, _TILE_LENGTH = 258, 284, 322, 323  # tags of TIFF 6.0
_SEPARATE_PLANES = 2  # value of the tag `_PLANAR_CONFIGURATION`: each channel is stored in an array of its own
USUAL_TILE = 2**24  # a tile of a TIFF may have this many pixels even if `max_pixels` is smaller
_MODES_16_BIT = ('I;16', 'I;16L', 'I;16B', 'I;16N')  # Pillow's modes of gray images
_PNG_DEPTH_OFFSET = 24  # offset of the byte of a PNG that holds the number of bits of a value
_DARK_BELOW = 2**14  # an image of 16 bits with only smaller values looks almost black in 8 bits
_has_warned = threading.Event()  # set after the first warning of `_warn_if_dark` in this process
log = logging.getLogger('vit_jax.data')
_ANY_SIZE = DecodeOptions(max_pixels=2**30)  # the limit of OpenCV

FLIPPED_ROWS = (3, 4, 6, 7)  # EXIF orientations for which `orient` flips an image top to bottom
FLIPPED_COLUMNS = (2, 3, 7, 8)  # EXIF orientations for which `orient` flips an image left to right
FIRST_TRANSPOSED = 5  # from this EXIF orientation on, `orient` transposes an image after the flips
_INVERSE_ORIENTATION = {2: 2, 3: 3, 4: 4, 5: 5, 6: 8, 7: 7, 8: 6}  # `orient(orient(x, key), value)` is x


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
  """A completely decoded image `[H, W, 3] u8`, with the same methods as `jpeg.PartialJpeg`."""
  image: HostArray

  @property
  def size(self) -> tuple[int, int]:
    """Height and width, px."""
    return self.image.shape[0], self.image.shape[1]

  def cut(self, window: Window) -> HostArray:
    """Returns the part inside a window, `[h, w, 3] u8`."""
    return window.cut(self.image)


def open_image(image: bytes | HostArray, options: DecodeOptions = AS_STORED) -> DecodedImage:
  """Decodes a stored image completely; raises the errors of `decode`."""
  return DecodedImage(decode(image, options))


def decode(encoded: bytes | HostArray, options: DecodeOptions = AS_STORED) -> HostArray:
  """Decodes a JPEG, PNG, WebP, BMP, GIF, TIFF, AVIF, JPEG 2000 or PPM file into an RGB image `[H, W, 3] u8`.

  Gray images are repeated over the channels, transparency is dropped, and CMYK is converted to RGB. Only the upper 8
  bits of 16-bit values are used; a warning reports the first 16-bit image in which all values are small.

  For damage inside a JPEG, libjpeg prints a warning to stderr. No setting of libjpeg prevents this, and redirecting
  stderr would also hide the messages of other threads.

  Args:
    encoded: the content of the file, or an image `[H, W, 3 or 1] u8` that is stored as an array.
    options: the largest allowed size, and whether the EXIF orientation is applied.

  Raises:
    BadImage: the file is not an image, is truncated, or is too large. Damaged pixels of a JPEG are not detected.
    MemoryError: there is not enough memory for the pixels.
  """
  if not isinstance(encoded, bytes):
    return np.repeat(encoded, 3, axis=2) if encoded.shape[2] == 1 else encoded
  file_format = headers.detect_format(encoded)
  if file_format in PILLOW_READERS:
    with _raising_bad_image(file_format):
      return _read_pillow(_open_pillow(encoded, file_format), options)
  flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
  image, header, encoded = read_opencv(encoded, file_format, options, flags)
  if file_format == 'png' and encoded[_PNG_DEPTH_OFFSET] == 16:
    _warn_if_upper_bits_dark(int(image.max()), encoded)
  return orient(image, header.orientation) if options.upright else image


def from_pillow(image: Image.Image, options: DecodeOptions) -> HostArray:
  """Returns the pixels `[H, W, 3] u8` of a Pillow image, as `decode` does for the file of the image.

  Raises BadImage if the file is damaged, the image is too large, or values have 32 bits, whose range is not known.
  """
  with _raising_bad_image(image.format or image.mode):
    return _read_pillow(image, options)


def read_any_mode(encoded: bytes, file_format: str, options: DecodeOptions) -> HostArray:
  """Returns the pixels that Pillow reads from a file, `[H, W]` or `[H, W, C]`, in their stored dtype and channels.

  `file_format` is a key of `PILLOW_READERS`; `options.upright` is ignored. Raises BadImage if the file is damaged, or
  the image is too large.
  """
  with _raising_bad_image(file_format):
    image = _open_pillow(encoded, file_format)
    headers.check_size(image.size[1], image.size[0], options)
    check_tiles(image, options)
    image.load()
    return np.asarray(image)


def read_opencv(encoded: bytes, file_format: str, options: DecodeOptions,
                flags: int) -> tuple[HostArray, headers.Header, bytes]:
  """Returns the decoded pixels, the header of the file, and the bytes that were decoded; see `read_header`.

  `file_format` is the result of `headers.detect_format`, and `flags` are those of `cv2.imdecode`, which alone decide
  whether the EXIF orientation is applied.

  Raises:
    BadImage: the file is not an image or is truncated, or the image is too large.
    MemoryError: there is not enough memory for the pixels.
  """
  header, encoded = read_header(encoded, file_format)
  headers.check_size(header.height, header.width, options)
  if file_format == 'jpeg':
    headers.check_jpeg_end(encoded)
  try:
    image = cv2.imdecode(np.frombuffer(encoded, np.uint8), flags)
  except cv2.error as error:
    if error.code == cv2.Error.StsNoMem:
      raise MemoryError(f'{header.width:,} x {header.height:,} px') from error
    raise BadImage(f'not an image: {error.err or error}') from error
  if image is None:
    raise _not_an_image(encoded)
  return image, header, encoded


def read_header(encoded: bytes, file_format: str) -> tuple[headers.Header, bytes]:
  """Returns the header of a file that OpenCV decodes, and the bytes to pass to OpenCV, without some chunks of a PNG.

  Raises BadImage if there is no header, or the format is not supported.
  """
  match file_format:
    case 'jpeg':
      return headers.read_jpeg(encoded), encoded
    case 'png':
      return headers.read_png(encoded)
    case 'webp':
      return headers.read_webp(encoded), encoded
    case 'bmp':
      return headers.read_bmp(encoded), encoded
  if file_format in headers.UNREAD:
    raise BadImage(f'{headers.UNREAD[file_format].name} images are not supported. Convert the image to JPEG or PNG '
                   'first')
  if not encoded:
    raise BadImage('the file is empty')
  raise _not_an_image(encoded)


def read_size(encoded: bytes) -> tuple[int, int]:
  """Returns the stored height and width, px, from the header of an image file; the pixels may be damaged.

  Raises BadImage if the file is not an image, or the image has no pixels.
  """
  file_format = headers.detect_format(encoded)
  if file_format in PILLOW_READERS:
    with _raising_bad_image(file_format):
      width, height = _open_pillow(encoded, file_format).size
  elif file_format == 'png':
    height, width = headers.read_png_size(encoded)
  else:
    height, width, _ = read_header(encoded, file_format)[0]
  headers.check_size(height, width, _ANY_SIZE)
  return height, width


def find_orientation(encoded: bytes) -> int:
  """Returns the EXIF orientation of an image file, 1 to 8; 1 if the file has none. Raises BadImage as `decode` does."""
  file_format = headers.detect_format(encoded)
  if file_format not in PILLOW_READERS:
    return read_header(encoded, file_format)[0].orientation
  with _raising_bad_image(file_format):
    orientation = _open_pillow(encoded, file_format).getexif().get(headers.ORIENTATION, 1)
    return orientation if orientation in range(1, 9) else 1


def orient(image: HostArray, orientation: int) -> HostArray:
  """Returns the upright image of the stored `image [H, W, 3]` with this EXIF orientation."""
  if orientation not in range(2, 9):  # upright, or invalid
    return image
  if orientation in FLIPPED_ROWS:
    image = image[::-1]
  if orientation in FLIPPED_COLUMNS:
    image = image[:, ::-1]
  if orientation >= FIRST_TRANSPOSED:
    image = image.swapaxes(0, 1)
  return np.ascontiguousarray(image)


def _not_an_image(encoded: bytes) -> BadImage:
  return BadImage(f'not an image, or truncated ({len(encoded):,} bytes, starting with {encoded[:4]!r})')


def _open_pillow(encoded: bytes, file_format: str) -> Image.Image:
  """Returns the image of a file, opened by Pillow's reader of this format, without reading the pixels."""
  module, _, class_name = PILLOW_READERS[file_format].partition('.')
  try:
    reader = getattr(importlib.import_module(f'PIL.{module}'), class_name)
  except ImportError:
    raise BadImage(f'an image of format {file_format}, which this version of Pillow cannot decode') from None
  image: Image.Image = reader(io.BytesIO(encoded))
  return image


def _read_pillow(image: Image.Image, options: DecodeOptions) -> HostArray:
  """Returns the pixels `[H, W, 3] u8` of an opened image; raises Pillow's own errors as well as BadImage."""
  width, height = image.size
  headers.check_size(height, width, options)
  check_tiles(image, options)
  applied_orientation = 1
  if image.format == 'TIFF':
    tags = getattr(image, 'tag_v2', {})
    bits = tags.get(_BITS_PER_SAMPLE, (1,))  # of each channel
    has_planes = tags.get(_PLANAR_CONFIGURATION) == _SEPARATE_PLANES and len(bits) > 1
    # Pillow decodes uncompressed planes of more than 8 bits wrongly.
    if has_planes and max(bits) > 8 and image.info.get('compression') == 'raw':
      raise BadImage(f'a TIFF of {len(bits)} planes with {max(bits)} bits: expected channels that are stored together '
                     'or compressed. Save it with planarconfig=contig')
    applied_orientation = image.getexif().get(headers.ORIENTATION, 1)
  image.load()  # applies the orientation of a TIFF, and removes it from the EXIF block
  pixels = _to_rgb(image)
  if not options.upright:
    return orient(pixels, _INVERSE_ORIENTATION.get(applied_orientation, 1))
  return orient(pixels, image.getexif().get(headers.ORIENTATION, 1))


def check_tiles(image: Image.Image, options: DecodeOptions) -> None:
  """Raises BadImage if a tile of a TIFF has more pixels than an image may have: Pillow decodes complete tiles."""
  width, height = (int(getattr(image, 'tag_v2', {}).get(tag, 1)) for tag in (_TILE_WIDTH, _TILE_LENGTH))
  if width * height > max(options.max_pixels, USUAL_TILE):
    raise BadImage(f'the TIFF has tiles of {width:,} x {height:,} px: expected at most {options.max_pixels:,} pixels. '
                   'Save it with smaller tiles')


def _to_rgb(image: Image.Image) -> HostArray:
  """Returns the pixels of a loaded image of any mode as RGB, `[H, W, 3] u8`.

  CMYK is converted by OpenCV's formula: R = k - floor(C k / 256) with k = 255 - K, and the same for G and B.
  """
  mode = image.mode
  num_bits = max(getattr(image, 'tag_v2', {}).get(_BITS_PER_SAMPLE, (16,)))  # only a TIFF has the tag
  if mode == 'RGB':
    pixels = np.asarray(image)
    if image.format == 'TIFF' and num_bits == 16:
      _warn_if_upper_bits_dark(int(pixels.max()))
    return pixels
  if mode in _MODES_16_BIT or (mode == 'I' and image.format in ('PNG', 'PPM')):  # PNG and PPM have at most 16 bits
    values = np.asarray(image)
    if num_bits == 16:
      _warn_if_dark(int(values.max()))
    gray = (values >> min(num_bits, 16) - 8).astype(np.uint8)
    return np.repeat(gray[..., None], 3, axis=2)
  if mode in ('I', 'F'):
    raise BadImage(f'pixels: expected 8 or 16 bits, got 32 bits (mode {mode}), whose range is not known. '
                   'Convert the image first')
  if mode == 'CMYK':
    cmyk = np.asarray(image).astype(np.uint16)
    white = 255 - cmyk[..., 3:]
    return (white - (cmyk[..., :3] * white >> 8)).astype(np.uint8)
  if 'transparency' in image.info:  # Pillow warns about some kinds of transparency when it converts them
    image = image.copy()
    del image.info['transparency']
  return np.asarray(image.convert('RGB'))


def _warn_if_upper_bits_dark(max_upper: int, encoded: bytes = b'') -> None:
  """Calls `_warn_if_dark` for an image of 16 bits in which the largest value of the upper 8 bits is `max_upper`.

  If `max_upper` is 0, the file `encoded` is decoded again with all bits; without a file, there is no warning.
  """
  max_value = (max_upper + 1 << 8) - 1 if max_upper else 0
  if encoded and not max_upper:
    pixels = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_ANYDEPTH)
    max_value = 0 if pixels is None else int(pixels.max())
  _warn_if_dark(max_value)


def _warn_if_dark(max_value: int) -> None:
  """Warns, once in a process, that an image of 16 bits is dark if `max_value` is small, but not 0."""
  if not 0 < max_value < _DARK_BELOW or _has_warned.is_set():
    return
  _has_warned.set()
  log.warning('An image of 16 bits has values up to %s of 65,535. Its upper 8 bits are used, so it is dark: its levels '
              'are 0 to %s of 255. If your images have values of %s bits, set data.channels=1, which keeps all bits of '
              'gray images, or scale them to 16 bits first.',
              f'{max_value:,}', max_value >> 8, max_value.bit_length())


@contextlib.contextmanager
def _raising_bad_image(file_format: str) -> Iterator[None]:
  """Raises BadImage in place of the errors that Pillow raises for a damaged file of this format."""
  try:
    yield
  except BadImage:
    raise
  except PILLOW_ERRORS as error:
    if isinstance(error, OSError) and error.errno:
      raise  # an error of the operating system, not of the file
    raise BadImage(f'not a complete {file_format.upper()} image: {error or type(error).__name__}') from error
