"""The pictures of an inspection, as PNG files with their own labels, on white.

Each function takes numbers and returns the bytes of a file. Images are never stretched: pixels stay square. Knows no
model and no file. matplotlib is imported when the first picture is drawn.
"""
from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vit_jax.core.types import HostArray

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

COLORS = ('#0a84c6', '#e0731d', '#159f78', '#c565a0', '#8c74d6', '#b08a00', '#56b4e9', '#d64545')  # as in render.py
_DPI = 130
_DEPTHS = 'viridis'  # of lines by depth, and of maps


def filters(components: HostArray, share: HostArray) -> bytes:
  """Filter components `[n, P, P, 3]` side by side, each scaled to fill the colours on its own."""
  columns = 7
  rows = -(-len(components) // columns)
  with _canvas((.95 * columns, .95 * rows + .5), (rows, columns)) as (figure, axes):
    for ax in axes.flat:
      ax.axis('off')
    for ax, part in zip(axes.flat, components, strict=False):
      ax.imshow((part - part.min()) / max(part.max() - part.min(), 1e-12), interpolation='nearest')
    figure.suptitle(f'First {len(components)} principal components of the patch embedding '
                    f'({share.sum():.0%} of the variance)', fontsize=9)
    return _png(figure)


def position_tiles(similarity: HostArray) -> bytes:
  """`[h, w, h, w]` cosine similarities, a tile for each position, where it stands in the image."""
  h, w = similarity.shape[:2]
  gap = 1
  wall = np.full((h * (h + gap) - gap, w * (w + gap) - gap), np.nan)
  for i in range(h):
    for j in range(w):
      wall[i * (h + gap):i * (h + gap) + h, j * (w + gap):j * (w + gap) + w] = similarity[i, j]
  side = 5.2
  with _canvas((side * w / max(h, w) + 1.2, side * h / max(h, w) + .6)) as (figure, axes):
    ax = axes[0, 0]
    low = float(min(similarity.min(), 0.))
    image = ax.imshow(wall, cmap=_DEPTHS, vmin=max(low, -1.), vmax=1., interpolation='nearest')
    ax.set_xticks([j * (w + gap) + (w - 1) / 2 for j in range(w)], range(1, w + 1))
    ax.set_yticks([i * (h + gap) + (h - 1) / 2 for i in range(h)], range(1, h + 1))
    ax.tick_params(length=0, labelsize=7)
    ax.set_xlabel('input patch column')
    ax.set_ylabel('input patch row')
    ax.spines[:].set_visible(False)
    figure.colorbar(image, ax=ax, label='cosine similarity', shrink=.8)
    ax.set_title('Position embedding similarity', fontsize=9)
    return _png(figure)


def heads_by_depth(values: Mapping[str, HostArray], *, ylabel: str, title: str, bottom: float | None = 0.) -> bytes:
  """A dot for each head over the depth of its block, and a line through their means.

  Args:
    values: `[L, A]` by name of the model.
    ylabel: with the unit.
    title: of the picture.
    bottom: of the axis; None lets it be.
  """
  with _canvas((5.2, 3.4)) as (figure, axes):
    ax = axes[0, 0]
    for number, (name, table) in enumerate(values.items()):
      depth, color = np.arange(1, len(table) + 1), COLORS[number % len(COLORS)]
      ax.plot(np.repeat(depth, table.shape[1]), table.reshape(-1), 'o', color=color, markersize=3, alpha=.55,
              markeredgewidth=0)
      ax.plot(depth, table.mean(1), color=color, linewidth=1.4, label=name)
    _dress(ax, xlabel='block', ylabel=ylabel, title=title, legend=len(values) > 1)
    ax.set_ylim(bottom=bottom)
    return _png(figure)


def lines(curves: Mapping[str, tuple[HostArray, HostArray]], *, xlabel: str, ylabel: str, title: str) -> bytes:
  """Curves `(x [n], y [n])` by name."""
  with _canvas((5.2, 3.4)) as (figure, axes):
    _plot(axes[0, 0], curves)
    _dress(axes[0, 0], xlabel=xlabel, ylabel=ylabel, title=title, legend=len(curves) > 1)
    return _png(figure)


def panels(tables: Mapping[str, tuple[str, Mapping[str, tuple[HostArray, HostArray]]]], *, xlabel: str,
           is_log: bool) -> bytes:
  """Side by side, by title: the name of its y axis, and curves `(x [n], y [n])` by name; with `is_log` y is."""
  with _canvas((4.6 * len(tables), 3.6), (1, len(tables))) as (figure, axes):
    for ax, (title, (ylabel, curves)) in zip(axes[0], tables.items(), strict=True):
      _plot(ax, curves)
      if is_log:
        ax.set_yscale('log')
      _dress(ax, xlabel=xlabel, ylabel=ylabel, title=title, legend=len(curves) > 1)
    return _png(figure)


def lines_by_depth(tables: Mapping[str, HostArray], x: HostArray, *, xlabel: str, ylabel: str, title: str) -> bytes:
  """A panel a model, in it a line `[n]` for each of its depths `[L + 1, n]`, coloured by depth."""
  import matplotlib
  with _canvas((4.4 * len(tables) + .6, 3.4), (1, len(tables))) as (figure, axes):
    for ax, (name, table) in zip(axes[0], tables.items(), strict=True):
      colors = matplotlib.colormaps[_DEPTHS](np.linspace(0, .92, len(table)))
      for color, row in zip(colors, table, strict=True):
        ax.plot(x[:len(row)], row, color=color, linewidth=1.2)
      _dress(ax, xlabel=xlabel, ylabel=ylabel, title=f'{title}: {name}' if len(tables) > 1 else title, legend=False)
      shade = matplotlib.cm.ScalarMappable(matplotlib.colors.Normalize(0, len(table) - 1), _DEPTHS)
      figure.colorbar(shade, ax=ax, label='after block (0: before the first)')
    return _png(figure)


def square_table(values: HostArray, *, xlabel: str, ylabel: str, title: str, unit: str) -> bytes:
  """`[rows, columns]` between 0 and 1 as colours, the first row at the bottom."""
  with _canvas((4.4, 3.8)) as (figure, axes):
    image = axes[0, 0].imshow(values, origin='lower', vmin=0, vmax=1, cmap=_DEPTHS, interpolation='nearest')
    _dress(axes[0, 0], xlabel=xlabel, ylabel=ylabel, title=title, legend=False)
    axes[0, 0].grid(False)
    figure.colorbar(image, ax=axes[0, 0], label=unit)
    return _png(figure)


def contact_sheet(rows: Sequence[Sequence[HostArray]], *, captions: Sequence[str], heads: Sequence[str]) -> bytes:
  """Pictures in rows that belong together: `[H, W, 3]` in [0, 1] or uint8, a caption a row, a title a column."""
  height, width = rows[0][0].shape[:2]
  cell = 1.35
  size = (cell * width / max(height, width) * len(rows[0]) + .1, (cell * height / max(height, width) + .22) * len(rows))
  with _canvas(size, (len(rows), len(rows[0]))) as (figure, axes):
    for line, pictures, caption in zip(axes, rows, captions, strict=True):
      for ax, picture in zip(line, pictures, strict=True):
        ax.imshow(picture, interpolation='nearest' if max(picture.shape[:2]) < 64 else 'antialiased')
        ax.axis('off')
      line[-1].set_title(' ', fontsize=6.5, pad=2)  # keeps the room; the caption itself is wider than its picture
      line[0].text(0, 1.03, _short(caption, 14 * len(pictures)), transform=line[0].transAxes, fontsize=6.5,
                   va='bottom').set_in_layout(False)
    for ax, title in zip(axes[0], heads, strict=False):
      ax.text(.98, .98, title, transform=ax.transAxes, fontsize=6, ha='right', va='top', color='white',
              bbox={'facecolor': '#0009', 'edgecolor': 'none', 'pad': 1.5})
    return _png(figure)


def picture_map(places: HostArray, images: HostArray, *, title: str) -> bytes:
  """Images `[S, H, W, 3]` uint8 themselves at their places `[S, 2]`."""
  from matplotlib.offsetbox import AnnotationBbox, OffsetImage
  with _canvas((7.2, 6.)) as (figure, axes):
    ax = axes[0, 0]
    ax.scatter(*places.T, s=0)
    zoom = 30. / max(images.shape[1:3])
    for place, image in zip(places, images, strict=True):
      ax.add_artist(AnnotationBbox(OffsetImage(image, zoom=zoom), tuple(place), frameon=False))
    ax.margins(.06)
    ax.set_xticks([])
    ax.set_yticks([])
    ax.set_title(title, fontsize=9)
    return _png(figure)


def scatter(places: HostArray, labels: Sequence[str], *, title: str) -> bytes:
  """Images as points `[S, 2]`, coloured by their label where there are at most eight, else numbered by marker."""
  names = list(dict.fromkeys(labels))
  with _canvas((5.6, 4.6)) as (figure, axes):
    ax = axes[0, 0]
    for number, name in enumerate(names):
      own = np.array([label == name for label in labels])
      ax.scatter(*places[own].T, s=16, color=COLORS[number % 8], marker='os^Dv*PX'[number // 8 % 8],
                 label=_short(name, 24), linewidths=0)
    ax.set_xticks([])
    ax.set_yticks([])
    ax.set_title(title, fontsize=9)
    if 1 < len(names) <= 24:
      ax.legend(frameon=False, fontsize=6.5, loc='center left', bbox_to_anchor=(1, .5))
    return _png(figure)


def shade(image: HostArray, heat: HostArray) -> HostArray:
  """`image [H, W, 3]` uint8 dimmed where `heat [h, w]` is low, as in the ViT paper's Figure 6; uint8.

  The map is scaled so that its largest 3 % are fully lit, and enlarged with linear interpolation.
  """
  return np.round(image * enlarge(heat / max(_bright(heat), 1e-12), image.shape[:2])[..., None]).astype(np.uint8)


def overlay(image: HostArray, heat: HostArray, *, opacity: float = .55) -> HostArray:
  """`image [H, W, 3]` uint8 under the colours of `heat [h, w]`, from its least value to its largest 3 %; uint8."""
  import matplotlib
  scaled = (heat - heat.min()) / max(_bright(heat) - float(heat.min()), 1e-12)
  colors = matplotlib.colormaps['inferno'](enlarge(scaled, image.shape[:2]))[..., :3]
  return np.round(255 * ((1 - opacity) * image / 255. + opacity * colors)).astype(np.uint8)


def _bright(heat: HostArray) -> float:
  """The value that 3 % of the cells exceed, so that a few tokens that gather attention do not hide the others.

  Where fewer than that are above all others, as in a thresholded map, it is the largest.
  """
  found = float(np.quantile(heat, .97))
  return found if found > float(heat.min()) else float(heat.max())


def enlarge(heat: HostArray, size: tuple[int, int]) -> HostArray:
  """`[h, w]` in [0, 1] at `size` (height, width), linear between the centres of cells; f64."""
  from PIL import Image
  picture = Image.fromarray(np.asarray(heat, np.float32))
  return np.clip(np.asarray(picture.resize(size[::-1], Image.Resampling.BILINEAR), np.float64), 0, 1)


def blocks(values: HostArray, size: tuple[int, int]) -> HostArray:
  """`[h, w, 3]` in [0, 1] as even blocks at `size`; uint8."""
  from PIL import Image
  picture = Image.fromarray(np.uint8(np.round(255 * values)))
  return np.asarray(picture.resize(size[::-1], Image.Resampling.NEAREST))


@contextlib.contextmanager
def _canvas(size: tuple[float, float], shape: tuple[int, int] = (1, 1)) -> Iterator[tuple[Figure, Any]]:
  """A figure of no window with its axes `[rows, columns]`."""
  import matplotlib
  from matplotlib.figure import Figure
  with matplotlib.rc_context({'font.size': 8, 'axes.linewidth': .6, 'axes.formatter.useoffset': False}):
    figure = Figure(figsize=size, layout='constrained', dpi=_DPI)
    yield figure, figure.subplots(*shape, squeeze=False)


def _plot(ax: Axes, curves: Mapping[str, tuple[HostArray, HostArray]]) -> None:
  """Curves `(x [n], y [n])` by name; few points are marked."""
  for number, (name, (x, y)) in enumerate(curves.items()):
    ax.plot(x, y, color=COLORS[number % len(COLORS)], linewidth=1.4, label=name, marker='o' if len(x) < 40 else None,
            markersize=3)


def _dress(ax: Axes, *, xlabel: str, ylabel: str, title: str, legend: bool) -> None:
  ax.set_xlabel(xlabel)
  ax.set_ylabel(ylabel)
  ax.set_title(title, fontsize=9)
  ax.grid(alpha=.25)
  ax.spines[['top', 'right']].set_visible(False)
  if legend:
    ax.legend(frameon=False)


def _png(figure: Figure) -> bytes:
  buffer = io.BytesIO()
  figure.savefig(buffer, format='png', metadata={'Software': None})
  return buffer.getvalue()


def _short(text: str, length: int) -> str:
  return text if len(text) <= length else text[:length - 1] + '…'
