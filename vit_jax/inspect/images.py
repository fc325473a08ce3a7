"""Images of any kind that the Python API takes: PIL images, NumPy arrays, paths, encoded bytes, and lists of them."""
from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import numpy as np
from PIL import Image

from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.data import user_files
from vit_jax.data.image import decode as decoding
from vit_jax.data.image import headers

ImageLike = Image.Image | HostArray | str | os.PathLike[str] | bytes
UPRIGHT = headers.DecodeOptions(upright=True)


def listed(images: ImageLike | Sequence[ImageLike]) -> Iterator[ImageLike]:
  """Yields the images of one image, an array of several, or a nested list, one by one."""
  if isinstance(images, np.ndarray) and images.ndim == 4:
    yield from images
  elif isinstance(images, Sequence) and not isinstance(images, str | bytes):
    for image in images:
      yield from listed(image)
  else:
    yield images


def decode(image: ImageLike, options: headers.DecodeOptions = UPRIGHT) -> HostArray:
  """Returns `[H, W, 3]` u8 for any kind of image; a file, its bytes and its Pillow image give the same result.

  Files and Pillow images are rotated by their EXIF orientation, unless the options say otherwise.

  Raises:
    BadImage: the image cannot be decoded, or is too large.
    OSError: the file cannot be read.
    UserError: not an image, or an array of another shape or dtype.
  """
  match image:
    case np.ndarray() if image.dtype == np.uint8 and image.size and (
        image.ndim == 2 or image.ndim == 3 and image.shape[2] in (1, 3)):
      return decoding.decode(image[..., None] if image.ndim == 2 else image)
    case Image.Image() if min(image.size):
      return decoding.from_pillow(image, options)
    case bytes():
      return decoding.decode(image, options)
    case str() | os.PathLike():
      return decoding.decode(user_files.read_image(user_files.expand_home(image)), options)
  what = type(image).__name__
  if isinstance(image, np.ndarray):
    what = f'an array {image.shape} of {image.dtype}'
  elif isinstance(image, Image.Image):
    what += f' {image.size}'
  raise UserError('images: expected a uint8 array [H, W], [H, W, 1], [H, W, 3], [B, H, W, 1] or [B, H, W, 3], a PIL '
                  f'image, a path or the bytes of a file, got {what}. Pass one of these.')
