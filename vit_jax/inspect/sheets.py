"""Sheets of images as PNG files: rows with captions, filters, images at points of a plane.

Images are resized and pasted onto one array, and Pillow writes the texts onto it, in a fraction of the time that
matplotlib takes for one figure. The module knows nothing about models and files.
"""
from __future__ import annotations

import functools
import importlib.util
import io
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vit_jax.core.types import HostArray
from vit_jax.inspect import plotting

if TYPE_CHECKING:
  from matplotlib.figure import Figure
  from PIL.ImageFont import FreeTypeFont

DPI = 130


class Text(NamedTuple):
  """A text on a sheet.

  x, y: of its anchor, in pixels from the lower left corner of the sheet.
  size: in points.
  anchor: as in Pillow: l, m or r for the left end, middle or right end at x; a or d for the top or the bottom at y.
  is_label: white on dark, as it lies on an image.
  """
  x: float
  y: float
  text: str
  size: float
  anchor: str
  is_label: bool = False



def filters(components: HostArray, share: HostArray) -> bytes:
  """Draws filter components `[n, P, P, 3]` side by side, each scaled separately to [0, 1]."""
  columns = 7
  scaled = [(part - part.min()) / max(part.max() - part.min(), 1e-12) for part in components]
  wall = _Wall([scaled[i:i + columns] for i in range(0, len(scaled), columns)], side_in=0.85, above_in=0.1, top_in=0.3)
  title = f'First {len(components)} principal components of the patch embedding ({share.sum():.0%} of the variance)'
  return wall.draw([Text(wall.width / 2, wall.height - 8, title, 9, 'ma')])


def contact_sheet(rows: Sequence[Sequence[HostArray]], *, captions: Sequence[str], heads: Sequence[str]) -> bytes:
  """Draws rows of images `[H, W, 3]`, in [0, 1] or uint8, with a caption for each row and a title for each column."""
  wall = _Wall(rows, side_in=1.3, above_in=0.2)
  texts = []
  for i, caption in enumerate(captions):
    left, upper = wall.corner(i, 0)
    texts.append(Text(left, upper + 4, shorten(caption, 14 * len(rows[i])), 7, 'ld'))
  for j, title in enumerate(heads[:len(rows[0])]):
    left, upper = wall.corner(0, j)
    texts.append(Text(left + wall.cell[1] - 5, upper - 5, title, 6.5, 'ra', is_label=True))
  return wall.draw(texts)


def image_map(points: HostArray, images: HostArray, *, title: str) -> bytes:
  """Draws images `[S, H, W, 3]` uint8 as thumbnails at the points `[S, 2]`."""
  width, height, top, margin = round(7.2 * DPI), round(6 * DPI), 30, 8
  side = 0.42 * DPI / max(images.shape[1:3])
  h, w = (max(1, round(side * n)) for n in images.shape[1:3])
  canvas = np.full((height, width, 3), 255, np.uint8)
  canvas[top:-margin, margin:-margin] = 0
  canvas[top + 1:-margin - 1, margin + 1:-margin - 1] = 255
  low, high = points.min(0), points.max(0)
  places = (points - low) / np.maximum(high - low, 1e-12)
  lefts = np.round(2 * margin + places[:, 0] * (width - 4 * margin - w)).astype(int)
  tops = np.round(top + margin + (1 - places[:, 1]) * (height - top - 3 * margin - h)).astype(int)
  for left, upper, image in zip(lefts, tops, images, strict=True):
    canvas[upper:upper + h, left:left + w] = _resized(image, (h, w))
  return _with_texts(canvas, [Text(width / 2, height - 6, title, 9, 'ma')])


class _Wall:
  """Rows of images `[H, W, 3]` of one size, in [0, 1] or uint8, pasted onto one white array, which is drawn at once.

  Args:
    rows: of images; a row may be shorter than the first.
    side_in: longer side of an image, in inches; above_in: space above each row; top_in: more space above the first.
  """

  def __init__(self, rows: Sequence[Sequence[HostArray]], *, side_in: float, above_in: float,
               top_in: float = 0.) -> None:
    shape = np.array(rows[0][0].shape[:2])
    self.cell = np.maximum(1, np.round(side_in * DPI * shape / shape.max()).astype(int))
    self._gap, self._above, self._top = 6, round(above_in * DPI), round(top_in * DPI)
    self.height = self._top + len(rows) * (self.cell[0] + self._above) + self._gap
    self.width = self._gap + len(rows[0]) * (self.cell[1] + self._gap)
    self._pixels = np.full((self.height, self.width, 3), 255, np.uint8)
    for i, images in enumerate(rows):
      for j, image in enumerate(images):
        left, upper = self.corner(i, j)
        self._pixels[self.height - upper:self.height - upper + self.cell[0], left:left + self.cell[1]] = _resized(
            image, self.cell)

  def corner(self, row: int, column: int) -> tuple[int, int]:
    """Returns x and y of the upper left corner of an image, in pixels from the lower left corner of the figure."""
    return (self._gap + column * (self.cell[1] + self._gap),
            self.height - self._top - self._above - row * (self.cell[0] + self._above))

  def draw(self, texts: Sequence[Text]) -> bytes:
    return _with_texts(self._pixels, texts)


def _resized(image: HostArray, size: Sequence[int]) -> HostArray:
  """Returns an image `[H, W, 3]`, in [0, 1] or uint8, at a size (height, width) as uint8; small images stay square."""
  from PIL import Image
  pixels = image if image.dtype == np.uint8 else np.uint8(np.round(255 * np.clip(image, 0, 1)))
  how = Image.Resampling.NEAREST if max(image.shape[:2]) < 64 else Image.Resampling.LANCZOS
  return np.asarray(Image.fromarray(pixels).resize((int(size[1]), int(size[0])), how))


def _with_texts(pixels: HostArray, texts: Sequence[Text]) -> bytes:
  """Returns `[H, W, 3]` uint8 with texts on it as a PNG file."""
  from PIL import Image, ImageDraw
  image, buffer = Image.fromarray(pixels), io.BytesIO()
  pen = ImageDraw.Draw(image, 'RGBA')
  for one in texts:
    place, font = (one.x, image.height - one.y), _font(one.size)
    if one.is_label:
      left, top, right, bottom = pen.textbbox(place, one.text, font, one.anchor)
      pen.rectangle((left - 3, top - 2, right + 3, bottom + 3), (0, 0, 0, 150))
    pen.text(place, one.text, 'white' if one.is_label else 'black', font, one.anchor)
  image.save(buffer, 'png', dpi=(DPI, DPI))
  return buffer.getvalue()


@functools.cache
def _font(size: float) -> FreeTypeFont:
  """Returns matplotlib's font, which has more letters than that of Pillow, without importing matplotlib."""
  from PIL import ImageFont
  found = importlib.util.find_spec('matplotlib')
  assert found is not None and found.origin is not None
  path = pathlib.Path(found.origin).parent / 'mpl-data' / 'fonts' / 'ttf' / 'DejaVuSans.ttf'
  return ImageFont.truetype(path, size * DPI / 72)


def encode(figure: Figure) -> bytes:
  """Returns the figure as a PNG file. It is laid out and drawn once, and `savefig` would draw it twice."""
  plotting.load()
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from PIL import Image
  canvas, buffer = FigureCanvasAgg(figure), io.BytesIO()
  canvas.draw()
  Image.fromarray(np.asarray(canvas.buffer_rgba())).convert('RGB').save(buffer, 'png', dpi=(DPI, DPI))
  return buffer.getvalue()


def shorten(text: str, length: int) -> str:
  """Returns at most `length` characters of a text, with an ellipsis where some are left out."""
  return text if len(text) <= length else text[:length - 1] + '…'
