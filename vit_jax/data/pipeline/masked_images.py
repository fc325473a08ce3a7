"""Images with their masks as windows of one size, for semantic segmentation.

An image is resized, to the window without its aspect ratio or to a short side with it, and covered by windows. Its mask
keeps its own size for counting; for the classes of tokens it is resized and cut as the image is.
"""
from __future__ import annotations

import dataclasses

import numpy as np

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.core.types import Batch, HostArray
from vit_jax.data.files import access
from vit_jax.data.image import decode, geometry, masks
from vit_jax.data.image.decode import Window
from vit_jax.data.image.headers import BadImage, decode_options
from vit_jax.data.source import Source, find_origin


@dataclasses.dataclass(frozen=True)
class MaskValues:
  """What the values of masks mean: see `image.masks.classes`."""
  first: int
  ignore: int
  num_classes: int


@dataclasses.dataclass(frozen=True)
class MaskedImages:
  """Maps the position of an example to its windows.

  source: with masks.
  recipe: how images are decoded and resampled; its crops are not used.
  window_px: height and width.
  resize_px: short side; 0 = the image is one window.
  stride_px: between windows; 0 = their sides.
  grid: (h, w) of the tokens of a window.
  values: of the masks.
  """
  source: Source
  recipe: schema.Recipe
  window_px: tuple[int, int]
  resize_px: int
  stride_px: int
  grid: tuple[int, int]
  values: MaskValues

  def __call__(self, index: int) -> Batch:
    """Returns `windows [n, H, W, 3] u8`, `tokens [n, h, w] i32` (their classes), `mask [H_m, W_m] i32`, `size [2]`.

    Pixels and tokens that do not count are -1; `size` is that of the resized image, px.

    Raises:
      UserError: image or mask cannot be read, or they do not go together.
    """
    image, mask = self.read(index)
    height, width = self._size((image.shape[0], image.shape[1]))
    interpolation, antialias = geometry.eval_resampling(self.recipe)
    resized = geometry.resize_part(image, (height, width), Window(0, 0, height, width), antialias=antialias,
                                   interpolation=interpolation, truncate=self.recipe.truncate)
    small = masks.resize(mask, (height, width))
    cuts = [(slice(top, top + self.window_px[0]), slice(left, left + self.window_px[1]))
            for top in self._starts(0, height) for left in self._starts(1, width)]
    return {'windows': np.stack([resized[cut] for cut in cuts]), 'mask': mask, 'size': np.array([height, width]),
            'tokens': np.stack([masks.majority(small[cut], self.grid) for cut in cuts]), 'index': np.int64(index)}

  def read(self, index: int) -> tuple[HostArray, HostArray]:
    """Returns the image `[H, W, 3] u8` and its mask `[H, W] i32`, -1 where pixels do not count."""
    origin, row = find_origin(self.source, index)
    image_name, mask_name = origin.describe(row), origin.describe_mask(row)  # type: ignore[attr-defined]
    try:
      record = self.source[index]
      image = decode.as_rgb(record.image, decode_options(self.recipe))
      assert record.mask is not None
      values = masks.decode(record.mask, size=(image.shape[0], image.shape[1]))
      mask = masks.classes(values, first=self.values.first, ignore=self.values.ignore,
                           num_classes=self.values.num_classes)
    except masks.WrongSize as error:
      raise UserError(f'{mask_name}: expected {image.shape[0]} x {image.shape[1]} px, the size of {image_name}, got '
                      f'{error}. Replace the mask.') from error
    except masks.BadMask as error:
      raise UserError(f'{mask_name}: {error}. Replace it, or set ignore, first_class and num_classes of the '
                      'evaluation.') from error
    except BadImage as error:
      raise UserError(f'{image_name}: expected an image, got a file that cannot be decoded ({error}). Replace it, or '
                      'remove it with its mask.') from error
    except (OSError, MemoryError) as error:
      raise access.user_error(error, image_name) from error
    return image, mask

  def stride(self, axis: int) -> int:
    """Returns the distance of windows along an axis, px."""
    return self.stride_px or self.window_px[axis]

  def _size(self, size: tuple[int, int]) -> tuple[int, int]:
    """Returns the size of the resized image: its short side is `resize_px`, or more where the window is larger."""
    if not self.resize_px:
      return self.window_px
    least = (window / side for window, side in zip(self.window_px, size, strict=True))
    factor = max(self.resize_px / min(size), *least)
    return max(round(size[0] * factor), self.window_px[0]), max(round(size[1] * factor), self.window_px[1])

  def _starts(self, axis: int, size: int) -> list[int]:
    return starts(size, self.window_px[axis], self.stride(axis))


def starts(size: int, window: int, stride: int) -> list[int]:
  """Returns the first rows (or columns) of windows that cover `size` px; the last one ends at the border."""
  return [*range(0, size - window, stride), size - window]
