"""SVG charts for HTML pages: curves, heat maps, confusion matrices.

A chart is inline SVG that takes its text colour from the page, so that it fits a light and a dark one. The module
knows nothing about runs or models. matplotlib is imported when the first chart is drawn.
"""
from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from markupsafe import Markup, escape

from vit_jax.core.types import HostArray
from vit_jax.inspect.figures import COLORS
from vit_jax.inspect.sheets import shorten

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.colors import Colormap
  from matplotlib.figure import Figure

_TEXT = '#010203'  # placeholder for the page's text colour until the SVG is written
_HEAT = (0.04, 0.52, 0.78)  # RGB of the highest value; the lowest is transparent
_MAX_POINTS = 2000  # of a curve: more than the chart has pixels
_SIZE = (4.6, 2.7)  # inches


class Curve(NamedTuple):
  """A line of a chart: `x [n]`, `y [n]`, both floats; values that are not finite leave a gap."""
  label: str
  x: Sequence[float]
  y: Sequence[float]


def draw_curves(curves: Sequence[Curve], *, xlabel: str, ylabel: str, log: bool) -> Markup:
  """Draws lines over a common x axis; with `log`, y is logarithmic if all values are positive."""
  with _figure(_SIZE) as (figure, ax):
    lowest = np.inf
    for number, curve in enumerate(curves):
      x, y = _thin(curve)
      finite = y[np.isfinite(y)]
      lowest = min(lowest, finite.min(initial=np.inf))
      marker = '.' if len(x) < 40 else None
      ax.plot(x, y, color=COLORS[number % len(COLORS)], label=curve.label, linewidth=1.4, marker=marker)
    if log and 0 < lowest < np.inf:
      ax.set_yscale('log')
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    ax.grid(alpha=0.25)
    ax.spines[['top', 'right']].set_visible(False)
    if len(curves) > 1:
      ax.legend(frameon=False, labelcolor=_TEXT)
    return _to_svg(figure, f'{ylabel} over {xlabel}')


def draw_heat_map(values: HostArray, *, rows: Sequence[str], xlabel: str, unit: str) -> Markup:
  """Draws `values [rows, columns]` as colours on a log scale; '0' marks a zero, a cross a value that is not finite."""
  values = np.asarray(values, np.float64)
  good = np.isfinite(values) & (values > 0)
  logs = np.where(good, np.log10(np.where(good, values, 1.)), np.nan)
  height = 0.9 + 0.19 * len(rows)
  with _figure((_SIZE[0], height)) as (figure, ax):
    image = ax.imshow(logs, aspect='auto', cmap=_heat_colors(), interpolation='nearest')
    ax.set_yticks(range(len(rows)), rows)
    ax.locator_params(axis='x', integer=True)
    ax.set_xlabel(xlabel)
    for row, column in np.argwhere(~good):
      mark, color = ('0', _TEXT) if values[row, column] == 0 else ('×', '#d64545')
      ax.text(column, row, mark, color=color, ha='center', va='center')
    bar = figure.colorbar(image, ax=ax, label=f'log10 {unit}')
    bar.outline.set_visible(False)
    return _to_svg(figure, f'{unit} by {xlabel}')


def draw_confusion(counts: HostArray, names: Sequence[str]) -> Markup:
  """Draws a confusion matrix `counts [C, C]`, labels in rows; colours show the share of the images with a label."""
  counts = np.asarray(counts)
  share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
  side = max(3.4, 1.2 + 0.23 * len(names))
  with _figure((side + 0.4, side)) as (figure, ax):
    ax.imshow(share, cmap=_heat_colors(), vmin=0, vmax=1, interpolation='nearest')
    short = [shorten(name, 18) for name in names]
    ax.set_xticks(range(len(names)), short, rotation=90 if max(map(len, short), default=0) > 2 else 0)
    ax.set_yticks(range(len(names)), short)
    ax.set_xlabel('predicted')
    ax.set_ylabel('label')
    for row, column in np.argwhere(counts > 0) if len(names) <= 20 else ():
      ax.text(column, row, str(counts[row, column]), ha='center', va='center', fontsize=7,
              color='#ffffff' if share[row, column] > 0.5 else _TEXT)
    return _to_svg(figure, 'confusion matrix')


@contextlib.contextmanager
def _figure(size: tuple[float, float]) -> Iterator[tuple[Figure, Axes]]:
  """Yields a figure without a window and without global state."""
  import matplotlib
  from matplotlib.figure import Figure
  keys = ('axes.edgecolor', 'axes.labelcolor', 'xtick.color', 'ytick.color', 'text.color', 'grid.color')
  settings: dict[str, object] = dict.fromkeys(keys, _TEXT)
  settings.update({'svg.fonttype': 'none', 'svg.hashsalt': 'figure', 'font.size': 9, 'axes.linewidth': 0.6,
                   'axes.formatter.useoffset': False})
  with matplotlib.rc_context(settings):  # type: ignore[arg-type]
    figure = Figure(figsize=size, layout='constrained')
    figure.patch.set_alpha(0)
    ax = figure.subplots()
    ax.patch.set_alpha(0)
    yield figure, ax


def _to_svg(figure: Figure, label: str) -> Markup:
  """Returns the figure as inline SVG: without prolog and metadata, and without ids that other charts also use."""
  buffer = io.StringIO()
  figure.savefig(buffer, format='svg')
  svg = buffer.getvalue()
  svg = svg[svg.index('<svg'):]
  svg = re.sub(r'<metadata>.*?</metadata>', '', svg, flags=re.DOTALL)
  svg = re.sub(r' xmlns(:\w+)?="[^"]*"', '', svg)
  width = float(re.search(r'width="([\d.]+)pt"', svg)[1])  # type: ignore[index]
  svg = re.sub(r'(<svg[^>]*?) width="[\d.]+pt"', rf'\1 style="max-width: {1.35 * width:0.0f}px"', svg, count=1)
  svg = re.sub(r'(<svg[^>]*?) height="[\d.]+pt"', r'\1', svg, count=1)
  used = set(re.findall(r'#([\w-]+)[")]', svg))
  svg = re.sub(r' id="([\w-]+)"', lambda found: found[0] if found[1] in used else '', svg)
  svg = re.sub(r'font: ([\d.]+px) [^;"]*', r'font-size: \1', svg)
  svg = svg.replace(_TEXT, 'currentColor')
  return Markup(svg.replace('<svg', f'<svg role="img" aria-label="{escape(label)}"', 1))


def _heat_colors() -> Colormap:
  from matplotlib.colors import LinearSegmentedColormap
  colors = LinearSegmentedColormap.from_list('heat', [(*_HEAT, 0.), (*_HEAT, 1.)])
  return colors.with_extremes(bad=(0, 0, 0, 0))


def _thin(curve: Curve) -> tuple[HostArray, HostArray]:
  """Returns the curve as arrays of at most `_MAX_POINTS` points; beyond that, neighbouring points are averaged."""
  x, y = np.asarray(curve.x, np.float64), np.asarray(curve.y, np.float64)
  y = np.where(np.isfinite(y), y, np.nan)
  group = -(-len(x) // _MAX_POINTS)
  if group <= 1:
    return x, y
  whole = len(x) // group * group
  return x[:whole].reshape(-1, group)[:, -1], y[:whole].reshape(-1, group).mean(1)
