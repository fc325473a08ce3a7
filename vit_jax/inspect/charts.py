"""SVG charts for HTML pages: curves, heat maps, confusion matrices.

A chart is inline SVG that takes its text color from the page, so that it fits a light and a dark one. Legends are
HTML, so that long names wrap. The templates `curves.svg` and `cells.svg` draw what is laid out here. The module knows
nothing about runs or models.

matplotlib is not used here: its SVG has neither the values under the pointer nor the colors of the page, is two
to four times as large, and takes several times as long, which the live page would wait for.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from vit_jax.core.types import HostArray
from vit_jax.inspect import html_pages
from vit_jax.inspect.figures import COLORS, shorten

WIDTH = 440  # of a chart, in units of 1/12 of the height of its text
_HEIGHT = 250
_LETTER = 7.  # mean width of a letter of text in a wide font, in the same units
_MAX_POINTS = 600  # of a curve: more than the chart has pixels
_DASHES = (('', 'solid'), ('6 3', 'dashed'), ('1.5 3', 'dotted'))
"""Of lines whose colors are used again, in the chart and in its legend."""
_FEW = 40  # points, up to which each has a mark with its value
_MOST_TICKS = 6  # of an axis
_SUPERSCRIPTS = str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹')


def linear_ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
  """Returns at most `_MOST_TICKS` multiples of 1, 2, 2.5 or 5 times a power of ten between `low` and `high`.

  Args:
    low, high: the range, `low < high`.
    whole: whole numbers only.
  """
  least = (high - low) / (_MOST_TICKS - 1) * (1 - 1e-9)
  least = max(least, 1.) if whole else least
  power = 10. ** math.floor(math.log10(least))
  step = next(step for step in (power, 2 * power, 2.5 * power, 5 * power, 10 * power)
              if step >= least and not (whole and step % 1))
  first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
  return [number * step for number in range(first, last + 1)]


def logarithmic_ticks(low: float, high: float) -> list[float]:
  """Returns at most `_MOST_TICKS` values between `low` and `high`: powers of ten, with round multiples if few.

  Args:
    low, high: the range, `0 < low < high`.
  """
  powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
  for factors, stride in (((1., 2., 5.), 1), ((1., 3.), 1), *(((1.,), stride) for stride in range(1, len(powers) + 1))):
    found = [factor * 10. ** power for power in powers if power % stride == 0 for factor in factors]
    inside = [tick for tick in found if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
    if len(inside) <= _MOST_TICKS:
      break
  return inside if len(inside) > 1 else linear_ticks(low, high)


def tick_text(value: float) -> str:
  """Returns a tick as text: 0.25, 1,500, 20k, 3M, 2·10⁻⁵."""
  size = abs(value)
  if value and size < 1e-4:
    power = math.floor(math.log10(size) + 1e-9)
    factor = f'{value / 10. ** power:.3g}'
    return f'{"" if factor == "1" else factor + "·"}10{str(power).translate(_SUPERSCRIPTS)}'
  for unit, name in ((1e9, 'G'), (1e6, 'M'), (1e4, 'k')):
    if size >= unit:
      return f'{value / (1e3 if name == "k" else unit):.4g}{name}'
  return f'{value:,.6g}'


class Curve(NamedTuple):
  """A line of a chart: `x [n]`, `y [n]`, both floats; values that are not finite leave a gap.

  raw: `y` before it was smoothed, drawn faintly behind it; empty if it was not.
  """
  label: str
  x: Sequence[float]
  y: Sequence[float]
  raw: Sequence[float] = ()


class _Axis(NamedTuple):
  """An axis: its range, whether it is logarithmic, and the range of its positions."""
  low: float
  high: float
  is_log: bool
  begin: float
  end: float

  def at(self, value: float) -> float:
    """Returns the position of a value."""
    low, high, value = (math.log(v) if self.is_log else v for v in (self.low, self.high, value))
    return round(self.begin + (self.end - self.begin) * (value - low) / (high - low), 1)

  def ticks(self, *, whole: bool = False) -> list[tuple[float, str]]:
    """Returns positions and texts."""
    found = (logarithmic_ticks(self.low, self.high) if self.is_log
             else linear_ticks(self.low, self.high, whole=whole))
    return [(self.at(value), tick_text(value)) for value in found]


def draw_curves(curves: Sequence[Curve], *, xlabel: str, ylabel: str, log: bool) -> Markup:
  """Draws lines over a common x axis; with `log`, y is logarithmic if all values are positive."""
  arrays = [(_thin(curve.x, curve.y), _thin(curve.x, curve.raw) if len(curve.raw) else None) for curve in curves]
  every = [pair for smooth, raw in arrays for pair in (smooth, raw) if pair is not None]
  x, y = (np.concatenate([pair[axis] for pair in every]) for axis in (0, 1))
  y = y[np.isfinite(y)]
  down = _axis(y, is_log=log and bool(len(y)) and y.min() > 0, begin=_HEIGHT - 34., end=24.)
  left = 14 + _LETTER * max(len(text) for _, text in down.ticks())
  across = _axis(x, is_log=False, begin=left, end=WIDTH - 12., pad=0.)

  def path(points: tuple[HostArray, HostArray]) -> str:
    """Returns points as the `d` of a path; a gap begins a new part."""
    parts, pen = [], 'M'
    for x, y in zip(*points, strict=True):
      parts += [f'{pen}{across.at(x):g} {down.at(y):g}'] if np.isfinite(y) else []
      pen = 'L' if np.isfinite(y) else 'M'
    return ''.join(parts)

  lines: list[dict[str, Any]] = []
  for number, (curve, (smooth, raw)) in enumerate(zip(curves, arrays, strict=True)):
    shown = [(x, y, html_pages.format_value(float(y))) for x, y in zip(*smooth, strict=True) if np.isfinite(y)]
    dash, border = _DASHES[number // len(COLORS) % len(_DASHES)]
    lines.append({
        'label': curve.label, 'color': COLORS[number % len(COLORS)], 'dash': dash, 'border': border,
        'path': path(smooth), 'raw': path(raw) if raw else '', 'last': shown[-1][2] if shown else '',
        'marks': [(across.at(x), down.at(y), f'{x:,.6g}: {text}') for x, y, text in shown if len(shown) < _FEW]})
  return Markup(html_pages.render(
      'curves.svg', label=f'{ylabel} over {xlabel}', full=WIDTH, height=_HEIGHT, left=left, right=WIDTH - 12,
      down=down.ticks(), across=across.ticks(whole=True), xlabel=xlabel, ylabel=ylabel, lines=lines))


class _Cell(NamedTuple):
  """A cell of a table of colors: `share` from 0 to 1 is its color, `mark` is on it, and `text` is under the pointer."""
  row: int
  column: int
  share: float
  mark: str
  text: str


def draw_heat_map(values: HostArray, *, rows: Sequence[str], xlabel: str, unit: str) -> Markup:
  """Draws `values [rows, columns]` as colors on a log scale; '0' marks a zero, a cross a value that is not finite.

  The lowest tenth of the values has the palest color, as a few that are nearly 0 would hide the differences of all
  others. Columns count from 1.
  """
  values = np.asarray(values, np.float64)
  good = np.isfinite(values) & (values > 0)
  logs = np.log10(np.where(good, values, 1.))
  low, high = np.quantile(logs[good], (.1, 1.)).tolist() if good.any() else (0., 0.)
  share = np.where(good, np.clip((logs - low) / (high - low), .05, 1.) if high > low else 1., 0.)
  cells = [_Cell(row, column, float(share[row, column]), '' if good[row, column] else '0' if value == 0 else '×',
                 f'{rows[row]}, {xlabel} {column + 1}: {html_pages.format_value(float(value))}')
           for (row, column), value in np.ndenumerate(values)]
  names, num_columns = [shorten(name, 34) for name in rows], values.shape[1]
  left = min(14 + _LETTER * max(map(len, names)), .55 * WIDTH)
  width = min((WIDTH - 8 - left) / num_columns, 48.)
  every = max(1, math.ceil((3 + len(str(num_columns))) * _LETTER / width))
  least, most = (tick_text(float(f'{10**power:.2g}')) for power in (low, high))
  return Markup(html_pages.render(
      'cells.svg', label=f'{unit} by {xlabel}', full=WIDTH, left=left, side=17., width=width, rows=names,
      columns={column: column + 1 for column in range(0, num_columns, every)}, num_columns=num_columns, cells=cells,
      xlabel=xlabel, ylabel='', turned=0., scale=(f'≤ {least}', f'{most} {unit}')))


def draw_confusion(counts: HostArray, names: Sequence[str]) -> Markup:
  """Draws a confusion matrix `counts [C, C]`, labels in rows; colors show the share of the images with a label."""
  counts = np.asarray(counts)
  share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
  has_numbers = len(names) <= 20
  cells = [_Cell(row, column, max(float(share[row, column]), .06), f'{counts[row, column]}' if has_numbers else '',
                 f'{names[row]}, predicted {names[column]}: {counts[row, column]:,} of {counts[row].sum():,} images')
           for row, column in np.argwhere(counts > 0).tolist()]
  short = [shorten(name, 18) for name in names]
  longest = max(map(len, short), default=0)
  left = 26 + _LETTER * longest
  side = max(12., min(30., (WIDTH - left - 8) / len(names)))
  turned = _LETTER * longest if _LETTER * longest > side - 3 else 0.  # names are upright unless they would overlap
  return Markup(html_pages.render(
      'cells.svg', label='confusion matrix', full=left + len(names) * side + 8, left=left, side=side, width=side,
      rows=short, columns=dict(enumerate(short)), num_columns=len(short), cells=cells, xlabel='predicted',
      ylabel='label', turned=turned, scale=()))


def _axis(values: HostArray, *, is_log: bool, begin: float, end: float, pad: float = .05) -> _Axis:
  """Returns an axis of the finite values, with a margin of the share `pad` at both ends."""
  low, high = (float(values.min()), float(values.max())) if len(values) else (0., 1.)
  if high <= low:
    low, high = (low / 2, high * 2) if is_log else (low - (abs(low) / 10 or 1.), high + (abs(high) / 10 or 1.))
  elif is_log:
    low, high = low * (low / high)**pad, high * (high / low)**pad
  else:
    low, high = low - pad * (high - low), high + pad * (high - low)
  return _Axis(low, high, is_log, begin, end)


def _thin(steps: Sequence[float], values: Sequence[float]) -> tuple[HostArray, HostArray]:
  """Returns a curve as arrays of at most `_MAX_POINTS` points; beyond that, neighboring points are averaged."""
  x, y = np.asarray(steps, np.float64), np.asarray(values, np.float64)
  y = np.where(np.isfinite(y), y, np.nan)
  group = -(-len(x) // _MAX_POINTS)
  if group <= 1:
    return x, y
  ends = np.arange(len(x), 0, -group)[::-1]  # the first group may be smaller
  starts = np.append(0, ends[:-1])
  return x[ends - 1], np.add.reduceat(y, starts) / (ends - starts)
