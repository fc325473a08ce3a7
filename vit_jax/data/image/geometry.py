"""Geometry of one image on the host: crop, resize, affine, flip and shift.

`transform.py` calls `fit` for evaluation, and for training `resize_crop` with a window from `crops.py`, then `augment`.
Images are `[H, W, 3] u8`, or `[H, W, C] f32` with other channels than RGB, which `resample.resize_float` resizes.

`fit` and `augment` also return a box, the part of the stored image that is visible in the result: top, left, bottom and
right in fractions of the stored image, or of the upright image with `exif_orientation`. A mirrored image has left >
right; the box of a shifted image may extend below 0 or beyond 1. Rotation, scale and shear do not change the box.
`device/prepare.py` does the same for images that are held in memory. Decoding and normalization are in other modules.

An image may keep its own aspect ratio, as in NaFlex of SigLIP 2 (arXiv 2502.14786, section 2.4.2): `choose_grid` finds
the largest grid of patches with this aspect ratio and a limited number of patches, `native_size` is the size of that
grid in px, and `cut_patches` returns the patches. Each side changes by less than one patch.
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
"""If the resized image has more than this multiple of the crop's pixels, only the pixels of the crop are computed."""
_MARGIN_PX = 2  # a bicubic filter uses this many stored pixels beyond each side of a window
_MAX_SCALE, _SCALE_PRECISION = 100., 1e-5  # of `choose_grid`; from big_vision and transformers
Number = TypeVar('Number', float, Array)


def resize_crop(image: HostArray, image_px: tuple[int, int], *, recipe: schema.Recipe) -> HostArray:
  """Returns a random crop `[h, w, C]` resized to `image_px`, resampled as the recipe requires for crops."""
  interpolation = recipe.interpolation
  if recipe.crop_interpolation is not schema.CropInterpolation.SAME:
    interpolation = Interpolation(recipe.crop_interpolation.value)
  return resize(image, image_px, antialias=recipe.antialias, interpolation=interpolation, truncate=recipe.truncate)


def fit(image: HostArray, *, recipe: schema.Recipe, image_px: tuple[int, int]) -> tuple[HostArray, HostArray]:
  """Returns `image [H, W, C]` preprocessed for evaluation, `[*image_px, C]` of the same dtype, and the box `[4] f32`.

  With `eval_resize_px`, the image is resized by its short side as `eval_geometry` requires, and its center is cropped.
  Else it is resized without preserving the aspect ratio. With `Geometry.TORCHVISION` and `antialias`, the pixels are
  those of torchvision's `Resize` and `CenterCrop` of a PIL image; with `Geometry.BIG_VISION`, without `antialias`
  and with `truncate`, the pixels are those of big_vision's `resize_small` and `central_crop`.
  """
  interpolation, antialias = eval_resampling(recipe)
  size, window = image_px, Window(0, 0, *image_px)
  if recipe.eval_resize_px:
    height, width = resized_size((image.shape[0], image.shape[1]), recipe.eval_resize_px,
                                 geometry=recipe.eval_geometry)
    size = max(image_px[0], height), max(image_px[1], width)
    window = center_crop(size, image_px, geometry=recipe.eval_geometry)
  # Cropping before resizing would be cheaper, but would shift the image by a fraction of a pixel.
  crop = resize_part(image, size, window, antialias=antialias, interpolation=interpolation, truncate=recipe.truncate)
  return crop, fractions(window, size)


def eval_resampling(recipe: schema.Recipe) -> tuple[Interpolation, bool]:
  """Returns the interpolation of evaluation, and whether it uses antialiasing."""
  return (Interpolation.AREA, False) if recipe.eval_area else (recipe.interpolation, recipe.antialias)


def augment(image: HostArray, box: HostArray, *, recipe: schema.Recipe,
            rng: np.random.Generator) -> tuple[HostArray, HostArray]:
  """Applies affine, flip and shift to `image [H, W, C]`; returns the result, and `box [4] f32` after flip and shift."""
  height, width = image.shape[:2]
  if recipe.rotate_degrees or recipe.scale or recipe.shear:
    draws = rng.uniform(-1., 1., 3)
    angle = math.radians(recipe.rotate_degrees) * draws[0]
    zoom = 1. + draws[1] * recipe.scale
    matrix = inverse_affine(math.cos(angle), math.sin(angle), zoom, draws[2] * recipe.shear, size=(height, width))
    image = warp_affine(image, matrix)
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

  Pixel centers are at half-integers. Without `antialias`, a filter covers 2 x 2 (bilinear) or 4 x 4 (bicubic, a =
  -0.75) stored pixels at any scale, and values are rounded, or with `truncate` truncated to integers. With `antialias`,
  the filter grows with the scale and covers all pixels, as in Pillow (where bicubic has a = -0.5) and in programs that
  use torchvision or timm. `AREA` is the mean over the covered area. An image of this size is returned unchanged.

  Differs from big_vision: 2 in 10,000 truncated values of bilinear random crops differ by one gray level, since OpenCV
  computes positions in double precision; `resize_part` returns big_vision's pixels, in four times the time.

  Differs from vision_transformer and BiT: rounded bilinear crops have weights of 11 bits. One value in eight differs by
  one gray level, and values are 0.13 levels smaller on average.
  """
  is_much_larger = image.size > MAX_ENLARGEMENT * image_px[0] * image_px[1]  # `size` is the number of values
  is_equal = image.shape[:2] == tuple(image_px)
  if image.dtype != np.uint8 or antialias or interpolation is Interpolation.AREA or is_equal or is_much_larger:
    return resize_part(image, image_px, Window(0, 0, *image_px), antialias=antialias, interpolation=interpolation,
                       truncate=truncate)
  if truncate:
    return _resize_opencv(image, image_px, interpolation, truncate=True)
  return cv2.resize(image, image_px[::-1], interpolation=_opencv_filter(interpolation))


def resized_size(size: tuple[int, int], small_px: int, *, geometry: Geometry) -> tuple[int, int]:
  """Returns height and width, px, of an image of `size` (height, width) after evaluation resized its short side.

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
  """Returns the central rectangle of size `crop` (height, width) of an image of `size` (height, width).

  The margins are half of the remaining pixels: torchvision rounds half to even, other programs round down.
  """
  if geometry is not Geometry.TORCHVISION:
    return center(size, crop)
  return Window(round((size[0] - crop[0]) / 2), round((size[1] - crop[1]) / 2), *crop)


def resize_part(image: HostArray, size: tuple[int, int], window: Window, *, antialias: bool,
                interpolation: Interpolation, truncate: bool = False) -> HostArray:
  """Returns the part inside `window` of `image [H, W, C]` resized to `size` (height, width), `[*window, C]`.

  `resample.resize_float` resizes images in float32. For images of 8 bits with `antialias`, the pixels are Pillow's.
  Without `antialias`, `AREA` and truncated bilinear pixels are TensorFlow's (see `resample`), and the others OpenCV's:
  5 in 10,000 rounded bilinear pixels differ by one level from TensorFlow's.

  The memory is bounded by the stored image and the window, not by `size`: an image of 2 x 30,000 px, resized to a short
  side of 256 px, would take 2.9 GB. If the resized image has more than `MAX_ENLARGEMENT` times the pixels of the
  window, only the pixels of the window are computed. With `antialias`, Pillow resizes a box, which gives the same
  pixels up to rounding. Bicubic pixels without `antialias` come from OpenCV's warp, whose coordinates have a resolution
  of 1/32 px of the stored image.
  """
  if image.shape[:2] == tuple(size):
    return window.cut(image)
  if image.dtype != np.uint8:
    return resample.resize_float(image, size, window, interpolation=interpolation, antialias=antialias)
  height, width = image.shape[:2]
  can_resize_all = size[0] * size[1] <= max(height * width, MAX_ENLARGEMENT * window.height * window.width)
  is_area = interpolation is Interpolation.AREA
  is_bilinear = interpolation is Interpolation.BILINEAR
  if is_area or (is_bilinear and not antialias and (truncate or not can_resize_all)):
    return resample.resize(image, size, window, area=is_area, truncate=truncate)
  if not antialias:
    if can_resize_all:
      return window.cut(_resize_opencv(image, size, interpolation, truncate=truncate))
    return _warp(image, size, window)
  stored, resampling = Image.fromarray(image), pillow_filter(interpolation)
  if can_resize_all:
    return window.cut(np.asarray(stored.resize((size[1], size[0]), resampling)))
  step_y, step_x = height / size[0], width / size[1]  # stored px per resized px
  pillow_box = (window.left * step_x, window.top * step_y, min(width, (window.left + window.width) * step_x),
                min(height, (window.top + window.height) * step_y))
  return np.asarray(stored.resize((window.width, window.height), resampling, box=pillow_box))


def _resize_opencv(image: HostArray, size: tuple[int, int], interpolation: Interpolation, *,
                  truncate: bool) -> HostArray:
  """Returns `image [H, W, 3] u8` resized by OpenCV in float32, without antialias."""
  stored = resample.buffer('stored', image.shape)
  np.copyto(stored, image)
  values = cv2.resize(stored, (size[1], size[0]), resample.buffer('resized', (*size, 3)),
                      interpolation=_opencv_filter(interpolation))
  if interpolation is Interpolation.BICUBIC:
    np.clip(values, 0, 255, out=values)
  return values.astype(np.uint8) if truncate else cv2.convertScaleAbs(values)  # `convertScaleAbs` rounds


def _warp(image: HostArray, size: tuple[int, int], window: Window) -> HostArray:
  """Computes bicubic pixels without antialias for `resize_part`, from only the stored pixels around the window."""
  step_y, step_x = image.shape[0] / size[0], image.shape[1] / size[1]  # stored px per resized px
  top, left = math.floor(window.top * step_y), math.floor(window.left * step_x)
  # `warpAffine` requires images with sides below 32,768 px.
  needed = Window(max(0, top - _MARGIN_PX), max(0, left - _MARGIN_PX),
                  math.ceil(window.height * step_y) + 1 + 2 * _MARGIN_PX,
                  math.ceil(window.width * step_x) + 1 + 2 * _MARGIN_PX)
  matrix = np.array([[step_x, 0, (window.left + 0.5) * step_x - 0.5 - needed.left],
                     [0, step_y, (window.top + 0.5) * step_y - 0.5 - needed.top]])
  return cv2.warpAffine(needed.cut(image), matrix, (window.width, window.height), borderMode=cv2.BORDER_REPLICATE,
                        flags=cv2.INTER_CUBIC | cv2.WARP_INVERSE_MAP)


def flip(image: HostArray) -> HostArray:
  """Mirrors `image [H, W, C]` left to right; returns a copy, since writing a view into a batch is slow."""
  if image.dtype != np.uint8:
    return np.ascontiguousarray(image[:, ::-1])
  return cv2.flip(image, 1)


def shift(image: HostArray, *, down_px: int, right_px: int) -> HostArray:
  """Moves the content of `image [H, W, C]` by at most the size of the image; zeros fill the uncovered part."""
  moved = np.zeros_like(image)
  height, width = image.shape[:2]
  moved[max(0, down_px):height + min(0, down_px), max(0, right_px):width + min(0, right_px)] = \
      image[max(0, -down_px):height - max(0, down_px), max(0, -right_px):width - max(0, right_px)]
  return moved


def warp_affine(image: HostArray, matrix: Sequence[Sequence[float]]) -> HostArray:
  """Samples each pixel of `image [H, W, 3] u8` bilinearly at `matrix [2, 3] @ (column, row, 1)`; 0 outside."""
  height, width = image.shape[:2]
  return cv2.warpAffine(image, np.asarray(matrix, np.float64), (width, height),
                        flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP, borderMode=cv2.BORDER_CONSTANT)


def inverse_affine(cos: Number, sin: Number, zoom: Number, shear: Number, *,
                   size: tuple[int, int]) -> list[list[Number]]:
  """Returns the matrix `[2, 3]` from output to input pixels (x, y, 1) for rotation, zoom and shear about the center.

  input - c = R(-angle) S(shear) (output - c) / zoom, with c = ((W - 1) / 2, (H - 1) / 2). Numbers may be JAX arrays.
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
  """Returns the numbers of rows and of columns of patches for an image of `size` (height, width).

  The grid has the largest scale for which `ceil(height * scale / patch) * ceil(width * scale / patch)` is at most
  `num_tokens`; the bisection of SigLIP 2 finds this scale up to 1e-5. An image that is more than `num_tokens` times as
  long as it is wide has one row or one column of `num_tokens` patches.
  """
  def grid_at(scale: float) -> tuple[int, int]:
    rows, columns = (max(1, math.ceil(side * scale / patch)) for side in size)
    return rows, columns

  low, high = _SCALE_PRECISION / 10, _MAX_SCALE
  while high - low >= _SCALE_PRECISION:
    middle = (low + high) / 2
    is_possible = math.prod(grid_at(middle)) <= num_tokens
    low, high = (middle, high) if is_possible else (low, middle)
  rows, columns = grid_at(low)
  return min(rows, num_tokens), min(columns, num_tokens)


def native_size(size: tuple[int, int], patch: int, num_tokens: int) -> tuple[int, int]:
  """Returns height and width, px, to which an image of `size` (height, width) is resized at its own aspect ratio."""
  rows, columns = choose_grid(size, patch, num_tokens)
  return rows * patch, columns * patch


def fit_native(image: HostArray, *, recipe: schema.Recipe, image_px: tuple[int, int]) -> tuple[HostArray, HostArray]:
  """Returns the patches of `image [H, W, 3] u8` at its own aspect ratio, and their grid `[2] i32`, for evaluation.

  The array of patches has the shape `[*image_px, 3] u8`, so that batches have the same shape with and without
  `eval_native_patch`.
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
