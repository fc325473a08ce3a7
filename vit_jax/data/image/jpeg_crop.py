"""Decodes only the part of a JPEG inside the crop, with nvImageCodec's libjpeg-turbo: the extra `crop` of setup.py.

It needs no GPU, and gives the same pixels as cropping the decoded image. Other formats, CMYK and damaged files are
decoded by `decode.decode`, with the same error messages.
"""
from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import pathlib
import tempfile
import threading
from typing import Any

import numpy as np

from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.data.image import decode, headers
from vit_jax.data.image.decode import DecodedImage, Window
from vit_jax.data.image.headers import AS_STORED, DecodeOptions

_PACKAGE, _EXTENSION = 'nvidia.nvimgcodec', 'libjpeg_turbo_ext.so*'
_CHANNELS = (1, 3)  # gray and YCbCr
_thread, _lock = threading.local(), threading.Lock()


class JpegImage:
  """A JPEG file of which parts can be decoded."""

  def __init__(self, encoded: bytes, stream: Any, orientation: int, options: DecodeOptions) -> None:
    self._encoded, self._stream, self._options = encoded, stream, options
    self._orientation = orientation if options.upright else 1
    stored: tuple[int, int] = (stream.height, stream.width)
    self.size = stored[::-1] if self._orientation >= decode.FIRST_TRANSPOSED else stored

  def cut(self, window: Window) -> HostArray:
    """Decodes the part `[h, w, 3] u8` inside a window. Raises BadImage as `decode.decode` does."""
    codec, (decoder, params) = _codec(), _decoder()
    top, left, height, width = self._stored(window)
    region = codec.Region(top, left, top + height, left + width)
    image = decoder.decode(self._stream.get_sub_code_stream(region=region), params=params)
    if image is None:
      return window.cut(decode.decode(self._encoded, self._options))
    return decode.orient(np.asarray(image), self._orientation)

  def _stored(self, window: Window) -> Window:
    """Returns the window in the stored image of a window of the upright image."""
    if self._orientation >= decode.FIRST_TRANSPOSED:
      window = Window(window.left, window.top, window.width, window.height)
    top, left, height, width = window
    if self._orientation in decode.FLIPPED_ROWS:
      top = self._stream.height - top - height
    if self._orientation in decode.FLIPPED_COLUMNS:
      left = self._stream.width - left - width
    return Window(top, left, height, width)


def open_image(image: bytes | HostArray, options: DecodeOptions = AS_STORED) -> DecodedImage | JpegImage:
  """Returns a stored image whose parts are decoded on request if possible; else decodes it completely now."""
  if isinstance(image, bytes) and decode.is_jpeg(image):
    header = headers.read_jpeg(image)
    headers.check_size(header.height, header.width, options)
    decode.check_end(image)
    try:
      stream = _codec().CodeStream(image)
      if stream.num_channels in _CHANNELS and (stream.height, stream.width) == (header.height, header.width):
        return JpegImage(image, stream, header.orientation, options)
    except RuntimeError:  # a header that it cannot read
      pass
  return decode.open_image(image, options)


def is_installed() -> bool:
  """Returns whether the decoder is installed."""
  try:
    return importlib.util.find_spec(_PACKAGE) is not None
  except ModuleNotFoundError:
    return False


def check() -> None:
  """Raises UserError if the decoder is not installed."""
  if not is_installed():
    raise UserError("data.decode=crop: expected nvImageCodec, which is not installed. Run pip install 'vit_jax[crop]' "
                    '(Linux, no GPU needed), or set data.decode=full, which gives the same images.')


def _codec() -> Any:
  """Returns the package; safe for threads."""
  with _lock:
    return _load_codec()


@functools.cache
def _load_codec() -> Any:
  """Loads the package with only its CPU decoder for JPEG: the other decoders print that there is no GPU."""
  spec = importlib.util.find_spec(_PACKAGE)
  assert spec is not None and spec.submodule_search_locations, 'call check() first'
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
