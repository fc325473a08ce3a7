"""Pictures on the host: decoding, crops, resizing and mild geometry, on uint8 arrays `[H, W, 3]`, RGB.

Pure functions; whatever is random comes in as numbers. Knows nothing of recipes, sources or batches.
"""
from __future__ import annotations

import math
from typing import NamedTuple

import cv2
import numpy as np
from PIL import Image

from vit_jax.config.schema import Geometry, Interpolation
from vit_jax.core.types import HostArray
from vit_jax.data.image import headers, pillow
from vit_jax.data.image.headers import AS_STORED, BadImage, Reading

CROP_TRIES = 10
MOST_ENLARGED = 32
"""An image is enlarged whole before a crop up to this multiple of the crop's pixels; above it, only the crop is."""
_READ = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
_MARGIN_PX = 2  # stored pixels beside a window that bicubic filters reach
_JPEG_START, _JPEG_SCAN, _JPEG_END = b'\xff\xd8', b'\xff\xda', b'\xff\xd9'


class Window(NamedTuple):
  """A rectangle of a picture, px."""
  top: int
  left: int
  height: int
  width: int


class Picture(NamedTuple):
  """A decoded picture `[H, W, 3] u8`, to be cropped."""
  image: HostArray

  @property
  def size(self) -> tuple[int, int]:
    """Height, width."""
    return self.image.shape[0], self.image.shape[1]

  def cut(self, window: Window) -> HostArray:
    """The part inside a window."""
    return cut(self.image, window)


def is_jpeg(encoded: bytes) -> bool:
  """Whether a file begins as a JPEG does."""
  return encoded[:2] == _JPEG_START


def check_end(encoded: bytes) -> None:
  """Raises BadImage if a JPEG is cut short.

  OpenCV before 5 fills the missing part with grey and says nothing. A thumbnail has an end marker of its own, so the
  one that counts comes after the last scan.
  """
  if not encoded.endswith(_JPEG_END, 4) and encoded.rfind(_JPEG_END) < max(encoded.rfind(_JPEG_SCAN), 2):
    raise BadImage(f'the JPEG ends early: no end marker in {len(encoded):,} bytes')


def decode(encoded: bytes, how: Reading = AS_STORED) -> HostArray:
  """RGB image `[H, W, 3] u8` from a JPEG, PNG, WebP, BMP, GIF, TIFF, AVIF, JPEG 2000 or PPM file.

  Grey images are repeated over the channels, transparency is dropped, 16 bits become 8, CMYK becomes RGB.

  Args:
    encoded: the file.
    how: pixels it may have at most, and whether its EXIF orientation counts.

  Raises:
    BadImage: not an image, cut short, or too large. Damage inside a JPEG that leaves it parseable is not noticed.
    MemoryError: there is not enough memory for its pixels.
  """
  kind = headers.find_kind(encoded)
  if kind in pillow.READERS:
    return pillow.decode(encoded, kind, how)
  header, encoded = read_header(encoded, kind)
  headers.check_size(header.height, header.width, how)
  if kind == 'jpeg':
    check_end(encoded)
  try:
    image = cv2.imdecode(np.frombuffer(encoded, np.uint8), _READ)
  except cv2.error as error:
    if error.code == cv2.Error.StsNoMem:
      raise MemoryError(f'{header.width:,} x {header.height:,} px') from error
    raise BadImage(f'not an image: {error.err or error}') from error
  if image is None:
    raise BadImage(f'not an image, or cut short ({len(encoded):,} bytes, beginning {encoded[:4]!r})')
  return pillow.orient(image, header.orientation) if how.upright else image


def read_header(encoded: bytes, kind: str) -> tuple[headers.Header, bytes]:
  """The header of a file of a kind that OpenCV decodes, and what of the file it is to decode.

  Raises:
    BadImage: there is none.
  """
  match kind:
    case 'jpeg':
      return headers.read_jpeg(encoded), encoded
    case 'png':
      return headers.read_png(encoded)
    case 'webp':
      return headers.read_webp(encoded), encoded
    case 'bmp':
      return headers.read_bmp(encoded), encoded
    case 'heic' | 'jxl':
      name = {'heic': 'HEIC', 'jxl': 'JPEG XL'}[kind]
      raise BadImage(f'a {name} image, which is not decoded here. Convert it to JPEG or PNG first')
  if not encoded:
    raise BadImage('the file is empty')
  raise BadImage(f'not an image, or cut short ({len(encoded):,} bytes, beginning {encoded[:4]!r})')


def find_orientation(encoded: bytes) -> int:
  """The EXIF orientation of an image file, 1 to 8; 1 = upright, or it says none. Raises BadImage as `decode` does."""
  kind = headers.find_kind(encoded)
  return (pillow.find_orientation(encoded, kind) if kind in pillow.READERS else
          read_header(encoded, kind)[0].orientation)


def as_rgb(image: bytes | HostArray, how: Reading = AS_STORED) -> HostArray:
  """`[H, W, 3] u8` from encoded bytes or from an array `[H, W, 3 or 1] u8`."""
  if isinstance(image, bytes):
    return decode(image, how)
  return np.repeat(image, 3, axis=2) if image.shape[2] == 1 else image


def open_picture(image: bytes | HostArray, how: Reading = AS_STORED) -> Picture:
  """A stored picture, decoded."""
  return Picture(as_rgb(image, how))


def inception_crop(size: tuple[int, int], *, rng: np.random.Generator, area: tuple[float, float],
                   aspect: tuple[float, float]) -> Window:
  """A random rectangle of a picture of `size` (height, width), after arXiv 1409.4842, section 6.

  The area is uniform in `area` (fractions of the picture), the aspect ratio width / height is log-uniform in
  `aspect`, so that wide and tall are as likely; the place is uniform. Rectangles that do not fit are drawn
  again, ten times in all; then the largest central one with an allowed aspect ratio is taken. TensorFlow's
  sampler differs: it draws the aspect ratio uniformly and the height, not the area, uniformly.
  """
  height, width = size
  for _ in range(CROP_TRIES):
    pixels = rng.uniform(*area) * height * width
    ratio = math.exp(rng.uniform(math.log(aspect[0]), math.log(aspect[1])))
    crop_w, crop_h = max(1, round(math.sqrt(pixels * ratio))), max(1, round(math.sqrt(pixels / ratio)))
    if crop_w <= width and crop_h <= height:
      top = int(rng.integers(0, height - crop_h + 1))
      return Window(top, int(rng.integers(0, width - crop_w + 1)), crop_h, crop_w)
  ratio = min(max(width / height, aspect[0]), aspect[1])
  return center(size, (min(height, max(1, round(width / ratio))), min(width, max(1, round(height * ratio)))))


def window_crop(size: tuple[int, int], *, rng: np.random.Generator, area: tuple[float, float]) -> Window:
  """A rectangle with the shape of a picture of `size` (height, width) at a random place.

  Its area is uniform in `area` (fractions of the picture). Resized to P px it is what resizing the whole picture to
  P / sqrt(area) and cropping P at random gives, up to parts of a pixel (BiT: 128 of 160, 480 of 512).
  """
  height, width = size
  factor = math.sqrt(rng.uniform(*area))
  crop_h, crop_w = max(1, round(height * factor)), max(1, round(width * factor))
  top, left = int(rng.integers(0, height - crop_h + 1)), int(rng.integers(0, width - crop_w + 1))
  return Window(top, left, crop_h, crop_w)


def center(size: tuple[int, int], crop: tuple[int, int]) -> Window:
  """The middle `crop` (height, width) of a picture of `size`."""
  return Window((size[0] - crop[0]) // 2, (size[1] - crop[1]) // 2, *crop)


def cut(image: HostArray, window: Window) -> HostArray:
  """The part of `image [H, W, 3]` inside `window`; a view."""
  return image[window.top:window.top + window.height, window.left:window.left + window.width]


def fractions(window: Window, size: tuple[int, int]) -> HostArray:
  """`window` as a box `[4] f32`: top, left, bottom, right in fractions of `size` (height, width)."""
  (height, width), (top, left, crop_h, crop_w) = size, window
  return np.array([top / height, left / width, (top + crop_h) / height, (left + crop_w) / width], np.float32)


def resize(image: HostArray, image_px: tuple[int, int], *, antialias: bool,
           interpolation: Interpolation = Interpolation.BILINEAR) -> HostArray:
  """`image [H, W, 3] u8` at `image_px` (height, width), aspect ratio not kept; the same array at equal size.

  Half-pixel centres throughout. Without `antialias` a filter covers 2 x 2 (bilinear) or 4 x 4 (bicubic, a = -0.75)
  stored pixels whatever the scale. With it, it grows with the scale and misses none, as in Pillow (bicubic has
  a = -0.5 there), and so in what was trained with torchvision or timm. `AREA` is the mean over the covered area
  where both sides shrink, else bilinear.
  """
  if image.shape[:2] == tuple(image_px):
    return image
  size = (image_px[1], image_px[0])
  if antialias and interpolation is not Interpolation.AREA:
    how = Image.Resampling.BICUBIC if interpolation is Interpolation.BICUBIC else Image.Resampling.BILINEAR
    return np.asarray(Image.fromarray(image).resize(size, how))
  shrinks = image.shape[0] >= image_px[0] and image.shape[1] >= image_px[1]
  if interpolation is Interpolation.AREA and shrinks:
    return cv2.resize(image, size, interpolation=cv2.INTER_AREA)
  how_cv2 = cv2.INTER_CUBIC if interpolation is Interpolation.BICUBIC else cv2.INTER_LINEAR
  return cv2.resize(image, size, interpolation=how_cv2)


def resized_size(size: tuple[int, int], small_px: int, *, geometry: Geometry) -> tuple[int, int]:
  """Height and width, px, that an image of `size` (height, width) has before the centre crop.

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


def centered(size: tuple[int, int], crop: tuple[int, int], *, geometry: Geometry) -> Window:
  """The centre `crop` (height, width) of an image of `size` (height, width).

  torchvision rounds half of what is left to the nearest even pixel, the others round it down.
  """
  if geometry is not Geometry.TORCHVISION:
    return center(size, crop)
  return Window(round((size[0] - crop[0]) / 2), round((size[1] - crop[1]) / 2), *crop)


def resize_small_center_crop(image: HostArray, image_px: tuple[int, int], *, small_px: int, antialias: bool,
                             interpolation: Interpolation = Interpolation.BILINEAR,
                             geometry: Geometry = Geometry.BIG_VISION) -> tuple[HostArray, HostArray]:
  """Resizes the image by `small_px` as `geometry` says, then takes the centre `image_px`.

  With `Geometry.TORCHVISION` and `antialias`, the pixels are those of torchvision's `Resize` and `CenterCrop` on a
  PIL image.

  Returns:
    The image `[*image_px, 3] u8`, and its box `[4] f32` in the stored image.
  """
  height, width = resized_size((image.shape[0], image.shape[1]), small_px, geometry=geometry)
  size = (max(image_px[0], height), max(image_px[1], width))
  window = centered(size, image_px, geometry=geometry)
  # Cropping first and resizing after would be cheaper, and shift the picture by part of a pixel.
  part = resize_part(image, size, window, antialias=antialias, interpolation=interpolation)
  return part, fractions(window, size)


def resize_part(image: HostArray, size: tuple[int, int], window: Window, *, antialias: bool,
                interpolation: Interpolation) -> HostArray:
  """What `window` shows of `image [H, W, 3] u8` resized to `size` (height, width): `[*window, 3] u8`.

  The memory is bounded by the stored image and the window, not by `size`: a thin line of 2 x 30,000 px with a short
  side of 256 px would take 2.9 GB. A whole image that is enlarged to more than `MOST_ENLARGED` windows is sampled at
  the window's pixels alone: with antialias as Pillow resizes a box, which gives the same pixels, up to rounding; else
  by the warp of OpenCV, whose coordinates are in 1/32 px of the stored image.
  """
  enlarged, shown = size[0] * size[1], window.height * window.width
  if enlarged <= max(image.shape[0] * image.shape[1], MOST_ENLARGED * shown):
    return cut(resize(image, size, antialias=antialias, interpolation=interpolation), window)
  down, right = image.shape[0] / size[0], image.shape[1] / size[1]  # stored px for each px of `size`
  bicubic = interpolation is Interpolation.BICUBIC
  if antialias and interpolation is not Interpolation.AREA:
    box = (window.left * right, window.top * down, min(image.shape[1], (window.left + window.width) * right),
           min(image.shape[0], (window.top + window.height) * down))
    how = Image.Resampling.BICUBIC if bicubic else Image.Resampling.BILINEAR
    return np.asarray(Image.fromarray(image).resize((window.width, window.height), how, box=box))
  top, left = math.floor(window.top * down), math.floor(window.left * right)
  # `warpAffine` takes images with sides of less than 32,768 px.
  near = Window(max(0, top - _MARGIN_PX), max(0, left - _MARGIN_PX),
                math.ceil(window.height * down) + 1 + 2 * _MARGIN_PX,
                math.ceil(window.width * right) + 1 + 2 * _MARGIN_PX)
  matrix = np.array([[right, 0, (window.left + .5) * right - .5 - near.left],
                     [0, down, (window.top + .5) * down - .5 - near.top]])
  return cv2.warpAffine(cut(image, near), matrix, (window.width, window.height), borderMode=cv2.BORDER_REPLICATE,
                        flags=(cv2.INTER_CUBIC if bicubic else cv2.INTER_LINEAR) | cv2.WARP_INVERSE_MAP)


def flip(image: HostArray) -> HostArray:
  """`image [H, W, 3] u8` mirrored left to right; a copy, as a view is slow to write into a batch."""
  return cv2.flip(image, 1)


def shift(image: HostArray, *, down_px: int, right_px: int) -> HostArray:
  """The content of `image [H, W, 3]` moved by at most its size, zeros moving in."""
  moved = np.zeros_like(image)
  height, width = image.shape[:2]
  moved[max(0, down_px):height + min(0, down_px), max(0, right_px):width + min(0, right_px)] = \
      image[max(0, -down_px):height - max(0, down_px), max(0, -right_px):width - max(0, right_px)]
  return moved


def warp(image: HostArray, matrix: HostArray) -> HostArray:
  """`image [H, W, 3] u8` sampled at `matrix [2, 3] @ (x, y, 1)`: bilinear, zeros outside."""
  height, width = image.shape[:2]
  return cv2.warpAffine(image, np.asarray(matrix, np.float64), (width, height),
                        flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP, borderMode=cv2.BORDER_CONSTANT)
