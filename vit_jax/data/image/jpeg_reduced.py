"""Decodes a JPEG at 1/2, 1/4 or 1/8 of its size where the random crop is at least so many times larger than its target.

libjpeg-turbo then computes smaller inverse transforms of the 8 x 8 blocks (DCT scaling), which average pixels: photos
of several megapixels are decoded in a fraction of the time. Pixels differ from those of `decode.decode`, so that
recipes that are to be reproduced do not use it. Other formats, and crops below twice the target, are decoded at full
size.
"""
from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from vit_jax.core import lazy
from vit_jax.core.types import HostArray
from vit_jax.data.image import decode, headers
from vit_jax.data.image.decode import DecodedImage, Window
from vit_jax.data.image.headers import AS_STORED, DecodeOptions

if TYPE_CHECKING:
  import cv2
else:
  cv2 = lazy.Module('cv2')

SCALES = (8, 4, 2)
"""Divisors of the size that libjpeg can decode at, largest first."""


@dataclasses.dataclass(frozen=True)
class Opener:
  """Opens images whose crops become `image_px` (height, width); pickles."""
  image_px: tuple[int, int]

  def __call__(self, image: bytes | HostArray, options: DecodeOptions = AS_STORED) -> DecodedImage | ReducedJpeg:
    """Returns a JPEG that is decoded when a crop of it is known; else decodes the image now."""
    if not (isinstance(image, bytes) and decode.is_jpeg(image)):
      return decode.open_image(image, options)
    header = headers.read_jpeg(image)
    headers.check_size(header.height, header.width, options)
    decode.check_end(image)
    return ReducedJpeg(image, header, self.image_px, options)


class ReducedJpeg:
  """A JPEG file whose crops are to be resized to `image_px`."""

  def __init__(self, encoded: bytes, header: headers.Header, image_px: tuple[int, int], options: DecodeOptions) -> None:
    self._encoded, self._image_px, self._options = encoded, image_px, options
    self._orientation = header.orientation if options.upright else 1
    stored = header.height, header.width
    self.size = stored[::-1] if self._orientation >= decode.FIRST_TRANSPOSED else stored

  def cut(self, window: Window) -> HostArray:
    """Returns the part `[h, w, 3] u8` inside a window of the full size, at the chosen scale.

    Its edges are rounded to a pixel of the reduced image. Raises BadImage as `decode.decode` does.
    """
    scale = find_scale(window, self._image_px)
    if scale == 1:
      return window.cut(decode.decode(self._encoded, self._options))
    flag = {2: cv2.IMREAD_REDUCED_GRAYSCALE_2, 4: cv2.IMREAD_REDUCED_GRAYSCALE_4, 8: cv2.IMREAD_REDUCED_GRAYSCALE_8}
    image = cv2.imdecode(np.frombuffer(self._encoded, np.uint8),  # the flag of the color decides the number of channels
                         flag[scale] | cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION)
    if image is None:
      return window.cut(decode.decode(self._encoded, self._options))
    return reduced(window, scale).cut(decode.orient(image, self._orientation))


def find_scale(window: Window, image_px: tuple[int, int]) -> int:
  """Returns the largest of `SCALES` at which the window still has the pixels of its target in both directions; or 1."""
  return next((n for n in SCALES if window.height >= n * image_px[0] and window.width >= n * image_px[1]), 1)


def reduced(window: Window, scale: int) -> Window:
  """Returns the window in the image of 1 / `scale` of the size, with rounded edges."""
  top, left = round(window.top / scale), round(window.left / scale)
  bottom, right = round((window.top + window.height) / scale), round((window.left + window.width) / scale)
  return Window(top, left, bottom - top, right - left)
