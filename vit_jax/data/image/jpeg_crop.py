"""Decodes of a JPEG only the part that a crop shows, by nvImageCodec's libjpeg-turbo: the extra `crop` of setup.py.

It needs no GPU, and gives the pixels that cutting the whole picture gives. What it does not take (other formats, CMYK,
damage) goes the usual way, `image_ops.decode`, and so gets the same messages.
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
from vit_jax.data.image import headers, image_ops, pillow
from vit_jax.data.image.headers import AS_STORED, Reading

_PACKAGE, _EXTENSION = 'nvidia.nvimgcodec', 'libjpeg_turbo_ext.so*'
_DECODED = (1, 3)  # components: grey and YCbCr
_of_thread, _one_at_a_time = threading.local(), threading.Lock()


class Jpeg:
  """A picture in a JPEG file, of which parts can be decoded."""

  def __init__(self, encoded: bytes, stream: Any, orientation: int, how: Reading):
    self._encoded, self._stream, self._how = encoded, stream, how
    self._orientation = orientation if how.upright else 1
    stored: tuple[int, int] = (stream.height, stream.width)
    self.size = stored[::-1] if self._orientation >= pillow.SWAPPED else stored

  def cut(self, window: image_ops.Window) -> HostArray:
    """The part `[H, W, 3] u8` inside a window. Raises BadImage as `image_ops.decode` does."""
    codec, (decoder, how) = _codec(), _decoder()
    top, left, height, width = self._stored(window)
    region = codec.Region(top, left, top + height, left + width)
    image = decoder.decode(self._stream.get_sub_code_stream(region=region), params=how)
    if image is None:
      return image_ops.cut(image_ops.decode(self._encoded, self._how), window)
    return pillow.orient(np.asarray(image), self._orientation)

  def _stored(self, window: image_ops.Window) -> image_ops.Window:
    """Where a window of the upright image lies in the stored one."""
    if self._orientation >= pillow.SWAPPED:
      window = image_ops.Window(window.left, window.top, window.width, window.height)
    top, left, height, width = window
    if self._orientation in pillow.ROWS:
      top = self._stream.height - top - height
    if self._orientation in pillow.COLUMNS:
      left = self._stream.width - left - width
    return image_ops.Window(top, left, height, width)


def open_picture(image: bytes | HostArray, how: Reading = AS_STORED) -> image_ops.Picture | Jpeg:
  """A stored picture, decoded in parts if it can be; else now, whole."""
  if isinstance(image, bytes) and image_ops.is_jpeg(image):
    header = headers.read_jpeg(image)
    headers.check_size(header.height, header.width, how)
    image_ops.check_end(image)
    try:
      stream = _codec().CodeStream(image)
      if stream.num_channels in _DECODED and (stream.height, stream.width) == (header.height, header.width):
        return Jpeg(image, stream, header.orientation, how)
    except RuntimeError:  # no header that it can read
      pass
  return image_ops.open_picture(image, how)


def is_installed() -> bool:
  """Whether the decoder is."""
  try:
    return importlib.util.find_spec(_PACKAGE) is not None
  except ModuleNotFoundError:
    return False


def check() -> None:
  """Raises UserError if the decoder is not installed."""
  if not is_installed():
    raise UserError("data.decode=crop decodes by nvImageCodec, which is not installed; want pip install 'vit_jax[crop]'"
                    ' (Linux, no GPU needed), or data.decode=full, which gives the same pictures')


def _codec() -> Any:
  """The package, for any thread."""
  with _one_at_a_time:
    return _load_codec()


@functools.cache
def _load_codec() -> Any:
  """The package, with its decoder for JPEG on CPUs alone: the others say at length that there is no GPU."""
  spec = importlib.util.find_spec(_PACKAGE)
  assert spec is not None and spec.submodule_search_locations, 'check() comes first'
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
  """This thread's decoder, and that pictures are neither turned nor made anything but 8 bit RGB."""
  if not hasattr(_of_thread, 'decoder'):
    codec = _codec()
    _of_thread.decoder = (
        codec.Decoder(device_id=codec.NVIMGCODEC_DEVICE_CPU_ONLY, max_num_cpu_threads=1,
                      backends=[codec.Backend(codec.BackendKind.CPU_ONLY)]),
        codec.DecodeParams(apply_exif_orientation=False))
  return _of_thread.decoder
