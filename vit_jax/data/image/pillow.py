"""Images by Pillow: GIF, TIFF, AVIF, JPEG 2000 and PPM files, and images that are Pillow's already.

Of several frames or pages the first counts. Formats are opened by their own readers, never by trying all that
Pillow has.
"""
from __future__ import annotations

import contextlib
import importlib
import io
import struct
import zlib
from collections.abc import Iterator

import numpy as np
from PIL import Image, UnidentifiedImageError

from vit_jax.core.types import HostArray
from vit_jax.data.image import headers
from vit_jax.data.image.headers import BadImage, Reading

READERS = {'gif': 'GifImagePlugin.GifImageFile', 'tiff': 'TiffImagePlugin.TiffImageFile',
           'avif': 'AvifImagePlugin.AvifImageFile', 'jp2': 'Jpeg2KImagePlugin.Jpeg2KImageFile',
           'ppm': 'PpmImagePlugin.PpmImageFile'}
"""Pillow's class for each format that it decodes here."""
_DAMAGE = (OSError, SyntaxError, ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, EOFError,
           RuntimeError, ArithmeticError, struct.error, zlib.error, UnidentifiedImageError,
           Image.DecompressionBombError)  # all were seen of damaged files
_DEEP = ('I;16', 'I;16L', 'I;16B', 'I;16N')


def decode(encoded: bytes, kind: str, how: Reading) -> HostArray:
  """`[H, W, 3] u8` of a file of one of the formats in `READERS`.

  Raises:
    BadImage: it is damaged, too large, or has pixels that are no levels of grey or colours.
  """
  with _damage(kind):
    return _read(_open(encoded, kind), how)


def read(image: Image.Image, how: Reading) -> HostArray:
  """`[H, W, 3] u8` of an image of any mode, as `image_ops.decode` gives it of the file that it was read from.

  Of 16 bits the upper 8 count. CMYK becomes RGB by OpenCV's formula, R = k - floor(C k / 256) with k = 255 - K.

  Raises:
    BadImage: its file is damaged, it is too large, or of a mode whose range is not known (32 bits).
  """
  with _damage(image.format or image.mode):
    return _read(image, how)


def find_orientation(encoded: bytes, kind: str) -> int:
  """The EXIF orientation of such a file, 1 to 8. Raises BadImage as `decode` does."""
  with _damage(kind):
    return _open(encoded, kind).getexif().get(headers.ORIENTATION, 1)


def _read(image: Image.Image, how: Reading) -> HostArray:
  width, height = image.size
  headers.check_size(height, width, how)
  is_tiff = image.format == 'TIFF'
  stored = image.getexif().get(headers.ORIENTATION, 1) if is_tiff else 1
  image.load()  # turns a TIFF as its orientation says
  pixels = _levels(image)
  if not how.upright:
    return orient(pixels, _INVERSE.get(stored, 1))
  return orient(pixels, image.getexif().get(headers.ORIENTATION, 1))


def orient(image: HostArray, orientation: int) -> HostArray:
  """`image [H, W, 3]`, stored with an EXIF orientation of 1 to 8, upright; the same array where that is 1."""
  if orientation not in range(2, 9):
    return image
  image = image[::-1 if orientation in ROWS else 1, ::-1 if orientation in COLUMNS else 1]
  return np.ascontiguousarray(image.swapaxes(0, 1) if orientation >= SWAPPED else image)


ROWS, COLUMNS, SWAPPED = (3, 4, 6, 7), (2, 3, 7, 8), 5
"""Orientations whose rows are upside down, whose columns are mirrored, and from which on the two are exchanged then."""
_INVERSE = {2: 2, 3: 3, 4: 4, 5: 5, 6: 8, 7: 7, 8: 6}


def _open(encoded: bytes, kind: str) -> Image.Image:
  module, _, name = READERS[kind].partition('.')
  try:
    opener = getattr(importlib.import_module(f'PIL.{module}'), name)
  except ImportError:
    raise BadImage(f'an image of the format {kind}, which this version of Pillow does not decode') from None
  found: Image.Image = opener(io.BytesIO(encoded))
  return found


@contextlib.contextmanager
def _damage(kind: str) -> Iterator[None]:
  """Makes a BadImage of what Pillow raises of a damaged file."""
  try:
    yield
  except BadImage:
    raise
  except _DAMAGE as error:
    if isinstance(error, OSError) and error.errno:
      raise  # of the system, not of the file
    raise BadImage(f'not a whole {kind.upper()} image: {error or type(error).__name__}') from error


def _levels(image: Image.Image) -> HostArray:
  mode = image.mode
  if mode == 'RGB':
    return np.asarray(image)
  if mode in _DEEP or (mode == 'I' and image.format in ('PNG', 'PPM')):  # which hold 16 bits at most
    grey = (np.asarray(image) >> 8).astype(np.uint8)
    return np.repeat(grey[..., None], 3, axis=2)
  if mode in ('I', 'F'):
    raise BadImage(f'its pixels have 32 bits (mode {mode}), whose range is not known; expected 8 or 16 bits. '
                   'Convert it first')
  if mode == 'CMYK':
    inks = np.asarray(image).astype(np.uint16)
    paper = 255 - inks[..., 3:]
    return (paper - (inks[..., :3] * paper >> 8)).astype(np.uint8)
  if 'transparency' in image.info:  # else Pillow warns of some kinds
    image = image.copy()
    del image.info['transparency']
  return np.asarray(image.convert('RGB'))
