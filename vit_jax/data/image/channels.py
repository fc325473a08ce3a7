"""Images whose channels are not RGB, such as those of satellites and microscopes: `[H, W, C] f32` in stored units.

TIFF, `.npy` and every format of `decode.py` are read with all their channels and bits: nothing is scaled or cut to 8
bits, and 16-bit integers are exact in float32. `.npy` files are `[H, W]`, `[H, W, C]` or `[C, H, W]`. The channels of a
TIFF are its samples or pages; Pillow reads one channel, `tifffile` (extra `tiff`) several.

`transform.py` calls `read` in place of `decode.decode`. `prepare.py` calls `sums` for each image, adds the results of
all images, and calls `statistics` with the total.
"""
from __future__ import annotations

import io
import lzma
import math
import zlib
from typing import Any

import numpy as np

from vit_jax.config.schema.data import RGB
from vit_jax.core import archives, extras
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.data.image import decode, headers
from vit_jax.data.image.headers import BadImage, DecodeOptions
from vit_jax.data.image.opencv import cv2

_NUMPY = b'\x93NUMPY'  # first bytes of a .npy file
_SPARE_BYTES = 2**16   # programs may write so many bytes after the pixels of a strip
_MOST_LZMA = 2**28     # bytes of memory for the dictionary of an LZMA stream
_ZLIB, _LZMA, _PACK_BITS = (8, 32946), (34925,), (32773,)  # compressions of a TIFF that tifffile itself unpacks


def read(image: bytes | HostArray, channels: int, options: DecodeOptions) -> HostArray:
  """Returns a stored image with this number of channels, `[H, W, C] f32`.

  Raises:
    BadImage: it is damaged, too large, has another number of channels, or values that are not finite numbers.
    UserError: it is a TIFF of several channels, and tifffile is not installed.
  """
  pixels = _decode(image, channels, options) if isinstance(image, bytes) else image
  pixels = pixels[..., None] if pixels.ndim == 2 else pixels
  if pixels.ndim == 3 and pixels.shape[2] != channels and pixels.shape[0] == channels:
    pixels = np.moveaxis(pixels, 0, 2)
  if pixels.ndim != 3 or pixels.shape[2] != channels:
    raise BadImage(f'channels: expected {channels} (data.channels), got pixels of the shape {pixels.shape}')
  if pixels.dtype.kind not in 'uifb':
    raise BadImage(f'pixels: expected integers or floating-point numbers, got {pixels.dtype}')
  if 0 in pixels.shape[:2]:
    raise BadImage(f'pixels: expected at least 1 x 1 px, got {pixels.shape[1]} x {pixels.shape[0]}')
  with np.errstate(over='ignore'):
    values = np.ascontiguousarray(pixels, np.float32)
  if pixels.dtype.kind == 'f' and not np.isfinite(values).all():
    raise BadImage('pixels: expected finite numbers, got NaN or infinity. Replace them, for example by the mean')
  return values


def _decode(encoded: bytes, channels: int, options: DecodeOptions) -> HostArray:
  """Returns the pixels of a file as it stores them, `[H, W]`, `[H, W, C]` or `[C, H, W]`."""
  if encoded.startswith(_NUMPY):
    try:
      array = archives.parse_npy(bytearray(encoded))  # compares the size of the file with its header
    except ValueError as error:
      raise BadImage(f'not a complete .npy file: {error}') from error
    if array.ndim not in (2, 3):
      raise BadImage(f'the .npy file: expected an array [H, W, {channels}] of numbers, got the shape {array.shape} of '
                     f'{array.dtype} in {len(encoded):,} bytes')
    if array.size > options.max_pixels * channels:
      raise BadImage(f'the .npy file: expected at most {options.max_pixels:,} pixels, got the shape {array.shape}')
    return array
  kind = headers.detect_format(encoded)
  if kind == 'tiff':
    return _read_tiff(encoded, channels, options)
  if kind in decode.PILLOW_READERS:
    return decode.read_any_mode(encoded, kind, options)
  pixels = decode.read_opencv(encoded, kind, options, cv2.IMREAD_UNCHANGED)[0]
  if pixels.ndim == 3 and pixels.shape[2] >= RGB:  # OpenCV returns BGR, or BGR and other channels
    return pixels[..., [2, 1, 0, *range(3, pixels.shape[2])]]
  return pixels


def _read_tiff(encoded: bytes, channels: int, options: DecodeOptions) -> HostArray:
  """Returns the pixels of a TIFF as `_decode` does: by Pillow for one channel, else by tifffile."""
  if channels == 1:
    return decode.read_any_mode(encoded, 'tiff', options)
  tifffile = extras.load('tifffile', 'tiff', f'TIFF files of {channels} channels')
  try:
    with tifffile.TiffFile(io.BytesIO(encoded)) as file:
      series = file.series[0]
      if math.prod(series.shape) > options.max_pixels * channels:
        raise BadImage(f'the TIFF: expected at most {options.max_pixels:,} pixels, got the shape {series.shape}')
      for page in series.pages:
        if page is not None:
          _check_strips(page, encoded, max(options.max_pixels, decode.USUAL_TILE) * channels)
      return np.asarray(series.asarray())
  except (BadImage, UserError):
    raise
  except Exception as error:  # tifffile raises errors of many kinds for damaged files
    if isinstance(error, ImportError) or "requires the 'imagecodecs' package" in str(error):
      raise UserError(f'TIFF files of {channels} channels: expected no compression, or Deflate, LZMA or PackBits, got '
                      f'{getattr(series.keyframe.compression, "name", "another")}. Write the files with one of '
                      'these.') from error
    raise BadImage(f'not a complete TIFF image: {error or type(error).__name__}') from error


def _check_strips(page: Any, encoded: bytes, most_values: int) -> None:
  """Raises BadImage if a strip or tile of a TIFF unpacks to more bytes than its pixels; tifffile would unpack them all.

  Args:
    page: the `TiffPage` or `TiffFrame` of tifffile.
    encoded: the content of the file.
    most_values: the largest number of values of a strip or tile.
  """
  keyframe, chunk_shape = page.keyframe, page.keyframe.chunks
  num_values, compression = math.prod(chunk_shape), int(keyframe.compression)
  num_bytes = num_values * keyframe.dtype.itemsize
  if num_values > most_values:
    raise BadImage(f'the TIFF: expected strips or tiles of at most {most_values:,} values, got the shape '
                   f'{chunk_shape}')
  for start, length in zip(page.dataoffsets, page.databytecounts, strict=True):
    packed, most_bytes = encoded[start:start + length], num_bytes + _SPARE_BYTES
    if compression in _ZLIB:
      is_longer = len(zlib.decompressobj().decompress(packed, most_bytes + 1)) > most_bytes
    elif compression in _LZMA:
      is_longer = len(lzma.LZMADecompressor(memlimit=_MOST_LZMA).decompress(packed, most_bytes + 1)) > most_bytes
    else:  # PackBits: two bytes become at most 128
      is_longer = compression in _PACK_BITS and len(packed) > 2 * most_bytes
    if is_longer:
      raise BadImage(f'the TIFF: expected a strip or tile that is unpacked to {num_bytes:,} bytes, the pixels of '
                     f'{chunk_shape}, got more in {length:,} bytes')


def statistics(sums: Any) -> tuple[list[float], list[float]]:
  """Returns mean and standard deviation of each channel, given the total `[3, C]` f64 of `sums` over all images."""
  count, total, squares = np.asarray(sums, np.float64)
  mean = total / count
  return mean.tolist(), np.sqrt(np.maximum(squares / count - mean ** 2, 0.)).tolist()


def sums(pixels: HostArray) -> HostArray:
  """Returns `[3, C]` f64 of an image `[H, W, C]`: number of pixels, sum and sum of squares, for `statistics`."""
  values = pixels.reshape(-1, pixels.shape[-1]).astype(np.float64)
  return np.stack([np.full(values.shape[1], len(values), np.float64), values.sum(0), (values ** 2).sum(0)])
