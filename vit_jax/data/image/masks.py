"""Masks for semantic segmentation: a class for each pixel of an image; and images with their masks as windows.

A mask is stored without loss as one channel of class indices, or as indices into a palette. It is resized by the
nearest neighbor, because a mean of two class indices is another class.

`evaluate/segmentation.py` makes `MaskedImages`, and `evaluate/tokens.py` calls it for each example. It resizes an
image and covers it with windows of one size. Without `resize_px`, the image is resized to one window, without
preserving the aspect ratio; with it, the short side is resized to `resize_px`. Scores count pixels of the mask at its
stored size; for the classes of tokens, the mask is resized and cut as the image is. `formats/masks.py` finds the mask
of an image.
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
FORMATS = ('PNG', 'TIFF', 'BMP', 'GIF')  # without loss
EXTENSIONS = tuple(ending for kind in FORMATS for ending in headers.FORMATS[kind.lower()].extensions)
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
  """A mask cannot be used; the message begins with what was expected."""


class WrongSize(BadMask):
  """A mask has another size than its image; the message is the size of the mask."""


def decode(encoded: bytes, *, size: tuple[int, int] | None = None) -> HostArray:
  """Returns the values of a mask, `[H, W]` i32: gray levels as they are stored, or indices into the palette.

  Args:
    encoded: the content of the file.
    size: height and width of its image, px, to be compared before the mask is decoded; None = any size.

  Raises:
    BadMask: the file is not an image, is stored with loss, has several channels, or is too large.
    WrongSize: the mask has another size.
  """
  try:
    with Image.open(io.BytesIO(encoded)) as image:
      kind, mode, (width, height) = image.format, image.mode, image.size
      if kind not in FORMATS:
        raise BadMask(f'expected a mask stored without loss ({", ".join(FORMATS)}), got {kind}')
      if mode not in _MODES:
        raise BadMask(f'expected a mask with one channel of class indices, or with a palette, got the mode {mode}')
      if height * width > MAX_PIXELS:
        raise BadMask(f'expected at most {MAX_PIXELS:,} pixels, got {height * width:,}')
      if size not in (None, (height, width)):
        raise WrongSize(f'{height} x {width} px')
      decoding.check_tiles(image, AS_STORED)
      return np.asarray(image).astype(np.int32)
  except BadMask:
    raise
  except Image.DecompressionBombError as error:
    raise BadMask(f'expected at most {MAX_PIXELS:,} pixels, got more') from error
  except PILLOW_ERRORS as error:
    raise BadMask('expected a mask, got a file that cannot be decoded') from error


def classes(values: HostArray, meaning: MaskValues) -> HostArray:
  """Returns the class of each pixel, `[H, W]` i32: `values - first`, and `IGNORED` for `ignore` and values below first.

  Raises:
    BadMask: a value is out of range.
  """
  first, ignore, num_classes = meaning.first, meaning.ignore, meaning.num_classes
  indices = np.where((values == ignore) | (values < first), IGNORED, values - first).astype(np.int32)
  if indices.size and indices.max() >= num_classes:
    wrong = np.unique(values[indices >= num_classes])
    more = ' …' if len(wrong) > 5 else ''
    raise BadMask(f'expected class indices from {first} to {first + num_classes - 1}, or {ignore} for pixels to '
                  f'ignore, got {", ".join(map(str, wrong[:5].tolist()))}{more}')
  return indices


def resize(mask: HostArray, size: tuple[int, int]) -> HostArray:
  """Returns `mask [H, W]` resized to `size` (height, width) by the nearest neighbor.

  Along a side, output pixel i is the stored pixel `floor((i + 1/2) stored / resized)`, which contains its center.
  """
  rows, columns = (((2 * np.arange(resized) + 1) * stored) // (2 * resized)
                   for stored, resized in zip(mask.shape, size, strict=True))
  return mask[rows[:, None], columns[None]]


def majority(mask: HostArray, grid: tuple[int, int]) -> HostArray:
  """Returns the most frequent class of the pixels of each token, `[h, w]` i32.

  The lowest class is chosen among equally frequent ones; a token whose pixels are all ignored is `IGNORED`.

  Args:
    mask: `[H, W]` i32 of classes; its sides are multiples of those of the grid.
    grid: (h, w) of the tokens.
  """
  h, w = grid
  height, width = mask.shape[0] // h, mask.shape[1] // w
  assert mask.shape == (h * height, w * width), (mask.shape, grid)
  pixels = mask.reshape(h, height, w, width).swapaxes(1, 2).reshape(h * w, height * width)
  num_classes = int(pixels.max(initial=0)) + 1
  tokens = np.repeat(np.arange(h * w), pixels.shape[1])  # the token of each pixel
  is_counted = pixels.ravel() >= 0
  pairs = tokens[is_counted] * num_classes + pixels.ravel()[is_counted]  # one number for a token and a class
  counts = np.bincount(pairs, minlength=h * w * num_classes).reshape(h * w, num_classes)
  return np.where(counts.any(1), counts.argmax(1), IGNORED).astype(np.int32).reshape(h, w)


@dataclasses.dataclass(frozen=True)
class MaskedImages:
  """Maps the index of an example to its windows.

  source: of images with masks.
  recipe: how images are decoded and resampled; its crops are not used.
  window_px: height and width of a window.
  resize_px: short side of the resized image; 0 = the image is one window.
  stride_px: distance of neighboring windows; 0 = windows do not overlap.
  grid: (h, w) of the tokens of a window.
  values: meaning of the values of masks.
  """
  source: Source
  recipe: schema.Recipe
  window_px: tuple[int, int]
  resize_px: int
  stride_px: int
  grid: tuple[int, int]
  values: MaskValues

  def __call__(self, index: int) -> Batch:
    """Returns the windows of an example, row by row, with the classes of their tokens and the mask:

      windows  [n, H, W, 3] u8           size   [2], height and width of the resized image, px
      tokens   [n, h, w] i32             index  [] i64
      mask     [H_m, W_m] i32, at its stored size

    The class of pixels and tokens that are not counted is -1.

    Raises:
      UserError: image or mask cannot be read, or their sizes differ.
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
    """Returns the image `[H, W, 3] u8` and its mask `[H, W] i32`, -1 where pixels do not count."""
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
    """Returns the distance of windows along an axis, px."""
    return self.stride_px or self.window_px[axis]

  def _resized_size(self, size: tuple[int, int]) -> tuple[int, int]:
    """Returns the size of the resized image: its short side is `resize_px`, or longer if the window is larger."""
    if not self.resize_px:
      return self.window_px
    window_factors = (window / side for window, side in zip(self.window_px, size, strict=True))
    factor = max(self.resize_px / min(size), *window_factors)
    return max(round(size[0] * factor), self.window_px[0]), max(round(size[1] * factor), self.window_px[1])


def starts(size: int, window: int, stride: int) -> list[int]:
  """Returns the first rows (or columns) of windows that cover `size` px; the last one ends at the border."""
  return [*range(0, size - window, stride), size - window]
