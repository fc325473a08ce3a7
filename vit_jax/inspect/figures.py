"""The figures of an inspection and of a study, as PNG files with labels on white.

Each function takes arrays and returns the bytes of a file. Pixels of images stay square. The module knows nothing about
models and files. matplotlib is imported when the first figure is drawn.
"""
from __future__ import annotations

import contextlib
import functools
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vit_jax.core.types import HostArray

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

COLORS = ('#0a84c6', '#e0731d', '#159f78', '#c565a0', '#8c74d6', '#b08a00', '#56b4e9', '#d64545')
"""Readable on white and on near-black: Okabe and Ito 2008, without black and yellow, blue first."""
_DPI = 130
_MASKED_GRAY = 128  # gray level of masked patches
_OPACITY = .55  # of the colors over an image
_COLOR_MAP = 'viridis'  # of lines by depth, and of tables
_MAX_NAMES = 24  # in the legend of a map


@functools.cache
def load_matplotlib() -> ModuleType:
  """Returns the module matplotlib, whichever backend the environment names.

  A notebook names its own backend in `MPLBACKEND`, and matplotlib cannot be imported in an environment that lacks this
  backend. Figures use the Agg canvas and no window; the named backend is chosen after the import, if it exists.
  """
  named = os.environ.pop('MPLBACKEND', None)
  try:
    import matplotlib
  finally:
    if named is not None:
      os.environ['MPLBACKEND'] = named
  if named:
    with contextlib.suppress(ValueError):  # there is no such backend
      matplotlib.rcParams['backend'] = named
  return matplotlib


@contextlib.contextmanager
def canvas(width_in: float, height_in: float, *, columns: int = 1) -> Iterator[tuple[Figure, list[Any]]]:
  """Yields a figure without a window, and its axes, side by side."""
  matplotlib = load_matplotlib()
  from matplotlib.figure import Figure
  with matplotlib.rc_context({'font.size': 9, 'axes.linewidth': .6, 'axes.formatter.useoffset': False}):
    figure = Figure(figsize=(width_in, height_in), dpi=_DPI, layout='constrained' if columns else None)
    yield figure, list(figure.subplots(1, columns, squeeze=False)[0]) if columns else []


def encode(figure: Figure) -> bytes:
  """Returns the figure as a PNG file without transparency, which `savefig` would write at twice the time."""
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from PIL import Image
  drawing, file = FigureCanvasAgg(figure), io.BytesIO()
  drawing.draw()
  Image.fromarray(np.asarray(drawing.buffer_rgba())).convert('RGB').save(file, 'png', dpi=(_DPI, _DPI))
  return file.getvalue()


def finish(ax: Axes, *, xlabel: str, ylabel: str, title: str = '') -> None:
  """Sets the labels of axes, a grid and no frame."""
  ax.set(xlabel=xlabel, ylabel=ylabel)
  ax.set_title(title, fontsize=10)
  ax.grid(alpha=.25)
  ax.spines[['top', 'right']].set_visible(False)


def shorten(text: str, length: int) -> str:
  """Returns at most `length` characters of a text, with an ellipsis where some are left out."""
  return text if len(text) <= length else text[:length - 1] + '…'


def position_tiles(similarity: HostArray) -> bytes:
  """Draws cosine similarities `[h, w, h, w]` with one tile for each position, at its place in the image."""
  h, w = similarity.shape[:2]
  gap = 1
  wall = np.pad(similarity, ((0, 0), (0, 0), (0, gap), (0, gap)), constant_values=np.nan)  # [h, w, h + 1, w + 1]
  wall = wall.swapaxes(1, 2).reshape(h * (h + gap), w * (w + gap))[:-gap, :-gap]
  side = 5.2 / max(h, w)
  with canvas(side * w + 1.2, side * h + .6) as (figure, (ax,)):
    image = ax.imshow(wall, cmap=_COLOR_MAP, vmin=max(min(similarity.min(), 0.), -1.), vmax=1., interpolation='nearest')
    ax.set_xticks([j * (w + gap) + (w - 1) / 2 for j in range(w)], range(1, w + 1))
    ax.set_yticks([i * (h + gap) + (h - 1) / 2 for i in range(h)], range(1, h + 1))
    ax.tick_params(length=0, labelsize=7)
    finish(ax, xlabel='input patch column', ylabel='input patch row', title='Position embedding similarity')
    ax.grid(False)
    ax.spines[:].set_visible(False)
    figure.colorbar(image, ax=ax, label='cosine similarity', shrink=.8)
    return encode(figure)


def heads_by_depth(values: Mapping[str, HostArray], *, ylabel: str, title: str) -> bytes:
  """Draws a dot for each head over the depth of its block, and a line through their means.

  Args:
    values: `[L, A]` by name of the model.
    ylabel: with the unit.
    title: of the figure.
  """
  with canvas(5.2, 3.4) as (figure, (ax,)):
    for number, (name, table) in enumerate(values.items()):
      depth, color = np.arange(1, len(table) + 1), COLORS[number % len(COLORS)]
      ax.plot(depth, table, 'o', color=color, markersize=3, alpha=.55, markeredgewidth=0)
      ax.plot(depth, table.mean(1), color=color, linewidth=1.4, label=name)
    ax.locator_params(axis='x', integer=True)
    finish(ax, xlabel='block', ylabel=ylabel, title=title)
    ax.set_ylim(bottom=0.)
    if len(values) > 1:
      ax.legend(frameon=False)
    return encode(figure)


def panels(tables: Mapping[str, tuple[str, Mapping[str, tuple[HostArray, HostArray]]]], *, xlabel: str,
           is_log: bool = False) -> bytes:
  """Draws curves in panels side by side, with markers if there are few points.

  Args:
    tables: title to label of the y axis and curves `(x [n], y [n])` by name.
    xlabel: of whole numbers.
    is_log: whether y axes are logarithmic.
  """
  with canvas(4.8 * len(tables), 3.5, columns=len(tables)) as (figure, axes):
    for ax, (title, (ylabel, curves)) in zip(axes, tables.items(), strict=True):
      for number, (name, (x, y)) in enumerate(curves.items()):
        ax.plot(x, y, color=COLORS[number % len(COLORS)], linewidth=1.4, label=name,
                marker='o' if len(x) < 40 else None, markersize=3)
      ax.locator_params(axis='x', integer=True)
      if is_log:
        ax.set_yscale('log')
      if len(curves) > 1:
        ax.legend(frameon=False)
      finish(ax, xlabel=xlabel, ylabel=ylabel, title=title)
    return encode(figure)


def lines_by_depth(tables: Mapping[str, HostArray], x: Callable[[int], HostArray], *, xlabel: str, ylabel: str,
                   title: str) -> bytes:
  """Draws a panel for each model with a line for each depth of `[L + 1, n]`, colored by depth; `x(n)` are its x."""
  matplotlib = load_matplotlib()
  with canvas(4.4 * len(tables) + .6, 3.4, columns=len(tables)) as (figure, axes):
    for ax, (name, table) in zip(axes, tables.items(), strict=True):
      ax.set_prop_cycle(color=matplotlib.colormaps[_COLOR_MAP](np.linspace(0, .92, len(table))))
      ax.plot(x(table.shape[1]), table.T, linewidth=1.2)
      finish(ax, xlabel=xlabel, ylabel=ylabel, title=f'{title}: {name}' if len(tables) > 1 else title)
      shade = matplotlib.cm.ScalarMappable(matplotlib.colors.Normalize(0, len(table) - 1), _COLOR_MAP)
      figure.colorbar(shade, ax=ax, label='after block (0: before the first)').ax.locator_params(axis='y', integer=True)
    return encode(figure)


def layer_similarity(values: HostArray, *, xlabel: str, ylabel: str) -> bytes:
  """Draws the CKA of layers, `[rows, columns]` between 0 and 1, as colors, the first row at the bottom."""
  with canvas(4.4, 3.8) as (figure, (ax,)):
    image = ax.imshow(values, origin='lower', vmin=0, vmax=1, cmap=_COLOR_MAP, interpolation='nearest')
    finish(ax, xlabel=xlabel, ylabel=ylabel, title='Similarity of layers (CKA)')
    ax.grid(False)
    ax.locator_params(integer=True)
    figure.colorbar(image, ax=ax, label='linear CKA')
    return encode(figure)


def scatter(points: HostArray, labels: Sequence[str], images: HostArray) -> bytes:
  """Draws images at points of a plane: with few labels as dots, each label with its color and marker; else themselves.

  Args:
    points: `[S, 2]`.
    labels: of the images.
    images: `[S, H, W, 3]` u8, drawn as thumbnails; of length 0 for dots in any case.
  """
  names = list(dict.fromkeys(labels))
  has_legend = 1 < len(names) <= _MAX_NAMES
  with canvas(7.2, 6.) as (figure, (ax,)):
    ax.set(xticks=[], yticks=[])
    ax.set_title('Images by their features', fontsize=10)
    if has_legend or not len(images):
      for number, name in enumerate(names):
        has_label = np.array([label == name for label in labels])
        ax.scatter(*points[has_label].T, s=16, color=COLORS[number % 8], marker='os^Dv*PX'[number // 8 % 8],
                   label=shorten(name, 24), linewidths=0)
    else:
      from matplotlib.offsetbox import AnnotationBbox, OffsetImage
      ax.scatter(*points.T, s=0)  # which makes room for all of them
      for point, image in zip(points, images, strict=True):
        thumbnail = OffsetImage(image, zoom=.42 * 72 / max(image.shape[:2]))
        ax.add_artist(AnnotationBbox(thumbnail, tuple(point), frameon=False))
    if has_legend:
      ax.legend(frameon=False, fontsize=7, loc='center left', bbox_to_anchor=(1, .5))
    return encode(figure)


def filters(components: HostArray, share: HostArray) -> bytes:
  """Draws filter components `[n, P, P, 3]` side by side, each scaled separately to [0, 1]."""
  columns = 7
  scaled = [(part - part.min()) / max(part.max() - part.min(), 1e-12) for part in components]
  title = f'First {len(components)} principal components of the patch embedding ({share.sum():.0%} of the variance)'
  return contact_sheet([scaled[i:i + columns] for i in range(0, len(scaled), columns)], captions=[title], heads=(),
                       side_in=.85)


def contact_sheet(rows: Sequence[Sequence[HostArray]], *, captions: Sequence[str], heads: Sequence[str],
                  side_in: float = 1.3) -> bytes:
  """Draws rows of images of one size.

  Args:
    rows: of images `[H, W, 3]`, in [0, 1] or uint8; a row may be shorter than the first.
    captions: above the rows.
    heads: of the columns, on the images of the first row.
    side_in: the longer side of an image, in inches.
  """
  gap, above = 6, 26  # pixels between images, and above a row
  shape = np.array(rows[0][0].shape[:2])
  h, w = np.maximum(1, np.round(side_in * _DPI * shape / shape.max()).astype(int)).tolist()
  wall = np.full((len(rows) * (above + h) + gap, len(rows[0]) * (gap + w) + gap, 3), 255, np.uint8)
  height, width = wall.shape[:2]
  with canvas(width / _DPI, height / _DPI, columns=0) as (figure, _):
    for i, images in enumerate(rows):
      top = above + i * (above + h)
      for j, image in enumerate(images):
        left = gap + j * (gap + w)
        wall[top:top + h, left:left + w] = _resized(image, (h, w))
        if i == 0 and j < len(heads):
          figure.text((left + w - 5) / width, 1 - (top + 7) / height, heads[j], fontsize=6.5, color='white', ha='right',
                      va='top', bbox={'facecolor': 'black', 'alpha': .6, 'linewidth': 0, 'pad': 1.5})
      if i < len(captions):
        figure.text(gap / width, 1 - (top - 8) / height, shorten(captions[i], 14 * len(images)), fontsize=7)
    figure.figimage(wall)
    return encode(figure)


def _resized(image: HostArray, size: tuple[int, int]) -> HostArray:
  """Returns an image `[H, W, 3]`, in [0, 1] or uint8, at a size (height, width) as uint8; small images stay square."""
  from PIL import Image
  pixels = image if image.dtype == np.uint8 else np.uint8(np.round(255 * np.clip(image, 0, 1)))
  how = Image.Resampling.NEAREST if max(image.shape[:2]) < 64 else Image.Resampling.LANCZOS
  return np.asarray(Image.fromarray(pixels).resize(size[::-1], how))


def shade(image: HostArray, heat: HostArray) -> HostArray:
  """Returns `image [H, W, 3]` uint8 dimmed where `heat [h, w]` is low, as in the ViT paper's Figure 6; uint8.

  The map is scaled so that the largest 3 % have full brightness, and enlarged by linear interpolation.
  """
  return np.round(image * enlarge(heat / max(_bright(heat), 1e-12), image.shape[:2])[..., None]).astype(np.uint8)


def overlay(image: HostArray, heat: HostArray) -> HostArray:
  """Returns `image [H, W, 3]` uint8 under the colors of `heat [h, w]`, from its minimum to its largest 3 %; uint8."""
  matplotlib = load_matplotlib()
  scaled = (heat - heat.min()) / max(_bright(heat) - float(heat.min()), 1e-12)
  colors = matplotlib.colormaps['inferno'](enlarge(scaled, image.shape[:2]))[..., :3]
  return np.round(255 * ((1 - _OPACITY) * image / 255. + _OPACITY * colors)).astype(np.uint8)


def _bright(heat: HostArray) -> float:
  """Returns the value that 3 % of the cells exceed, so that a few tokens with very high attention do not hide the rest.

  If that is also the minimum, as in a thresholded map, it is the maximum.
  """
  exceeded = float(np.quantile(heat, .97))
  return exceeded if exceeded > float(heat.min()) else float(heat.max())


def enlarge(heat: HostArray, size: tuple[int, int]) -> HostArray:
  """Resizes `[h, w]` in [0, 1] to `size` (height, width), linear between the centers of cells; f64."""
  from PIL import Image
  image = Image.fromarray(np.asarray(heat, np.float32))
  return np.clip(np.asarray(image.resize(size[::-1], Image.Resampling.BILINEAR), np.float64), 0, 1)


def blocks(values: HostArray, size: tuple[int, int]) -> HostArray:
  """Resizes `[h, w, 3]` in [0, 1] to blocks of one color at `size`; uint8."""
  from PIL import Image
  image = Image.fromarray(np.uint8(np.round(255 * values)))
  return np.asarray(image.resize(size[::-1], Image.Resampling.NEAREST))


class Reconstruction(NamedTuple):
  """Predictions of a masked autoencoder for K images: `predicted [K, H, W, 3]` u8 and `hidden [K, H, W]` bool, the
  masked pixels."""
  predicted: HostArray
  hidden: HostArray


def reconstruct(predicted: HostArray, hidden: HostArray, *, mean: Sequence[float],
                std: Sequence[float]) -> Reconstruction:
  """Returns predictions as pixels.

  Args:
    predicted: `[K, H, W, 3]` in the units of the network's input, `(x / 255 - mean) / std`.
    hidden: `[K, H, W, 3]`, 1 where pixels are masked, else 0.
    mean, std: of RGB in [0, 1].
  """
  pixels = np.asarray(predicted, np.float64) * np.asarray(std) + np.asarray(mean)
  return Reconstruction(np.round(255 * np.clip(pixels, 0, 1)).astype(np.uint8), np.asarray(hidden)[..., 0] > 0.5)


def reconstruction_sheet(images: HostArray, reconstruction: Reconstruction, captions: Sequence[str]) -> bytes:
  """Draws a row for each of the images `[K, H, W, 3]` u8 (MAE, arXiv 2111.06377, Figure 2)."""
  rows = []
  for image, predicted, hidden in zip(images, reconstruction.predicted, reconstruction.hidden[..., None],
                                      strict=True):
    rows.append([image, np.where(hidden, np.uint8(_MASKED_GRAY), image), predicted, np.where(hidden, predicted, image)])
  return contact_sheet(rows, captions=captions, heads=['input', 'masked', 'prediction', 'prediction where masked'])
