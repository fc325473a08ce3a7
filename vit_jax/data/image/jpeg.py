"""Decodes only the crop of a JPEG; other formats are decoded completely.

`transform.py` calls `find_opener` once, the returned function for each image, and then `size` and `cut` of its result.
`open_partial` decodes only the part inside the crop, with nvImageCodec's libjpeg-turbo: the extra `crop` of setup.py.
It needs no GPU, and gives the same pixels as cropping the decoded image. CMYK and damaged files are decoded by
`decode.decode`, with the same error messages. `open_fastest` does the same where the library is installed, after it has
compared the pixels of a few images on this machine: OpenCV has another build of libjpeg-turbo, and the versions of both
change independently.
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

FEWEST_COLUMNS = 2
"""Columns that are decoded at least: libjpeg-turbo interpolates colors of half the size from both sides, but a single
first column from no side, which gives other pixels."""
_PACKAGE, _EXTENSION = 'nvidia.nvimgcodec', 'libjpeg_turbo_ext.so*'
_CHANNELS = (1, 3)  # gray and YCbCr
_thread, _lock, _comparing = threading.local(), threading.Lock(), threading.Lock()
log = logging.getLogger('vit_jax.data')


class Opened(Protocol):
  """An image whose parts can be cut out."""

  @property
  def size(self) -> tuple[int, int]:
    """Height and width, px."""
    ...

  def cut(self, window: Window) -> HostArray:
    """Returns the part `[h, w, 3] u8` inside a window. Raises BadImage if it cannot be decoded."""
    ...


Opener = Callable[[bytes | HostArray, DecodeOptions], Opened]


class PartialJpeg:
  """A JPEG file whose parts can be decoded; `size` is the height and width that crops refer to, px."""

  def __init__(self, encoded: bytes, options: DecodeOptions) -> None:
    """Raises BadImage if the image is too large, or the file is truncated."""
    header = headers.read_jpeg(encoded)
    headers.check_size(header.height, header.width, options)
    headers.check_jpeg_end(encoded)
    self._encoded, self._options, self._stored = encoded, options, (header.height, header.width)
    self._orientation = header.orientation if options.upright else 1
    self.size = self._stored[::-1] if self._orientation >= decode.FIRST_TRANSPOSED else self._stored
    self._stream = _codec().CodeStream(encoded)

  def is_supported(self) -> bool:
    """Returns whether nvImageCodec reads the same header, and can decode the colors."""
    return self._stream.num_channels in _CHANNELS and (self._stream.height, self._stream.width) == self._stored

  def cut(self, window: Window) -> HostArray:
    """Decodes the part `[h, w, 3] u8` inside a window. Raises BadImage as `decode.decode` does."""
    codec, (decoder, params) = _codec(), _decoder()
    top, left, height, width = window
    if self._orientation >= decode.FIRST_TRANSPOSED:  # from here on, the window is one of the stored image
      top, left, height, width = left, top, width, height
    if self._orientation in decode.FLIPPED_ROWS:
      top = self._stored[0] - top - height
    if self._orientation in decode.FLIPPED_COLUMNS:
      left = self._stored[1] - left - width
    right = min(left + max(width, FEWEST_COLUMNS), self._stored[1])
    region = codec.Region(top, left, top + height, right)
    image = decoder.decode(self._stream.get_sub_code_stream(region=region), params=params)
    if image is None:
      return window.cut(decode.decode(self._encoded, self._options))
    return decode.orient(np.asarray(image)[:, :width], self._orientation)


def find_opener(choice: schema.Decode, *, is_cropped: bool) -> Opener:
  """Returns the function that opens the images of a recipe. Raises UserError if its decoder is not installed."""
  if choice is schema.Decode.CROP:
    check_installed()
  if choice is schema.Decode.FULL or not is_cropped:
    return decode.open_image
  return open_fastest if choice is schema.Decode.AUTO else open_partial


def open_partial(image: bytes | HostArray, options: DecodeOptions = AS_STORED) -> DecodedImage | PartialJpeg:
  """Returns a stored image whose parts are decoded on request if possible; else decodes it completely now."""
  if isinstance(image, bytes) and headers.detect_format(image) == 'jpeg':
    try:
      found = PartialJpeg(image, options)
      if found.is_supported():
        return found
    except RuntimeError:  # a header that nvImageCodec cannot read
      pass
  return decode.open_image(image, options)


def open_fastest(image: bytes | HostArray, options: DecodeOptions = AS_STORED) -> DecodedImage | PartialJpeg:
  """Opens as `open_partial` if that gives the pixels of OpenCV on this machine, else as `decode.open_image`."""
  is_partial = isinstance(image, bytes) and headers.detect_format(image) == 'jpeg' and is_exact()
  return open_partial(image, options) if is_partial else decode.open_image(image, options)


def is_exact() -> bool:
  """Returns whether nvImageCodec is installed and decodes parts of images to the pixels of OpenCV.

  A process compares once, in a few ms, and warns if they differ; safe for threads.
  """
  with _comparing:
    return _compare()


@functools.cache
def _compare() -> bool:
  if not is_installed():
    return False
  try:
    wrong = [name for name, encoded in _samples().items() if not _is_equal(encoded)]
  except (ImportError, OSError, RuntimeError) as error:
    wrong = [f'{type(error).__name__}: {error}']
  if wrong:
    log.warning('JPEG files are decoded completely: nvImageCodec does not give the pixels of OpenCV here (%s). Set '
                'data.decode=full to avoid this warning.', ', '.join(wrong))
  return not wrong


def _samples() -> dict[str, bytes]:
  """Returns images of smooth noise in the forms that JPEG files have, by name."""
  image = cv2.resize(np.random.default_rng(0).integers(0, 256, (9, 11, 3), np.uint8), (107, 75),
                     interpolation=cv2.INTER_CUBIC)
  flags = {'4:2:0': (cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420),
           '4:2:2': (cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_422),
           '4:4:4': (cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444),
           'progressive': (cv2.IMWRITE_JPEG_PROGRESSIVE, 1)}
  return {**{name: cv2.imencode('.jpg', image, one)[1].tobytes() for name, one in flags.items()},
          'gray': cv2.imencode('.jpg', image[..., 0])[1].tobytes()}


def _is_equal(encoded: bytes) -> bool:
  whole, opened = decode.decode(encoded), open_partial(encoded)
  windows = (Window(0, 0, 75, 107), Window(13, 22, 41, 70), Window(30, 51, 1, 3), Window(47, 1, 28, 17))
  return isinstance(opened, PartialJpeg) and all(np.array_equal(opened.cut(one), one.cut(whole)) for one in windows)


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
  """Returns the package; safe for threads."""
  with _lock:
    return _load_codec()


@functools.cache
def _load_codec() -> Any:
  """Loads the package with only its CPU decoder for JPEG: the other decoders print that there is no GPU."""
  spec = importlib.util.find_spec(_PACKAGE)
  assert spec is not None and spec.submodule_search_locations, 'call check_installed() first'
  with tempfile.TemporaryDirectory(prefix='vit_jax_codec_') as folder:
    for path in pathlib.Path(spec.submodule_search_locations[0], 'extensions').glob(_EXTENSION):
      os.symlink(path, pathlib.Path(folder, path.name))
    quiet = {'NVIMGCODEC_EXTENSIONS_PATH': folder, 'PYNVIMGCODEC_VERBOSITY': '0'}
    before = {name: os.environ.get(name) for name in quiet}
    os.environ.update(quiet)
    try:
      return importlib.import_module(_PACKAGE)
    finally:
      for name, value in before.items():
        os.environ.pop(name)
        if value is not None:
          os.environ[name] = value


def _decoder() -> tuple[Any, Any]:
  """Returns the decoder of this thread, and its parameters: no orientation, 8-bit RGB."""
  if not hasattr(_thread, 'decoder'):
    codec = _codec()
    _thread.decoder = (
        codec.Decoder(device_id=codec.NVIMGCODEC_DEVICE_CPU_ONLY, max_num_cpu_threads=1,
                      backends=[codec.Backend(codec.BackendKind.CPU_ONLY)]),
        codec.DecodeParams(apply_exif_orientation=False))
  return _thread.decoder
