"""Masks for semantic segmentation, which have a class for each pixel, and the windows of images with their masks.

A mask is stored without loss as one channel of class indices, or as indices into a palette. A mask is resized by the
nearest neighbor, because a mean of two class indices is another class.

`formats/masks.py` finds the mask of an image. `evaluate/segmentation.py` makes a `MaskedImages`, and calls that object
for each example. `MaskedImages` resizes an image and covers the result with windows of one size. With `resize_px`, the
short side is resized to `resize_px`; without it, the image is resized to one window, without preserving the aspect
ratio. To find the classes of tokens, the mask is resized and cut like the image; scores count the pixels of the mask at
its stored size.
"""
from __future__ import annotations

import dataclasses
import io

import numpy as np
from PIL import Image

from vit_jax.config import schema
from vit_jax.core import failures
from vit_jax.core.errors import UserError
from vit_jax.core.types import Batch, HostArray
from vit_jax.data.image import decode as decoding
from vit_jax.data.image import geometry, headers
from vit_jax.data.image.decode import PILLOW_ERRORS, Window
from vit_jax.data.image.headers import AS_STORED, MAX_PIXELS, BadImage, decode_options
from vit_jax.data.source import Source, find_origin, read_one

IGNORED = -1
"""The class of pixels that are not counted."""
FORMATS = ('PNG', 'TIFF', 'BMP', 'GIF')  # Pillow's names of formats that store pixels without loss
EXTENSIONS = tuple(extension for name in FORMATS for extension in headers.FORMATS[name.lower()].extensions)
_MODES = {'1', 'L', 'P', 'I', 'I;16', 'I;16L', 'I;16B', 'I;16N'}  # Pillow's modes of one channel of integers


@dataclasses.dataclass(frozen=True)
class MaskValues:
  """The meaning of the values of masks.

  first: the value of class 0; lower values are ignored.
  ignore: the value of pixels that are not counted.
  num_classes: values from `first` to `first + num_classes - 1` are classes.
  """
  first: int
  ignore: int
  num_classes: int


class BadMask(ValueError):
  """A mask cannot be used; the message is `expected …, got …`."""


class WrongSize(BadMask):
  """A mask has another size than its image; the message is only the size of the mask."""


def decode(encoded: bytes, *, size: tuple[int, int] | None = None) -> HostArray:
  """Returns the values of a mask, `[H, W]` i32: the stored gray levels, or indices into the palette.

  Args:
    encoded: the content of the file.
    size: the required height and width, px, compared before the mask is decoded; None = any size.

  Raises:
    BadMask: the file is not an image, is stored with loss, has several channels, or is too large.
    WrongSize: the mask has another size.
  """
  try:
    with Image.open(io.BytesIO(encoded)) as image:
      width, height = image.size
      if image.format not in FORMATS:
        raise BadMask(f'expected a mask stored without loss ({", ".join(FORMATS)}), got {image.format}')
      if image.mode not in _MODES:
        raise BadMask('expected a mask with one channel of class indices, or with a palette, got the mode '
                      f'{image.mode}')
      if height * width > MAX_PIXELS:
        raise BadMask(f'expected at most {MAX_PIXELS:,} pixels, got {height * width:,}')
      if size is not None and size != (height, width):
        raise WrongSize(f'{height} x {width} px')
      decoding.check_tiles(image, AS_STORED)
      return np.asarray(image).astype(np.int32)
  except BadMask:  # a ValueError, like some of Pillow's errors
    raise
  except Image.DecompressionBombError as error:
    raise BadMask(f'expected at most {MAX_PIXELS:,} pixels, got more') from error
  except PILLOW_ERRORS as error:
    raise BadMask('expected a mask, got a file that cannot be decoded') from error


def classes(values: HostArray, meaning: MaskValues) -> HostArray:
  """Returns the class of each pixel, `[H, W]` i32: `values - first`; `IGNORED` for `ignore` and values below `first`.

  Raises BadMask if a value is above the value of the last class.
  """
  first, ignore, num_classes = meaning.first, meaning.ignore, meaning.num_classes
  indices = np.where((values == ignore) | (values < first), IGNORED, values - first).astype(np.int32)
  if indices.size and indices.max() >= num_classes:
    too_large = np.unique(values[indices >= num_classes])
    shown = ', '.join(map(str, too_large[:5].tolist()))
    raise BadMask(f'expected class indices from {first} to {first + num_classes - 1}, or {ignore} for pixels to '
                  f'ignore, got {shown}{" …" if len(too_large) > 5 else ""}')
  return indices


def resize(mask: HostArray, size: tuple[int, int]) -> HostArray:
  """Returns `mask [H, W]` resized to `size` (height, width) by the nearest neighbor.

  Along a side, output pixel i is the stored pixel `floor((i + 1/2) stored / resized)`, which contains the center of i.
  """
  rows, columns = (((2 * np.arange(resized) + 1) * stored) // (2 * resized)
                   for stored, resized in zip(mask.shape, size, strict=True))
  return mask[rows[:, None], columns[None]]


def majority(mask: HostArray, grid: tuple[int, int]) -> HostArray:
  """Returns the most frequent class of the pixels of each token, `[h, w]` i32.

  Among equally frequent classes, the lowest is chosen. A token whose pixels are all ignored is `IGNORED`.

  Args:
    mask: `[H, W]` i32 of classes; H and W are multiples of h and w.
    grid: (h, w), the numbers of rows and columns of tokens.
  """
  h, w = grid
  token_h, token_w = mask.shape[0] // h, mask.shape[1] // w  # px
  assert mask.shape == (h * token_h, w * token_w), (mask.shape, grid)
  pixels_NP = mask.reshape(h, token_h, w, token_w).swapaxes(1, 2).reshape(h * w, token_h * token_w)
  num_classes = int(pixels_NP.max(initial=0)) + 1
  is_counted_NP = pixels_NP >= 0
  pairs_NP = np.arange(h * w)[:, None] * num_classes + pixels_NP  # one number for each pair of a token and a class
  counts = np.bincount(pairs_NP[is_counted_NP], minlength=h * w * num_classes).reshape(h * w, num_classes)
  return np.where(counts.any(1), counts.argmax(1), IGNORED).astype(np.int32).reshape(h, w)


@dataclasses.dataclass(frozen=True)
class MaskedImages:
  """Maps the index of an example to the windows of its image and mask; a call draws no random numbers.

  source: a source of images with masks.
  recipe: how images are decoded and resampled; the crops of the recipe are not used.
  window_px: height and width of a window.
  resize_px: short side of the resized image; 0 = the image is one window.
  stride_px: distance of neighboring windows; 0 = windows do not overlap.
  grid: (h, w), the numbers of rows and columns of tokens in a window.
  values: the meaning of the values of masks.
  """
  source: Source
  recipe: schema.Recipe
  window_px: tuple[int, int]
  resize_px: int
  stride_px: int
  grid: tuple[int, int]
  values: MaskValues

  def __call__(self, index: int) -> Batch:
    """Returns the n windows of an example, row by row, with the classes of their tokens and the mask:

      windows  [n, H, W, 3] u8
      tokens   [n, h, w] i32, classes
      mask     [H_m, W_m] i32, classes at the stored size
      size     [2] i64, height and width of the resized image, px
      index    [] i64

    The class of pixels and tokens that are not counted is -1. Raises UserError as `read` does.
    """
    image, mask = self.read(index)
    height, width = self._resized_size((image.shape[0], image.shape[1]))
    interpolation, antialias = geometry.eval_resampling(self.recipe)
    resized = geometry.resize_part(image, (height, width), Window(0, 0, height, width), antialias=antialias,
                                   interpolation=interpolation, truncate=self.recipe.truncate)
    resized_mask = resize(mask, (height, width))
    windows = [Window(top, left, *self.window_px)
               for top in starts(height, self.window_px[0], self.stride(0))
               for left in starts(width, self.window_px[1], self.stride(1))]
    tokens = [majority(window.cut(resized_mask), self.grid) for window in windows]
    return {'windows': np.stack([window.cut(resized) for window in windows]), 'mask': mask,
            'size': np.array([height, width]), 'tokens': np.stack(tokens), 'index': np.int64(index)}

  def read(self, index: int) -> tuple[HostArray, HostArray]:
    """Returns the image `[H, W, 3] u8` and the classes `[H, W] i32` of its pixels, -1 for pixels that are not counted.

    Raises UserError if image or mask cannot be read, or have different sizes.
    """
    origin, row = find_origin(self.source, index)
    image_name, mask_name = origin.describe(row), origin.describe_mask(row)  # type: ignore[attr-defined]
    try:
      record = failures.retried(lambda: read_one(self.source, index), f'reading {image_name}')
      image = decoding.decode(record.image, decode_options(self.recipe))
      assert record.mask is not None
      mask = classes(decode(record.mask, size=(image.shape[0], image.shape[1])), self.values)
    except WrongSize as error:
      raise UserError(f'{mask_name}: expected {image.shape[0]} x {image.shape[1]} px, the size of {image_name}, got '
                      f'{error}. Replace the mask.') from error
    except BadMask as error:
      raise UserError(f'{mask_name}: {error}. Replace it, or set ignore, first_class and num_classes of the '
                      'evaluation.') from error
    except BadImage as error:
      raise UserError(f'{image_name}: expected an image, got a file that cannot be decoded ({error}). Replace it, or '
                      'remove it with its mask.') from error
    except (OSError, MemoryError) as error:
      raise failures.unreadable(error, image_name) from error
    return image, mask

  def stride(self, axis: int) -> int:
    """Returns the distance, px, of neighboring windows along an axis: 0 = rows, 1 = columns."""
    return self.stride_px or self.window_px[axis]

  def _resized_size(self, size: tuple[int, int]) -> tuple[int, int]:
    """Returns the size of the resized image: the short side is `resize_px`, or longer so that one window fits."""
    if not self.resize_px:
      return self.window_px
    factor = max(self.resize_px / min(size), self.window_px[0] / size[0], self.window_px[1] / size[1])
    return max(round(size[0] * factor), self.window_px[0]), max(round(size[1] * factor), self.window_px[1])


def starts(size: int, window: int, stride: int) -> list[int]:
  """Returns the first rows (or columns), px, of windows that cover `size` px; the last window ends at the border."""
  return [*range(0, size - window, stride), size - window]
