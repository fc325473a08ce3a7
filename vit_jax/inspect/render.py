"""Pictures and pieces of a web page: curves, heat maps, tables, trees, the page around them.

Everything comes back as HTML text that needs nothing from elsewhere: SVG and PNG are inline. Figures take
their text colour from the page, so that they fit a light and a dark one. Knows nothing of runs or models.
matplotlib is imported when the first figure is drawn.
"""
from __future__ import annotations

import base64
import contextlib
import html
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vit_jax.core.types import HostArray

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.colors import Colormap
  from matplotlib.figure import Figure

# Readable on white and on near-black: Okabe and Ito 2008, without black and yellow, blue first.
_COLORS = ('#0a84c6', '#e0731d', '#159f78', '#c565a0', '#8c74d6', '#b08a00', '#56b4e9', '#d64545')
_TEXT = '#010203'  # stands for the page's text colour until the SVG is written
_HEAT = (.04, .52, .78)  # of the highest value; the lowest is transparent
_MAX_POINTS = 2000  # of a curve: more than the pixels of a figure
_SIZE = (4.6, 2.7)  # inches


class Curve(NamedTuple):
  """One line of a figure: `x [n]`, `y [n]`, both floats; values that are not finite leave a gap."""
  label: str
  x: Sequence[float]
  y: Sequence[float]


def draw_curves(curves: Sequence[Curve], *, xlabel: str, ylabel: str, log: bool) -> str:
  """Lines over a common x as SVG; with `log`, y is logarithmic where all values are positive."""
  with _figure(_SIZE) as (figure, ax):
    lowest = np.inf
    for number, curve in enumerate(curves):
      x, y = _thin(curve)
      finite = y[np.isfinite(y)]
      lowest = min(lowest, finite.min(initial=np.inf))
      marker = '.' if len(x) < 40 else None
      ax.plot(x, y, color=_COLORS[number % len(_COLORS)], label=curve.label, linewidth=1.4, marker=marker)
    if log and 0 < lowest < np.inf:
      ax.set_yscale('log')
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    ax.grid(alpha=.25)
    ax.spines[['top', 'right']].set_visible(False)
    if len(curves) > 1:
      ax.legend(frameon=False, labelcolor=_TEXT)
    return _to_svg(figure, f'{ylabel} over {xlabel}')


def draw_heat_map(values: HostArray, *, rows: Sequence[str], xlabel: str, unit: str) -> str:
  """`values [rows, columns]` as colours on a log scale; a 0 marks zero, a cross what is not finite."""
  values = np.asarray(values, np.float64)
  good = np.isfinite(values) & (values > 0)
  logs = np.where(good, np.log10(np.where(good, values, 1.)), np.nan)
  height = .9 + .19 * len(rows)
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


def draw_confusion(counts: HostArray, names: Sequence[str]) -> str:
  """A confusion matrix `counts [C, C]`, true classes in rows; coloured by the share of the true class."""
  counts = np.asarray(counts)
  share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
  side = max(3.4, 1.2 + .23 * len(names))
  with _figure((side + .4, side)) as (figure, ax):
    ax.imshow(share, cmap=_heat_colors(), vmin=0, vmax=1, interpolation='nearest')
    short = [_shorten(name, 18) for name in names]
    ax.set_xticks(range(len(names)), short, rotation=90 if max(map(len, short), default=0) > 2 else 0)
    ax.set_yticks(range(len(names)), short)
    ax.set_xlabel('predicted')
    ax.set_ylabel('true')
    for row, column in np.argwhere(counts > 0) if len(names) <= 20 else ():
      ax.text(column, row, str(counts[row, column]), ha='center', va='center', fontsize=7,
              color='#ffffff' if share[row, column] > .5 else _TEXT)
    return _to_svg(figure, 'confusion matrix')


def embed_image(image: HostArray, *, alt: str) -> str:
  """An `<img>` with `image [H, W, 3] uint8` inside as PNG; tiny ones are shown with square pixels."""
  image = np.asarray(image)
  if image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape or image.dtype != np.uint8:
    raise ValueError(f'an image of shape {image.shape} and type {image.dtype}; want [H, W, 3] uint8')
  import matplotlib.image
  buffer = io.BytesIO()
  matplotlib.image.imsave(buffer, image, format='png')
  kind = ' class="tiny"' if max(image.shape[:2]) <= 96 else ''
  data = base64.b64encode(buffer.getvalue()).decode()
  return f'<img{kind} src="data:image/png;base64,{data}" alt="{html.escape(alt)}">'


def make_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
  """A table; cells that hold numbers are aligned right. Scrolls by itself when too wide."""
  def make_cell(cell: object) -> str:
    kind = ' class="number"' if isinstance(cell, int | float) else ''
    return f'<td{kind}>{html.escape(format_value(cell))}</td>'
  is_number = [any(isinstance(row[i], int | float) for row in rows) for i in range(len(head))]
  titles = ''.join(f'<th{" class=number" if right else ""}>{html.escape(title)}</th>'
                   for title, right in zip(head, is_number, strict=True))
  body = ''.join(f'<tr>{"".join(map(make_cell, row))}</tr>' for row in rows)
  return f'<div class="scroll"><table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'


def make_tree(name: str, value: object, *, is_open: bool) -> str:
  """Nested mappings and lists that fold and unfold."""
  if isinstance(value, list) and not any(isinstance(item, dict | list) for item in value):
    value = ', '.join(map(format_value, value))
  if isinstance(value, list):
    value = dict(enumerate(value))
  if not isinstance(value, Mapping) or not value:
    shown = '' if isinstance(value, Mapping) else format_value(value)
    return f'<div><b>{html.escape(name)}</b> <code>{break_path(shown) or "–"}</code></div>'
  inner = ''.join(make_tree(str(key), item, is_open=False) for key, item in value.items())
  return f'<details{" open" if is_open else ""}><summary>{html.escape(name)}</summary>{inner}</details>'


def make_page(title: str, sections: Sequence[str]) -> str:
  """A whole HTML document around sections of HTML."""
  return ('<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
          f'<title>{html.escape(title)}</title>\n'
          '<meta name="viewport" content="width=device-width, initial-scale=1">'
          f'<link rel="icon" href="data:,">\n<style>{_STYLE}</style></head>\n<body><main>\n'
          + '\n'.join(sections) + '\n</main></body></html>\n')


def break_path(text: str) -> str:
  """Text as HTML whose lines may break within long paths and file names, at their joints and not inside a word."""
  return re.sub(r'(?<=\w)([/\\:=,]+|[_.-](?=[^\W\d]))', r'\1<wbr>', html.escape(text))


def format_value(value: object) -> str:
  """Text of a value for a person: four digits of a fraction, thousands set apart."""
  if isinstance(value, bool) or not isinstance(value, int | float):
    return str(value)
  if isinstance(value, int) or (np.isfinite(value) and value == int(value) and abs(value) < 1e15):
    return f'{int(value):,}'
  return f'{value:.4g}' if not 1e4 <= abs(value) < 1e15 else f'{value:,.0f}'


def to_float(value: object) -> float:
  """The number, also of text such as 'inf'; nan for what is none."""
  try:
    return float(value)  # type: ignore[arg-type]
  except (TypeError, ValueError):
    return math.nan


@contextlib.contextmanager
def _figure(size: tuple[float, float]) -> Iterator[tuple[Figure, Axes]]:
  """A figure that belongs to no window and no global state."""
  import matplotlib
  from matplotlib.figure import Figure
  keys = ('axes.edgecolor', 'axes.labelcolor', 'xtick.color', 'ytick.color', 'text.color', 'grid.color')
  settings: dict[str, object] = dict.fromkeys(keys, _TEXT)
  settings.update({'svg.fonttype': 'none', 'svg.hashsalt': 'figure', 'font.size': 9, 'axes.linewidth': .6,
                   'axes.formatter.useoffset': False})
  with matplotlib.rc_context(settings):  # type: ignore[arg-type]
    figure = Figure(figsize=size, layout='constrained')
    figure.patch.set_alpha(0)
    ax = figure.subplots()
    ax.patch.set_alpha(0)
    yield figure, ax


def _to_svg(figure: Figure, label: str) -> str:
  """The figure as SVG to stand in a page: no prolog, no metadata, no names that other figures use too."""
  buffer = io.StringIO()
  figure.savefig(buffer, format='svg')
  svg = buffer.getvalue()
  svg = svg[svg.index('<svg'):]
  svg = re.sub(r'<metadata>.*?</metadata>', '', svg, flags=re.DOTALL)
  svg = re.sub(r' xmlns(:\w+)?="[^"]*"', '', svg)
  width = float(re.search(r'width="([\d.]+)pt"', svg)[1])  # type: ignore[index]
  svg = re.sub(r'(<svg[^>]*?) width="[\d.]+pt"', rf'\1 style="max-width: {1.35 * width:.0f}px"', svg, count=1)
  svg = re.sub(r'(<svg[^>]*?) height="[\d.]+pt"', r'\1', svg, count=1)
  used = set(re.findall(r'#([\w-]+)[")]', svg))
  svg = re.sub(r' id="([\w-]+)"', lambda found: found[0] if found[1] in used else '', svg)
  svg = re.sub(r'font: ([\d.]+px) [^;"]*', r'font-size: \1', svg)
  svg = svg.replace(_TEXT, 'currentColor')
  return svg.replace('<svg', f'<svg role="img" aria-label="{html.escape(label)}"', 1)


def _heat_colors() -> Colormap:
  from matplotlib.colors import LinearSegmentedColormap
  colors = LinearSegmentedColormap.from_list('heat', [(*_HEAT, 0.), (*_HEAT, 1.)])
  return colors.with_extremes(bad=(0, 0, 0, 0))


def _thin(curve: Curve) -> tuple[HostArray, HostArray]:
  """The curve as arrays with at most `_MAX_POINTS` points, means of neighbours where there are more."""
  x, y = np.asarray(curve.x, np.float64), np.asarray(curve.y, np.float64)
  y = np.where(np.isfinite(y), y, np.nan)
  group = -(-len(x) // _MAX_POINTS)
  if group <= 1:
    return x, y
  whole = len(x) // group * group
  return x[:whole].reshape(-1, group)[:, -1], y[:whole].reshape(-1, group).mean(1)


def _shorten(text: str, length: int) -> str:
  return text if len(text) <= length else text[:length - 1] + '…'


_STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --page: #fff; --quiet: #5c6670; --line: #d8dee4;
  --card: #f5f7f9; --good: #128a5f; --bad: #c93c37; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e8ec; --page: #14181d; --quiet: #9aa5b1;
  --line: #343c45; --card: #1d232a; --good: #3fc48f; --bad: #f0716b; } }
* { box-sizing: border-box; }
body { margin: 0; font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page); }
main { max-width: 1120px; margin: 0 auto; padding: 20px 16px 60px; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: .4em 0 .1em; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2em 0 .6em; padding-bottom: .25em; border-bottom: 1px solid var(--line); }
h3 { font-size: .95rem; margin: 0 0 .4em; font-weight: 600; }
.right, .wrong { margin-top: 1.6em; } .right { color: var(--good); } .wrong { color: var(--bad); }
.quiet, figcaption { color: var(--quiet); }
.figures { display: grid; gap: 24px 28px;
  grid-template-columns: repeat(auto-fit, minmax(min(330px, 100%), 1fr)); }
.figures > * { min-width: 0; } svg { width: 100%; height: auto; font-family: system-ui, sans-serif; }
.keys { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 10px;
  margin-top: 18px; }
.key { background: var(--card); border-radius: 8px; padding: 10px 14px; }
.key b { display: block; font-size: 1.3rem; line-height: 1.35; font-weight: 600; overflow-wrap: anywhere; }
.key span { color: var(--quiet); font-size: .85rem; }
.examples { display: grid; grid-template-columns: repeat(auto-fill, minmax(130px, 1fr)); gap: 14px; }
.examples figure { margin: 0; background: var(--card); border-radius: 8px; overflow: hidden; }
.examples img { width: 100%; aspect-ratio: 1; object-fit: contain; display: block; background: #0002; }
.plates { display: grid; gap: 22px; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); }
.plates figure { margin: 0; min-width: 0; } .plates img { max-width: 100%; background: #fff; border-radius: 8px; }
.plates .sheet { grid-column: 1 / -1; overflow-x: auto; }
.plates .sheet img { min-width: 700px; width: 100%; max-width: 1000px; }
.tiny { image-rendering: pixelated; }
figcaption { font-size: .82rem; line-height: 1.4; padding: 7px 9px; overflow-wrap: break-word; }
figcaption b { color: var(--text); } figcaption .wrong { color: var(--bad); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; }
th, td { text-align: left; padding: 4px 18px 4px 0; border-bottom: 1px solid var(--line); }
th { color: var(--quiet); font-weight: 500; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
details > details, details > div { margin-left: 1.2em; } summary { cursor: pointer; }
code, pre { font: .87em ui-monospace, Menlo, Consolas, monospace; overflow-wrap: break-word; }
pre { white-space: pre-wrap; background: var(--card); border-radius: 8px; padding: 10px 14px; }
"""
