"""Images whose channels are not RGB, such as those of satellites and microscopes: `[H, W, C] f32` in stored units.

TIFF, `.npy` and every format of `decode.py` keep all channels and bits: values are not scaled or cut to 8 bits, and
16-bit integers are exact in float32. A `.npy` file holds `[H, W]`, `[H, W, C]` or `[C, H, W]`. The channels of a TIFF
are samples or pages. Pillow reads a TIFF of one channel, `tifffile` (extra `tiff`) a TIFF of several.

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

_NPY_SIGNATURE = b'\x93NUMPY'  # first bytes of a .npy file
_MAX_SPARE_BYTES = 2**16  # some programs write up to this many bytes after the pixels of a strip
_MAX_LZMA_BYTES = 2**28   # memory for the dictionary of an LZMA stream
_DEFLATE, _LZMA, _PACK_BITS = (8, 32946), 34925, 32773  # values of the tag Compression that tifffile itself unpacks


def read(image: bytes | HostArray, num_channels: int, options: DecodeOptions) -> HostArray:
  """Returns an image with `num_channels` channels as `[H, W, C] f32`, without applying its EXIF orientation.

  `image` is the content of a file, or an array `[H, W]`, `[H, W, C]` or `[C, H, W]`.

  Raises:
    BadImage: the image is damaged, too large, has another number of channels, or values that are not finite numbers.
    UserError: the image is a TIFF of several channels, and tifffile is not installed or cannot unpack the TIFF.
  """
  pixels = _decode(image, num_channels, options) if isinstance(image, bytes) else image
  pixels = pixels[..., None] if pixels.ndim == 2 else pixels
  if pixels.ndim == 3 and pixels.shape[2] != num_channels and pixels.shape[0] == num_channels:
    pixels = np.moveaxis(pixels, 0, 2)
  if pixels.ndim != 3 or pixels.shape[2] != num_channels:
    raise BadImage(f'channels: expected {num_channels} (data.channels), got pixels of the shape {pixels.shape}')
  if pixels.dtype.kind not in 'uifb':
    raise BadImage(f'pixels: expected integers or floating-point numbers, got {pixels.dtype}')
  if 0 in pixels.shape[:2]:
    raise BadImage(f'pixels: expected at least 1 x 1 px, got {pixels.shape[1]} x {pixels.shape[0]}')
  with np.errstate(over='ignore'):
    values = np.ascontiguousarray(pixels, np.float32)
  if pixels.dtype.kind == 'f' and not np.isfinite(values).all():
    raise BadImage('pixels: expected finite numbers, got NaN or infinity. Replace them, for example by the mean')
  return values


def _decode(encoded: bytes, num_channels: int, options: DecodeOptions) -> HostArray:
  """Returns the stored pixels of a file: `[H, W]`, `[H, W, C]` or `[C, H, W]`."""
  if encoded.startswith(_NPY_SIGNATURE):
    try:
      array = archives.parse_npy(bytearray(encoded))  # compares the size of the file with the size in the header
    except ValueError as error:
      raise BadImage(f'not a complete .npy file: {error}') from error
    if array.ndim not in (2, 3):
      raise BadImage(f'the .npy file: expected an array [H, W, {num_channels}] of numbers, got the shape {array.shape} '
                     f'of {array.dtype} in {len(encoded):,} bytes')
    if array.size > options.max_pixels * num_channels:
      raise BadImage(f'the .npy file: expected at most {options.max_pixels:,} pixels, got the shape {array.shape}')
    return array
  file_format = headers.detect_format(encoded)
  if file_format == 'tiff':
    return _read_tiff(encoded, num_channels, options)
  if file_format in decode.PILLOW_READERS:
    return decode.read_any_mode(encoded, file_format, options)
  pixels = decode.read_opencv(encoded, file_format, options, cv2.IMREAD_UNCHANGED)[0]
  if pixels.ndim == 3 and pixels.shape[2] >= RGB:  # OpenCV returns BGR, or BGR and further channels
    return pixels[..., [2, 1, 0, *range(3, pixels.shape[2])]]
  return pixels


def _read_tiff(encoded: bytes, num_channels: int, options: DecodeOptions) -> HostArray:
  """Returns the stored pixels of a TIFF as `_decode` does; Pillow reads one channel, tifffile several."""
  if num_channels == 1:
    return decode.read_any_mode(encoded, 'tiff', options)
  tifffile = extras.load('tifffile', 'tiff', f'TIFF files of {num_channels} channels')
  try:
    with tifffile.TiffFile(io.BytesIO(encoded)) as file:
      series = file.series[0]
      if math.prod(series.shape) > options.max_pixels * num_channels:
        raise BadImage(f'the TIFF: expected at most {options.max_pixels:,} pixels, got the shape {series.shape}')
      for page in series.pages:
        if page is not None:
          _check_strips(page, encoded, max(options.max_pixels, decode.USUAL_TILE) * num_channels)
      return np.asarray(series.asarray())
  except (BadImage, UserError):
    raise
  except Exception as error:  # tifffile raises errors of many kinds for damaged files
    if isinstance(error, ImportError) or "requires the 'imagecodecs' package" in str(error):
      raise UserError(f'TIFF files of {num_channels} channels: expected no compression, or Deflate, LZMA or PackBits, '
                      f'got {getattr(series.keyframe.compression, "name", "another")}. Write the files with one of '
                      'these.') from error
    raise BadImage(f'not a complete TIFF image: {error or type(error).__name__}') from error


def _check_strips(page: Any, encoded: bytes, max_values: int) -> None:
  """Raises BadImage if a strip or tile of a TIFF unpacks to more bytes than its pixels. tifffile has no limit.

  Args:
    page: the `TiffPage` or `TiffFrame` of tifffile.
    encoded: the content of the file.
    max_values: the largest allowed number of values of a strip or tile.
  """
  chunk_shape = page.keyframe.chunks  # of each strip or tile
  num_values = math.prod(chunk_shape)
  if num_values > max_values:
    raise BadImage(f'the TIFF: expected strips or tiles of at most {max_values:,} values, got the shape {chunk_shape}')
  compression = int(page.keyframe.compression)
  num_bytes = num_values * page.keyframe.dtype.itemsize
  max_bytes = num_bytes + _MAX_SPARE_BYTES
  for start, length in zip(page.dataoffsets, page.databytecounts, strict=True):
    packed = encoded[start:start + length]
    if compression in _DEFLATE:
      is_too_long = len(zlib.decompressobj().decompress(packed, max_bytes + 1)) > max_bytes
    elif compression == _LZMA:
      is_too_long = len(lzma.LZMADecompressor(memlimit=_MAX_LZMA_BYTES).decompress(packed, max_bytes + 1)) > max_bytes
    else:  # two bytes of PackBits become at most 128 bytes
      is_too_long = compression == _PACK_BITS and len(packed) > 2 * max_bytes
    if is_too_long:
      raise BadImage(f'the TIFF: expected a strip or tile that is unpacked to {num_bytes:,} bytes, the pixels of '
                     f'{chunk_shape}, got more in {length:,} bytes')


def statistics(totals: Any) -> tuple[list[float], list[float]]:
  """Returns mean and standard deviation of each channel from `totals [3, C] f64`, the results of `sums` added up."""
  num_pixels, sum_of_values, sum_of_squares = np.asarray(totals, np.float64)
  mean = sum_of_values / num_pixels
  return mean.tolist(), np.sqrt(np.maximum(sum_of_squares / num_pixels - mean ** 2, 0.)).tolist()


def sums(pixels: HostArray) -> HostArray:
  """Returns `[3, C] f64` of an image `[H, W, C]`: number of pixels, sum and sum of squares of each channel."""
  values = pixels.reshape(-1, pixels.shape[-1]).astype(np.float64)
  return np.stack([np.full(values.shape[1], len(values), np.float64), values.sum(0), (values ** 2).sum(0)])
