"""Geometry of one image on the host: crop, resize, affine, flip and shift.

`transform.py` calls `fit` for evaluation, and for training `resize_crop` with a window from `crops.py`, then `augment`.
Images are `[H, W, 3] u8`, or `[H, W, C] f32` with other channels than RGB, which `resample.resize_float` resizes.

Each function returns the box that it used: top, left, bottom, right in fractions of the stored image, or of the upright
image with `exif_orientation`. A mirrored image has left > right; the box of a shifted one may extend below 0 or beyond
1. Rotation, scale and shear are not part of the box. `device/prepare.py` does the same for images that are held in
memory. Decoding and normalization are in other modules.

An image may keep its own aspect ratio, as in NaFlex of SigLIP 2 (arXiv 2502.14786, section 2.4.2): `native_size` is the
size of the largest grid of patches along its diagonal that has no more patches than allowed, and `cut_patches` returns
the patches. Each side changes by less than one patch against the aspect ratio.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from PIL import Image

from vit_jax.config import schema
from vit_jax.config.schema import Geometry, Interpolation
from vit_jax.core.types import Array, HostArray
from vit_jax.data.image import resample
from vit_jax.data.image.crops import center, fractions
from vit_jax.data.image.decode import Window
from vit_jax.data.image.opencv import cv2

MAX_ENLARGEMENT = 32
"""Up to this multiple of the crop's pixels, an image is enlarged before the crop; above it, only the crop is."""
_MARGIN_PX = 2  # a bicubic filter uses so many stored pixels beyond each side of a window
_MOST_SCALE, _PRECISION = 100., 1e-5  # of the search for a grid in big_vision and transformers
Number = TypeVar('Number', float, Array)


def resize_crop(image: HostArray, image_px: tuple[int, int], *, recipe: schema.Recipe) -> HostArray:
  """Returns a random crop `[h, w, C]` resized to `image_px`, resampled as the recipe requires for crops."""
  interpolation = recipe.interpolation
  if recipe.crop_interpolation is not schema.CropInterpolation.SAME:
    interpolation = Interpolation(recipe.crop_interpolation.value)
  return resize(image, image_px, antialias=recipe.antialias, interpolation=interpolation, truncate=recipe.truncate)


def fit(image: HostArray, *, recipe: schema.Recipe, image_px: tuple[int, int]) -> tuple[HostArray, HostArray]:
  """Returns `image [H, W, C]` as evaluation sees it, `[*image_px, C]` of the same dtype, and its box `[4] f32`.

  With `eval_resize_px`, the image is resized by its short side as `eval_geometry` requires, and its center is cropped;
  else it is resized without preserving the aspect ratio. With `Geometry.TORCHVISION` and `antialias`, the pixels are
  those of torchvision's `Resize` and `CenterCrop` of a PIL image; with `Geometry.BIG_VISION`, without `antialias` and
  with `truncate`, those of big_vision's `resize_small` and `central_crop`.
  """
  interpolation, antialias = eval_resampling(recipe)
  size, window = image_px, Window(0, 0, *image_px)
  if recipe.eval_resize_px:
    height, width = resized_size((image.shape[0], image.shape[1]), recipe.eval_resize_px,
                                 geometry=recipe.eval_geometry)
    size = max(image_px[0], height), max(image_px[1], width)
    window = center_crop(size, image_px, geometry=recipe.eval_geometry)
  # Cropping before resizing would be cheaper, but would shift the image by a fraction of a pixel.
  part = resize_part(image, size, window, antialias=antialias, interpolation=interpolation, truncate=recipe.truncate)
  return part, fractions(window, size)


def eval_resampling(recipe: schema.Recipe) -> tuple[Interpolation, bool]:
  """Returns the interpolation of evaluation, and whether it uses antialiasing."""
  return (Interpolation.AREA, False) if recipe.eval_area else (recipe.interpolation, recipe.antialias)


def augment(image: HostArray, box: HostArray, *, recipe: schema.Recipe,
            rng: np.random.Generator) -> tuple[HostArray, HostArray]:
  """Applies affine, flip and shift to `image [H, W, C]`; `box [4] f32` follows flip and shift."""
  height, width = image.shape[:2]
  if recipe.rotate_degrees or recipe.scale or recipe.shear:
    unit = rng.uniform(-1., 1., 3)
    angle = math.radians(recipe.rotate_degrees) * unit[0]
    image = warp_affine(image, inverse_affine(
        math.cos(angle), math.sin(angle), 1. + unit[1] * recipe.scale, unit[2] * recipe.shear, size=(height, width)))
  if recipe.flip and rng.random() < 0.5:
    image, box = flip(image), box[[0, 3, 2, 1]]
  if recipe.shift_px:
    down, right = rng.integers(-recipe.shift_px, recipe.shift_px + 1, 2)
    image = shift(image, down_px=int(down), right_px=int(right))
    offset = np.array([down / height, right / width], np.float32) * (box[2:] - box[:2])
    box = box - np.tile(offset, 2)
  return image, box


def resize(image: HostArray, image_px: tuple[int, int], *, antialias: bool,
           interpolation: Interpolation = Interpolation.BILINEAR, truncate: bool = False) -> HostArray:
  """Resizes `image [H, W, C]` to `image_px` (height, width) without preserving the aspect ratio, for training.

  Pixel centers are at half-integers. Without `antialias` a filter covers 2 x 2 (bilinear) or 4 x 4 (bicubic, a = -0.75)
  stored pixels at any scale, and values are rounded, or with `truncate` truncated to integers. With `antialias`, the
  filter grows with the scale and covers all pixels, as in Pillow (where bicubic has a = -0.5), and in programs that use
  torchvision or timm. `AREA` is the mean over the covered area. An image of this size is returned unchanged. Images in
  float32 are resized by `resample.resize_float`.

  Differs from big_vision: of its bilinear random crops, 2 truncated values in 10,000 differ by one gray level, since
  OpenCV computes positions in double precision; `resize_part` has the program's pixels, in four times the time.

  Differs from vision_transformer and BiT: rounded bilinear crops have weights of 11 bits. One value in eight differs by
  one gray level, and values are 0.13 levels smaller on average.
  """
  window = Window(0, 0, *image_px)
  is_large = image.size > MAX_ENLARGEMENT * window.height * window.width
  is_equal = image.shape[:2] == tuple(image_px)
  if image.dtype != np.uint8 or antialias or interpolation is Interpolation.AREA or is_equal or is_large:
    return resize_part(image, image_px, window, antialias=antialias, interpolation=interpolation, truncate=truncate)
  if not truncate:
    return cv2.resize(image, image_px[::-1], interpolation=_opencv_filter(interpolation))
  return _resize_float(image, image_px, interpolation, truncate=truncate)


def resized_size(size: tuple[int, int], small_px: int, *, geometry: Geometry) -> tuple[int, int]:
  """Returns height and width, px, of an image of `size` (height, width) after resizing, before the center crop.

  torchvision truncates `small_px * long / short`, big_vision rounds `long * (small_px / short)` half to even, and the
  image processors of ViT and DeiT in transformers resize both sides to `small_px`.
  """
  height, width = size
  match geometry:
    case Geometry.TORCHVISION:
      long_px = int(small_px * max(size) / min(size))
      return (small_px, long_px) if height <= width else (long_px, small_px)
    case Geometry.BIG_VISION:
      factor = small_px / min(size)
      return round(height * factor), round(width * factor)
    case Geometry.HUGGINGFACE:
      return small_px, small_px


def center_crop(size: tuple[int, int], crop: tuple[int, int], *, geometry: Geometry) -> Window:
  """Returns the center `crop` (height, width) of an image of `size` (height, width).

  torchvision rounds half of the remaining pixels to the nearest even number, the others round down.
  """
  if geometry is not Geometry.TORCHVISION:
    return center(size, crop)
  return Window(round((size[0] - crop[0]) / 2), round((size[1] - crop[1]) / 2), *crop)


def resize_part(image: HostArray, size: tuple[int, int], window: Window, *, antialias: bool,
                interpolation: Interpolation, truncate: bool = False) -> HostArray:
  """Returns the part inside `window` of `image [H, W, C]` resized to `size` (height, width), `[*window, C]`.

  An image in float32 is resized by `resample.resize_float`, one of 8 bits as follows. With `antialias`, the pixels are
  Pillow's. Without it, pixels by area and truncated bilinear pixels are TensorFlow's (see `resample`). Rounded bilinear
  pixels are OpenCV's, of which 5 in 10,000 differ by one level from TensorFlow's rounded ones.

  The memory is bounded by the stored image and the window, not by `size`: a line of 2 x 30,000 px with a short side of
  256 px would take 2.9 GB. If the resized image has more than `MAX_ENLARGEMENT` times the pixels of the window, only
  the window's pixels are sampled: with `antialias` by resizing a box with Pillow, which gives the same pixels up to
  rounding; bicubic pixels without it by OpenCV's warp, whose coordinates have a resolution of 1/32 px of the stored
  image.
  """
  if image.shape[:2] == tuple(size):
    return window.cut(image)
  if image.dtype != np.uint8:
    return resample.resize_float(image, size, window, interpolation=interpolation, antialias=antialias)
  enlarged = size[0] * size[1]
  is_small = enlarged <= max(image.shape[0] * image.shape[1], MAX_ENLARGEMENT * window.height * window.width)
  is_area, is_bilinear = interpolation is Interpolation.AREA, interpolation is Interpolation.BILINEAR
  if is_area or (is_bilinear and not antialias and (truncate or not is_small)):
    return resample.resize(image, size, window, area=is_area, truncate=truncate)
  if not antialias:
    if is_small:
      return window.cut(_resize_float(image, size, interpolation, truncate=truncate))
    return _warp(image, size, window)
  stored, resampling = Image.fromarray(image), pillow_filter(interpolation)
  if is_small:
    return window.cut(np.asarray(stored.resize((size[1], size[0]), resampling)))
  down, right = image.shape[0] / size[0], image.shape[1] / size[1]  # stored px per px of `size`
  box = (window.left * right, window.top * down, min(image.shape[1], (window.left + window.width) * right),
         min(image.shape[0], (window.top + window.height) * down))
  return np.asarray(stored.resize((window.width, window.height), resampling, box=box))


def _resize_float(image: HostArray, size: tuple[int, int], interpolation: Interpolation, *,
                  truncate: bool) -> HostArray:
  """Returns `image [H, W, 3] u8` resized by OpenCV in float32, without antialias."""
  stored = resample.buffer('stored', image.shape)
  np.copyto(stored, image)
  values = cv2.resize(stored, (size[1], size[0]), resample.buffer('resized', (*size, 3)),
                      interpolation=_opencv_filter(interpolation))
  if interpolation is Interpolation.BICUBIC:
    np.clip(values, 0, 255, out=values)
  return values.astype(np.uint8) if truncate else cv2.convertScaleAbs(values)  # which rounds


def _warp(image: HostArray, size: tuple[int, int], window: Window) -> HostArray:
  """Returns what `resize_part` does for bicubic pixels without antialias, from only the stored pixels near `window`."""
  down, right = image.shape[0] / size[0], image.shape[1] / size[1]  # stored px per px of `size`
  top, left = math.floor(window.top * down), math.floor(window.left * right)
  # `warpAffine` requires images with sides below 32,768 px.
  near = Window(max(0, top - _MARGIN_PX), max(0, left - _MARGIN_PX),
                math.ceil(window.height * down) + 1 + 2 * _MARGIN_PX,
                math.ceil(window.width * right) + 1 + 2 * _MARGIN_PX)
  matrix = np.array([[right, 0, (window.left + 0.5) * right - 0.5 - near.left],
                     [0, down, (window.top + 0.5) * down - 0.5 - near.top]])
  return cv2.warpAffine(near.cut(image), matrix, (window.width, window.height), borderMode=cv2.BORDER_REPLICATE,
                        flags=cv2.INTER_CUBIC | cv2.WARP_INVERSE_MAP)


def flip(image: HostArray) -> HostArray:
  """Mirrors `image [H, W, C]` left to right; returns a copy, since writing a view into a batch is slow."""
  if image.dtype != np.uint8:
    return np.ascontiguousarray(image[:, ::-1])
  return cv2.flip(image, 1)


def shift(image: HostArray, *, down_px: int, right_px: int) -> HostArray:
  """Moves the content of `image [H, W, C]` by at most its size; zeros fill the uncovered part."""
  moved = np.zeros_like(image)
  height, width = image.shape[:2]
  moved[max(0, down_px):height + min(0, down_px), max(0, right_px):width + min(0, right_px)] = \
      image[max(0, -down_px):height - max(0, down_px), max(0, -right_px):width - max(0, right_px)]
  return moved


def warp_affine(image: HostArray, matrix: Sequence[Sequence[float]]) -> HostArray:
  """Samples `image [H, W, 3] u8` bilinearly at `matrix [2, 3] @ (column, row, 1)`; zeros outside."""
  height, width = image.shape[:2]
  return cv2.warpAffine(image, np.asarray(matrix, np.float64), (width, height),
                        flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP, borderMode=cv2.BORDER_CONSTANT)


def inverse_affine(cos: Number, sin: Number, zoom: Number, shear: Number, *,
                   size: tuple[int, int]) -> list[list[Number]]:
  """Returns the matrix `[2, 3]` from output to input pixels (x, y, 1) for rotation, zoom and shear about the center.

  input - c = R(-angle) S(shear) (output - c) / zoom, with c = ((W - 1) / 2, (H - 1) / 2). The numbers may be arrays.
  """
  center_y, center_x = (size[0] - 1) / 2, (size[1] - 1) / 2
  xx, xy = cos / zoom, (cos * shear + sin) / zoom
  yx, yy = -sin / zoom, (cos - sin * shear) / zoom
  return [[xx, xy, center_x - xx * center_x - xy * center_y],
          [yx, yy, center_y - yx * center_x - yy * center_y]]


def pillow_filter(interpolation: Interpolation) -> Image.Resampling:
  """Returns Pillow's filter: bicubic, or else bilinear."""
  return Image.Resampling.BICUBIC if interpolation is Interpolation.BICUBIC else Image.Resampling.BILINEAR


def _opencv_filter(interpolation: Interpolation) -> int:
  return cv2.INTER_CUBIC if interpolation is Interpolation.BICUBIC else cv2.INTER_LINEAR


def choose_grid(size: tuple[int, int], patch: int, num_tokens: int) -> tuple[int, int]:
  """Returns rows and columns of patches for an image of `size` (height, width), at most `num_tokens` together.

  It is the grid of the largest scale for which `ceil(height * scale / patch) * ceil(width * scale / patch)` is within
  `num_tokens`, found by the bisection of SigLIP 2, whose scale has a precision of 1e-5. An image that is more than
  `num_tokens` times as long as it is wide gets one row or column of them.
  """
  def grid_at(scale: float) -> tuple[int, int]:
    rows, columns = (max(1, math.ceil(side * scale / patch)) for side in size)
    return rows, columns

  low, high = _PRECISION / 10, _MOST_SCALE
  while high - low >= _PRECISION:
    middle = (low + high) / 2
    low, high = (middle, high) if math.prod(grid_at(middle)) <= num_tokens else (low, middle)
  rows, columns = grid_at(low)
  return min(rows, num_tokens), min(columns, num_tokens)


def native_size(size: tuple[int, int], patch: int, num_tokens: int) -> tuple[int, int]:
  """Returns height and width, px, to which an image of `size` (height, width) is resized at its own aspect ratio."""
  rows, columns = choose_grid(size, patch, num_tokens)
  return rows * patch, columns * patch


def fit_native(image: HostArray, *, recipe: schema.Recipe, image_px: tuple[int, int]) -> tuple[HostArray, HostArray]:
  """Returns the patches of `image [H, W, 3] u8` at its own aspect ratio, and their grid `[2] i32`, for evaluation.

  There are as many patches as in an image of `image_px`. They are returned as an array `[*image_px, 3] u8`, so that
  batches have the same shape for either kind of image.
  """
  patch = recipe.eval_native_patch
  num_tokens = image_px[0] * image_px[1] // patch ** 2
  interpolation, antialias = eval_resampling(recipe)
  resized = resize(image, native_size((image.shape[0], image.shape[1]), patch, num_tokens), antialias=antialias,
                   interpolation=interpolation, truncate=recipe.truncate)
  patches, grid = cut_patches(resized, patch, num_tokens)
  return patches.reshape(*image_px, 3), grid


def cut_patches(image: HostArray, patch: int, num_tokens: int) -> tuple[HostArray, HostArray]:
  """Returns the patches of an image `[h P, w P, 3] u8`, and their grid `[2] i32`.

  The patches are in raster order, one below the other, `[num_tokens * P, P, 3] u8`; zeros follow the last one.
  """
  rows, columns = image.shape[0] // patch, image.shape[1] // patch
  patches = image.reshape(rows, patch, columns, patch, 3).swapaxes(1, 2)
  padded = np.zeros((num_tokens * patch, patch, 3), np.uint8)
  padded[:rows * columns * patch] = patches.reshape(-1, patch, 3)
  return padded, np.array([rows, columns], np.int32)
