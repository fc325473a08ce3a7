"""Decodes only the crop of a JPEG; other formats are decoded completely.

`transform.py` calls `find_opener` once. It calls the returned function for each image, and then `size` and `cut` of the
opened image. `open_partial` decodes only the part inside the crop, with libjpeg-turbo in nvImageCodec (the extra
`crop`), which needs no GPU. The pixels are those of a crop of the completely decoded image. `decode.decode` decodes
CMYK and damaged files, and raises its usual errors. `open_fastest` uses `open_partial` only if nvImageCodec is
installed and decodes a few sample images to the pixels of OpenCV, which contains another version of libjpeg-turbo.

Several threads may call all functions. A process loads the package once; each thread has a decoder.
"""
from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
import pathlib
import tempfile
import threading
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from vit_jax.config import schema
from vit_jax.core import extras
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.data.image import decode, headers
from vit_jax.data.image.decode import DecodedImage, Window
from vit_jax.data.image.headers import AS_STORED, DecodeOptions
from vit_jax.data.image.opencv import cv2

MIN_COLUMNS = 2
"""At least this number of columns is decoded. Colors are stored at half the width, and libjpeg-turbo interpolates a
column between its neighbors, but not if only the first column is decoded; that column would then differ."""
_PACKAGE = 'nvidia.nvimgcodec'
_DECODER_FILES = 'libjpeg_turbo_ext.so*'  # of the CPU decoder for JPEG in the package
_SUPPORTED_CHANNELS = (1, 3)  # gray and YCbCr
_thread = threading.local()  # holds the decoder of each thread
_load_lock = threading.Lock()  # only one thread fills the cache of `_load_codec`
_check_lock = threading.Lock()  # only one thread fills the cache of `_check_pixels`
log = logging.getLogger('vit_jax.data')


class Opened(Protocol):
  """An image whose parts can be cut out: a `DecodedImage` or a `PartialJpeg`."""

  @property
  def size(self) -> tuple[int, int]:
    """Height and width, px."""
    ...

  def cut(self, window: Window) -> HostArray:
    """Returns the part `[h, w, 3] u8` inside a window; raises BadImage if the part cannot be decoded."""
    ...


Opener = Callable[[bytes | HostArray, DecodeOptions], Opened]


class PartialJpeg:
  """A JPEG file of which `cut` decodes parts; call `cut` only if `is_supported()`.

  `size` is height and width, px, of the image to which windows refer: the upright image with `options.upright`, else
  the stored image.
  """

  def __init__(self, encoded: bytes, options: DecodeOptions) -> None:
    """Raises BadImage if the image is too large or truncated, and RuntimeError if nvImageCodec refuses the file."""
    header = headers.read_jpeg(encoded)
    headers.check_size(header.height, header.width, options)
    headers.check_jpeg_end(encoded)
    self._encoded, self._options = encoded, options
    self._stored_size = header.height, header.width
    self._orientation = header.orientation if options.upright else 1
    self.size = self._stored_size[::-1] if self._orientation >= decode.FIRST_TRANSPOSED else self._stored_size
    self._stream = _codec().CodeStream(encoded)

  def is_supported(self) -> bool:
    """Returns whether nvImageCodec reads the same size from the header, and can decode the colors."""
    size = self._stream.height, self._stream.width
    return self._stream.num_channels in _SUPPORTED_CHANNELS and size == self._stored_size

  def cut(self, window: Window) -> HostArray:
    """Decodes the part `[h, w, 3] u8` inside a window. Raises BadImage as `decode.decode` does."""
    top, left, height, width = window
    # With `upright`, the window is converted to the same part of the stored image.
    if self._orientation >= decode.FIRST_TRANSPOSED:
      top, left, height, width = left, top, width, height
    if self._orientation in decode.FLIPPED_ROWS:
      top = self._stored_size[0] - top - height
    if self._orientation in decode.FLIPPED_COLUMNS:
      left = self._stored_size[1] - left - width
    right = min(left + max(width, MIN_COLUMNS), self._stored_size[1])
    region = _codec().Region(top, left, top + height, right)
    decoder, params = _decoder()
    image = decoder.decode(self._stream.get_sub_code_stream(region=region), params=params)
    if image is None:  # the file is damaged
      return window.cut(decode.decode(self._encoded, self._options))
    return decode.orient(np.asarray(image)[:, :width], self._orientation)


def find_opener(choice: schema.Decode, *, is_cropped: bool) -> Opener:
  """Returns the function that opens images for the setting `data.decode`; without crops, this is `decode.open_image`.

  Raises UserError if `choice` is CROP, and nvImageCodec is not installed.
  """
  if choice is schema.Decode.CROP:
    check_installed()
  if choice is schema.Decode.FULL or not is_cropped:
    return decode.open_image
  return open_fastest if choice is schema.Decode.AUTO else open_partial


def open_partial(image: bytes | HostArray, options: DecodeOptions = AS_STORED) -> DecodedImage | PartialJpeg:
  """Opens a JPEG that nvImageCodec supports without decoding it; decodes other images completely."""
  if isinstance(image, bytes) and headers.detect_format(image) == 'jpeg':
    try:
      partial = PartialJpeg(image, options)
      if partial.is_supported():
        return partial
    except RuntimeError:  # nvImageCodec cannot read the header
      pass
  return decode.open_image(image, options)


def open_fastest(image: bytes | HostArray, options: DecodeOptions = AS_STORED) -> DecodedImage | PartialJpeg:
  """Calls `open_partial` for a JPEG if nvImageCodec decodes to the pixels of OpenCV here, else `decode.open_image`."""
  if isinstance(image, bytes) and headers.detect_format(image) == 'jpeg':
    with _check_lock:
      has_same_pixels = _check_pixels()
    if has_same_pixels:
      return open_partial(image, options)
  return decode.open_image(image, options)


@functools.cache
def _check_pixels() -> bool:
  """Returns whether nvImageCodec is installed and decodes to the pixels of OpenCV; warns if they differ.

  The result of the first call, which takes a few ms, is kept for the process.
  """
  if not is_installed():
    return False
  try:
    problems = [name for name, encoded in _make_samples().items() if not _is_equal(encoded)]
  except (ImportError, OSError, RuntimeError) as error:
    problems = [f'{type(error).__name__}: {error}']
  if problems:
    log.warning('JPEG files are decoded completely: nvImageCodec does not give the pixels of OpenCV here (%s). Set '
                'data.decode=full to avoid this warning.', ', '.join(problems))
  return not problems


def _make_samples() -> dict[str, bytes]:
  """Returns JPEG files of smooth noise by name: one for each color subsampling, a progressive file and a gray file."""
  noise = np.random.default_rng(0).integers(0, 256, (9, 11, 3), np.uint8)
  image = cv2.resize(noise, (107, 75), interpolation=cv2.INTER_CUBIC)
  options = {'4:2:0': (cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420),
             '4:2:2': (cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_422),
             '4:4:4': (cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444),
             'progressive': (cv2.IMWRITE_JPEG_PROGRESSIVE, 1)}
  samples = {name: cv2.imencode('.jpg', image, option)[1].tobytes() for name, option in options.items()}
  return {**samples, 'gray': cv2.imencode('.jpg', image[..., 0])[1].tobytes()}


def _is_equal(encoded: bytes) -> bool:
  """Returns whether some windows of a sample have the same pixels in both decoders."""
  image = decode.decode(encoded)
  opened = open_partial(encoded)
  windows = (Window(0, 0, 75, 107), Window(13, 22, 41, 70), Window(30, 51, 1, 3), Window(47, 1, 28, 17))
  return isinstance(opened, PartialJpeg) and all(
      np.array_equal(opened.cut(window), window.cut(image)) for window in windows)


def is_installed() -> bool:
  """Returns whether nvImageCodec is installed."""
  try:
    return importlib.util.find_spec(_PACKAGE) is not None
  except ModuleNotFoundError:
    return False


def check_installed() -> None:
  """Raises UserError if nvImageCodec is not installed."""
  if not is_installed():
    raise UserError('data.decode=crop: expected the Python package nvImageCodec (Linux, no GPU needed), got none. Run: '
                    f'{extras.install("crop")}, or set data.decode=full, which gives the same images.')


def _codec() -> Any:
  """Returns the package nvImageCodec, loaded once."""
  with _load_lock:
    return _load_codec()


@functools.cache
def _load_codec() -> Any:
  """Loads the package with only its CPU decoder for JPEG: the other decoders print that there is no GPU.

  At import, the package loads all decoders in the folder `$NVIMGCODEC_EXTENSIONS_PATH`: here only a link to that one.
  """
  spec = importlib.util.find_spec(_PACKAGE)
  assert spec is not None and spec.submodule_search_locations, 'call check_installed() first'
  with tempfile.TemporaryDirectory(prefix='vit_jax_codec_') as folder:
    for path in pathlib.Path(spec.submodule_search_locations[0], 'extensions').glob(_DECODER_FILES):
      os.symlink(path, pathlib.Path(folder, path.name))
    variables = {'NVIMGCODEC_EXTENSIONS_PATH': folder, 'PYNVIMGCODEC_VERBOSITY': '0'}
    previous = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
      return importlib.import_module(_PACKAGE)
    finally:
      for name, value in previous.items():
        os.environ.pop(name)
        if value is not None:
          os.environ[name] = value


def _decoder() -> tuple[Any, Any]:
  """Returns the decoder of this thread and parameters for 8-bit RGB without the EXIF orientation, created once."""
  if not hasattr(_thread, 'decoder'):
    codec = _codec()
    _thread.decoder = (
        codec.Decoder(device_id=codec.NVIMGCODEC_DEVICE_CPU_ONLY, max_num_cpu_threads=1,
                      backends=[codec.Backend(codec.BackendKind.CPU_ONLY)]),
        codec.DecodeParams(apply_exif_orientation=False))
  return _thread.decoder
