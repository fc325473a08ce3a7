"""The figures of an inspection, as PNG files with labels on white.

Each function takes arrays and returns the bytes of a file. Pixels of images stay square. The module knows nothing about
models and files. matplotlib is imported when the first figure is drawn.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vit_jax.core.types import HostArray
from vit_jax.inspect import plotting, sheets

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

RECONSTRUCTION_COLUMNS = ('input', 'masked', 'prediction', 'prediction where masked')
_MASKED = 128  # gray level of masked patches
_OPACITY = .55  # of the colors over an image
_DEPTHS = 'viridis'  # color map of lines by depth, and of tables


def position_tiles(similarity: HostArray) -> bytes:
  """Draws cosine similarities `[h, w, h, w]` with one tile for each position, at its place in the image."""
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
    ax.set_title('Position embedding similarity', fontsize=10)
    return sheets.encode(figure)


def heads_by_depth(values: Mapping[str, HostArray], *, ylabel: str, title: str) -> bytes:
  """Draws a dot for each head over the depth of its block, and a line through their means.

  Args:
    values: `[L, A]` by name of the model.
    ylabel: with the unit.
    title: of the figure.
  """
  with _canvas((5.2, 3.4)) as (figure, axes):
    ax = axes[0, 0]
    for number, (name, table) in enumerate(values.items()):
      depth, color = np.arange(1, len(table) + 1), plotting.COLORS[number % len(plotting.COLORS)]
      ax.plot(np.repeat(depth, table.shape[1]), table.reshape(-1), 'o', color=color, markersize=3, alpha=.55,
              markeredgewidth=0)
      ax.plot(depth, table.mean(1), color=color, linewidth=1.4, label=name)
    ax.locator_params(axis='x', integer=True)
    _finish(ax, xlabel='block', ylabel=ylabel, title=title, legend=len(values) > 1)
    ax.set_ylim(bottom=0.)
    return sheets.encode(figure)


def lines(curves: Mapping[str, tuple[HostArray, HostArray]], *, xlabel: str, ylabel: str, title: str) -> bytes:
  """Draws curves `(x [n], y [n])` by name; x are whole numbers."""
  with _canvas((5.2, 3.4)) as (figure, axes):
    _plot(axes[0, 0], curves)
    axes[0, 0].locator_params(axis='x', integer=True)
    _finish(axes[0, 0], xlabel=xlabel, ylabel=ylabel, title=title, legend=len(curves) > 1)
    return sheets.encode(figure)


def panels(tables: Mapping[str, tuple[str, Mapping[str, tuple[HostArray, HostArray]]]], *, xlabel: str,
           is_log: bool) -> bytes:
  """Draws panels side by side: title to label of the y axis and curves `(x [n], y [n])` by name; `is_log`: y axis."""
  with _canvas((4.6 * len(tables), 3.6), (1, len(tables))) as (figure, axes):
    for ax, (title, (ylabel, curves)) in zip(axes[0], tables.items(), strict=True):
      _plot(ax, curves)
      if is_log:
        ax.set_yscale('log')
      _finish(ax, xlabel=xlabel, ylabel=ylabel, title=title, legend=len(curves) > 1)
    return sheets.encode(figure)


def lines_by_depth(tables: Mapping[str, HostArray], x: Callable[[int], HostArray], *, xlabel: str, ylabel: str,
                   title: str) -> bytes:
  """Draws a panel for each model with a line for each depth of `[L + 1, n]`, colored by depth; `x(n)` are its x."""
  matplotlib = plotting.load()
  with _canvas((4.4 * len(tables) + .6, 3.4), (1, len(tables))) as (figure, axes):
    for ax, (name, table) in zip(axes[0], tables.items(), strict=True):
      colors = matplotlib.colormaps[_DEPTHS](np.linspace(0, .92, len(table)))
      for color, row in zip(colors, table, strict=True):
        ax.plot(x(len(row)), row, color=color, linewidth=1.2)
      _finish(ax, xlabel=xlabel, ylabel=ylabel, title=f'{title}: {name}' if len(tables) > 1 else title, legend=False)
      shade = matplotlib.cm.ScalarMappable(matplotlib.colors.Normalize(0, len(table) - 1), _DEPTHS)
      figure.colorbar(shade, ax=ax, label='after block (0: before the first)').ax.locator_params(axis='y', integer=True)
    return sheets.encode(figure)


def layer_similarity(values: HostArray, *, xlabel: str, ylabel: str) -> bytes:
  """Draws the CKA of layers, `[rows, columns]` between 0 and 1, as colors, the first row at the bottom."""
  with _canvas((4.4, 3.8)) as (figure, axes):
    image = axes[0, 0].imshow(values, origin='lower', vmin=0, vmax=1, cmap=_DEPTHS, interpolation='nearest')
    _finish(axes[0, 0], xlabel=xlabel, ylabel=ylabel, title='Similarity of layers (CKA)', legend=False)
    axes[0, 0].grid(False)
    axes[0, 0].locator_params(integer=True)
    figure.colorbar(image, ax=axes[0, 0], label='linear CKA')
    return sheets.encode(figure)


def scatter(points: HostArray, labels: Sequence[str], *, title: str) -> bytes:
  """Draws images as points `[S, 2]`; each label has a color, from the ninth label on with another marker."""
  names = list(dict.fromkeys(labels))
  with _canvas((5.6, 4.6), right_in=1.6 if 1 < len(names) <= 24 else .15) as (figure, axes):
    ax = axes[0, 0]
    for number, name in enumerate(names):
      own = np.array([label == name for label in labels])
      ax.scatter(*points[own].T, s=16, color=plotting.COLORS[number % 8], marker='os^Dv*PX'[number // 8 % 8],
                 label=sheets.shorten(name, 24), linewidths=0)
    ax.set_xticks([])
    ax.set_yticks([])
    ax.set_title(title, fontsize=10)
    if 1 < len(names) <= 24:
      ax.legend(frameon=False, fontsize=7, loc='center left', bbox_to_anchor=(1, .5))
    return sheets.encode(figure)


def shade(image: HostArray, heat: HostArray) -> HostArray:
  """Returns `image [H, W, 3]` uint8 dimmed where `heat [h, w]` is low, as in the ViT paper's Figure 6; uint8.

  The map is scaled so that the largest 3 % have full brightness, and enlarged by linear interpolation.
  """
  return np.round(image * enlarge(heat / max(_bright(heat), 1e-12), image.shape[:2])[..., None]).astype(np.uint8)


def overlay(image: HostArray, heat: HostArray) -> HostArray:
  """Returns `image [H, W, 3]` uint8 under the colors of `heat [h, w]`, from its minimum to its largest 3 %; uint8."""
  matplotlib = plotting.load()
  scaled = (heat - heat.min()) / max(_bright(heat) - float(heat.min()), 1e-12)
  colors = matplotlib.colormaps['inferno'](enlarge(scaled, image.shape[:2]))[..., :3]
  return np.round(255 * ((1 - _OPACITY) * image / 255. + _OPACITY * colors)).astype(np.uint8)


def _bright(heat: HostArray) -> float:
  """Returns the value that 3 % of the cells exceed, so that a few tokens with very high attention do not hide the rest.

  If that is also the minimum, as in a thresholded map, it is the maximum.
  """
  found = float(np.quantile(heat, .97))
  return found if found > float(heat.min()) else float(heat.max())


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


def reconstruction_columns(image: HostArray, predicted: HostArray, hidden: HostArray) -> list[HostArray]:
  """Returns an image for each of `RECONSTRUCTION_COLUMNS`, all `[H, W, 3]` u8 (MAE, arXiv 2111.06377, Figure 2)."""
  hidden = hidden[..., None]
  return [image, np.where(hidden, np.uint8(_MASKED), image), predicted, np.where(hidden, predicted, image)]


def reconstruction_sheet(images: HostArray, found: Reconstruction, captions: Sequence[str]) -> bytes:
  """Draws a row for each of the images `[K, H, W, 3]` u8."""
  rows = [reconstruction_columns(*each) for each in zip(images, found.predicted, found.hidden, strict=True)]
  return sheets.contact_sheet(rows, captions=captions, heads=RECONSTRUCTION_COLUMNS)


@contextlib.contextmanager
def _canvas(size: tuple[float, float], shape: tuple[int, int] = (1, 1), *,
            right_in: float = .15) -> Iterator[tuple[Figure, Any]]:
  """Yields a figure without a window, and its axes `[rows, columns]`, with room for their labels.

  The room is fixed, `right_in` inches at the right: matplotlib would draw every text several times to measure it.
  """
  matplotlib = plotting.load()
  from matplotlib.figure import Figure
  with matplotlib.rc_context({'font.size': 9, 'axes.linewidth': .6, 'axes.formatter.useoffset': False}):
    figure = Figure(figsize=size, dpi=sheets.DPI)
    axes = figure.subplots(*shape, squeeze=False)
    (width, height), columns = size, shape[1]
    figure.subplots_adjust(left=.72 / width, right=1 - right_in / width, bottom=.52 / height, top=1 - .32 / height,
                           wspace=.85 / (width / columns - .9))
    yield figure, axes


def _plot(ax: Axes, curves: Mapping[str, tuple[HostArray, HostArray]]) -> None:
  """Draws curves `(x [n], y [n])` by name, with markers if there are few points."""
  for number, (name, (x, y)) in enumerate(curves.items()):
    ax.plot(x, y, color=plotting.COLORS[number % len(plotting.COLORS)], linewidth=1.4, label=name,
            marker='o' if len(x) < 40 else None, markersize=3)


def _finish(ax: Axes, *, xlabel: str, ylabel: str, title: str, legend: bool) -> None:
  ax.set_xlabel(xlabel)
  ax.set_ylabel(ylabel)
  ax.set_title(title, fontsize=10)
  ax.grid(alpha=.25)
  ax.spines[['top', 'right']].set_visible(False)
  if legend:
    ax.legend(frameon=False)
